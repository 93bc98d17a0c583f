"""Figure 4: the grid of Figure 1 b with Adam."""

from isaac_lab.charts.figure import Figure
from isaac_lab.studies.paper import grids
from isaac_lab.studies.paper.folder import View
from isaac_lab.studies.paper.recipe import Experiment, Panel, Scale, classifier, grid

__all__ = ["EXPERIMENT", "panels"]

ID = "fig4"


def panels(scale: Scale) -> tuple[Panel, ...]:
    """One grid."""
    base = classifier(scale, 400, "adam")
    return (Panel("a", f"{50 if scale.small else 400} neurons, Adam", grid(base, scale), ID),)


def figure(view: View) -> Figure:
    """Training loss and test accuracy side by side."""
    return grids.figure(view, title="Figure 4: 5-layer ReLU network, Adam", accuracy=True)


EXPERIMENT = Experiment(ID, "Figure 4", "the grid of Figure 1 b with Adam in place of SGD", panels, grids.numbers, figure)
