"""Curves of training, Figures 2, 5, A1 and A2: lines over time, steps or epochs, and their section of the page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from isaac_lab.charts import lines
from isaac_lab.charts.figure import Figure, Look, Method, identifier
from isaac_lab.charts.lines import ONE_SEED, Axis, Line
from isaac_lab.claims.evidence import Evidence
from isaac_lab.record import Point, Record
from isaac_lab.report import parts
from isaac_lab.report.parts import Block, Heading, Missing, Paragraph, Row, Section, Table
from isaac_lab.report.views import rate, setting, source
from isaac_lab.studies.paper import EXPERIMENTS, fig5, figA1
from isaac_lab.studies.paper.folder import View
from isaac_lab.studies.paper.recipe import Outcome
from isaac_lab.trial import Trial
from isaac_lab.words import number, percent

SCALES = ("paper", "quick")
Quantity = Literal["train_loss", "test_loss", "test_accuracy"]

QUANTITIES: tuple[Quantity, ...] = ("train_loss", "test_loss", "test_accuracy")
SECONDS_LOG = "Seconds (log)"
DASHES = {"-": (), "--": (7, 4), ":": (2, 3)}
TITLES = {"train_loss": "Training loss", "test_loss": "Test loss", "test_accuracy": "Test accuracy"}


@dataclass(frozen=True)
class Style:
    """How a group looks in a figure: its name, a key of `HUES`, one of `DASHES`, and a width."""

    label: str
    hue: str
    style: str = "-"
    width: float = 2


#: K-FAC and ζ are the same update, so that their curves may lie on each other: the lower one is thicker.
AUTOENCODER = {
    "kfac 0.1": Style("K-FAC, λ = 0.1", "yellow", width=4.5),
    "kfac 0.01": Style("K-FAC, λ = 0.01", "yellow", "--", width=4.5),
    "zeta 0.1": Style("ζ, λ = 0.1", "blue", width=2.6),
    "zeta 0.01": Style("ζ, λ = 0.01", "blue", "--", width=2.6),
    "zeta_star 0.1": Style("ζ*, λ = 0.1", "red"),
    "zeta_star 0.01": Style("ζ*, λ = 0.01", "red", "--"),
    "gradient": Style("∇ (SGD)", "black"),
}
MORE_METHODS = {
    **AUTOENCODER,
    "kfac 600": Style(f"K-FAC, λ = {figA1.DAMPING:g}, batch {figA1.BATCH}", "yellow", ":", width=3.5),
    "gradient 600": Style(f"∇ (SGD), batch {figA1.BATCH}", "black", ":"),
    "momentum": Style("SGD with momentum", "grey"),
    "adam": Style("Adam", "pink"),
}
LAYERS = {
    "all": Style("ζ* in all layers", "red", width=2.6),
    "1": Style("ζ* in layer 1", "blue"),
    "5": Style("ζ* in layer 5", "sky"),
    "1-3": Style("ζ* in layers 1, 2, 3", "green"),
    "3-5": Style("ζ* in layers 3, 4, 5", "pink"),
    "odd": Style("ζ* in layers 1, 3, 5", "orange", "--"),
    "even": Style("ζ* in layers 2, 4", "yellow", "--"),
    "none": Style("∇ in all layers", "black", width=2.6),
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
    styles: Mapping[str, Style]
    quantities: tuple[Quantity, ...]
    across: tuple[str, str] = (SECONDS_LOG, "Epochs")
    shown: int = 1
    reading: str = ""


#: By experiment.
FIGURES: Mapping[str, Curves] = {
    "fig2": Curves(
        "Figure 2: training loss of the auto-encoder, per time and per step",
        AUTOENCODER,
        ("train_loss", "test_loss"),
        (SECONDS_LOG, "Steps"),
    ),
    "fig5": Curves("Figure 5: ζ* in selected layers, training loss", LAYERS, QUANTITIES, reading=READING),
    "figA1": Curves("Figure A1: the auto-encoder, more methods", MORE_METHODS, ("train_loss", "test_loss"), shown=2),
    "figA2": Curves(
        "Figure A2: ζ* in selected layers, test accuracy",
        LAYERS,
        ("test_accuracy", "train_loss", "test_loss"),
        reading=READING,
    ),
}


def figure(view: View) -> Figure:
    """All groups that have a style, in their order."""
    shown = FIGURES[view.experiment.id]
    quantities = shown.quantities
    drawn: list[Line] = []
    methods: list[Method] = []
    for name, style in shown.styles.items():
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
    bands = " Bands: from the lowest to the highest seed." if _seeds(view) > 1 else ""
    note = f"{shown.reading}η is tuned for each curve.{bands}"
    rows = [
        tuple({"Quantity": axis.title, "Horizontal": x} for x in shown.across if measured or x != SECONDS_LOG)
        for axis in vertical[: shown.shown]
    ]
    subtitle = f"{setting(view)}\n{note}"
    return Figure(f"figure-{own}", (chart,), shown.title, subtitle, tuple(controls), tuple(methods), tuple(rows))


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


def section(evidence: Evidence, directory: str) -> Section:
    """One figure for each experiment, at the largest scale at which all of it has been run."""
    blocks: list[Block] = []
    for name in FIGURES:
        experiment = EXPERIMENTS[name]
        blocks.append(Heading(identifier("curves", name), f"{experiment.name}: {experiment.shows}"))
        view = next((view for scale in SCALES if _is_whole(view := evidence.view(name, scale))), None)
        if view is None:
            blocks.append(Missing(experiment.name, f"isaac-newton reproduce {name} --scale quick"))
            continue
        timed = "Seconds are steps × the time of a step, measured alone on one CPU thread." if view.steps else ""
        blocks += [Paragraph(f"{setting(view)}. {timed}"), _figure(view), source(view, directory)]
    lead = (
        "Training by ζ*, ζ, K-FAC and the gradient, each with a learning rate of its own. Where a line ends early, its run "
        "diverged; a pointer near a line names its values."
    )
    return Section("curves", "Curves of the paper's figures", lead, tuple(blocks))


def _is_whole(view: View) -> bool:
    """Figure A1 is Figure 2 and a panel of its own, without which it says nothing new."""
    own = {outcome.panel.name for outcome in view.outcomes}
    first = FIGURES[view.experiment.id].styles
    shown = {panel.name for panel in view.experiment.panels(view.scale) if any(group.name in first for group in panel.groups)}
    return bool(own) and shown <= own


def _figure(view: View) -> parts.Figure:
    own = FIGURES[view.experiment.id]
    ends: list[Row] = []
    for name, style in own.styles.items():
        outcome = next((outcome for outcome in view.outcomes if name in outcome.records), None)
        if outcome is not None:
            over = over_seeds(view, outcome, name, style.label)
            ends.append(_end(style.label, outcome, name, over, own.quantities))
    shown = (TITLES[quantity] for quantity in QUANTITIES if quantity in own.quantities)
    headings = ("Method", *shown, "Learning rate", "Seeds", "Diverged")
    table = Table("At the end; mean over seeds (lowest to highest).", headings, tuple(ends))
    return parts.Figure(figure(view), (table,))


def _end(label: str, outcome: Outcome, name: str, over: Line | None, quantities: tuple[str, ...]) -> Row:
    records = outcome.records[name]
    cells = []
    for quantity in QUANTITIES:
        if quantity in quantities:
            cells.append(_range(over, quantity) if over else "–")
    diverged = sum(record.status == "diverged" for record in records)
    about = (rate(outcome, name), str(len(records)), str(diverged))
    lost = diverged or outcome.rates[name] is None
    return Row((label, *cells, *about), ours="ζ*" in label, marks={len(cells) + 3: "bad"} if lost else {})


def _range(over: Line, quantity: str) -> str:
    write = percent if quantity == "test_accuracy" else number
    last, low, high = (over.columns[f"{quantity}{end}"][-1] for end in ("", "_low", "_high"))
    if last is None:
        return "–"
    return write(last) if over.run == ONE_SEED else f"{write(last)} ({write(low)} to {write(high)})"
