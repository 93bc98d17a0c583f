"""The recipe suite: public training scripts as they are, the same with one line, and as they are at the best of five rates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from isaac_lab.data.files import DataError
from isaac_lab.products import threads
from isaac_lab.record import Store
from isaac_lab.studies import finals, hashed, rules
from isaac_lab.studies.calls import Means, clock, train
from isaac_lab.study import Arm, Search, decides, resolve
from isaac_lab.trial import Trial
from isaac_lab.workload import load


@dataclass(frozen=True)
class Scale:
    """How much is run: `points` of measurement, and when steps are timed, `rounds` of turns of so many seconds."""

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
    """A recipe at a scale: how long it runs, how much worse counts as harm, and settings and variant besides its own."""

    steps: int
    margin: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    variant: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """A public training script; `source` says whose, `metric` is the quantity of the workload that decides."""

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


def _recipe(name: str, own: Mapping[str, Any]) -> Recipe:
    budgets: dict[str, Any] = {scale: Budget(**own[scale]) for scale in SCALES}
    return Recipe(name, **{**own, **budgets})


_KNOWN = rules("recipes.toml")
RULES = Rules(**_KNOWN["rules"])
RECIPES: Mapping[str, Recipe] = MappingProxyType({name: _recipe(name, own) for name, own in _KNOWN["recipes"].items()})


def _hash(name: str, scale: str) -> str:
    own = _KNOWN["recipes"][name]
    return hashed(_KNOWN["rules"], name, {key: own[key] for key in own if key not in SCALES}, scale, own[scale])


def arms(recipe: Recipe, scale: str, network: str = "") -> dict[str, Arm]:
    """Plain, with the line, and plain at the best of five rates, by name.

    The `network` is what the workload says is trained, where it does not decide that alone.
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
        rules=_hash(recipe.name, scale),
    )
    rates = [own.having(learning_rate=float(f"{own.learning_rate * share:.6g}")) for share in RULES.rates[scale]]
    validated = [replace(trial, split="validation") for trial in rates]
    search = Search(lambda _: validated, decides(recipe.metric, higher=recipe.higher))
    line, seeds = replace(own, method=own.method + LINE), range(RULES.first_seed, RULES.first_seed + RULES.seeds[scale])
    return {
        "plain": Arm(f"{recipe.name} plain", lambda _: finals(own, seeds)),
        "line": Arm(f"{recipe.name} with the line", lambda _: finals(line, seeds)),
        "tuned": Arm(f"{recipe.name} at its best rate", lambda best: finals(best, seeds), (search,)),
    }


def chosen(names: Sequence[str]) -> list[Recipe]:
    """The recipes of these names, all unless there are any."""
    for name in names:
        if name not in RECIPES:
            raise RecipeError(f"there is no recipe {name!r}; there are {', '.join(RECIPES)}")
    return [recipe for name, recipe in RECIPES.items() if not names or name in names]


def run(recipes: Sequence[Recipe], store: Store, scale: str, means: Means) -> Store:
    """Train what is due, and time the steps. Where a recipe's data are missing the others go on.

    One recipe after the other; several workers train all of them together, so that none waits for a recipe's last run.

    Raises:
        DataError: Of the only recipe.
        RecipeError: There is none whose data are there.
    """
    device, before = means.call.device, store.about.get("device")
    if before not in (None, device) and store.records():
        raise RecipeError(f"{store.folder} has recipes on {before}; name another --out for {device}")
    with means.writing(store), threads(means.threads):
        networks = _networks(recipes, scale, means)
        there = [recipe for recipe in recipes if recipe.name in networks]
        if not there:
            raise RecipeError("none of the recipes has its data; name a folder that has them with --data")
        for some in [there] if means.call.executor == "processes" else [[recipe] for recipe in there]:
            _run(some, networks, store, scale, means)
    return store


def _networks(recipes: Sequence[Recipe], scale: str, means: Means) -> dict[str, str]:
    """What is trained, where the environment decides that; of the recipes whose data are there: they are loaded here."""
    call, found = means.call, {}
    for recipe in recipes:
        plain = arms(recipe, scale)["plain"].finals(None)[0]
        try:
            found[recipe.name] = load(plain, device=call.device, folder=call.folder).network
        except DataError as error:
            if len(recipes) == 1:
                raise
            means.say(f"{recipe.title} is left out: {error}")
    return found


def _run(recipes: Sequence[Recipe], networks: Mapping[str, str], store: Store, scale: str, means: Means) -> None:
    """Train and time some together."""
    own, how = {recipe.name: arms(recipe, scale, networks[recipe.name]) for recipe in recipes}, SCALES[scale]
    known = store.about.get("networks", {}) | {name: networks[name] for name in own if networks[name]}
    about = {"id": "recipes", "scale": scale, "device": means.call.device, "networks": known}
    title = f"{len(recipes)} recipes" if len(recipes) > 1 else recipes[0].title
    train([(title, [arm for some in own.values() for arm in some.values()])], store, means, about, ",".join(own))
    for recipe in recipes:
        timed = {name: own[recipe.name][name].finals(None)[0] for name in ARMS[:2]}
        clock(recipe.name, timed, store, means, f"{recipe.title}: the time of a step", rounds=how.rounds, turn=how.turn)


def results(store: Store, scale: str) -> dict[str, dict[str, Any]]:
    """By recipe and arm what the records say; recipes without a record are left out."""
    networks = store.about.get("networks", {})
    found = {
        name: {arm: resolve(own, store) for arm, own in arms(recipe, scale, networks.get(name, "")).items()}
        for name, recipe in RECIPES.items()
    }
    return {name: own for name, own in found.items() if any(result.runs for result in own.values())}
