"""Where the cells of a grid of dampings ended."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean

from isaac_lab.record import Record
from isaac_lab.studies.paper.recipe import Outcome


def losses(outcome: Outcome) -> dict[tuple[float, float], float]:
    """Final training loss by (λ_a, λ_g), the geometric mean over seeds; NaN where a seed diverged."""
    return _by_cell(outcome, lambda record: record.final("train_loss"), geometric=True)


def accuracies(outcome: Outcome) -> dict[tuple[float, float], float]:
    """Final test accuracy by (λ_a, λ_g), the mean over seeds; NaN where a seed diverged."""
    return _by_cell(outcome, lambda record: record.final("test_accuracy"))


def _by_cell(
    outcome: Outcome, value: Callable[[Record], float], *, geometric: bool = False
) -> dict[tuple[float, float], float]:
    # Where every learning rate of a sector diverged, no cell was run.
    found: dict[tuple[float, float], list[float]] = {
        (cell.damping, cell.output_damping): [] for group in outcome.panel.groups for cell in group.cells
    }
    for record in outcome.all():
        last = math.nan if record.status != "finished" else value(record)
        found[record.trial.damping, record.trial.output_damping].append(last)
    return {cell: _mean(values, geometric) for cell, values in found.items()}


def _mean(values: Sequence[float], geometric: bool) -> float:
    if not values or not all(math.isfinite(value) for value in values):
        return math.nan
    if geometric:
        return math.exp(fmean(math.log(max(value, 1e-300)) for value in values))
    return fmean(values)
