"""What one trial is: a workload, a method with its numbers, a seed and a budget, in one frozen object that a record repeats."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

__all__ = ["SCHEDULES", "Trial"]

#: Of the learning rate: constant; half a cosine down to zero; up over the first tenth, then straight down to zero.
SCHEDULES = ("constant", "cosine", "linear")
WARM_UP = 0.1


@dataclass(frozen=True)
class Trial:
    """One training run.

    Args:
        workload: What is trained: a name that `workloads.make` knows.
        optimizer: A key of `methods.OPTIMIZERS`.
        conditioning: A key of `methods.CONDITIONINGS`: how ISAAC conditions the gradient, if it does.
        learning_rate: The largest of the schedule.
        damping: λ of ISAAC, K-FAC or SINGD; 0 where there is none.
        relative: Whether ISAAC's λ is relative to the mean eigenvalue.
        second_rate: The learning rate of AdamW for what Muon does not train.
        weight_decay: Decoupled where the optimizer is AdamW, else of SGD.
        schedule: One of `SCHEDULES`.
        steps: Training steps.
        points: How often the network is measured, evenly over the steps; besides, it is measured untrained.
        seed: Of weights, order and everything random.
        small: The small form of the workload, for a smoke test.
        model: Name of the pre-trained network, where the workload takes any; no path.
    """

    workload: str
    optimizer: str
    conditioning: str = "none"
    learning_rate: float = 0.1
    damping: float = 0.0
    relative: bool = False
    second_rate: float = 0.001
    weight_decay: float = 0.0
    schedule: str = "constant"
    steps: int = 1000
    points: int = 20
    seed: int = 0
    small: bool = False
    model: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be > 0 and finite, got {self.learning_rate}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {self.schedule!r}")
        for name, lowest in {"damping": 0, "weight_decay": 0, "seed": 0, "steps": 1, "points": 1}.items():
            if not getattr(self, name) >= lowest:
                raise ValueError(f"{name} must be >= {lowest}, got {getattr(self, name)}")

    @property
    def key(self) -> str:
        """The name of the run: a hash of all its fields."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]

    @property
    def title(self) -> str:
        """For people to read."""
        method = self.optimizer if self.conditioning == "none" else f"{self.optimizer} + {self.conditioning}"
        damping = f" λ {self.damping:g}" if self.damping else ""
        return f"{self.workload} {method} η {self.learning_rate:g}{damping} seed {self.seed}"

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "Trial":
        """What `asdict` gave."""
        unknown = set(values) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"a trial has no field {', '.join(sorted(unknown))}")
        return cls(**values)

    def rate(self, step: int) -> float:
        """The learning rate's share of its largest at a step, counted from 0."""
        done = step / self.steps
        if self.schedule == "cosine":
            return (1 + math.cos(math.pi * done)) / 2
        if self.schedule == "linear":
            return min((step + 1) / max(1, WARM_UP * self.steps), (1 - done) / (1 - WARM_UP))
        return 1.0

    def measured(self) -> list[int]:
        """After which steps the network is measured."""
        return sorted({round(self.steps * number / self.points) for number in range(self.points + 1)})
