# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
r"""Inverses of up to 128 rows in two Triton launches: the Gram matrix by many programs, its inverse by one.

Products run on the tensor cores as three TF32 products each, which keeps float32's accuracy. The inverse is the symmetric
sweep operator, sixteen pivots at a time: the 16 × 16 block is swept pivot by pivot, the rest of the matrix by products.
Every pivot of $I + s\,x x^\top$ is at least 1, since every Schur complement of it is $I$ plus something positive. Taking
the larger of pivot and 1 repairs what rounding may have done, so nothing can fail. Sums are formed in a fixed order: the
same input gives the same bits.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from isaac_newton.kernels import JOBS
from isaac_newton.kernels.launch import PIVOTS, Launch, kind_of_damping, least_pivot, outer, remember

__all__ = ["MOST_MULTIPLIED", "MULTIPLIED", "SCALED", "inverse", "inverses"]

#: Up to this many features the program that inverts forms the Gram matrix too: one launch less is worth more than the
#: parallelism.
_INLINE_FEATURES = 512
#: Kinds of results of such a launch.
MULTIPLIED, SCALED = 1, 2
#: Up to this length one program forms the Gram matrix there and multiplies by its inverse: longer on the device, where an eager
#: step waits for the host.
MOST_MULTIPLIED = 2048
_CHUNK = 32
_WARPS = {16: 1, 32: 1, 64: 4, 128: 8}
#: Of products in a sweep, and where its result is scaled: in the difference which that is for (Woodbury), errors of the former
#: would be two to four times those of float32.
_PRECISIONS = ("tf32x3", "ieee")


def inverse(
    x: Float[Tensor, "*groups k l"], damping: float | Tensor, rows: int, *, launches: int = 1, scaled: bool = False
) -> Float[Tensor, "*groups k k"]:
    """(I + s·x xᵀ)⁻¹, s = 1/(rows·λ), or s times that if `scaled`.

    λ may be a tensor on the device, one number or one for each group, read when the kernel runs.

    `launches=2` forms the Gram matrix in parallel first: shorter on the device, longer on the host. Wide inputs get it anyway.
    """
    key = (x.shape, x.stride(), x.device.index, x.data_ptr() % 16, kind_of_damping(damping), rows, launches, scaled)
    plan = _PLANS.get(key)
    if plan is None:
        plan = remember(_PLANS, key, _Plan(x, rows, isinstance(damping, Tensor), launches, scaled))
    return plan(x, damping)


class _Plan:
    """How to launch for inputs of one shape: what Triton would work out anew at each call."""

    def __init__(self, x: Tensor, rows: int, pointer: bool, launches: int, scaled: bool) -> None:
        self._groups = 1 if x.dim() == 2 else x.shape[0]
        size, features = x.shape[-2:]
        self._block = max(PIVOTS, triton.next_power_of_2(size))
        # Many groups keep the device busy without the help of more programs each.
        inline = features <= _INLINE_FEATURES and (launches == 1 or self._groups >= 32)
        # Enough programs that none multiplies more than a few chunks, few enough that adding up their parts stays cheap.
        self._parts = 1 if inline else min(16, max(1, features // (4 * _CHUNK)))
        span = triton.cdiv(triton.cdiv(features, self._parts), _CHUNK) * _CHUNK
        strides = (0 if x.dim() == 2 else x.stride(0), x.stride(-2), x.stride(-1))
        self._gram = (
            None if inline else Launch(_gram, (self._parts, self._groups, 1), 4, {"BLOCK": self._block, "CHUNK": _CHUNK})
        )
        kinds = {"INLINE": inline, "POINTER": pointer, "SCALED": scaled, "PRECISION": _PRECISIONS[scaled]}
        constants = {**kinds, "BLOCK": self._block, "PIVOTS": PIVOTS, "CHUNK": _CHUNK}
        self._sweep = Launch(_sweep, (self._groups, 1, 1), _WARPS[self._block], constants)
        self._shape = (size, features, span, *strides)
        self._rows = rows
        self._view = (*x.shape[:-1], size), (*(() if x.dim() == 2 else (self._parts * self._block**2,)), self._block, 1)

    def __call__(self, x: Tensor, damping: float | Tensor) -> Tensor:
        work = x.new_empty(self._groups * self._parts * self._block**2)
        if self._gram is not None:
            self._gram(x, work, *self._shape)
        stride = damping.dim() if isinstance(damping, Tensor) else 0
        self._sweep(x, work, damping, stride, self._rows, self._parts, *self._shape)
        # The inverse stands where the first part of the Gram matrix stood.
        return work.as_strided(*self._view)


def inverses(
    xs: Sequence[Float[Tensor, "_ _"]], damping: float | Tensor, kinds: Sequence[int], *, launches: int = 1
) -> list[Float[Tensor, "_ _"]]:
    """P = (I + x xᵀ/(bλ))⁻¹ for each x of b rows, or Q = (I + xᵀx/(bλ))⁻¹ where that is smaller.

    P x or x Q if a kind is `MULTIPLIED`, 1/(bλ) times that if it is `SCALED`, both if it is their sum. λ may be a number on the
    device, read when the kernel runs.

    Of up to `JOBS` contiguous matrices. One launch does it all, or two: what they save is the host's time. `launches=2` forms
    the Gram matrices in parallel first.
    """
    key = (tuple([x.shape for x in xs]), tuple(kinds), xs[0].device.index, kind_of_damping(damping), launches)
    plan = _JOBS.get(key)
    if plan is None:
        shapes, pointer = [(len(x), x.shape[1]) for x in xs], isinstance(damping, Tensor)
        plan = remember(_JOBS, key, _Jobs(shapes, kinds, xs[0].device.index, pointer, launches))
    return plan(xs, damping)


class _Jobs:
    """How to launch for matrices of these shapes."""

    def __init__(
        self, shapes: Sequence[tuple[int, int]], kinds: Sequence[int], device: int | None, pointer: bool, launches: int
    ) -> None:
        sizes = [sorted(shape) for shape in shapes]
        block = max(PIVOTS, triton.next_power_of_2(max(small for small, _ in sizes)))
        longest = max(long for _, long in sizes)
        inline = longest <= (MOST_MULTIPLIED if launches == 1 else 4 * _CHUNK)
        self._parts = 1 if inline else min(16, longest // (4 * _CHUNK))
        self._work = len(shapes) * self._parts * block**2
        #: Of results that are no larger than an inverse.
        self._squares = [None if kind & MULTIPLIED else (small, small) for (small, _), kind in zip(sizes, kinds, strict=True)]
        # Places that are not used repeat the first job, so that the types of the numbers are always the same.
        self._unused = JOBS - len(shapes)
        jobs = [(*shape, kind) for shape, kind in zip(shapes, kinds, strict=True)]
        self._numbers = [number for column in zip(*jobs, *jobs[:1] * self._unused, strict=True) for number in column]
        scaled = any(kind & SCALED for kind in kinds)
        key = (len(shapes), self._parts, block, device, pointer, scaled)
        if key not in _TOGETHER:
            how = {"INLINE": self._parts == 1, "POINTER": pointer, "PRECISION": _PRECISIONS[scaled]}
            constants = {**how, "BLOCK": block, "PIVOTS": PIVOTS, "CHUNK": _CHUNK}
            grams = Launch(_gram_of_each, (self._parts, len(shapes), 1), 4, {"BLOCK": block, "CHUNK": _CHUNK})
            _TOGETHER[key] = grams, Launch(_sweep_each, (len(shapes), 1, 1), _WARPS[block], constants)
        self._grams, self._sweeps = _TOGETHER[key]

    def __call__(self, xs: Sequence[Tensor], damping: float | Tensor) -> list[Tensor]:
        work = xs[0].new_empty(self._work)
        results = [
            torch.empty_like(x) if square is None else x.new_empty(square) for x, square in zip(xs, self._squares, strict=True)
        ]
        from_, to = [x.data_ptr() for x in xs], [result.data_ptr() for result in results]
        numbers = (*from_, *from_[:1] * self._unused, *to, *to[:1] * self._unused, *self._numbers)
        if self._parts > 1:
            self._grams(work, self._parts, *numbers)
        self._sweeps(work, damping, self._parts, *numbers)
        return results


_PLANS: dict[Any, _Plan] = {}
_JOBS: dict[Any, _Jobs] = {}
_TOGETHER: dict[Any, tuple[Launch, Launch]] = {}


@triton.jit
def _gram(x, work, size, features, span, group_stride, row_stride, feature_stride, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    part = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    first = part * span
    last = min(first + span, features)
    matrix = outer(x + group * group_stride, first, last, size, features, row_stride, feature_stride, BLOCK, CHUNK)
    i = tl.arange(0, BLOCK)
    work += (group * tl.num_programs(0) + part) * BLOCK * BLOCK
    tl.store(work + i[:, None] * BLOCK + i[None, :], matrix)


@triton.jit
def _swept(matrix, work, size, PRECISION: tl.constexpr, BLOCK: tl.constexpr, PIVOTS: tl.constexpr):
    """(I + matrix)⁻¹; `work` has room for it."""
    i = tl.arange(0, BLOCK)
    square = i[:, None] * BLOCK + i[None, :]
    diagonal = i[:, None] == i[None, :]
    least = least_pivot(tl.sum(tl.sum(tl.where(diagonal, matrix, 0.0), axis=1), axis=0))
    matrix += tl.where(diagonal, least, 0.0)
    # The first part's place is free now: through it, columns of the matrix are read and written.
    tl.store(work + square, matrix)
    tl.debug_barrier()
    p = tl.arange(0, PIVOTS)
    for start in range(0, size, PIVOTS):
        columns = i[:, None] * BLOCK + (start + p)[None, :]
        panel = tl.load(work + columns)
        before = tl.zeros((BLOCK, PIVOTS), dtype=tl.float32)
        after = tl.zeros((BLOCK, PIVOTS), dtype=tl.float32)
        for step in range(PIVOTS):
            on_row = i[:, None] == start + step
            on_column = p[None, :] == step
            column = tl.sum(tl.where(on_column, panel, 0.0), axis=1)
            row = tl.sum(tl.where(on_row, panel, 0.0), axis=0)
            pivot = tl.maximum(tl.sum(tl.where(p == step, row, 0.0), axis=0), least)
            scaled = column / pivot
            before = tl.where(on_column, column[:, None], before)
            after = tl.where(on_column, scaled[:, None], after)
            swept = tl.where(on_row, (row / pivot)[None, :], panel - scaled[:, None] * row[None, :])
            panel = tl.where(on_column, tl.where(on_row, -1.0 / pivot, scaled[:, None]), swept)
        # What the pivots do to the other columns, all at once.
        outside = ((i < start) | (i >= start + PIVOTS))[:, None]
        before, after = tl.where(outside, before, 0.0), tl.where(outside, after, 0.0)
        matrix -= tl.dot(before, tl.trans(after), input_precision=PRECISION)
        tl.debug_barrier()
        tl.store(work + square, matrix)
        tl.debug_barrier()
        tl.store(work + columns, panel)
        tl.store(work + (start + p)[None, :] * BLOCK + i[:, None], panel)
        tl.debug_barrier()
        matrix = tl.load(work + square)
    return -matrix


@triton.jit
def _sweep(
    x,
    work,
    damping,
    damping_stride,
    rows,
    parts,
    size,
    features,
    span,
    group_stride,
    row_stride,
    feature_stride,
    INLINE: tl.constexpr,
    POINTER: tl.constexpr,
    SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    work += group * parts * BLOCK * BLOCK
    i = tl.arange(0, BLOCK)
    square = i[:, None] * BLOCK + i[None, :]
    if INLINE:
        matrix = outer(x + group * group_stride, 0, features, size, features, row_stride, feature_stride, BLOCK, CHUNK)
    else:
        matrix = tl.load(work + square)
        for part in range(1, parts):
            matrix += tl.load(work + part * BLOCK * BLOCK + square)
    if POINTER:
        strength = tl.load(damping + group * damping_stride).to(tl.float32)
    else:
        strength = damping
    matrix = _swept(matrix / (rows * strength), work, size, PRECISION, BLOCK, PIVOTS)
    if SCALED:
        matrix = matrix / (rows * strength)
    tl.debug_barrier()
    tl.store(work + square, matrix)


#: Of each job: the addresses of a matrix and of its result, rows and features, and the kind of the result.
_NUMBERS = ["parts", *(f"{letter}{number}" for letter in "xybnk" for number in range(JOBS))]


@triton.jit
def _pick(job, v0, v1, v2, v3, v4, v5, v6, v7):
    """The value of a job."""
    low = tl.where(job < 2, tl.where(job < 1, v0, v1), tl.where(job < 3, v2, v3))
    high = tl.where(job < 6, tl.where(job < 5, v4, v5), tl.where(job < 7, v6, v7))
    return tl.where(job < 4, low, high)


@triton.jit
def _part_of_gram(x, rows, features, part, parts, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """A part of x xᵀ, or of xᵀx where that is smaller; x is the address of a contiguous matrix."""
    by_rows = rows < features
    length = tl.maximum(rows, features)
    span = tl.cdiv(tl.cdiv(length, parts), CHUNK) * CHUNK
    return outer(
        x.to(tl.pointer_type(tl.float32)),
        part * span,
        tl.minimum((part + 1) * span, length),
        tl.minimum(rows, features),
        length,
        tl.where(by_rows, features, 1),
        tl.where(by_rows, 1, features),
        BLOCK,
        CHUNK,
    )


# fmt: off
@triton.jit(do_not_specialize=_NUMBERS)
def _gram_of_each(
    work, parts,
    x0, x1, x2, x3, x4, x5, x6, x7,
    y0, y1, y2, y3, y4, y5, y6, y7,
    b0, b1, b2, b3, b4, b5, b6, b7,
    n0, n1, n2, n3, n4, n5, n6, n7,
    k0, k1, k2, k3, k4, k5, k6, k7,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):
    # fmt: on
    part = tl.program_id(0)
    job = tl.program_id(1)
    x = _pick(job, x0, x1, x2, x3, x4, x5, x6, x7)
    rows = _pick(job, b0, b1, b2, b3, b4, b5, b6, b7)
    features = _pick(job, n0, n1, n2, n3, n4, n5, n6, n7)
    matrix = _part_of_gram(x, rows, features, part, parts, BLOCK, CHUNK)
    i = tl.arange(0, BLOCK)
    tl.store(work + (job * parts + part) * BLOCK * BLOCK + i[:, None] * BLOCK + i[None, :], matrix)


# fmt: off
@triton.jit(do_not_specialize=_NUMBERS)
def _sweep_each(
    work, damping, parts,
    x0, x1, x2, x3, x4, x5, x6, x7,
    y0, y1, y2, y3, y4, y5, y6, y7,
    b0, b1, b2, b3, b4, b5, b6, b7,
    n0, n1, n2, n3, n4, n5, n6, n7,
    k0, k1, k2, k3, k4, k5, k6, k7,
    INLINE: tl.constexpr, POINTER: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr, PIVOTS: tl.constexpr, CHUNK: tl.constexpr,
):
    # fmt: on
    job = tl.program_id(0)
    x = _pick(job, x0, x1, x2, x3, x4, x5, x6, x7)
    y = _pick(job, y0, y1, y2, y3, y4, y5, y6, y7).to(tl.pointer_type(tl.float32))
    rows = _pick(job, b0, b1, b2, b3, b4, b5, b6, b7)
    features = _pick(job, n0, n1, n2, n3, n4, n5, n6, n7)
    kind = _pick(job, k0, k1, k2, k3, k4, k5, k6, k7)
    size = tl.minimum(rows, features)
    work += job * parts * BLOCK * BLOCK
    i = tl.arange(0, BLOCK)
    if INLINE:
        matrix = _part_of_gram(x, rows, features, 0, 1, BLOCK, CHUNK)
    else:
        square = i[:, None] * BLOCK + i[None, :]
        matrix = tl.load(work + square)
        for part in range(1, parts):
            matrix += tl.load(work + part * BLOCK * BLOCK + square)
    if POINTER:
        strength = rows * tl.load(damping).to(tl.float32)
    else:
        strength = rows * damping
    matrix = _swept(matrix / strength, work, size, PRECISION, BLOCK, PIVOTS)
    matrix = matrix / tl.where(kind >= 2, strength, 1.0)
    if kind % 2 == 0:
        tl.store(y + i[:, None] * size + i[None, :], matrix, mask=(i[:, None] < size) & (i[None, :] < size))
    else:
        # Q is symmetric, so that x Q is Qxᵀ, transposed: both are the inverse times what the Gram matrix was formed of.
        length = tl.maximum(rows, features)
        row_stride = tl.where(rows < features, features, 1)
        column_stride = tl.where(rows < features, 1, features)
        matrix = tl.where((i[:, None] < size) & (i[None, :] < size), matrix, 0.0)
        for start in range(0, length, CHUNK):
            c = start + tl.arange(0, CHUNK)
            inside = (i[:, None] < size) & (c[None, :] < length)
            place = i[:, None] * row_stride + c[None, :] * column_stride
            tile = tl.load(x.to(tl.pointer_type(tl.float32)) + place, mask=inside, other=0.0)
            tl.store(y + place, tl.dot(matrix, tile, input_precision="tf32x3"), mask=inside)
