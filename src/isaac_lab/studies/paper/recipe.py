"""What the experiments have in common: scales, panels of cells, and one learning rate for every cell of a group.

An experiment is a few panels, a panel is a few groups, and a group is cells (training runs) that share one learning rate. The
rate is chosen by short runs, at paper scale by rounds that end in whole ones (`halving.py`), and these trials are records like
all others. So what a figure shows follows from the recipe and the records alone, and can be drawn again without training.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from isaac_lab.data.files import SETS
from isaac_lab.record import Record
from isaac_lab.studies.paper.halving import searches, smaller
from isaac_lab.study import Arm, Kept, Search, decides, resolve
from isaac_lab.trial import Trial, TrialError, Value, parse
from isaac_lab.workloads.examples import VALIDATED

if TYPE_CHECKING:
    from isaac_lab.studies.paper.folder import View

#: The paper's learning rates (appendix B), largest first.
RATES = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
#: Tried beside them for auto-encoders: their loss is a mean over 784 pixels, whose gradients are so small that without these
#: every method would end at the largest rate of the list, and the comparison would be one of rates.
LARGER_RATES = (100.0, 30.0, 10.0, 3.0)
#: For Adam in place of these: as many rates, in the other direction.
SMALLER_RATES = (0.0003, 0.0001, 0.00003, 0.00001)
#: The paper's dampings: 10^-6 … 10^6.
DECADES = tuple(float(f"1e{exponent}") for exponent in range(-6, 7))
#: Where rates are tried when they are chosen by halving; of ζ every second one without the ends, for both dampings.
PLACES = DECADES[2:-2]
#: Training examples of the digits.
DIGITS = 1440
#: What "--set" may change, besides the settings of methods.
FIELDS = ("epochs", "batch", "width", "data", "examples", "seed")
SETTINGS = ("learning_rate", "damping", "output_damping", "curvature", "layers")


@dataclass(frozen=True)
class Scale:
    """How much of the paper is run."""

    name: str
    epochs: int
    tune_epochs: int  # of a trial, which chooses the learning rate
    dampings: tuple[float, ...]  # λ_a and λ_g of a grid; λ_g is also ∞
    tuned_on: tuple[float, ...]  # those of them that the trials of a grid use
    #: Learning rates to choose from, and more of them for auto-encoders, but for Adam, which does not see a gradient's size.
    rates: tuple[float, ...] = RATES
    larger_rates: tuple[float, ...] = LARGER_RATES
    #: Runs of each cell that a figure shows with a spread; of every cell, where the command line asks for them, not 0.
    seeds: int = 3
    all_seeds: int = 0
    small: bool = False  # digits of 8 × 8 and networks an eighth as wide, in place of the paper's
    rounds: int = 10  # how often the methods take turns when their steps are timed
    halving: bool = False  # whether rates are chosen by successive halving, in place of trials of one length


_THREE = (1e-2, 1.0, 1e2)
#: The smallest scale that is run without data and within a minute; one for a look; and everything as printed.
SCALES: Mapping[str, Scale] = {
    "smoke": Scale("smoke", 5, 1, _THREE, _THREE, (1.0, 0.1, 0.01), (10.0,), seeds=2, small=True, rounds=3),
    "quick": Scale("quick", 4, 1, DECADES[::2], DECADES[::2]),
    "paper": Scale("paper", 40, 2, DECADES, DECADES[::2], halving=True),
}


@dataclass(frozen=True)
class Group:
    """Cells that share one learning rate, still to be decided: a sector of a grid, or a curve with its seeds."""

    name: str
    cells: tuple[Trial, ...]
    #: The cells that try the learning rates, or the group whose learning rate this one takes instead.
    tuned_on: tuple[Trial, ...] = ()
    like: str = ""


@dataclass(frozen=True)
class Panel:
    """One part of a figure: "a", "b", … as in the paper where it has one."""

    name: str
    title: str
    groups: tuple[Group, ...]
    home: str  # the experiment whose records hold it
    #: Groups whose steps are timed on one CPU thread, for an axis in seconds; ratios are relative to the first.
    clocked: tuple[Group, ...] = ()

    @property
    def cells(self) -> tuple[Trial, ...]:
        """All runs."""
        return tuple(cell for group in self.groups for cell in group.cells)


@dataclass(frozen=True)
class Outcome:
    """What a panel's records say."""

    panel: Panel
    scale: str
    rates: Mapping[str, float | None]  # by group: the learning rate chosen, None where all of them diverged
    #: By group: the final training loss that each learning rate reached in its trials; infinite where all diverged.
    tried: Mapping[str, Mapping[float, float]]
    #: By group, one record for each cell, in their order; empty where no learning rate was left.
    records: Mapping[str, tuple[Record, ...]]
    settings: tuple[str, ...] = ()  # "field=value" that were not the recipe's

    @property
    def label(self) -> str:
        """The scale, with the settings that are not its own."""
        return f"{self.scale} with {', '.join(self.settings)}" if self.settings else self.scale

    @property
    def smaller(self) -> int:
        """How many runs have a smaller rate than their group, because they diverge with that."""
        return sum(own.trial.learning_rate != self.rates[name] for name, records in self.records.items() for own in records)

    def all(self) -> list[Record]:
        """The records of all groups."""
        return [record for records in self.records.values() for record in records]


@dataclass(frozen=True)
class Experiment:
    """A figure or table of the paper; `report.paper` draws it."""

    id: str
    name: str
    shows: str
    panels: Callable[[Scale], tuple[Panel, ...]] = lambda scale: ()
    executor: Literal["ensemble", "local"] = "local"  # unless the command line says otherwise
    #: What there is to do besides panels: the times of steps, for Table 2; all of Table 1 and Figure 6.
    measure: Callable[["View"], None] = lambda view: None
    summary: Callable[["View"], dict[str, Any]] | None = None  # what pages and claims need of it, where there are no panels


def classifier(scale: Scale, width: int, method: str = "sgd", **settings: Value) -> Trial:
    """The paper's network of five linear layers on MNIST, batch 60."""
    own = max(8, width // 8) if scale.small else width
    usual = 50 if scale.small else 400
    trial = Trial("mnist-mlp", method, tuple(settings.items()), (("width", own),) if own != usual else (), small=scale.small)
    return lasting(trial, scale.epochs)


def autoencoder(scale: Scale, data: str = "mnist", method: str = "sgd", batch: int = 60, **settings: Value) -> Trial:
    """The paper's auto-encoder, 784-1000-500-30-500-1000-784."""
    name = {"mnist": "mnist-autoencoder", "fashion-mnist": "fashion-autoencoder"}[data]
    variant = (("batch", batch),) if batch != 60 else ()
    return lasting(Trial(name, method, tuple(settings.items()), variant, small=scale.small), scale.epochs)


def lasting(trial: Trial, epochs: int) -> Trial:
    """A run of so many epochs, measured after each."""
    usual = "digits" if trial.small else "fashion-mnist" if trial.workload.startswith("fashion") else "mnist"
    name = str(trial.get("data", usual))
    there = DIGITS if name == "digits" else SETS[name].examples[0] if name in SETS else 0
    there -= there // VALIDATED if trial.split == "validation" else 0
    steps = epochs * ((int(trial.get("examples", 0)) or there) // int(trial.get("batch", 60)))
    return replace(trial, steps=max(1, steps), points=epochs)


def conditioned(base: Trial, inputs: float, outputs: float, curvature: str = "sampled") -> Trial:
    """The same run with these dampings; infinite ones are not there."""
    own: dict[str, Value] = {} if math.isinf(inputs) else {"damping": inputs}
    if math.isfinite(outputs):
        own |= {"output_damping": outputs} | ({"curvature": curvature} if curvature != "sampled" else {})
    return replace(base, method=f"{base.method}+isaac").having(**own) if own else base


def over_seeds(trial: Trial, seeds: int) -> tuple[Trial, ...]:
    """The same run from several seeds."""
    return tuple(replace(trial, seed=trial.seed + number) for number in range(seeds))


def tuned(name: str, trial: Trial, seeds: int = 1, *, like: str = "") -> Group:
    """A curve: one run over seeds, with a learning rate of its own, chosen at the first seed, or that of another group."""
    return Group(name, over_seeds(trial, seeds), () if like else (trial,), like)


def grid(base: Trial, scale: Scale, curvature: str = "sampled") -> tuple[Group, ...]:
    """The three sectors of the paper's grids: λ_a × λ_g for ζ, λ_a for ζ*, and the gradient in the corner."""
    seeds, every, some, none = scale.all_seeds or 1, scale.dampings, scale.tuned_on, (math.inf,)
    square, several = some, 1
    if scale.halving:
        # Nine places in each sector.
        square, some, several = PLACES[2:-2:2], PLACES, len(PLACES)

    def cells(inputs: Sequence[float], outputs: Sequence[float], count: int = 1) -> tuple[Trial, ...]:
        pairs = product(inputs, outputs)
        return tuple(cell for pair in pairs for cell in over_seeds(conditioned(base, *pair, curvature), count))

    return (
        Group("zeta", cells(every, every, seeds), cells(square, square)),
        Group("zeta_star", cells(every, none, seeds), cells(some, none)),
        Group("gradient", cells(none, none, seeds), cells(none, none, several)),
    )


def selected(panels: Sequence[Panel], settings: Sequence[str]) -> tuple[Panel, ...]:
    """The panels with "name=value" settings in every cell; raises `TrialError` where these undo what a panel compares."""
    if not settings:
        return tuple(panels)
    values = dict(map(parse, settings))

    def changed(groups: Iterable[Group]) -> tuple[Group, ...]:
        cells = ([tuple(_changed(cell, values) for cell in own) for own in (group.cells, group.tuned_on)] for group in groups)
        return tuple(replace(group, cells=own, tuned_on=tried) for group, (own, tried) in zip(groups, cells, strict=True))

    result = tuple(replace(panel, groups=changed(panel.groups), clocked=changed(panel.clocked)) for panel in panels)
    for panel, own in zip(panels, result, strict=True):
        if len(set(own.cells)) < len(set(panel.cells)):
            raise TrialError(f"{', '.join(settings)}: panel {panel.name} of {panel.home} compares runs that differ in this")
    return result


def _changed(cell: Trial, values: Mapping[str, Any]) -> Trial:
    for name, value in values.items():
        if name not in (*FIELDS, *SETTINGS):
            raise TrialError(f"there is no setting {name!r}; there are {', '.join((*FIELDS, *SETTINGS))}")
        if name in FIELDS and name != "data" and (not isinstance(value, int) or isinstance(value, bool)):
            raise TrialError(f"{name} must be a whole number, got {value!r}")
    if (epochs := values.get("epochs", cell.points)) < 1:
        raise TrialError(f"epochs must be >= 1, got {epochs}")
    own = {name: value for name, value in values.items() if name in ("batch", "width", "data", "examples")}
    # A method that has no such number stays as it is: the gradient has no damping.
    there = {n: v for n, v in values.items() if n in SETTINGS and (n == "learning_rate" or n in dict(cell.settings))}
    return lasting(replace(cell.varied(**own).having(**there), seed=values.get("seed", cell.seed)), epochs)


def trials(group: Group, scale: Scale) -> list[Trial]:
    """Short runs of a group's cells at every learning rate, the largest first; at one, where the settings say which."""
    rates = sorted({rate for cell in group.tuned_on for rate in _rates_of(cell, scale)})
    return [
        lasting(cell.having(learning_rate=rate), min(cell.points, scale.tune_epochs))
        for rate in reversed(rates)
        for cell in group.tuned_on
    ]


def _rates_of(cell: Trial, scale: Scale) -> tuple[float, ...]:
    if "learning_rate" in dict(cell.settings):
        return (cell.learning_rate,)
    if not cell.workload.endswith("autoencoder"):
        return scale.rates
    if not cell.method.startswith("adam"):
        return (*scale.larger_rates, *scale.rates)
    return (*scale.rates, *SMALLER_RATES) if scale.halving else scale.rates


#: The last training loss; infinite for a run that diverged.
final_loss = decides("train_loss")


def arms(panel: Panel, scale: Scale) -> dict[str, Arm]:
    """By group: a learning rate is chosen, of all cells together, and all cells are run with it."""
    by_name = {group.name: group for group in panel.groups}

    def arm(group: Group) -> Arm:
        tuned = by_name[group.like or group.name]
        rates, candidates = _rates_of(tuned.cells[0], scale), trials(tuned, scale)
        halving = scale.halving and len(rates) > 1
        search = searches(rates, tuned.tuned_on, lasting) if halving else (Search(lambda _: candidates, final_loss),)
        return Arm(
            f"{panel.name}/{group.name}",
            lambda best: [cell.having(learning_rate=best.learning_rate) for cell in group.cells] if best else [],
            search,
            # One rate for a whole sector diverges in some of its cells; a curve has a rate of its own.
            smaller if halving and len(group.tuned_on) > 1 else lambda _: (),
        )

    return {name: arm(group) for name, group in by_name.items()}


def outcome(panel: Panel, scale: Scale, kept: Kept, settings: Sequence[str] = ()) -> Outcome | None:
    """What the records say of a panel; None unless all of it has been run."""
    found = {name: resolve(arm, kept) for name, arm in arms(panel, scale).items()}
    if not all(result.whole for result in found.values()):
        return None
    rates = {name: None if result.best is None else result.best.learning_rate for name, result in found.items()}
    losses = {group.name: _by_rate(found[group.name].tried, kept) for group in panel.groups if not group.like}
    records = {name: result.runs for name, result in found.items()}
    return Outcome(panel, scale.name, rates, losses, records, tuple(settings))


def _by_rate(tried: Sequence[Iterable[Trial]], kept: Kept) -> dict[float, float]:
    """By learning rate, the lowest value that any of the longest runs has."""
    longest = max(trial.steps for values in tried for trial in values)
    ends = {t: final_loss(own) for values in tried for t in values if t.steps == longest and (own := kept.get(t)) is not None}
    rates = dict.fromkeys(trial.learning_rate for trial in ends)
    return {rate: min(value for trial, value in ends.items() if trial.learning_rate == rate) for rate in rates}
