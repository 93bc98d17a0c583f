"""Experiments that are grids of dampings: from records to heat maps and a table of numbers."""

import csv
import io
import math
from collections.abc import Callable, Sequence
from statistics import fmean

from isaac_lab.charts import heat
from isaac_lab.charts.figure import Figure, identifier
from isaac_lab.charts.heat import NAMES
from isaac_lab.record import Record
from isaac_lab.records import write_whole
from isaac_lab.studies.paper.folder import View
from isaac_lab.studies.paper.recipe import Outcome
from isaac_lab.studies.paper.words import setting

__all__ = ["NAMES", "accuracies", "cells", "figure", "losses", "numbers"]

READING = "Numbers: log₁₀ of the loss{accuracy}. Brighter is better; frames mark the best cell of ζ and of ζ*; ×: diverged."

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


def cells(outcome: Outcome) -> list[heat.Cell]:
    """The rows of a heat map."""
    loss, accuracy = losses(outcome), accuracies(outcome)
    found: list[heat.Cell] = []
    for inputs, outputs in loss:
        cell = {"a": inputs, "g": outputs, "loss": loss[inputs, outputs], "accuracy": accuracy[inputs, outputs]}
        found.append(cell | {"rate": outcome.rates[heat.group(cell)]})
    return found


def figure(view: View, *, title: str = "", accuracy: bool = False) -> Figure:
    """A map for each panel: losses in a row and, where `accuracy` says so, accuracies below them."""
    own = identifier("map", view.experiment.id, view.scale.name)
    charts = []
    for outcome in view.outcomes:
        rates = ", ".join(f"{NAMES[name]} {_rate(rate)}" for name, rate in outcome.rates.items())
        name = f"({outcome.panel.name}) {outcome.panel.title}\nlearning rates: {rates}"
        charts.append(heat.chart(f"{own}-{outcome.panel.name}", name, cells(outcome)))
    control = heat.control([cell for outcome in view.outcomes for cell in cells(outcome)])
    shown = [{"Colour": choice.label} for choice in control.choices[: 2 if accuracy else 1]]
    views = (tuple(shown),) if len(charts) == 1 else tuple((one,) for one in shown)
    reading = READING.format(accuracy=", or the test accuracy in %" if accuracy else "")
    return Figure(own, tuple(charts), title, f"{setting(view)}\n{reading}", (control,), views=views)


def _rate(rate: float | None) -> str:
    return "all diverged" if rate is None else f"{rate:g}"


def numbers(view: View) -> None:
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
    write_whole(view.directory / "numbers.csv", file.getvalue())
