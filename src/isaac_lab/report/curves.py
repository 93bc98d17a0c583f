"""Curves of training, Figures 2, 5, A1 and A2: lines over time, steps or epochs."""

from collections.abc import Mapping, Sequence
from typing import Any

from isaac_lab.charts import lines
from isaac_lab.charts.figure import Figure, Look, Method, identifier
from isaac_lab.charts.lines import Axis, Line, Panel
from isaac_lab.record import Record
from isaac_lab.report import WORDS
from isaac_lab.report.views import setting
from isaac_lab.studies.paper import figures
from isaac_lab.studies.paper.folder import View
from isaac_lab.words import number

TITLES = {"train_loss": "Training loss", "test_loss": "Test loss", "test_accuracy": "Test accuracy"}
SECONDS_LOG = "Seconds (log)"


def _styles(names: Sequence[str]) -> dict[str, Method]:
    """By group, how its curve looks."""
    found = {}
    for group, own in ((group, own) for name in names for group, own in WORDS["styles"][name].items()):
        label = own["label"].format(damping=f"{figures.DAMPING:g}", batch=figures.BATCH)
        found[group] = Method(label, Look(**{key: own[key] for key in own if key != "label"}))
    return found


#: By experiment what its figure shows, and by group how its curve looks.
FIGURES: Mapping[str, Mapping[str, Any]] = WORDS["curves"]
STYLES = {name: _styles(own["styles"]) for name, own in FIGURES.items()}


def figure(view: View) -> Figure:
    """All groups that have a style and have been run, in their order."""
    shown, panels = FIGURES[view.experiment.id], {name: own for own in reversed(view.outcomes) for name in own.records}
    groups = [(name, method) for name, method in STYLES[view.experiment.id].items() if name in panels]
    drawn: list[Line] = []
    for name, method in groups:
        per_step = view.seconds_per_step(panels[name].panel.name).get(name)
        runs = {f"seed {record.trial.seed}": record for record in panels[name].records[name]}
        lost = [run for run, record in runs.items() if not record.finished]
        drawn += lines.seeds(method, {run: _columns(own, per_step) for run, own in runs.items()}, "epoch", tuple(TITLES), lost)
    across = [Axis("step", "Steps", ",d"), Axis("epoch", "Epochs", ",d")]
    if measured := any(value is not None for line in drawn for value in line.columns.get("seconds", ())):
        timed = [method for record in view.steps.values() for method in record["methods"]]
        made = {own.get("implementation", "K-FAC, explicit factors" if "kfac" in own["name"] else "") for own in timed}
        kfac = " and ".join(sorted(name for name in made if name.startswith("K-FAC")))
        label = "; ".join(filter(None, ("Seconds on one CPU thread", kfac)))
        across += [Axis("seconds", label, ",.3~r", label="Seconds")]
        across += [Axis("seconds", label, label=SECONDS_LOG, logarithmic=True)]
    up = [_axis(quantity, drawn) for quantity in shown["quantities"]]
    own = identifier("curve", view.experiment.id, view.scale.name)
    ends = [(loss, line.method.label) for line in drawn if line.over_seeds for loss in line.columns.get("train_loss", ())[-1:]]
    lowest = min(((loss, method) for loss, method in ends if loss is not None), default=None)
    alt = f"Curves of {len(groups)} methods: {view.experiment.shows}. "
    alt += f"Lowest training loss at the end: {lowest[1]}, {number(lowest[0])}. " if lowest else " "
    several = len({record.trial.seed for outcome in view.outcomes for record in outcome.all()}) > 1
    bands = " Bands: from the lowest to the highest seed." if several else ""
    wanted = [x for x in shown["across"] if measured or x != SECONDS_LOG]
    reading = shown["reading"].format(layers=f"{figures.DAMPING:g}")
    return lines.figure(
        f"figure-{own}",
        [Panel(own, "", f"{alt}The last values are in the table below.", drawn)],
        up,
        across,
        logarithmic=shown["quantities"][0] != "test_accuracy",
        views=[[{"Quantity": axis.title, "Horizontal": x} for x in wanted] for axis in up[: shown["rows"]]],
        title=shown["title"],
        subtitle=f"{setting(view)}\n{reading}η is tuned for each curve.{bands}",
    )


def _columns(record: Record, per_step: float | None) -> dict[str, list[float | None]]:
    points = [point for point in record.points if point["train_loss"] is not None]
    return {
        "step": [point["step"] for point in points],
        # Those runs are measured after each epoch.
        "epoch": [round(float(point["step"]) * record.trial.points / record.trial.steps) for point in points],
        "seconds": [None if per_step is None else point["step"] * per_step for point in points],
        **{quantity: [point.get(quantity) for point in points] for quantity in TITLES},
    }


def _axis(quantity: str, drawn: Sequence[Line]) -> Axis:
    """Of an accuracy where the curves end: the climb from chance level would press flat what matters."""
    if quantity != "test_accuracy":
        return Axis(quantity, TITLES[quantity], ".4~g")
    ends = [value for line in drawn for value in line.columns.get(quantity, ())[-1:] if value is not None]
    room = max(max(ends) - min(ends), 0.002) if ends else 0.0
    domain = (max(0.0, min(ends) - 2 * room), min(1.0, max(ends) + 0.5 * room)) if ends else None
    return Axis(quantity, TITLES[quantity], ".4~%", domain)
