"""The first races, of before there were rules: who ran, and what was chosen, from their records alone."""

import math
from collections.abc import Mapping
from typing import Any

from isaac_lab.method import METHODS
from isaac_lab.record import Record, Store
from isaac_lab.studies import finals
from isaac_lab.studies.race.race import Entrant, Range
from isaac_lab.study import Arm, Result, Search, resolve

#: Their scales; nothing is run at these any more.
SCALES = ("full", "quick")
#: Who raced. That a best lies at an edge was told of learning rates alone.
_RATES = {"learning_rate": Range(1.0, 1.0)}
ENTRANTS = {
    name: Entrant(name, METHODS[name].title, name, _RATES) for name in ("momentum", "adamw", "muon", "soap", "kfac")
} | {
    f"isaac-{base}{how}": Entrant(f"isaac-{base}{how}", f"{title} + ISAAC{words}", f"{base}+isaac", _RATES)
    for how, words in {"": "", "-running": ", running"}.items()
    for base, title in {"momentum": "SGD + momentum", "adamw": "AdamW", "muon": "Muon"}.items()
}


def ending(record: Record, quantity: str) -> float:
    """What a tuning run was judged by: the mean of its last three measurements; infinite where it diverged."""
    values = record.column(quantity)[-3:]
    if not record.finished or not all(math.isfinite(value) for value in values):
        return math.inf
    return math.fsum(values) / len(values)


def results(about: Mapping[str, Any], store: Store) -> dict[str, tuple[Entrant, Result]]:
    """By name, who raced, and what the records say; seed 0 tuned, the others are shown."""
    trials, seeds = [record.trial for record in store.records() if record.trial.seed == 0], range(1, about["seeds"] + 1)

    def arm(own: Entrant) -> Arm:
        running = own.name.endswith("-running")
        tuned = [trial for trial in trials if trial.method == own.method and bool(trial.get("running")) is running]
        search = Search(lambda _: tuned, lambda record: ending(record, about["quantity"]))
        return Arm(own.name, lambda best: finals(best, seeds), (search,))

    found = {name: (own, resolve(arm(own), store)) for name, own in ENTRANTS.items()}
    return {name: own for name, own in found.items() if own[1].tried[0] or name in about["reasons"]}


def target(about: Mapping[str, Any], runs: Mapping[str, tuple[Entrant, Result]]) -> tuple[float | None, str]:
    """Of AdamW's runs alone: the highest, so that each of its own seeds gets there."""
    best, records = runs["adamw"][1].best, runs["adamw"][1].runs
    ends = [value for record in records if math.isfinite(value := record.final(about["quantity"]))]
    if best is None or not ends:
        return None, "AdamW, which has no finished runs"
    said = f"AdamW, learning rate {best.learning_rate:g}, at {about['steps']:,} steps, the highest of {len(ends)} seeds"
    return max(ends), said
