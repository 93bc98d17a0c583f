"""Experiments that are curves of training: from records to lines over time, steps or epochs, and a table of numbers."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from isaac_lab.experiments.folder import View
from isaac_lab.experiments.recipe import Outcome
from isaac_lab.experiments.words import setting
from isaac_lab.record import Point, Record
from isaac_lab.records import write_whole
from isaac_lab.report import lines
from isaac_lab.trial import Trial

__all__ = ["Style", "clock_label", "draw", "numbers", "place", "plot"]

Quantity = Literal["train_loss", "test_loss", "test_accuracy"]
Axis = Literal["seconds", "step", "epoch"]

TITLES = {"train_loss": "Training loss", "test_loss": "Test loss", "test_accuracy": "Test accuracy"}

#: Of numbers.csv.
COLUMNS = (
    "panel",
    "curve",
    "learning_rate",
    "seed",
    "status",
    "epoch",
    "step",
    "cpu_seconds",
    "train_loss",
    "test_loss",
    "test_accuracy",
)


@dataclass(frozen=True)
class Style:
    """How a group looks in a figure: see `lines.Curve`."""

    label: str
    hue: str
    style: str = "-"
    width: float = 1.9


def draw(view: View, rows: Sequence[Sequence[lines.Plot]], *, title: str, reading: str = "") -> None:
    """Write the figure with these plots, and the numbers beside it."""
    note = f"{reading} " if reading else ""
    note += "η is tuned for each curve." + (" Bands: from the lowest to the highest seed." if _seeds(view) > 1 else "")
    lines.draw(rows, title=title, subtitle=f"{setting(view)}\n{note}", path=view.figures / "figure")
    numbers(view)


def plot(view: View, styles: Mapping[str, Style], quantity: Quantity, axis: Axis) -> lines.Plot:
    """All groups that have a style, in the order of the styles; without seconds per step there are no curves over time."""
    curves = []
    for name, style in styles.items():
        outcome = next((outcome for outcome in view.outcomes if name in outcome.records), None)
        if outcome is None:
            continue
        per_step = view.seconds_per_step(outcome.panel.name).get(name, math.nan) if axis == "seconds" else 1.0
        curves.append(_curve(outcome, name, style, quantity, axis, per_step))
    labels = {"seconds": clock_label(view), "step": "Steps", "epoch": "Epochs"}
    accuracy = quantity == "test_accuracy"
    return lines.Plot(TITLES[quantity], labels[axis], tuple(curves), accuracy=accuracy, seconds=axis == "seconds")


def clock_label(view: View) -> str:
    """What the seconds are."""
    methods = [method for record in view.steps.values() for method in record["methods"]]
    made = {method.get("implementation", "K-FAC, explicit factors" if "kfac" in method["name"] else "") for method in methods}
    kfac = {name for name in made if name.startswith("K-FAC")}
    by = f"; {' and '.join(sorted(kfac))}" if kfac else ""
    return f"Seconds on one CPU thread\n(steps × time of a step, measured alone{by})"


def _curve(outcome: Outcome, name: str, style: Style, quantity: Quantity, axis: Axis, per_step: float) -> lines.Curve:
    records = outcome.records[name]
    # The untrained network is at 0, where a logarithmic axis has no place.
    skip = 1 if axis == "seconds" else 0
    rows = tuple(tuple(_value(point, quantity) for point in _finite(record)[skip:]) for record in records)
    longest = max((_finite(record)[skip:] for record in records), key=len, default=[])
    x = tuple(place(point, axis, records[0].trial, per_step) for point in longest)
    diverged = not records or any(record.status == "diverged" for record in records)
    return lines.Curve(style.label, style.hue, style.style, x, rows, diverged, style.width)


def place(point: Point, axis: str, trial: Trial, per_step: float = 1.0) -> float:
    """Where a measurement stands on an axis."""
    if axis == "epoch":
        return float(point["step"] * trial.points / trial.steps)
    return float(point["step"] * per_step) if axis == "seconds" else float(point["step"])


def _finite(record: Record) -> list[Point]:
    return [point for point in record.points if point["train_loss"] is not None]


def _value(point: Point, quantity: Quantity) -> float:
    value = point.get(quantity)
    return math.nan if value is None else float(value)


def _seeds(view: View) -> int:
    return len({record.trial.seed for outcome in view.outcomes for record in outcome.all()})


def numbers(view: View) -> None:
    """One line for each point of each run."""
    file = io.StringIO()
    table = csv.writer(file, lineterminator="\n")
    table.writerow(COLUMNS)
    for outcome in view.outcomes:
        seconds = view.seconds_per_step(outcome.panel.name)
        for name, records in outcome.records.items():
            for record in records:
                run = [outcome.panel.name, name, record.trial.learning_rate, record.trial.seed, record.status]
                for point in record.points:
                    spent = f"{point['step'] * seconds[name]:.6g}" if name in seconds else ""
                    values = [point.get(name) for name in COLUMNS[-3:]]
                    table.writerow([*run, round(place(point, "epoch", record.trial)), point["step"], spent, *values])
    write_whole(view.figures / "numbers.csv", file.getvalue())
