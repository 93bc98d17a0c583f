"""Figure 5: ζ* in some of the layers, the plain gradient in the others."""

import math

from isaac_lab.studies.paper.recipe import Experiment, Panel, Scale, classifier, conditioned, tuned

ID = "fig5"
#: "Small but moderate", says the paper of it; which one it used here it does not say.
DAMPING = 0.1

#: Numbers of the layers with ζ*; none is all.
SELECTIONS = {
    "all": (),
    "1": (1,),
    "5": (5,),
    "1-3": (1, 2, 3),
    "3-5": (3, 4, 5),
    "odd": (1, 3, 5),
    "even": (2, 4),
}


def panels(scale: Scale) -> tuple[Panel, ...]:
    """One panel, several seeds."""
    base, seeds = classifier(scale, 400), scale.all_seeds or scale.seeds
    plain = tuned("none", base, seeds)
    ours = conditioned(base, DAMPING, math.inf)
    selections = (tuned(name, ours.having(layers=layers or None), seeds) for name, layers in SELECTIONS.items())
    groups = (plain, *selections)
    return (Panel("a", f"ζ* in selected layers, λ = {DAMPING:g}", groups, ID, clocked=groups),)


EXPERIMENT = Experiment(
    ID,
    "Figure 5",
    "5-layer classifier with ζ* in selected layers: training loss per CPU time and epoch",
    panels,
    executor="local",
)
