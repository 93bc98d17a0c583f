"""Figure A3: Figure 1 with the empirical Fisher in place of the Gauss–Newton matrix (Remark 4)."""

from isaac_lab.studies.paper import fig1
from isaac_lab.studies.paper.recipe import Experiment, Panel, Scale

ID = "figA3"


def panels(scale: Scale) -> tuple[Panel, ...]:
    """The panels of Figure 1, ḡ = g."""
    return fig1.panels(scale, home=ID, curvature="empirical")


EXPERIMENT = Experiment(ID, "Figure A3", "Figure 1 with the Fisher-based natural gradient of Remark 4", panels)
