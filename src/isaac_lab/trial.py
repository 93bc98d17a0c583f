"""One training run: a workload, a method with its numbers, a seed and a budget, in one frozen object that a record repeats."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

Value: TypeAlias = str | int | float | bool | tuple[int, ...]
#: Names and values, sorted by name.
Settings: TypeAlias = tuple[tuple[str, Value], ...]

#: Of the learning rate: constant; half a cosine down to zero, or to `floor`; both after `warm_up` steps. Up over the first
#: tenth, then straight down to zero; "straight" without the first part; times `drop` after each of `drops` equal parts.
SCHEDULES = ("constant", "cosine", "linear", "straight", "stepped")
#: What is measured besides the training examples: those for tests, or some cut from the training examples, for searches.
SPLITS = ("test", "validation")
WARM_UP = 0.1
_LOWEST = {"steps": 1, "points": 1, "seed": 0}
_POSITIVE = ("learning_rate", "second_rate", "damping", "output_damping")


class TrialError(ValueError):
    """A run that cannot be; the message names the field and what would be right."""


@dataclass(frozen=True)
class Trial:
    """One training run."""

    workload: str  # what is trained, a name of `workload.WORKLOADS`
    method: str  # how, a name that `method.find` knows: "adamw+isaac"
    settings: Settings = ()  # numbers of the method: learning_rate, damping, … What is not there is the method's default
    variant: Settings = ()  # in what the workload differs from its usual form: width, batch, data, examples, model
    schedule: str = "constant"
    steps: int = 1000
    points: int = 20  # how often the network is measured, evenly over the steps; besides, it is measured untrained
    seed: int = 0  # of weights, order and everything random
    small: bool = False  # the small form of the workload, for a smoke test
    split: str = "test"  # a run that says "validation" never sees the examples for tests
    rules: str = ""  # hash of the rules that the run was made by; other rules make other runs

    def __post_init__(self) -> None:
        for name in ("settings", "variant"):
            object.__setattr__(self, name, tuple(sorted((str(key), _plain(key, value)) for key, value in getattr(self, name))))
        for name, known in {"schedule": SCHEDULES, "split": SPLITS}.items():
            if getattr(self, name) not in known:
                raise TrialError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        for name, lowest in _LOWEST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
                raise TrialError(f"{name} must be a whole number >= {lowest}, got {value!r}")
        for name in _POSITIVE:
            value = self.get(name, 1.0)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise TrialError(f"{name} must be > 0, got {value!r}")
        if not math.isfinite(float(self.get("learning_rate", 1.0))):
            raise TrialError(f"learning_rate must be finite, got {self.get('learning_rate')}")

    def get(self, name: str, default: Any = None) -> Any:
        """A setting, else what the variant says, else `default`."""
        return dict(self.variant + self.settings).get(name, default)

    def having(self, **changes: Value | None) -> "Trial":
        """With these settings; None takes one away."""
        return replace(self, settings=_changed(self.settings, changes))

    def varied(self, **changes: Value | None) -> "Trial":
        """With these in the variant; None takes one away."""
        return replace(self, variant=_changed(self.variant, changes))

    @property
    def learning_rate(self) -> float:
        """The largest of the schedule."""
        return float(self.get("learning_rate", 0.1))

    @property
    def damping(self) -> float:
        """λ_a; infinite where there is none."""
        return float(self.get("damping", math.inf))

    @property
    def output_damping(self) -> float:
        """λ_g; infinite for ζ*."""
        return float(self.get("output_damping", math.inf))

    @property
    def key(self) -> str:
        """The name of the run: a hash of all that is not a default, so that a new field renames no old record."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()[:12]

    @property
    def title(self) -> str:
        """For people to read."""
        words = [self.workload, *(f"{name} {_shown(value)}" for name, value in self.variant), self.method]
        words += [f"{_LETTERS.get(name, name)} {_shown(value)}" for name, value in self.settings if name != "frames"]
        words += [self.split] if self.split != SPLITS[0] else []
        return " ".join([*words, f"seed {self.seed}"])

    def share(self, step: int) -> float:
        """The learning rate's share of its largest at a step, counted from 0."""
        done, up = step / self.steps, int(self.get("warm_up", 0))
        if self.schedule in ("constant", "cosine") and step < up:
            return (step + 1) / (up + 1)
        if self.schedule == "cosine":
            floor = float(self.get("floor", 0.0))
            return floor + (1 - floor) * (1 + math.cos(math.pi * (step - up) / (self.steps - up))) / 2
        if self.schedule == "straight":
            return 1 - done
        if self.schedule == "stepped":
            return float(self.get("drop", 1.0)) ** int(done * self.get("drops", 1))
        if self.schedule == "linear":
            return min((step + 1) / max(1, WARM_UP * self.steps), (1 - done) / (1 - WARM_UP))
        return 1.0

    def measured(self) -> list[int]:
        """After which steps the network is measured."""
        return sorted({round(self.steps * number / self.points) for number in range(self.points + 1)})

    def as_json(self) -> dict[str, Any]:
        """All that is not a default."""
        found: dict[str, Any] = {"workload": self.workload, "method": self.method}
        for field in fields(self)[2:]:
            value = getattr(self, field.name)
            if value != field.default:
                found[field.name] = {k: _as_json(v) for k, v in value} if isinstance(value, tuple) else value
        return found

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Trial":
        """What `as_json` gave."""
        unknown = set(values) - {field.name for field in fields(cls)}
        if unknown:
            raise TrialError(f"a run has no field {', '.join(sorted(unknown))}")
        if missing := {"workload", "method"} - set(values):
            raise TrialError(f"a run needs {' and '.join(sorted(missing))}")
        known = dict(values)
        for name in ("settings", "variant"):
            if name in known:
                if not isinstance(known[name], dict):
                    raise TrialError(f"{name} must be names with values, got {known[name]!r}")
                known[name] = tuple((key, math.inf if value == "inf" else value) for key, value in known[name].items())
        return cls(**known)


def _changed(known: Settings, changes: Mapping[str, Value | None]) -> Settings:
    return tuple((name, value) for name, value in {**dict(known), **changes}.items() if value is not None)


_LETTERS = {"learning_rate": "η", "second_rate": "η₂", "damping": "λ", "output_damping": "λ_g"}


def parse(text: str) -> tuple[str, Value]:
    """A "name=value" of a command line: `damping=inf`, `layers=1,3`, `relative=true`."""
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not name or not value:
        raise TrialError(f"a setting is name=value, such as damping=0.1, got {text!r}")
    if value.lower() in ("true", "false"):
        return name, value.lower() == "true"
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            pass
    parts = [part.strip() for part in value.strip("()[]").split(",") if part.strip()]
    return name, tuple(map(int, parts)) if "," in value and all(map(str.isdigit, parts)) else value


def _plain(name: Any, value: Any) -> Value:
    if isinstance(value, list | tuple) and all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        return tuple(value)
    # What is a number of this kind is one however it was written: 1 and 1.0 are one run.
    if name in (*_POSITIVE, "weight_decay") and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str | int | float):
        return value
    raise TrialError(f"{name} must be a word, a number or whole numbers, got {value!r}")


def _as_json(value: Value) -> Any:
    return "inf" if value == math.inf else list(value) if isinstance(value, tuple) else value


def _shown(value: Value) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
