"""Figure 4: the grid of Figure 1 b with Adam."""

from isaac_lab.studies.paper.recipe import Experiment, Panel, Scale, classifier, grid

ID = "fig4"


def panels(scale: Scale) -> tuple[Panel, ...]:
    """One grid."""
    base = classifier(scale, 400, "adam")
    return (Panel("a", f"{50 if scale.small else 400} neurons, Adam", grid(base, scale), ID),)


EXPERIMENT = Experiment(ID, "Figure 4", "the grid of Figure 1 b with Adam in place of SGD", panels)
