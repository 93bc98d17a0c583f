"""The paper's figures and tables, one file each."""

from collections.abc import Mapping
from types import MappingProxyType

from isaac_lab.experiments import fig1, fig2, fig3, fig4, fig5, fig6, figa1, figa2, figa3, tab1, tab2
from isaac_lab.experiments.recipe import Experiment

__all__ = ["EXPERIMENTS"]

#: By ID, in the paper's order.
EXPERIMENTS: Mapping[str, Experiment] = MappingProxyType(
    {file.EXPERIMENT.id: file.EXPERIMENT for file in (fig1, fig2, fig3, fig4, fig5, tab1, fig6, tab2, figa1, figa2, figa3)}
)
