r"""The inverse for tensors whose values may be looked at: float32 while it is accurate, float64 when it is not.

The price of conditioning is one small inverse. An explicit inverse by `cholesky_inverse` and one product is several times
cheaper than triangular solves with row-major right-hand sides, and no less accurate here: the relative error of either is
about $ε · κ$ with $κ ≤ 1 + \operatorname{tr}(s\,x x^\top)$. The trace costs next to nothing and decides the precision.
"""

import functools
import math
import warnings

import torch
from jaxtyping import Float
from torch import Tensor

from isaac_newton import equations

__all__ = ["inverse"]

#: Largest trace for which float32 keeps the relative error of the result below 1e-4 with a margin (measured: at most
#: 1.5 · trace · 2⁻²⁴, reached with two equal rows; see tests/test_accuracy.py).
FLOAT32_TRACE = 512.0


def inverse(x: Float[Tensor, "*groups k l"], scale: float) -> tuple[Float[Tensor, "*groups k k"] | None, int]:
    """(I + s·x xᵀ)⁻¹, or None if `x` is not finite, and the number of failed factorizations."""
    identity = _identity(x.shape[-2], x.dtype)
    if x.dim() == 2:
        matrix = torch.addmm(identity, x, x.mT, alpha=scale)
        trace = matrix.trace().item()
    else:
        matrix = torch.baddbmm(identity, x, x.mT, alpha=scale)
        trace = matrix.diagonal(dim1=-2, dim2=-1).sum(-1).amax().item()
    # Of I + s·x xᵀ, so the size of the identity comes off.
    if trace - x.shape[-2] <= FLOAT32_TRACE:
        factor, info = torch.linalg.cholesky_ex(matrix)
        if not (info if x.dim() == 2 else info.any()).item():
            return torch.cholesky_inverse(factor), 0
    return _careful(x.to(torch.float64), scale)


def _careful(x: Float[Tensor, "*groups k l"], scale: float) -> tuple[Float[Tensor, "*groups k k"] | None, int]:
    """The same where float32 will not do, and where a factorization failed."""
    trace = scale * x.square().sum((-2, -1)).amax().item()
    if not math.isfinite(trace):
        return None, 0
    if trace > FLOAT32_TRACE:
        precise = equations.inverse(x, scale)
        if precise.isfinite().all().item():
            return precise, 0
    # A factorization failed that should not have. A damping at which it cannot, whatever the rounding, is the next best.
    warnings.warn(
        "a factorization failed and was repeated with a larger damping; handle.statistics counts how often per layer",
        RuntimeWarning,
        stacklevel=2,
    )
    return equations.inverse(x, scale * min(1.0, FLOAT32_TRACE / trace)), 1


@functools.lru_cache(maxsize=32)
def _identity(size: int, dtype: torch.dtype) -> Tensor:
    return torch.eye(size, dtype=dtype)
