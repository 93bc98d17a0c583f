"""From records to standings: who reached the target when, and where everybody was at the end of the budget."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

from isaac_lab.record import Record as Run
from isaac_lab.record import Store
from isaac_lab.studies.race.course import COURSES, SCALES
from isaac_lab.studies.race.entrants import REFERENCE, Entrant, arm, entrants
from isaac_lab.study import Result, resolve
from isaac_lab.times import seconds as medians
from isaac_lab.trial import Trial

__all__ = ["SETTINGS", "TITLES", "crossing", "results", "speed_up", "statistics", "summarize"]

Record = Mapping[str, Any]

TITLES = {"train_loss": "Training loss", "test_loss": "Test loss"}
#: What a trial's settings are called; those that a method has are in its ranges.
SETTINGS = ("learning_rate", "second_rate", "damping")


def crossing(record: Run, quantity: str, target: float) -> float | None:
    """The step at which a run first is at or below the target, on straight lines between measurements; None if it never is."""
    before: tuple[float, float] | None = None
    for point in record.points:
        step, value = point["step"], point[quantity]
        if value is None:
            before = None
            continue
        if value <= target:
            if before is None:
                return float(step)
            share = (before[1] - target) / (before[1] - value)
            return float(before[0] + share * (step - before[0]))
        before = (step, value)
    return None


def statistics(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean and standard deviation of those that are there, and all of them, with six digits."""
    there = [value for value in values if value is not None and math.isfinite(value)]
    return {
        "mean": _short(fmean(there)) if there else None,
        "std": _short(stdev(there)) if len(there) > 1 else None,
        "values": [_short(value) for value in values],
    }


def speed_up(method: Record, rival: Record, budget: int, per_step: str | None = None) -> dict[str, Any] | None:
    """How many times as long the rival takes to the target.

    Means over seeds, and the lowest and highest of the seeds, which are paired: their networks and batches are the same. A
    seed of the rival that does not get there counts as if it got there at the end, and the result is a lower bound.

    Args:
        method: One of the summary's methods.
        rival: Another.
        budget: Steps of a run.
        per_step: Key of the seconds of a step, such as "seconds_per_step_eager"; None to compare steps.

    Returns:
        None where a seed of the method does not reach the target, or where something was not measured.
    """
    if not method["n"] or not rival["n"]:
        return None
    own, other = method["steps_to_target"]["values"], rival["steps_to_target"]["values"]
    units = (1.0, 1.0) if per_step is None else (method[per_step], rival[per_step])
    if len(own) != len(other) or None in own or None in units:
        return None
    bounded = [budget if value is None else value for value in other]
    # A network that meets the target untrained would make this infinite; no race is like that.
    ratios = [units[1] * b / (units[0] * a) for a, b in zip(own, bounded, strict=True) if a > 0]
    if len(ratios) < len(own):
        return None
    return {
        "ratio": _short(units[1] * fmean(bounded) / (units[0] * fmean(own))),
        "low": _short(min(ratios)),
        "high": _short(max(ratios)),
        "at_least": None in other,
    }


def results(about: Record, store: Store) -> dict[str, tuple[Entrant, Result]]:
    """By name, who races, and what the records say."""
    course = COURSES[about["workload"]]
    # As it was run, also where a scale has changed since.
    scale = replace(SCALES[about["scale"]], **{name: about[name] for name in ("trials", "seeds", "points")})
    options = {"steps": about["steps"], "quantity": about["quantity"], "network": about.get("network", "")}
    return {entrant.name: (entrant, resolve(arm(entrant, course, scale, **options), store)) for entrant in entrants(course)}


def summarize(store: Store) -> dict[str, Any]:
    """The summary of the race in a folder, in the form that tables, pictures and pages are made from."""
    about, timed = store.about, store.times()
    timed = {mode: timed[mode] for mode in ("eager", "captured") if mode in timed}
    seconds = {mode: medians(record) for mode, record in timed.items()}
    runs = results(about, store)
    target = _target(runs[REFERENCE][1], about)
    found = [_method(entrant, result, target, seconds, about) for entrant, result in runs.values()]
    reference = next(method for method in found if method["name"] == REFERENCE)
    units = {"steps": None, "seconds": "seconds_per_step", "seconds_eager": "seconds_per_step_eager"}
    for method in found:
        method["speed_up"] = {key: speed_up(method, reference, about["steps"], unit) for key, unit in units.items()}
    settings = reference["settings"]
    newest = max((record for _, result in runs.values() for record in result.runs), key=lambda run: run.time, default=None)
    origin = timed.get("eager") or ({} if newest is None else {**newest.about, "time": newest.time})
    return {
        "kind": "race",
        "workload": about["workload"],
        "title": about["title"],
        "scale": about["scale"],
        "mode": "captured" if about["device"] == "cuda" else "eager",
        "data": about["data"],
        "arithmetic": about["arithmetic"],
        "quantity": about["quantity"],
        "quantity_title": TITLES[about["quantity"]],
        "metric_titles": about["metrics"],
        "target": _short(target),
        "target_by": (
            f"AdamW, learning rate {settings['learning_rate']:g}, at {about['steps']:,} steps, the highest of "
            f"{reference['n'] - reference['diverged']} seeds"
            if settings
            else "AdamW, which has no finished runs"
        ),
        "steps": about["steps"],
        "batch": about["batch"],
        "trials_per_method": about["trials"],
        "seeds": about["seeds"],
        "measurements": about["points"],
        "conditioning": about["conditioning"],
        "schedule": about["schedule"],
        "weight_decay": about["decay"],
        "relative_damping": about["relative"],
        "command": about["command"],
        "time": origin.get("time"),
        "commit": origin.get("commit"),
        "versions": _versions(timed, origin),
        "machine": origin.get("machine"),
        "methods": found,
    }


def _target(found: Result, about: Record) -> float | None:
    """Of the reference's runs alone: the highest, so that each of its own seeds gets there."""
    values = [value for record in found.runs if (value := _final(record, about["quantity"])) is not None]
    return max(values, default=None)


def _final(record: Run, quantity: str) -> float | None:
    value = record.final(quantity)
    return value if math.isfinite(value) else None


def _method(
    entrant: Entrant, found: Result, target: float | None, seconds: Mapping[str, Mapping[str, float]], about: Record
) -> dict[str, Any]:
    ran, name, quantity = found.runs, entrant.name, about["quantity"]
    by_mode = {mode: seconds.get(mode, {}).get(name) for mode in ("eager", "captured")}
    mode = "captured" if by_mode["captured"] is not None else "eager"
    per_step = by_mode[mode]
    plain = seconds.get(mode, {}).get("sgd")
    steps = [None if target is None else crossing(record, quantity, target) for record in ran]
    reason = None if ran else about.get("reasons", {}).get(name) or _unfinished(found, about)
    ranges = {key: [own.low, own.high] for key, own in entrant.space(COURSES[about["workload"]]).items()}
    return {
        "name": name,
        "label": entrant.label,
        "ours": entrant.ours,
        "settings": _settings(ranges, found.best) if found.best is not None and ran else None,
        "edge": found.best is not None and _edge(found),
        "mode": mode if ran else None,
        "n": len(ran),
        "diverged": sum(_final(record, quantity) is None for record in ran),
        "reason": reason,
        "steps_to_target": statistics(steps) if ran else None,
        "seconds_to_target": statistics([_times(step, per_step) for step in steps]) if ran else None,
        "final": statistics([_final(record, quantity) for record in ran]) if ran else None,
        "metrics": {key: statistics([_final(record, key) for record in ran]) for key in about["metrics"]} if ran else None,
        "seconds_per_step": _short(per_step),
        "seconds_per_step_eager": _short(by_mode["eager"]),
        "seconds_per_step_captured": _short(by_mode["captured"]),
        "ratio_to_sgd": _short(per_step / plain) if per_step and plain else None,
        "ranges": ranges,
        "tuning": [
            {
                "settings": _settings(ranges, trial),
                "value": _short(value),
                "status": "diverged" if math.isinf(value) else "finished",
            }
            for trial, value in found.tried[0].items()
        ],
        "curves": [_curve(record, quantity, per_step) for record in ran],
    }


def _unfinished(found: Result, about: Record) -> str:
    tried = len(found.tried[0])
    if tried < about["trials"]:
        return f"{tried} of {about['trials']} tuning trials have been run"
    return "diverged in every tuning trial" if found.best is None else "tuned, but not run with other seeds yet"


def _settings(ranges: Record, trial: Trial) -> dict[str, float]:
    """What was tuned, and what moved with it."""
    named = {*ranges, *(["second_rate"] if trial.method.startswith("muon") else [])}
    return {name: float(trial.get(name)) for name in SETTINGS if name in named}


def _edge(found: Result) -> bool:
    """Whether no lower or no higher learning rate than the chosen one was tried."""
    rates = [trial.learning_rate for trial in found.tried[0]]
    return found.best is not None and found.best.learning_rate in (min(rates), max(rates))


def _curve(record: Run, quantity: str, per_step: float | None) -> dict[str, Any]:
    steps = [point["step"] for point in record.points]
    return {
        "seed": record.trial.seed,
        "steps": steps,
        "seconds": [_short(_times(step, per_step)) for step in steps],
        "loss": [_short(point[quantity]) for point in record.points],
    }


def _versions(timed: Mapping[str, Record], origin: Record) -> dict[str, Any]:
    versions = dict(origin.get("versions") or {})
    for record in timed.values():
        versions |= record["versions"]
    return versions


def _times(step: float | None, per_step: float | None) -> float | None:
    return None if step is None or per_step is None else step * per_step


def _short(value: float | None) -> float | None:
    """Six digits, which is more than any of these numbers deserves; None for what is no number."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
