"""Who races and how: the rules as arms, with equally many tuning runs for everyone, and then fresh seeds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from isaac_lab.method import METHODS
from isaac_lab.studies import finals, hashed, rules
from isaac_lab.study import Arm, Kept, Result, Search, decides, resolve
from isaac_lab.trial import Trial, Value

_TEXT: Mapping[str, Any] = rules("race/rules.toml")
#: What all races share.
RULES: Mapping[str, Any] = _TEXT["rules"]
#: Of the Halton sequence, one for each dimension.
PRIMES = (2, 3, 5)
#: Numbers just below 1, searched evenly in the logarithm of what they lack.
BELOW_ONE = ("beta2", "momentum")


@dataclass(frozen=True)
class Range:
    """Numbers evenly in their logarithm, or, just below 1, in that of their distance to it.

    `low` is at the place 0, `high` at the place 1; there are places beyond.
    """

    low: float
    high: float
    below_one: bool = False

    def at(self, place: float) -> float:
        """The number at this share of the way, with three digits."""
        low, high = self._ends()
        found = float(f"{low * (high / low) ** place:.3g}")
        return round(1 - found, 12) if self.below_one else found

    def place(self, value: float) -> float:
        """Where a number is."""
        low, high = self._ends()
        return math.log((1 - value if self.below_one else value) / low) / math.log(high / low)

    def _ends(self) -> tuple[float, float]:
        return (1 - self.low, 1 - self.high) if self.below_one else (self.low, self.high)


@dataclass(frozen=True)
class Scale:
    """How much is run; the file says what each number is."""

    name: str
    small: bool
    first: int
    more: int
    least: int
    rounds: int
    seeds: int
    points: int
    turns: int


@dataclass(frozen=True)
class Course:
    """The rules on one workload, as the file has them."""

    name: str
    source: str  # whose problem it is
    metric: str  # what decides, a quantity of the workload
    target: float | str  # a number, or the method whose mean it is
    smoke: Mapping[str, Any]  # at this scale: `steps`, and perhaps a `variant`
    standard: Mapping[str, Any]
    workload: str = ""  # in the registry; the name unless given
    higher: bool = False  # more of the metric is better
    all: bool = False  # everyone races, not only those that race everywhere
    adaptive: float = 1.0  # times the learning rates of methods that do not depend on the scale of the loss
    plain: float = 1.0  # times those of methods that do
    schedule: str = "cosine"  # after the warm-up
    warm_up: float = 0.05  # share of the steps
    settings: Mapping[str, Value] = field(default_factory=dict)  # of all methods
    decay: Mapping[str, float] = field(default_factory=dict)  # "added" to the gradient or "decoupled"
    conditioned: Mapping[str, Value] = field(default_factory=dict)  # settings of all methods with ISAAC
    published: Mapping[str, float] = field(default_factory=dict)  # by method, what its authors or users report

    def rules(self, scale: Scale) -> str:
        """The hash of what a run is made by."""
        shared = {name: own for name, own in _TEXT.items() if name not in ("scales", "workloads")}
        own = {**vars(self), "smoke": None, "standard": None, scale.name: getattr(self, scale.name)}
        return hashed(shared, vars(scale), own)

    def blank(self, scale: Scale, network: str = "") -> Trial:
        """A run without a method's numbers, at the seed and on the split of searches."""
        own = getattr(self, scale.name)
        variant = {**own.get("variant", {}), **({"model": network} if network else {})}
        made = Trial(self.workload or self.name, "adamw", schedule=self.schedule, steps=own["steps"], small=scale.small)
        made = replace(made, points=min(scale.points, own["steps"]), seed=RULES["search_seed"], split="validation")
        return replace(made, rules=self.rules(scale)).having(**self.settings).varied(**variant)


@dataclass(frozen=True)
class Entrant:
    """A method in a race."""

    name: str
    label: str  # in tables and pictures
    method: str  # as `isaac_lab.method.find` knows it
    search: Mapping[str, Range]  # what is tuned; the rate as on a workload whose factors are 1
    plain: bool = False  # its learning rate depends on the scale of the loss
    settings: Mapping[str, Value] = field(default_factory=dict)  # those that are not tuned
    schedule: str = ""  # in place of the workload's

    @property
    def ours(self) -> bool:
        """Whether this library conditions the gradient, in the form that is raced."""
        return self.method.endswith("+isaac")

    def space(self, course: Course) -> dict[str, Range]:
        """What is tuned on a workload."""
        factors = {"learning_rate": course.plain if self.plain else course.adaptive, "second_rate": course.adaptive}
        found = {}
        for name, own in self.search.items():
            factor = factors.get(name, 1.0)
            found[name] = replace(own, low=factor * own.low, high=factor * own.high)
        return found

    def trial(self, course: Course, blank: Trial, places: Sequence[float]) -> Trial:
        """A run with the settings at these places of the ranges, in the order of `space`."""
        decoupled = self.method.partition("+")[0] in RULES["decoupled"]
        decay = course.decay.get("decoupled" if decoupled else "added", 0.0)
        settings: dict[str, Value] = {"warm_up": round(course.warm_up * blank.steps), **self.settings}
        settings |= course.conditioned if self.ours else {}
        settings |= {"weight_decay": decay} if decay else {}
        settings |= {name: own.at(place) for (name, own), place in zip(self.space(course).items(), places, strict=True)}
        return replace(blank, method=self.method, schedule=self.schedule or blank.schedule).having(**settings)


def _entrants() -> dict[str, Entrant]:
    found = {}
    for name, own in _TEXT["methods"].items():
        known = {"method": name, **own}
        known["search"] = {key: Range(ends[0], ends[1], key in BELOW_ONE) for key, ends in own["search"].items()}
        found[name] = Entrant(name, METHODS[name].title if name in METHODS else "FOOF", **known)
    for base in _TEXT["isaac"]["before"]:
        own = found[base]
        search = {**own.search, "damping": Range(*_TEXT["isaac"]["damping"])}
        label = f"{own.label.removesuffix(' + AdamW')} + ISAAC"
        found[f"isaac-{base}"] = replace(own, name=f"isaac-{base}", label=label, method=f"{base}+isaac", search=search)
    return found


#: By name, in the order of the tables.
ENTRANTS: Mapping[str, Entrant] = _entrants()
SCALES: Mapping[str, Scale] = {name: Scale(name, **own) for name, own in _TEXT["scales"].items()}
#: In the order of the tables.
COURSES: Mapping[str, Course] = {name: Course(name, **own) for name, own in _TEXT["workloads"].items()}


def entrants(course: Course) -> tuple[Entrant, ...]:
    """All of a workload, also those that cannot run there."""
    return tuple(own for name, own in ENTRANTS.items() if course.all or name in RULES["everywhere"])


def arms(course: Course, scale: Scale, kept: Kept, network: str = "") -> dict[str, Arm]:
    """By name; with as many rounds for everyone as it takes until nobody's best lies at an edge, at most those of the scale.

    Who has not begun is not waited for.
    """
    for rounds in range(scale.least, scale.rounds + 1):
        made = {entrant.name: _arm(entrant, course, scale, rounds, network) for entrant in entrants(course)}
        found = {name: own for name, arm in made.items() if (own := resolve(arm, kept)).tried[0]}
        searching = any(trial.split == "validation" for own in found.values() for trial in own.due)
        if searching or not any(edges(ENTRANTS[name], own) for name, own in found.items()):
            break
    return made


def _arm(entrant: Entrant, course: Course, scale: Scale, rounds: int, network: str) -> Arm:
    blank, dimensions, space = course.blank(scale, network), len(entrant.search), entrant.space(course)
    value, seeds = decides(course.metric, higher=course.higher), range(RULES["first_seed"], RULES["first_seed"] + scale.seeds)

    def candidates(found: Result | None) -> list[Trial]:
        """A round: first all over the ranges, later in a box around the best.

        Where that lies at an edge of what was tried, the box begins there and lies beyond.
        """
        first, count = (1 + scale.first + (len(found.tried) - 1) * scale.more, scale.more) if found else (1, scale.first)
        points = [[_halton(at, prime) for prime in PRIMES[:dimensions]] for at in range(first, first + count)]
        if found is None or found.best is None:
            return [entrant.trial(course, blank, point) for point in points]
        sides, best = edges(entrant, found), found.best
        offsets = [[sides[name] * x if name in sides else x - 0.5 for name, x in zip(space, p, strict=True)] for p in points]
        center = [own.place(best.get(name)) for name, own in space.items()]
        places = [[at + RULES["box"] * x for at, x in zip(center, own, strict=True)] for own in offsets]
        return [best, *(entrant.trial(course, blank, own) for own in places)]

    return Arm(entrant.name, lambda best: finals(best, seeds), (Search(candidates, value),) * rounds)


def edges(entrant: Entrant, found: Result) -> dict[str, int]:
    """Of the chosen numbers those below (−1) or above which (1) nothing was tried."""
    if found.best is None:
        return {}
    chosen = {name: found.best.get(name) for name in entrant.search}
    tried = {name: [trial.get(name) for values in found.tried for trial in values] for name in chosen}
    at = {name: (chosen[name] == max(values)) - (chosen[name] == min(values)) for name, values in tried.items()}
    return {name: side for name, side in at.items() if side}


def due(racing: Sequence[Arm], kept: Kept) -> list[Trial]:
    """What is to be run next: no final runs before all searches have ended, because their rounds depend on one another."""
    every = dict.fromkeys(trial for arm in racing for trial in resolve(arm, kept).due)
    return [trial for trial in every if trial.split == "validation"] or list(every)


def _halton(number: int, base: int) -> float:
    """The digits of a number in this base, mirrored at the point."""
    result, weight = 0.0, 1.0
    while number:
        number, digit = divmod(number, base)
        weight /= base
        result += digit * weight
    return result
