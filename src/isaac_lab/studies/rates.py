"""Test accuracy over five learning rates, plain and with one line; the rules are in rates.toml."""

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from isaac_lab.record import Store
from isaac_lab.study import Arm
from isaac_lab.trial import Trial

_TEXT = resources.files("isaac_lab.studies").joinpath("rates.toml").read_text(encoding="utf-8")
_KNOWN = tomllib.loads(_TEXT)
STUDY: Mapping[str, Any] = _KNOWN["study"]
#: By the name of the method: its title, its rates, its other settings.
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = _KNOWN["optimizers"]
SCALES: Mapping[str, Mapping[str, Any]] = _KNOWN["scales"]
#: By scale, of what its runs are made by.
HASHES = {
    name: hashlib.sha256(json.dumps([STUDY, OPTIMIZERS, how], sort_keys=True).encode()).hexdigest()[:12]
    for name, how in SCALES.items()
}


def arms(scale: str) -> dict[tuple[str, float], tuple[Arm, Arm]]:
    """By optimizer and learning rate: plain, and with the line."""
    how = SCALES[scale]
    variant = {**STUDY["variant"], **how["variant"]}

    def arm(method: str, rate: float, settings: Mapping[str, Any]) -> Arm:
        given = tuple({"learning_rate": rate, **settings}.items())
        seeds = range(STUDY["first_seed"], STUDY["first_seed"] + how["seeds"])
        trials = [
            Trial(
                STUDY["workload"],
                method,
                given,
                tuple(variant.items()),
                STUDY["schedule"],
                how["steps"],
                1,
                seed,
                how["small"],
                rules=HASHES[scale],
            )
            for seed in seeds
        ]
        return Arm(f"{method} {rate:g}", lambda _: trials)

    return {
        (name, rate): (arm(name, rate, own["settings"]), arm(f"{name}+line", rate, own["settings"]))
        for name, own in OPTIMIZERS.items()
        for rate in own["rates"]
    }


@dataclass(frozen=True)
class Cell:
    """An optimizer at a rate.

    Args:
        optimizer: A key of `OPTIMIZERS`.
        rate: Its learning rate.
        plain: The metric of each seed; infinite where it diverged.
        line: The same with the line.
    """

    optimizer: str
    rate: float
    plain: tuple[float, ...]
    line: tuple[float, ...]


def cells(store: Store, scale: str) -> list[Cell]:
    """Those of which all seeds have ended."""
    found = []
    for (name, rate), pair in arms(scale).items():
        records = [[store.get(trial) for trial in arm.finals(None)] for arm in pair]
        plain, line = (tuple(one.final(STUDY["metric"]) for one in own if one is not None) for own in records)
        if all(one is not None for own in records for one in own):
            found.append(Cell(name, rate, plain, line))
    return found
