"""How the equations are made fast: the same results as `equations`, at the lowest cost a device allows."""

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from isaac_newton import equations
from isaac_newton.kernels import dense

__all__ = [
    "JOBS",
    "MOST_TAPS",
    "Conditioner",
    "Job",
    "average",
    "can_average",
    "can_fuse",
    "can_multiply",
    "can_prepare",
    "can_sweep",
    "conditioners",
    "difference",
    "inverse",
    "multiplied",
    "multiply",
    "prepare",
    "product",
    "subtract",
    "tap_means",
]

#: So many inverses of their own sizes fit into one launch.
JOBS = 8
#: So many fit into one Triton program.
MOST_FUSED_ROWS = 128
#: Up to this size an inverse is swept block by block, in about half the time of cuSOLVER's; larger ones were not measured.
MOST_SWEPT_ROWS = 1024
#: So many rows condition a gradient in one kernel.
FEW_ROWS = 16
#: Of so many features; the libraries spread the products with longer rows over more of the device.
_MOST_SUBTRACTED = 512
#: Of a convolution's kernel, for `tap_means`.
MOST_TAPS = 64
#: Up to so many, rows are multiplied however few the outputs are.
_FEW_FEATURES = 512
#: Up to so many, rows that condition a gradient are multiplied by the program that inverts.
_MOST_MULTIPLIED = 1024
#: What a GPU must have for `prepare`: its tensor cores, and memory for the tiles that are on their way to them.
_HOPPER, _SHARED_MEMORY = (9, 0), 200_000


def inverse(
    x: Float[Tensor, "*groups k l"], damping: float | Tensor, rows: int, *, in_graph: bool = False, in_difference: bool = False
) -> tuple[Float[Tensor, "*groups k k"] | None, int | Tensor]:
    """(I + s·x xᵀ)⁻¹, s = 1/(rows·λ), and the number of factorizations that failed; None where `x` is not finite.

    λ is one number, or a tensor with one for each group. In a CUDA graph the host does not count and the device does:
    `in_graph` takes more launches where that is faster. `in_difference` asks for s times the inverse, as it is used in what is
    subtracted from a gradient (Woodbury). Where a factorization fails for good, the identity stands, and in a difference zero:
    both leave the gradient plain. On a GPU the number is there, and nothing waits for it; the same stands there where `x` is
    not finite.
    """
    if not _has_values(x):
        scale: Any = 1 / (rows * damping)
        result: Any = _repaired(equations.inverse(equations.precise(x), scale), in_difference)[0]
        return scale * result if in_difference else result, 0
    if x.device.type == "cpu":
        if isinstance(damping, Tensor) and damping.dim() == 1:
            # With rows over √λ the damping of every group is 1.
            result, failures = dense.inverse(x * damping.rsqrt()[:, None, None], 1 / rows, in_difference)
            scale = 1 / (rows * damping[:, None, None])
        else:
            scale = 1 / (rows * float(damping))
            result, failures = dense.inverse(x, scale, in_difference)
        return scale * result if in_difference and result is not None else result, failures
    # In a backward pass that will be differentiated itself, torch has to see the operations.
    if can_fuse(x, x.shape[-2]) and not (x.requires_grad and torch.is_grad_enabled()):
        from isaac_newton.kernels import fused  # importing Triton takes a moment, and needs a GPU to be of use

        return fused.inverse(x, damping, rows, launches=2 if in_graph else 1, scaled=in_difference), 0
    # A difference needs the digits of float64 where there are many rows.
    if x.dim() == 2 and not in_difference and can_sweep(x, len(x)) and not (x.requires_grad and torch.is_grad_enabled()):
        from isaac_newton.kernels import blocks

        with dense.unrounded(x):
            return blocks.inverse(x, damping, rows), 0
    scale = 1 / (rows * damping)
    if isinstance(scale, Tensor) and scale.dim() == 1:
        scale = scale[:, None, None]
    result, failed = _repaired(equations.inverse(equations.precise(x), scale), in_difference)
    result = (scale * result if in_difference else result).to(x.dtype)
    return result, (failed.any() & x.isfinite().all()).long()


def _has_values(x: Tensor) -> bool:
    """Those of traced and batched tensors are not there to be looked at."""
    return not (torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(x))


def _repaired(inverse: Float[Tensor, "*groups k k"], in_difference: bool) -> tuple[Float[Tensor, "*groups k k"], Tensor]:
    """The inverse without NaN, and where there was some."""
    failed = equations.is_nan(inverse)
    identity = torch.eye(inverse.shape[-1], dtype=inverse.dtype, device=inverse.device)
    return torch.where(failed, 0 * identity if in_difference else identity, inverse), failed


class Conditioner(NamedTuple):
    """What conditions a gradient: an inverse, or rows that one has already multiplied; neither for the plain gradient."""

    inverse: Float[Tensor, "..."] | None
    rows: Float[Tensor, "..."] | None = None


class Job(NamedTuple):
    """A conditioner to be found.

    Args:
        rows: A layer's rows, or those of its groups.
        damping: λ.
        outputs: Of the layer.
        of_gradient: Whether it multiplies a gradient from the right. With fewer rows than features that is a difference
            (`subtract`), for which the inverse is scaled.
    """

    rows: Float[Tensor, "*groups _ _"]
    damping: float | Tensor
    outputs: int
    of_gradient: bool = False

    @property
    def by_rows(self) -> bool:
        """Whether the inverse is on the side of the rows."""
        return self.rows.shape[-2] < self.rows.shape[-1]


def conditioners(work: Sequence[Job], *, in_graph: bool = False) -> list[tuple[Conditioner, int | Tensor]]:
    """`inverse` for each job, on the smaller side of its rows, and its failures: many in few calls, where that can be."""
    found: dict[int, tuple[Conditioner, int | Tensor]] = {}
    if len(work) > 1:
        found = _few_launches(work, in_graph) if work[0].rows.is_cuda else _few_factorizations(work)
    results = []
    for number, job in enumerate(work):
        if number not in found:
            side, in_difference = job.rows if job.by_rows else job.rows.mT, job.of_gradient and job.by_rows
            result, failures = inverse(side, job.damping, job.rows.shape[-2], in_graph=in_graph, in_difference=in_difference)
            found[number] = Conditioner(result), failures
        results.append(found[number])
    return results


def _few_launches(work: Sequence[Job], in_graph: bool) -> dict[int, tuple[Conditioner, int | Tensor]]:
    """Those of one λ whose rows lie in one piece."""
    from isaac_newton.kernels import fused

    numbers, xs, kinds = [], [], []
    shared = work[0].damping
    for number, (rows, damping, outputs, of_gradient) in enumerate(work):
        if not (damping is shared or (isinstance(shared, float) and damping == shared)) or rows.dim() != 2:
            continue
        count, features = rows.shape
        if rows.is_contiguous() and can_fuse(rows, min(count, features)):
            numbers.append(number)
            xs.append(rows)
            if not of_gradient:
                # Multiplied rows save a product in the backward pass, but take the memory of the rows instead of the outputs'.
                whole = max(count, features) <= fused.MOST_MULTIPLIED and features <= max(outputs, _FEW_FEATURES)
                kinds.append(fused.MULTIPLIED if whole else 0)
            elif count < features:
                # In a graph products take less time than the one program that would multiply.
                whole = features <= _MOST_MULTIPLIED and not in_graph
                kinds.append(fused.SCALED + fused.MULTIPLIED if whole else fused.SCALED)
            else:
                kinds.append(0)
    found: dict[int, tuple[Conditioner, int | Tensor]] = {}
    for start in range(0, len(xs), JOBS):
        part = slice(start, start + JOBS)
        results = fused.inverses(xs[part], shared, kinds[part], launches=2 if in_graph or work[0].of_gradient else 1)
        for number, result, kind in zip(numbers[part], results, kinds[part], strict=True):
            found[number] = Conditioner(None, result) if kind & fused.MULTIPLIED else Conditioner(result), 0
    return found


def _few_factorizations(work: Sequence[Job]) -> dict[int, tuple[Conditioner, int | Tensor]]:
    """Those of one size."""
    sizes: dict[int, list[int]] = {}
    for number, (rows, _, _, of_gradient) in enumerate(work):
        # A difference needs more digits than the inverse of many at once has.
        if not of_gradient:
            sizes.setdefault(min(rows.shape), []).append(number)
    found: dict[int, tuple[Conditioner, int | Tensor]] = {}
    for numbers in sizes.values():
        scales = [1 / (len(work[number][0]) * float(work[number][1])) for number in numbers]
        results = dense.inverses([_smaller_side(work[number][0]) for number in numbers], scales)
        for number, (result, failures) in zip(numbers, results, strict=True):
            found[number] = Conditioner(result), failures
    return found


def _smaller_side(rows: Float[Tensor, "b n"]) -> Float[Tensor, "k l"]:
    return rows if rows.shape[0] < rows.shape[1] else rows.mT


def product(
    g: Float[Tensor, "*groups rows out"], inverse: Float[Tensor, "*groups k k"] | None, a: Float[Tensor, "*groups rows in"]
) -> Float[Tensor, "*groups out in"]:
    """gᵀ P a with P on the side of the rows, or gᵀ a Q with Q on that of the features; without an inverse, gᵀ a."""
    multiply = torch.mm if a.dim() == 2 else torch.bmm
    if inverse is None:
        return multiply(g.mT, a)
    rows, features, outputs = a.shape[-2], a.shape[-1], g.shape[-1]
    by_rows = rows < features
    if inverse.dtype is not a.dtype:
        # The inverse needed float64. Conditioned rows can be rounded, since nothing cancels in them afterwards.
        wide = a.to(inverse.dtype)
        if by_rows:
            return multiply(g.mT, multiply(inverse, wide).to(a.dtype))
        if features <= outputs:
            return multiply(g.mT, multiply(wide, inverse).to(a.dtype))
        return multiply(multiply(g.to(wide.dtype).mT, wide), inverse).to(a.dtype)
    if not by_rows:
        return multiply(multiply(g.mT, a), inverse)
    if outputs <= features:
        return multiply(multiply(inverse, g).mT, a)
    return multiply(g.mT, multiply(inverse, a))


def can_multiply(r: Float[Tensor, "groups rows in"]) -> bool:
    """Whether `multiply` can take these rows: so few that an inverse of their own is cheaper than to wait for one."""
    return can_fuse(r, r.shape[-2]) and r.shape[-2] <= FEW_ROWS and not r.requires_grad and _has_values(r)


def multiply(
    gradient: Float[Tensor, "groups out in"], r: Float[Tensor, "groups rows in"], damping: float | Tensor
) -> Float[Tensor, "groups out in"]:
    """∇ (I + rᵀr/(kλ))⁻¹ by one kernel."""
    from isaac_newton.kernels import few

    return few.multiply(gradient, r, damping)


def subtract(
    gradient: Float[Tensor, "*groups out in"],
    r: Float[Tensor, "*groups rows in"],
    inverse: Float[Tensor, "*groups rows rows"] | None,
    multiplied: Float[Tensor, "*groups rows in"] | None = None,
) -> Float[Tensor, "*groups out in"]:
    """∇ − ∇rᵀ P r, what Woodbury leaves of a gradient; P is the inverse of rows, `in_difference`, or P r is `multiplied`.

    The difference can be much smaller than its parts, so that these are not rounded, whatever torch may do to products (TF32).
    Where the inverse needed float64, the rows have it too, and the gradient need not: on a CPU it is widened piece by piece.
    """
    if gradient.dtype is not r.dtype:
        if inverse is not None and not gradient.is_cuda and not _is_differentiable(gradient, r, inverse):
            return dense.subtract(gradient, r, inverse)
        gradient = gradient.to(r.dtype)
    if inverse is not None and _can_subtract(gradient, r, inverse):
        from isaac_newton.kernels import few

        return few.subtract(gradient, r, inverse)
    alone = r.dim() == 3 and len(r) == 1
    if alone:
        # Of one matrix: torch takes up to three times as long for a batch of one.
        gradient, r = gradient[0], r[0]
        inverse, multiplied = (None if x is None else x[0] for x in (inverse, multiplied))
    difference: Callable[..., Tensor] = torch.addmm if r.dim() == 2 else torch.baddbmm
    with _unrounded(r):
        seen = gradient @ r.mT
        if multiplied is not None:
            result = difference(gradient, seen, multiplied, alpha=-1)
        else:
            assert inverse is not None
            result = difference(gradient, seen @ inverse, r, alpha=-1)
    return result[None] if alone else result


def multiplied(
    inverse: Float[Tensor, "groups rows rows"], r: Float[Tensor, "groups rows in"]
) -> Float[Tensor, "groups rows in"] | None:
    """P r for `subtract`, to be had before the gradient is; None where that takes one kernel anyway."""
    if _are_few(r):
        return None
    with _unrounded(r):
        return (inverse[0] @ r[0])[None] if len(r) == 1 else inverse @ r


def can_prepare(r: Float[Tensor, "groups rows in"]) -> bool:
    """Whether `prepare` can take these rows, and they are so many that tensor cores make up for multiplying several times."""
    return len(r) == 1 and r.shape[-2] > FEW_ROWS and can_fuse(r, r.shape[-2]) and _can_prepare_on(r.get_device())


@functools.cache
def _can_prepare_on(device: int) -> bool:
    """Whether it is a Hopper or newer, and no small one."""
    properties: Any = torch.cuda.get_device_properties(device)
    shared_memory = getattr(properties, "shared_memory_per_block_optin", 0)
    return (properties.major, properties.minor) >= _HOPPER and shared_memory >= _SHARED_MEMORY


def prepare(inverse: Float[Tensor, "1 rows rows"], r: Float[Tensor, "1 rows in"]) -> Float[Tensor, "2 3 padded_rows padded_in"]:
    """What `difference` needs of r and P r, to be had before the gradient is; where `can_prepare`."""
    from isaac_newton.kernels import differences

    return differences.prepare(inverse, r)


def difference(
    gradient: Float[Tensor, "1 out in"], prepared: Float[Tensor, "2 3 padded_rows padded_in"]
) -> Float[Tensor, "1 out in"]:
    """`subtract` with what is prepared, of a gradient in any precision; in float32."""
    from isaac_newton.kernels import differences

    return differences.subtract(gradient if gradient.dtype is torch.bfloat16 else gradient.float(), prepared)


def _unrounded(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    return dense.unrounded(x) if _has_values(x) else contextlib.nullcontext()


def _are_few(r: Tensor) -> bool:
    """Whether one kernel can subtract with these rows, and is faster than the libraries' products."""
    few = r.dim() == 3 and len(r) == 1 and r.shape[-2] <= FEW_ROWS and r.shape[-1] <= _MOST_SUBTRACTED
    return few and can_fuse(r, r.shape[-2])


def _can_subtract(gradient: Tensor, r: Tensor, inverse: Tensor) -> bool:
    """Whether this gradient can be taken too."""
    if not _are_few(r) or _is_differentiable(gradient, r, inverse):
        return False
    return gradient.dtype is inverse.dtype is torch.float32


def _is_differentiable(*tensors: Tensor) -> bool:
    """Whether torch, its compiler or torch.func has to see what is done with these."""
    graph = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return graph or not all(map(_has_values, tensors))


def tap_means(
    x: Float[Tensor, "samples channels pixels"], taps: Float[Tensor, "pixels taps"], places: int, *, innermost: bool
) -> Float[Tensor, "samples features"]:
    """What each tap of a kernel sees on the average over its places, by one kernel; where `can_average`."""
    from isaac_newton.kernels import means

    return means.tap_means(x, taps, places, innermost=innermost)


def can_average(x: Tensor) -> bool:
    """Whether `average` and `tap_means` can take it."""
    differentiable = x.requires_grad and torch.is_grad_enabled()
    return x.is_cuda and x.dtype is not torch.float64 and not differentiable and _has_values(x) and _has_triton()


def average(
    x: Float[Tensor, "samples positions features"], mask: Bool[Tensor, "samples positions"]
) -> Float[Tensor, "samples features"]:
    """The mean over the positions that count, in float32, by one kernel; 0 where none does."""
    from isaac_newton.kernels import means

    return means.average(x, mask)


def can_fuse(x: Tensor, size: int) -> bool:
    """Whether an inverse of this size, from these numbers, can be had from the Triton kernels."""
    return x.is_cuda and x.dtype is torch.float32 and size <= MOST_FUSED_ROWS and _has_triton()


def can_sweep(x: Tensor, size: int) -> bool:
    """The same for one matrix, in one launch or several."""
    return x.is_cuda and x.dtype is torch.float32 and size <= MOST_SWEPT_ROWS and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
