r"""ζ* and ζ for tensors whose values may be looked at: float32 while it is accurate, float64 when it is not.

The price of conditioning is one small inverse. An explicit inverse by `cholesky_inverse` and one product is several times
cheaper than triangular solves with row-major right-hand sides, and no less accurate here: the relative error of either is
about $ε · κ$ with $κ ≤ 1 + \operatorname{tr}(s\,x x^\top)$. The trace costs a microsecond and decides the precision.
"""

import functools
import math
import warnings

import torch
from jaxtyping import Float
from torch import Tensor

from isaac_newton import equations

__all__ = ["zeta", "zeta_star"]

#: Largest trace for which float32 keeps the relative error of the result below 1e-4 with a margin of three (measured: at most
#: 1.5 · trace · 2⁻²⁴, reached with two equal rows; see tests/test_accuracy.py).
FLOAT32_TRACE = 512.0


def zeta_star(g: Float[Tensor, "rows out"], a: Float[Tensor, "rows in"], damping: float) -> tuple[Float[Tensor, "out in"], int]:
    """`equations.zeta_star`, and how many factorizations had to be repeated with a larger damping."""
    rows, features = a.shape
    if rows == 0 or features == 0 or damping == math.inf:
        return g.mT @ a, 0
    by_rows = rows < features
    conditioner, fallbacks = _inverse(a if by_rows else a.mT, 1 / (rows * damping))
    if conditioner is None:
        return g.mT @ a, fallbacks
    if conditioner.dtype != a.dtype:
        g, a = g.to(conditioner.dtype), a.to(conditioner.dtype)
    if not by_rows:
        return (g.mT @ a) @ conditioner, fallbacks
    if g.shape[1] <= features:
        return (conditioner @ g).mT @ a, fallbacks
    return g.mT @ (conditioner @ a), fallbacks


def zeta(
    g: Float[Tensor, "rows out"],
    gbar: Float[Tensor, "samples out"],
    a: Float[Tensor, "rows in"],
    output_damping: float,
    damping: float,
) -> tuple[Float[Tensor, "out in"], int]:
    """`equations.zeta`, and how many factorizations had to be repeated with a larger damping."""
    samples, outputs = gbar.shape
    if output_damping == math.inf or 0 in (a.shape[0], samples, outputs):
        return zeta_star(g, a, damping)
    scale = 1 / (a.shape[0] * output_damping)
    by_samples = samples < outputs
    conditioner, fallbacks = _inverse(gbar if by_samples else gbar.mT, scale)
    if conditioner is not None:
        g, gbar = g.to(conditioner.dtype), gbar.to(conditioner.dtype)
        if by_samples:
            g = torch.addmm(g, (g @ gbar.mT) @ conditioner, gbar, alpha=-scale)
        else:
            g = g @ conditioner
        g = g.to(a.dtype)
    conditioned, more = zeta_star(g, a, damping)
    return conditioned, fallbacks + more


def _inverse(x: Float[Tensor, "k l"], scale: float) -> tuple[Float[Tensor, "k k"] | None, int]:
    """(I + s·x xᵀ)⁻¹, or None if `x` is not finite, and the number of failed factorizations."""
    matrix = torch.addmm(_identity(x.shape[0], x.dtype), x, x.mT, alpha=scale)
    trace = matrix.trace().item() - x.shape[0]
    if trace <= FLOAT32_TRACE:
        factor, info = torch.linalg.cholesky_ex(matrix)
        if info.item() == 0:
            return torch.cholesky_inverse(factor), 0
    x = x.to(torch.float64)
    trace = scale * x.square().sum().item()
    if not math.isfinite(trace):
        return None, 0
    if trace > FLOAT32_TRACE:
        precise = equations.inverse(x, scale)
        if math.isfinite(precise[0, 0].item()):
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
