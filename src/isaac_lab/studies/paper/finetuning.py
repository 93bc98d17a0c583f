"""What Table 1 is made of: tasks, methods, the settings that each may try, and what the paper has."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean
from types import MappingProxyType

from isaac_lab.record import Record
from isaac_lab.studies.paper.recipe import Method
from isaac_lab.study import Arm, Search
from isaac_lab.trial import Trial

#: Of the grid; those that the table shows follow it.
TUNING_SEED = 0
#: The rows of the table; with "reduce" the mean of a sentence's tokens is a row.
METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "gradient": Method("∇", plain=True),
        "expand": Method("ζ*"),
        "reduce": Method("ζ* reduce", (("sharing", "reduce"),)),
    }
)


@dataclass(frozen=True)
class Task:
    """What is trained how.

    Args:
        name: Of the workload.
        title: For people.
        optimizer: The one that the paper uses.
        metrics: Names in the records, with headings.
        methods: Those that are tried.
        shown: Whether it is in the table, over seeds; otherwise its grid is all there is, for a claim.
    """

    name: str
    title: str
    optimizer: str
    metrics: Mapping[str, str]
    methods: tuple[str, ...] = tuple(METHODS)
    shown: bool = True

    @property
    def columns(self) -> list[str]:
        """The headings of the table."""
        return [f"{self.title} ({heading})" for heading in self.metrics.values()]


_SIMILARITY = {"pearson": "Pearson", "spearman": "Spearman"}
TASKS = (
    Task("cola", "CoLA", "adam", {"matthews": "Matthews"}),
    Task("mrpc", "MRPC", "adam", {"accuracy": "accuracy", "f1": "F1"}),
    Task("stsb", "STS-B", "momentum", _SIMILARITY),
    # The paper says that Adam did not work well there.
    Task("stsb", "STS-B with Adam", "adam", _SIMILARITY, methods=("expand",), shown=False),
)
COLUMNS = [column for task in TASKS if task.shown for column in task.columns]
#: What is trained together; where time ends early, STS-B is what is missing.
STAGES = (TASKS[:2], TASKS[2:])


@dataclass(frozen=True)
class Plan:
    """How much is run at a scale.

    Args:
        epochs: Of a run.
        seeds: Runs of each cell of the table.
        rates: By optimizer, the learning rates of the gradient.
        conditioned: By optimizer, those of ζ*, from the middle of the gradient's. A first grid, of up to ten times these rates,
            had its best at its lower end.
        dampings: λ of ζ*; each with each of its rates. `isaac_newton.suggest_damping` says 0.2 to 2 for all-MiniLM-L6-v2.
        rounds: How often the methods take turns when their steps are timed.
    """

    epochs: int
    seeds: int
    rates: Mapping[str, tuple[float, ...]]
    conditioned: Mapping[str, tuple[float, ...]]
    dampings: tuple[float, ...]
    rounds: int = 10


PLANS: Mapping[str, Plan] = MappingProxyType(
    {
        "smoke": Plan(
            2, 2, {"adam": (3e-3, 1e-2), "momentum": (1e-2, 1e-1)}, {"adam": (1e-2,), "momentum": (1e-1,)}, (0.1, 1.0), rounds=3
        ),
        "quick": Plan(
            3,
            5,
            {"adam": (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4), "momentum": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)},
            {"adam": (2e-5, 5e-5, 1e-4), "momentum": (3e-4, 1e-3, 3e-3)},
            (0.3, 3.0),
        ),
        "paper": Plan(
            3,
            10,
            {
                "adam": (5e-6, 1e-5, 2e-5, 3e-5, 5e-5, 7e-5, 1e-4, 1.5e-4, 2e-4, 3e-4, 5e-4, 1e-3),
                "momentum": (3e-5, 1e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3, 3e-3, 5e-3, 1e-2, 3e-2, 1e-1),
            },
            {"adam": (2e-5, 5e-5, 1e-4, 2e-4), "momentum": (3e-4, 1e-3, 3e-3, 1e-2)},
            (0.1, 1.0, 10.0),
        ),
    }
)

#: The paper's Table 1, in percent: BERT-Base on CoLA and MRPC, BERT-Mini on CoLA and STS-B, 10 runs.
PAPER: Mapping[tuple[str, str], tuple[tuple[float, float] | None, ...]] = MappingProxyType(
    {
        ("∇", "BERT-Base"): ((54.20, 7.56), (82.52, 1.22), (87.88, 0.74), None, None),
        ("ζ*", "BERT-Base"): ((57.62, 1.59), (83.28, 0.89), (88.28, 0.70), None, None),
        ("∇", "BERT-Mini"): ((21.08, 2.88), None, None, (76.98, 1.10), (76.88, 0.79)),
        ("ζ*", "BERT-Mini"): ((24.67, 2.62), None, None, (81.09, 1.58), (80.82, 1.57)),
    }
)
PAPER_RUNS = 10


@dataclass(frozen=True)
class Run:
    """What about.json says of an experiment.

    Args:
        model: Name of the encoder.
        weights: Checksum of its weights.
        seeds: Runs of each cell.
        steps: Of a training run, by workload.
        scale: Name of the scale.
    """

    model: str
    weights: str
    seeds: int
    steps: Mapping[str, int]
    scale: str

    @property
    def plan(self) -> Plan:
        """What is run at this scale."""
        return PLANS[self.scale]

    def trial(self, task: Task, method: str, rate: float, damping: float, seed: int) -> Trial:
        """A full training run."""
        base = Trial(task.name, task.optimizer, schedule="linear", steps=self.steps[task.name], points=self.plan.epochs)
        base = replace(base, seed=seed, small=self.scale == "smoke").varied(model=self.model)
        return METHODS[method].on(base, damping, learning_rate=rate)


def grid(run: Run, task: Task, method: str) -> list[Trial]:
    """The settings that a method may choose from; equally many for each, where no earlier grid was run."""
    plan = run.plan
    if method == "gradient":
        return [run.trial(task, method, rate, 0.0, TUNING_SEED) for rate in plan.rates[task.optimizer]]
    pairs = product(plan.conditioned[task.optimizer], plan.dampings)
    return [run.trial(task, method, rate, damping, TUNING_SEED) for rate, damping in pairs]


def arms(run: Run) -> dict[tuple[str, str], Arm]:
    """By title of the task and method: a grid at the tuning seed, and what was best there at other seeds."""
    return {(task.title, method): _arm(run, task, method) for task in TASKS for method in task.methods}


def _arm(run: Run, task: Task, method: str) -> Arm:
    seeds = range(TUNING_SEED + 1, TUNING_SEED + 1 + run.seeds) if task.shown else range(0)

    def finals(best: Trial | None) -> list[Trial]:
        if best is None:
            return []
        return [run.trial(task, method, best.learning_rate, float(best.get("damping", 0.0)), seed) for seed in seeds]

    def value(record: Record) -> float:
        return -score(record, task) if ended(record, task) else math.inf

    return Arm(f"{task.title}/{method}", finals, (Search(lambda _: grid(run, task, method), value),))


def ended(record: Record, task: Task) -> bool:
    """Whether a run went to its end, with scores that are numbers."""
    return all(math.isfinite(record.final(metric)) for metric in task.metrics)


def score(record: Record, task: Task) -> float:
    """The mean of a task's scores at the end of a run."""
    return fmean(record.final(metric) for metric in task.metrics)
