"""Figure A2: the test accuracy of the runs of Figure 5."""

from isaac_lab.studies.paper import fig5
from isaac_lab.studies.paper.recipe import Experiment

EXPERIMENT = Experiment(
    "figA2",
    "Figure A2",
    "the test accuracy of Figure 5's runs, per CPU time and epoch",
    fig5.panels,
    executor="local",
)
