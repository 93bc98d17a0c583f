"""Experiments that are grids of dampings: from records to heat maps and a table of numbers."""

import csv
import io
import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Literal

from isaac_lab.experiments.folder import View
from isaac_lab.experiments.recipe import Outcome
from isaac_lab.experiments.words import setting
from isaac_lab.record import Record
from isaac_lab.records import write_whole
from isaac_lab.report import grids

__all__ = ["NAMES", "accuracies", "draw", "losses"]

NAMES = {"zeta": "ζ", "zeta_star": "ζ*", "gradient": "∇"}
READING = (
    "Numbers: log₁₀ of the loss{accuracy}. Brighter is better; frames mark the best cell of ζ and of ζ*; hatched: diverged. "
    "η: the learning rate of each sector."
)

#: Of numbers.csv.
COLUMNS = (
    "panel",
    "sector",
    "damping",
    "output_damping",
    "learning_rate",
    "seed",
    "status",
    "epochs",
    "train_loss",
    "test_loss",
    "test_accuracy",
)


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


def draw(view: View, *, title: str, accuracy: str = "", shared: bool = True, beside: bool = False) -> None:
    """Losses of all panels in a row, and accuracies below them (or beside them) where `accuracy` names their maps ("efgh")."""
    rows = [[_heat(outcome, "loss", outcome.panel.name) for outcome in view.outcomes]]
    if accuracy:
        letters = dict(zip("abcd", accuracy, strict=False))
        rows.append([_heat(outcome, "accuracy", letters[outcome.panel.name]) for outcome in view.outcomes])
    if beside or len(view.outcomes) == 1:
        rows, shared = [[heat for row in rows for heat in row]], False
    reading = READING.format(accuracy=", test accuracy in %" if accuracy else "")
    path = view.figures / "figure"
    grids.draw(rows, title=title, subtitle=f"{setting(view)}\n{reading}", path=path, shared=shared)
    _numbers(view)


def _heat(outcome: Outcome, quantity: Literal["loss", "accuracy"], letter: str) -> grids.Heat:
    dampings = tuple(sorted({cell.damping for cell in outcome.panel.cells if cell.damping != math.inf}))
    rates = "    ".join(f"{NAMES[name]} {_rate(rate)}" for name, rate in outcome.rates.items())
    values = losses(outcome) if quantity == "loss" else accuracies(outcome)
    return grids.Heat(letter, outcome.panel.title, f"η:   {rates}", dampings, values, quantity)


def _rate(rate: float | None) -> str:
    return "all diverged" if rate is None else f"{rate:g}"


def _numbers(view: View) -> None:
    """One line for each run: its cell and where it ended."""
    file = io.StringIO()
    table = csv.writer(file, lineterminator="\n")
    table.writerow(COLUMNS)
    for outcome in view.outcomes:
        for name, records in outcome.records.items():
            for record in records:
                trial = record.trial
                cell = [outcome.panel.name, name, trial.damping, trial.output_damping, trial.learning_rate, trial.seed]
                # The numbers of a run that diverged are those before it did.
                for last in record.points[-1:]:
                    end = [last["step"] * trial.points // trial.steps, *(last.get(name) for name in COLUMNS[-3:])]
                    table.writerow([*cell, record.status, *end])
    write_whole(view.figures / "numbers.csv", file.getvalue())
