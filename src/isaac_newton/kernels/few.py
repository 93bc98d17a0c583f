# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Gradients times a conditioner of few rows, ∇ (I + rᵀr/(kλ))⁻¹, in one Triton launch: both products and the difference.

The kernel that multiplies forms the inverse as well, unless it is given.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from isaac_newton.kernels.launch import PIVOTS, Launch, kind_of_damping, least_pivot, outer, remember

__all__ = ["multiply", "subtract"]

#: Outputs of a program, and features that it takes at once.
_OUTPUTS, _CHUNK = 16, 128

_LAUNCHES: dict[Any, Launch] = {}


def multiply(
    gradient: Float[Tensor, "groups out in"], r: Float[Tensor, "groups rows in"], damping: float | Tensor
) -> Float[Tensor, "groups out in"]:
    """∇ (I + rᵀr/(kλ))⁻¹ for up to 16 rows, in one launch: inverse, both products and the difference (Woodbury).

    Every program forms the inverse anew, which takes less time than a launch of its own.
    """
    return _condition(gradient, r, None, damping)


def subtract(
    gradient: Float[Tensor, "groups out in"], r: Float[Tensor, "groups rows in"], inverse: Float[Tensor, "groups rows rows"]
) -> Float[Tensor, "groups out in"]:
    """∇ − ∇rᵀ P r for up to 16 rows, in one launch: what Woodbury leaves of a gradient, P the inverse, scaled."""
    return _condition(gradient, r, inverse, 1.0)


def _condition(gradient: Tensor, r: Tensor, inverse: Tensor | None, damping: float | Tensor) -> Tensor:
    groups, outputs, features = gradient.shape
    result = torch.empty_like(gradient, memory_format=torch.contiguous_format)
    given = r if inverse is None else inverse
    strides = (*gradient.stride(), *r.stride(), *given.stride())
    aligned = (gradient.data_ptr() % 16, r.data_ptr() % 16, given.data_ptr() % 16)
    key = (gradient.shape, r.shape[1], strides, gradient.device.index, aligned, kind_of_damping(damping), inverse is None)
    launch = _LAUNCHES.get(key)
    if launch is None:
        kinds = {"GIVEN": inverse is not None, "POINTER": isinstance(damping, Tensor)}
        constants = {**kinds, "ROWS": PIVOTS, "OUTPUTS": _OUTPUTS, "CHUNK": _CHUNK}
        launch = remember(_LAUNCHES, key, Launch(_multiply, (triton.cdiv(outputs, _OUTPUTS), groups, 1), 4, constants))
    launch(gradient, r, given, result, damping, r.shape[1], outputs, features, *strides)
    return result


@triton.jit
def _few_inverse(x, size, features, row_stride, feature_stride, strength, SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """(I + x xᵀ/strength)⁻¹ of one block of pivots, in registers."""
    matrix = outer(x, 0, features, size, features, row_stride, feature_stride, SIZE, CHUNK) / strength
    i = tl.arange(0, SIZE)
    diagonal = i[:, None] == i[None, :]
    least = least_pivot(tl.sum(tl.sum(tl.where(diagonal, matrix, 0.0), axis=1), axis=0))
    matrix += tl.where(diagonal, least, 0.0)
    for step in range(size):
        on_row = i[:, None] == step
        on_column = i[None, :] == step
        column = tl.sum(tl.where(on_column, matrix, 0.0), axis=1)
        row = tl.sum(tl.where(on_row, matrix, 0.0), axis=0)
        pivot = tl.maximum(tl.sum(tl.where(i == step, row, 0.0), axis=0), least)
        scaled = column / pivot
        swept = tl.where(on_row, (row / pivot)[None, :], matrix - scaled[:, None] * row[None, :])
        matrix = tl.where(on_column, tl.where(on_row, -1.0 / pivot, scaled[:, None]), swept)
    return -matrix


@triton.jit
def _multiply(
    gradient,
    r,
    inverse,
    result,
    damping,
    rows,
    outputs,
    features,
    gradient_group,
    gradient_output,
    gradient_feature,
    r_group,
    r_row,
    r_feature,
    inverse_group,
    inverse_row,
    inverse_column,
    GIVEN: tl.constexpr,
    POINTER: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    group = tl.program_id(1).to(tl.int64)
    gradient += group * gradient_group
    r += group * r_group
    result += group * outputs * features
    i = tl.arange(0, ROWS)
    inside = (i[:, None] < rows) & (i[None, :] < rows)
    if GIVEN:
        square = group * inverse_group + i[:, None] * inverse_row + i[None, :] * inverse_column
        matrix = tl.load(inverse + square, inside, other=0.0)
    else:
        if POINTER:
            strength = rows * tl.load(damping).to(tl.float32)
        else:
            strength = rows * damping
        # Rows beyond the last have an identity of their own there.
        matrix = tl.where(inside, _few_inverse(r, rows, features, r_row, r_feature, strength, ROWS, CHUNK), 0.0) / strength
    # The gradient less what the matrix makes of its products with the rows, for the outputs of this program.
    o = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    gradient_places = o[:, None].to(tl.int64) * gradient_output
    r_places = i[:, None].to(tl.int64) * r_row
    seen = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
    for start in range(0, features, CHUNK):
        c = (start + tl.arange(0, CHUNK))[None, :]
        own = tl.load(gradient + gradient_places + c * gradient_feature, (o[:, None] < outputs) & (c < features), other=0.0)
        tile = tl.load(r + r_places + c * r_feature, (i[:, None] < rows) & (c < features), other=0.0)
        seen = tl.dot(own, tl.trans(tile), seen, input_precision="tf32x3")
    seen = tl.dot(seen, matrix, input_precision="tf32x3")
    for start in range(0, features, CHUNK):
        c = (start + tl.arange(0, CHUNK))[None, :]
        here = (o[:, None] < outputs) & (c < features)
        own = tl.load(gradient + gradient_places + c * gradient_feature, here, other=0.0)
        tile = tl.load(r + r_places + c * r_feature, (i[:, None] < rows) & (c < features), other=0.0)
        difference = own - tl.dot(seen, tile, input_precision="tf32x3")
        tl.store(result + o[:, None].to(tl.int64) * features + c, difference, here)
