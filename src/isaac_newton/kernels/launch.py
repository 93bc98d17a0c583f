# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""What the Triton kernels have in common: how they are launched, and pieces that several are made of."""

from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["PIVOTS", "Launch", "kind_of_damping", "least_pivot", "outer", "remember"]

#: Of a matrix that is inverted, so many are swept at a time.
PIVOTS = 16
#: Batches of ever new sizes must not fill the memory.
_MOST_PLANS = 1024

_T = TypeVar("_T")


class Launch:
    """A kernel on a grid; past Triton's argument handling once it is compiled."""

    def __init__(self, kernel: Any, grid: tuple[int, int, int], warps: int, constants: dict[str, Any]) -> None:
        self._kernel, self._grid, self._warps, self._constants = kernel, grid, warps, constants
        self._run: Any = None

    def __call__(self, *arguments: Any) -> None:
        """Launch it."""
        if self._run is not None:
            self._run(*arguments, *self._constants.values())
            return
        compiled = self._kernel[self._grid](*arguments, **self._constants, num_warps=self._warps)
        if compiled is not None:  # it is, where Triton interprets
            self._run = compiled[self._grid]


def kind_of_damping(damping: float | Tensor) -> tuple[int, torch.dtype | None]:
    """What a kernel that takes a damping is compiled for."""
    return (damping.dim(), damping.dtype) if isinstance(damping, Tensor) else (-1, None)


def remember(plans: dict[Any, _T], key: object, plan: _T) -> _T:
    """The plan, which is found under this key from now on."""
    if len(plans) >= _MOST_PLANS:
        plans.clear()
    plans[key] = plan
    return plan


@triton.jit
def least_pivot(trace):
    """What stands for the identity beside a Gram matrix of this trace, and what no pivot is smaller than.

    Products are rounded by 2⁻²³ of the trace. Where rows repeat and that outweighs the identity, pivots would be noise, so
    that as much again is added; far below, nothing to speak of, since in a difference (Woodbury) it would be seen.
    """
    rounding = 1.1920929e-07 * trace
    return 1.0 + rounding * tl.minimum(rounding, 1.0)


@triton.jit
def outer(x, first, last, size, features, row_stride, feature_stride, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """The product x xᵀ over the features from the first to the last."""
    i = tl.arange(0, BLOCK)
    matrix = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(first, last, CHUNK):
        c = start + tl.arange(0, CHUNK)
        inside = (i[:, None] < size) & (c[None, :] < features)
        place = i[:, None].to(tl.int64) * row_stride + c[None, :].to(tl.int64) * feature_stride
        tile = tl.load(x + place, mask=inside, other=0.0)
        matrix = tl.dot(tile, tl.trans(tile), matrix, input_precision="tf32x3")
    return matrix
