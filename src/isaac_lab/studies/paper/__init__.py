"""The paper's figures and tables, by ID."""

from collections.abc import Mapping

from isaac_lab.studies.paper.fig6 import FIG6
from isaac_lab.studies.paper.figures import FIG1, FIG2, FIG3, FIG4, FIG5, FIG_A1, FIG_A2, FIG_A3
from isaac_lab.studies.paper.recipe import Experiment
from isaac_lab.studies.paper.tab1 import TAB1
from isaac_lab.studies.paper.tab2 import TAB2

#: In the paper's order.
EXPERIMENTS: Mapping[str, Experiment] = {
    own.id: own for own in (FIG1, FIG2, FIG3, FIG4, FIG5, TAB1, FIG6, TAB2, FIG_A1, FIG_A2, FIG_A3)
}
