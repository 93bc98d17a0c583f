"""What is raced on each workload: its budget, its schedule and weight decay, and the ranges that are searched."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["COURSES", "SCALES", "Course", "Range", "Scale"]


@dataclass(frozen=True)
class Range:
    """Positive numbers from one to another; all of them are searched evenly in their logarithm."""

    low: float
    high: float

    def at(self, place: float) -> float:
        """The number at this share of the way, with three digits."""
        return float(f"{self.low * (self.high / self.low) ** place:.3g}")

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}"


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
        longest: Seconds that a run may take. A method that would take longer is not raced, and the table says so.
    """

    name: str
    small: bool
    trials: int
    seeds: int
    points: int
    rounds: int
    longest: float


SCALES: Mapping[str, Scale] = MappingProxyType(
    {
        "smoke": Scale("smoke", small=True, trials=3, seeds=2, points=20, rounds=3, longest=60),
        "quick": Scale("quick", small=False, trials=6, seeds=3, points=40, rounds=3, longest=300),
        "full": Scale("full", small=False, trials=8, seeds=5, points=40, rounds=7, longest=3600),
    }
)


@dataclass(frozen=True)
class Course:
    """The rules on one workload.

    Args:
        workload: Its name in the registry.
        lengths: Of a run, by scale.
        unit: Of `lengths`: "steps" or "epochs".
        rates: Ranges of learning rates, by optimizer; "isaac-…" where ISAAC wants another than the optimizer alone.
        second_rates: Range of AdamW's learning rate beside Muon.
        dampings: Range of λ of ISAAC, the printed formula and K-FAC.
        conditioning: How ISAAC conditions with one batch: "zeta_star" or "reduce".
        relative: Whether ISAAC's λ is relative to the size of the layers' inputs.
        running: Whether ISAAC also enters with a running average of the inputs' second moment.
        schedule: Of the learning rate.
        decay: Weight decay of optimizers that add it to the gradient.
        decoupled: Weight decay of those that do not: AdamW, Muon and SOAP.
        most_points: How often a run is measured at most; measuring some workloads takes longer than training them.
    """

    workload: str
    lengths: Mapping[str, int]
    rates: Mapping[str, Range]
    second_rates: Range
    unit: str = "steps"
    dampings: Range = Range(0.01, 10)
    conditioning: str = "zeta_star"
    relative: bool = False
    running: bool = False
    schedule: str = "constant"
    decay: float = 0.0
    decoupled: float = 0.0
    most_points: int = 1_000


#: SINGD's own damping, everywhere; its authors' default is the lower end, and more did better.
SINGD_DAMPINGS = Range(1e-3, 1)

# Every range of a learning rate spans two powers of ten. They lie around what is usual for the optimizer and, for the paper's
# networks, around what the grids under results/reproduce chose.
_CLASSIFIER = {
    "sgd": Range(0.03, 3),
    "momentum": Range(0.003, 0.3),
    "adamw": Range(1e-4, 1e-2),
    "muon": Range(5e-4, 5e-2),
    "soap": Range(3e-4, 3e-2),
    "shampoo": Range(0.003, 0.3),
    "singd": Range(0.003, 0.3),
    "kfac": Range(0.1, 10),
    "isaac-sgd": Range(0.1, 10),
    "isaac-momentum": Range(0.01, 1),
}
# A squared error that is a mean over pixels has small gradients.
_AUTOENCODER = _CLASSIFIER | {
    "sgd": Range(1, 100),
    "momentum": Range(0.1, 10),
    "shampoo": Range(0.1, 10),
    "singd": Range(0.1, 10),
    "kfac": Range(3, 300),
    "isaac-sgd": Range(3, 300),
    "isaac-momentum": Range(0.3, 30),
}
_CONVOLUTIONS = _CLASSIFIER | {
    "sgd": Range(0.01, 1),
    "muon": Range(2e-3, 0.2),
    "isaac-sgd": Range(0.03, 3),
    "isaac-momentum": Range(0.01, 1),
}
_LANGUAGE = {
    "sgd": Range(0.01, 1),
    "momentum": Range(0.01, 1),
    "adamw": Range(3e-4, 3e-2),
    "muon": Range(2e-3, 0.2),
    "soap": Range(3e-4, 3e-2),
    "shampoo": Range(0.01, 1),
    "singd": Range(0.003, 0.3),
    "kfac": Range(0.3, 30),
    "isaac-sgd": Range(0.3, 30),
    "isaac-momentum": Range(0.03, 3),
}
_FINE_TUNING = {
    "sgd": Range(1e-3, 0.1),
    "momentum": Range(3e-4, 3e-2),
    "adamw": Range(5e-6, 5e-4),
    "muon": Range(5e-5, 5e-3),
    "soap": Range(5e-6, 5e-4),
    "shampoo": Range(3e-4, 3e-2),
    "singd": Range(3e-4, 3e-2),
    "kfac": Range(3e-3, 0.3),
    "isaac-sgd": Range(3e-3, 0.3),
    "isaac-momentum": Range(1e-3, 0.1),
}

_PAPER = {"smoke": 100, "quick": 2_000, "full": 5_000}

#: In the order of the tables. A workload that is not registered is left out.
COURSES: Mapping[str, Course] = MappingProxyType(
    {
        course.workload: course
        for course in (
            Course("mnist-mlp", _PAPER, _CLASSIFIER, Range(1e-4, 1e-2)),
            Course("mnist-autoencoder", _PAPER, _AUTOENCODER, Range(1e-4, 1e-2)),
            Course("fashion-autoencoder", _PAPER, _AUTOENCODER, Range(1e-4, 1e-2)),
            Course(
                "cifar-resnet18",
                {"smoke": 3, "quick": 1, "full": 15},
                _CONVOLUTIONS,
                Range(1e-4, 1e-2),
                unit="epochs",
                # All patches of all images would be a hundred thousand rows: see docs/layers.md.
                conditioning="reduce",
                schedule="cosine",
                decay=5e-4,
                decoupled=0.01,
                most_points=15,
            ),
            Course(
                "char-gpt",
                {"smoke": 60, "quick": 500, "full": 5_000},
                _LANGUAGE,
                Range(3e-4, 3e-2),
                relative=True,
                running=True,
                schedule="cosine",
                decoupled=0.1,
            ),
            Course(
                "cola",
                {"smoke": 50, "quick": 500, "full": 3_000},
                _FINE_TUNING,
                Range(5e-6, 5e-4),
                relative=True,
                running=True,
                schedule="linear",
                decoupled=0.01,
                most_points=20,
            ),
        )
    }
)
