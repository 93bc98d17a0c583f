"""What Figure 6 is made of: settings, methods, how much is trained at a scale, and what was chosen."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType

from isaac_lab.data.catalogue import SETS
from isaac_lab.record import Record
from isaac_lab.studies.paper.recipe import Method
from isaac_lab.study import Arm, Search, lowest
from isaac_lab.trial import Trial
from isaac_lab.workloads import resnet

#: Of a network that says nothing: what a run that diverged counts as.
CHANCE = 0.1
#: Learning rates that are run whole at the first seed, over that of the best short trial.
LARGER = (1, 3, 10)


#: By conditioning; the paper has the first two.
METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "none": Method("∇", plain=True),
        "last": Method("ζ*, last layer", (("layers", "last"),)),
        "reduce": Method("ζ*, all layers, reduce", (("sharing", "reduce"),)),
        "max_rows": Method("ζ*, all layers, 256 rows", (("max_rows", 256),)),
    }
)


@dataclass(frozen=True)
class Setting:
    """A panel.

    Args:
        title: For people.
        optimizer: Name of a method.
        weight_decay: Of all parameters.
        tuned_as: The panel whose short trials are this one's too.
    """

    title: str
    optimizer: str
    weight_decay: float
    tuned_as: str


#: The paper's, in its order. Weight decay does nothing yet in a short trial.
SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {
        "a": Setting("momentum and weight decay", "momentum", 5e-4, "b"),
        "b": Setting("momentum only", "momentum", 0.0, "b"),
        "c": Setting("plain SGD", "sgd", 0.0, "c"),
    }
)


@dataclass(frozen=True)
class Budget:
    """How much is trained at a scale.

    Args:
        epochs: Of a run; the cosine schedule goes over all of them.
        trial_epochs: Of a short trial, with a schedule of its own.
        steps: Of an epoch.
        seeds: Runs of each method in each setting.
        conditionings: The methods that are trained; the steps of all are timed.
        rates: Learning rates of ζ* by optimizer, each tried with each of `dampings`.
        plain_rates: Those of ∇: as many as ζ* has pairs, its rates among them.
        dampings: λ.
        rounds: How often methods take turns when their steps are timed.
        small: The small form of the workload.
    """

    epochs: int
    trial_epochs: int
    steps: int
    seeds: int
    conditionings: tuple[str, ...]
    rates: Mapping[str, tuple[float, ...]]
    plain_rates: Mapping[str, tuple[float, ...]]
    dampings: tuple[float, ...] = (1.0, 0.1)
    rounds: int = 21
    small: bool = False

    def candidates(self, setting: str, conditioning: str) -> tuple[Trial, ...]:
        """The short trials of a method in the setting whose short trials decide, the largest learning rates first."""
        own, method = SETTINGS[SETTINGS[setting].tuned_as], METHODS[conditioning]
        # What a trial is like on the way decides nothing.
        base = replace(self._trial(own, self.trial_epochs), points=1)
        rates = self.plain_rates if method.plain else self.rates
        pairs = product(rates[own.optimizer], (None,) if method.plain else self.dampings)
        return tuple(method.on(base, damping, learning_rate=rate) for rate, damping in pairs)

    def compared(self, setting: str, first: Trial) -> tuple[Trial, ...]:
        """The first run with the rate and the damping of the best short trial, and with larger rates."""
        rates = [float(f"{factor * first.learning_rate:.3g}") for factor in LARGER]
        return tuple(self.runs(setting, first.having(learning_rate=rate), 1)[0] for rate in rates)

    def runs(self, setting: str, chosen: Trial, seeds: int) -> tuple[Trial, ...]:
        """What the figure shows of a method: the rate and the damping of the trial that was chosen, from other seeds."""
        base = self._trial(SETTINGS[setting], self.epochs)
        own = METHODS[conditioning_of(chosen)].on(base, chosen.get("damping"), learning_rate=chosen.learning_rate)
        return tuple(replace(own, seed=number) for number in range(1, seeds + 1))

    def _trial(self, setting: Setting, epochs: int) -> Trial:
        base = Trial(
            resnet.NAME, setting.optimizer, schedule="cosine", steps=epochs * self.steps, points=epochs, small=self.small
        )
        return base.having(weight_decay=setting.weight_decay or None)


_RATES = MappingProxyType({"momentum": (0.3, 0.1, 0.03), "sgd": (1.0, 0.3, 0.1)})
_PLAIN_RATES = MappingProxyType({"momentum": (0.3, 0.2, 0.1, 0.05, 0.03, 0.01), "sgd": (1.0, 0.5, 0.3, 0.1, 0.05, 0.03)})
_CIFAR_STEPS = SETS["cifar-10"].examples[0] // resnet.ResNet.batch

#: "max_rows" draws its rows on the host, so that its steps are no CUDA graph and take many times as long as the others:
#: at "quick" it is timed, not trained.
BUDGETS: Mapping[str, Budget] = MappingProxyType(
    {
        "smoke": Budget(
            2,
            1,
            resnet.SMALL_TRAIN // resnet.SMALL_BATCH,
            2,
            tuple(METHODS),
            {"momentum": (0.1,), "sgd": (0.3,)},
            {"momentum": (0.1, 0.03), "sgd": (0.3, 0.1)},
            rounds=3,
            small=True,
        ),
        "quick": Budget(30, 2, _CIFAR_STEPS, 3, tuple(METHODS)[:3], _RATES, _PLAIN_RATES),
        "paper": Budget(200, 5, _CIFAR_STEPS, 5, tuple(METHODS), _RATES, _PLAIN_RATES),
    }
)


def conditioning_of(trial: Trial) -> str:
    """A key of `METHODS`."""
    own = tuple((name, value) for name, value in trial.settings if name in ("layers", "max_rows", "sharing"))
    return next(name for name, method in METHODS.items() if method.settings == own)


@dataclass(frozen=True)
class Cell:
    """A method in a setting.

    Args:
        tried: By short trial, the training loss at its end; infinite where it diverged. Those that have been run.
        compared: By first run with one of several rates, the share of the test images that it gets wrong, likewise.
        chosen: The trial whose rate and damping the runs have; None before all short ones have been run, or where all diverged.
        records: Of the runs that have ended.
    """

    tried: Mapping[Trial, float]
    compared: Mapping[Trial, float]
    chosen: Trial | None
    records: tuple[Record, ...]

    def accuracies(self) -> list[list[float]]:
        """Test accuracy after each epoch, a row for each run; that of chance from where one diverged."""
        rows = []
        for record in self.records:
            # The last point of a run that diverged is what ended it.
            points = record.points if record.finished else record.points[:-1]
            known = {point["step"]: point["test_accuracy"] for point in points}
            rows.append([known.get(step, CHANCE) for step in record.trial.measured()[1:]])
        return rows

    @property
    def diverged(self) -> int:
        """How many runs did."""
        return sum(not record.finished for record in self.records)


def arms(budget: Budget, seeds: int) -> dict[tuple[str, str], Arm]:
    """By setting and conditioning: short trials, then the first seed with several rates, then all seeds."""

    def arm(setting: str, name: str) -> Arm:
        return Arm(
            f"{setting}/{name}",
            lambda best: () if best is None else budget.runs(setting, best, seeds),
            (
                Search(lambda _: budget.candidates(setting, name), lowest("train_loss")),
                Search(lambda best: () if best is None else budget.compared(setting, best), _error),
            ),
        )

    return {(setting, name): arm(setting, name) for setting in SETTINGS for name in METHODS}


def _error(record: Record) -> float:
    """The share of the test images that a run gets wrong at its end."""
    accuracy = record.final("test_accuracy")
    return math.inf if math.isinf(accuracy) else 1 - accuracy
