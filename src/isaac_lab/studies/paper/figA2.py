"""Figure A2: the test accuracy of the runs of Figure 5."""

from isaac_lab.charts.figure import Figure
from isaac_lab.studies.paper import curves, fig5
from isaac_lab.studies.paper.folder import View
from isaac_lab.studies.paper.recipe import Experiment

__all__ = ["EXPERIMENT"]


def figure(view: View) -> Figure:
    """Test accuracy over time and epochs."""
    title, reading = "Figure A2: ζ* in selected layers, test accuracy", f"λ = {fig5.DAMPING:g}."
    quantities: tuple[curves.Quantity, ...] = ("test_accuracy", "train_loss", "test_loss")
    return curves.figure(view, fig5.STYLES, quantities, title=title, across=fig5.ACROSS, reading=reading)


EXPERIMENT = Experiment(
    "figA2",
    "Figure A2",
    "the test accuracy of Figure 5's runs, per CPU time and epoch",
    fig5.panels,
    curves.numbers,
    figure,
    executor="local",
)
