"""Figure 1: what the two dampings do to a classifier of MNIST, at three widths and with momentum."""

from isaac_lab.studies.paper.recipe import Experiment, Panel, Scale, classifier, grid

ID = "fig1"
#: Panel (the one below it shows the accuracy), width, optimizer.
SETTINGS = (("a", 100, "sgd"), ("b", 400, "sgd"), ("c", 400, "momentum"), ("d", 1600, "sgd"))


def panels(scale: Scale, *, home: str = ID, curvature: str = "sampled") -> tuple[Panel, ...]:
    """Grids of a network with 100, 400 and 1600 neurons per layer, that of 400 with and without momentum."""
    result = []
    for name, width, optimizer in SETTINGS:
        base = classifier(scale, width, optimizer)
        title = f"{base.get('width', 50 if scale.small else 400)} neurons" + (", momentum" if optimizer == "momentum" else "")
        result.append(Panel(name, title, grid(base, scale, curvature), home))
    return tuple(result)


EXPERIMENT = Experiment(
    ID,
    "Figure 1",
    "training loss and test accuracy over λ_g and λ_a: 5-layer classifier at three widths; the middle one with momentum too",
    panels,
)
