"""The section of the heat maps: every grid of dampings that has been run."""

import math

from isaac_lab.claims.evidence import Evidence
from isaac_lab.page.origins import of_view
from isaac_lab.page.parts import Block, Figure, Heading, Missing, Paragraph, Row, Section, Table, identifier
from isaac_lab.studies.paper import EXPERIMENTS
from isaac_lab.studies.paper.grids import cells
from isaac_lab.studies.paper.recipe import Outcome
from isaac_lab.studies.paper.words import setting
from isaac_lab.words import number, percent

__all__ = ["section"]

GRIDS = ("fig1", "fig3", "fig4", "figA3")
SCALES = ("paper", "quick")


def section(evidence: Evidence, directory: str) -> Section:
    """One figure for each experiment and scale that has a panel."""
    blocks: list[Block] = []
    for name in GRIDS:
        experiment = EXPERIMENTS[name]
        blocks.append(Heading(identifier("grid", name), f"{experiment.name}: {experiment.shows}"))
        views = [view for scale in SCALES if (view := evidence.view(name, scale)).outcomes]
        if not views:
            blocks.append(Missing(experiment.name, f"isaac-newton reproduce {name} --scale quick"))
        for view in views:
            blocks.append(Paragraph(f"{setting(view)}."))
            tables = tuple(_table(outcome) for outcome in view.outcomes)
            blocks.append(Figure(view.experiment.figure(view), tables, small=True))
            blocks.append(of_view(view, directory))
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

    def words(value: float) -> str:
        return "∞" if value == math.inf else f"{value:g}"

    rows = tuple(Row((f"λ_a {words(inputs)}", *(text(inputs, output) for output in dampings))) for inputs in dampings)
    caption = f"({outcome.panel.name}) {outcome.panel.title}: training loss (test accuracy)"
    return Table(caption, ("", *(f"λ_g {words(output)}" for output in dampings)), rows)
