"""Right before an optimizer's step, with `when="step"`: every gradient is conditioned by what its weight has gathered."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

from isaac_newton import equations
from isaac_newton.conditioners import rows_conditioner
from isaac_newton.curvature import Curvature, Place
from isaac_newton.distributed import Ranks, first_row, is_sharded, keep_own_part, local, whole
from isaac_newton.inputs import Shared
from isaac_newton.site import Site

__all__ = ["condition_gradients"]

#: As in `kernels.dense`: the largest trace of S/λ for which a conditioner in float32 is accurate enough.
FLOAT32_TRACE = 512.0
#: Called with a gradient before and after.
Inspect: TypeAlias = Callable[[Tensor, Tensor], None]


@torch.no_grad()
def condition_gradients(sites: Mapping[str, Site], layers: Mapping[str, nn.Module], only: Iterable[Tensor] | None) -> None:
    """Condition the `.grad` of every weight that gathered curvature, or of those in `only`, and begin to gather anew."""
    chosen = None if only is None else {id(parameter) for parameter in only}
    work: dict[tuple[str, Place], Curvature] = {}
    for name, site in sites.items():
        for place, curvature in site.curvatures.items():
            if chosen is None or id(layers[name].get_parameter(place.parameter)) in chosen:
                work[name, place] = curvature
    ranks = next(iter(sites.values())).settings.ranks
    if ranks is not None and ranks.count > 1:
        work = _over_ranks(work, sites, layers, ranks)
    for (name, place), curvature in work.items():
        _condition(layers[name], place, curvature, sites[name])


def _over_ranks(
    work: Mapping[tuple[str, Place], Curvature], sites: Mapping[str, Site], layers: Mapping[str, nn.Module], ranks: Ranks
) -> dict[tuple[str, Place], Curvature]:
    """Sum what the ranks have gathered, in one order; a rank on which a layer saw nothing takes part too."""
    known = {key: curvature.form for key, curvature in work.items()}
    result = {}
    for (name, place), form in ranks.union(known, news=not all(curvature.announced for curvature in work.values())).items():
        curvature = result[name, place] = sites[name].curvatures.setdefault(place, Curvature())
        curvature.form, curvature.announced = form, True
        if sites[name].gathers(place):
            curvature.sum_over(ranks, layers[name].get_parameter(place.parameter).device)
    return result


def _condition(layer: nn.Module, place: Place, curvature: Curvature, site: Site) -> None:
    settings = site.settings
    few = curvature.all_rows() if curvature.rows and settings.keeps_rows else None
    inspect: Inspect | None = None
    if few is not None:
        columns = rows_conditioner(few, 0, site, Shared(), None)
        if settings.inspecting:
            inspect = functools.partial(site.inspect, lambda: equations.spectrum(few), columns.damping)
        _rewrite(layer, place, columns.multiply, inspect=inspect)
    else:
        _renew(curvature, site)
        conditioner = curvature.conditioner
        if conditioner is not None:
            if settings.inspecting:
                values = functools.partial(_eigenvalues, conditioner, curvature.damping, settings.power)
                inspect = functools.partial(site.inspect, values, curvature.damping)
            multiply = functools.partial(_times, conditioner)
            _rewrite(layer, place, multiply, diagonal=conditioner, inspect=inspect)
    curvature.clear()
    if settings.refresh == 1:
        curvature.conditioner = None
    if settings.decay == 0:
        curvature.average = curvature.weight = None


def _times(conditioner: Tensor, matrix: Tensor) -> Tensor:
    return matrix.to(conditioner.dtype) @ conditioner


def _eigenvalues(conditioner: Tensor, damping: float | Tensor, power: float) -> Tensor:
    """Those of the second moment S behind (I + S/λ)^−p."""
    values = conditioner if conditioner.dim() == 1 else torch.linalg.eigvalsh(equations.precise(conditioner))
    return (damping * (values.clamp_min(torch.finfo(values.dtype).tiny).pow(-1 / power) - 1)).clamp_min(0)


def _renew(curvature: Curvature, site: Site) -> None:
    """Make the conditioner for this step, unless the last one still serves."""
    settings = site.settings
    moment = curvature.mean(settings.decay) if curvature.gathered or settings.decay else None
    if curvature.conditioner is not None and curvature.age < settings.refresh:
        curvature.age += 1
        return
    if moment is None:
        return
    diagonal = moment.dim() == 1
    damping = settings.moment_damping(moment, diagonal=diagonal)
    curvature.age, curvature.damping = 1, damping
    if settings.power == 0 or (isinstance(damping, float) and damping == math.inf):
        curvature.conditioner = None
    elif diagonal:
        curvature.conditioner = (1 + moment / damping).pow(-settings.power)
    else:
        curvature.conditioner = _conditioner(moment, damping, site, curvature.dtype or moment.dtype)


def _conditioner(moment: Tensor, damping: float | Tensor, site: Site, dtype: torch.dtype) -> Tensor:
    """(I + S/λ)^−p in the cheapest dtype that is accurate; where it cannot be had, with more damping, and else I."""
    power = site.settings.power
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
    place: Place,
    multiply: Callable[[Tensor], Tensor],
    *,
    diagonal: Tensor | None = None,
    inspect: Inspect | None = None,
) -> None:
    """Replace the gradient at `place` by what `multiply` makes of it, a matrix (groups, outputs, features)."""
    parameters = [layer.get_parameter(place.parameter)]
    if place.bias is not None:
        parameters.append(layer.get_parameter(place.bias))
    gradients = [parameter.grad for parameter in parameters]
    if gradients[0] is None:
        return
    parts, begin = gradients, 0
    sharded = is_sharded(gradients[0])
    by_rows = place.groups <= 1 and not place.transposed
    if sharded:
        # Rows of the gradient are multiplied one by one, each rank its own; for other layouts the gradient comes together.
        begin = first_row(gradients[0]) if by_rows else 0
        parts = [None if gradient is None else local(gradient) if by_rows else whole(gradient) for gradient in gradients]
    weight, bias = parts[0], parts[1] if len(parts) > 1 else None
    assert weight is not None
    own = slice(max(place.start - begin, 0), max(min(place.stop - begin, len(weight)), 0))
    if place.groups == 0:
        assert diagonal is not None
        before = _numbers(weight, own).clone() if inspect is not None else weight
        _divide(weight, diagonal[begin + own.start : begin + own.stop], own)
        if inspect is not None:
            inspect(before, _numbers(weight, own))
    else:
        _multiply(weight[own], None if bias is None else bias[own], place, multiply, inspect)
    if sharded and not by_rows:
        for gradient, part in zip(gradients, parts, strict=True):
            if gradient is not None and part is not None:
                keep_own_part(gradient, part)


def _multiply(
    weight: Tensor, bias: Tensor | None, place: Place, multiply: Callable[[Tensor], Tensor], inspect: Inspect | None
) -> None:
    if weight.numel() == 0:
        return
    dtype = torch.promote_types(weight.dtype, torch.float32)
    matrix = weight.reshape(place.groups, weight.shape[0] // place.groups, -1).to(dtype)
    matrix = matrix.mT if place.transposed else matrix
    if place.bias is not None:
        column = matrix.new_zeros(matrix.shape[:2]) if bias is None else bias.reshape(matrix.shape[:2]).to(dtype)
        matrix = torch.cat([matrix, column[..., None]], dim=-1)
    plain, matrix = matrix, multiply(matrix)
    if inspect is not None:
        inspect(plain, matrix)
    if place.bias is not None:
        if bias is not None:
            bias.copy_(matrix[..., -1].reshape(bias.shape))
        matrix = matrix[..., :-1]
    weight.copy_((matrix.mT if place.transposed else matrix).reshape(weight.shape))


def _numbers(weight: Tensor, own: slice) -> Tensor:
    """What is not zero in an embedding's gradient, dense or sparse."""
    return weight.coalesce().values() if weight.is_sparse else weight[own]


def _divide(weight: Tensor, factor: Tensor, own: slice) -> None:
    """Scale the rows of an embedding's gradient, dense or sparse."""
    if weight.is_sparse:
        values, rows = weight._values(), weight._indices()[0]
        values.mul_(factor[rows][:, None].to(values.dtype))
    else:
        weight[own].mul_(factor[:, None].to(weight.dtype))
