"""The section of the paper's curves: Figures 2, 5, A1 and A2."""

from collections.abc import Mapping

from isaac_lab.evidence import Evidence
from isaac_lab.experiments import EXPERIMENTS, fig2, fig5, figa1
from isaac_lab.experiments.curves import TITLES, Style, place
from isaac_lab.experiments.folder import View
from isaac_lab.experiments.recipe import Outcome
from isaac_lab.experiments.words import setting
from isaac_lab.page import lines
from isaac_lab.page.lines import Axis, Line
from isaac_lab.page.origins import of_view
from isaac_lab.page.parts import Block, Figure, Heading, Method, Missing, Paragraph, Row, Section, Table, identifier
from isaac_lab.page.words import number, percent
from isaac_lab.record import Record

__all__ = ["section"]

SCALES = ("paper", "quick")
#: By experiment: how its curves look, and what it shows, first first.
FIGURES: Mapping[str, tuple[Mapping[str, Style], tuple[str, ...]]] = {
    "fig2": (fig2.STYLES, ("train_loss", "test_loss")),
    "fig5": (fig5.STYLES, ("train_loss", "test_loss", "test_accuracy")),
    "figA1": (figa1.STYLES, ("train_loss", "test_loss")),
    "figA2": (fig5.STYLES, ("test_accuracy", "train_loss", "test_loss")),
}
DASHES = {"-": (), "--": (7, 4), ":": (2, 3)}
QUANTITIES = ("train_loss", "test_loss", "test_accuracy")
SECONDS = "Seconds on one CPU thread"


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
        blocks += [Paragraph(f"{setting(view)}. {timed}"), _figure(view), of_view(view, directory)]
    lead = (
        "Training by ζ*, ζ, K-FAC and the gradient, each with a learning rate of its own. Where a line ends early, its run "
        "diverged; a pointer near a line names its values."
    )
    return Section("curves", "Curves of the paper's figures", lead, tuple(blocks))


def _is_whole(view: View) -> bool:
    """Figure A1 is Figure 2 and a panel of its own, without which it says nothing new."""
    own = {outcome.panel.name for outcome in view.outcomes}
    first = FIGURES[view.experiment.id][0]
    shown = {panel.name for panel in view.experiment.panels(view.scale) if any(group.name in first for group in panel.groups)}
    return bool(own) and shown <= own


def _figure(view: View) -> Figure:
    styles, quantities = FIGURES[view.experiment.id]
    drawn: list[Line] = []
    methods: list[Method] = []
    ends: list[Row] = []
    for name, style in styles.items():
        outcome = next((outcome for outcome in view.outcomes if name in outcome.records), None)
        if outcome is None:
            continue
        methods.append(Method(style.label, style.hue, DASHES[style.style], style.width, ours="ζ*" in style.label))
        runs = [_columns(view, outcome, name, record) for record in outcome.records[name]]
        over = lines.mean(style.label, runs, "epoch", QUANTITIES)
        drawn += [over] if over else []
        if len(runs) > 1:
            seeds = (record.trial.seed for record in outcome.records[name])
            drawn += [Line(style.label, f"seed {seed}", run) for seed, run in zip(seeds, runs, strict=True)]
        ends.append(_end(style.label, outcome, name, over, quantities))
    methods = lines.apart(methods)
    measured = any(value is not None for line in drawn for value in line.columns["seconds"])
    across = [Axis("step", "Steps", ",d"), Axis("epoch", "Epochs", ",d")]
    if measured:
        across += [
            Axis("seconds", SECONDS, ",.3~r", label="Seconds"),
            Axis("seconds", SECONDS, label="Seconds (log)", logarithmic=True),
        ]
    up = [Axis(quantity, TITLES[quantity], _format(quantity), _domain(quantity, drawn)) for quantity in quantities]
    controls = [lines.quantities(up), lines.scales(logarithmic_first=quantities[0] != "test_accuracy"), lines.axes(across)]
    several = any(not line.over_seeds for line in drawn)
    controls += [lines.RUNS] if several else []
    name = identifier("curve", view.experiment.id)
    description = (
        f"Curves of {len(methods)} methods: {view.experiment.shows}. {_lowest(drawn)} The last values are in the table below."
    )
    fields = [*across[: 3 if measured else 2], *up]
    chart = lines.chart(name, "", description, drawn, methods, fields)
    headings = (
        "Method",
        *(TITLES[quantity] for quantity in QUANTITIES if quantity in quantities),
        "Learning rate",
        "Seeds",
        "Diverged",
    )
    table = Table("At the end; mean over seeds (lowest to highest).", headings, tuple(ends))
    return Figure(f"figure-{name}", (chart,), "", tuple(controls), tuple(methods), (table,))


def _columns(view: View, outcome: Outcome, name: str, record: Record) -> dict[str, list[float | None]]:
    per_step = view.seconds_per_step(outcome.panel.name).get(name)
    points = [point for point in record.points if point["train_loss"] is not None]
    return {
        "step": [point["step"] for point in points],
        "epoch": [round(place(point, "epoch", record.trial)) for point in points],
        "seconds": [None if per_step is None else point["step"] * per_step for point in points],
        **{quantity: [point.get(quantity) for point in points] for quantity in QUANTITIES},
    }


def _format(quantity: str) -> str:
    return ".4~%" if quantity == "test_accuracy" else ".4~g"


def _domain(quantity: str, drawn: list[Line]) -> tuple[float, float] | None:
    """The climb from chance level would press flat what matters of an accuracy: where the curves end."""
    if quantity != "test_accuracy":
        return None
    ends = [value for line in drawn for value in line.columns[quantity][-1:] if value is not None]
    room = max(max(ends) - min(ends), 0.002) if ends else 1.0
    return (max(0.0, min(ends) - 2 * room), min(1.0, max(ends) + 0.5 * room)) if ends else None


def _lowest(drawn: list[Line]) -> str:
    last = [(line.columns["train_loss"][-1], line.method) for line in drawn if line.over_seeds]
    ends = [(loss, method) for loss, method in last if loss is not None]
    return f"Lowest training loss at the end: {min(ends)[1]}, {number(min(ends)[0])}." if ends else ""


def _end(label: str, outcome: Outcome, name: str, over: Line | None, quantities: tuple[str, ...]) -> Row:
    records, rate = outcome.records[name], outcome.rates[name]
    cells = []
    for quantity in QUANTITIES:
        if quantity in quantities:
            cells.append(_range(over, quantity) if over else "–")
    diverged = sum(record.status == "diverged" for record in records)
    about = ("all diverged" if rate is None else f"{rate:g}", str(len(records)), str(diverged))
    return Row((label, *cells, *about), ours="ζ*" in label, marks={len(cells) + 3: "bad"} if diverged or rate is None else {})


def _range(over: Line, quantity: str) -> str:
    write = percent if quantity == "test_accuracy" else number
    last, low, high = (over.columns[f"{quantity}{end}"][-1] for end in ("", "_low", "_high"))
    if last is None:
        return "–"
    return write(last) if over.run == lines.ONE_SEED else f"{write(last)} ({write(low)} to {write(high)})"
