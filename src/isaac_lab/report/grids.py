"""Grids of dampings as heat maps, and their section of the page: every grid that has been run."""

import math

from isaac_lab.charts import heat
from isaac_lab.charts.figure import Figure, identifier
from isaac_lab.claims.evidence import Evidence
from isaac_lab.report import parts
from isaac_lab.report.parts import Block, Heading, Missing, Paragraph, Section
from isaac_lab.report.tables import Row, Table
from isaac_lab.report.views import rate, setting, source
from isaac_lab.studies.paper import EXPERIMENTS
from isaac_lab.studies.paper.folder import View
from isaac_lab.studies.paper.grids import accuracies, losses
from isaac_lab.studies.paper.recipe import Outcome
from isaac_lab.words import damping, number, percent

READING = "Numbers: log₁₀ of the loss{accuracy}. Brighter is better; frames mark the best cell of ζ and of ζ*; ×: diverged."
#: By experiment, the title of its picture, and whether that has the accuracy too.
TITLES = {
    "fig1": ("Figure 1: training loss and test accuracy, 5-layer ReLU network", True),
    "fig3": ("Figure 3: training loss of the auto-encoder, SGD", False),
    "fig4": ("Figure 4: 5-layer ReLU network, Adam", True),
    "figA3": ("Figure A3: as Figure 1, with the empirical Fisher (natural gradient)", True),
}


def cells(outcome: Outcome) -> list[heat.Cell]:
    """The rows of a heat map."""
    loss, accuracy = losses(outcome), accuracies(outcome)
    found: list[heat.Cell] = []
    for inputs, outputs in loss:
        cell = {"a": inputs, "g": outputs, "loss": loss[inputs, outputs], "accuracy": accuracy[inputs, outputs]}
        found.append(cell | {"rate": outcome.rates[heat.group(cell)]})
    return found


def figure(view: View) -> Figure:
    """A map for each panel: losses in a row and, where `TITLES` says so, accuracies below them."""
    title, accuracy = TITLES[view.experiment.id]
    own = identifier("map", view.experiment.id, view.scale.name)
    charts = []
    for outcome in view.outcomes:
        rates = ", ".join(f"{heat.NAMES[name]} {rate(outcome, name)}" for name in outcome.rates)
        name = f"({outcome.panel.name}) {outcome.panel.title}\nlearning rates: {rates}"
        charts.append(heat.chart(f"{own}-{outcome.panel.name}", name, cells(outcome)))
    control = heat.control([cell for outcome in view.outcomes for cell in cells(outcome)])
    shown = [{"Colour": choice.label} for choice in control.choices[: 2 if accuracy else 1]]
    views = (tuple(shown),) if len(charts) == 1 else tuple((one,) for one in shown)
    reading = READING.format(accuracy=", or the test accuracy in %" if accuracy else "")
    return Figure(own, tuple(charts), title, f"{setting(view)}\n{reading}", (control,), views=views)


def section(evidence: Evidence, directory: str) -> Section:
    """One figure for each experiment and scale that has a panel."""
    blocks: list[Block] = []
    for name in TITLES:
        experiment = EXPERIMENTS[name]
        blocks.append(Heading(identifier("grid", name), f"{experiment.name}: {experiment.shows}"))
        views = [view for view in evidence.views(name) if view.outcomes]
        if not views:
            blocks.append(Missing(experiment.name, f"isaac-newton reproduce {name} --scale quick"))
        for view in views:
            blocks.append(Paragraph(f"{setting(view)}."))
            tables = tuple(_table(outcome) for outcome in view.outcomes)
            blocks += [parts.Figure(figure(view), tables, small=True), source(view, directory)]
    lead = (
        "What the two dampings do: λ_g grows to the right up to ζ* (∞), λ_a grows downwards, and the plain gradient ∇ is the "
        "corner. Bright is good, frames mark the best cell of ζ and of ζ*, × is a run that diverged. A number in a cell is "
        "log₁₀ of the loss, or the accuracy in percent; a pointer on a cell shows the rest."
    )
    return Section("grids", "Heat maps of the dampings", lead, tuple(blocks))


def _table(outcome: Outcome) -> Table:
    """Loss and accuracy of every cell."""
    found = {(cell["a"], cell["g"]): cell for cell in cells(outcome)}
    dampings = sorted({inputs for inputs, _ in found})

    def text(inputs: float, outputs: float) -> str:
        cell = found.get((inputs, outputs))
        if cell is None:
            return ""
        if not math.isfinite(cell["loss"]):
            return "diverged"
        return number(cell["loss"]) + (f" ({percent(cell['accuracy'], 1)})" if math.isfinite(cell["accuracy"]) else "")

    rows = tuple(Row((f"λ_a {damping(inputs)}", *(text(inputs, output) for output in dampings))) for inputs in dampings)
    caption = f"({outcome.panel.name}) {outcome.panel.title}: training loss (test accuracy)"
    return Table(caption, ("", *(f"λ_g {damping(output)}" for output in dampings)), rows)
