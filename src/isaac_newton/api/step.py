"""Right before an optimizer's step, with `when="step"`: every gradient is conditioned by what its weight has gathered."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

from isaac_newton.core.conditioner import invert, multiply
from isaac_newton.core.distributed import Ranks, first_row, is_sharded, keep_own_part, local, whole
from isaac_newton.core.layer import ConditionedLayer
from isaac_newton.core.moments import Moment, WeightSlice
from isaac_newton.core.rows import Rows
from isaac_newton.math import equations
from isaac_newton.math.damping import relative_damping
from isaac_newton.torch_private import sparse_parts

__all__ = ["condition_gradients"]

#: As in `kernels.dense`: the largest trace of S/λ for which a conditioner in float32 is accurate enough.
FLOAT32_TRACE = 512.0
#: Called with a gradient before and after.
Inspect: TypeAlias = Callable[[Tensor, Tensor], None]


@torch.no_grad()
def condition_gradients(sites: Mapping[str, ConditionedLayer], only: Iterable[Tensor] | None) -> None:
    """Condition the `.grad` of every weight that gathered curvature, or of those in `only`, and begin to gather anew."""
    chosen = None if only is None else {id(parameter) for parameter in only}
    work: dict[tuple[str, WeightSlice], Moment] = {}
    for name, site in sites.items():
        for where, moment in site.moments.items():
            if chosen is None or id(site.module.get_parameter(where.parameter)) in chosen:
                work[name, where] = moment
    ranks = next(iter(sites.values())).run.options.ranks
    if ranks is not None and ranks.count > 1:
        work = _over_ranks(work, sites, ranks)
    for (name, where), moment in work.items():
        _condition(where, moment, sites[name])


def _over_ranks(
    work: Mapping[tuple[str, WeightSlice], Moment], sites: Mapping[str, ConditionedLayer], ranks: Ranks
) -> dict[tuple[str, WeightSlice], Moment]:
    """Sum what the ranks have gathered, in one order; a rank on which a layer saw nothing takes part too."""
    known = {key: moment.form for key, moment in work.items()}
    result = {}
    for (name, where), form in ranks.union(known, news=not all(moment.announced for moment in work.values())).items():
        moment = result[name, where] = sites[name].moments.setdefault(where, Moment())
        moment.form, moment.announced = form, True
        if sites[name].gathers(where):
            moment.sum_over(ranks, sites[name].module.get_parameter(where.parameter).device)
    return result


def _condition(where: WeightSlice, moment: Moment, site: ConditionedLayer) -> None:
    options, run = site.run.options, site.run
    few = moment.all_rows() if moment.rows and options.keeps_rows else None
    inspect: Inspect | None = None
    if few is not None:
        strength, relative = run.damping_now()
        r = few[0] if len(few) == 1 else few
        (made,) = invert([Rows(r, r.shape[-2], in_difference=r.shape[-2] < r.shape[-1])], strength, relative)
        if isinstance(made.failures, Tensor) or made.failures:
            site.fell_back(made.failures)
        if run.inspecting:
            inspect = functools.partial(site.inspect, lambda: equations.spectrum(few), made.damping)

        def by_rows(matrix: Tensor) -> Tensor:
            (done,) = multiply([matrix[0] if len(matrix) == 1 else matrix], [made])
            return done if done.dim() == 3 else done[None]

        _rewrite(site.module, where, by_rows, inspect=inspect)
    else:
        _renew(moment, site)
        conditioner = moment.conditioner
        if conditioner is not None:
            if run.inspecting:
                values = functools.partial(_eigenvalues, conditioner, moment.damping, options.power)
                inspect = functools.partial(site.inspect, values, moment.damping)
            times = functools.partial(_times, conditioner)
            _rewrite(site.module, where, times, diagonal=conditioner, inspect=inspect)
    moment.clear()
    if options.refresh == 1:
        moment.conditioner = None
    if options.decay == 0:
        moment.average = moment.weight = None


def _times(conditioner: Tensor, matrix: Tensor) -> Tensor:
    return matrix.to(conditioner.dtype) @ conditioner


def _eigenvalues(conditioner: Tensor, damping: float | Tensor, power: float) -> Tensor:
    """Those of the second moment S behind (I + S/λ)^−p."""
    values = conditioner if conditioner.dim() == 1 else torch.linalg.eigvalsh(equations.precise(conditioner))
    return (damping * (values.clamp_min(torch.finfo(values.dtype).tiny).pow(-1 / power) - 1)).clamp_min(0)


def _renew(moment: Moment, site: ConditionedLayer) -> None:
    """Make the conditioner for this step, unless the last one still serves."""
    options = site.run.options
    mean = moment.mean(options.decay) if moment.gathered or options.decay else None
    if moment.conditioner is not None and moment.age < options.refresh:
        moment.age += 1
        return
    if mean is None:
        return
    diagonal = mean.dim() == 1
    damping, relative = site.run.damping_now()
    if relative:
        damping = relative_damping((mean if diagonal else mean.diagonal(dim1=-2, dim2=-1)).mean(), damping)
    moment.age, moment.damping = 1, damping
    if options.power == 0 or (isinstance(damping, float) and damping == math.inf):
        moment.conditioner = None
    elif diagonal:
        moment.conditioner = (1 + mean / damping).pow(-options.power)
    else:
        moment.conditioner = _conditioner(mean, damping, site, moment.dtype or mean.dtype)


def _conditioner(moment: Tensor, damping: float | Tensor, site: ConditionedLayer, dtype: torch.dtype) -> Tensor:
    """(I + S/λ)^−p in the cheapest dtype that is accurate; where it cannot be had, with more damping, and else I."""
    power = site.run.options.power
    result = equations.root_conditioner(moment, damping, power)
    failed = equations.is_nan(result)
    identity = torch.eye(moment.shape[-1], dtype=result.dtype, device=result.device)
    if moment.device.type != "cpu":
        # Nothing waits for the device.
        site.fell_back(failed.any().long())
        return torch.where(failed, identity, result).to(dtype)
    trace = moment.diagonal(dim1=-2, dim2=-1).sum(-1).amax()
    if failed.any().item():
        site.fell_back()
        larger = max(float(damping), float(trace) / FLOAT32_TRACE)
        result = torch.where(failed, equations.root_conditioner(moment, larger, power), result)
        result = torch.where(equations.is_nan(result), identity, result)
    return result.to(dtype) if trace.item() <= FLOAT32_TRACE * float(damping) else result


def _rewrite(
    layer: nn.Module,
    where: WeightSlice,
    multiply: Callable[[Tensor], Tensor],
    *,
    diagonal: Tensor | None = None,
    inspect: Inspect | None = None,
) -> None:
    """Replace the gradient at `where` by what `multiply` makes of it, a matrix (groups, outputs, features)."""
    parameters = [layer.get_parameter(where.parameter)]
    if where.bias is not None:
        parameters.append(layer.get_parameter(where.bias))
    gradients = [parameter.grad for parameter in parameters]
    if gradients[0] is None:
        return
    parts, begin = gradients, 0
    sharded = is_sharded(gradients[0])
    by_rows = where.groups <= 1 and not where.transposed
    if sharded:
        # Rows of the gradient are multiplied one by one, each rank its own; for other layouts the gradient comes together.
        begin = first_row(gradients[0]) if by_rows else 0
        parts = [None if gradient is None else local(gradient) if by_rows else whole(gradient) for gradient in gradients]
    weight, bias = parts[0], parts[1] if len(parts) > 1 else None
    assert weight is not None
    own = slice(max(where.start - begin, 0), max(min(where.stop - begin, len(weight)), 0))
    if where.groups == 0:
        assert diagonal is not None
        before = _numbers(weight, own).clone() if inspect is not None else weight
        _divide(weight, diagonal[begin + own.start : begin + own.stop], own)
        if inspect is not None:
            inspect(before, _numbers(weight, own))
    else:
        _multiply(weight[own], None if bias is None else bias[own], where, multiply, inspect)
    if sharded and not by_rows:
        for gradient, part in zip(gradients, parts, strict=True):
            if gradient is not None and part is not None:
                keep_own_part(gradient, part)


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


def _numbers(weight: Tensor, own: slice) -> Tensor:
    """What is not zero in an embedding's gradient, dense or sparse."""
    return weight.coalesce().values() if weight.is_sparse else weight[own]


def _divide(weight: Tensor, factor: Tensor, own: slice) -> None:
    """Scale the rows of an embedding's gradient, dense or sparse."""
    if weight.is_sparse:
        values, indices = sparse_parts(weight)
        values.mul_(factor[indices[0]][:, None].to(values.dtype))
    else:
        weight[own].mul_(factor[:, None].to(weight.dtype))
