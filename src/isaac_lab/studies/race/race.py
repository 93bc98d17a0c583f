"""Who races and how: the rules as arms, each with equally many tuning runs and then the best settings at other seeds."""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from isaac_lab.method import METHODS
from isaac_lab.record import Record
from isaac_lab.study import Arm, Search
from isaac_lab.trial import Trial, Value

__all__ = ["COURSES", "REFERENCE", "SCALES", "Course", "Entrant", "Range", "Scale", "arm", "ending", "entrants", "places"]

RULES: Mapping[str, Any] = MappingProxyType(tomllib.loads((files(__package__) / "rules.toml").read_text(encoding="utf-8")))
#: Whose loss at the end of the budget is the target of all.
REFERENCE: str = RULES["reference"]
#: Of the Halton sequence, one for each dimension.
PRIMES = (2, 3, 5)
#: In tables: an optimizer that ISAAC is put before.
BASES = {"momentum": "SGD + momentum", "adamw": "AdamW", "muon": "Muon"}


@dataclass(frozen=True)
class Range:
    """Positive numbers from one to another; all of them are searched evenly in their logarithm."""

    low: float
    high: float

    def at(self, place: float) -> float:
        """The number at this share of the way, with three digits."""
        return float(f"{self.low * (self.high / self.low) ** place:.3g}")


@dataclass(frozen=True)
class Scale:
    """How much is run.

    Args:
        name: On the command line.
        small: Whether the small forms of the workloads are raced.
        trials: Tuning trials of each method.
        seeds: Runs of each method with its tuned settings.
        points: How often a run is measured.
        rounds: How often the methods take turns when their steps are timed.
        longest: Seconds that a run may take.
    """

    name: str
    small: bool
    trials: int
    seeds: int
    points: int
    rounds: int
    longest: float


@dataclass(frozen=True)
class Course:
    """The rules on one workload.

    Args:
        workload: Its name in the registry.
        lengths: Of a run, by scale.
        rates: Ranges of learning rates, by optimizer; "isaac-…" where ISAAC wants another than the optimizer alone.
        second_rates: Range of AdamW's learning rate beside Muon.
        unit: Of `lengths`: "steps" or "epochs".
        dampings: Range of λ of ISAAC and K-FAC.
        sharing: Of ISAAC: "expand" or "reduce".
        relative: Whether ISAAC's λ is relative to the size of the layers' inputs.
        running: Whether ISAAC also enters with a running average of the inputs' second moment.
        schedule: Of the learning rate.
        decay: Weight decay of optimizers that add it to the gradient.
        decoupled: Weight decay of those that do not.
        most_points: How often a run is measured at most; measuring some workloads takes longer than training them.
    """

    workload: str
    lengths: Mapping[str, int]
    rates: Mapping[str, Range]
    second_rates: Range
    unit: str = "steps"
    dampings: Range = field(default_factory=lambda: Range(0.01, 10))
    sharing: str = "expand"
    relative: bool = False
    running: bool = False
    schedule: str = "constant"
    decay: float = 0.0
    decoupled: float = 0.0
    most_points: int = 1_000

    def length(self, scale: Scale, epoch: int) -> int:
        """Steps of a run, where an epoch has so many."""
        return self.lengths[scale.name] * (epoch if self.unit == "epochs" else 1)


@dataclass(frozen=True)
class Entrant:
    """A method in a race.

    Args:
        name: On the command line and in records.
        label: In tables and pictures.
        method: A name that `method.find` knows.
        settings: Those that are not tuned.
    """

    name: str
    label: str
    method: str
    settings: tuple[tuple[str, Value], ...] = ()

    @property
    def ours(self) -> bool:
        """Whether this library conditions its gradient."""
        return self.method.endswith("+isaac")

    @property
    def optimizer(self) -> str:
        """Without what conditions it."""
        return self.method.partition("+")[0]

    def space(self, course: Course) -> dict[str, Range]:
        """What is tuned, with its range: the learning rate, and one number more where the method has one.

        Where ISAAC's damping is the second number of Muon, the learning rate of AdamW beside it moves with Muon's.
        """
        key = f"isaac-{self.optimizer}" if self.ours else self.optimizer
        found = {"learning_rate": course.rates.get(key) or course.rates[self.optimizer]}
        if self.ours or "damping" in METHODS[self.optimizer].takes:
            found["damping"] = course.dampings
        elif self.optimizer == "muon":
            found["second_rate"] = course.second_rates
        return found

    def trial(self, course: Course, scale: Scale, places: tuple[float, ...], *, steps: int, network: str = "") -> Trial:
        """A run at seed 0 with the settings at these places of the ranges, in the order of `space`."""
        settings: dict[str, Value] = dict(self.settings)
        settings |= {name: found.at(place) for (name, found), place in zip(self.space(course).items(), places, strict=True)}
        if self.optimizer == "muon" and "second_rate" not in settings:
            settings["second_rate"] = course.second_rates.at(places[0])
        if course.relative and self.ours:
            settings["relative"] = True
        decay = course.decoupled if self.optimizer in RULES["decoupled"] else course.decay
        settings |= {"weight_decay": decay} if decay else {}
        return Trial(
            course.workload,
            self.method,
            tuple(settings.items()),
            (("model", network),) if network else (),
            course.schedule,
            steps,
            min(scale.points, course.most_points),
            small=scale.small,
        )


def _course(workload: str, rules: Mapping[str, Any]) -> Course:
    rates = {name: Range(*ends) for name, ends in RULES["rates"][rules["rates"]].items()}
    return Course(workload, **{**rules, "rates": rates, "second_rates": Range(*rules["second_rates"])})


SCALES: Mapping[str, Scale] = MappingProxyType({name: Scale(name, **own) for name, own in RULES["scales"].items()})
#: In the order of the tables.
COURSES: Mapping[str, Course] = MappingProxyType({name: _course(name, own) for name, own in RULES["workloads"].items()})


def entrants(course: Course) -> tuple[Entrant, ...]:
    """All of a workload, also those that cannot run there."""
    methods = RULES["methods"]
    every = (("every", RULES["kfac_every"]),)
    rivals = [Entrant(name, METHODS[name].title, name, every if name == "kfac" else ()) for name in methods["rivals"]]
    how = () if course.sharing == "expand" else (("sharing", course.sharing),)
    ours = [Entrant(f"isaac-{base}", f"{BASES[base]} + ISAAC", f"{base}+isaac", how) for base in methods["isaac"]]
    for base in methods["running"] if course.running else ():
        ours.append(Entrant(f"isaac-{base}-running", f"{BASES[base]} + ISAAC, running", f"{base}+isaac", (("running", True),)))
    return (*rivals, *ours)


def arm(entrant: Entrant, course: Course, scale: Scale, *, steps: int, quantity: str, network: str = "") -> Arm:
    """Tuning at seed 0 over the whole budget, then the best settings with other seeds."""
    points = places(len(entrant.space(course)), scale.trials)
    tuning = [entrant.trial(course, scale, point, steps=steps, network=network) for point in points]

    def finals(best: Trial | None) -> list[Trial]:
        return [] if best is None else [replace(best, seed=seed) for seed in range(1, scale.seeds + 1)]

    return Arm(entrant.name, finals, (Search(lambda _: tuning, lambda record: ending(record, quantity)),))


def ending(record: Record, quantity: str) -> float:
    """What a tuning run is judged by: the mean of its last measurements; infinite where it diverged."""
    values = record.column(quantity)[-RULES["last"] :]
    if not record.finished or not all(math.isfinite(value) for value in values):
        return math.inf
    return math.fsum(values) / len(values)


def places(dimensions: int, count: int) -> list[tuple[float, ...]]:
    """Points of the unit cube: evenly from end to end where there is one dimension, else those of the Halton sequence."""
    if dimensions == 1:
        return [(number / (count - 1) if count > 1 else 0.5,) for number in range(count)]
    return [tuple(_halton(number, prime) for prime in PRIMES[:dimensions]) for number in range(1, count + 1)]


def _halton(number: int, base: int) -> float:
    """The digits of a number in this base, mirrored at the point."""
    result, weight = 0.0, 1.0
    while number:
        number, digit = divmod(number, base)
        weight /= base
        result += digit * weight
    return result
