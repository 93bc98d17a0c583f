"""`nn.MultiheadAttention`, in all its forms: torch's own code, run with a conditioned `linear`.

Attention multiplies by its projections with `F.linear` on slices of packed weights, without calling any layer, so neither
hooks nor a replaced `forward` of a submodule would see it. Here the code of torch's forward pass runs unchanged over a copy
of its global names in which `linear` is ours: every form, mask and corner case is torch's, bit for bit.
"""

import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import activation

from isaac_newton.core.gradient import apply
from isaac_newton.core.layer import ConditionedLayer
from isaac_newton.core.operations import LINEAR
from isaac_newton.layers.borrowed import names_of, over
from isaac_newton.layers.registry import register

__all__: list[str] = []


@dataclass(frozen=True)
class _Sequences:
    """Inside, sequences are (length, samples, features), or flattened from that."""

    samples: int

    def __call__(self, x: Tensor) -> tuple[Tensor, int]:
        return x.reshape(-1, self.samples, x.shape[-1]).transpose(0, 1)[None], 1


class _Current(threading.local):
    """Whose forward pass is running in this thread, and over how many samples."""

    site: ConditionedLayer | None = None
    samples = 1


_CURRENT = _Current()


@register(nn.MultiheadAttention, parts=("out_proj",), outputs=True)
def _attention(layer: nn.MultiheadAttention, site: ConditionedLayer, query: Tensor, *args: Any, **kwargs: Any) -> Any:
    _CURRENT.site = site
    _CURRENT.samples = query.shape[0 if layer.batch_first else 1] if query.dim() == 3 else 1
    try:
        return _FORWARD(layer, query, *args, **kwargs)
    finally:
        _CURRENT.site = None


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, conditioned."""
    site, samples = _CURRENT.site, _CURRENT.samples
    assert site is not None

    return apply(LINEAR, input, weight, bias, site, _Sequences(samples))


def _with_linear(replacement: Callable[..., Tensor]) -> Callable[..., Any]:
    """`nn.MultiheadAttention.forward` over global names in which `F.linear` is `replacement`."""
    names = names_of(F, linear=replacement)
    for helper in ("_in_projection_packed", "_in_projection", "multi_head_attention_forward"):
        names[helper] = over(getattr(F, helper), names)
    return over(nn.MultiheadAttention.forward, names_of(activation, F=types.SimpleNamespace(**names)))


_FORWARD = _with_linear(_linear)
