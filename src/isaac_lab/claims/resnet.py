"""The paper's sentences on ResNet-18 (section E4), as checks on the summary of `isaac-newton reproduce fig6`.

Accuracies are final test accuracies, means over seeds, of ζ* in the last layer (the paper's method) and of ∇. A difference
counts only where Welch's t-test over the seeds has p < 0.05.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isaac_lab.claims.checks import ahead, decide, unknown
from isaac_lab.claims.evidence import Check, Claim, Evidence, Finding, Verdict
from isaac_lab.stats import Difference, contrast
from isaac_lab.studies.paper.fig6 import METHODS, MODES, SETTINGS

PLAIN, OURS = "none", "last"
#: "Rather small": less than half a percentage point, fifty of CIFAR-10's 10,000 test images.
SMALL = 0.005
#: "Within 1 %".
CLOSE = 0.01


@dataclass(frozen=True)
class Pair:
    """ζ* in the last layer beside ∇.

    Args:
        ours: Final accuracies by seed.
        plain: Those of ∇.
        figures: Both and their difference, for people.
    """

    ours: tuple[float, ...]
    plain: tuple[float, ...]
    figures: str

    @property
    def difference(self) -> Difference:
        """By how much ζ* is ahead."""
        return contrast(self.ours, self.plain)


def differences(summary: Mapping[str, Any]) -> dict[str, Pair]:
    """By setting, where both methods have the same number of runs, and two that ended at least."""
    rows = {row["name"]: row["cells"] for row in summary["rows"]}
    found = {}
    for place, setting in enumerate(SETTINGS):
        ours, plain = (rows[name][place] if name in rows else None for name in (OURS, PLAIN))
        if ours is None or plain is None or min(ours["n"], plain["n"]) < 2:
            continue
        if ours["n"] + ours["diverged"] != plain["n"] + plain["diverged"]:
            continue
        own = contrast(ours["values"], plain["values"])
        figures = (
            f"{SETTINGS[setting].title}: ζ* {_accuracy(ours)}, ∇ {_accuracy(plain)}, "
            f"difference {100 * own.value:+.2f} points ({own.words})"
        )
        found[setting] = Pair(tuple(ours["values"]), tuple(plain["values"]), figures)
    return found


def _accuracy(cell: Mapping[str, Any]) -> str:
    lost = f", {cell['diverged']} diverged" if cell["diverged"] else ""
    return f"{cell['mean']:.2%} ± {cell['std']:.2%} (n {cell['n']}{lost})"


def _known(evidence: Evidence) -> tuple[dict[str, Pair], str]:
    """The differences at the largest scale that has all settings, else at the one that has most of them."""
    found = [(differences(summary), scale) for scale, summary in evidence.summaries("fig6").items()]
    return max(found, key=lambda item: len(item[0]), default=({}, ""))


def _finding(verdict: Verdict, known: Mapping[str, Pair], scale: str) -> Finding:
    parts = [pair.figures for pair in known.values()]
    missing = [own.title for setting, own in SETTINGS.items() if setting not in known]
    parts += [f"missing: {', '.join(missing)} of fig6"] if missing else []
    return Finding(verdict, "; ".join(parts), scale)


def outperforms(evidence: Evidence) -> Finding:
    """ζ* is ahead in all settings; one in which it is behind decides, then one in which the seeds show nothing."""
    known, scale = _known(evidence)
    verdict = ahead(pair.difference for pair in known.values())
    lacking = verdict is Verdict.HOLDS and len(known) < len(SETTINGS)
    return _finding(Verdict.UNKNOWN if lacking else verdict, known, scale)


def small_by_default(evidence: Evidence) -> Finding:
    """With momentum and weight decay ζ* is ahead, by little."""
    known, scale = _known(evidence)
    if "a" not in known:
        return unknown(f"missing: {SETTINGS['a'].title} of fig6")
    own = known["a"].difference
    if not own.ahead and not own.behind:
        return Finding(Verdict.UNDECIDED, known["a"].figures, scale)
    return decide(own.ahead and own.value < SMALL, known["a"].figures, scale)


def large_without(evidence: Evidence) -> Finding:
    """In plain SGD ζ* is ahead, by more than in both other settings."""
    known, scale = _known(evidence)
    plain = known.get("c")
    if plain is not None and (verdict := ahead([plain.difference])) is not Verdict.HOLDS:
        return _finding(verdict, known, scale)
    if plain is None or len(known) < len(SETTINGS):
        return _finding(Verdict.UNKNOWN, known, scale)
    others = [known[setting] for setting in ("a", "b")]
    gaps = [contrast(plain.ours, plain.plain, o.ours, o.plain, weights=(1, -1, -1, 1)) for o in others]
    return _finding(ahead(gaps), known, scale)


def within_one_percent(mode: str) -> Check:
    """A step of ζ* in the last layer takes as long as one of ∇."""

    def check(evidence: Evidence) -> Finding:
        for scale, summary in evidence.summaries("fig6").items():
            times = summary["times"].get(mode)
            if times is None or OURS not in times["methods"] or "gpu" not in times["machine"]:
                continue
            ratios = {name: own["ratio"] for name, own in times["methods"].items() if name != PLAIN}
            text = ", ".join(
                f"{METHODS[n].label} {r['median']:.3f} ({r['low']:.3f}–{r['high']:.3f})" for n, r in ratios.items()
            )
            figures = f"time of a step over that of ∇, {mode}, {times['machine']['gpu']}, median (quartiles): {text}"
            return decide(abs(ratios[OURS]["median"] - 1) <= CLOSE, figures, scale)
        return unknown(f"missing: times of fig6 on a GPU, {mode}")

    return check


_RULE = "A difference counts if Welch's t-test over seeds has p < 0.05. "
_TIMES = "The times for each method lie within 1% of each other."
_HOW = (
    "Median time of a training step on a GPU, with momentum and weight decay: ζ* in the last layer takes 0.99 to 1.01 times ∇"
)

RESNET: tuple[Claim, ...] = (
    Claim(
        "E4.5",
        _TIMES,
        "fig6",
        f"{_HOW}; the step as one CUDA graph.",
        within_one_percent(MODES[1]),
    ),
    Claim(
        "E4.5e",
        _TIMES,
        "fig6",
        f"{_HOW}; operation by operation, as torch runs it unless told otherwise.",
        within_one_percent(MODES[0]),
    ),
    Claim(
        "E4.6",
        "The results show that the proposed method outperforms SGD in each of these cases.",
        "fig6",
        _RULE + "Final test accuracy, mean over seeds: ζ* in the last layer is ahead of ∇ in all three settings.",
        outperforms,
    ),
    Claim(
        "E4.7",
        "While the improvements are rather small in the case of the default training",
        "fig6",
        _RULE + "With momentum and weight decay ζ* in the last layer is ahead of ∇ in final test accuracy, by less than 0.5 "
        "points: fifty of 10,000 test images.",
        small_by_default,
    ),
    Claim(
        "E4.8",
        "they are especially large in the case of no weight decay and no momentum.",
        "fig6",
        _RULE + "In plain SGD ζ* in the last layer is ahead of ∇ in final test accuracy, and the difference is larger than in "
        "both other settings, again with p < 0.05.",
        large_without,
    ),
)
