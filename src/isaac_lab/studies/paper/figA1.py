"""Figure A1: the auto-encoder of Figure 2 against momentum, batches ten times as large, and Adam."""

from isaac_lab.charts.figure import Figure
from isaac_lab.studies.paper import curves, fig2, fig5
from isaac_lab.studies.paper.curves import Style
from isaac_lab.studies.paper.folder import View
from isaac_lab.studies.paper.recipe import Experiment, Panel, Scale, autoencoder, tuned

__all__ = ["EXPERIMENT", "panels"]

ID = "figA1"
#: Ten times the paper's.
BATCH = 600
DAMPING = 0.1

STYLES = {
    **fig2.STYLES,
    "kfac 600": Style(f"K-FAC, λ = {DAMPING:g}, batch {BATCH}", "yellow", ":", width=3.5),
    "gradient 600": Style(f"∇ (SGD), batch {BATCH}", "black", ":"),
    "momentum": Style("SGD with momentum", "grey"),
    "adam": Style("Adam", "pink"),
}


def panels(scale: Scale) -> tuple[Panel, ...]:
    """Figure 2's panel from its own records, and what is new in panel c."""
    base, seeds = autoencoder(scale), scale.all_seeds or 1
    large = autoencoder(scale, batch=BATCH)
    new = (
        tuned("gradient 600", large, seeds),
        tuned("kfac 600", autoencoder(scale, method="kfac", batch=BATCH, damping=DAMPING), seeds),
        tuned("momentum", autoencoder(scale, method="momentum"), seeds),
        tuned("adam", autoencoder(scale, method="adam"), seeds),
    )
    plain = tuned("gradient", base, seeds)
    first = fig2.panels(scale)[0]
    return (first, Panel("c", "momentum, batch 600, Adam", new, ID, clocked=(plain, *new)))


def figure(view: View) -> Figure:
    """Training loss above, test loss below; over time (left) and epochs (right)."""
    title = "Figure A1: the auto-encoder, more methods"
    return curves.figure(view, STYLES, ("train_loss", "test_loss"), title=title, across=fig5.ACROSS, shown=2)


EXPERIMENT = Experiment(
    ID,
    "Figure A1",
    "Figure 2 with momentum, SGD and K-FAC at batch 600, and Adam; training and test loss per CPU time and epoch",
    panels,
    curves.numbers,
    figure,
    executor="local",
)
