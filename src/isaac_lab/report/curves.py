"""Curves of training, Figures 2, 5, A1 and A2: lines over time, steps or epochs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from isaac_lab.charts import lines
from isaac_lab.charts.figure import Figure, Look, Method, identifier
from isaac_lab.charts.lines import ONE_SEED, Axis, Line, Panel
from isaac_lab.record import Record
from isaac_lab.report import WORDS
from isaac_lab.report.tables import Row, Table, table
from isaac_lab.report.views import rate, setting
from isaac_lab.studies.paper import figures
from isaac_lab.studies.paper.folder import View
from isaac_lab.studies.paper.recipe import Outcome
from isaac_lab.words import number, percent

TITLES = {"train_loss": "Training loss", "test_loss": "Test loss", "test_accuracy": "Test accuracy"}
QUANTITIES = tuple(TITLES)
SECONDS_LOG = "Seconds (log)"


def _styles(names: Sequence[str]) -> dict[str, Method]:
    """By group, how its curve looks."""
    found = {}
    for group, own in ((group, own) for name in names for group, own in WORDS["styles"][name].items()):
        label = own["label"].format(damping=f"{figures.DAMPING:g}", batch=figures.BATCH)
        found[group] = Method(label, Look.of(**{key: own[key] for key in own if key != "label"}), label.startswith("ζ*"))
    return found


#: By experiment what its figure shows, and by group how its curve looks.
FIGURES: Mapping[str, Mapping[str, Any]] = WORDS["curves"]
STYLES = {name: _styles(own["styles"]) for name, own in FIGURES.items()}


def figure(view: View) -> Figure:
    """All groups that have a style, in their order."""
    shown, groups = FIGURES[view.experiment.id], _groups(view)
    methods = [method for _, method, _ in groups]
    drawn = [line for name, method, outcome in groups for line in _lines(view, outcome, name, method.label)]
    across = [Axis("step", "Steps", ",d"), Axis("epoch", "Epochs", ",d")]
    if measured := any(value is not None for line in drawn for value in line.columns["seconds"]):
        label = _clock(view)
        across += [Axis("seconds", label, ",.3~r", label="Seconds")]
        across += [Axis("seconds", label, label=SECONDS_LOG, logarithmic=True)]
    up = [_axis(quantity, drawn) for quantity in shown["quantities"]]
    own = identifier("curve", view.experiment.id)
    alt = f"Curves of {len(methods)} methods: {view.experiment.shows}. {_lowest(drawn)} The last values are in the table below."
    several = len({record.trial.seed for outcome in view.outcomes for record in outcome.all()}) > 1
    bands = " Bands: from the lowest to the highest seed." if several else ""
    wanted = [x for x in shown["across"] if measured or x != SECONDS_LOG]
    reading = shown["reading"].format(layers=f"{figures.DAMPING:g}")
    return lines.figure(
        f"figure-{own}",
        [Panel(own, "", alt, drawn)],
        methods,
        up,
        across,
        logarithmic=shown["quantities"][0] != "test_accuracy",
        views=[[{"Quantity": axis.title, "Horizontal": x} for x in wanted] for axis in up[: shown["rows"]]],
        title=shown["title"],
        subtitle=f"{setting(view)}\n{reading}η is tuned for each curve.{bands}",
    )


def is_whole(view: View) -> bool:
    """Whether every curve is there: Figure A1 is Figure 2 and more, without which it says nothing new."""
    return len(_groups(view)) == len(STYLES[view.experiment.id])


def _groups(view: View) -> list[tuple[str, Method, Outcome]]:
    """Those that have been run, with the panel that each is of."""
    panels = {name: outcome for outcome in reversed(view.outcomes) for name in outcome.records}
    styles = STYLES[view.experiment.id]
    return [(name, method, panels[name]) for name, method in styles.items() if name in panels]


def _lines(view: View, outcome: Outcome, name: str, label: str) -> list[Line]:
    """The mean over seeds and, where there are several, each of them."""
    records = outcome.records[name]
    runs = [_columns(view, outcome, name, record) for record in records]
    over = lines.mean(label, runs, "epoch", QUANTITIES)
    found = [replace(over, diverged=any(record.status == "diverged" for record in records))] if over else []
    if len(runs) > 1:
        for record, run in zip(records, runs, strict=True):
            found.append(Line(label, f"seed {record.trial.seed}", run, diverged=record.status == "diverged"))
    return found


def _columns(view: View, outcome: Outcome, name: str, record: Record) -> dict[str, list[float | None]]:
    per_step = view.seconds_per_step(outcome.panel.name).get(name)
    points = [point for point in record.points if point["train_loss"] is not None]
    return {
        "step": [point["step"] for point in points],
        # Those runs are measured after each epoch.
        "epoch": [round(float(point["step"]) * record.trial.points / record.trial.steps) for point in points],
        "seconds": [None if per_step is None else point["step"] * per_step for point in points],
        **{quantity: [point.get(quantity) for point in points] for quantity in QUANTITIES},
    }


def _axis(quantity: str, drawn: Sequence[Line]) -> Axis:
    """Of an accuracy where the curves end: the climb from chance level would press flat what matters."""
    if quantity != "test_accuracy":
        return Axis(quantity, TITLES[quantity], ".4~g")
    ends = [value for line in drawn for value in line.columns[quantity][-1:] if value is not None]
    room = max(max(ends) - min(ends), 0.002) if ends else 0.0
    domain = (max(0.0, min(ends) - 2 * room), min(1.0, max(ends) + 0.5 * room)) if ends else None
    return Axis(quantity, TITLES[quantity], ".4~%", domain)


def _lowest(drawn: Sequence[Line]) -> str:
    last = [(line.columns["train_loss"][-1], line.method) for line in drawn if line.over_seeds]
    ends = [(loss, method) for loss, method in last if loss is not None]
    return f"Lowest training loss at the end: {min(ends)[1]}, {number(min(ends)[0])}." if ends else ""


def _clock(view: View) -> str:
    """What the seconds are."""
    methods = [method for record in view.steps.values() for method in record["methods"]]
    made = {method.get("implementation", "K-FAC, explicit factors" if "kfac" in method["name"] else "") for method in methods}
    kfac = " and ".join(sorted(name for name in made if name.startswith("K-FAC")))
    return "; ".join(filter(None, ("Seconds on one CPU thread", kfac)))


def tables(view: View) -> list[Table]:
    """Where each curve ends."""
    quantities = [quantity for quantity in QUANTITIES if quantity in FIGURES[view.experiment.id]["quantities"]]
    ends = []
    for name, method, outcome in _groups(view):
        over = next((line for line in _lines(view, outcome, name, method.label) if line.over_seeds), None)
        records = outcome.records[name]
        diverged = sum(record.status == "diverged" for record in records)
        cells = [method.label, *(_range(over, quantity) if over else "–" for quantity in quantities)]
        cells += [rate(outcome, name), str(len(records)), str(diverged)]
        lost = diverged or outcome.rates[name] is None
        ends.append(Row(tuple(cells), method.ours, marks={len(cells) - 1: "bad"} if lost else {}))
    columns = ("Method", *(TITLES[quantity] for quantity in quantities), "Learning rate", "Seeds", "Diverged")
    return [table(columns, ends, ("Method",), "At the end; mean over seeds (lowest to highest).")]


def _range(over: Line, quantity: str) -> str:
    write = percent if quantity == "test_accuracy" else number
    last, low, high = (over.columns[f"{quantity}{end}"][-1] for end in ("", "_low", "_high"))
    if last is None:
        return "–"
    return write(last) if over.run == ONE_SEED else f"{write(last)} ({write(low)} to {write(high)})"
