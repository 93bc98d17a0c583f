# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Inverses of 129 to 1024 rows or features, over lists: every launch sweeps a few pivots of all of them, block by block.

The sweep operator as in `inverse_small`. What its pivots do to a block depends on the block's own rows and columns beneath and
beside them, and on the pivots themselves: each program repeats the little that others need as well. It reads the matrix as the
launch before left it and writes to another place, so that no program waits for another. Jobs whose sizes are equal when padded
to whole blocks go together; beyond its end a matrix goes on as the identity, whose pivots change nothing.

Gram matrices and products with the rows are torch's, of each job by itself.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from isaac_newton.kernels import GRAM, MOST_INVERTED, MULTIPLIED, SCALED, Inverted
from isaac_newton.kernels.cpu import unrounded
from isaac_newton.kernels.sweep import PRECISIONS, RELATIVE, least_pivot, start_vector
from isaac_newton.kernels.tables import Grouped, Room, by_class, job_of, names, pick, remember

__all__ = ["GRAM", "MULTIPLIED", "SCALED", "inverses"]

#: Rows and columns of a block, and pivots of a launch.
_BLOCK, _PIVOTS = 64, 16
#: Products with a vector, to find the largest eigenvalue.
_PRODUCTS = 8


def inverses(
    xs: Sequence[Float[Tensor, "_ _"]],
    strength: float | Float[Tensor, ""],
    relative: Literal["", "mean", "largest"],
    kinds: Sequence[int],
) -> list[Inverted]:
    """P for each x of fewer rows than features, else Q, and the λ of it, as `inverse_small.inverses`.

    Args:
        xs: Rows, contiguous, of float32, bfloat16 or float16; the smaller side at most 1024.
        strength: λ, or what it is relative to times this. It may be in the device's memory, read when the kernels run.
        relative: To nothing, or to the mean or the largest eigenvalue of xᵀx/k.
        kinds: For each x what to compute: a sum of `MULTIPLIED`, `SCALED` and `GRAM`.
    """
    if not xs:
        return []
    if isinstance(strength, Tensor):
        of_strength: torch.dtype | None = strength.dtype
    else:
        strength, of_strength = float(strength), None
    scaled = tuple([bool(kind & SCALED) for kind in kinds])
    key = (tuple([x.shape for x in xs]), scaled, relative, of_strength, xs[0].device)
    plan = _PLANS.get(key)
    if plan is None:
        shapes = [(x.shape[0], x.shape[1]) for x in xs]
        plan = remember(_PLANS, key, _Plan(shapes, scaled, RELATIVE[relative], of_strength is not None, xs[0].device))
    with unrounded(xs[0]):
        grams = [_gram(x) for x in xs]
        found, dampings = plan([gram.data_ptr() for gram in grams], strength)
        return [
            Inverted(inverse, _multiplied(x, inverse) if kind & MULTIPLIED else None, damping, gram if kind & GRAM else None)
            for x, kind, gram, inverse, damping in zip(xs, kinds, grams, found, dampings, strict=True)
        ]


def _gram(x: Tensor) -> Tensor:
    """The smaller of x xᵀ and xᵀx in float32."""
    first, second = (x, x.mT) if x.shape[0] < x.shape[1] else (x.mT, x)
    if x.dtype is torch.float32:
        return torch.mm(first, second)
    if x.is_cuda:
        return torch.mm(first, second, out_dtype=torch.float32)
    return torch.mm(first.float(), second.float())


def _multiplied(x: Tensor, inverse: Tensor) -> Tensor:
    x = x.float()
    return torch.mm(inverse, x) if x.shape[0] < x.shape[1] else torch.mm(x, inverse)


class _Plan:
    """The launches for a list of these shapes."""

    def __init__(
        self, shapes: Sequence[tuple[int, int]], scaled: Sequence[bool], relative: int, pointer: bool, device: torch.device
    ) -> None:
        self._device, self._relative = device, relative
        sizes = [min(shape) for shape in shapes]
        if max(sizes) > MOST_INVERTED:
            raise ValueError(f"the smaller side must be at most {MOST_INVERTED}, got {max(sizes)}")
        padded = [triton.cdiv(size, _BLOCK) * _BLOCK for size in sizes]
        squares = Room([(size, size) for size in padded])
        vectors = Room([(2, size) for size in padded], squares.end)
        self._scratch = vectors.end
        self._inverses = Room([(size, size) for size in sizes])
        self._dampings = Room([()] * len(shapes), self._inverses.end)
        places = [squares.offsets, vectors.offsets, self._inverses.offsets, self._dampings.offsets]
        numbers = [(*shape, *place) for shape, *place in zip(shapes, *places, strict=True)]
        self._series = [
            self._launches(size, is_scaled, members, [numbers[member] for member in members], pointer)
            for (size, is_scaled), members in by_class(list(zip(padded, scaled, strict=True)))
        ]

    def _launches(
        self, padded: int, scaled: bool, members: list[int], numbers: list[tuple[int, ...]], pointer: bool
    ) -> tuple[list[Grouped], list[Grouped]]:
        """Those that find the dampings, and those that sweep."""
        count, blocks = len(members), padded // _BLOCK
        width = {"WIDTH": int(triton.next_power_of_2(padded)), "BLOCK": _BLOCK}
        turns = [{**width, "TURN": turn} for turn in range(_PRODUCTS if self._relative == 2 else 0)]
        first = [Grouped(_product, members, [blocks] * count, numbers, self._device, 4, turn) for turn in turns]
        how = {**width, "RELATIVE": self._relative, "POINTER": pointer}
        damp = Grouped(_damp, members, [1] * count, numbers, self._device, 4, how)
        how = {**width, "PIVOTS": _PIVOTS, "SCALED": scaled, "PADDED": padded}
        precision = {"PRECISION": PRECISIONS[scaled]}
        ends = [{"FIRST": first, "LAST": last} for first, last in ((True, False), (False, False), (False, True))]
        sweeps = [
            Grouped(_sweep, members, [blocks**2] * count, numbers, self._device, 4, {**how, **precision, **end}) for end in ends
        ]
        return [*first, damp], [sweeps[0], *[sweeps[1]] * (padded // _PIVOTS - 2), sweeps[2]]

    def __call__(self, grams: Sequence[int], strength: float | Tensor) -> tuple[list[Tensor], list[Tensor]]:
        # Two of each matrix: one is read while the other is written.
        one, other = torch.empty(2, self._scratch, dtype=torch.float32, device=self._device).unbind()
        result = torch.empty(self._dampings.end, dtype=torch.float32, device=self._device)
        for dampings, sweeps in self._series:
            for launch in dampings:
                launch((one, result, strength), grams)
            for number, sweep in enumerate(sweeps):
                sweep((one, other, result, number * _PIVOTS), grams)
                one, other = other, one
        inverses, found = self._inverses.split(result), self._dampings.split(result)
        return [each for each in inverses if each is not None], [each for each in found if each is not None]


_PLANS: dict[Any, _Plan] = {}


@triton.jit
def _trace(gram, size, WIDTH: tl.constexpr):
    """The sum of a Gram matrix's diagonal."""
    d = tl.arange(0, WIDTH)
    return tl.sum(tl.load(gram + d * (size + 1), mask=d < size, other=0.0), axis=0)


# fmt: off
@triton.jit(do_not_specialize=names("k", "strength"))
def _product(
    scratch, result, strength, table,
    k0, k1, k2, k3, k4, k5, k6, k7, k8, k9, k10, k11, k12, k13, k14, k15,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TURN: tl.constexpr,
):
    # fmt: on
    """Some rows of a Gram matrix, over its trace, times the vector of the turn before, which gets length 1."""
    job, block, numbers = job_of(table, tl.program_id(0), 6)
    gram = pick(job, k0, k1, k2, k3, k4, k5, k6, k7, k8, k9, k10, k11, k12, k13, k14, k15).to(tl.pointer_type(tl.float32))
    size = tl.minimum(tl.load(numbers), tl.load(numbers + 1))
    vectors = scratch + tl.load(numbers + 3)
    padded = tl.cdiv(size, BLOCK) * BLOCK
    from_vector, to_vector = vectors + TURN % 2 * padded, vectors + (1 - TURN % 2) * padded
    trace = _trace(gram, size, WIDTH)
    scale = 1.0 / tl.where(trace > 0, trace, 1.0)
    if TURN > 0:
        whole = tl.load(from_vector + tl.arange(0, WIDTH), mask=tl.arange(0, WIDTH) < size, other=0.0)
        length = tl.sum(whole * whole, axis=0)
        scale = scale * tl.where(length > 0, tl.rsqrt(length), 1.0)
    i = block * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, size.to(tl.int32), BLOCK):
        j = start + tl.arange(0, BLOCK)
        if TURN > 0:
            vector = tl.load(from_vector + j, mask=j < size, other=0.0)
        else:
            vector = start_vector(j, size)
        inside = (i[:, None] < size) & (j[None, :] < size)
        total += tl.load(gram + i[:, None] * size + j[None, :], mask=inside, other=0.0) * vector[None, :]
    tl.store(to_vector + i, scale * tl.sum(total, axis=1))


# fmt: off
@triton.jit(do_not_specialize=names("k", "strength"))
def _damp(
    scratch, result, strength, table,
    k0, k1, k2, k3, k4, k5, k6, k7, k8, k9, k10, k11, k12, k13, k14, k15,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, RELATIVE: tl.constexpr, POINTER: tl.constexpr,
):
    # fmt: on
    """λ of a job."""
    job, _, numbers = job_of(table, tl.program_id(0), 6)
    gram = pick(job, k0, k1, k2, k3, k4, k5, k6, k7, k8, k9, k10, k11, k12, k13, k14, k15).to(tl.pointer_type(tl.float32))
    rows, features = tl.load(numbers), tl.load(numbers + 1)
    size = tl.minimum(rows, features)
    damping = tl.load(strength).to(tl.float32) if POINTER else strength
    if RELATIVE > 0:
        trace = _trace(gram, size, WIDTH)
        if RELATIVE == 1:
            damping = damping * (trace / (rows * features).to(tl.float32))
        else:
            # After an even number of turns the last vector stands first.
            d = tl.arange(0, WIDTH)
            vector = tl.load(scratch + tl.load(numbers + 3) + d, mask=d < size, other=0.0)
            damping = damping * (trace * tl.sqrt(tl.sum(vector * vector, axis=0)) / rows.to(tl.float32))
        # Rows of zeros have no curvature to damp: any positive λ gives the plain gradient. What is not a number stays that.
        damping = tl.where(damping < 1.1754944e-38, 1.1754944e-38, damping)
    tl.store(result + tl.load(numbers + 5), damping)


@triton.jit
def _load(gram, matrix, r, c, size, strength, least, FIRST: tl.constexpr, PADDED: tl.constexpr):
    """Some rows and columns of what is left to sweep: at first I + s·x xᵀ, and beyond its end more of the identity."""
    if FIRST:
        found = tl.load(gram + r * size + c, mask=(r < size) & (c < size), other=0.0) / strength
        found += tl.where(r == c, least, 0.0)
    else:
        found = tl.load(matrix + r * PADDED + c)
    return found


@triton.jit
def _swept(panel, column, row, pivot, on_row, on_column):
    """Rows of the columns with pivots after one pivot, whose row is divided by it."""
    scaled = (column / pivot)[:, None]
    swept = tl.where(on_row, row[None, :], panel - column[:, None] * row[None, :])
    return tl.where(on_column, tl.where(on_row, -1.0 / pivot, scaled), swept)


@triton.jit
def _store(matrix, result, r, c, values, size, strength, LAST: tl.constexpr, SCALED: tl.constexpr, PADDED: tl.constexpr):
    """What is swept is the inverse but for its sign; at last it goes to the result."""
    if LAST:
        values = -values / strength if SCALED else -values
        tl.store(result + r * size + c, values, mask=(r < size) & (c < size))
    else:
        tl.store(matrix + r * PADDED + c, values)


# fmt: off
@triton.jit(do_not_specialize=names("k", "start"))
def _sweep(
    before, after, result, start, table,
    k0, k1, k2, k3, k4, k5, k6, k7, k8, k9, k10, k11, k12, k13, k14, k15,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PIVOTS: tl.constexpr, SCALED: tl.constexpr, PADDED: tl.constexpr,
    PRECISION: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
):
    # fmt: on
    """A block of a matrix after some pivots."""
    job, block, numbers = job_of(table, tl.program_id(0), 6)
    gram = pick(job, k0, k1, k2, k3, k4, k5, k6, k7, k8, k9, k10, k11, k12, k13, k14, k15).to(tl.pointer_type(tl.float32))
    rows, size = tl.load(numbers), tl.minimum(tl.load(numbers), tl.load(numbers + 1))
    before += tl.load(numbers + 2)
    after += tl.load(numbers + 2)
    strength = rows.to(tl.float32) * tl.load(result + tl.load(numbers + 5))
    result += tl.load(numbers + 4)
    least = least_pivot(_trace(gram, size, WIDTH) / strength)
    p = tl.arange(0, PIVOTS)
    down, across = block // (PADDED // BLOCK), block % (PADDED // BLOCK)
    i, j = down * BLOCK + tl.arange(0, BLOCK), across * BLOCK + tl.arange(0, BLOCK)
    columns = (start + p)[None, :]
    pivots = _load(gram, before, (start + p)[:, None], columns, size, strength, least, FIRST, PADDED)
    beside = _load(gram, before, i[:, None], columns, size, strength, least, FIRST, PADDED)
    # The matrix is symmetric: what lies beneath is what lies beside the rows of these numbers.
    beneath = _load(gram, before, j[:, None], columns, size, strength, least, FIRST, PADDED)
    left = tl.zeros((BLOCK, PIVOTS), dtype=tl.float32)
    right = tl.zeros((BLOCK, PIVOTS), dtype=tl.float32)
    for step in range(PIVOTS):
        on_column = p[None, :] == step
        row = tl.sum(tl.where(p[:, None] == step, pivots, 0.0), axis=0)
        pivot = tl.maximum(tl.sum(tl.where(p == step, row, 0.0), axis=0), least)
        row = row / pivot
        column = tl.sum(tl.where(on_column, beside, 0.0), axis=1)
        left = tl.where(on_column, column[:, None], left)
        beside = _swept(beside, column, row, pivot, i[:, None] == start + step, on_column)
        column = tl.sum(tl.where(on_column, beneath, 0.0), axis=1)
        right = tl.where(on_column, (column / pivot)[:, None], right)
        beneath = _swept(beneath, column, row, pivot, j[:, None] == start + step, on_column)
        column = tl.sum(tl.where(on_column, pivots, 0.0), axis=1)
        pivots = _swept(pivots, column, row, pivot, p[:, None] == step, on_column)
    # What the pivots do to the rest, all at once.
    left = tl.where(((i < start) | (i >= start + PIVOTS))[:, None], left, 0.0)
    right = tl.where(((j < start) | (j >= start + PIVOTS))[:, None], right, 0.0)
    rest = _load(gram, before, i[:, None], j[None, :], size, strength, least, FIRST, PADDED)
    rest -= tl.dot(left, tl.trans(right), input_precision=PRECISION)
    _store(after, result, i[:, None], j[None, :], rest, size, strength, LAST, SCALED, PADDED)
    tl.debug_barrier()
    if across == start // BLOCK:
        _store(after, result, i[:, None], columns, beside, size, strength, LAST, SCALED, PADDED)
    if down == start // BLOCK:
        _store(after, result, columns, j[:, None], beneath, size, strength, LAST, SCALED, PADDED)
