"""Experiments that are curves of training: from records to lines over time, steps or epochs, and a table of numbers."""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from isaac_lab.experiments.folder import View
from isaac_lab.experiments.recipe import Outcome
from isaac_lab.experiments.words import setting
from isaac_lab.report import lines
from isaac_lab.store import Point, Record

__all__ = ["Style", "clock_label", "draw", "numbers", "plot"]

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
    lines.draw(rows, title=title, subtitle=f"{setting(view)}\n{note}", path=view.directory / "figure")
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
    kfac = {method["implementation"] for method in methods if method["implementation"].startswith("K-FAC")}
    by = f"; {' and '.join(sorted(kfac))}" if kfac else ""
    return f"Seconds on one CPU thread\n(steps × time of a step, measured alone{by})"


def _curve(outcome: Outcome, name: str, style: Style, quantity: Quantity, axis: Axis, per_step: float) -> lines.Curve:
    records = outcome.records[name]
    # The untrained network is at 0, where a logarithmic axis has no place.
    skip = 1 if axis == "seconds" else 0
    rows = tuple(tuple(_value(point, quantity) for point in _finite(record)[skip:]) for record in records)
    longest = max((_finite(record)[skip:] for record in records), key=len, default=[])
    x = tuple(point.step * per_step if axis == "seconds" else float(getattr(point, axis)) for point in longest)
    diverged = not records or any(record.status == "diverged" for record in records)
    return lines.Curve(style.label, style.hue, style.style, x, rows, diverged, style.width)


def _finite(record: Record) -> list[Point]:
    return [point for point in record.points if math.isfinite(point.train_loss)]


def _value(point: Point, quantity: Quantity) -> float:
    value = getattr(point, quantity)
    return math.nan if value is None else float(value)


def _seeds(view: View) -> int:
    return len({record.config.seed for outcome in view.outcomes for record in outcome.all()})


def numbers(view: View) -> None:
    """One line for each point of each run."""
    with (view.directory / "numbers.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        for outcome in view.outcomes:
            seconds = view.seconds_per_step(outcome.panel.name)
            for name, records in outcome.records.items():
                for record in records:
                    run = [outcome.panel.name, name, record.config.learning_rate, record.config.seed, record.status]
                    for point in record.points:
                        spent = f"{point.step * seconds[name]:.6g}" if name in seconds else ""
                        values = [point.train_loss, point.test_loss, point.test_accuracy]
                        table.writerow([*run, point.epoch, point.step, spent, *values])
