"""Which layers can be conditioned, how, and why the others cannot."""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from torch import Tensor, nn

__all__ = ["Adapter", "find", "register"]

#: The forward pass of a layer, given the layer, its site and the arguments of its `forward`.
Adapter: TypeAlias = Callable[..., Tensor]
_AdapterT = TypeVar("_AdapterT", bound=Callable[..., Any])

_ADAPTERS: dict[type[nn.Module], Adapter] = {}

_RECURRENT = "its recurrent weights are applied inside one fused kernel; build it from cells of nn.Linear to condition it"
_NORMALIZATION = "normalization scales each feature by itself: there is no input matrix to condition with"
_NOT_YET = "no adapter for this layer type yet; its gradient stays plain"
_REASONS: dict[type[nn.Module], str] = {
    nn.RNNBase: _RECURRENT,
    nn.RNNCellBase: "the cell multiplies inputs and state inside one kernel; write it with two nn.Linear to condition it",
    nn.LayerNorm: _NORMALIZATION,
    nn.RMSNorm: _NORMALIZATION,
    nn.GroupNorm: _NORMALIZATION,
    nn.modules.batchnorm._NormBase: _NORMALIZATION,
    nn.Embedding: _NOT_YET,
    nn.EmbeddingBag: _NOT_YET,
    nn.modules.conv._ConvNd: _NOT_YET,
    nn.MultiheadAttention: "attention multiplies by its weights without calling its layers; no adapter for that yet",
    nn.Bilinear: "a product of two inputs has no single input matrix",
}


def register(layer_type: type[nn.Module]) -> Callable[[_AdapterT], _AdapterT]:
    """Make a function the adapter of a layer type.

    It is called as `adapter(layer, site, *args, **kwargs)` in place of `layer.forward(*args, **kwargs)`, in training only, and
    returns what `forward` would return.
    """

    def add(adapter: _AdapterT) -> _AdapterT:
        if layer_type in _ADAPTERS:
            raise ValueError(f"{layer_type.__name__} already has the adapter {_ADAPTERS[layer_type].__qualname__}")
        _ADAPTERS[layer_type] = adapter
        return adapter

    return add


def find(layer: nn.Module) -> Adapter | str:
    """The adapter for a layer, or the reason why it has none."""
    for base in type(layer).__mro__:
        if base in _ADAPTERS:
            if type(layer).forward is not base.forward:
                return (
                    f"{type(layer).__name__} has a forward of its own, which is not that of {base.__name__}; "
                    "give it an adapter with isaac_newton.layers.register"
                )
            if "forward" in vars(layer):
                return "its forward was already replaced on the instance; attach before whatever did that"
            return _ADAPTERS[base]
    for base in type(layer).__mro__:
        if base in _REASONS:
            return _REASONS[base]
    return f"{type(layer).__name__} is not a known layer type; give it an adapter with isaac_newton.layers.register"
