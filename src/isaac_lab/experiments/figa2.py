"""Figure A2: the test accuracy of the runs of Figure 5."""

from isaac_lab.experiments import curves, fig5
from isaac_lab.experiments.folder import View
from isaac_lab.experiments.recipe import Experiment

__all__ = ["EXPERIMENT"]


def draw(view: View) -> None:
    """Test accuracy over time and epochs."""
    row = [curves.plot(view, fig5.STYLES, "test_accuracy", axis) for axis in ("seconds", "epoch")]
    reading = f"λ = {fig5.DAMPING:g}."
    curves.draw(view, [row], title="Figure A2: ζ* in selected layers, test accuracy", reading=reading)


EXPERIMENT = Experiment(
    "figA2",
    "Figure A2",
    "the test accuracy of Figure 5's runs, per CPU time and epoch",
    fig5.panels,
    draw,
    executor="local",
)
