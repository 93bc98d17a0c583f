"""How a gradient is replaced in place, once it is known what to multiply it by: dense or sparse, whole or in shards."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from isaac_newton.core.distributed import first_row, is_sharded, keep_own_part, local, sum_over_shards, whole
from isaac_newton.core.layer import ConditionedLayer
from isaac_newton.core.moments import WeightSlice
from isaac_newton.math import equations
from isaac_newton.torch_private import sparse_parts

__all__ = ["Inspect", "rewrite"]

#: Called with a gradient before and after.
Inspect: TypeAlias = Callable[[Tensor, Tensor], None]


def rewrite(
    site: ConditionedLayer,
    where: WeightSlice,
    multiply: Callable[[Tensor], Tensor],
    *,
    diagonal: Tensor | None = None,
    inspect: Inspect | None = None,
) -> None:
    """Replace the gradient of a layer's matrix by what `multiply` makes of it, as (groups, outputs, features).

    Args:
        site: The layer.
        where: Which matrix of it.
        multiply: Conditions it.
        diagonal: Of an embedding: the factors of its rows, in place of `multiply`.
        inspect: Gets the gradient before and after.
    """
    weight = site.module.get_parameter(where.parameter).grad
    bias = None if where.bias is None else site.module.get_parameter(where.bias).grad
    if weight is None:
        return
    gradient = _gradient(weight, bias, where)
    before = gradient.square() if site.run.options.keep_norm else None
    if where.groups == 0:
        assert diagonal is not None
        _divide(gradient, diagonal, inspect)
    else:
        _multiply(*gradient.rows(), where, multiply, inspect)
    if before is not None:
        gradient.restore_norm(before)
    if gradient.is_copy:
        keep_own_part(weight, gradient.weight)
        if bias is not None and gradient.bias is not None:
            keep_own_part(bias, gradient.bias)


class _Gradient(NamedTuple):
    """What this rank can change of a matrix's gradient, and of that of the bias that is conditioned with it.

    Attributes:
        weight: The gradient of the parameter, in which the matrix is a slice; of a sharded one this rank's rows, or a copy.
        bias: That of the bias.
        begin: Which row of the parameter comes first in it.
        own: The rows of the matrix in it.
        shards: Of what it is this rank's part.
        is_copy: Whether it has to be written back.
    """

    weight: Tensor
    bias: Tensor | None
    begin: int
    own: slice
    shards: Tensor | None
    is_copy: bool

    def rows(self) -> tuple[Tensor, Tensor | None]:
        """Those of the matrix."""
        return self.weight[self.own], None if self.bias is None else self.bias[self.own]

    def numbers(self) -> Tensor:
        """What is not zero in an embedding's gradient, dense or sparse."""
        return self.weight.coalesce().values() if self.weight.is_sparse else self.weight[self.own]

    def square(self) -> Tensor:
        """The squared norm."""
        parts = [self.numbers()] + ([] if self.bias is None else [self.bias[self.own]])
        return torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64).square() for part in parts]).sum()

    def restore_norm(self, before: Tensor) -> None:
        """Scale it to this squared norm, that of all shards together."""
        together = torch.stack([before, self.square()])
        if self.shards is not None:
            sum_over_shards(self.shards, together)
        before, after = together.sqrt().unbind()
        weight = sparse_parts(self.weight)[0] if self.weight.is_sparse else self.weight[self.own]
        for part in (weight, None if self.bias is None else self.bias[self.own]):
            if part is not None:
                part.mul_(equations.quotient(before, after).to(part.dtype))


def _gradient(weight: Tensor, bias: Tensor | None, where: WeightSlice) -> _Gradient:
    sharded = is_sharded(weight)
    # Rows of the gradient are multiplied one by one, each rank its own; for other layouts the gradient comes together.
    by_rows = sharded and where.groups <= 1 and not where.transposed
    begin = first_row(weight) if by_rows else 0
    shards = weight if by_rows else None
    if sharded:
        part = local if by_rows else whole
        weight, bias = part(weight), None if bias is None else part(bias)
    own = slice(max(where.start - begin, 0), max(min(where.stop - begin, len(weight)), 0))
    return _Gradient(weight, bias, begin, own, shards, is_copy=sharded and not by_rows)


def _multiply(
    weight: Tensor, bias: Tensor | None, where: WeightSlice, multiply: Callable[[Tensor], Tensor], inspect: Inspect | None
) -> None:
    if weight.numel() == 0:
        return
    dtype = torch.promote_types(weight.dtype, torch.float32)
    matrix = weight.reshape(where.groups, weight.shape[0] // where.groups, -1).to(dtype)
    matrix = matrix.mT if where.transposed else matrix
    if where.bias is not None:
        column = matrix.new_zeros(matrix.shape[:2]) if bias is None else bias.reshape(matrix.shape[:2]).to(dtype)
        matrix = torch.cat([matrix, column[..., None]], dim=-1)
    plain, matrix = matrix, multiply(matrix)
    if inspect is not None:
        inspect(plain, matrix)
    if where.bias is not None:
        if bias is not None:
            bias.copy_(matrix[..., -1].reshape(bias.shape))
        matrix = matrix[..., :-1]
    weight.copy_((matrix.mT if where.transposed else matrix).reshape(weight.shape))


def _divide(gradient: _Gradient, diagonal: Tensor, inspect: Inspect | None) -> None:
    """Scale the rows of an embedding's gradient, dense or sparse."""
    factor = diagonal[gradient.begin + gradient.own.start : gradient.begin + gradient.own.stop]
    plain = None if inspect is None else gradient.numbers().clone()
    if gradient.weight.is_sparse:
        values, indices = sparse_parts(gradient.weight)
        values.mul_(factor[indices[0]][:, None].to(values.dtype))
    else:
        gradient.weight[gradient.own].mul_(factor[:, None].to(gradient.weight.dtype))
    if inspect is not None and plain is not None:
        inspect(plain, gradient.numbers())
