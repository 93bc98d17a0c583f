"""Test accuracy over five learning rates, plain and with one line; the rules are in rates.toml."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isaac_lab.record import Store
from isaac_lab.studies import hashed, rules
from isaac_lab.study import Arm, resolve
from isaac_lab.trial import Trial

_KNOWN = rules("rates.toml")
STUDY: Mapping[str, Any] = _KNOWN["study"]
#: By the name of the method: its title, its rates, its other settings.
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = _KNOWN["optimizers"]
SCALES: Mapping[str, Mapping[str, Any]] = _KNOWN["scales"]


def arms(scale: str) -> dict[tuple[str, float], tuple[Arm, Arm]]:
    """By optimizer and learning rate: plain, and with the line."""
    how, made_by = SCALES[scale], hashed(STUDY, OPTIMIZERS, SCALES[scale])
    variant = tuple({**STUDY["variant"], **how["variant"]}.items())
    seeds = range(STUDY["first_seed"], STUDY["first_seed"] + how["seeds"])

    def arm(method: str, rate: float, settings: Mapping[str, Any]) -> Arm:
        own = (STUDY["workload"], method, tuple({"learning_rate": rate, **settings}.items()), variant, STUDY["schedule"])
        trials = [Trial(*own, how["steps"], 1, seed, how["small"], rules=made_by) for seed in seeds]
        return Arm(f"{method} {rate:g}", lambda _: trials)

    return {
        (name, rate): (arm(name, rate, own["settings"]), arm(f"{name}+line", rate, own["settings"]))
        for name, own in OPTIMIZERS.items()
        for rate in own["rates"]
    }


@dataclass(frozen=True)
class Cell:
    """An optimizer at a rate: the metric of each seed plain and with the line; infinite where it diverged."""

    optimizer: str
    rate: float
    plain: tuple[float, ...]
    line: tuple[float, ...]


def cells(store: Store, scale: str) -> list[Cell]:
    """Those of which all seeds have ended."""
    found = []
    for (name, rate), pair in arms(scale).items():
        both = [resolve(arm, store) for arm in pair]
        if all(own.whole for own in both):
            found.append(Cell(name, rate, *(tuple(run.final(STUDY["metric"]) for run in own.runs) for own in both)))
    return found
