# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The inverse of a matrix that is too large for one Triton program: every launch sweeps a few pivots of it, block by block.

The sweep operator as in `fused`. What its pivots do to a block depends on the block's own rows and columns beneath and beside
them, and on the pivots themselves: each program repeats the little that others need as well. It reads the matrix as the launch
before left it and writes to another place, so that no program waits for another.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from isaac_newton.kernels.launch import Launch, kind_of_damping, least_pivot, remember

__all__ = ["inverse"]

#: Rows and columns of a block, and pivots of a launch.
_BLOCK, _PIVOTS = 64, 16

_PLANS: dict[Any, list[Launch]] = {}


def inverse(x: Float[Tensor, "k l"], damping: float | Tensor, rows: int) -> Float[Tensor, "k k"]:
    """(I + s·x xᵀ)⁻¹, s = 1/(rows·λ); λ may be one number on the device.

    The product is torch's: it must not be rounded where this is called (`dense.unrounded`).
    """
    size = x.shape[0]
    gram = torch.mm(x, x.mT)
    blocks = triton.cdiv(size, _BLOCK)
    key = (size, x.device.index, kind_of_damping(damping))
    launches = _PLANS.get(key)
    if launches is None:
        sizes = {"DIAGONAL": triton.next_power_of_2(size), "BLOCK": _BLOCK, "PIVOTS": _PIVOTS}
        same = {"POINTER": isinstance(damping, Tensor), **sizes}
        starts = range(0, size, _PIVOTS)
        ends = [{"FIRST": start == starts[0], "LAST": start == starts[-1]} for start in starts]
        launches = [Launch(_sweep, (blocks, blocks, 1), 4, {**same, **end}) for end in ends]
        remember(_PLANS, key, launches)
    padded = blocks * _BLOCK
    before, after = x.new_empty(2, padded, padded).unbind()
    for number, launch in enumerate(launches):
        launch(gram, before, after, damping, rows, size, padded, number * _PIVOTS)
        before, after = after, before
    return before[:size, :size]


@triton.jit
def _load(gram, matrix, r, c, size, padded, strength, least, FIRST: tl.constexpr):
    """Some rows and columns of what is left to sweep: at first I + s·x xᵀ, and beyond its end more of the identity."""
    if FIRST:
        found = tl.load(gram + r * size + c, (r < size) & (c < size), other=0.0) / strength
        found += tl.where(r == c, least, 0.0)
    else:
        found = tl.load(matrix + r * padded + c)
    return found


@triton.jit
def _sweep(
    gram,
    matrix,
    result,
    damping,
    rows,
    size,
    padded,
    start,
    POINTER: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    DIAGONAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    if POINTER:
        strength = rows * tl.load(damping).to(tl.float32)
    else:
        strength = rows * damping
    d = tl.arange(0, DIAGONAL)
    least = least_pivot(tl.sum(tl.load(gram + d * (size + 1), d < size, other=0.0), axis=0) / strength)
    p = tl.arange(0, PIVOTS)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    columns = (start + p)[None, :]
    pivots = _load(gram, matrix, (start + p)[:, None], columns, size, padded, strength, least, FIRST)
    beside = _load(gram, matrix, i[:, None], columns, size, padded, strength, least, FIRST)
    # The matrix is symmetric: what lies beneath is what lies beside the rows of these numbers.
    beneath = _load(gram, matrix, j[:, None], columns, size, padded, strength, least, FIRST)
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
    block = _load(gram, matrix, i[:, None], j[None, :], size, padded, strength, least, FIRST)
    block -= tl.dot(left, tl.trans(right), input_precision="tf32x3")
    if LAST:
        # What is swept is the inverse but for its sign.
        block, beside, beneath = -block, -beside, -beneath
    tl.store(result + i[:, None] * padded + j[None, :], block)
    tl.debug_barrier()
    if tl.program_id(1) == start // BLOCK:
        tl.store(result + i[:, None] * padded + columns, beside)
    if tl.program_id(0) == start // BLOCK:
        tl.store(result + columns * padded + j[:, None], beneath)


@triton.jit
def _swept(panel, column, row, pivot, on_row, on_column):
    """Rows of the columns with pivots after one pivot, whose row is divided by it."""
    scaled = (column / pivot)[:, None]
    swept = tl.where(on_row, row[None, :], panel - column[:, None] * row[None, :])
    return tl.where(on_column, tl.where(on_row, -1.0 / pivot, scaled), swept)
