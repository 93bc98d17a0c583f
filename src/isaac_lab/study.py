"""A study: arms, each with rounds of search and final runs; what was chosen, what ran, and what is due, from records alone."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from isaac_lab.record import Record
from isaac_lab.trial import Trial


class Kept(Protocol):
    """Where records are found."""

    def get(self, trial: Trial, /) -> Record | None:
        """The record of a run, or None."""


def decides(quantity: str, *, higher: bool = False) -> Callable[[Record], float]:
    """What decides in a search: a quantity at the end of a run; lower is better, infinite where it diverged."""

    def value(record: Record) -> float:
        found = record.final(quantity)
        return -found if higher and math.isfinite(found) else found

    return value


@dataclass(frozen=True)
class Search:
    """One round, equally many runs for every method."""

    candidates: Callable[["Result | None"], Sequence[Trial]]  # from the rounds before, which have ended; None in the first one
    value: Callable[[Record], float]  # what decides, lower is better; infinite where a run diverged


@dataclass(frozen=True)
class Arm:
    """A sector of a grid, a curve, a method in a race: rounds of search, and the runs that are shown, with what was chosen."""

    name: str
    finals: Callable[[Trial | None], Sequence[Trial]]
    search: tuple[Search, ...] = ()
    instead: Callable[[Trial], Sequence[Trial]] = (
        lambda trial: ()
    )  # what is run, one after the other, where a final run diverged


@dataclass(frozen=True)
class Result:
    """What the records say of an arm."""

    #: The run whose settings were chosen in the last round that has ended, if any; none where all of a round diverged.
    best: Trial | None
    tried: tuple[Mapping[Trial, float], ...]  # of each round that was begun, the runs that have a record, with their values
    runs: tuple[Record, ...]  # of the final runs, in their order
    due: tuple[Trial, ...]  # what is to be run next
    lost: bool = False  # whether all of a round diverged, so that nothing is left to be run

    @property
    def whole(self) -> bool:
        """Whether everything has been run."""
        return not self.due


def resolve(arm: Arm, kept: Kept) -> Result:
    """What was chosen, what ran and what is due; a pure function of arm and records."""
    found: Result | None = None
    for search in arm.search:
        candidates = tuple(dict.fromkeys(search.candidates(found)))
        values = {trial: search.value(record) for trial in candidates if (record := kept.get(trial)) is not None}
        best, tried = (found.best, (*found.tried, values)) if found else (None, (values,))
        if due := tuple(trial for trial in candidates if trial not in values):
            found = Result(best, tried, (), due)
            break
        # The first of equal ones.
        first = min(values, key=lambda trial: values[trial], default=None)
        if first is None or math.isinf(values[first]):
            return Result(None, tried, (), (), lost=True)
        found = Result(first, tried, (), ())
    if found is not None and found.best is None:
        return found
    chosen = found or Result(None, (), (), ())
    finals: dict[Trial, Record | None] = {}
    for trial in arm.finals(chosen.best):
        places = (trial, *arm.instead(trial))
        own = next((one for one in places if (record := kept.get(one)) is None or record.finished), places[-1])
        finals[own] = kept.get(own)
    runs = tuple(record for record in finals.values() if record is not None)
    return replace(chosen, runs=runs, due=chosen.due or tuple(trial for trial, record in finals.items() if record is None))


def outstanding(arms: Sequence[Arm], kept: Kept) -> list[Trial]:
    """What is to be run next, of all arms, each run once."""
    return list(dict.fromkeys(trial for arm in arms for trial in resolve(arm, kept).due))


def settle(arms: Sequence[Arm], kept: Kept, train: Callable[[Sequence[Trial]], Any]) -> None:
    """Train round after round, until nothing is due."""
    while due := outstanding(arms, kept):
        train(due)
