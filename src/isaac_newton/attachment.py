"""What stands in for the forward pass of an attached layer."""

from typing import Any

import torch
from torch import Tensor, nn

from isaac_newton.curvature import Place
from isaac_newton.distributed import is_sharded
from isaac_newton.layers import Registration
from isaac_newton.settings import Settings
from isaac_newton.site import Site

__all__ = ["Attachment", "child"]


class Attachment(Site):
    """Stands in for `layer.forward` while a model is attached."""

    def __init__(self, name: str, settings: Settings, layer: nn.Module, registration: Registration) -> None:
        super().__init__(name, settings)
        self.layer = layer
        self.adapter = registration.adapter
        self.parts = {child(name, part): layer.get_submodule(part) for part in registration.parts}
        #: The parameters whose `.grad` tells whether anything was accumulated: those that the layer computes with and the
        #: optimizer holds. Under FSDP2 these are two, and gradients wait in places of its own.
        self._plain: dict[str, int] | None = self._identities()
        self._versions: dict[str, int] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy has parameters of its own, which are not there yet while it is made.
        super().__setstate__({**state, "_plain": None})

    def _identities(self) -> dict[str, int]:
        return {name: id(parameter) for name, parameter in self.layer.named_parameters() if not is_sharded(parameter)}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's forward pass: conditioned in training mode, the original one otherwise."""
        if self.layer.training and torch.is_grad_enabled():
            return self.adapter(self.layer, self, *args, **kwargs)
        return type(self.layer).forward(self.layer, *args, **kwargs)

    def place(self, weight: Tensor, *, transposed: bool = False, bias: Tensor | None = None) -> Place:
        """Which parameter this weight is, or is some rows of."""
        name, start, stop = _find(self.layer, weight)
        bias_name = None if bias is None else _find(self.layer, bias)[0]
        return Place(name, start, stop, transposed=transposed, bias=bias_name)

    def is_empty(self, place: Place) -> bool:
        """Whether surely no gradient was accumulated since the last step: there is none, or it was set to zero."""
        parameter = self.layer.get_parameter(place.parameter)
        self._plain = self._identities() if self._plain is None else self._plain
        if id(parameter) != self._plain.get(place.parameter):
            return False
        gradient = parameter.grad
        if gradient is None:
            return True
        if gradient._version == self._versions.get(place.parameter):
            return False  # as the last backward pass left it: looking would wait for the device
        return not (gradient._values() if gradient.is_sparse else gradient).any().item()

    def leaves(self, place: Place) -> None:
        """A backward pass is over: remember how it leaves the gradient."""
        gradient = self.layer.get_parameter(place.parameter).grad
        self._versions[place.parameter] = -1 if gradient is None else gradient._version


def _find(layer: nn.Module, tensor: Tensor) -> tuple[str, int, int]:
    """The name of the parameter that this tensor is, or a slice of whose rows it is, and which rows."""
    for name, parameter in layer.named_parameters():
        if tensor is parameter:
            return name, 0, len(parameter)
        if tensor._base is parameter and tensor.stride() == parameter.stride() and tensor.shape[1:] == parameter.shape[1:]:
            start, rest = divmod(int(tensor.storage_offset() - parameter.storage_offset()), parameter.stride(0))
            if rest == 0:
                return name, start, start + len(tensor)
    raise RuntimeError(
        f"a weight of this {type(layer).__name__} is neither a parameter nor some rows of one, so when='step' does not know "
        "whose gradient to condition; use when='backward'"
    )


def child(name: str, part: str) -> str:
    """The name of a part of a layer, as the model names it."""
    return f"{name}.{part}" if name else part
