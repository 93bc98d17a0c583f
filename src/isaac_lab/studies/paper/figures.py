"""Figures 1 to 5 and A1 to A3: grids of the two dampings, and curves; what each of their panels compares."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from isaac_lab.studies.paper.recipe import Experiment, Group, Panel, Scale, autoencoder, classifier, conditioned, grid, tuned

#: "Small but moderate", says the paper of Figure 5's; which one it used there it does not say. Figure A1's K-FAC has it too.
DAMPING = 0.1
#: Of Figure A1, ten times the paper's.
BATCH = 600
#: Of Figure 2 those that are drawn, as in the paper, and those that are not: what the text says of λ < 0.01.
DRAWN, SMALLER = (0.1, 0.01), (0.001, 0.0001)
#: Figure 5: numbers of the layers with ζ*; none is all.
SELECTIONS: Mapping[str, tuple[int, ...]] = {
    "all": (),
    "1": (1,),
    "5": (5,),
    "1-3": (1, 2, 3),
    "3-5": (3, 4, 5),
    "odd": (1, 3, 5),
    "even": (2, 4),
}
#: By panel of Figures 1 and A3 (the one below it shows the accuracy), and of Figure 4: width, optimizer, its name in the title.
_WIDTHS = {"a": (100, "sgd", ""), "b": (400, "sgd", ""), "c": (400, "momentum", ", momentum"), "d": (1600, "sgd", "")}
_ADAM = {"a": (400, "adam", ", Adam")}


def _classifiers(
    scale: Scale, home: str, settings: Mapping[str, tuple[int, str, str]], curvature: str = "sampled"
) -> tuple[Panel, ...]:
    """A grid for each width and optimizer."""
    found = []
    for name, (width, optimizer, words) in settings.items():
        base = classifier(scale, width, optimizer)
        title = f"{base.get('width', 50 if scale.small else 400)} neurons{words}"
        found.append(Panel(name, title, grid(base, scale, curvature), home))
    return tuple(found)


def _autoencoders(scale: Scale) -> tuple[Panel, ...]:
    """A grid for each data set."""
    names = {"a": ("mnist", "MNIST"), "b": ("fashion-mnist", "Fashion-MNIST")}
    return tuple(
        Panel(name, f"digits, for {title}" if scale.small else title, grid(autoencoder(scale, data), scale), "fig3")
        for name, (data, title) in names.items()
    )


def _second_order(scale: Scale) -> tuple[Panel, ...]:
    """Panel a is the figure; panel b has dampings that are smaller still, for a quarter of the epochs: K-FAC is slow."""
    base, seeds = autoencoder(scale), scale.all_seeds or 1

    def methods(scale: Scale, damping: float) -> tuple[Group, ...]:
        base = autoencoder(scale)
        return (
            # The same update as ζ, and the dearest by far: it takes the learning rate that was chosen for ζ.
            tuned(f"kfac {damping:g}", autoencoder(scale, method="kfac", damping=damping), seeds, like=f"zeta {damping:g}"),
            tuned(f"zeta {damping:g}", conditioned(base, damping, damping), seeds),
            tuned(f"zeta_star {damping:g}", conditioned(base, damping, math.inf), seeds),
        )

    # λ_a = ∞ is only timed: what it costs to condition by the outputs alone.
    output_side = Group("output side only", (conditioned(base, math.inf, 0.1),))
    drawn = (tuned("gradient", base, seeds), *(group for damping in DRAWN for group in methods(scale, damping)))
    short = replace(scale, epochs=max(1, scale.epochs // 4))
    smaller = tuple(group for damping in SMALLER for group in methods(short, damping))
    return (
        Panel("a", "λ = 0.1 and 0.01", drawn, "fig2", clocked=(*drawn, output_side)),
        Panel("b", "λ = 0.001 and 0.0001", smaller, "fig2"),
    )


def _layers(scale: Scale) -> tuple[Panel, ...]:
    """One panel, several seeds."""
    base, seeds = classifier(scale, 400), scale.all_seeds or scale.seeds
    ours = conditioned(base, DAMPING, math.inf)
    selections = (tuned(name, ours.having(layers=layers or None), seeds) for name, layers in SELECTIONS.items())
    groups = (tuned("none", base, seeds), *selections)
    return (Panel("a", f"ζ* in selected layers, λ = {DAMPING:g}", groups, "fig5", clocked=groups),)


def _first_order(scale: Scale) -> tuple[Panel, ...]:
    """Figure 2's panel from its own records, and what is new in panel c."""
    seeds = scale.all_seeds or 1
    new = (
        tuned(f"gradient {BATCH}", autoencoder(scale, batch=BATCH), seeds),
        tuned(f"kfac {BATCH}", autoencoder(scale, method="kfac", batch=BATCH, damping=DAMPING), seeds),
        tuned("momentum", autoencoder(scale, method="momentum"), seeds),
        tuned("adam", autoencoder(scale, method="adam"), seeds),
    )
    plain = tuned("gradient", autoencoder(scale), seeds)
    return (_second_order(scale)[0], Panel("c", "momentum, batch 600, Adam", new, "figA1", clocked=(plain, *new)))


FIG1 = Experiment(
    "fig1",
    "Figure 1",
    "training loss and test accuracy over λ_g and λ_a: 5-layer classifier at three widths; the middle one with momentum too",
    partial(_classifiers, home="fig1", settings=_WIDTHS),
    "ensemble",
)
FIG2 = Experiment(
    "fig2",
    "Figure 2",
    "auto-encoder: gradient descent, K-FAC, ζ, ζ* with λ = 0.1 and 0.01; loss per CPU time and per step",
    _second_order,
)
FIG3 = Experiment(
    "fig3",
    "Figure 3",
    "training loss over λ_g and λ_a: auto-encoder on MNIST and on Fashion-MNIST",
    _autoencoders,
    "ensemble",
)
FIG4 = Experiment(
    "fig4",
    "Figure 4",
    "the grid of Figure 1 b with Adam in place of SGD",
    partial(_classifiers, home="fig4", settings=_ADAM),
    "ensemble",
)
FIG5 = Experiment(
    "fig5", "Figure 5", "5-layer classifier with ζ* in selected layers: training loss per CPU time and epoch", _layers
)
FIG_A1 = Experiment(
    "figA1",
    "Figure A1",
    "Figure 2 with momentum, SGD and K-FAC at batch 600, and Adam; training and test loss per CPU time and epoch",
    _first_order,
)
FIG_A2 = Experiment("figA2", "Figure A2", "the test accuracy of Figure 5's runs, per CPU time and epoch", _layers)
# With the empirical Fisher, ḡ = g, in place of the Gauss–Newton matrix.
FIG_A3 = Experiment(
    "figA3",
    "Figure A3",
    "Figure 1 with the Fisher-based natural gradient of Remark 4",
    partial(_classifiers, home="figA3", settings=_WIDTHS, curvature="empirical"),
    "ensemble",
)
