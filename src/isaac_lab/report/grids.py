"""Grids of dampings as heat maps."""

from collections.abc import Mapping
from typing import Any

from isaac_lab.charts import heat
from isaac_lab.charts.figure import Figure, identifier
from isaac_lab.report import WORDS
from isaac_lab.report.views import rate, setting
from isaac_lab.studies.paper.folder import View
from isaac_lab.studies.paper.grids import accuracies, losses
from isaac_lab.studies.paper.recipe import Outcome

READING = "Numbers: log₁₀ of the loss{accuracy}. Brighter is better; frames mark the best cell of ζ and of ζ*; ×: diverged."
#: By experiment.
FIGURES: Mapping[str, Mapping[str, Any]] = WORDS["grids"]


def cells(outcome: Outcome) -> list[heat.Cell]:
    """The rows of a heat map."""
    accuracy, found = accuracies(outcome), list[heat.Cell]()
    for (inputs, outputs), loss in losses(outcome).items():
        cell: heat.Cell = {"a": inputs, "g": outputs, "loss": loss, "accuracy": accuracy[inputs, outputs]}
        found.append({**cell, "rate": outcome.rates[heat.group(cell)]})
    return found


def figure(view: View) -> Figure:
    """A map for each panel: losses in a row and, where `FIGURES` says so, accuracies below them."""
    title, accuracy = (FIGURES[view.experiment.id][key] for key in ("title", "accuracy"))
    own = identifier("map", view.experiment.id, view.scale.name)
    charts = []
    for outcome in view.outcomes:
        rates = ", ".join(f"{heat.NAMES[name]} {rate(outcome, name)}" for name in outcome.rates)
        name = f"({outcome.panel.name}) {outcome.panel.title}\nlearning rates: {rates}"
        charts.append(heat.chart(f"{own}-{outcome.panel.name}", name, cells(outcome)))
    control = heat.control([cell for outcome in view.outcomes for cell in cells(outcome)])
    shown = [{"Colour": label} for label in list(control.choices)[: 2 if accuracy else 1]]
    views = (tuple(shown),) if len(charts) == 1 else tuple((one,) for one in shown)
    reading = READING.format(accuracy=", or the test accuracy in %" if accuracy else "")
    return Figure(own, tuple(charts), title, f"{setting(view)}\n{reading}", (control,), views=views)
