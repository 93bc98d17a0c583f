# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
r"""Inverses of up to 128 rows or features, over lists: Gram matrices by many programs, each inverse by one, products by many.

The inverse is the symmetric sweep operator, sixteen pivots at a time: the 16 × 16 block is swept pivot by pivot, the rest of
the matrix by products. Every pivot of $I + s\,x x^\top$ is at least 1, since every Schur complement of it is $I$ plus something
positive. Taking the larger of pivot and 1 repairs what rounding may have done, so nothing can fail.

Sums are formed in a fixed order that depends on the sizes of the job only: the same input gives the same bits, in every list.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from isaac_newton.kernels import GRAM, MOST_SMALL, MULTIPLIED, SCALED
from isaac_newton.kernels.sweep import PRECISIONS, RELATIVE, least_pivot, start_vector
from isaac_newton.kernels.tables import (
    TYPES,
    Grouped,
    Room,
    by_class,
    hinted,
    is_aligned,
    job_of,
    names,
    pick,
    remember,
    size_of,
)

__all__ = ["GRAM", "MULTIPLIED", "SCALED", "Small", "inverses"]

#: Pivots that are swept at a time.
_PIVOTS = 16
#: Columns that a program multiplies at once, in the Gram matrix and in the product.
_CHUNK, _ACROSS = 32, 64
#: Columns of a part of a Gram matrix, at least, and the number of parts, at most: one program adds them up.
_SPAN, _MOST_PARTS = 128, 8
#: Of the program that inverts, and of those that multiply.
_WARPS, _WIDE_WARPS = {16: 1, 32: 1, 64: 4, 128: 8}, {16: 4, 32: 4, 64: 4, 128: 8}


class Small:
    """What `Inverted` has, of one job of a list.

    All results of a list are in one memory. Few are looked at as tensors, and a tensor takes longer to make than an address.
    """

    __slots__ = ("_flat", "_number", "_plan")

    def __init__(self, plan: "_Plan", flat: Tensor, number: int) -> None:
        self._plan, self._flat, self._number = plan, flat, number

    @property
    def inverse(self) -> Float[Tensor, "small small"]:
        """P or Q."""
        found = self._plan.inverses.one(self._flat, self._number)
        assert found is not None
        return found

    @property
    def multiplied(self) -> Float[Tensor, "k n"] | None:
        """P x or x Q."""
        return self._plan.multiplied.one(self._flat, self._number)

    @property
    def damping(self) -> Float[Tensor, ""]:
        """λ."""
        found = self._plan.dampings.one(self._flat, self._number)
        assert found is not None
        return found

    @property
    def gram(self) -> Float[Tensor, "small small"] | None:
        """The Gram matrix, x xᵀ or xᵀx."""
        return self._plan.grams.one(self._flat, self._number)

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Of P x, P and x xᵀ."""
        start = self._flat.data_ptr()
        multiplied, inverse, gram = self._plan.places[self._number]
        return start + multiplied, start + inverse, start + gram

    def __iter__(self) -> Iterator[Tensor | None]:
        return iter((self.inverse, self.multiplied, self.damping, self.gram))


def inverses(
    xs: Sequence[Float[Tensor, "_ _"]],
    strength: float | Float[Tensor, ""],
    relative: Literal["", "mean", "largest"],
    kinds: Sequence[int],
) -> list[Small]:
    """P for each x of fewer rows than features, else Q, and the λ of it.

    Args:
        xs: Rows, contiguous, of float32, bfloat16 or float16; the smaller side at most 128.
        strength: λ, or what it is relative to times this. It may be in the device's memory, read when the kernels run.
        relative: To nothing, or to the mean or the largest eigenvalue of xᵀx/k.
        kinds: For each x what to compute: a sum of `MULTIPLIED`, `SCALED` and `GRAM`.
    """
    if not xs:
        return []
    addresses = [x.data_ptr() for x in xs]
    if isinstance(strength, Tensor):
        of_strength: torch.dtype | None = strength.dtype
    else:
        strength, of_strength = float(strength), None
    aligned = tuple([address % 16 for address in addresses])
    key = (
        tuple([x.shape for x in xs]),
        tuple([x.dtype for x in xs]),
        tuple(kinds),
        relative,
        of_strength,
        aligned,
        xs[0].device,
    )
    plan = _PLANS.get(key)
    if plan is None:
        plan = remember(_PLANS, key, _Plan(xs, RELATIVE[relative], of_strength is not None, kinds))
    return plan(addresses, strength)


class _Plan:
    """The launches for a list of these shapes."""

    def __init__(self, xs: Sequence[Tensor], relative: int, pointer: bool, kinds: Sequence[int]) -> None:
        self._device = xs[0].device
        shapes = [(x.shape[0], x.shape[1]) for x in xs]
        squares = [(min(shape), min(shape)) for shape in shapes]
        self.inverses = Room(squares)
        self.grams = Room(
            [square if kind & GRAM else None for square, kind in zip(squares, kinds, strict=True)], self.inverses.end
        )
        wanted = [shape if kind & MULTIPLIED else None for shape, kind in zip(shapes, kinds, strict=True)]
        self.multiplied = Room(wanted, self.grams.end)
        self.dampings = Room([()] * len(xs), self.multiplied.end)
        offsets = zip(self.multiplied.offsets, self.inverses.offsets, self.grams.offsets, strict=True)
        #: In bytes; nobody asks for what is not there.
        self.places = [(4 * multiplied, 4 * inverse, 4 * gram) for multiplied, inverse, gram in offsets]
        classes = [_class(x) for x in xs]
        self._inversions = [
            self._inversion(one, members, shapes, kinds, relative, pointer)
            for one, members in by_class([(*one, bool(kind & SCALED)) for one, kind in zip(classes, kinds, strict=True)])
        ]
        multiplied = [one if kind & MULTIPLIED else None for one, kind in zip(classes, kinds, strict=True)]
        self._products = [self._product(one, members, shapes) for one, members in by_class(multiplied)]

    def _inversion(
        self,
        one: tuple[Any, ...],
        members: list[int],
        shapes: Sequence[tuple[int, int]],
        kinds: Sequence[int],
        relative: int,
        pointer: bool,
    ) -> tuple[int, Grouped, Grouped]:
        """Room for parts of the Gram matrices, the launch that forms these, and the one that inverts their sums."""
        dtype, by_rows, aligned, block, scaled = one
        spans = [_span(max(shapes[number])) for number in members]
        parts = [triton.cdiv(max(shapes[number]), span) for number, span in zip(members, spans, strict=True)]
        sizes = [(*shapes[number], span) for number, span in zip(members, spans, strict=True)]
        how = {"TYPE": TYPES[dtype], "BY_ROWS": by_rows, "ALIGNED": aligned, "BLOCK": block, "CHUNK": _CHUNK}
        gram = Grouped(_gram, members, parts, sizes, self._device, _WIDE_WARPS[block], how)
        places = [(self.inverses.offsets[n], self.grams.offsets[n], self.dampings.offsets[n]) for n in members]
        firsts = [sum(parts[:number]) for number in range(len(parts))]
        numbers = [
            (*shapes[number], first, count, *place)
            for number, first, count, place in zip(members, firsts, parts, places, strict=True)
        ]
        how = {"RELATIVE": relative, "POINTER": pointer, "SCALED": scaled, "PRECISION": PRECISIONS[scaled]}
        how |= {"BLOCK": block, "PIVOTS": _PIVOTS}
        sweep = Grouped(_sweep, members, [1] * len(members), numbers, self._device, _WARPS[block], how)
        return sum(parts) * block**2, gram, sweep

    def _product(self, one: tuple[Any, ...], members: list[int], shapes: Sequence[tuple[int, int]]) -> Grouped:
        dtype, by_rows, aligned, block = one
        across = [triton.cdiv(max(shapes[number]), _ACROSS) for number in members]
        numbers = [(*shapes[n], self.inverses.offsets[n], self.multiplied.offsets[n]) for n in members]
        how = {"TYPE": TYPES[dtype], "BY_ROWS": by_rows, "ALIGNED": aligned, "BLOCK": block, "ACROSS": _ACROSS}
        return Grouped(_multiply, members, across, numbers, self._device, _WIDE_WARPS[block], how)

    def __call__(self, addresses: Sequence[int], strength: float | Tensor) -> list[Small]:
        result = torch.empty(self.dampings.end, dtype=torch.float32, device=self._device)
        for size, gram, sweep in self._inversions:
            work = torch.empty(size, dtype=torch.float32, device=self._device)
            gram((work,), addresses)
            sweep((work, result, strength))
        for product in self._products:
            product((result,), addresses)
        return [Small(self, result, number) for number in range(len(self.places))]


_PLANS: dict[Any, _Plan] = {}


def _class(x: Tensor) -> tuple[torch.dtype, bool, bool, int]:
    """What the kernels are compiled for: type, which side is the smaller, alignment, and its size, padded."""
    rows, features = x.shape
    if min(rows, features) > MOST_SMALL:
        raise ValueError(f"the smaller side must be at most {MOST_SMALL}, got {rows} × {features}")
    block = max(_PIVOTS, triton.next_power_of_2(min(rows, features)))
    return x.dtype, rows < features, is_aligned(x.data_ptr(), features), block


def _span(length: int) -> int:
    """Columns of a part of a Gram matrix."""
    span: int = triton.cdiv(triton.cdiv(length, _MOST_PARTS), _CHUNK) * _CHUNK
    return max(_SPAN, span)


@triton.jit
def _sides(numbers, BY_ROWS: tl.constexpr, ALIGNED: tl.constexpr):
    """The smaller and the longer side of a job's matrix, and the strides along them."""
    features = size_of(numbers + 1, ALIGNED)
    if BY_ROWS:
        small, long = tl.load(numbers), features
    else:
        small, long = features, tl.load(numbers)
    return small, long, features


@triton.jit
def _places(i, c, features, BY_ROWS: tl.constexpr):
    """Where x or its transpose has its rows i and columns c."""
    if BY_ROWS:
        places = i[:, None] * features + c[None, :]
    else:
        places = c[None, :] * features + i[:, None]
    return places


# fmt: off
@triton.jit(do_not_specialize=names("x"))
def _gram(
    work, table,
    x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15,
    TYPE: tl.constexpr, BY_ROWS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):
    # fmt: on
    """A part of x xᵀ, or of xᵀx where that is smaller."""
    program = tl.program_id(0)
    job, part, numbers = job_of(table, program, 3)
    x = hinted(pick(job, x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15), TYPE, ALIGNED)
    small, long, features = _sides(numbers, BY_ROWS, ALIGNED)
    span = tl.multiple_of(tl.load(numbers + 2).to(tl.int32), CHUNK)
    i = tl.arange(0, BLOCK)
    matrix = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(part * span, tl.minimum((part + 1) * span, long.to(tl.int32)), CHUNK):
        c = start + tl.arange(0, CHUNK)
        inside = (i[:, None] < small) & (c[None, :] < long)
        tile = tl.load(x + _places(i, c, features, BY_ROWS), mask=inside, other=0.0)
        matrix = tl.dot(tile, tl.trans(tile), matrix, input_precision="tf32x3")
    tl.store(work + program.to(tl.int64) * BLOCK * BLOCK + i[:, None] * BLOCK + i[None, :], matrix)


@triton.jit
def _largest(matrix, trace, size, BLOCK: tl.constexpr):
    """The largest eigenvalue by eight products with a vector: the last one's length over that of the one before.

    The matrix is symmetric, so that sums go along its rows and its columns in turn, and no vector changes its place.
    """
    vector = start_vector(tl.arange(0, BLOCK), size)
    matrix = matrix / tl.where(trace > 0, trace, 1.0)
    before, after = 1.0, 1.0
    for _ in tl.static_range(4):
        across = tl.sum(matrix * vector[None, :], axis=1)
        before = tl.sum(across * across, axis=0)
        # Each vector has length 1 before it is multiplied, so that nothing grows or fades.
        across = across * tl.where(before > 0, tl.rsqrt(before), 1.0)
        vector = tl.sum(matrix * across[:, None], axis=0)
        after = tl.sum(vector * vector, axis=0)
        vector = vector * tl.where(after > 0, tl.rsqrt(after), 1.0)
    return trace * tl.sqrt(after)


@triton.jit
def _swept(matrix, work, size, PRECISION: tl.constexpr, BLOCK: tl.constexpr, PIVOTS: tl.constexpr):
    """(I + matrix)⁻¹; `work` has room for it."""
    i = tl.arange(0, BLOCK)
    square = i[:, None] * BLOCK + i[None, :]
    diagonal = i[:, None] == i[None, :]
    least = least_pivot(tl.sum(tl.sum(tl.where(diagonal, matrix, 0.0), axis=1), axis=0))
    matrix += tl.where(diagonal, least, 0.0)
    # Through this memory, columns of the matrix are read and written. The first barrier: others have read it.
    tl.debug_barrier()
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


# fmt: off
@triton.jit(do_not_specialize=["strength"])
def _sweep(
    work, result, strength, table,
    RELATIVE: tl.constexpr, POINTER: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr, PIVOTS: tl.constexpr,
):
    # fmt: on
    """The sum of a job's parts, its damping, and its inverse."""
    numbers = table + 16 + tl.program_id(0) * 7  # a job has one program
    rows, features, parts = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 3).to(tl.int32)
    to_inverse, to_gram, to_damping = tl.load(numbers + 4), tl.load(numbers + 5), tl.load(numbers + 6)
    work += tl.load(numbers + 2) * BLOCK * BLOCK
    size = tl.minimum(rows, features).to(tl.int32)
    i = tl.arange(0, BLOCK)
    square = i[:, None] * BLOCK + i[None, :]
    matrix = tl.load(work + square)
    for part in range(1, parts):
        matrix += tl.load(work + part * BLOCK * BLOCK + square)
    inside = (i[:, None] < size) & (i[None, :] < size)
    places = i[:, None] * size + i[None, :]
    if to_gram >= 0:
        tl.store(result + to_gram + places, matrix, mask=inside)
    damping = tl.load(strength).to(tl.float32) if POINTER else strength
    if RELATIVE > 0:
        trace = tl.sum(tl.sum(tl.where(i[:, None] == i[None, :], matrix, 0.0), axis=1), axis=0)
        if RELATIVE == 1:
            damping = damping * (trace / (rows * features).to(tl.float32))
        else:
            damping = damping * (_largest(matrix, trace, size, BLOCK) / rows.to(tl.float32))
        # Rows of zeros have no curvature to damp: any positive λ gives the plain gradient. What is not a number stays that.
        damping = tl.where(damping < 1.1754944e-38, 1.1754944e-38, damping)
    tl.store(result + to_damping, damping)
    strength = rows.to(tl.float32) * damping
    matrix = _swept(matrix / strength, work, size, PRECISION, BLOCK, PIVOTS)
    if SCALED:
        matrix = matrix / strength
    tl.store(result + to_inverse + places, matrix, mask=inside)


# fmt: off
@triton.jit(do_not_specialize=names("x"))
def _multiply(
    result, table,
    x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15,
    TYPE: tl.constexpr, BY_ROWS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, ACROSS: tl.constexpr,
):
    # fmt: on
    """Some columns of P x. Q is symmetric, so that x Q is Q xᵀ, transposed: there they are rows."""
    job, block, numbers = job_of(table, tl.program_id(0), 4)
    x = hinted(pick(job, x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15), TYPE, ALIGNED)
    small, long, features = _sides(numbers, BY_ROWS, ALIGNED)
    inverse, multiplied = result + tl.load(numbers + 2), result + size_of(numbers + 3, ALIGNED)
    i = tl.arange(0, BLOCK)
    c = block * ACROSS + tl.arange(0, ACROSS)
    matrix = tl.load(inverse + i[:, None] * small + i[None, :], mask=(i[:, None] < small) & (i[None, :] < small), other=0.0)
    inside = (i[:, None] < small) & (c[None, :] < long)
    places = _places(i, c, features, BY_ROWS)
    tile = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(multiplied + places, tl.dot(matrix, tile, input_precision="tf32x3"), mask=inside)
