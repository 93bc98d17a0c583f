"""Experiments that are curves of training: from records to lines over time, steps or epochs, and a table of numbers."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from isaac_lab.charts import lines
from isaac_lab.charts.figure import Figure, Look, Method, identifier
from isaac_lab.charts.lines import Axis, Line
from isaac_lab.record import Point, Record
from isaac_lab.records import write_whole
from isaac_lab.studies.paper.folder import View
from isaac_lab.studies.paper.recipe import Outcome
from isaac_lab.studies.paper.words import setting
from isaac_lab.trial import Trial
from isaac_lab.words import number

__all__ = ["QUANTITIES", "SECONDS_LOG", "TITLES", "Style", "clock_label", "epoch", "figure", "numbers", "over_seeds"]

Quantity = Literal["train_loss", "test_loss", "test_accuracy"]

QUANTITIES: tuple[Quantity, ...] = ("train_loss", "test_loss", "test_accuracy")
SECONDS_LOG = "Seconds (log)"
DASHES = {"-": (), "--": (7, 4), ":": (2, 3)}
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
    """How a group looks in a figure: its name, a key of `HUES`, one of `DASHES`, and a width."""

    label: str
    hue: str
    style: str = "-"
    width: float = 2


def figure(
    view: View,
    styles: Mapping[str, Style],
    quantities: Sequence[Quantity],
    *,
    title: str = "",
    across: tuple[str, str] = (SECONDS_LOG, "Steps"),
    shown: int = 1,
    reading: str = "",
) -> Figure:
    """All groups that have a style, in their order; the picture has a row for each of the first `shown` quantities."""
    drawn: list[Line] = []
    methods: list[Method] = []
    for name, style in styles.items():
        outcome = next((outcome for outcome in view.outcomes if name in outcome.records), None)
        if outcome is None:
            continue
        methods.append(Method(style.label, Look(style.hue, DASHES[style.style], style.width), ours="ζ*" in style.label))
        drawn += _lines(view, outcome, name, style.label)
    horizontal = [Axis("step", "Steps", ",d"), Axis("epoch", "Epochs", ",d")]
    if measured := any(value is not None for line in drawn for value in line.columns["seconds"]):
        label = clock_label(view)
        horizontal += [Axis("seconds", label, ",.3~r", label="Seconds")]
        horizontal += [Axis("seconds", label, label=SECONDS_LOG, logarithmic=True)]
    vertical = [Axis(quantity, TITLES[quantity], _format(quantity), _domain(quantity, drawn)) for quantity in quantities]
    log = quantities[0] != "test_accuracy"
    controls = [lines.quantities(vertical), lines.scales(logarithmic_first=log), lines.axes(horizontal)]
    controls += [lines.RUNS] if any(not line.over_seeds for line in drawn) else []
    own = identifier("curve", view.experiment.id)
    alt = f"Curves of {len(methods)} methods: {view.experiment.shows}. {_lowest(drawn)} The last values are in the table below."
    chart = lines.chart(own, "", alt, drawn, methods, [*horizontal[: 3 if measured else 2], *vertical])
    note = f"{reading} " if reading else ""
    note += "η is tuned for each curve." + (" Bands: from the lowest to the highest seed." if _seeds(view) > 1 else "")
    rows = [
        tuple({"Quantity": axis.title, "Horizontal": x} for x in across if measured or x != SECONDS_LOG)
        for axis in vertical[:shown]
    ]
    subtitle = f"{setting(view)}\n{note}"
    return Figure(f"figure-{own}", (chart,), title, subtitle, tuple(controls), tuple(methods), tuple(rows))


def _lines(view: View, outcome: Outcome, name: str, label: str) -> list[Line]:
    """The mean over seeds and, where there are several, each of them."""
    records = outcome.records[name]
    runs = [_columns(view, outcome, name, record) for record in records]
    over = lines.mean(label, runs, "epoch", QUANTITIES)
    diverged = any(record.status == "diverged" for record in records)
    found = [replace(over, diverged=diverged)] if over else []
    if len(runs) > 1:
        for record, run in zip(records, runs, strict=True):
            found.append(Line(label, f"seed {record.trial.seed}", run, diverged=record.status == "diverged"))
    return found


def over_seeds(view: View, outcome: Outcome, name: str, label: str) -> Line | None:
    """The mean over the seeds of a group."""
    return next((line for line in _lines(view, outcome, name, label) if line.over_seeds), None)


def _columns(view: View, outcome: Outcome, name: str, record: Record) -> dict[str, list[float | None]]:
    per_step = view.seconds_per_step(outcome.panel.name).get(name)
    points = [point for point in record.points if point["train_loss"] is not None]
    return {
        "step": [point["step"] for point in points],
        "epoch": [epoch(point, record.trial) for point in points],
        "seconds": [None if per_step is None else point["step"] * per_step for point in points],
        **{quantity: [point.get(quantity) for point in points] for quantity in QUANTITIES},
    }


def _format(quantity: str) -> str:
    return ".4~%" if quantity == "test_accuracy" else ".4~g"


def _domain(quantity: str, drawn: Sequence[Line]) -> tuple[float, float] | None:
    """The climb from chance level would press flat what matters of an accuracy: where the curves end."""
    if quantity != "test_accuracy":
        return None
    ends = [value for line in drawn for value in line.columns[quantity][-1:] if value is not None]
    room = max(max(ends) - min(ends), 0.002) if ends else 1.0
    return (max(0.0, min(ends) - 2 * room), min(1.0, max(ends) + 0.5 * room)) if ends else None


def _lowest(drawn: Sequence[Line]) -> str:
    last = [(line.columns["train_loss"][-1], line.method) for line in drawn if line.over_seeds]
    ends = [(loss, method) for loss, method in last if loss is not None]
    return f"Lowest training loss at the end: {min(ends)[1]}, {number(min(ends)[0])}." if ends else ""


def clock_label(view: View) -> str:
    """What the seconds are."""
    methods = [method for record in view.steps.values() for method in record["methods"]]
    made = {method.get("implementation", "K-FAC, explicit factors" if "kfac" in method["name"] else "") for method in methods}
    kfac = {name for name in made if name.startswith("K-FAC")}
    by = f"; {' and '.join(sorted(kfac))}" if kfac else ""
    return f"Seconds on one CPU thread{by}"


def epoch(point: Point, trial: Trial) -> int:
    """After which epoch something was measured; those runs are measured after each."""
    return round(float(point["step"]) * trial.points / trial.steps)


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
                    table.writerow([*run, epoch(point, record.trial), point["step"], spent, *values])
    write_whole(view.directory / "numbers.csv", file.getvalue())
