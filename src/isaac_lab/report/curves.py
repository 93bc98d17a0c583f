"""Curves of training, Figures 2, 5, A1 and A2: lines over time, steps or epochs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from isaac_lab.charts import lines
from isaac_lab.charts.figure import DOTTED, Figure, Look, Method, identifier
from isaac_lab.charts.lines import ONE_SEED, Axis, Line, Panel
from isaac_lab.record import Point, Record
from isaac_lab.report.tables import Row, Table, table
from isaac_lab.report.views import rate, setting
from isaac_lab.studies.paper import fig5, figA1
from isaac_lab.studies.paper.folder import View
from isaac_lab.studies.paper.recipe import Outcome
from isaac_lab.trial import Trial
from isaac_lab.words import number, percent

Quantity = Literal["train_loss", "test_loss", "test_accuracy"]

QUANTITIES: tuple[Quantity, ...] = ("train_loss", "test_loss", "test_accuracy")
TITLES = {"train_loss": "Training loss", "test_loss": "Test loss", "test_accuracy": "Test accuracy"}
SECONDS_LOG = "Seconds (log)"
BROKEN = (7, 4)

#: K-FAC and ζ are the same update, so that their curves may lie on each other: the lower one is thicker.
AUTOENCODER = {
    "kfac 0.1": Method("K-FAC, λ = 0.1", Look("yellow", width=4.5)),
    "kfac 0.01": Method("K-FAC, λ = 0.01", Look("yellow", BROKEN, 4.5)),
    "zeta 0.1": Method("ζ, λ = 0.1", Look("blue", width=2.6)),
    "zeta 0.01": Method("ζ, λ = 0.01", Look("blue", BROKEN, 2.6)),
    "zeta_star 0.1": Method("ζ*, λ = 0.1", Look("red"), ours=True),
    "zeta_star 0.01": Method("ζ*, λ = 0.01", Look("red", BROKEN), ours=True),
    "gradient": Method("∇ (SGD)", Look("black")),
}
MORE_METHODS = {
    **AUTOENCODER,
    "kfac 600": Method(f"K-FAC, λ = {figA1.DAMPING:g}, batch {figA1.BATCH}", Look("yellow", DOTTED, 3.5)),
    "gradient 600": Method(f"∇ (SGD), batch {figA1.BATCH}", Look("black", DOTTED)),
    "momentum": Method("SGD with momentum", Look("grey")),
    "adam": Method("Adam", Look("pink")),
}
LAYERS = {
    "all": Method("ζ* in all layers", Look("red", width=2.6), ours=True),
    "1": Method("ζ* in layer 1", Look("blue"), ours=True),
    "5": Method("ζ* in layer 5", Look("sky"), ours=True),
    "1-3": Method("ζ* in layers 1, 2, 3", Look("green"), ours=True),
    "3-5": Method("ζ* in layers 3, 4, 5", Look("pink"), ours=True),
    "odd": Method("ζ* in layers 1, 3, 5", Look("orange", BROKEN), ours=True),
    "even": Method("ζ* in layers 2, 4", Look("yellow", BROKEN), ours=True),
    "none": Method("∇ in all layers", Look("black", width=2.6)),
}
READING = f"λ = {fig5.DAMPING:g}. "


@dataclass(frozen=True)
class Curves:
    """What a figure shows.

    Args:
        title: Of the picture.
        styles: By group, how its curve looks.
        quantities: What can be seen.
        across: Horizontal axes of the picture.
        shown: The picture has a row for each of so many quantities.
        reading: How to read it.
    """

    title: str
    styles: Mapping[str, Method]
    quantities: tuple[Quantity, ...] = ("train_loss", "test_loss")
    across: tuple[str, str] = (SECONDS_LOG, "Epochs")
    shown: int = 1
    reading: str = ""


#: By experiment.
FIGURES: Mapping[str, Curves] = {
    "fig2": Curves(
        "Figure 2: training loss of the auto-encoder, per time and per step", AUTOENCODER, across=(SECONDS_LOG, "Steps")
    ),
    "fig5": Curves("Figure 5: ζ* in selected layers, training loss", LAYERS, QUANTITIES, reading=READING),
    "figA1": Curves("Figure A1: the auto-encoder, more methods", MORE_METHODS, shown=2),
    "figA2": Curves(
        "Figure A2: ζ* in selected layers, test accuracy",
        LAYERS,
        ("test_accuracy", "train_loss", "test_loss"),
        reading=READING,
    ),
}


def figure(view: View) -> Figure:
    """All groups that have a style, in their order."""
    shown, groups = FIGURES[view.experiment.id], _groups(view)
    methods = [method for _, method, _ in groups]
    drawn = [line for name, method, outcome in groups for line in _lines(view, outcome, name, method.label)]
    across = [Axis("step", "Steps", ",d"), Axis("epoch", "Epochs", ",d")]
    if measured := any(value is not None for line in drawn for value in line.columns["seconds"]):
        label = clock_label(view)
        across += [Axis("seconds", label, ",.3~r", label="Seconds")]
        across += [Axis("seconds", label, label=SECONDS_LOG, logarithmic=True)]
    up = [Axis(quantity, TITLES[quantity], _format(quantity), _domain(quantity, drawn)) for quantity in shown.quantities]
    own = identifier("curve", view.experiment.id)
    alt = f"Curves of {len(methods)} methods: {view.experiment.shows}. {_lowest(drawn)} The last values are in the table below."
    several = len({record.trial.seed for outcome in view.outcomes for record in outcome.all()}) > 1
    bands = " Bands: from the lowest to the highest seed." if several else ""
    wanted = [x for x in shown.across if measured or x != SECONDS_LOG]
    return lines.figure(
        f"figure-{own}",
        [Panel(own, "", alt, drawn)],
        methods,
        up,
        across,
        logarithmic=shown.quantities[0] != "test_accuracy",
        views=[[{"Quantity": axis.title, "Horizontal": x} for x in wanted] for axis in up[: shown.shown]],
        title=shown.title,
        subtitle=f"{setting(view)}\n{shown.reading}η is tuned for each curve.{bands}",
    )


def is_whole(view: View) -> bool:
    """Whether every curve is there: Figure A1 is Figure 2 and more, without which it says nothing new."""
    return len(_groups(view)) == len(FIGURES[view.experiment.id].styles)


def _groups(view: View) -> list[tuple[str, Method, Outcome]]:
    """Those that have been run, with the panel that each is of."""
    panels = {name: outcome for outcome in reversed(view.outcomes) for name in outcome.records}
    styles = FIGURES[view.experiment.id].styles
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
        "epoch": [epoch(point, record.trial) for point in points],
        "seconds": [None if per_step is None else point["step"] * per_step for point in points],
        **{quantity: [point.get(quantity) for point in points] for quantity in QUANTITIES},
    }


def _format(quantity: str) -> str:
    return ".4~%" if quantity == "test_accuracy" else ".4~g"


def _domain(quantity: str, drawn: Sequence[Line]) -> tuple[float, float] | None:
    """The climb from chance level would press flat what matters of an accuracy: where the curves end."""
    ends = [value for line in drawn for value in line.columns[quantity][-1:] if value is not None]
    if quantity != "test_accuracy" or not ends:
        return None
    room = max(max(ends) - min(ends), 0.002)
    return max(0.0, min(ends) - 2 * room), min(1.0, max(ends) + 0.5 * room)


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


def tables(view: View) -> list[Table]:
    """Where each curve ends."""
    quantities = [quantity for quantity in QUANTITIES if quantity in FIGURES[view.experiment.id].quantities]
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
