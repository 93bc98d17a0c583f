"""What seeds show: mean and spread of a sample, and whether samples differ, by Welch's t-test."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev, variance
from typing import Any

from scipy import stats

__all__ = ["LEVEL", "Difference", "against", "contrast", "sample"]

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
    value = math.fsum(weight * fmean(sample) for sample, weight in zip(samples, weights, strict=True))
    parts = [weight**2 * variance(sample) / len(sample) for sample, weight in zip(samples, weights, strict=True)]
    error = math.sqrt(math.fsum(parts))
    if not error:
        return Difference(value, 0.0 if value else 1.0)
    freedom = error**4 / math.fsum(part**2 / (len(sample) - 1) for sample, part in zip(samples, parts, strict=True))
    return Difference(value, float(2 * stats.t.sf(abs(value) / error, freedom)))


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
