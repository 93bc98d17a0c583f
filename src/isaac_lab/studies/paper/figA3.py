"""Figure A3: Figure 1 with the empirical Fisher in place of the Gauss–Newton matrix (Remark 4)."""

from functools import partial

from isaac_lab.studies.paper import fig1
from isaac_lab.studies.paper.recipe import Experiment

#: The panels of Figure 1, ḡ = g.
PANELS = partial(fig1.panels, home="figA3", curvature="empirical")
EXPERIMENT = Experiment("figA3", "Figure A3", "Figure 1 with the Fisher-based natural gradient of Remark 4", PANELS)
