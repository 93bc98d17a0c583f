"""What a claim is, the records that it is checked on, at the largest scale there is, and what a check can say of them."""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from isaac_lab.bench.published import DAMPING
from isaac_lab.records import read
from isaac_lab.studies.paper import EXPERIMENTS, folder
from isaac_lab.studies.paper.recipe import SCALES, Outcome

#: Scales that prove something, the largest first.
COUNTED = ("paper", "quick")


class Verdict(enum.StrEnum):
    """What the records say of a claim."""

    HOLDS = "holds"
    FAILS = "does not hold"
    UNDECIDED = "no difference shown"
    UNKNOWN = "not enough data"


@dataclass(frozen=True)
class Finding:
    """A verdict, the figures behind it, and the scale (or the benchmark) that they come from."""

    verdict: Verdict
    figures: str
    scale: str = ""


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, as `claims.toml` has it: its number, the experiment, what is checked and why, and the check."""

    number: str
    text: str
    about: str
    test: str
    check: "Check"


def unknown(what: str) -> Finding:
    """There is nothing to decide it by."""
    return Finding(Verdict.UNKNOWN, what)


def decide(holds: bool, figures: str, scale: str) -> Finding:
    """One way or the other."""
    return Finding(Verdict.HOLDS if holds else Verdict.FAILS, figures, scale)


class Evidence:
    """All records, in the directories that `isaac-newton reproduce` and `isaac-newton bench` wrote to."""

    def __init__(self, records: Path, bench: Path) -> None:
        self.records = records
        #: The panel at the largest scale at which it has been run whole; smoke does not count.
        self.outcome: Callable[[str, str], Outcome | None] = cache(
            lambda experiment, panel: next((o for view in self.views(experiment) if (o := view.outcome(panel))), None)
        )
        #: What is there of an experiment at a scale.
        self.view: Callable[[str, str], folder.View] = cache(
            lambda experiment, scale: folder.view(EXPERIMENTS[experiment], records, SCALES[scale])
        )
        #: What Table 1 and Figure 6 say of themselves at a scale, also smoke; empty where there is nothing.
        self.summary = cache(self._read_summary)
        self.benchmarks = read(bench) if bench.is_dir() else {}

    def views(self, experiment: str) -> list[folder.View]:
        """What is there of an experiment at each scale that counts."""
        return [self.view(experiment, scale) for scale in COUNTED]

    def summaries(self, experiment: str) -> dict[str, dict[str, Any]]:
        """By scale, the largest first, what Table 1 and Figure 6 say of themselves; smoke does not count."""
        return {scale: found for scale in COUNTED if (found := self.summary(experiment, scale))}

    def _read_summary(self, experiment: str, scale: str) -> dict[str, Any]:
        whole = EXPERIMENTS[experiment].summary
        there = (self.records / experiment / scale / "trials.jsonl").exists()
        return whole(self.view(experiment, scale)) if whole is not None and there else {}

    def seconds(self, experiment: str, panel: str, group: str) -> float | None:
        """The time of a step of a group on one CPU thread, from where the panel's outcome comes from."""
        found = self.outcome(experiment, panel)
        return None if found is None else self.view(experiment, found.scale).seconds_per_step(panel).get(group)

    def method(self, kind: str, mode: str, case: str, method: str) -> dict[str, Any] | None:
        """A method's entry in the newest benchmark that has times of it."""
        for record in reversed(self.benchmarks.values()):
            if record.get("kind") == kind and record.get("mode") == mode and record["settings"]["damping"] == DAMPING:
                for entry in (m for c in record["cases"] if c["name"] == case for m in c["methods"]):
                    if entry["name"] == method and "ratio" in entry:
                        return dict(entry)
        return None

    def ratio(self, mode: str, model: str, method: str) -> float | None:
        """Time of a step over that of the plain gradient, Table 2."""
        entry = self.method("table2", mode, model, method)
        return None if entry is None else float(entry["ratio"]["median"])

    def seconds_for_1000(self, mode: str, model: str, method: str) -> float | None:
        """Seconds for 1,000 steps, the unit of Table 2."""
        entry = self.method("table2", mode, model, method)
        return None if entry is None else 1e3 * float(entry["seconds_per_step"]["median"])

    def memory(self, mode: str, model: str, method: str) -> float | None:
        """Peak memory over that of the plain gradient, less 1."""
        own, plain = (self.method("table2", mode, model, name) for name in (method, "gradient"))
        if own is None or plain is None or "peak_bytes" not in own or "peak_bytes" not in plain:
            return None
        return float(own["peak_bytes"] / plain["peak_bytes"] - 1)


Check: TypeAlias = Callable[[Evidence], Finding]
