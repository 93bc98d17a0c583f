"""Where the cells of a grid of dampings ended."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean

from isaac_lab.studies.paper.recipe import Outcome


def losses(outcome: Outcome) -> dict[tuple[float, float], float]:
    """Final training loss by (λ_a, λ_g), the geometric mean over seeds; NaN where a seed diverged."""
    return _by_cell(outcome, "train_loss", lambda ends: math.exp(fmean(math.log(max(end, 1e-300)) for end in ends)))


def accuracies(outcome: Outcome) -> dict[tuple[float, float], float]:
    """Final test accuracy by (λ_a, λ_g), the mean over seeds; NaN where a seed diverged."""
    return _by_cell(outcome, "test_accuracy", fmean)


def _by_cell(outcome: Outcome, quantity: str, mean: Callable[[Sequence[float]], float]) -> dict[tuple[float, float], float]:
    # Where every learning rate of a sector diverged, no cell was run.
    found: dict[tuple[float, float], list[float]] = {(own.damping, own.output_damping): [] for own in outcome.panel.cells}
    for record in outcome.all():
        found[record.trial.damping, record.trial.output_damping].append(record.final(quantity))
    return {cell: mean(ends) if ends and all(map(math.isfinite, ends)) else math.nan for cell, ends in found.items()}
