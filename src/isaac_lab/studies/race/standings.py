"""From records to standings: who reached the target when, where everybody was at the end, and what ISAAC changed there."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from isaac_lab.record import Record as Run
from isaac_lab.record import Store, rounded
from isaac_lab.stats import Difference, contrast, sample
from isaac_lab.studies.race.race import COURSES, REFERENCE, SCALES, Entrant, arm, entrants
from isaac_lab.study import Result, resolve
from isaac_lab.times import seconds as medians
from isaac_lab.trial import Trial

__all__ = ["PAIRS", "SETTINGS", "TITLES", "Pair", "crossing", "lowest", "pairs", "results", "summarize"]

Record = Mapping[str, Any]

TITLES = {"train_loss": "Training loss", "test_loss": "Test loss"}
#: What a trial's settings are called; those that a method has are in its ranges.
SETTINGS = ("learning_rate", "second_rate", "damping")
#: The optimizers people pick that take any gradient, and the same with ISAAC.
PAIRS = {"adamw": "isaac-adamw", "muon": "isaac-muon"}


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
    finals = [_final(record, about["quantity"]) for record in runs[REFERENCE][1].runs]
    # Of the reference's runs alone: the highest, so that each of its own seeds gets there.
    target = max((value for value in finals if value is not None), default=None)
    found = [_method(entrant, result, target, seconds, about) for entrant, result in runs.values()]
    reference = next(method for method in found if method["name"] == REFERENCE)
    settings, finished = reference["settings"], reference["n"] - reference["diverged"]
    newest = max((record for _, result in runs.values() for record in result.runs), key=lambda run: run.time, default=None)
    origin = timed.get("eager") or ({} if newest is None else {**newest.about, "time": newest.time})
    versions = dict(origin.get("versions") or {})
    for record in timed.values():
        versions |= record["versions"]
    kept = ("workload", "title", "scale", "data", "arithmetic", "quantity", "steps", "batch", "trials", "seeds", "points")
    return {
        **{name: about[name] for name in (*kept, "conditioning", "schedule", "decay", "relative", "command")},
        "mode": "captured" if about["device"] == "cuda" else "eager",
        "quantity_title": TITLES[about["quantity"]],
        "metric_titles": about["metrics"],
        "target": rounded(target),
        "target_by": (
            f"AdamW, learning rate {settings['learning_rate']:g}, at {about['steps']:,} steps, the highest of {finished} seeds"
            if settings
            else "AdamW, which has no finished runs"
        ),
        **{name: origin.get(name) for name in ("time", "commit", "machine")},
        "versions": versions,
        "methods": found,
    }


def _final(record: Run, quantity: str) -> float | None:
    value = record.final(quantity)
    return value if math.isfinite(value) else None


def _method(
    entrant: Entrant, found: Result, target: float | None, seconds: Mapping[str, Mapping[str, float]], about: Record
) -> dict[str, Any]:
    ran, name, quantity = found.runs, entrant.name, about["quantity"]
    by_mode = {mode: own[name] for mode, own in seconds.items() if name in own}
    mode = "captured" if "captured" in by_mode else "eager"
    per_step = by_mode.get(mode)
    steps = [None if target is None else crossing(record, quantity, target) for record in ran]
    ranges = {key: [own.low, own.high] for key, own in entrant.space(COURSES[about["workload"]]).items()}
    known: dict[str, Any] = dict.fromkeys(("settings", "steps_to_target", "seconds_to_target", "final", "metrics"))
    if ran:
        known |= {
            "settings": None if found.best is None else _settings(ranges, found.best),
            "steps_to_target": _sample(steps),
            "seconds_to_target": _sample([_times(step, per_step) for step in steps]),
            "final": _sample([_final(record, quantity) for record in ran]),
            "metrics": {key: _sample([_final(record, key) for record in ran]) for key in about["metrics"]},
        }
    return {
        "name": name,
        "label": entrant.label,
        "ours": entrant.ours,
        "edge": _edge(found),
        "mode": mode,
        "n": len(ran),
        "diverged": sum(_final(record, quantity) is None for record in ran),
        "reason": None if ran else about.get("reasons", {}).get(name) or _unfinished(found, about),
        "seconds_per_step": rounded(per_step),
        "ranges": ranges,
        "tuning": [
            {"settings": _settings(ranges, trial), "value": rounded(value), "diverged": math.isinf(value)}
            for trial, value in found.tried[0].items()
        ],
        "curves": [_curve(record, quantity, per_step) for record in ran],
        **known,
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
    steps = record.curve["step"]
    return {
        "seed": record.trial.seed,
        "steps": list(steps),
        "seconds": [rounded(_times(step, per_step)) for step in steps],
        "loss": [rounded(value) for value in record.curve[quantity]],
    }


def _times(step: float | None, per_step: float | None) -> float | None:
    return None if step is None or per_step is None else step * per_step


def _sample(values: list[float | None]) -> dict[str, Any]:
    found = sample(values)
    return found | {name: rounded(found[name]) for name in ("mean", "std")} | {"values": [rounded(value) for value in values]}


@dataclass(frozen=True)
class Pair:
    """An optimizer and the same with ISAAC, at the end of the budget; no difference where a run is missing or diverged."""

    label: str
    alone: Record
    ours: Record
    difference: Difference | None


def pairs(summary: Record) -> Iterator[Pair]:
    """Of the optimizers that ran with and without ISAAC."""
    known = {method["name"]: method for method in summary["methods"] if method["n"]}
    for plain, conditioned in PAIRS.items():
        if plain in known and conditioned in known:
            alone, ours = (known[name]["final"] for name in (plain, conditioned))
            values = [[value for value in end["values"] if value is not None] for end in (ours, alone)]
            complete = values == [ours["values"], alone["values"]] and min(map(len, values)) > 1
            yield Pair(known[plain]["label"], alone, ours, contrast(*values) if complete else None)


def lowest(summary: Record) -> str | None:
    """Label of the method with the lowest mean loss at the end."""
    ends = [(m["final"]["mean"], m["label"]) for m in summary["methods"] if m["n"] and m["final"]["mean"] is not None]
    return min(ends)[1] if ends else None
