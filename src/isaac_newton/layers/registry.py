"""Which layers can be conditioned, how, and why the others cannot."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import nn

from isaac_newton.core.distributed import is_sharded
from isaac_newton.torch_private import BATCH_NORMS, PARALLELIZED, is_flattened

__all__ = ["REASONS", "Adapter", "Registration", "find", "register"]

#: The forward pass of a layer where gradients are computed: called with the layer, its site and the arguments of its `forward`.
Adapter: TypeAlias = Callable[..., Any]
#: Whether ζ is served.
Outputs: TypeAlias = bool | Literal["empirical"]
_AdapterT = TypeVar("_AdapterT", bound=Callable[..., Any])


@dataclass(frozen=True)
class Registration:
    """An adapter and what it covers, as `register` was told."""

    adapter: Adapter
    parts: Sequence[str] = ()
    outputs: Outputs = False
    gathers: bool = True
    refuse: Callable[[Any], str | None] = lambda layer: None


_REGISTRY: dict[type[nn.Module] | str, Registration] = {}

_COMPLEX = "its weights are complex, and conditioners are made from real inputs"
_SPLIT = "tensor parallelism has split its weight over ranks, and a conditioner needs whole inputs and gradients"
_NORMALIZATION = "normalization scales each feature by itself: there is no input matrix to condition with"
#: Of types that no adapter will serve.
REASONS: dict[type, str] = {
    nn.LayerNorm: _NORMALIZATION,
    nn.RMSNorm: _NORMALIZATION,
    nn.GroupNorm: _NORMALIZATION,
    BATCH_NORMS: _NORMALIZATION,
    nn.PReLU: "an activation's slope has no input matrix to condition with",
    nn.Bilinear: "a product of two inputs has no single input matrix",
    nn.modules.lazy.LazyModuleMixin: "it has no weights yet; run one batch through the model before attaching",
}


def register(
    layer_type: type[nn.Module] | str,
    *,
    parts: Sequence[str] = (),
    outputs: Outputs = False,
    gathers: bool = True,
    refuse: Callable[[Any], str | None] = lambda layer: None,
) -> Callable[[_AdapterT], _AdapterT]:
    """Make a function the adapter of a layer type, and of its subclasses that keep its `forward`.

    The function is called as `adapter(layer, site, *args, **kwargs)` in place of `layer.forward(*args, **kwargs)` where
    gradients are computed, and returns what `forward` would return, computed from weights that went through
    `isaac_newton.condition`.

    Args:
        layer_type: The class, or its full name if importing it only to name it would be too much.
        parts: Submodules whose weights the adapter conditions too, though it does not call them.
        outputs: Whether the adapter serves ζ as well as ζ*, or does with output_curvature="empirical"; those built on
            `isaac_newton.condition` do not.
        gathers: Whether the adapter serves `when="step"` and `process_group`; those built on `isaac_newton.condition` do.
        refuse: Given a layer of the type, the reason why this one cannot be conditioned, or None.
    """
    known = isinstance(layer_type, type) and issubclass(layer_type, nn.Module) and layer_type is not nn.Module
    if not known and not isinstance(layer_type, str):
        raise TypeError(f"layer_type must be a class of nn.Module or the full name of one, got {layer_type!r}")
    if isinstance(parts, str) or not isinstance(parts, Sequence) or not all(isinstance(part, str) for part in parts):
        raise TypeError(f"parts must be names of submodules, got {parts!r}")
    if not callable(refuse):
        raise TypeError(f"refuse must be a function of the layer, got {refuse!r}")

    def add(adapter: _AdapterT) -> _AdapterT:
        if not callable(adapter):
            raise TypeError(f"an adapter must be a function, got {adapter!r}")
        if layer_type in _REGISTRY:
            raise ValueError(f"{layer_type} already has the adapter {_REGISTRY[layer_type].adapter.__qualname__}")
        _REGISTRY[layer_type] = Registration(adapter, tuple(parts), outputs, gathers, refuse)
        return adapter

    return add


def find(layer: nn.Module) -> Registration | str:
    """How to condition a layer, or the reason why not."""
    kind: Any = type(layer)
    for base in kind.__mro__:
        if base in REASONS:
            return REASONS[base]
        found = _REGISTRY.get(base) or _REGISTRY.get(f"{base.__module__}.{base.__qualname__}")
        if found is not None:
            if kind.forward is not base.forward:
                return (
                    f"{kind.__name__} has a forward of its own, which is not that of {base.__name__}; "
                    "give it an adapter with isaac_newton.register"
                )
            if "forward" in vars(layer):
                return "its forward was already replaced on the instance; attach before whatever did that"
            if any(parameter.is_complex() for parameter in layer.parameters()):
                return _COMPLEX
            if any(hasattr(part, PARALLELIZED) for part in layer.modules()) and any(map(is_sharded, layer.parameters())):
                return _SPLIT
            return found.refuse(layer) or found
    return _why_unknown(layer)


def _why_unknown(layer: nn.Module) -> str:
    """A layer of a type that nobody registered: whether an adapter would help depends on what it owns."""
    kind = type(layer).__name__
    if isinstance(layer, torch.jit.ScriptModule):
        return "torch.jit.script has compiled it, and runs no adapter: attach the model that it was made from"
    if any(is_flattened(p) for p in layer.parameters(recurse=False)):
        return "FSDP has made one vector of its weights: wrap with use_orig_params=True"
    owned = dict(layer.named_parameters(recurse=False))
    matrices = [f"{name!r} ({_shape(p)})" for name, p in owned.items() if sum(size != 1 for size in p.shape) > 1]
    if not matrices:
        return f"{kind} owns only vectors: there is no matrix to condition"
    if all(p.shape[0] == 1 for p in owned.values() if p.dim() > 2) and not any(p.dim() == 2 for p in owned.values()):
        return f"{kind} owns only vectors and tables that are added, {', '.join(matrices)}: no input is multiplied by them"
    return (
        f"{kind} is not a known layer type and owns {', '.join(matrices)}: where inputs are multiplied by that, give {kind} an "
        "adapter with isaac_newton.register; a table that is added stays plain"
    )


def _shape(parameter: nn.Parameter) -> str:
    return "×".join(map(str, parameter.shape))
