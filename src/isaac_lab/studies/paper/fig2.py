"""Figure 2: the auto-encoder trained by gradient descent, K-FAC, ζ and ζ*, over time and over steps."""

import math
from dataclasses import replace

from isaac_lab.studies.paper.recipe import Experiment, Group, Panel, Scale, autoencoder, conditioned, tuned

ID = "fig2"
#: Drawn, as in the paper.
DAMPINGS = (0.1, 0.01)
#: Not drawn: what the text says of λ < 0.01.
SMALLER = (0.001, 0.0001)


def panels(scale: Scale) -> tuple[Panel, ...]:
    """Panel a is the figure; panel b has dampings that are smaller still, for a quarter of the epochs: K-FAC is slow."""
    base, seeds = autoencoder(scale), scale.all_seeds or 1
    plain = tuned("gradient", base, seeds)
    # λ_a = ∞ is only timed: what it costs to condition by the outputs alone.
    output_side = Group("output side only", (conditioned(base, math.inf, 0.1),))
    drawn = tuple(group for damping in DAMPINGS for group in _methods(scale, damping, seeds))
    short = replace(scale, epochs=max(1, scale.epochs // 4))
    smaller = tuple(group for damping in SMALLER for group in _methods(short, damping, seeds))
    return (
        Panel("a", "λ = 0.1 and 0.01", (plain, *drawn), ID, clocked=(plain, *drawn, output_side)),
        Panel("b", "λ = 0.001 and 0.0001", smaller, ID),
    )


def _methods(scale: Scale, damping: float, seeds: int) -> tuple[Group, ...]:
    base = autoencoder(scale)
    return (
        # The same update as ζ, and the dearest by far: it takes the learning rate that was chosen for ζ.
        tuned(f"kfac {damping:g}", autoencoder(scale, method="kfac", damping=damping), seeds, like=f"zeta {damping:g}"),
        tuned(f"zeta {damping:g}", conditioned(base, damping, damping), seeds),
        tuned(f"zeta_star {damping:g}", conditioned(base, damping, math.inf), seeds),
    )


EXPERIMENT = Experiment(
    ID,
    "Figure 2",
    "auto-encoder: gradient descent, K-FAC, ζ, ζ* with λ = 0.1 and 0.01; loss per CPU time and per step",
    panels,
    executor="local",
)
