"""The section of the heat maps: every grid of dampings that has been run."""

from isaac_lab.evidence import Evidence
from isaac_lab.experiments import EXPERIMENTS
from isaac_lab.experiments.words import setting
from isaac_lab.page import heat
from isaac_lab.page.origins import of_view
from isaac_lab.page.parts import Block, Figure, Heading, Missing, Paragraph, Section, identifier

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
            own = identifier("map", name, view.scale.name)
            charts = tuple(heat.chart(f"{own}-{outcome.panel.name}", outcome) for outcome in view.outcomes)
            tables = tuple(heat.table(outcome) for outcome in view.outcomes)
            blocks.append(Figure(own, charts, "", (heat.control(view.outcomes),), tables=tables, small=True))
            blocks.append(of_view(view, directory))
    lead = (
        "What the two dampings do: λ_g grows to the right up to ζ* (∞), λ_a grows downwards, and the plain gradient ∇ is the "
        "corner. Bright is good, frames mark the best cell of ζ and of ζ*, × is a run that diverged. A number in a cell is "
        "log₁₀ of the loss, or the accuracy in percent; a pointer on a cell shows the rest."
    )
    return Section("grids", "Heat maps of the dampings", lead, tuple(blocks))
