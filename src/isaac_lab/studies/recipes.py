"""The recipe suite: public training scripts as they are, the same with one line, and as they are at the best of five rates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from isaac_lab.products import threads
from isaac_lab.record import Store
from isaac_lab.studies import StudyError, finals, hashed, refuse_unknown, rules
from isaac_lab.studies.calls import Means, clock, each_with_data, train
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


SCALES: Mapping[str, Scale] = {
    "smoke": Scale(True, 1, 2, 0.01),
    "quick": Scale(False, 1, 5, 0.2),
    "standard": Scale(False, 10, 7, 0.2),
}
#: After the name of a method: with `isaac.attach(model)` before training, and nothing else.
LINE = "+line"
#: The script as it is; with the line; as it is, at the best of five rates.
ARMS = ("plain", "line", "tuned")


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


_KNOWN = rules("recipes.toml")
RULES = Rules(**_KNOWN["rules"])
RECIPES: Mapping[str, Recipe] = {
    name: Recipe(name, **{**own, **{scale: Budget(**own[scale]) for scale in SCALES}})
    for name, own in _KNOWN["recipes"].items()
}


def arms(recipe: Recipe, scale: str, network: str = "") -> dict[str, Arm]:
    """Plain, with the line, and plain at the best of five rates, by name.

    The `network` is what the workload says is trained, where it does not decide that alone.
    """
    how, budget, known = SCALES[scale], recipe.budget(scale), _KNOWN["recipes"][recipe.name]
    shared = {key: own for key, own in known.items() if key not in SCALES}
    variant = {**recipe.variant, **budget.variant, **({"model": network} if network else {})}
    own = Trial(recipe.workload, recipe.method, schedule=recipe.schedule, steps=budget.steps, small=how.small)
    own = replace(own, rules=hashed(_KNOWN["rules"], recipe.name, shared, scale, known[scale]), seed=RULES.search_seed)
    own = replace(own, points=min(how.points, budget.steps)).having(**{**recipe.settings, **budget.settings}).varied(**variant)
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
    refuse_unknown(names, RECIPES, "recipe")
    return [recipe for name, recipe in RECIPES.items() if not names or name in names]


def run(recipes: Sequence[Recipe], store: Store, scale: str, means: Means) -> Store:
    """Train what is due, and time the steps. Where a recipe's data are missing the others go on.

    One recipe after the other; several workers train all of them together, so that none waits for a recipe's last run.

    Raises:
        DataError: Of the only recipe.
        StudyError: There is none whose data are there.
    """
    call, how = means.call, SCALES[scale]
    if (before := store.about.get("device")) not in (None, call.device) and store.records():
        raise StudyError(f"{store.folder} has recipes on {before}; name another --out for {call.device}")

    def network(recipe: Recipe) -> str:
        """What is trained, where the environment decides that."""
        return load(arms(recipe, scale)["plain"].finals(None)[0], device=call.device, folder=call.folder).network

    with means.writing(store), threads(means.threads):
        networks = each_with_data({recipe.title: partial(network, recipe) for recipe in recipes}, means)
        there = [recipe for recipe in recipes if recipe.title in networks]
        if not there:
            raise StudyError("none of the recipes has its data; name a folder that has them with --data")
        for some in [there] if call.executor == "processes" else [[recipe] for recipe in there]:
            own = {recipe.name: arms(recipe, scale, networks[recipe.title]) for recipe in some}
            known = store.about.get("networks", {}) | {r.name: networks[r.title] for r in some if networks[r.title]}
            about = {"id": "recipes", "scale": scale, "device": call.device, "networks": known}
            title = f"{len(some)} recipes" if len(some) > 1 else some[0].title
            train([(title, [arm for every in own.values() for arm in every.values()])], store, means, about, ",".join(own))
            for recipe in some:
                timed = {name: own[recipe.name][name].finals(None)[0] for name in ARMS[:2]}
                said = f"{recipe.title}: the time of a step"
                clock(recipe.name, timed, store, means, said, rounds=how.rounds, turn=how.turn)
    return store


def results(store: Store, scale: str) -> dict[str, dict[str, Any]]:
    """By recipe and arm what the records say; recipes without a record are left out."""
    networks = store.about.get("networks", {})
    found = {
        name: {arm: resolve(own, store) for arm, own in arms(recipe, scale, networks.get(name, "")).items()}
        for name, recipe in RECIPES.items()
    }
    return {name: own for name, own in found.items() if any(result.runs for result in own.values())}
