"""How a gradient is replaced in place, once it is known what to multiply it by: dense or sparse, whole or in shards."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from isaac_newton.core.distributed import first_row, is_sharded, keep_own_part, sum_over_shards
from isaac_newton.core.layer import ConditionedLayer
from isaac_newton.core.moments import WeightSlice
from isaac_newton.core.rows import Layout, sequence
from isaac_newton.math import equations
from isaac_newton.torch_private import sparse_parts

__all__ = ["rewrite"]


def rewrite(
    site: ConditionedLayer,
    where: WeightSlice,
    by: Callable[[Tensor], Tensor] | Tensor,
    eigenvalues: Callable[[], Tensor] | None,
    damping: float | Tensor,
) -> None:
    """Replace the gradient of a layer's matrix by what conditions it.

    Args:
        site: The layer.
        where: Which matrix of it.
        by: Multiplies (*groups, outputs, features); of an embedding the factors of its rows.
        eigenvalues: For an inspection, those of the second moment; None where they are elsewhere.
        damping: λ, for the same.
    """
    weight, bias = (None if name is None else site.module.get_parameter(name).grad for name in (where.parameter, where.bias))
    if weight is None:
        return
    sharded = is_sharded(weight)
    # Rows of the gradient are multiplied one by one, each rank its own; for other layouts the gradient comes together.
    by_rows = sharded and where.groups <= 1 and not where.transposed
    begin = first_row(weight) if by_rows else 0
    tensors: list[Any] = [tensor for tensor in (weight, bias) if tensor is not None]
    here: list[Tensor] = [one.to_local() if by_rows else one.full_tensor() for one in tensors] if sharded else tensors
    own = slice(max(where.start - begin, 0), max(min(where.stop - begin, len(here[0])), 0))
    parts = [part if part.is_sparse else part[own] for part in here]
    square = _square(parts) if site.run.options.keep_norm else None
    plain = _copy(parts) if site.run.inspecting and eigenvalues is not None else None
    if isinstance(by, Tensor):
        _divide(parts[0], by[begin + own.start : begin + own.stop])
    elif parts[0].numel():
        _multiply(parts[0], parts[1] if len(parts) > 1 else None, where, by)
    if plain is not None and eigenvalues is not None and plain.numel():
        site.inspect(eigenvalues, damping, plain, _copy(parts))
    if square is not None:
        _restore_norm(parts, square, weight if by_rows else None)
    if sharded and not by_rows:
        for tensor, whole in zip(tensors, here, strict=True):
            keep_own_part(tensor, whole)


def _numbers(part: Tensor) -> Tensor:
    """What is not zero in an embedding's gradient, dense or sparse."""
    return part.coalesce().values() if part.is_sparse else part


def _copy(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([_numbers(part).double().reshape(-1) for part in parts])


def _square(parts: Sequence[Tensor]) -> Tensor:
    """The squared norm."""
    return torch.stack([torch.linalg.vector_norm(_numbers(part), dtype=torch.float64).square() for part in parts]).sum()


def _restore_norm(parts: Sequence[Tensor], before: Tensor, shards: Tensor | None) -> None:
    """Scale a gradient to this squared norm, that of all shards together."""
    squares = torch.stack([before, _square(parts)])
    if shards is not None:
        sum_over_shards(shards, squares)
    ratio = equations.quotient(*squares.sqrt().unbind())
    for part in parts:
        (sparse_parts(part)[0] if part.is_sparse else part).mul_(ratio.to(part.dtype))


def _multiply(weight: Tensor, bias: Tensor | None, where: WeightSlice, by: Callable[[Tensor], Tensor]) -> None:
    layout = Layout(sequence, where.transposed, joint=where.bias is not None)
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    for part, done in zip((weight, bias), layout.parts(by(layout.matrix(wide, bias, where.groups)), weight, bias), strict=True):
        if part is not None and done is not None:
            part.copy_(done)


def _divide(rows: Tensor, factors: Tensor) -> None:
    """Scale the rows of an embedding's gradient, dense or sparse."""
    if rows.is_sparse:
        rows, indices = sparse_parts(rows)
        factors = factors[indices[0]]
    rows.mul_(factors[:, None].to(rows.dtype))
