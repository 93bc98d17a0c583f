"""Checks of claims about grids: what "similar", "maintains" or "performs well" means, in numbers, and why."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from statistics import median
from typing import Literal, TypeAlias

from isaac_lab.claims.evidence import Evidence, Finding, Verdict, unknown
from isaac_lab.studies.paper.grids import accuracies, losses
from isaac_lab.studies.paper.recipe import RATES, Outcome

#: Whether a panel passes, and the figures that say so.
Test: TypeAlias = Callable[[Outcome], tuple[bool, str]]
Panels: TypeAlias = Mapping[tuple[str, str], Outcome]

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


def each(test: Test) -> Callable[..., Finding]:
    """The check that panels pass a test, such as those of "fig1 abd, fig4 a": all of them, or more than half.

    One that fails decides the first, whatever is missing; the second is decided as soon as what is missing cannot change it.
    """

    @wraps(test)
    def check(evidence: Evidence, panels: str, need: Literal["all", "most"] = "all") -> Finding:
        names = [(identity, name) for part in panels.split(", ") for identity, all_ in [part.split()] for name in all_]
        found = {name: outcome for name in names if (outcome := evidence.outcome(*name)) is not None}
        results = {name: test(outcome) for name, outcome in found.items()}
        parts = [f"{identity} {panel}: {figures}" for (identity, panel), (_, figures) in results.items()]
        missing = [" ".join(name) for name in names if name not in found]
        parts += [f"missing: {', '.join(missing)}"] if missing else []
        passed = [result for result, _ in results.values()]
        return Finding(_verdict(passed, len(names), need), "; ".join(parts), scales(found))

    return check


def _verdict(passed: Sequence[bool], count: int, need: Literal["all", "most"]) -> Verdict:
    failed = passed.count(False)
    if failed if need == "all" else failed >= count / 2:
        return Verdict.FAILS
    if sum(passed) == count if need == "all" else sum(passed) > count / 2:
        return Verdict.HOLDS
    return Verdict.UNKNOWN


class Sectors:
    """The cells of a grid: ζ has both dampings, ζ* no λ_g, ∇ none; the row is that of ζ at the largest λ_a."""

    def __init__(self, values: Mapping[tuple[float, float], float]) -> None:
        largest = max(a for a, _ in values if a != math.inf)
        self.zeta = [value for (_, g), value in values.items() if g != math.inf]
        self.star = [value for (a, g), value in values.items() if g == math.inf != a]
        self.plain = values[math.inf, math.inf]
        self.row = [value for (a, g), value in values.items() if a == largest and g != math.inf]


def lowest(values: Iterable[float]) -> float:
    """Of those that did not diverge; infinite where all did."""
    return min(filter(math.isfinite, values), default=math.inf)


def _highest(values: Iterable[float]) -> float:
    return max(filter(math.isfinite, values), default=0.0)


def _best(outcome: Outcome) -> tuple[float, float, float]:
    """The lowest final training losses of ζ, ζ* and ∇; infinite where all diverged."""
    own = Sectors(losses(outcome))
    return lowest(own.zeta), lowest(own.star), lowest([own.plain])


def _losses(zeta: float, star: float, plain: float) -> str:
    return f"best loss ζ {zeta:.3g}, ζ* {star:.3g}, ∇ {plain:.3g}"


def _keeps_up(outcome: Outcome) -> tuple[bool, str]:
    own = _best(outcome)
    gap = behind(own[1], own[0])
    return gap <= SAME, f"{_losses(*own)}, ζ* {abs(gap):.0%} of log-loss {'behind' if gap > 0 else 'ahead of'} ζ"


@each
def both_beat_the_gradient(outcome: Outcome) -> tuple[bool, str]:
    """The best ζ and the best ζ* of a grid end below ∇."""
    zeta, star, plain = _best(outcome)
    return zeta < plain and star < plain, _losses(zeta, star, plain)


@each
def star_keeps_up(outcome: Outcome) -> tuple[bool, str]:
    """The best ζ* of a grid is as good as its best ζ."""
    return _keeps_up(outcome)


@each
def star_keeps_up_and_wins(outcome: Outcome) -> tuple[bool, str]:
    """The best ζ* of a grid is as good as its best ζ, and ends below ∇."""
    _, star, plain = _best(outcome)
    keeps_up, text = _keeps_up(outcome)
    return keeps_up and star < plain, text


@each
def remains_good(outcome: Outcome) -> tuple[bool, str]:
    """The best ζ* is as good as the best ζ in training loss and in test accuracy."""
    keeps_up, text = _keeps_up(outcome)
    own = Sectors(accuracies(outcome))
    zeta, star = _highest(own.zeta), _highest(own.star)
    return keeps_up and star >= zeta - 2 * POINT, f"{text}; best accuracy ζ {zeta:.2%}, ζ* {star:.2%}"


@each
def trains_well(outcome: Outcome) -> tuple[bool, str]:
    """The best ζ* ends below ∇ in training loss, and not below it in test accuracy."""
    _, loss, plain_loss = _best(outcome)
    own = Sectors(accuracies(outcome))
    star, plain = _highest(own.star), own.plain
    text = f"loss ζ* {loss:.3g}, ∇ {plain_loss:.3g}; accuracy ζ* {star:.2%}, ∇ {plain:.2%}"
    return loss < plain_loss and (math.isnan(plain) or star >= plain - POINT), text


@each
def row_is_good(outcome: Outcome) -> tuple[bool, str]:
    """λ_a → ∞: the best of the last row ends below ∇."""
    own = Sectors(losses(outcome))
    row, plain = lowest(own.row), lowest([own.plain])
    return row < plain, f"best loss at the largest λ_a {row:.3g}, ∇ {plain:.3g}"


@each
def row_is_better(outcome: Outcome) -> tuple[bool, str]:
    """The best of the last row (λ_a → ∞) ends below the best of the last column (ζ*)."""
    own = Sectors(losses(outcome))
    row, column = lowest(own.row), lowest(own.star)
    return row < column, f"best loss λ_a → ∞ {row:.3g}, λ_g → ∞ {column:.3g}"


@each
def row_is_more_sensitive(outcome: Outcome) -> tuple[bool, str]:
    """Fewer cells of the last row than of the last column are as good as the best of their line."""
    own = Sectors(losses(outcome))
    row, column = (
        sum(math.isfinite(value) and behind(value, lowest(line)) <= SAME for value in line) for line in (own.row, own.star)
    )
    return row < column, f"within 10 % of the best log-loss: {row} cells at λ_a → ∞, {column} at λ_g → ∞"


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
    evidence: Evidence, test: Callable[[Outcome, Outcome], tuple[bool, str]], need: Literal["all", "most"], *, same_scale: bool
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


def similar_for_large_output_damping(evidence: Evidence) -> Finding:
    """Where λ_g is large, the cells of Figures 1 and A3 are alike."""

    def test(fisher: Outcome, newton: Outcome) -> tuple[bool, str]:
        ours, theirs = ({cell: lowest([value]) for cell, value in losses(own).items()} for own in (fisher, newton))
        cells = [cell for cell in ours if cell[1] >= 1e4 and cell[0] != math.inf and cell in theirs]
        gap = median(abs(behind(ours[cell], theirs[cell])) for cell in cells)
        return gap <= SAME, f"median {gap:.1%} of log-loss apart over {len(cells)} cells with λ_g ≥ 10^4"

    return _beside_figure_1(evidence, test, "all", same_scale=True)


def lesser_extent(evidence: Evidence) -> Finding:
    """The last row is ahead of the last column in Figure 1 too, but by less than in Figure A3."""

    def lead(gap: float) -> str:
        if not math.isfinite(gap):
            return "diverged in every cell"
        return f"{'ahead' if gap > 0 else 'behind'} by {abs(gap):.1%} of log-loss"

    def test(fisher: Outcome, newton: Outcome) -> tuple[bool, str]:
        there, here = (behind(lowest(own.star), lowest(own.row)) for own in (Sectors(losses(o)) for o in (fisher, newton)))
        return 0 < here < there, f"λ_a → ∞ {lead(here)} in Figure 1, {lead(there)} in Figure A3"

    return _beside_figure_1(evidence, test, "most", same_scale=False)
