"""Figure A1: the auto-encoder of Figure 2 against momentum, batches ten times as large, and Adam."""

from isaac_lab.studies.paper import fig2
from isaac_lab.studies.paper.recipe import Experiment, Panel, Scale, autoencoder, tuned

ID = "figA1"
#: Ten times the paper's.
BATCH = 600
DAMPING = 0.1


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


EXPERIMENT = Experiment(
    ID,
    "Figure A1",
    "Figure 2 with momentum, SGD and K-FAC at batch 600, and Adam; training and test loss per CPU time and epoch",
    panels,
    executor="local",
)
