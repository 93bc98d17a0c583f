"""Second moments that last over steps: their conditioners, and the way to both by the name of a parameter."""

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from isaac_newton.core.layer import ConditionedLayer, child
from isaac_newton.core.moments import Moment, WeightSlice
from isaac_newton.math import equations
from isaac_newton.math.damping import Damping, RelativeTo, number, relative_damping

__all__ = ["Averages", "eigenvalues", "owns", "renew"]

#: As in `kernels.cpu`: the largest trace of S/λ for which a conditioner in float32 is accurate enough.
FLOAT32_TRACE = 512.0


class Averages(Mapping[str, Tensor]):
    """By the name of a parameter, the average second moment of its rows, made when it is asked for."""

    def __init__(self, sites: Mapping[str, ConditionedLayer]) -> None:
        self._found: dict[str, tuple[ConditionedLayer, dict[WeightSlice, Moment]]] = {}
        for name, site in sites.items():
            for parameter, gathering in sorted(site.gatherings.items()):
                known = {where: moment for where, moment in gathering.moments.items() if moment.average is not None}
                if known:
                    self._found[child(name, parameter)] = site, known

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, name: str) -> Tensor:
        return self._each(name, lambda mean, dtype: mean)

    def factor(self, name: str, damping: Damping) -> Tensor:
        """(I + S/λ)^−p of that."""
        if name not in self._found:
            raise ValueError(f"no second moment of {name!r} has been gathered; there are those of: {', '.join(self) or 'none'}")
        site = self._found[name][0]
        strength = number(damping, site.run.step)
        return self._each(name, lambda mean, dtype: _factor(mean, *strength, site, dtype)[0])

    def _each(self, name: str, made_of: Callable[[Tensor, torch.dtype | None], Tensor]) -> Tensor:
        """One tensor for a parameter, of what is made of each matrix of it."""
        site, known = self._found[name]
        means = {where: (mean, moment.dtype) for where, moment in known.items() if (mean := moment.mean()) is not None}
        return _one(site, {where: made_of(*mean) for where, mean in means.items()})


def _one(site: ConditionedLayer, known: Mapping[WeightSlice, Tensor]) -> Tensor:
    """One tensor for a parameter. Of packed weights that received several inputs: a matrix for each of as many equal parts."""
    places = sorted(known, key=lambda where: where.start)
    dtype = torch.promote_types(site.module.get_parameter(places[0].parameter).dtype, torch.float32)
    if len(places) > 1:
        size = math.gcd(*(where.stop - where.start for where in places))
        return torch.cat([known[where].expand((where.stop - where.start) // size, -1, -1) for where in places]).to(dtype)
    alone = known[places[0]].to(dtype)
    return alone[0] if alone.dim() == 3 and len(alone) == 1 else alone


def owns(moment: Moment, site: ConditionedLayer) -> bool:
    """Whether this rank has the average: all have it, unless `spread` has given it to one."""
    ranks = site.run.options.ranks
    return moment.owner is None or ranks is None or moment.owner == ranks.rank


def renew(moment: Moment, site: ConditionedLayer) -> None:
    """Make the conditioner for this step, unless the last one still serves."""
    options = site.run.options
    if owns(moment, site):
        moment.take_in(options.decay)
    if 0 < moment.age < options.refresh:
        moment.age += 1
        return
    mean = moment.mean()
    if mean is None and owns(moment, site):
        return
    moment.age, moment.conditioner, moment.damping = 1, None, math.inf
    strength, relative = site.run.damping_now()
    if options.power == 0 or (isinstance(strength, float) and strength == math.inf):
        return
    moment.damping = 0.0  # nobody asks for it where the average is elsewhere
    if mean is not None:
        moment.conditioner, moment.damping = _factor(mean, strength, relative, site, moment.dtype)


def _factor(
    mean: Tensor, strength: float | Tensor, relative: RelativeTo, site: ConditionedLayer, dtype: torch.dtype | None
) -> tuple[Tensor, float | Tensor]:
    """(I + S/λ)^−p, and λ."""
    diagonal, damping = mean.dim() == 1, strength
    if relative == "mean":
        damping = relative_damping((mean if diagonal else mean.diagonal(dim1=-2, dim2=-1)).mean(), damping)
    elif relative:
        damping = relative_damping((mean if diagonal else equations.largest_eigenvalue(mean)).amax(), damping)
    if diagonal:
        return (1 + mean / damping).pow(-site.run.options.power), damping
    return _conditioner(mean, damping, site, dtype or mean.dtype), damping


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


def eigenvalues(conditioner: Tensor, damping: float | Tensor, power: float) -> Tensor:
    """Those of the second moment S behind (I + S/λ)^−p."""
    values = conditioner if conditioner.dim() == 1 else torch.linalg.eigvalsh(equations.precise(conditioner))
    return (damping * (values.clamp_min(torch.finfo(values.dtype).tiny).pow(-1 / power) - 1)).clamp_min(0)
