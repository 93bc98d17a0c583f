"""The first races, of before there were rules: who ran, and what was chosen, from their records alone."""

import math
from collections.abc import Mapping
from typing import Any

from isaac_lab.method import METHODS
from isaac_lab.record import Record, Store
from isaac_lab.studies import finals
from isaac_lab.studies.race.race import Entrant, Range
from isaac_lab.study import Arm, Result, Search, resolve
from isaac_lab.trial import Trial

#: Their scales; nothing is run at these any more.
SCALES = ("full", "quick")
RIVALS = ("momentum", "adamw", "muon", "soap", "kfac")
TITLES = {"momentum": "SGD + momentum", "adamw": "AdamW", "muon": "Muon"}


def ending(record: Record, quantity: str) -> float:
    """What a tuning run was judged by: the mean of its last three measurements; infinite where it diverged."""
    values = record.column(quantity)[-3:]
    if not record.finished or not all(math.isfinite(value) for value in values):
        return math.inf
    return math.fsum(values) / len(values)


def results(about: Mapping[str, Any], store: Store) -> dict[str, tuple[Entrant, Result]]:
    """By name, who raced, and what the records say; seed 0 tuned, the others are shown."""
    tuned: dict[str, list[Trial]] = {}
    for record in store.records():
        if record.trial.seed == 0:
            tuned.setdefault(_name(record.trial), []).append(record.trial)

    def arm(name: str) -> Arm:
        search = Search(lambda _: tuned.get(name, []), lambda record: ending(record, about["quantity"]))
        seeds = range(1, about["seeds"] + 1)
        return Arm(name, lambda best: finals(best, seeds), (search,))

    names = [*RIVALS, *(f"isaac-{base}{how}" for how in ("", "-running") for base in TITLES)]
    there = [name for name in names if name in tuned or name in about["reasons"]]
    return {name: (_entrant(name), resolve(arm(name), store)) for name in there}


def target(about: Mapping[str, Any], runs: Mapping[str, tuple[Entrant, Result]]) -> tuple[float | None, str]:
    """Of AdamW's runs alone: the highest, so that each of its own seeds gets there."""
    best, records = runs["adamw"][1].best, runs["adamw"][1].runs
    ends = [value for record in records if math.isfinite(value := record.final(about["quantity"]))]
    if best is None or not ends:
        return None, "AdamW, which has no finished runs"
    said = f"AdamW, learning rate {best.learning_rate:g}, at {about['steps']:,} steps, the highest of {len(ends)} seeds"
    return max(ends), said


def _name(trial: Trial) -> str:
    base, _, how = trial.method.partition("+")
    return (f"isaac-{base}" if how else base) + ("-running" if trial.get("running") else "")


def _entrant(name: str) -> Entrant:
    """Edges were told of learning rates alone."""
    base = name.removeprefix("isaac-").removesuffix("-running")
    ours = name.startswith("isaac-")
    label = f"{TITLES[base]} + ISAAC{', running' if name.endswith('-running') else ''}" if ours else METHODS[base].title
    return Entrant(name, label, f"{base}+isaac" if ours else base, {"learning_rate": Range(1.0, 1.0)})
