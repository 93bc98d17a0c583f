"""The recipe suite: public training scripts as they are, the same with one line, and as they are at the best of five rates."""

import hashlib
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from isaac_lab import times
from isaac_lab.data.files import DataError
from isaac_lab.products import threads
from isaac_lab.record import Record, Store
from isaac_lab.studies.calls import Means, calling, trainer
from isaac_lab.study import Arm, Search, resolve, settle
from isaac_lab.trial import Trial
from isaac_lab.workload import load


@dataclass(frozen=True)
class Scale:
    """How much is run.

    Args:
        small: Whether networks have their small form.
        points: How often a run is measured.
        rounds: How often steps take turns when they are timed.
        turn: Seconds of a turn.
    """

    small: bool
    points: int
    rounds: int
    turn: float


SCALES: Mapping[str, Scale] = MappingProxyType(
    {"smoke": Scale(True, 1, 2, 0.01), "quick": Scale(False, 1, 5, 0.2), "standard": Scale(False, 10, 7, 0.2)}
)
#: After the name of a method: with `isaac.attach(model)` before training, and nothing else.
LINE = "+line"
#: The script as it is; with the line; as it is, at the best of five rates.
ARMS = ("plain", "line", "tuned")


class RecipeError(Exception):
    """What cannot be run or drawn; the message says why and what to do."""


@dataclass(frozen=True)
class Rules:
    """What all recipes have in common: see the file; by scale where it says so."""

    seeds: Mapping[str, int]
    first_seed: int
    search_seed: int
    level: float
    rates: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class Budget:
    """A recipe at a scale.

    Args:
        steps: Of a run.
        margin: How much worse counts as harm.
        settings: Besides the recipe's own.
        variant: Besides the recipe's own.
    """

    steps: int
    margin: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    variant: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """A public training script.

    Args:
        name: In the file and on the command line.
        title: For people.
        source: Whose script it is, and where it differs from it.
        workload: What is trained.
        method: With what.
        settings: The script's own.
        metric: What decides, a quantity of the workload.
        smoke: At this scale, as the two others.
        higher: Whether more of the metric is better.
        schedule: Of the learning rate.
        variant: Of the workload.
    """

    name: str
    title: str
    source: str
    workload: str
    method: str
    settings: Mapping[str, Any]
    metric: str
    smoke: Budget
    quick: Budget
    standard: Budget
    higher: bool = False
    schedule: str = "constant"
    variant: Mapping[str, Any] = field(default_factory=dict)

    def budget(self, scale: str) -> Budget:
        """At a scale."""
        found: Budget = getattr(self, scale)
        return found

    def value(self, record: Record) -> float:
        """What decides in a search: lower is better, infinite where the run diverged."""
        found = record.final(self.metric)
        return -found if self.higher and math.isfinite(found) else found


def _read() -> tuple[Rules, Mapping[str, Recipe], Mapping[tuple[str, str], str]]:
    """The rules, the recipes, and the hash of what each recipe at each scale is made by."""
    text = resources.files("isaac_lab.studies").joinpath("recipes.toml").read_text(encoding="utf-8")
    known = tomllib.loads(text)
    recipes, hashes = {}, {}
    for name, own in known["recipes"].items():
        shared = {key: value for key, value in own.items() if key not in SCALES}
        budgets: dict[str, Any] = {scale: Budget(**own[scale]) for scale in SCALES}
        recipes[name] = Recipe(name, **shared, **budgets)
        for scale in SCALES:
            made_by = json.dumps([known["rules"], name, shared, scale, own[scale]], sort_keys=True)
            hashes[name, scale] = hashlib.sha256(made_by.encode()).hexdigest()[:12]
    return Rules(**known["rules"]), MappingProxyType(recipes), MappingProxyType(hashes)


RULES, RECIPES, HASHES = _read()


def arms(recipe: Recipe, scale: str, network: str = "") -> dict[str, Arm]:
    """Plain, with the line, and plain at the best of five rates, by name.

    Args:
        recipe: Of what.
        scale: A key of `SCALES`.
        network: What the workload says is trained, where it does not decide that alone.
    """
    how, budget = SCALES[scale], recipe.budget(scale)
    variant = {**recipe.variant, **budget.variant, **({"model": network} if network else {})}
    settings = {**recipe.settings, **budget.settings}
    own = Trial(
        recipe.workload,
        recipe.method,
        tuple(settings.items()),
        tuple(variant.items()),
        recipe.schedule,
        budget.steps,
        min(how.points, budget.steps),
        RULES.search_seed,
        how.small,
        rules=HASHES[recipe.name, scale],
    )
    rates = [own.having(learning_rate=float(f"{own.learning_rate * share:.6g}")) for share in RULES.rates[scale]]
    search = Search(lambda _: [replace(trial, split="validation") for trial in rates], recipe.value)
    return {
        "plain": Arm(f"{recipe.name} plain", lambda _: _seeds(own, scale)),
        "line": Arm(f"{recipe.name} with the line", lambda _: _seeds(replace(own, method=own.method + LINE), scale)),
        "tuned": Arm(f"{recipe.name} at its best rate", lambda best: _seeds(best, scale) if best else [], (search,)),
    }


def _seeds(trial: Trial, scale: str) -> list[Trial]:
    seeds = range(RULES.first_seed, RULES.first_seed + RULES.seeds[scale])
    return [replace(trial, split="test", seed=seed) for seed in seeds]


@dataclass(frozen=True)
class Request:
    """What was asked for.

    Args:
        out: Records go to OUT/SCALE.
        scale: A key of `SCALES`.
        recipes: Names; all unless given.
        means: How to train.
    """

    out: Path
    scale: str = "smoke"
    recipes: tuple[str, ...] = ()
    means: Means = field(default_factory=Means)

    @property
    def store(self) -> Store:
        """Where the records are."""
        return Store(self.out / self.scale)


def chosen(names: Sequence[str]) -> list[Recipe]:
    """The recipes of these names, all unless there are any."""
    for name in names:
        if name not in RECIPES:
            raise RecipeError(f"there is no recipe {name!r}; there are {', '.join(RECIPES)}")
    return [recipe for name, recipe in RECIPES.items() if not names or name in names]


def run(request: Request) -> Store:
    """Train what is due, recipe by recipe, and time the steps. Where a recipe's data are missing the others go on.

    Raises:
        DataError: Of the only recipe.
        RecipeError: There is none whose data are there.
    """
    store, means, recipes = request.store, request.means, chosen(request.recipes)
    before, reasons = store.about, dict[str, str]()
    if before.get("device", means.call.device) != means.call.device and store.records():
        raise RecipeError(f"{store.folder} has recipes on {before['device']}; name another --out for {means.call.device}")
    with store.writing(means.call.command) as mended, threads(int(means.call.device == "cpu")):
        for said in mended:
            means.say(said)
        for recipe in recipes:
            try:
                _run(recipe, store, request)
            except DataError as error:
                if len(recipes) == 1:
                    raise
                reasons[recipe.name] = str(error)
                means.say(f"{recipe.title} is left out: {error}")
    if len(reasons) == len(recipes):
        raise RecipeError("none of the recipes has its data; name a folder that has them with --data")
    return store


def _run(recipe: Recipe, store: Store, request: Request) -> None:
    means, scale = request.means, request.scale
    network = _network(recipe, request)
    about = store.about
    networks = about.get("networks", {}) | ({recipe.name: network} if network else {})
    own = arms(recipe, scale, network)
    shared = {"id": "recipes", "scale": scale, "device": means.call.device, "networks": networks}
    with calling(store, means, shared, recipe.name) as trained:
        settle(list(own.values()), store, trainer(store, means, trained, recipe.title))
    if recipe.name in store.times():
        return
    means.say(f"{recipe.title}: the time of a step")
    timed = {name: own[name].finals(None)[0] for name in ARMS[:2]}
    how, call = SCALES[scale], means.call
    record = times.measure(timed, device=call.device, rounds=how.rounds, turn=how.turn, folder=call.folder)
    store.add_times(recipe.name, record)


def _network(recipe: Recipe, request: Request) -> str:
    """What is trained, where the environment decides that; loads the data, and so says what is missing before any run."""
    plain = arms(recipe, request.scale)["plain"].finals(None)[0]
    return load(plain, device=request.means.call.device, folder=request.means.call.folder).network


def results(store: Store, scale: str) -> dict[str, dict[str, Any]]:
    """By recipe and arm what the records say; recipes without a record are left out."""
    networks = store.about.get("networks", {})
    found = {
        name: {arm: resolve(own, store) for arm, own in arms(recipe, scale, networks.get(name, "")).items()}
        for name, recipe in RECIPES.items()
    }
    return {name: own for name, own in found.items() if any(result.runs for result in own.values())}
