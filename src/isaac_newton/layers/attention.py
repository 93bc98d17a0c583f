"""`nn.MultiheadAttention`, in all its forms: torch's own code, run with a conditioned `linear`.

Attention multiplies by its projections with `F.linear` on slices of packed weights, without calling any layer, so neither
hooks nor a replaced `forward` of a submodule would see it. Here the code of torch's forward pass runs unchanged over a copy
of its global names in which `linear` is ours: every form, mask and corner case is torch's, bit for bit.
"""

import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import activation

from isaac_newton.autograd import Site, linear
from isaac_newton.layers.registry import register

__all__: list[str] = []


@register(nn.MultiheadAttention, parts=("out_proj",), outputs=True)
def _attention(layer: nn.MultiheadAttention, site: Site, query: Tensor, *args: Any, **kwargs: Any) -> Any:
    projection = _PROJECTIONS.get(site)
    if projection is None:
        projection = _PROJECTIONS[site] = _Projection(site)
    projection.samples = query.shape[0 if layer.batch_first else 1] if query.dim() == 3 else 1
    return projection.forward(layer, query, *args, **kwargs)


class _Projection:
    """The `linear` that one attention layer uses, and torch's forward pass over it."""

    def __init__(self, site: Site) -> None:
        self.samples = 1
        self._site = weakref.ref(site)
        self.forward = _with_linear(self.linear)

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`F.linear`, conditioned."""
        samples, site = self.samples, self._site()
        assert site is not None

        def arrange(x: Tensor) -> tuple[Tensor, int]:
            # Inside, sequences are (length, samples, features), or flattened from that.
            return x.reshape(-1, samples, x.shape[-1]).transpose(0, 1)[None], 1

        return linear(input, weight, bias, site, arrange)


_PROJECTIONS: "weakref.WeakKeyDictionary[Site, _Projection]" = weakref.WeakKeyDictionary()


def _with_linear(replacement: Callable[..., Tensor]) -> Callable[..., Any]:
    """`nn.MultiheadAttention.forward` over global names in which `F.linear` is `replacement`."""
    names = {**vars(F), "linear": replacement}
    for helper in ("_in_projection_packed", "_in_projection", "multi_head_attention_forward"):
        names[helper] = _over(getattr(F, helper), names)
    functional = types.SimpleNamespace(**names)
    return _over(nn.MultiheadAttention.forward, {**vars(activation), "F": functional})


def _over(function: Callable[..., Any], names: dict[str, Any]) -> Callable[..., Any]:
    """The same code, looking its global names up in `names`."""
    plain = function if isinstance(function, types.FunctionType) else function.__wrapped__  # type: ignore[attr-defined]
    copy = types.FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    copy.__kwdefaults__ = plain.__kwdefaults__
    return copy
