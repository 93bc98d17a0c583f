"""How figures, tables and pages name what was run: data, scale, network."""

from collections.abc import Iterable

from isaac_lab.config import Config
from isaac_lab.experiments.folder import View

__all__ = ["DATA", "dampings", "data_of", "setting"]

DATA = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "digits": "digits of 8 × 8 (not the paper's data)"}


def data_of(configs: Iterable[Config]) -> str:
    """The data sets, for people."""
    return " and ".join(DATA.get(name, name) for name in dict.fromkeys(config.data for config in configs))


def setting(view: View) -> str:
    """One line: data, scale, epochs, batch, seeds, and settings that are not the recipe's."""
    configs = [record.config for outcome in view.outcomes for record in outcome.all()]
    parts = [data_of(configs) or "no data", f"scale “{view.scale.name}”"]
    epochs = sorted({config.epochs for config in configs})
    batches = sorted({config.batch for config in configs})
    seeds = len({config.seed for config in configs})
    examples = sorted({config.examples for config in configs if config.examples})
    parts += [f"{_listed(epochs)} epoch{'' if epochs == [1] else 's'}", f"batch {_listed(batches)}"] if configs else []
    parts += [f"{_listed(examples)} training examples"] if examples else []
    parts += [f"{seeds} seed{'' if seeds == 1 else 's'}"] if configs else []
    settings = sorted({text for about in view.about.values() for text in about["settings"]})
    parts += [f"with {', '.join(settings)}"] if settings else []
    return " · ".join(parts)


def _listed(numbers: Iterable[int]) -> str:
    return " and ".join(f"{number:,}" for number in numbers)


def dampings(config: Config) -> str:
    """λ_a and λ_g of a run."""
    return f"λ_a {config.damping:g}, λ_g {config.output_damping:g}".replace("inf", "∞")
