r"""The inverse for tensors whose values may be looked at: float32 while it is accurate, float64 when it is not.

The price of conditioning is one small inverse. An explicit inverse by `cholesky_inverse` and one product is several times
cheaper than triangular solves with row-major right-hand sides, and no less accurate here: the relative error of either is
about $ε · κ$ with $κ ≤ 1 + \operatorname{tr}(s\,x x^\top)$. The trace costs next to nothing and decides the precision.
"""

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from isaac_newton import kernels, torch_private
from isaac_newton.math import equations

__all__ = ["NOTHING", "inverse", "inverses", "is_safe", "norms", "ratio", "subtract", "unrounded"]

NOTHING = contextlib.nullcontext()

#: Largest trace for which float32 keeps the relative error of the result below 1e-4 with a margin (measured: at most
#: 1.5 · trace · 2⁻²⁴, reached with two equal rows; see tests/test_accuracy.py).
FLOAT32_TRACE = 512.0
#: The same for an inverse in a difference, which is smaller than its parts by up to the trace: the trace counts twice.
DIFFERENCE_TRACE = 32.0
#: Sums of more numbers than this are rounded by more, in proportion, and the limit falls as much: worst where they repeat, as
#: in the padding of an image. Those in the product of a few rows BLAS adds up one after the other, others in blocks.
LONGEST_SUM, LONGEST_SUM_OF_FEW = 8192, 64
FEW_ROWS = 16
#: In machine epsilons of a gradient: a difference that is larger has enough digits left; one that is smaller is all rounding.
_ENOUGH, _MOST_ROUNDED = 1e4, 32.0
#: Eigenvalues below this share of the largest are those of rows that depend on others: a gradient's rounding is larger there.
_LEAST_EIGENVALUE = 1e-13
#: A larger relative error is counted and warned about.
_TOLERANCE = 1e-3
#: Where a norm is larger, the squares that vanish in float32 are too small to matter.
_SHORTEST = 1e-12
#: Larger scales are no numbers of float32.
_LARGEST = 1e38
#: Numbers of a gradient that are widened at once: in float64 they fit into a cache.
_AT_ONCE = 262_144


def unrounded(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """In the block products of float32 are products of float32, whatever torch may round them to elsewhere."""
    backends: Any = torch.backends
    library = backends.cuda.matmul if x.is_cuda else backends.mkldnn.matmul
    return NOTHING if library.fp32_precision in ("ieee", "none") else _in_float32(library)


@contextlib.contextmanager
def _in_float32(library: Any) -> Iterator[None]:
    before, library.fp32_precision = library.fp32_precision, "ieee"
    try:
        yield
    finally:
        library.fp32_precision = before


def inverse(
    x: Float[Tensor, "*groups k l"], scale: float, in_difference: bool = False, largest: float = math.inf
) -> tuple[Float[Tensor, "*groups k k"] | None, int]:
    """(I + s·x xᵀ)⁻¹, or None if `x` is not finite, and the number of failed factorizations: 0, or 1 however many groups fail.

    A factorization that fails is repeated with a larger damping; where that fails too, the identity stands, or zero where the
    inverse is used `in_difference`. `largest` is the largest eigenvalue of s·x xᵀ, where it is known.
    """
    if scale > _LARGEST:
        x = x.to(torch.float64)
    identity = _identity(x.shape[-2], x.dtype)
    with unrounded(x):
        matrix = (torch.addmm if x.dim() == 2 else torch.baddbmm)(identity, x, x.mT, alpha=scale)
    if x.dim() == 2:
        trace = matrix.trace().item()
    else:
        trace = matrix.diagonal(dim1=-2, dim2=-1).sum(-1).amax().item()
    small = _is_small(trace, x, in_difference, largest)
    if small:
        factor, info = torch.linalg.cholesky_ex(matrix)
        if not (info if x.dim() == 2 else info.any()).item():
            return torch.cholesky_inverse(factor), 0
    return _careful(x.to(torch.float64), scale, in_difference, failures=int(small))


def inverses(
    xs: Sequence[Float[Tensor, "k ..."]], scales: Sequence[float], in_difference: bool = False, largest: float = math.inf
) -> list[tuple[Float[Tensor, "k k"] | None, int]]:
    """`inverse` of each matrix, by one factorization for all of those for which float32 is accurate."""
    if len(xs) == 1:
        return [inverse(xs[0], scales[0], in_difference, largest)]
    size, dtype = xs[0].shape[0], xs[0].dtype
    found: dict[int, Tensor] = {}
    if all(x.dtype is dtype for x in xs) and max(scales) <= _LARGEST:
        matrices, identity = torch.empty(len(xs), size, size, dtype=dtype), _identity(size, dtype)
        with unrounded(xs[0]):
            for x, scale, matrix in zip(xs, scales, matrices, strict=True):
                torch.addmm(identity, x, x.mT, alpha=scale, out=matrix)
        traces = matrices.diagonal(dim1=-2, dim2=-1).sum(-1).tolist()
        small = [number for number, trace in enumerate(traces) if _is_small(trace, xs[number], in_difference, largest)]
        if small:
            factor, info = torch.linalg.cholesky_ex(matrices if len(small) == len(xs) else matrices[small])
            if not info.any().item():
                # Each by itself, or the last one in use would keep all of them alive.
                found = {number: one.clone() for number, one in zip(small, torch.cholesky_inverse(factor), strict=True)}
    return [
        (found[n], 0) if n in found else inverse(x, scale, in_difference, largest)
        for n, (x, scale) in enumerate(zip(xs, scales, strict=True))
    ]


def _is_small(trace: float, x: Float[Tensor, "*groups k l"], in_difference: bool, largest: float) -> bool:
    """Whether float32 will do for I + s·x xᵀ with this trace; the size of the identity comes off."""
    rows, length = x.shape[-2:]
    trace -= rows
    longest = LONGEST_SUM_OF_FEW if rows <= FEW_ROWS else LONGEST_SUM
    share = longest / length if length > longest and x.dtype is torch.float32 else 1
    if not in_difference:
        return trace <= FLOAT32_TRACE * share
    # A difference is smaller than its parts by at most the largest eigenvalue, which the trace is never below.
    return trace * min(trace, largest) <= (DIFFERENCE_TRACE * share) ** 2


def _careful(
    x: Float[Tensor, "*groups k l"], scale: float, in_difference: bool, failures: int
) -> tuple[Float[Tensor, "*groups k k"] | None, int]:
    """The same where float32 will not do, and where a factorization failed."""
    trace = scale * x.square().sum((-2, -1)).amax().item()
    if not math.isfinite(trace):
        return None, 0
    result = equations.inverse(x, scale)
    # Dampings at which fewer and fewer digits are at stake, for the groups that need it.
    for limit in (FLOAT32_TRACE, 1.0):
        failed = equations.is_nan(result)
        if not failed.any().item():
            return result, failures
        failures = 1
        result = torch.where(failed, equations.inverse(x, scale * limit / max(trace, limit)), result)
    plain = torch.zeros((), dtype=x.dtype) if in_difference else _identity(x.shape[-2], x.dtype)
    return torch.where(equations.is_nan(result), plain, result), failures


def subtract(
    gradient: Float[Tensor, "*groups out in"],
    r: Float[Tensor, "*groups rows in"],
    inverse: Float[Tensor, "*groups rows rows"],
    strength: float,
    *,
    spanned: bool,
    in_place: bool = False,
) -> tuple[Float[Tensor, "*groups out in"], bool]:
    """∇ − ∇rᵀ P r in the dtype of the rows, rounded to that of the gradient or float32; and whether digits are missing.

    A gradient is large: to widen all of it takes several times as long as the products with a few rows. The strength is kλ;
    `spanned`: the rows are all that the layer multiplied, so that the gradient is a combination of them.
    """
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    result = gradient if in_place and gradient.dtype is dtype else torch.empty_like(gradient, dtype=dtype)
    if r.dim() == 2:
        return result, _subtract_one(gradient, r, inverse, result, strength, spanned)
    lost = [_subtract_one(*group, strength, spanned) for group in zip(gradient, r, inverse, result, strict=True)]
    return result, any(lost)


def _subtract_one(gradient: Tensor, r: Tensor, inverse: Tensor, result: Tensor, strength: float, spanned: bool) -> bool:
    outputs, noise = gradient.shape[0], torch.finfo(gradient.dtype).eps
    length = max(_AT_ONCE * outputs // max(gradient.numel(), 1), 1)
    within: _Within | None = None
    careful, lost = _leaves_little(r, strength, noise), False
    for start in range(0, outputs, length):
        part = gradient[start : start + length].to(r.dtype)
        size, seen = _norm(part) if careful else 0.0, part @ r.mT
        part.addmm_(seen @ inverse, r, alpha=-1)
        if careful and _norm(part) < _ENOUGH * noise * size:
            # So little is left that it may be what the gradient itself was rounded by.
            within = _Within(r, strength) if within is None else within
            inside, error = within.conditioned(seen), noise * size
            if _norm(part - inside) < _MOST_ROUNDED * error:
                # Where other rows were multiplied too, what they brought may be gone with the rounding.
                part, error = inside, within.rounded(error) if spanned else error
            lost |= error > _TOLERANCE * _norm(part)
        result[start : start + length] = part
    return lost


def _leaves_little(r: Tensor, strength: float, noise: float) -> bool:
    """Whether a difference may lose digits: it is smaller than the gradient by 1 + s/kλ at most, s an eigenvalue of r rᵀ."""
    most = strength / (_ENOUGH * noise)
    return r.square().sum().item() > most and (r @ r.mT).abs().sum(1).max().item() > most


def _norm(x: Tensor) -> float:
    x = x.reshape(-1)
    return math.sqrt(torch.dot(x, x).item())  # faster than `norm`


class _Within:
    """For gradients that are combinations of the rows: there the part within their span can be had without a difference.

    With r rᵀ = U s Uᵀ it is ∇rᵀ U (s (1 + s/kλ))⁻¹ Uᵀ r. What a gradient has outside of the span is rounding.
    """

    def __init__(self, r: Tensor, strength: float) -> None:
        s, u = torch.linalg.eigh(r @ r.mT)
        there = s > _LEAST_EIGENVALUE * s[-1]
        damped = 1 / (1 + s.clamp_min(0) / strength)
        inverse = torch.where(there, damped / torch.where(there, s, 1), 0)
        self._rows = (u * inverse) @ (u.mT @ r)
        #: How much of a rounding error that is spread over all features stays: all of it in directions that are not damped.
        self._share = math.sqrt(torch.where(there, damped, 1).square().sum().item() / r.shape[-1])

    def conditioned(self, seen: Tensor) -> Tensor:
        """From ∇rᵀ."""
        return torch.mm(seen, self._rows)

    def rounded(self, error: float) -> float:
        """What is left of an error of the gradient."""
        return self._share * error


def ratio(
    gradient: Float[Tensor, "*groups out in"],
    seen: Float[Tensor, "*groups out rows"],
    used: Float[Tensor, "*groups out rows"],
    gram: Float[Tensor, "*groups rows rows"],
) -> Float[Tensor, ""]:
    """‖∇‖ / ‖∇ − U r‖ for S = ∇rᵀ and U = S P, without a look at the difference."""
    (length,) = norms(gradient)
    # In units of that length: squares of very long or short gradients overflow or vanish.
    unit = torch.where(length > 0, length, 1.0)
    seen, used = seen / unit, used / unit
    change = (used * (used @ gram - 2 * seen)).sum()
    return equations.quotient(torch.ones_like(change), (1 + change).clamp_min(0).sqrt())


def norms(*xs: Float[Tensor, "..."]) -> list[Float[Tensor, ""]]:
    """‖x‖ of each, also of numbers whose squares overflow or vanish in their type."""
    if kernels.is_differentiable(*xs):
        # The compiler widens each number as it reads it: one pass, and no copy.
        return [torch.linalg.vector_norm(x, dtype=torch.float64) for x in xs]
    if xs[0].is_cuda:
        return torch_private.wide_norms(xs)
    found = [torch.linalg.vector_norm(x) for x in xs]
    return [
        norm if is_safe(norm) else torch.linalg.vector_norm(x, dtype=torch.float64) for x, norm in zip(xs, found, strict=True)
    ]


def is_safe(norm: Float[Tensor, ""]) -> bool:
    """Whether the squares of which it was made were neither too large nor too small for float32."""
    return _SHORTEST < norm.item() < math.inf


@functools.lru_cache(maxsize=32)
def _identity(size: int, dtype: torch.dtype) -> Tensor:
    return torch.eye(size, dtype=dtype)
