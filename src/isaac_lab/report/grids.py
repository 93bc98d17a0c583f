"""Grids of dampings as heat maps."""

import math
from collections.abc import Mapping
from typing import Any

from isaac_lab.charts import heat
from isaac_lab.charts.figure import Figure, identifier
from isaac_lab.report import WORDS
from isaac_lab.report.tables import Table, table
from isaac_lab.report.views import rate, setting
from isaac_lab.studies.paper.folder import View
from isaac_lab.studies.paper.grids import accuracies, losses
from isaac_lab.studies.paper.recipe import Outcome
from isaac_lab.words import damping, number, percent

READING = "Numbers: log₁₀ of the loss{accuracy}. Brighter is better; frames mark the best cell of ζ and of ζ*; ×: diverged."
#: By experiment.
FIGURES: Mapping[str, Mapping[str, Any]] = WORDS["grids"]


def cells(outcome: Outcome) -> list[heat.Cell]:
    """The rows of a heat map."""
    loss, accuracy = losses(outcome), accuracies(outcome)
    found: list[heat.Cell] = []
    for inputs, outputs in loss:
        cell = {"a": inputs, "g": outputs, "loss": loss[inputs, outputs], "accuracy": accuracy[inputs, outputs]}
        found.append(cell | {"rate": outcome.rates[heat.group(cell)]})
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
    shown = [{"Colour": choice.label} for choice in control.choices[: 2 if accuracy else 1]]
    views = (tuple(shown),) if len(charts) == 1 else tuple((one,) for one in shown)
    reading = READING.format(accuracy=", or the test accuracy in %" if accuracy else "")
    return Figure(own, tuple(charts), title, f"{setting(view)}\n{reading}", (control,), views=views)


def tables(view: View) -> list[Table]:
    """Loss and accuracy of every cell, panel by panel."""
    return [_table(outcome) for outcome in view.outcomes]


def _table(outcome: Outcome) -> Table:
    found = {(cell["a"], cell["g"]): cell for cell in cells(outcome)}
    dampings = sorted({inputs for inputs, _ in found})

    def text(cell: heat.Cell | None) -> str:
        if cell is None or not math.isfinite(cell["loss"]):
            return "" if cell is None else "diverged"
        return number(cell["loss"]) + (f" ({percent(cell['accuracy'], 1)})" if math.isfinite(cell["accuracy"]) else "")

    rows = [(f"λ_a {damping(a)}", *(text(found.get((a, g))) for g in dampings)) for a in dampings]
    caption = f"({outcome.panel.name}) {outcome.panel.title}: training loss (test accuracy)"
    return table(("", *(f"λ_g {damping(output)}" for output in dampings)), rows, ("",), caption)
