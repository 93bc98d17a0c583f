"""The demo: a small neural field is fitted to a photograph by four methods, each at the rate that a search chose for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from isaac_lab.record import Record, Store
from isaac_lab.study import Arm, Result, Search, decides, resolve
from isaac_lab.trial import Trial, Value

STEPS, POINTS, WARM_UP = 300, 12, 20
#: Of the first seed a picture is kept after so many steps.
FRAMES = (50, 100, 200, STEPS)
#: What the search is shown: another picture, another seed.
SEARCHED, SEARCH_SEED = "china", 1000


@dataclass(frozen=True)
class Method:
    """How to train; `results/demo/photograph` has the record of the search."""

    name: str  # for people
    method: str  # as `isaac_lab.method.find` knows it
    chosen: Mapping[str, float] = field(hash=False)  # by the search
    first: tuple[float, ...]  # learning rates of the first round
    fixed: Mapping[str, Value] = field(default_factory=dict, hash=False)  # what all of its runs have
    second: tuple[float, ...] = ()  # multiples of the second learning rate for the second round; with them fewer first ones

    def trial(self, seed: int) -> Trial:
        """A run that is shown."""
        return _final(self._trial(**self.chosen), seed)

    def searched(self, seeds: int) -> Arm:
        """Two rounds of search, eight rates and four near the best of them, and the runs at what they chose."""

        def candidates(found: Result | None) -> list[Trial]:
            if found is None or (best := found.best) is None:
                return [self._trial(learning_rate=rate) for rate in self.first]
            name, shares = ("second_rate", self.second) if self.second else ("learning_rate", (0.6, 1.7))
            near = [("learning_rate", 0.8), ("learning_rate", 1.3), *((name, share) for share in shares)]
            return [best, *(best.having(**{which: float(f"{best.get(which) * share:.6g}")}) for which, share in near)]

        # The first round has no best before it.
        rounds = (Search(candidates, decides("psnr", higher=True)),) * 2
        return Arm(self.name, lambda best: [_final(best, seed) for seed in range(seeds)] if best else [], rounds)

    def _trial(self, **settings: Value) -> Trial:
        made = Trial("photograph", self.method, schedule="cosine", steps=STEPS, points=1, seed=SEARCH_SEED)
        return made.having(warm_up=WARM_UP, **{**self.fixed, **settings}).varied(picture=SEARCHED)


def _final(best: Trial, seed: int) -> Trial:
    shown = replace(best, points=POINTS, seed=seed).varied(picture=None)
    return shown.having(frames=FRAMES) if seed == 0 else shown


_RATES = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128)
METHODS = (
    Method("Adam", "adam", {"learning_rate": 0.0272}, _RATES),
    Method("Adam + ISAAC", "adam+line", {"learning_rate": 0.0256}, _RATES),
    Method("Adam + ISAAC, Relative(1)", "adam+isaac", {"learning_rate": 0.032}, _RATES, {"damping": 1.0, "relative": True}),
    # Its hidden matrices want larger rates than AdamW, which trains the rest.
    Method("Muon", "muon", {"learning_rate": 0.1664}, tuple(4 * rate for rate in _RATES), {"second_rate": 0.01}, (0.4, 2.5)),
)


def arms(seeds: int) -> list[Arm]:
    """An arm for each seed: every method at one before the next, so that a slow minute of the machine strikes all of them."""
    return [Arm(f"seed {seed}", lambda _, seed=seed: [own.trial(seed) for own in METHODS]) for seed in range(seeds)]  # type: ignore[misc]


def searched(seeds: int) -> list[Arm]:
    """A method each: its search, and the runs that are shown."""
    return [method.searched(seeds) for method in METHODS]


def chosen(store: Store, seeds: int) -> tuple[Method, ...]:
    """The methods with what the search in these records chose for them."""
    best = {own: resolve(own.searched(seeds), store).best for own in METHODS}
    settings = {own: {name: float(trial.get(name, 0.0)) for name in own.chosen} for own, trial in best.items() if trial}
    return tuple(replace(own, chosen=settings.get(own, own.chosen)) for own in METHODS)


@dataclass(frozen=True)
class Summary:
    """One method: a run of each seed, and the seconds of a step."""

    method: Method
    records: Sequence[Record]
    seconds: float

    @property
    def finals(self) -> list[float]:
        """Of each seed, the PSNR at the end."""
        return [record.final("psnr") for record in self.records]


def summarize(store: Store, methods: Sequence[Method], seeds: int, seconds: Mapping[str, float]) -> list[Summary]:
    """One for each method that has ended at all seeds, in their order."""
    runs = {own.name: [record for seed in range(seeds) if (record := store.get(own.trial(seed)))] for own in methods}
    return [Summary(own, runs[own.name], seconds[own.name]) for own in methods if len(runs[own.name]) == seeds]
