"""Checks of claims about grids: what "similar", "maintains" or "performs well" means, in numbers, and why."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Literal, TypeAlias

from isaac_lab.claims.evidence import Evidence, Finding, Verdict, unknown
from isaac_lab.studies.paper.grids import accuracies, losses
from isaac_lab.studies.paper.recipe import RATES, Outcome

Panels: TypeAlias = Mapping[tuple[str, str], Outcome]
Need: TypeAlias = Literal["all", "most"]

#: "Similar", "maintains", "equivalent": within so much of the logarithm of the loss, which is what the paper's figures show.
#: At a loss of 0.01 that is 0.2 decades, about two steps of the colours of a grid whose losses span 2 decades.
SAME = 0.10
#: Losses below this are all the same.
SMALLEST = 1e-9
#: Percentage points of test accuracy that do not count: ten of MNIST's 10,000 test images.
POINT = 0.001


def behind(loss: float, best: float) -> float:
    """By which share of the logarithm of the best loss a loss is behind it; negative where it is better."""
    if math.isinf(loss) or math.isinf(best):
        return 0.0 if loss == best else math.copysign(math.inf, loss - best)
    # Near a loss of 1 the logarithm is near 0, and a share of it would mean nothing.
    decades, reached = (math.log10(max(value, SMALLEST)) for value in (loss, best))
    return (decades - reached) / max(abs(reached), 0.3)


def scales(found: Panels) -> str:
    """Of all of these, for people."""
    labels = {outcome.label for outcome in found.values()}
    if len(labels) == 1:
        return labels.pop()
    return ", ".join(f"{outcome.label} ({identity} {panel})" for (identity, panel), outcome in found.items())


def lowest(values: Iterable[float]) -> float:
    """Of those that did not diverge; infinite where all did."""
    return min(filter(math.isfinite, values), default=math.inf)


class Best:
    """Where a grid's best cells ended: ζ has both dampings, ζ* no λ_g, ∇ none; the row is that of ζ at the largest λ_a.

    Losses are infinite where all diverged, accuracies 0.
    """

    def __init__(self, outcome: Outcome) -> None:
        sectors = _sectors(losses(outcome))
        self.zeta, self.star, self.plain, self.row = map(lowest, sectors)
        # How many cells of a line are as good as the best of it.
        _, self.good_star, _, self.good_row = (
            sum(math.isfinite(loss) and behind(loss, lowest(line)) <= SAME for loss in line) for line in sectors
        )
        self.gap = behind(self.star, self.zeta)
        self.apart, self.side = abs(self.gap), "behind" if self.gap > 0 else "ahead of"
        right_zeta, right_star, (self.right_plain,), _ = _sectors(accuracies(outcome))
        self.right_zeta, self.right_star = (max(filter(math.isfinite, own), default=0.0) for own in (right_zeta, right_star))


def _sectors(values: Mapping[tuple[float, float], float]) -> list[list[float]]:
    """The cells of ζ, ζ*, ∇ and the row, by λ_a and λ_g."""
    largest = max(a for a, _ in values if a != math.inf)
    inside: list[Callable[[float, float], bool]] = [
        lambda a, g: g != math.inf,
        lambda a, g: g == math.inf != a,
        lambda a, g: a == g == math.inf,
        lambda a, g: a == largest and g != math.inf,
    ]
    return [[value for (a, g), value in values.items() if holds(a, g)] for holds in inside]


_ENDS = "best loss ζ {zeta:.3g}, ζ* {star:.3g}, ∇ {plain:.3g}"
_APART = f"{_ENDS}, ζ* {{apart:.0%}} of log-loss {{side}} ζ"
#: What a grid passes, and the figures that say so; `claims.toml` says why.
TESTS: Mapping[str, tuple[Callable[[Best], bool], str]] = {
    "both_beat_the_gradient": (lambda own: max(own.zeta, own.star) < own.plain, _ENDS),
    "star_keeps_up": (lambda own: own.gap <= SAME, _APART),
    "star_keeps_up_and_wins": (lambda own: own.gap <= SAME and own.star < own.plain, _APART),
    "remains_good": (
        lambda own: own.gap <= SAME and own.right_star >= own.right_zeta - 2 * POINT,
        f"{_APART}; best accuracy ζ {{right_zeta:.2%}}, ζ* {{right_star:.2%}}",
    ),
    "trains_well": (
        lambda own: own.star < own.plain and not own.right_star < own.right_plain - POINT,
        "loss ζ* {star:.3g}, ∇ {plain:.3g}; accuracy ζ* {right_star:.2%}, ∇ {right_plain:.2%}",
    ),
    "row_is_good": (lambda own: own.row < own.plain, "best loss at the largest λ_a {row:.3g}, ∇ {plain:.3g}"),
    "row_is_better": (lambda own: own.row < own.star, "best loss λ_a → ∞ {row:.3g}, λ_g → ∞ {star:.3g}"),
    "row_is_more_sensitive": (
        lambda own: own.good_row < own.good_star,
        "within 10 % of the best log-loss: {good_row} cells at λ_a → ∞, {good_star} at λ_g → ∞",
    ),
}


def each(evidence: Evidence, test: str, panels: str, need: Need = "all") -> Finding:
    """Whether grids pass a test, such as those of "fig1 abd, fig4 a": all of them, or more than half.

    One that fails decides the first, whatever is missing; the second is decided as soon as what is missing cannot change it.
    """
    names = [(identity, name) for part in panels.split(", ") for identity, all_ in [part.split()] for name in all_]
    found = {name: outcome for name in names if (outcome := evidence.outcome(*name)) is not None}
    passes, text = TESTS[test]
    best = {name: Best(outcome) for name, outcome in found.items()}
    parts = [f"{identity} {panel}: {text.format(**vars(own))}" for (identity, panel), own in best.items()]
    missing = [" ".join(name) for name in names if name not in found]
    parts += [f"missing: {', '.join(missing)}"] if missing else []
    return Finding(_verdict(list(map(passes, best.values())), len(names), need), "; ".join(parts), scales(found))


def _verdict(passed: Sequence[bool], count: int, need: Need) -> Verdict:
    failed = passed.count(False)
    if failed if need == "all" else failed >= count / 2:
        return Verdict.FAILS
    if sum(passed) == count if need == "all" else sum(passed) > count / 2:
        return Verdict.HOLDS
    return Verdict.UNKNOWN


def rates_inside(evidence: Evidence) -> Finding:
    """No chosen learning rate lies outside the paper's list, or at an end of what was tried."""
    asked = [(f"fig{figure}", panel) for figure, panel in ("1a", "1b", "1c", "1d", "3a", "3b", "4a", "5a", "2a")]
    found = {name: outcome for name in asked if (outcome := evidence.outcome(*name))}
    if not found:
        return unknown("missing: all grids")
    chosen = [
        (f"{' '.join(name)} {group} {rate:g}", rate, tried)
        for name, outcome in found.items()
        for group, rate in outcome.rates.items()
        if (tried := outcome.tried.get(group)) and rate is not None
    ]
    outside = [name for name, rate, _ in chosen if not min(RATES) <= rate <= max(RATES)]
    ends = [name for name, rate, tried in chosen if name not in outside and rate in (max(tried), min(tried))]
    text = f"{len(chosen) - len(outside) - len(ends)} of {len(chosen)} chosen rates lie inside the range; "
    text += f"at its ends: {', '.join(ends) or 'none'}; better outside: {', '.join(outside) or 'none'}"
    verdict = Verdict.FAILS if outside else Verdict.UNKNOWN if ends else Verdict.HOLDS
    return Finding(verdict, text, scales(found))


def _beside_figure_1(
    evidence: Evidence, test: Callable[[Outcome, Outcome], tuple[bool, str]], need: Need, *, same_scale: bool
) -> Finding:
    """A test of each panel of Figure A3 beside that of Figure 1."""
    found: dict[tuple[str, str], Outcome] = {}
    parts, results = [], []
    for panel in "abcd":
        fisher, newton = evidence.outcome("figA3", panel), evidence.outcome("fig1", panel)
        if fisher is None or newton is None or (same_scale and fisher.scale != newton.scale):
            parts.append(f"{panel}: missing{' at one scale' if same_scale else ''}")
            continue
        found["figA3", panel] = fisher
        passed, figures = test(fisher, newton)
        results.append(passed)
        parts.append(f"{panel}: {figures}")
    return Finding(_verdict(results, 4, need), "; ".join(parts), scales(found))


def _alike(fisher: Outcome, newton: Outcome) -> tuple[bool, str]:
    """Where λ_g is large, the cells of Figures 1 and A3 are alike."""
    ours, theirs = ({cell: lowest([value]) for cell, value in losses(own).items()} for own in (fisher, newton))
    cells = [cell for cell in ours if cell[1] >= 1e4 and cell[0] != math.inf and cell in theirs]
    gap = median(abs(behind(ours[cell], theirs[cell])) for cell in cells)
    return gap <= SAME, f"median {gap:.1%} of log-loss apart over {len(cells)} cells with λ_g ≥ 10^4"


def _ahead_by_less(fisher: Outcome, newton: Outcome) -> tuple[bool, str]:
    """The last row is ahead of the last column in Figure 1 too, but by less than in Figure A3."""

    def lead(gap: float) -> str:
        if not math.isfinite(gap):
            return "diverged in every cell"
        return f"{'ahead' if gap > 0 else 'behind'} by {abs(gap):.1%} of log-loss"

    there, here = (behind(own.star, own.row) for own in map(Best, (fisher, newton)))
    return 0 < here < there, f"λ_a → ∞ {lead(here)} in Figure 1, {lead(there)} in Figure A3"


CHECKS: Mapping[str, Callable[..., Finding]] = {
    **{name: partial(each, test=name) for name in TESTS},
    "rates_inside": rates_inside,
    "similar_for_large_output_damping": partial(_beside_figure_1, test=_alike, need="all", same_scale=True),
    "lesser_extent": partial(_beside_figure_1, test=_ahead_by_less, need="most", same_scale=False),
}
