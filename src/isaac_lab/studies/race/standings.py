"""From records to standings: who reached the target when, where everybody was at the end, and what seeds show of it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from isaac_lab.record import Record as Run
from isaac_lab.record import Store, rounded
from isaac_lab.records import StoreError
from isaac_lab.stats import Difference, contrast, holm, paired, sample
from isaac_lab.studies.race import first
from isaac_lab.studies.race.race import COURSES, ENTRANTS, RULES, SCALES, Course, Entrant, Scale, arms, edges
from isaac_lab.study import Result, resolve
from isaac_lab.times import MODES
from isaac_lab.times import seconds as medians
from isaac_lab.trial import Trial

Record = Mapping[str, Any]

#: Of what decides, where the workload has none, or a shorter one.
TITLES = {
    "train_loss": "Training loss",
    "test_loss": "Test loss",
    "test_psnr": "PSNR of held-out pixels, dB",
    "psnr": "PSNR of fitted pixels, dB",
    "matthews": "Matthews correlation",
}
#: What is tuned, in the order of the tables.
SETTINGS = ("learning_rate", "second_rate", "beta2", "momentum", "damping")
#: After the name of a method with ISAAC whose λ is infinite: it is timed, and not raced.
CONTROL = ", λ = ∞"


def course_of(about: Record) -> tuple[Course, Scale]:
    """The rules of a folder, as they are now."""
    name, scale = str(about.get("workload")), str(about.get("scale"))
    if name not in COURSES or scale not in SCALES:
        raise StoreError(f"there are no rules for a race on {name} at scale {scale}; there are {', '.join(COURSES)}")
    return COURSES[name], SCALES[scale]


def check(store: Store) -> None:
    """Refuse records that other rules made than those that are here now."""
    course, scale = course_of(store.about)
    now = course.rules(scale)
    others = sorted({record.trial.rules or "none" for record in store.records()} - {now})
    if others:
        raise StoreError(
            f"{store.folder} has runs that other rules made ({', '.join(others)}); the rules of {course.name} are {now} now. "
            "Move the folder away and race again, or check out the commit of its records"
        )


def crossing(record: Run, quantity: str, target: float, *, higher: bool = False) -> float | None:
    """The step at which a run is first at the target, from above, or from below where `higher` is better; None if it never is.

    Between measurements lie straight lines.
    """
    sign = -1 if higher else 1
    before: tuple[float, float] | None = None
    for point in record.points:
        step, value = point["step"], point[quantity]
        if value is not None and sign * value <= sign * target:
            share = 0.0 if before is None else (before[1] - target) / (before[1] - value)
            return float(step if before is None else before[0] + share * (step - before[0]))
        before = None if value is None else (step, value)
    return None


def results(about: Record, store: Store) -> dict[str, tuple[Entrant, Result]]:
    """By name, who races, and what the records say."""
    if about["scale"] in first.SCALES:
        return first.results(about, store)
    course, scale = course_of(about)
    return {name: (ENTRANTS[name], resolve(arm, store)) for name, arm in arms(course, scale, store, about["network"]).items()}


def summarize(store: Store) -> dict[str, Any]:
    """The summary of the race in a folder, in the form that tables, pictures and pages are made from.

    Raises:
        StoreError: Other rules made it.
    """
    about, timed = store.about, store.times()
    ruled = about["scale"] not in first.SCALES
    if ruled:
        check(store)
    timed = {mode: timed[mode] for mode in MODES if mode in timed}
    runs = results(about, store)
    target, target_by = _target(about, runs) if ruled else first.target(about, runs)
    found = [_method(entrant, result, target, timed, about) for entrant, result in runs.values()]
    newest = max((record for _, result in runs.values() for record in result.runs), key=lambda run: run.time, default=None)
    origin = timed.get("eager") or ({} if newest is None else {**newest.about, "time": newest.time})
    versions = dict(origin.get("versions") or {})
    for record in timed.values():
        versions |= record["versions"]
    kept = ["workload", "title", "scale", "data", "arithmetic", "quantity", "steps", "batch", "seeds", "points", "command"]
    return {
        **{name: about[name] for name in kept},
        "rules": about.get("rules", ""),
        "higher": about.get("higher", False),
        "trials": max((method["trials"] for method in found), default=0) if ruled else about["trials"],
        "mode": "captured" if about["device"] == "cuda" else "eager",
        "quantity_title": TITLES.get(about["quantity"]) or about["metrics"][about["quantity"]],
        "metric_titles": {name: title for name, title in about["metrics"].items() if name != about["quantity"]},
        "target": rounded(target),
        "target_by": target_by,
        "published": dict(course_of(about)[0].published) if ruled else {},
        **{name: origin.get(name) for name in ("time", "commit", "machine")},
        "versions": versions,
        "methods": found,
        "compared": _compared(found) if ruled else [],
    }


def _target(about: Record, runs: Mapping[str, tuple[Entrant, Result]]) -> tuple[float | None, str]:
    course, _ = course_of(about)
    if not isinstance(course.target, str):
        return course.target, course.source
    entrant, result = runs[course.target]
    ends = [record.final(course.metric) for record in result.runs]
    if not ends or not all(map(math.isfinite, ends)):
        return None, f"{entrant.label}, which has no finished runs"
    return fmean(ends), f"mean of {entrant.label}, {len(ends)} seeds"


def _method(
    entrant: Entrant, found: Result, target: float | None, timed: Mapping[str, Record], about: Record
) -> dict[str, Any]:
    ran, name, quantity, higher = found.runs, entrant.name, about["quantity"], about.get("higher", False)
    clocks = {mode: medians(record) for mode, record in timed.items()}
    by_mode = {mode: own[name] for mode, own in clocks.items() if name in own}
    mode = "captured" if "captured" in by_mode else "eager"
    each = by_mode.get(mode)
    ends = {
        key: [None if math.isinf(end := record.final(key)) else end for record in ran] for key in (quantity, *about["metrics"])
    }
    steps = [None if target is None else crossing(record, quantity, target, higher=higher) for record in ran]
    seconds = [None if step is None or each is None else step * each for step in steps]
    tried = {trial: value for values in found.tried for trial, value in values.items()}
    unfinished = "diverged in every tuning trial" if found.lost else f"{len(tried)} tuning trials have been run"
    if found.best:
        unfinished = "tuned, but not run with other seeds yet"
    return {
        "name": name,
        "label": entrant.label,
        "ours": entrant.ours,
        "edge": bool(edges(entrant, found)),
        "mode": mode,
        "n": len(ran),
        "trials": len(tried),
        "diverged": ends[quantity].count(None),
        "reason": None if ran else about.get("reasons", {}).get(name) or unfinished,
        "seconds_per_step": rounded(each),
        "clocks": {mode: rounded(own) for mode, own in by_mode.items()},
        "control": {mode: rounded(own.get(name + CONTROL)) for mode, own in clocks.items()},
        "ready": {mode: own.get("ready", {}).get(name) for mode, own in timed.items()},
        "tuning": [
            {"settings": _settings(trial), "value": rounded(value), "diverged": math.isinf(value)}
            for trial, value in tried.items()
        ],
        "curves": [_curve(record, quantity, each) for record in ran],
        "settings": _settings(found.best) if ran and found.best else None,
        "steps_to_target": _sample(steps) if ran else None,
        "seconds_to_target": _sample(seconds) if ran else None,
        "final": _sample(ends[quantity]) if ran else None,
        "metrics": {key: _sample(ends[key]) for key in about["metrics"]} if ran else None,
    }


def _settings(trial: Trial) -> dict[str, float]:
    """What was tuned, and what moved with it."""
    known = dict(trial.settings)
    return {name: float(known[name]) for name in SETTINGS if name in known}  # type: ignore[arg-type]


def _curve(record: Run, quantity: str, each: float | None) -> dict[str, Any]:
    steps = [step or 0 for step in record.curve["step"]]
    return {
        "seed": record.trial.seed,
        "steps": steps,
        "seconds": [None if each is None else rounded(step * each) for step in steps],
        "loss": [rounded(value) for value in record.curve[quantity]],
    }


def _sample(values: list[float | None]) -> dict[str, Any]:
    """With the median in which a value that is not there is infinite: None where most are missing."""
    found = sample(values)
    middle = median(math.inf if value is None else value for value in values) if values else None
    known = {name: rounded(own) for name, own in {**found, "median": middle}.items() if name in ("mean", "std", "median")}
    return {**found, **known, "values": [rounded(value) for value in values]}


def _compared(methods: Sequence[Record]) -> list[dict[str, Any]]:
    """The comparisons of the rules, of those that have all runs: the mean difference, its paired p, and that by Holm."""
    known = {method["name"]: method for method in methods if method["n"]}
    found = {}
    for names in RULES["compared"]:
        ends = [known[name]["final"]["values"] for name in names if name in known]
        if len(ends) == 2 and None not in (*ends[0], *ends[1]) and len(ends[0]) == len(ends[1]) > 1:
            found[tuple(names)] = paired(*ends)
    adjusted = holm({" ".join(names): own.p for names, own in found.items()})
    return [
        {"names": list(names), "value": rounded(own.value), "p": rounded(own.p), "holm": rounded(adjusted[" ".join(names)])}
        for names, own in found.items()
    ]


@dataclass(frozen=True)
class Pair:
    """An optimizer and the same with ISAAC at the end; no difference where a run is missing or diverged.

    The difference is lower where ISAAC is better.
    """

    label: str
    alone: Record
    ours: Record
    difference: Difference | None


def pairs(summary: Record) -> Iterator[Pair]:
    """Of the optimizers that ran with and without ISAAC: by the rules paired and adjusted by Holm, without any by Welch."""
    known = {method["name"]: method for method in summary["methods"] if method["n"]}
    compared = {tuple(own["names"]): own for own in summary.get("compared", ())}
    sign = -1 if summary.get("higher") else 1
    for plain in ENTRANTS:
        conditioned = f"isaac-{plain}"
        if plain in known and conditioned in known:
            alone, ours = (known[name]["final"] for name in (plain, conditioned))
            values = [[value for value in end["values"] if value is not None] for end in (ours, alone)]
            complete = values == [ours["values"], alone["values"]] and min(map(len, values)) > 1
            own = compared.get((conditioned, plain))
            difference = contrast(*values) if complete and not summary.get("rules") else None
            if own is not None:
                difference = Difference(sign * own["value"], own["holm"])
            yield Pair(known[plain]["label"], alone, ours, difference)


def lowest(summary: Record) -> str | None:
    """Label of the method that is best in the mean at the end: the lowest, or the highest where more is better."""
    sign = -1 if summary.get("higher") else 1
    ends = [(sign * m["final"]["mean"], m["label"]) for m in summary["methods"] if m["n"] and m["final"]["mean"] is not None]
    return min(ends)[1] if ends else None
