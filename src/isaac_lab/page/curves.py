"""The section of the paper's curves: Figures 2, 5, A1 and A2."""

from collections.abc import Mapping

from isaac_lab.charts.lines import ONE_SEED, Line
from isaac_lab.claims.evidence import Evidence
from isaac_lab.page.origins import of_view
from isaac_lab.page.parts import Block, Figure, Heading, Missing, Paragraph, Row, Section, Table, identifier
from isaac_lab.studies.paper import EXPERIMENTS, fig2, fig5, figA1
from isaac_lab.studies.paper.curves import QUANTITIES, TITLES, Style, over_seeds
from isaac_lab.studies.paper.folder import View
from isaac_lab.studies.paper.recipe import Outcome
from isaac_lab.studies.paper.words import setting
from isaac_lab.words import number, percent

__all__ = ["section"]

SCALES = ("paper", "quick")
#: By experiment: how its curves look, and what it shows, first first.
FIGURES: Mapping[str, tuple[Mapping[str, Style], tuple[str, ...]]] = {
    "fig2": (fig2.STYLES, ("train_loss", "test_loss")),
    "fig5": (fig5.STYLES, ("train_loss", "test_loss", "test_accuracy")),
    "figA1": (figA1.STYLES, ("train_loss", "test_loss")),
    "figA2": (fig5.STYLES, ("test_accuracy", "train_loss", "test_loss")),
}


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
    ends: list[Row] = []
    for name, style in styles.items():
        outcome = next((outcome for outcome in view.outcomes if name in outcome.records), None)
        if outcome is not None:
            over = over_seeds(view, outcome, name, style.label)
            ends.append(_end(style.label, outcome, name, over, quantities))
    shown = (TITLES[quantity] for quantity in QUANTITIES if quantity in quantities)
    headings = ("Method", *shown, "Learning rate", "Seeds", "Diverged")
    table = Table("At the end; mean over seeds (lowest to highest).", headings, tuple(ends))
    return Figure(view.experiment.figure(view), (table,))


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
    return write(last) if over.run == ONE_SEED else f"{write(last)} ({write(low)} to {write(high)})"
