# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
r"""Gradients less what rows have in common with them, ∇ − (∇rᵀ)(P r), over lists, with the digits of float32.

Two launches. The first reads ∇ once and forms S = ∇rᵀ, 64 outputs in each program. The second subtracts.

Where the norm is kept, the first also forms what the second needs for the ratio of the norms: with U = S P,
$‖ζ^*‖^2 = ‖∇‖^2 - 2⟨S, U⟩ + ⟨U r r^⊤, U⟩$. Each program leaves its part of the sums; the second launch adds these up in order.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from isaac_newton.kernels import MOST_SUBTRACTED
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

__all__ = ["subtract", "subtract_at"]

#: Outputs of a program, and features from which a program of the second launch subtracts.
_OUTPUTS, _ACROSS = 64, 64
#: Rows that are multiplied at once in small products.
_SOME = 64
#: Features of a tile and warps in the first launch, by the padded number of rows.
_FEATURES = {16: 64, 32: 64, 64: 64, 128: 32, 256: 32}
_WARPS = {16: 4, 32: 4, 64: 4, 128: 8, 256: 8}
#: Warps in the second.
_TAKE_WARPS = 4


def subtract(
    gradients: Sequence[Float[Tensor, "_ _"]],
    rows: Sequence[Float[Tensor, "_ _"]],
    multiplied: Sequence[Float[Tensor, "_ _"]],
    *,
    in_place: bool,
    keep_norm: Sequence[tuple[Tensor, Tensor] | None] | None = None,
) -> list[Float[Tensor, "_ _"]]:
    """∇ − (∇rᵀ)(P r) for each gradient, in its dtype.

    Args:
        gradients: Of float32, bfloat16 or float16; either dimension contiguous.
        rows: r, contiguous, of float32; at most 256.
        multiplied: P r, likewise, P scaled by 1/(kλ).
        in_place: Write to the memory of the gradients.
        keep_norm: For each gradient whose norm the result shall have, the scaled P and r rᵀ, contiguous, of float32.
    """
    if not gradients:
        return []
    addresses = [[x.data_ptr() for x in each] for each in (rows, multiplied)]
    pairs = [pair or (row, row) for pair, row in zip(keep_norm or [None] * len(rows), rows, strict=True)]
    addresses += [[pair[which].data_ptr() for pair in pairs] for which in (0, 1)]
    kept = [pair is not None for pair in keep_norm or [None] * len(rows)]
    return subtract_at(gradients, [len(row) for row in rows], addresses, kept, in_place=in_place)


def subtract_at(
    gradients: Sequence[Float[Tensor, "_ _"]],
    rows: Sequence[int],
    addresses: Sequence[Sequence[int]],
    kept: Sequence[bool],
    *,
    in_place: bool,
) -> list[Float[Tensor, "_ _"]]:
    """The same where the numbers of rows are known, and the addresses of r, P r, P and r rᵀ; `kept`: whose norm is kept."""
    own = [gradient.data_ptr() for gradient in gradients]
    results, to, to_strides = list(gradients), own, None
    if not in_place:
        results = [torch.empty_like(gradient) for gradient in gradients]
        to, to_strides = [result.data_ptr() for result in results], tuple([result.stride() for result in results])
    aligned = tuple([(a | b | c | d) % 16 for a, b, c, d in zip(own, to, *addresses[:2], strict=True)])
    forms = tuple([(gradient.shape, gradient.stride(), gradient.dtype) for gradient in gradients])
    key = (forms, to_strides, tuple(rows), aligned, tuple(kept), gradients[0].device)
    plan = _PLANS.get(key)
    if plan is None:
        jobs = zip(gradients, rows, results, aligned, kept, strict=True)
        plan = remember(_PLANS, key, _Plan([_Job(*job) for job in jobs], gradients[0].device))
    plan([own, *addresses, to])
    return results


class _Job:
    """Sizes of a gradient, and what the kernels are compiled for."""

    def __init__(self, gradient: Tensor, rows: int, result: Tensor, misaligned: int, keeps_norm: bool) -> None:
        self.outputs, self.features = gradient.shape
        self.rows = rows
        if self.rows > MOST_SUBTRACTED:
            raise ValueError(f"at most {MOST_SUBTRACTED} rows can be subtracted, got {self.rows}")
        transposed = _is_transposed(gradient)
        other = 1 if transposed else 0
        self.stride, self.to_stride = gradient.stride(other), result.stride(other)
        sizes = (self.outputs if transposed else 16, self.features, self.stride, self.to_stride)
        self.padded = max(16, int(triton.next_power_of_2(self.rows)))
        self.kind = (gradient.dtype, transposed, is_aligned(misaligned, *sizes), keeps_norm, self.padded)
        self.down = -(-self.outputs // _OUTPUTS)
        self.across = -(-self.features // _ACROSS)

    def room(self) -> tuple[int, ...]:
        """Of S, and of U after it where the norm is kept."""
        return 2 if self.kind[3] else 1, self.down * _OUTPUTS, self.padded


def _is_transposed(gradient: Tensor) -> bool:
    """Whether the outputs are the contiguous dimension."""
    outputs, features = gradient.shape
    if gradient.stride(1) == 1 or features == 1:
        return False
    if gradient.stride(0) == 1 or outputs == 1:
        return True
    raise ValueError(f"one dimension of a gradient must be contiguous, got strides {gradient.stride()}")


class _Plan:
    """The launches for a list of these sizes."""

    def __init__(self, jobs: Sequence[_Job], device: torch.device) -> None:
        self._device = device
        room = Room([job.room() for job in jobs])
        sums = Room([(2 * job.down,) if job.kind[3] else None for job in jobs], room.end)
        self._size = sums.end
        self._launches: list[tuple[Grouped, Grouped]] = []
        for kind, members in by_class([job.kind for job in jobs]):
            some = [jobs[number] for number in members]
            sizes = [
                (job.outputs, job.features, job.rows, job.stride, room.offsets[n], sums.offsets[n])
                for job, n in zip(some, members, strict=True)
            ]
            dtype, transposed, aligned, keeps_norm, padded = kind
            how = {"TYPE": TYPES[dtype], "TRANSPOSED": transposed, "ALIGNED": aligned, "NORM": keeps_norm, "ROWS": padded}
            seeing = {**how, "OUTPUTS": _OUTPUTS, "FEATURES": _FEATURES[padded], "SOME": min(padded, _SOME)}
            see = Grouped(_see, members, [job.down for job in some], sizes, device, _WARPS[padded], seeing)
            more = [(*size, job.to_stride, job.down) for size, job in zip(sizes, some, strict=True)]
            programs = [job.down * job.across for job in some]
            take = Grouped(_take, members, programs, more, device, _TAKE_WARPS, {**seeing, "FEATURES": _ACROSS})
            self._launches.append((see, take))

    def __call__(self, addresses: Sequence[Sequence[int]]) -> None:
        gradients, rows, multiplied, inverses, grams, results = addresses
        work = torch.empty(self._size, dtype=torch.float32, device=self._device)
        for see, take in self._launches:
            see((work,), gradients, rows, inverses, grams)
            take((work,), gradients, multiplied, results)


_PLANS: dict[Any, _Plan] = {}


@triton.jit
def _places(o, c, stride, TRANSPOSED: tl.constexpr):
    """Where a gradient has its outputs o and features c."""
    if TRANSPOSED:
        places = c[None, :] * stride + o[:, None]
    else:
        places = o[:, None] * stride + c[None, :]
    return places


@triton.jit
def _product(work, address, first, rows, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SOME: tl.constexpr):
    """What stands in `work` for some outputs times some columns of a small matrix."""
    o = tl.arange(0, OUTPUTS)[:, None]
    total = tl.zeros((OUTPUTS, SOME), dtype=tl.float32)
    for start in range(0, ROWS, SOME):
        i = start + tl.arange(0, SOME)
        c = first + tl.arange(0, SOME)[None, :]
        places = address.to(tl.pointer_type(tl.float32)) + i[:, None] * rows + c
        matrix = tl.load(places, mask=(i[:, None] < rows) & (c < rows), other=0.0)
        total = tl.dot(tl.load(work + o * ROWS + i[None, :]), matrix, total, input_precision="tf32x3")
    return total


@triton.jit
def _change(work, following, inverse, gram, rows, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SOME: tl.constexpr):
    """−2⟨S, U⟩ + ⟨U r rᵀ, U⟩ for some outputs; S stands in `work`, and U goes to `following`."""
    places = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, SOME)[None, :]
    change = tl.zeros((OUTPUTS, SOME), dtype=tl.float32)
    tl.debug_barrier()
    for first in range(0, ROWS, SOME):
        used = _product(work, inverse, first, rows, ROWS, OUTPUTS, SOME)
        change -= 2.0 * tl.load(work + first + places) * used
        tl.store(following + first + places, used)
    tl.debug_barrier()
    for first in range(0, ROWS, SOME):
        change += tl.load(following + first + places) * _product(following, gram, first, rows, ROWS, OUTPUTS, SOME)
    return tl.sum(tl.sum(change, axis=1), axis=0)


# fmt: off
@triton.jit(do_not_specialize=names("grpk"))
def _see(
    work, table,
    g0, g1, g2, g3, g4, g5, g6, g7, g8, g9, g10, g11, g12, g13, g14, g15,
    r0, r1, r2, r3, r4, r5, r6, r7, r8, r9, r10, r11, r12, r13, r14, r15,
    p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13, p14, p15,
    k0, k1, k2, k3, k4, k5, k6, k7, k8, k9, k10, k11, k12, k13, k14, k15,
    TYPE: tl.constexpr, TRANSPOSED: tl.constexpr, ALIGNED: tl.constexpr, NORM: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, FEATURES: tl.constexpr, SOME: tl.constexpr,
):
    # fmt: on
    """∇rᵀ of some outputs; where the norm is kept, also ‖∇‖² of these and what the difference changes in it."""
    job, block, numbers = job_of(table, tl.program_id(0), 6)
    gradient = hinted(pick(job, g0, g1, g2, g3, g4, g5, g6, g7, g8, g9, g10, g11, g12, g13, g14, g15), TYPE, ALIGNED)
    r = hinted(pick(job, r0, r1, r2, r3, r4, r5, r6, r7, r8, r9, r10, r11, r12, r13, r14, r15), tl.float32, ALIGNED)
    outputs = size_of(numbers, ALIGNED and TRANSPOSED)
    features, rows, stride = size_of(numbers + 1, ALIGNED), tl.load(numbers + 2), size_of(numbers + 3, ALIGNED)
    i = tl.arange(0, ROWS)
    o = block * OUTPUTS + tl.arange(0, OUTPUTS)
    total = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
    squares = tl.zeros((OUTPUTS, FEATURES), dtype=tl.float32)
    for start in range(0, features.to(tl.int32), FEATURES):
        c = start + tl.arange(0, FEATURES)
        inside = (o[:, None] < outputs) & (c[None, :] < features)
        own = tl.load(gradient + _places(o, c, stride, TRANSPOSED), mask=inside, other=0.0).to(tl.float32)
        tile = tl.load(r + i[:, None] * features + c[None, :], mask=(i[:, None] < rows) & (c[None, :] < features), other=0.0)
        total = tl.dot(own, tl.trans(tile), total, input_precision="tf32x3")
        if NORM:
            squares += own * own
    seen = work + size_of(numbers + 4, True) + block.to(tl.int64) * OUTPUTS * ROWS
    tl.store(seen + tl.arange(0, OUTPUTS)[:, None] * ROWS + i[None, :], total)
    if NORM:
        inverse = pick(job, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13, p14, p15)
        gram = pick(job, k0, k1, k2, k3, k4, k5, k6, k7, k8, k9, k10, k11, k12, k13, k14, k15)
        following = seen + tl.cdiv(outputs, OUTPUTS) * OUTPUTS * ROWS
        change = _change(seen, following, inverse, gram, rows, ROWS, OUTPUTS, SOME)
        sums = work + tl.load(numbers + 5) + 2 * block
        tl.store(sums, tl.sum(tl.sum(squares, axis=1), axis=0))
        tl.store(sums + 1, change)


@triton.jit
def _ratio(sums, count):
    """‖∇‖/‖ζ*‖ by what all programs left, or 1 where one of them is 0 or not finite."""
    p = tl.arange(0, 64)
    before = tl.zeros((64,), dtype=tl.float32)
    change = tl.zeros((64,), dtype=tl.float32)
    for start in range(0, count, 64):
        before += tl.load(sums + 2 * (start + p), mask=start + p < count, other=0.0)
        change += tl.load(sums + 2 * (start + p) + 1, mask=start + p < count, other=0.0)
    before = tl.sum(before, axis=0)
    after = before + tl.sum(change, axis=0)
    known = (before > 0.0) & (after > 0.0) & (before < float("inf")) & (after < float("inf"))
    return tl.where(known, tl.sqrt(before / tl.where(known, after, 1.0)), 1.0)


# fmt: off
@triton.jit(do_not_specialize=names("gmy"))
def _take(
    work, table,
    g0, g1, g2, g3, g4, g5, g6, g7, g8, g9, g10, g11, g12, g13, g14, g15,
    m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15,
    y0, y1, y2, y3, y4, y5, y6, y7, y8, y9, y10, y11, y12, y13, y14, y15,
    TYPE: tl.constexpr, TRANSPOSED: tl.constexpr, ALIGNED: tl.constexpr, NORM: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, FEATURES: tl.constexpr, SOME: tl.constexpr,
):
    # fmt: on
    """The gradient of some outputs and features less what ∇rᵀ makes of P r."""
    job, program, numbers = job_of(table, tl.program_id(0), 8)
    gradient = hinted(pick(job, g0, g1, g2, g3, g4, g5, g6, g7, g8, g9, g10, g11, g12, g13, g14, g15), TYPE, ALIGNED)
    multiplied = hinted(pick(job, m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15), tl.float32, ALIGNED)
    result = hinted(pick(job, y0, y1, y2, y3, y4, y5, y6, y7, y8, y9, y10, y11, y12, y13, y14, y15), TYPE, ALIGNED)
    outputs = size_of(numbers, ALIGNED and TRANSPOSED)
    features, rows, stride = size_of(numbers + 1, ALIGNED), tl.load(numbers + 2), size_of(numbers + 3, ALIGNED)
    to_stride, blocks = size_of(numbers + 6, ALIGNED), tl.load(numbers + 7).to(tl.int32)
    # Programs one after the other read the same rows of P r.
    block, first = program % blocks, program // blocks * FEATURES
    o = block * OUTPUTS + tl.arange(0, OUTPUTS)
    c = first + tl.arange(0, FEATURES)
    inside = (o[:, None] < outputs) & (c[None, :] < features)
    # Asked for first: it comes from far, and the product can be formed meanwhile.
    own = tl.load(gradient + _places(o, c, stride, TRANSPOSED), mask=inside, other=0.0).to(tl.float32)
    seen = work + size_of(numbers + 4, True) + block.to(tl.int64) * OUTPUTS * ROWS + tl.arange(0, OUTPUTS)[:, None] * ROWS
    total = tl.zeros((OUTPUTS, FEATURES), dtype=tl.float32)
    for start in range(0, ROWS, SOME):
        i = start + tl.arange(0, SOME)
        there = (i[:, None] < rows) & (c[None, :] < features)
        tile = tl.load(multiplied + i[:, None] * features + c[None, :], mask=there, other=0.0)
        total = tl.dot(tl.load(seen + i[None, :]), tile, total, input_precision="tf32x3")
    left = own - total
    if NORM:
        left = left * _ratio(work + tl.load(numbers + 5), blocks)
    tl.store(result + _places(o, c, to_stride, TRANSPOSED), left.to(TYPE), mask=inside)
