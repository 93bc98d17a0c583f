"""Right before an optimizer's step, with `when="step"`: every gradient is conditioned by what its weight has gathered."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from isaac_newton import torch_private
from isaac_newton.core.conditioner import invert, multiply
from isaac_newton.core.distributed import Ranks, first_row, is_sharded, keep_own_part, local, sum_over_shards, whole
from isaac_newton.core.gathering import Gathering
from isaac_newton.core.layer import ConditionedLayer, child
from isaac_newton.core.moments import Moment, WeightSlice
from isaac_newton.core.rows import Rows
from isaac_newton.math import equations
from isaac_newton.math.damping import relative_damping
from isaac_newton.torch_private import sparse_parts

__all__ = ["condition_gradients"]

#: As in `kernels.dense`: the largest trace of S/λ for which a conditioner in float32 is accurate enough.
FLOAT32_TRACE = 512.0
#: A relative error that counts as a failure, and in how many steps it is looked for once.
_LOST, _CHECKED = 1e-2, 64
#: Called with a gradient before and after.
Inspect: TypeAlias = Callable[[Tensor, Tensor], None]


class _Weight(NamedTuple):
    """A parameter at the step: the first layer that has it, its name there, and what was gathered for it."""

    site: ConditionedLayer
    name: str
    parameter: Tensor
    gathering: Gathering


@torch.no_grad()
def condition_gradients(sites: Mapping[str, ConditionedLayer], only: Iterable[Tensor] | None) -> None:
    """Condition the `.grad` of every weight that gathered curvature, or of those in `only`, and begin to gather anew."""
    run = next(iter(sites.values())).run
    chosen = None if only is None else {id(parameter) for parameter in only}
    ranks = run.options.ranks if run.options.ranks is not None and run.options.ranks.count > 1 else None
    if ranks is not None:
        chosen = _meet(sites, chosen, ranks)
    weights = _weights(sites, chosen)
    due = [_is_due(weight) for weight in weights]
    if ranks is not None:
        due = _sum_over(weights, due, ranks)
    strange = [] if ranks is not None else _unseen(sites, chosen)
    for weight, (grown, explained) in zip(weights, due, strict=True):
        if not explained:
            strange.append(child(weight.site.name, weight.name))
        elif grown:
            for where, moment in weight.gathering.moments.items():
                _condition(where, moment, weight.site)
        weight.gathering.consume()
    if strange:
        run.warn_about_strange(strange)


def _weights(sites: Mapping[str, ConditionedLayer], chosen: set[int] | None) -> list[_Weight]:
    """What was gathered, parameter by parameter: layers that share one have one conditioner for it."""
    found: dict[int, _Weight] = {}
    for site in sites.values():
        for name, gathering in sorted(site.gatherings.items()):
            parameter = site.module.get_parameter(name)
            if chosen is None or id(parameter) in chosen:
                gathering.watch(parameter)
                gathering.take_in(torch_private.current_pass())  # where another hook of the parameter steps, before ours
                first = found.setdefault(id(parameter), _Weight(site, name, parameter, gathering))
                if first.gathering is not gathering:
                    first.gathering.join(gathering, first.name)
    return list(found.values())


def _is_due(weight: _Weight) -> tuple[bool, bool]:
    """Whether there is a gradient to condition; whether it is that of the rows, and one conditioner can be made of them."""
    gradient, gathering = weight.parameter.grad, weight.gathering
    if gradient is None:
        return False, True
    places = sorted((where.start, where.stop) for where, moment in gathering.moments.items() if moment.gathered)
    apart = all(stop <= start for (_, stop), (start, _) in pairwise(places))
    return gathering.grown, apart and gathering.explains(gradient)


def _unseen(sites: Mapping[str, ConditionedLayer], chosen: set[int] | None) -> list[str]:
    """Weights that have a gradient although no backward pass went through their layer."""
    found = []
    for name, site in sites.items():
        watch = site.run.watch
        if watch is not None and name in watch.gone:
            continue  # it has been said that nobody calls this layer
        weight = None if site.gatherings else getattr(site.module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.grad is not None and (chosen is None or id(weight) in chosen):
            found.append(child(name, "weight"))
    return found


def _meet(sites: Mapping[str, ConditionedLayer], chosen: set[int] | None, ranks: Ranks) -> set[int] | None:
    """Make all ranks know of the same matrices: one on which a layer saw nothing takes part too. Returns what is chosen."""
    known: dict[tuple[str, WeightSlice], Any] = {}
    news = False
    for name, site in sites.items():
        for parameter, gathering in site.gatherings.items():
            if chosen is None or id(site.module.get_parameter(parameter)) in chosen:
                known |= {(name, where): moment.form for where, moment in gathering.moments.items()}
                news |= not all(moment.announced for moment in gathering.moments.values())
    parameters = []
    for (name, where), form in ranks.union(known, news=news).items():
        moment = sites[name].gathering(where.parameter).moments.setdefault(where, Moment())
        moment.form, moment.announced = form, True
        parameters.append(sites[name].module.get_parameter(where.parameter))
    if ranks.is_default and next(iter(sites.values())).run.steps <= 1:
        _check_replicas(parameters, ranks)
    return None if chosen is None else chosen | {id(parameter) for parameter in parameters}


def _check_replicas(parameters: Iterable[Tensor], ranks: Ranks) -> None:
    """Refuse to mix rows of models that only look alike. Sharded ones are known to be one."""
    sizes = []
    for parameter in parameters:
        for tensor in (parameter, parameter.grad):
            if tensor is not None and not is_sharded(tensor):
                numbers = sparse_parts(tensor)[0] if tensor.is_sparse else tensor
                sizes.append(numbers.norm(dtype=torch.float64).nan_to_num().item())
            else:
                sizes.append(0.0)
    most = ranks.largest(sizes)
    least = ranks.largest([-size for size in sizes])
    if any(high + low > 1e-6 * high for high, low in zip(most, least, strict=True)):
        raise RuntimeError(
            "when='step' joins the rows of all ranks of the default process group, but weights or gradients differ between "
            "them, so the model is not replicated there. Wrap it in DistributedDataParallel, or average gradients before the "
            "step. If each rank trains a model of its own, attach with process_group=torch.distributed.new_group([rank], "
            "use_local_synchronization=True)"
        )


def _sum_over(weights: Sequence[_Weight], due: Sequence[tuple[bool, bool]], ranks: Ranks) -> list[tuple[bool, bool]]:
    """Sum what the ranks have gathered. What is due on one rank is due on all."""
    flags = [bool(flag) for flag in ranks.largest([float(flag) for pair in due for flag in pair])]
    everywhere = list(zip(flags[::2], flags[1::2], strict=True))
    for weight, (grown, explained) in zip(weights, everywhere, strict=True):
        if grown and explained:
            for _, moment in sorted(weight.gathering.moments.items(), key=lambda item: repr(item[0])):
                if weight.site.gathers(moment):
                    moment.sum_over(ranks, weight.parameter.device)
    return everywhere


def _condition(where: WeightSlice, moment: Moment, site: ConditionedLayer) -> None:
    options, run = site.run.options, site.run
    few = moment.all_rows() if moment.rows and options.keeps_rows else None
    inspect: Inspect | None = None
    if few is not None:
        strength, relative = run.damping_now()
        r = few[0] if len(few) == 1 else few
        (made,) = invert([Rows(r, r.shape[-2], in_difference=r.shape[-2] < r.shape[-1])], strength, relative)
        site.fell_back(made.failures)
        if run.inspecting:
            inspect = functools.partial(site.inspect, lambda: equations.spectrum(few), made.damping)

        def by_rows(matrix: Tensor) -> Tensor:
            (done,) = multiply([matrix[0] if len(matrix) == 1 else matrix], [made])
            if made.lost_digits:
                site.lost_digits()
            return done if done.dim() == 3 else done[None]

        _rewrite(site.module, where, by_rows, keep_norm=options.keep_norm, inspect=inspect)
    else:
        _renew(moment, site)
        conditioner = moment.conditioner
        if conditioner is not None:
            if run.inspecting:
                values = functools.partial(_eigenvalues, conditioner, moment.damping, options.power)
                inspect = functools.partial(site.inspect, values, moment.damping)
            times = functools.partial(_times, conditioner, site)
            _rewrite(site.module, where, times, keep_norm=options.keep_norm, diagonal=conditioner, inspect=inspect)
    moment.clear()
    if options.refresh == 1:
        moment.conditioner = None
    if options.decay == 0:
        moment.average = moment.weight = None


def _count_lost_digits(before: Tensor, after: Tensor, site: ConditionedLayer) -> None:
    """Now and then: a result that is no larger than the rounding of what it was made of counts as a failure."""
    if site.run.steps % _CHECKED != 1 or not before.numel():
        return
    lost = (before.norm() * torch.finfo(before.dtype).eps > _LOST * after.norm()) & after.isfinite().all()
    if lost.is_cuda:
        site.fell_back(lost.long())
    elif lost.item():
        site.lost_digits()


def _times(conditioner: Tensor, site: ConditionedLayer, matrix: Tensor) -> Tensor:
    done = matrix.to(conditioner.dtype) @ conditioner
    _count_lost_digits(matrix, done, site)
    return done


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
    if relative == "mean":
        damping = relative_damping((mean if diagonal else mean.diagonal(dim1=-2, dim2=-1)).mean(), damping)
    elif relative:
        damping = relative_damping((mean if diagonal else equations.largest_eigenvalue(mean)).amax(), damping)
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
    keep_norm: bool,
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
    squares = [_square(weight, bias, own)] if keep_norm else []
    if where.groups == 0:
        assert diagonal is not None
        before = _numbers(weight, own).clone() if inspect is not None else weight
        _divide(weight, diagonal[begin + own.start : begin + own.stop], own)
        if inspect is not None:
            inspect(before, _numbers(weight, own))
    else:
        _multiply(weight[own], None if bias is None else bias[own], where, multiply, inspect)
    if keep_norm:
        together = torch.stack([*squares, _square(weight, bias, own)])
        if sharded and by_rows:
            sum_over_shards(gradients[0], together)
        before, after = together.sqrt().unbind()
        for part in (sparse_parts(weight)[0] if weight.is_sparse else weight[own], None if bias is None else bias[own]):
            if part is not None:
                part.mul_(equations.quotient(before, after).to(part.dtype))
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


def _square(weight: Tensor, bias: Tensor | None, own: slice) -> Tensor:
    """The squared norm of a gradient, and of the bias that is conditioned with it."""
    parts = [_numbers(weight, own)] + ([] if bias is None else [bias[own]])
    return torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64).square() for part in parts]).sum()


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
