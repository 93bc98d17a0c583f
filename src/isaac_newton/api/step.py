"""Right before an optimizer's step, with `when="step"`: every gradient is conditioned by what its weight has gathered."""

import functools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from isaac_newton import torch_private
from isaac_newton.api.averages import eigenvalues, owns, renew
from isaac_newton.api.rewrite import rewrite
from isaac_newton.core.conditioner import Conditioner, invert, multiply
from isaac_newton.core.distributed import Ranks, is_sharded
from isaac_newton.core.gathering import Gathering
from isaac_newton.core.layer import ConditionedLayer, child
from isaac_newton.core.moments import Moment, WeightSlice
from isaac_newton.core.rows import Rows
from isaac_newton.math import equations
from isaac_newton.torch_private import sparse_parts

__all__ = ["condition_gradients"]

#: A relative error that counts as a failure, and in how many steps it is looked for once.
_LOST, _CHECKED = 1e-2, 64


class _Matrix(NamedTuple):
    """A matrix of a parameter at the step, and what is known of its inputs."""

    where: WeightSlice
    moment: Moment
    site: ConditionedLayer
    parameter: Tensor


class _Weight(NamedTuple):
    """A parameter at the step: the first layer that has it, its name there, and what was gathered for it."""

    site: ConditionedLayer
    name: str
    parameter: Tensor
    gathering: Gathering


@torch.no_grad()
def condition_gradients(sites: Mapping[str, ConditionedLayer], chosen: set[int] | None) -> None:
    """Condition the `.grad` of every weight that gathered curvature, or of those chosen, and begin to gather anew."""
    run = next(iter(sites.values())).run
    ranks = run.options.ranks if run.options.ranks is not None and run.options.ranks.count > 1 else None
    if ranks is not None:
        chosen = _meet(sites, chosen, ranks)
    weights = _weights(sites, chosen)
    due, strange = _due(weights, ranks)
    if ranks is None:
        strange = _unseen(sites, chosen) + strange
    for same in _alike(due, ranks):
        (_, moment, site, parameter) = same[0]
        if ranks is not None:
            if run.options.spread and moment.owner is None:
                moment.owner = _least_loaded(sites, ranks)
            if site.gathers(moment):
                moment.sum_over(ranks, parameter.device)
        if not run.is_warming_up:
            _condition(same, ranks)
        elif owns(moment, site):
            moment.take_in(run.options.decay)
        for matrix in same:
            matrix.moment.follow(moment)
            matrix.moment.clear()
    for weight in weights:
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


def _due(weights: Sequence[_Weight], ranks: Ranks | None) -> tuple[list[_Weight], list[str]]:
    """The weights to condition, and the names of those whose gradient came from elsewhere."""
    states = [_is_due(weight) for weight in weights]
    if ranks is not None:
        # What is due on one rank is due on all.
        flags = [bool(flag) for flag in ranks.largest([float(flag) for pair in states for flag in pair])]
        states = list(zip(flags[::2], flags[1::2], strict=True))
    due = [weight for weight, state in zip(weights, states, strict=True) if all(state)]
    strange = [child(one.site.name, one.name) for one, (_, explained) in zip(weights, states, strict=True) if not explained]
    return due, strange


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


def _alike(weights: Sequence[_Weight], ranks: Ranks | None) -> list[list[_Matrix]]:
    """The matrices whose moments consist of the same tensors, on all ranks: those of layers with one input."""
    matrices = [
        _Matrix(where, moment, weight.site, weight.parameter)
        for weight in weights
        for where, moment in sorted(weight.gathering.moments.items(), key=lambda item: item[0][:5])
    ]
    first: dict[Hashable, int] = {}
    numbers = [first.setdefault(matrix.moment.made_of(), number) for number, matrix in enumerate(matrices)]
    everywhere = [numbers] if ranks is None else ranks.each(numbers)
    found: dict[tuple[int, ...], list[_Matrix]] = {}
    for matrix, key in zip(matrices, zip(*everywhere, strict=True), strict=True):
        found.setdefault(key, []).append(matrix)
    return list(found.values())


def _least_loaded(sites: Mapping[str, ConditionedLayer], ranks: Ranks) -> int:
    """The rank whose second moments have the fewest numbers; all ranks know who has which."""
    loads = [0] * ranks.count
    for site in sites.values():
        for moment in (moment for gathering in site.gatherings.values() for moment in gathering.moments.values()):
            if moment.owner is not None and moment.form is not None:
                loads[moment.owner] += math.prod(moment.form[0])
    return loads.index(min(loads))


def _sent(moment: Moment, ranks: Ranks, device: torch.device) -> Tensor | None:
    """The conditioner of the rank that has it."""
    assert moment.owner is not None
    assert moment.form is not None
    if moment.is_plain:
        return None
    assert (moment.conditioner is not None) == (moment.owner == ranks.rank)
    shape, dtype = moment.form
    sent = torch.empty(shape, dtype=dtype, device=device) if moment.conditioner is None else moment.conditioner.to(dtype)
    ranks.send(moment.owner, sent)
    return sent


def _condition(same: Sequence[_Matrix], ranks: Ranks | None) -> None:
    """Condition the gradients of matrices that have one second moment between them."""
    (_, moment, site, parameter), options = same[0], same[0].site.run.options
    if moment.rows and options.keeps_rows:
        _condition_by_rows(same, moment.all_rows())
    else:
        renew(moment, site)
        conditioner = moment.conditioner
        if ranks is not None and moment.owner is not None:
            conditioner = _sent(moment, ranks, parameter.device)
        if conditioner is not None:
            values = functools.partial(eigenvalues, conditioner, moment.damping, options.power) if owns(moment, site) else None
            for matrix in same:
                times = conditioner if matrix.where.groups == 0 else functools.partial(_times, conditioner, matrix.site)
                rewrite(matrix.site, matrix.where, times, values, moment.damping)
    if options.refresh == 1:
        moment.conditioner = None
    if options.decay == 0:
        moment.average = moment.weight = None


def _condition_by_rows(same: Sequence[_Matrix], few: Float[Tensor, "groups rows features"]) -> None:
    """With an inverse on the side of the rows, which are all that there is."""
    site = same[0].site
    r = few[0] if len(few) == 1 else few
    (made,) = invert([Rows(r, r.shape[-2], in_difference=r.shape[-2] < r.shape[-1])], *site.run.damping_now())
    site.fell_back(made.failures)
    for matrix in same:
        times = functools.partial(_times_few, made, matrix.site)
        rewrite(matrix.site, matrix.where, times, functools.partial(equations.spectrum, few), made.damping)


def _times_few(by: Conditioner, site: ConditionedLayer, matrix: Tensor) -> Tensor:
    by.lost_digits = False  # of another gradient
    (done,) = multiply([matrix], [by])
    if by.lost_digits:
        site.lost_digits()
    return done


def _times(conditioner: Tensor, site: ConditionedLayer, matrix: Tensor) -> Tensor:
    done = matrix.to(conditioner.dtype) @ conditioner
    _count_lost_digits(matrix, done, site)
    return done


def _count_lost_digits(before: Tensor, after: Tensor, site: ConditionedLayer) -> None:
    """Now and then: a result that is no larger than the rounding of what it was made of counts as a failure."""
    if site.run.steps % _CHECKED != 1 or not before.numel():
        return
    lost = (before.norm() * torch.finfo(before.dtype).eps > _LOST * after.norm()) & after.isfinite().all()
    if lost.is_cuda:
        site.fell_back(lost.long())
    elif lost.item():
        site.lost_digits()
