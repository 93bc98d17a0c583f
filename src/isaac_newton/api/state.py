"""Where a handle stands, for a checkpoint, and the way back: everything is looked at before anything is changed."""

import warnings
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from isaac_newton.core.checks import check_choice, check_count
from isaac_newton.core.layer import ConditionedLayer
from isaac_newton.core.moments import Moment, WeightSlice
from isaac_newton.core.options import Run
from isaac_newton.math.damping import Damping, Relative, RelativeTo, check, number

__all__ = ["load", "saved"]


def saved(run: Run, sites: Mapping[str, ConditionedLayer], given: Damping) -> dict[str, Any]:
    """Counters, the damping and the one that `attach` was given, if they are numbers, and running averages."""
    damping, relative = _written(run.damping)
    return {
        "format": 1,
        "when": run.options.when,
        "share": _share(run),
        "backward_passes": run.backward_passes,
        "steps": run.steps,
        "damping": damping,
        "relative": relative,
        "given": _written(given),
        "curvature": {
            name: {tuple(where): moment.state() for each in site.gatherings.values() for where, moment in each.moments.items()}
            for name, site in sites.items()
            if site.gatherings
        },
    }


def load(run: Run, sites: Mapping[str, ConditionedLayer], given: Damping, state: Mapping[str, Any]) -> None:
    """Go on there; a damping that `attach` was given anew stays, and so does a schedule."""
    # Everything is looked at before anything is changed.
    _check_origin(run, state)
    curvatures = _curvatures(sites, state)
    passes, steps = (check_count(f"{name} of the state", state[name], 0) for name in ("backward_passes", "steps"))
    damping, before = _damping(state), _as_given(state)
    run.backward_passes, run.steps = passes, steps
    if damping is not None and _written(given)[0] is not None and _written(given) != before:
        if damping != run.damping:
            warnings.warn(
                f"the state has damping={damping}, and this handle was given {given} anew, which stays: set "
                "handle.damping after loading for the other",
                RuntimeWarning,
                stacklevel=3,
            )
    elif damping is not None and not callable(run.damping):
        run.set_damping(damping)
    moved: dict[torch.device, dict[int, Tensor]] = {}
    for name, site in sites.items():
        for gathering in site.gatherings.values():
            gathering.moments = {}
        for where, each in curvatures.get(name, {}).items():
            site.gathering(where.parameter).moments[where] = moment = Moment()
            device = next(site.module.parameters()).device
            moment.load(each, device, moved.setdefault(device, {}))


def _check_origin(run: Run, state: Mapping[str, Any]) -> None:
    """Refuse what is no state, or one of another kind of training."""
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be what state_dict returned, got {type(state).__name__}")
    if "format" not in state or not isinstance(state["format"], int) or state["format"] != 1:
        raise ValueError(f"this is not the state of a handle that this version can read: format {state.get('format')!r}")
    missing = [name for name in ("backward_passes", "steps", "damping", "relative", "curvature") if name not in state]
    if missing:
        raise ValueError(f"the state is not whole: {', '.join(missing)} missing")
    when = state.get("when", run.options.when)
    if not isinstance(when, str) or when != run.options.when:
        raise ValueError(f"the state is of when={when!r}, and this handle has when={run.options.when!r}")
    if state.get("share", "all") != _share(run):
        raise ValueError(
            f"the state is of {state['share']}, and this is {_share(run)}: with spread=True each rank saves and loads its own"
        )


def _curvatures(sites: Mapping[str, ConditionedLayer], state: Mapping[str, Any]) -> dict[str, dict[WeightSlice, Any]]:
    """The averages in a state, by layer and place; all these layers are here, and of the same sizes."""
    curvatures = state["curvature"]
    if not isinstance(curvatures, Mapping) or not all(isinstance(each, Mapping) for each in curvatures.values()):
        raise TypeError(f"the curvature in a state must be a mapping of mappings, got {curvatures!r}")
    unknown = sorted(str(name) for name in set(curvatures) - set(sites))
    if unknown:
        raise ValueError(f"the state has layers that are not attached here: {', '.join(map(repr, unknown))}")
    found = {name: {WeightSlice(*where): each for where, each in of.items()} for name, of in curvatures.items()}
    for name, averages in found.items():
        layer = sites[name].module
        for where, each in averages.items():
            _check_fits(name, layer, where, each["average"])
        for parameter in {where.parameter for where in averages}:
            end = max(where.stop for where in averages if where.parameter == parameter)
            there = len(layer.get_parameter(parameter))
            if end != there:
                raise ValueError(
                    f"the state of layer {name!r} was made for {end} rows of its {parameter!r}, and this one has {there}: "
                    "it is of another model"
                )
    return found


def _check_fits(name: str, layer: nn.Module, where: WeightSlice, average: Tensor | None) -> None:
    """Refuse a running average of another width than the layer's."""
    try:
        weight = layer.get_parameter(where.parameter)
    except AttributeError:
        raise ValueError(
            f"the state has a parameter {where.parameter!r} of layer {name!r}, which has none of this name"
        ) from None
    if average is None:
        return
    rows = where.stop - where.start
    features = rows // max(where.groups, 1) if where.transposed else weight.numel() // max(len(weight), 1)
    expected = rows if where.groups == 0 else features + (where.bias is not None)
    if average.shape[-1] != expected or where.stop > len(weight):
        raise ValueError(
            f"the state of layer {name!r} was made for {where.stop} outputs and rows of {average.shape[-1]} features, and this "
            f"one has {len(weight)} and {expected}: it is of another model"
        )


def _share(run: Run) -> str:
    """Whose averages are in a state: with `spread`, those of one rank."""
    ranks = run.options.ranks
    return f"rank {ranks.rank} of {ranks.count}" if run.options.spread and ranks is not None and ranks.count > 1 else "all"


def _written(damping: Damping) -> tuple[float | None, RelativeTo]:
    """λ or ρ, None for a schedule, which nobody can write down; and what it is relative to."""
    return (None, "") if callable(damping) else number(damping, 0)


def _damping(state: Mapping[str, Any]) -> Damping | None:
    """The damping in a state; None where that was a schedule."""
    damping = state["damping"]
    if damping is None:
        return None
    to = _kind(state["relative"])
    return Relative(damping, to=to) if to else check(damping, "the state's damping")


def _as_given(state: Mapping[str, Any]) -> tuple[object, RelativeTo]:
    """What `attach` was given where the state was made; states of before 0.2 do not say, and have what was current."""
    match state.get("given", (state["damping"], state["relative"])):
        case (None | int() | float() as given, relative):
            return given, _kind(relative)
        case other:
            raise ValueError(f"the state's 'given' must be a number and what it is relative to, got {other!r}")


def _kind(relative: object) -> RelativeTo:
    """What a state says that its damping is relative to; until 0.1 that was True or False."""
    if isinstance(relative, bool):
        return "mean" if relative else ""
    check_choice("what the state's damping is relative to", relative, RelativeTo)
    return cast(RelativeTo, relative)
