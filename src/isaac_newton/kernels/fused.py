# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
r"""The inverse of up to 128 rows in two Triton launches: the Gram matrix by many programs, its inverse by one.

Products run on the tensor cores as three TF32 products each, which keeps float32's accuracy. The inverse is the symmetric
sweep operator, sixteen pivots at a time: the 16 × 16 block is swept pivot by pivot, the rest of the matrix by products.
Every pivot of $I + s\,x x^\top$ is at least 1, since every Schur complement of it is $I$ plus something positive. Taking
the larger of pivot and 1 repairs what rounding may have done, so nothing can fail. Sums are formed in a fixed order: the
same input gives the same bits.
"""

from typing import Any

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

__all__ = ["inverse"]

#: Up to this many features the program that inverts forms the Gram matrix too: one launch less is worth more than the
#: parallelism.
_INLINE_FEATURES = 512
_PIVOTS = 16
_CHUNK = 32
_WARPS = {16: 1, 32: 1, 64: 4, 128: 8}


def inverse(
    x: Float[Tensor, "*groups k l"], damping: float | Tensor, rows: int, *, launches: int = 1
) -> Float[Tensor, "*groups k k"]:
    """(I + x xᵀ/(rows·λ))⁻¹; λ may be a tensor on the device, one number or one for each group, read when the kernel runs.

    `launches=2` forms the Gram matrix in parallel first: shorter on the device, longer on the host. Wide inputs get it anyway.
    """
    key = (x.shape, x.stride(), x.device.index, x.data_ptr() % 16, _kind(damping), rows, launches)
    plan = _PLANS.get(key)
    if plan is None:
        if len(_PLANS) >= _MOST_PLANS:
            _PLANS.clear()
        plan = _PLANS[key] = _Plan(x, rows, isinstance(damping, Tensor), launches)
    return plan(x, damping)


def _kind(damping: float | Tensor) -> int:
    return damping.dim() if isinstance(damping, Tensor) else -1


class _Plan:
    """How to launch for inputs of one shape: what Triton would work out anew at each call."""

    def __init__(self, x: Tensor, rows: int, pointer: bool, launches: int) -> None:
        self._groups = 1 if x.dim() == 2 else x.shape[0]
        size, features = x.shape[-2:]
        self._block = max(_PIVOTS, triton.next_power_of_2(size))
        # Many groups keep the device busy without the help of more programs each.
        inline = features <= _INLINE_FEATURES and (launches == 1 or self._groups >= 32)
        # Enough programs that none multiplies more than a few chunks, few enough that adding up their parts stays cheap.
        self._parts = 1 if inline else min(16, max(1, features // (4 * _CHUNK)))
        span = triton.cdiv(triton.cdiv(features, self._parts), _CHUNK) * _CHUNK
        strides = (0 if x.dim() == 2 else x.stride(0), x.stride(-2), x.stride(-1))
        self._gram = (
            None if inline else _Launch(_gram, (self._parts, self._groups, 1), 4, {"BLOCK": self._block, "CHUNK": _CHUNK})
        )
        constants = {"INLINE": inline, "POINTER": pointer, "BLOCK": self._block, "PIVOTS": _PIVOTS, "CHUNK": _CHUNK}
        self._sweep = _Launch(_sweep, (self._groups, 1, 1), _WARPS[self._block], constants)
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


class _Launch:
    """A kernel on a grid; past Triton's argument handling once it is compiled."""

    def __init__(self, kernel: Any, grid: tuple[int, int, int], warps: int, constants: dict[str, Any]) -> None:
        self._kernel, self._grid, self._warps, self._constants = kernel, grid, warps, constants
        self._run: Any = None

    def __call__(self, *arguments: Any) -> None:
        if self._run is not None:
            self._run(*arguments, *self._constants.values())
            return
        compiled = self._kernel[self._grid](*arguments, **self._constants, num_warps=self._warps)
        if compiled is not None:  # it is, where Triton interprets
            self._run = compiled[self._grid]


#: Batches of ever new sizes must not fill the memory.
_MOST_PLANS = 1024
_PLANS: dict[Any, _Plan] = {}


@triton.jit
def _product(x, first, last, size, features, row_stride, feature_stride, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    matrix = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(first, last, CHUNK):
        c = start + tl.arange(0, CHUNK)
        inside = (i[:, None] < size) & (c[None, :] < features)
        place = i[:, None].to(tl.int64) * row_stride + c[None, :].to(tl.int64) * feature_stride
        tile = tl.load(x + place, mask=inside, other=0.0)
        matrix = tl.dot(tile, tl.trans(tile), matrix, input_precision="tf32x3")
    return matrix


@triton.jit
def _gram(x, work, size, features, span, group_stride, row_stride, feature_stride, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    part = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    first = part * span
    last = min(first + span, features)
    matrix = _product(x + group * group_stride, first, last, size, features, row_stride, feature_stride, BLOCK, CHUNK)
    i = tl.arange(0, BLOCK)
    work += (group * tl.num_programs(0) + part) * BLOCK * BLOCK
    tl.store(work + i[:, None] * BLOCK + i[None, :], matrix)


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
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    work += group * parts * BLOCK * BLOCK
    i = tl.arange(0, BLOCK)
    square = i[:, None] * BLOCK + i[None, :]
    if INLINE:
        matrix = _product(x + group * group_stride, 0, features, size, features, row_stride, feature_stride, BLOCK, CHUNK)
    else:
        matrix = tl.load(work + square)
        for part in range(1, parts):
            matrix += tl.load(work + part * BLOCK * BLOCK + square)
    if POINTER:
        strength = tl.load(damping + group * damping_stride).to(tl.float32)
    else:
        strength = damping
    matrix = matrix / (rows * strength)
    # As much again as the products were rounded by: where rows repeat, that outweighs the identity, and pivots would be noise.
    diagonal = i[:, None] == i[None, :]
    least = 1.0 + 1.1920929e-07 * tl.sum(tl.sum(tl.where(diagonal, matrix, 0.0), axis=1), axis=0)
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
        matrix -= tl.dot(before, tl.trans(after), input_precision="tf32x3")
        tl.debug_barrier()
        tl.store(work + square, matrix)
        tl.debug_barrier()
        tl.store(work + columns, panel)
        tl.store(work + (start + p)[None, :] * BLOCK + i[:, None], panel)
        tl.debug_barrier()
        matrix = tl.load(work + square)
    tl.debug_barrier()
    tl.store(work + square, -matrix)
