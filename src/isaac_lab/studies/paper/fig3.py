"""Figure 3: what the two dampings do to an auto-encoder of MNIST and of Fashion-MNIST."""

from isaac_lab.studies.paper.recipe import Experiment, Panel, Scale, autoencoder, grid

ID = "fig3"
DATA = {"a": ("mnist", "MNIST"), "b": ("fashion-mnist", "Fashion-MNIST")}


def panels(scale: Scale) -> tuple[Panel, ...]:
    """One grid for each data set."""
    return tuple(
        Panel(name, f"digits, for {title}" if scale.small else title, grid(autoencoder(scale, data), scale), ID)
        for name, (data, title) in DATA.items()
    )


EXPERIMENT = Experiment(ID, "Figure 3", "training loss over λ_g and λ_a: auto-encoder on MNIST and on Fashion-MNIST", panels)
