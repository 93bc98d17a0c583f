"""A study: arms, each with rounds of search and final runs; what was chosen, what ran, and what is due, from records alone."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from isaac_lab.record import Record
from isaac_lab.trial import Trial


class Kept(Protocol):
    """Where records are found."""

    def get(self, trial: Trial, /) -> Record | None:
        """The record of a run, or None."""


def lowest(quantity: str) -> Callable[[Record], float]:
    """A value of a run: a quantity at its end; infinite where it diverged."""
    return lambda record: record.final(quantity)


@dataclass(frozen=True)
class Search:
    """One round, equally many runs for every method.

    Args:
        candidates: The runs, from the best of the round before; None in the first round.
        value: What decides, lower is better; infinite where a run diverged.
    """

    candidates: Callable[[Trial | None], Sequence[Trial]]
    value: Callable[[Record], float]


@dataclass(frozen=True)
class Arm:
    """A sector of a grid, a curve, a method in a race.

    Args:
        name: What tables, files and claims call it.
        finals: The runs that are shown, with what was chosen; cells and seeds.
        search: Rounds.
    """

    name: str
    finals: Callable[[Trial | None], Sequence[Trial]]
    search: tuple[Search, ...] = ()


@dataclass(frozen=True)
class Result:
    """What the records say of an arm.

    Args:
        best: The run whose settings were chosen in the last round that has ended; None where there is none yet, or where all of
            a round diverged.
        tried: Of each round that was begun, the runs with their values; those that have a record.
        runs: The records of the final runs that are there, in their order.
        due: What is to be run next.
        lost: Whether all of a round diverged, so that nothing is left to be run.
    """

    best: Trial | None
    tried: tuple[Mapping[Trial, float], ...]
    runs: tuple[Record, ...]
    due: tuple[Trial, ...]
    lost: bool = False

    @property
    def whole(self) -> bool:
        """Whether everything has been run."""
        return not self.due


def resolve(arm: Arm, kept: Kept) -> Result:
    """What was chosen, what ran and what is due; a pure function of arm and records."""
    best: Trial | None = None
    tried: list[Mapping[Trial, float]] = []
    due: tuple[Trial, ...] = ()
    for search in arm.search:
        candidates = tuple(dict.fromkeys(search.candidates(best)))
        values = {trial: search.value(record) for trial in candidates if (record := kept.get(trial)) is not None}
        tried.append(values)
        due = tuple(trial for trial in candidates if trial not in values)
        if due:
            break
        # The first of equal ones.
        first = min(values, key=lambda trial: values[trial], default=None)
        if first is None or math.isinf(values[first]):
            return Result(None, tuple(tried), (), (), lost=True)
        best = first
    if best is None and arm.search:
        return Result(None, tuple(tried), (), due)
    finals = tuple(dict.fromkeys(arm.finals(best)))
    found = {trial: kept.get(trial) for trial in finals}
    runs = tuple(record for record in found.values() if record is not None)
    return Result(best, tuple(tried), runs, due or tuple(trial for trial, record in found.items() if record is None))


def by_seed(seeds: int, runs: Callable[[int], Sequence[Trial]]) -> list[Arm]:
    """An arm for each seed: every method at one before the next, so that a slow minute of the machine strikes all of them."""

    def arm(seed: int) -> Arm:
        return Arm(f"seed {seed}", lambda _: runs(seed))

    return [arm(seed) for seed in range(seeds)]


def outstanding(arms: Sequence[Arm], kept: Kept) -> list[Trial]:
    """What is to be run next, of all arms, each run once."""
    return list(dict.fromkeys(trial for arm in arms for trial in resolve(arm, kept).due))


def settle(arms: Sequence[Arm], kept: Kept, train: Callable[[Sequence[Trial]], Any]) -> None:
    """Train round after round, until nothing is due."""
    while due := outstanding(arms, kept):
        train(due)
