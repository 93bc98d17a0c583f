"""What the experiments have in common: scales, panels of cells, and one learning rate for every cell of a group.

An experiment is a few panels, a panel is a few groups, and a group is cells (training runs) that share one learning rate. The
rate is chosen by short runs, as the paper's appendix B says of its own, and these trials are records like all others. So what
a figure shows follows from the recipe and the records alone, and it can be drawn again without training.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias

from isaac_lab.charts.figure import Figure
from isaac_lab.config import Config, ConfigError
from isaac_lab.models import AUTOENCODER
from isaac_lab.store import Record

if TYPE_CHECKING:
    from isaac_lab.experiments.folder import View

__all__ = [
    "DECADES",
    "LARGER_RATES",
    "RATES",
    "SCALES",
    "Experiment",
    "Group",
    "Outcome",
    "Panel",
    "Scale",
    "autoencoder",
    "choose",
    "classifier",
    "final_loss",
    "grid",
    "outcome",
    "over_seeds",
    "selected",
    "train",
    "trials",
    "tuned",
]

#: The paper's learning rates (appendix B), largest first.
RATES = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
#: Tried beside them for auto-encoders: their loss is a mean over 784 pixels, whose gradients are so small that without these
#: every method would end at the largest rate of the list, and the comparison would be one of rates.
LARGER_RATES = (100.0, 30.0, 10.0, 3.0)
#: The paper's dampings: 10^-6 … 10^6.
DECADES = tuple(float(f"1e{exponent}") for exponent in range(-6, 7))

#: Trains these and returns their records, in their order; `what` says what they are for.
Trainer: TypeAlias = Callable[[Sequence[Config], str], Sequence[Record]]


@dataclass(frozen=True)
class Scale:
    """How much of the paper is run.

    Args:
        name: "smoke", "quick" or "paper".
        epochs: Of a run.
        tune_epochs: Of a trial, which chooses the learning rate.
        dampings: λ_a and λ_g of a grid; λ_g is also ∞.
        tuned_on: Those of them that the trials of a grid use.
        rates: Learning rates to choose from.
        larger_rates: More of them for auto-encoders, but for Adam, which does not see the size of a gradient.
        seeds: Runs of each cell that a figure shows with a spread.
        all_seeds: Runs of every cell, where the command line asks for them; 0 leaves it to the experiment.
        small: Digits of 8 × 8 and networks an eighth as wide, in place of the paper's.
        rounds: How often the methods take turns when their steps are timed.
    """

    name: str
    epochs: int
    tune_epochs: int
    dampings: tuple[float, ...]
    tuned_on: tuple[float, ...]
    rates: tuple[float, ...] = RATES
    larger_rates: tuple[float, ...] = LARGER_RATES
    seeds: int = 3
    all_seeds: int = 0
    small: bool = False
    rounds: int = 10


#: The smallest scale that is run without data and within a minute; one for a look; and everything as printed.
SCALES: Mapping[str, Scale] = MappingProxyType(
    {
        "smoke": Scale(
            "smoke",
            5,
            1,
            (1e-2, 1.0, 1e2),
            (1e-2, 1.0, 1e2),
            rates=(1.0, 0.1, 0.01),
            larger_rates=(10.0,),
            seeds=2,
            small=True,
            rounds=3,
        ),
        "quick": Scale("quick", 4, 1, DECADES[::2], DECADES[::2]),
        # Every second decade is enough to find the rate of a sector, and a quarter of the work.
        "paper": Scale("paper", 40, 2, DECADES, DECADES[::2]),
    }
)


@dataclass(frozen=True)
class Group:
    """Cells that share one learning rate: a sector of a grid, or a curve with its seeds.

    Args:
        name: What tables, files and claims call it.
        cells: The runs; their learning rates are not decided yet.
        tuned_on: The cells that try the learning rates.
        like: The group whose learning rate this one takes instead.
    """

    name: str
    cells: tuple[Config, ...]
    tuned_on: tuple[Config, ...] = ()
    like: str = ""


@dataclass(frozen=True)
class Panel:
    """One part of a figure.

    Args:
        name: As in the paper where it has one: "a", "b", …
        title: The setting, for people.
        groups: Its cells.
        home: The experiment whose records hold it.
        clocked: Groups whose steps are timed on one CPU thread, for an axis in seconds; ratios are relative to the first.
    """

    name: str
    title: str
    groups: tuple[Group, ...]
    home: str
    clocked: tuple[Group, ...] = ()

    @property
    def cells(self) -> tuple[Config, ...]:
        """All runs."""
        return tuple(cell for group in self.groups for cell in group.cells)


@dataclass(frozen=True)
class Outcome:
    """What a panel's records say.

    Args:
        panel: Which panel.
        scale: At which scale.
        rates: By group: the learning rate chosen, None where all of them diverged.
        tried: By group: the final training loss that each learning rate reached in its trials; infinite where all diverged.
        records: By group, one record for each cell, in their order; empty where no learning rate was left.
        settings: "field=value" that were not the recipe's.
    """

    panel: Panel
    scale: str
    rates: Mapping[str, float | None]
    tried: Mapping[str, Mapping[float, float]]
    records: Mapping[str, tuple[Record, ...]]
    settings: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The scale, with the settings that are not its own."""
        return f"{self.scale} with {', '.join(self.settings)}" if self.settings else self.scale

    def all(self) -> list[Record]:
        """The records of all groups."""
        return [record for records in self.records.values() for record in records]


@dataclass(frozen=True)
class Experiment:
    """A figure or table of the paper.

    Args:
        id: "fig1", …, "figA3", "tab2".
        name: What the paper calls it.
        shows: What is on it, in a line.
        panels: The parts of it that are trained.
        write: Writes numbers.csv, and what else there is beside the figure, from the records.
        figure: What it shows, from the records.
        executor: What runs it unless the command line says otherwise.
        measure: What has to be measured besides training: a step's time, for Table 2; trials, for Table 1 and Figure 6.
        table: Headings and rows for the terminal, where there are no panels to make them from.
    """

    id: str
    name: str
    shows: str
    panels: Callable[[Scale], tuple[Panel, ...]]
    write: Callable[["View"], None]
    figure: Callable[["View"], Figure]
    executor: Literal["ensemble", "local"] = "ensemble"
    measure: Callable[["View"], None] = lambda view: None
    table: Callable[["View"], tuple[Sequence[str], Sequence[Sequence[str]]]] = lambda view: ((), ())


def classifier(scale: Scale, width: int, **fields: object) -> Config:
    """The paper's network of five linear layers on MNIST, batch 60, SGD, unless `fields` say otherwise."""
    chosen = Config(hidden=(_width(scale, width),) * 4, data="digits" if scale.small else "mnist", epochs=scale.epochs)
    return replace(chosen, **fields)  # type: ignore[arg-type]


def autoencoder(scale: Scale, data: str = "mnist", **fields: object) -> Config:
    """The paper's auto-encoder, 784-1000-500-30-500-1000-784, batch 60, SGD, unless `fields` say otherwise."""
    hidden = tuple(_width(scale, size) for size in AUTOENCODER[1:-1])
    chosen = Config(task="autoencoder", hidden=hidden, data="digits" if scale.small else data, epochs=scale.epochs)
    return replace(chosen, **fields)  # type: ignore[arg-type]


def _width(scale: Scale, width: int) -> int:
    return max(8, width // 8) if scale.small else width


def over_seeds(config: Config, seeds: int) -> tuple[Config, ...]:
    """The same run from several seeds."""
    return tuple(replace(config, seed=config.seed + number) for number in range(seeds))


def tuned(name: str, config: Config, seeds: int = 1, *, like: str = "") -> Group:
    """A curve: one run over seeds, with a learning rate of its own, chosen at the first seed, or that of another group."""
    return Group(name, over_seeds(config, seeds), () if like else (config,), like)


def grid(base: Config, scale: Scale) -> tuple[Group, ...]:
    """The three sectors of the paper's grids: λ_a × λ_g for ζ, λ_a for ζ*, and the gradient in the corner."""
    seeds = scale.all_seeds or 1

    def cells(pairs: Iterable[tuple[float, float]], count: int = seeds) -> tuple[Config, ...]:
        return tuple(
            cell
            for inputs, outputs in pairs
            for cell in over_seeds(replace(base, damping=inputs, output_damping=outputs), count)
        )

    def square(dampings: Sequence[float]) -> list[tuple[float, float]]:
        return [(inputs, outputs) for inputs in dampings for outputs in dampings]

    def column(dampings: Sequence[float]) -> list[tuple[float, float]]:
        return [(inputs, math.inf) for inputs in dampings]

    corner = [(math.inf, math.inf)]
    return (
        Group("zeta", cells(square(scale.dampings)), cells(square(scale.tuned_on), 1)),
        Group("zeta_star", cells(column(scale.dampings)), cells(column(scale.tuned_on), 1)),
        Group("gradient", cells(corner), cells(corner, 1)),
    )


def selected(panels: Sequence[Panel], settings: Sequence[str]) -> tuple[Panel, ...]:
    """The panels with "field=value" settings in every cell; raises `ConfigError` where these undo what a panel compares."""
    return tuple(_with_settings(panel, settings) for panel in panels) if settings else tuple(panels)


def _with_settings(panel: Panel, settings: Sequence[str]) -> Panel:
    def changed(cells: Iterable[Config]) -> tuple[Config, ...]:
        return tuple(cell.with_settings(settings) for cell in cells)

    def changed_groups(groups: Iterable[Group]) -> tuple[Group, ...]:
        return tuple(replace(group, cells=changed(group.cells), tuned_on=changed(group.tuned_on)) for group in groups)

    result = replace(panel, groups=changed_groups(panel.groups), clocked=changed_groups(panel.clocked))
    if len(set(result.cells)) < len(set(panel.cells)):
        raise ConfigError(f"{', '.join(settings)}: panel {panel.name} of {panel.home} compares runs that differ in this")
    return result


def trials(group: Group, scale: Scale, settings: Sequence[str] = ()) -> list[Config]:
    """Short runs of a group's cells at every learning rate; at one, where the settings say which."""
    fixed = any(setting.partition("=")[0].strip() == "learning_rate" for setting in settings)
    rates = sorted({rate for cell in group.tuned_on for rate in ([cell.learning_rate] if fixed else _rates_of(cell, scale))})
    return [
        replace(cell, learning_rate=rate, epochs=min(cell.epochs, scale.tune_epochs))
        for rate in reversed(rates)
        for cell in group.tuned_on
    ]


def _rates_of(cell: Config, scale: Scale) -> tuple[float, ...]:
    larger = cell.task == "autoencoder" and cell.optimizer != "adam"
    return (*scale.larger_rates, *scale.rates) if larger else scale.rates


def final_loss(record: Record) -> float:
    """The last training loss; infinite for a run that diverged."""
    if record.status == "diverged" or not record.points:
        return math.inf
    loss = record.points[-1].train_loss
    return loss if math.isfinite(loss) else math.inf


def tried(records: Iterable[Record]) -> dict[float, float]:
    """By learning rate, the lowest final training loss that any of these runs has."""
    lowest: dict[float, float] = {}
    for record in records:
        rate = record.config.learning_rate
        lowest[rate] = min(lowest.get(rate, math.inf), final_loss(record))
    return lowest


def choose(lowest: Mapping[float, float]) -> float | None:
    """The learning rate with the lowest final training loss, the larger of equal ones; None where all of them diverged."""
    rate = min(sorted(lowest, reverse=True), key=lambda rate: lowest[rate], default=None)
    return None if rate is None or lowest[rate] == math.inf else rate


def train(panel: Panel, scale: Scale, trainer: Trainer, settings: Sequence[str] = ()) -> None:
    """The trials of all groups, then all cells at the learning rates that these chose."""
    configs = [config for group in panel.groups for config in trials(group, scale, settings)]
    found = {record.config.key: record for record in trainer(configs, f"{panel.home} {panel.name}: learning rates")}
    rates = _rates(panel, scale, found, settings)[0]
    trainer(_rated(panel, rates), f"{panel.home} {panel.name}: {panel.title}")


def outcome(panel: Panel, scale: Scale, found: Mapping[str, Record], settings: Sequence[str] = ()) -> Outcome | None:
    """What these records (by their configurations' keys) say of a panel; None unless all of it has been run."""
    needed = [config for group in panel.groups for config in trials(group, scale, settings)]
    if any(_is_missing(found.get(config.key)) for config in needed):
        return None
    rates, losses = _rates(panel, scale, found, settings)
    if any(_is_missing(found.get(config.key)) for config in _rated(panel, rates)):
        return None
    records = {
        group.name: tuple(found[config.key] for config in _rated(replace(panel, groups=(group,)), rates))
        for group in panel.groups
    }
    return Outcome(panel, scale.name, rates, losses, records, tuple(settings))


def _rates(
    panel: Panel, scale: Scale, found: Mapping[str, Record], settings: Sequence[str]
) -> tuple[dict[str, float | None], dict[str, dict[float, float]]]:
    losses = {
        group.name: tried(found[config.key] for config in trials(group, scale, settings))
        for group in panel.groups
        if not group.like
    }
    rates = {name: choose(own) for name, own in losses.items()}
    return {group.name: rates[group.like or group.name] for group in panel.groups}, losses


def _rated(panel: Panel, rates: Mapping[str, float | None]) -> list[Config]:
    chosen = ((cell, rates[group.name]) for group in panel.groups for cell in group.cells)
    return [replace(cell, learning_rate=rate) for cell, rate in chosen if rate is not None]


def _is_missing(record: Record | None) -> bool:
    return record is None or record.status == "unfinished"
