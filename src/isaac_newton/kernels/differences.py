# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Gradients less what rows have in common with them, ∇ − ∇rᵀ P r, on tensor cores and yet with the digits of float32.

Tensor cores multiply numbers of bfloat16, and three of these add up to one of float32: x = x₁ + x₂ + x₃, each what the former
leave, rounded. Six of the nine products of two such sums count; the others are below the last digit. All are added up in
float32. A gradient that has bfloat16 already is its own x₁.

What does not depend on the gradient, r and P r in three parts each, is prepared before that is there. Two launches are left:
∇rᵀ, a piece of the features in each program, and the difference.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from isaac_newton.kernels.launch import Launch, remember

__all__ = ["prepare", "subtract"]

#: Outputs and features of a tile; what is prepared is padded to whole tiles with zeros.
_OUTPUTS, _FEATURES = 64, 64
#: Programs that a launch is made of where there are tiles enough: as many as an H200 has multiprocessors, or a few less.
_PROGRAMS = 128
#: Of the features; every program of the second launch adds up the sums of all of them.
_MOST_PIECES = 8
#: Tiles that are on their way to a program at once.
_STAGES = 2

_PREPARATIONS: dict[Any, Launch] = {}
_DIFFERENCES: dict[Any, tuple[Launch, Launch]] = {}


def prepare(inverse: Float[Tensor, "1 rows rows"], r: Float[Tensor, "1 rows in"]) -> Float[Tensor, "2 3 padded_rows padded_in"]:
    """Both r and P r, each as three parts, for `subtract`."""
    _, rows, features = r.shape
    padded = max(triton.next_power_of_2(rows), 16)
    tiles = triton.cdiv(features, _FEATURES)
    result = torch.empty(2, 3, padded, tiles * _FEATURES, dtype=torch.bfloat16, device=r.device)
    strides = (*inverse.stride()[1:], *r.stride()[1:])
    key = (r.shape, strides, r.device.index, inverse.data_ptr() % 16, r.data_ptr() % 16)
    launch = _PREPARATIONS.get(key)
    if launch is None:
        constants = {"ROWS": padded, "FEATURES": _FEATURES}
        launch = remember(_PREPARATIONS, key, Launch(_prepare, (tiles, 1, 1), 8, constants))
    launch(inverse, r, result, rows, features, tiles * _FEATURES, *strides)
    return result


def subtract(
    gradient: Float[Tensor, "1 out in"], prepared: Float[Tensor, "2 3 padded_rows padded_in"]
) -> Float[Tensor, "1 out in"]:
    """∇ − ∇rᵀ P r in float32, of a gradient in that or in bfloat16."""
    _, outputs, features = gradient.shape
    _, _, rows, width = prepared.shape
    result = torch.empty(gradient.shape, dtype=torch.float32, device=gradient.device)
    strides = gradient.stride()[1:]
    key = (gradient.shape, strides, gradient.dtype, rows, gradient.device.index, gradient.data_ptr() % 16)
    found = _DIFFERENCES.get(key)
    down, across = triton.cdiv(outputs, _OUTPUTS), width // _FEATURES
    length = triton.cdiv(across, min(_MOST_PIECES, triton.cdiv(_PROGRAMS, down)))
    pieces = triton.cdiv(across, length)
    if found is None:
        constants = {"ROWS": rows, "OUTPUTS": _OUTPUTS, "FEATURES": _FEATURES, "STAGES": _STAGES}
        whole = {**constants, "WIDE": gradient.dtype is torch.float32}
        beside = min(triton.cdiv(_PROGRAMS, down), across)
        see = Launch(_see, (down, pieces, 1), 4, whole)
        take = Launch(_take, (down, beside, 1), 4, {**constants, "PIECES": pieces, "BESIDE": beside})
        found = remember(_DIFFERENCES, key, (see, take))
    see, take = found
    seen = torch.empty(pieces, outputs, rows, dtype=torch.float32, device=gradient.device)
    see(gradient, prepared, seen, outputs, features, width, length, *strides)
    take(gradient, prepared, seen, result, outputs, features, width, *strides)
    return result


@triton.jit
def _parts(x):
    """Three numbers of bfloat16 for each of float32."""
    first = x.to(tl.bfloat16)
    rest = x - first.to(tl.float32)
    second = rest.to(tl.bfloat16)
    return first, second, (rest - second.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _product(a1, a2, a3, b1, b2, b3, total):
    """The product of two sums of three, less what is below the last digit; the smallest first."""
    total = tl.dot(a3, b1, total)
    total = tl.dot(a2, b2, total)
    total = tl.dot(a1, b3, total)
    total = tl.dot(a2, b1, total)
    total = tl.dot(a1, b2, total)
    return tl.dot(a1, b1, total)


@triton.jit
def _prepare(
    inverse,
    r,
    result,
    rows,
    features,
    width,
    inverse_row,
    inverse_column,
    r_row,
    r_feature,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    i = tl.arange(0, ROWS)
    c = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    inside = (i[:, None] < rows) & (i[None, :] < rows)
    matrix = tl.load(inverse + i[:, None] * inverse_row + i[None, :] * inverse_column, inside, other=0.0)
    here = (i[:, None] < rows) & (c[None, :] < features)
    tile = tl.load(r + i[:, None].to(tl.int64) * r_row + c[None, :].to(tl.int64) * r_feature, here, other=0.0)
    p1, p2, p3 = _parts(matrix)
    r1, r2, r3 = _parts(tile)
    m1, m2, m3 = _parts(_product(p1, p2, p3, r1, r2, r3, tl.zeros((ROWS, FEATURES), dtype=tl.float32)))
    places = result + i[:, None].to(tl.int64) * width + c[None, :]
    size = ROWS * width.to(tl.int64)
    tl.store(places, r1)
    tl.store(places + size, r2)
    tl.store(places + 2 * size, r3)
    tl.store(places + 3 * size, m1)
    tl.store(places + 4 * size, m2)
    tl.store(places + 5 * size, m3)


@triton.jit
def _see(
    gradient,
    prepared,
    seen,
    outputs,
    features,
    width,
    length,
    gradient_output,
    gradient_feature,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    FEATURES: tl.constexpr,
    STAGES: tl.constexpr,
    WIDE: tl.constexpr,
):
    """∇rᵀ of some outputs and some features."""
    i = tl.arange(0, ROWS)
    o = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    piece = tl.program_id(1)
    size = ROWS * width.to(tl.int64)
    gradient += o[:, None].to(tl.int64) * gradient_output
    prepared += i[None, :].to(tl.int64) * width
    total = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
    for tile in tl.range(piece * length, tl.minimum((piece + 1) * length, width // FEATURES), num_stages=STAGES):
        c = tile * FEATURES + tl.arange(0, FEATURES)
        own = tl.load(
            gradient + c[None, :].to(tl.int64) * gradient_feature, (o[:, None] < outputs) & (c[None, :] < features), other=0.0
        )
        places = prepared + c[:, None]
        r1 = tl.load(places)
        r2 = tl.load(places + size)
        r3 = tl.load(places + 2 * size)
        if WIDE:
            g1, g2, g3 = _parts(own)
            total = _product(g1, g2, g3, r1, r2, r3, total)
        else:
            total = tl.dot(own, r3, total)
            total = tl.dot(own, r2, total)
            total = tl.dot(own, r1, total)
    sums = (piece.to(tl.int64) * outputs + o[:, None]) * ROWS + i[None, :]
    tl.store(seen + sums, total, o[:, None] < outputs)


@triton.jit
def _take(
    gradient,
    prepared,
    seen,
    result,
    outputs,
    features,
    width,
    gradient_output,
    gradient_feature,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    FEATURES: tl.constexpr,
    STAGES: tl.constexpr,
    PIECES: tl.constexpr,
    BESIDE: tl.constexpr,
):
    """The gradient of some outputs less what ∇rᵀ makes of P r."""
    i = tl.arange(0, ROWS)
    o = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    total = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
    for piece in tl.static_range(PIECES):
        sums = (piece * outputs + o[:, None].to(tl.int64)) * ROWS + i[None, :]
        total += tl.load(seen + sums, o[:, None] < outputs, other=0.0)
    s1, s2, s3 = _parts(total)
    size = ROWS * width.to(tl.int64)
    prepared += 3 * size + i[:, None].to(tl.int64) * width
    gradient += o[:, None].to(tl.int64) * gradient_output
    result += o[:, None].to(tl.int64) * features
    for tile in tl.range(tl.program_id(1), width // FEATURES, BESIDE, num_stages=STAGES):
        c = tile * FEATURES + tl.arange(0, FEATURES)
        places = prepared + c[None, :]
        m1 = tl.load(places)
        m2 = tl.load(places + size)
        m3 = tl.load(places + 2 * size)
        here = (o[:, None] < outputs) & (c[None, :] < features)
        own = tl.load(gradient + c[None, :].to(tl.int64) * gradient_feature, here, other=0.0).to(tl.float32)
        common = _product(s1, s2, s3, m1, m2, m3, tl.zeros((OUTPUTS, FEATURES), dtype=tl.float32))
        tl.store(result + c[None, :], own - common, here)
