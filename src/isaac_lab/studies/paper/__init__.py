"""The paper's figures and tables, one file each."""

from collections.abc import Mapping

from isaac_lab.studies.paper import fig1, fig2, fig3, fig4, fig5, fig6, figA1, figA2, figA3, tab1, tab2
from isaac_lab.studies.paper.recipe import Experiment

#: By ID, in the paper's order.
EXPERIMENTS: Mapping[str, Experiment] = {
    file.EXPERIMENT.id: file.EXPERIMENT for file in (fig1, fig2, fig3, fig4, fig5, tab1, fig6, tab2, figA1, figA2, figA3)
}
