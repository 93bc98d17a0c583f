"""Figure A3: Figure 1 with the empirical Fisher in place of the Gauss–Newton matrix (Remark 4)."""

from isaac_lab.charts.figure import Figure
from isaac_lab.studies.paper import fig1, grids
from isaac_lab.studies.paper.folder import View
from isaac_lab.studies.paper.recipe import Experiment, Panel, Scale

__all__ = ["EXPERIMENT", "panels"]

ID = "figA3"


def panels(scale: Scale) -> tuple[Panel, ...]:
    """The panels of Figure 1, ḡ = g."""
    return fig1.panels(scale, home=ID, curvature="empirical")


def figure(view: View) -> Figure:
    """Training loss above, test accuracy below."""
    return grids.figure(view, title="Figure A3: as Figure 1, with the empirical Fisher (natural gradient)", accuracy=True)


EXPERIMENT = Experiment(
    ID, "Figure A3", "Figure 1 with the Fisher-based natural gradient of Remark 4", panels, grids.numbers, figure
)
