"""What seeds show: mean and spread of a sample, and whether samples differ, by Welch's t-test."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev, variance
from typing import Any

from scipy import stats

#: A difference counts below this p.
LEVEL = 0.05


def sample(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean and standard deviation of those that are there and finite, how many these are, and all of them."""
    there = [value for value in values if value is not None and math.isfinite(value)]
    return {
        "mean": fmean(there) if there else None,
        "std": stdev(there) if len(there) > 1 else None,
        "n": len(there),
        "values": list(values),
    }


@dataclass(frozen=True)
class Difference:
    """A difference of means, and the two-sided p at which the seeds show one."""

    value: float
    p: float

    @property
    def ahead(self) -> bool:
        """Whether the first is shown to be higher."""
        return self.value > 0 and self.p < LEVEL

    @property
    def behind(self) -> bool:
        """Whether the first is shown to be lower."""
        return self.value < 0 and self.p < LEVEL

    @property
    def words(self) -> str:
        """The p, and whether it shows anything."""
        return f"p = {self.p:.2g}" + ("" if self.p < LEVEL else ", no difference shown")


def contrast(*samples: Sequence[float], weights: Sequence[float] = (1.0, -1.0)) -> Difference:
    """The weighted sum of the samples' means, with Welch's p that it is zero; each sample needs two values at least."""
    value, error, freedom = _welch(samples, weights)
    if not error:
        return Difference(value, 0.0 if value else 1.0)
    return Difference(value, float(2 * stats.t.sf(abs(value) / error, freedom)))


def paired(first: Sequence[float], second: Sequence[float]) -> Difference:
    """The mean difference of values that belong together, with the two-sided p of the paired t-test."""
    apart = [own - other for own, other in zip(first, second, strict=True)]
    if not variance(apart):
        return Difference(fmean(apart), 0.0 if fmean(apart) else 1.0)
    return Difference(fmean(apart), float(stats.ttest_1samp(apart, 0.0).pvalue))


def exceeds(first: Sequence[float], second: Sequence[float], by: float) -> float:
    """Welch's one-sided p: how likely such samples are where the first mean is not above the second one plus `by`."""
    value, error, freedom = _welch((first, second), (1.0, -1.0))
    if not error:
        return 0.0 if value > by else 1.0
    return float(stats.t.sf((value - by) / error, freedom))


def interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Where the difference of the means lies, by Welch, at 1 − `LEVEL`."""
    value, error, freedom = _welch((first, second), (1.0, -1.0))
    half = float(stats.t.ppf(1 - LEVEL / 2, freedom)) * error if error else 0.0
    return value - half, value + half


def holm(found: Mapping[str, float]) -> dict[str, float]:
    """Each p for that many tests made at once (Holm 1979): the smallest times their number, the next times one less."""
    adjusted, highest = {}, 0.0
    for number, (name, p) in enumerate(sorted(found.items(), key=lambda item: item[1])):
        highest = max(highest, min(1.0, p * (len(found) - number)))
        adjusted[name] = highest
    return adjusted


def _welch(samples: Sequence[Sequence[float]], weights: Sequence[float]) -> tuple[float, float, float]:
    """The weighted sum of the means, its standard error, and the degrees of freedom of that; none where there is no error."""
    value = math.fsum(weight * fmean(sample) for sample, weight in zip(samples, weights, strict=True))
    parts = [weight**2 * variance(sample) / len(sample) for sample, weight in zip(samples, weights, strict=True)]
    error = math.sqrt(math.fsum(parts))
    if not error:
        return value, 0.0, 0.0
    return value, error, error**4 / math.fsum(part**2 / (len(own) - 1) for own, part in zip(samples, parts, strict=True))


def against(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> list[str]:
    """Notes below a table whose first row is the plain gradient: Welch's p of every other row, column by column."""
    plain, *others = rows
    notes = []
    for row in others:
        pairs = zip(columns, row["cells"], plain["cells"], strict=True)
        known = [(name, cell["values"], other["values"]) for name, cell, other in pairs if cell and other]
        shown = [f"{name} {contrast(own, base).p:.2g}" for name, own, base in known if min(len(own), len(base)) > 1]
        notes += [f"p of {row['label']} against {plain['label']} (Welch, over seeds): {', '.join(shown)}."] if shown else []
    return [*notes, f"From p = {LEVEL} on no difference is shown."] if notes else []
