"""`F.linear` whose backward pass, torch's own, finds other rows where it saved its input.

A weight gradient is gᵀa, and a is what the forward pass saved. A saved-tensor hook that hands out (I + a aᵀ/(bλ))⁻¹ a instead
makes torch form ζ*, in C++, while input and bias gradients do not look at a at all. That spares the host a Python function in
the backward pass, which is most of what conditioning costs a small network on a GPU.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Replacement", "can_replace", "linear"]


def can_replace(input: Tensor, weight: Tensor) -> bool:
    """Whether a forward pass saves this input as it is, and saves it here."""
    return (
        input.dtype is weight.dtype
        # Half-precision rows would be rounded once more.
        and (input.dtype is torch.float32 or input.dtype is torch.float64)
        and not torch.is_autocast_enabled(input.device.type)
        and not torch._C._are_functorch_transforms_active()
        # Only the innermost hooks are called. Others (activation checkpointing, offloading) must see the tensor.
        and torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        and torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        and input.numel() > 0
    )


class Replacement(Protocol):
    """Keeps the rows that a forward pass saves, and says what its backward pass shall find instead."""

    @property
    def rows(self) -> Tensor | None:
        """What was saved; None before."""
        ...

    def saved(self, rows: Tensor) -> None:
        """These are the rows, without a graph."""
        ...

    def conditioned(self) -> Tensor:
        """What the backward pass gets, as a matrix; called where it forms the gradient of the weight."""
        ...


def linear(input: Tensor, weight: Tensor, bias: Tensor | None, replacement: Replacement) -> Tensor | None:
    """`F.linear`; None where the forward pass saved something else than its input, so that there is nothing to replace."""
    saved = _Saved(input, replacement)
    torch._C._autograd._push_saved_tensors_default_hooks(saved.pack, _unpack)
    try:
        output = F.linear(input, weight, bias)
    finally:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    return None if saved.tensor is None else output


class _Saved:
    """What stands in the graph for the input."""

    __slots__ = ("_pointer", "_replacement", "_version", "tensor")

    def __init__(self, input: Tensor, replacement: Replacement) -> None:
        self._pointer, self._replacement = input.data_ptr(), replacement
        self._version = 0
        self.tensor: Tensor | None = None

    def pack(self, tensor: Tensor) -> Any:
        """Keep the input; the weight is saved as it is."""
        if tensor.data_ptr() != self._pointer:
            return tensor
        self.tensor, self._version = tensor, tensor._version
        self._replacement.saved(tensor)
        return self

    def unpack(self) -> Tensor:
        """What the backward pass gets."""
        tensor = self.tensor
        assert tensor is not None
        if tensor._version != self._version:
            # Torch checks this only where there are no hooks.
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: the input of "
                f"a linear layer, {tuple(tensor.shape)}, is at version {tensor._version}, expected {self._version}"
            )
        # The last edge of either kind of product leads to the weight.
        weight = torch._C._current_autograd_node().next_functions[-1][0]
        if weight is None or not torch._C._will_engine_execute_node(weight):
            return tensor
        conditioned = self._replacement.conditioned()
        return conditioned if conditioned.dim() == tensor.dim() else conditioned.view(tensor.shape)


def _unpack(saved: Any) -> Tensor:
    return saved.unpack() if type(saved) is _Saved else saved
