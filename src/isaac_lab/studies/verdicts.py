"""What the seeds say of each recipe: better, not worse than its margin, worse, or undecided."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

from isaac_lab.record import Store
from isaac_lab.stats import contrast, exceeds, holm, interval
from isaac_lab.studies.recipes import ARMS, RECIPES, RULES, Recipe, results
from isaac_lab.study import Result
from isaac_lab.times import seconds

Verdict = Literal["better", "not worse", "undecided", "worse", "diverged", "plain diverged", "not run whole"]


@dataclass(frozen=True)
class Sample:
    """One arm's runs at their end: the metric of those that finished, means of the training and the test loss."""

    values: tuple[float, ...]
    diverged: int
    losses: tuple[float, float]
    whole: bool

    @property
    def mean(self) -> float:
        """NaN where none finished."""
        return fmean(self.values) if self.values else math.nan

    @property
    def deviation(self) -> float:
        """NaN where fewer than two finished."""
        return stdev(self.values) if len(self.values) > 1 else math.nan


@dataclass(frozen=True)
class Standing:
    """Where a recipe stands at a scale."""

    recipe: Recipe  # which
    scale: str  # where
    samples: Mapping[str, Sample]  # by the name of an arm
    rate: float | None  # the best of five learning rates; None where there is none yet
    edge: bool  # whether no lower or no higher one was tried
    verdict: Verdict  # in a word
    p_better: float  # two-sided, of the difference between with the line and plain; NaN where it cannot be tested
    p_not_worse: float  # one-sided against the margin, adjusted for all recipes
    gain: tuple[float, float, float]  # how much better the line is, and from where to where that is likely
    tuned: tuple[float, float, float]  # the same of plain at the best of five rates
    p_tuned: float  # two-sided, of the difference between with the line and that
    step: tuple[float, float] | None  # seconds of a step, plain and with the line; none where they were not timed

    @property
    def margin(self) -> float:
        """How much worse counts as harm."""
        return self.recipe.budget(self.scale).margin


def standings(store: Store, scale: str) -> list[Standing]:
    """Of all recipes that have records, in the order of the rules."""
    found, timed = results(store, scale), {name: seconds(own) for name, own in store.times().items()}
    samples = {name: {arm: _sample(RECIPES[name], own[arm]) for arm in ARMS} for name, own in found.items()}
    signs = {name: 1 if RECIPES[name].higher else -1 for name in samples}
    values = {name: [[signs[name] * value for value in own[arm].values] for arm in ARMS] for name, own in samples.items()}
    # Those of which plain and with the line were run whole and finished in all seeds.
    tested = {name: [own[arm] for arm in ARMS[:2]] for name, own in samples.items()}
    tested = {n: both for n, both in tested.items() if all(x.whole and not x.diverged and len(x.values) > 1 for x in both)}
    able = {name: RECIPES[name].budget(scale).margin for name in tested}
    not_worse = holm({name: exceeds(values[name][1], values[name][0], -margin) for name, margin in able.items()})
    worse = holm({name: exceeds(values[name][0], values[name][1], margin) for name, margin in able.items()})
    standing = []
    for name, own in samples.items():
        plain, line, tuned = values[name]
        better = contrast(line, plain) if name in able else None
        best, rates = found[name]["tuned"].best, [trial.learning_rate for trial in found[name]["tuned"].tried[0]]
        p_not_worse = not_worse.get(name, math.nan)
        standing.append(
            Standing(
                recipe=RECIPES[name],
                scale=scale,
                samples=own,
                rate=best.learning_rate if best else None,
                edge=best is not None and best.learning_rate in (min(rates), max(rates)),
                verdict=_verdict(own, better is not None and better.ahead, p_not_worse, worse.get(name, math.nan)),
                p_better=better.p if better else math.nan,
                p_not_worse=p_not_worse,
                gain=_gain(line, plain),
                tuned=_gain(tuned, plain),
                p_tuned=contrast(line, tuned).p if min(len(line), len(tuned)) > 1 else math.nan,
                step=(timed[name]["plain"], timed[name]["line"]) if name in timed else None,
            )
        )
    return standing


def summed_up(found: Sequence[Standing]) -> str:
    """How many recipes have each verdict, in a sentence."""
    counted = Counter(own.verdict for own in found).most_common()
    parts = ", ".join(f"{count} {verdict}" for verdict, count in counted)
    return f"{len(found)} recipes: {parts}." if found else "No recipe has been run."


def _sample(recipe: Recipe, found: Result) -> Sample:
    ended = [record for record in found.runs if math.isfinite(record.final(recipe.metric))]
    train, test = (fmean(record.final(name) for record in ended) if ended else math.nan for name in ("train_loss", "test_loss"))
    values = tuple(record.final(recipe.metric) for record in ended)
    return Sample(values, len(found.runs) - len(ended), (train, test), found.whole and bool(found.runs))


def _verdict(own: Mapping[str, Sample], better: bool, not_worse: float, worse: float) -> Verdict:
    if not all(own[arm].whole for arm in ARMS[:2]):
        return "not run whole"
    if own["line"].diverged:
        return "diverged"
    if own["plain"].diverged:
        return "plain diverged"
    if better:
        return "better"
    if not_worse < RULES.level:
        return "not worse"
    return "worse" if worse < RULES.level else "undecided"


def _gain(first: Sequence[float], plain: Sequence[float]) -> tuple[float, float, float]:
    if min(len(first), len(plain)) < 2:
        return math.nan, math.nan, math.nan
    return fmean(first) - fmean(plain), *interval(first, plain)
