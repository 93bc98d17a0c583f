"""Checks of claims about grids: what "similar", "unstable" or "almost identical" means, in numbers, and why."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, TypeAlias

from isaac_lab.claims.evidence import Check, Evidence, Finding, Verdict
from isaac_lab.record import Record
from isaac_lab.stats import Difference
from isaac_lab.studies.paper.grids import accuracies, losses
from isaac_lab.studies.paper.recipe import RATES, Outcome

#: Whether a panel passes, and the figures that say so.
Test: TypeAlias = Callable[[Outcome], tuple[bool, str]]
#: The same of two panels.
Comparison: TypeAlias = Callable[[Outcome, Outcome], tuple[bool, str]]

#: "Similar", "maintains", "equivalent": within so much of the logarithm of the loss, which is what the paper's figures show.
#: At a loss of 0.01 that is 0.2 decades, about two steps of the colours of a grid whose losses span 2 decades.
SAME = 0.10
#: "Almost identical": so much relative difference of two losses; a line in a plot of a few decades is about as thick.
IDENTICAL = 0.10
#: "Unstable": diverged, or at some epoch a training loss so many times the lowest before it; noise between epochs is less.
JUMP = 2.0
#: Losses below this are all the same.
SMALLEST = 1e-9
#: Percentage points of test accuracy that do not count: ten of MNIST's 10,000 test images.
POINT = 0.001

GRIDS = (("fig1", "a"), ("fig1", "b"), ("fig1", "c"), ("fig1", "d"), ("fig3", "a"), ("fig3", "b"), ("fig4", "a"))
FIG1 = GRIDS[:4]
WIDTHS = (FIG1[0], FIG1[1], FIG1[3])
AUTOENCODERS = GRIDS[4:6]
FISHER = tuple(("figA3", name) for name in "abcd")


def behind(loss: float, best: float) -> float:
    """By which share of the logarithm of the best loss a loss is behind it; negative where it is better."""
    if math.isinf(loss) or math.isinf(best):
        return 0.0 if loss == best else math.copysign(math.inf, loss - best)
    # Near a loss of 1 the logarithm is near 0, and a share of it would mean nothing.
    decades, reached = (math.log10(max(value, SMALLEST)) for value in (loss, best))
    return (decades - reached) / max(abs(reached), 0.3)


def unstable(records: Sequence[Record]) -> bool:
    """Whether a run diverged, or jumped to twice the lowest training loss it had; without records every rate diverged."""
    return not records or any(_jumps(record) for record in records)


def _jumps(record: Record) -> bool:
    if not record.finished:
        return True
    lowest = math.inf
    for loss in record.column("train_loss"):
        if not math.isfinite(loss) or loss > JUMP * lowest:
            return True
        lowest = min(lowest, loss)
    return False


@dataclass(frozen=True)
class Best:
    """The best final training losses of a grid: of ζ, of ζ*, and of the gradient; infinite where all diverged."""

    zeta: float
    zeta_star: float
    gradient: float


def sector(values: Mapping[tuple[float, float], float], name: Literal["zeta", "zeta_star", "gradient"]) -> list[float]:
    """The cells of a sector of a grid: λ_g is finite for ζ and infinite for ζ*; for the gradient λ_a is infinite too."""
    found = []
    for (a, g), value in values.items():
        own = "zeta" if g != math.inf else "zeta_star" if a != math.inf else "gradient"
        found += [value] if own == name else []
    return found


def best(outcome: Outcome) -> Best:
    """Of a grid."""
    values = losses(outcome)
    return Best(*(lowest(sector(values, name)) for name in ("zeta", "zeta_star", "gradient")))


def lowest(values: Iterable[float]) -> float:
    """Of those that did not diverge; infinite where all did."""
    return min((value for value in values if math.isfinite(value)), default=math.inf)


def _highest(values: Iterable[float]) -> float:
    return max((value for value in values if math.isfinite(value)), default=0.0)


def _column(outcome: Outcome) -> list[float]:
    """ζ*: the losses over λ_a at λ_g = ∞."""
    return sector(losses(outcome), "zeta_star")


def _row(outcome: Outcome) -> list[float]:
    """λ_a → ∞: the losses over λ_g at the largest λ_a of the grid."""
    values = losses(outcome)
    largest = max(a for a, g in values if a != math.inf)
    return [v for (a, g), v in values.items() if a == largest and g != math.inf]


def unknown(what: str) -> Finding:
    """There is nothing to decide it by."""
    return Finding(Verdict.UNKNOWN, what)


def decide(holds: bool, figures: str, scale: str) -> Finding:
    """One way or the other."""
    return Finding(Verdict.HOLDS if holds else Verdict.FAILS, figures, scale)


def ahead(differences: Iterable[Difference]) -> Verdict:
    """Of differences that should all be above 0: one that is behind decides, then one in which the seeds show nothing."""
    known = list(differences)
    if any(own.behind for own in known):
        return Verdict.FAILS
    return Verdict.HOLDS if all(own.ahead for own in known) else Verdict.UNDECIDED


def scales(found: Mapping[tuple[str, str], Outcome]) -> str:
    """Of all of these, for people."""
    labels = {outcome.label for outcome in found.values()}
    if len(labels) == 1:
        return labels.pop()
    return ", ".join(f"{outcome.label} ({identity} {panel})" for (identity, panel), outcome in found.items())


def panels(names: Sequence[tuple[str, str]], test: Test, *, need: Literal["all", "most"] = "all") -> Check:
    """A test of each panel that must pass in all of them, or in more than half.

    One that fails decides the first, whatever is missing; the second is decided as soon as what is missing cannot change it.
    """

    def check(evidence: Evidence) -> Finding:
        found = {name: outcome for name in names if (outcome := evidence.outcome(*name)) is not None}
        results = {name: test(outcome) for name, outcome in found.items()}
        parts = [f"{identity} {panel}: {figures}" for (identity, panel), (_, figures) in results.items()]
        missing = [" ".join(name) for name in names if name not in found]
        parts += [f"missing: {', '.join(missing)}"] if missing else []
        passed = sum(result for result, _ in results.values())
        return Finding(_verdict(passed, len(results) - passed, len(names), need), "; ".join(parts), scales(found))

    return check


def _verdict(passed: int, failed: int, count: int, need: Literal["all", "most"]) -> Verdict:
    if failed if need == "all" else failed >= count / 2:
        return Verdict.FAILS
    if passed == count if need == "all" else passed > count / 2:
        return Verdict.HOLDS
    return Verdict.UNKNOWN


def both_beat_the_gradient(outcome: Outcome) -> tuple[bool, str]:
    """The best ζ and the best ζ* of a grid end below ∇."""
    own = best(outcome)
    return own.zeta < own.gradient and own.zeta_star < own.gradient, _losses(own)


def star_keeps_up(outcome: Outcome) -> tuple[bool, str]:
    """The best ζ* of a grid is as good as its best ζ."""
    own = best(outcome)
    gap = behind(own.zeta_star, own.zeta)
    return gap <= SAME, f"{_losses(own)}, ζ* {_gap(gap)}"


def _losses(own: Best) -> str:
    return f"best loss ζ {own.zeta:.3g}, ζ* {own.zeta_star:.3g}, ∇ {own.gradient:.3g}"


def _gap(gap: float) -> str:
    return f"{abs(gap):.0%} of log-loss {'behind' if gap > 0 else 'ahead of'} ζ"


def star_keeps_up_and_wins(outcome: Outcome) -> tuple[bool, str]:
    """The best ζ* of a grid is as good as its best ζ, and ends below ∇."""
    own = best(outcome)
    keeps_up, text = star_keeps_up(outcome)
    return keeps_up and own.zeta_star < own.gradient, text


def remains_good(outcome: Outcome) -> tuple[bool, str]:
    """The best ζ* is as good as the best ζ in training loss and in test accuracy."""
    keeps_up, text = star_keeps_up(outcome)
    zeta, star = (_highest(sector(accuracies(outcome), name)) for name in ("zeta", "zeta_star"))
    return keeps_up and star >= zeta - 2 * POINT, f"{text}; best accuracy ζ {zeta:.2%}, ζ* {star:.2%}"


def trains_well(outcome: Outcome) -> tuple[bool, str]:
    """The best ζ* ends below ∇ in training loss, and not below it in test accuracy."""
    own, values = best(outcome), accuracies(outcome)
    star, (plain,) = _highest(sector(values, "zeta_star")), sector(values, "gradient")
    text = f"loss ζ* {own.zeta_star:.3g}, ∇ {own.gradient:.3g}; accuracy ζ* {star:.2%}, ∇ {plain:.2%}"
    return own.zeta_star < own.gradient and (math.isnan(plain) or star >= plain - POINT), text


def rates_inside(evidence: Evidence) -> Finding:
    """No chosen learning rate lies outside the paper's list, or at an end of what was tried."""
    found = {name: outcome for name in (*GRIDS, ("fig5", "a"), ("fig2", "a")) if (outcome := evidence.outcome(*name))}
    if not found:
        return unknown("missing: all grids")
    outside, ends, count = [], [], 0
    for (identity, panel), outcome in found.items():
        for group, rate in outcome.rates.items():
            tried = outcome.tried.get(group)
            if not tried or rate is None:
                continue
            count += 1
            if not min(RATES) <= rate <= max(RATES):
                outside.append(f"{identity} {panel} {group} {rate:g}")
            elif rate in (max(tried), min(tried)):
                ends.append(f"{identity} {panel} {group} {rate:g}")
    inside = count - len(outside) - len(ends)
    text = (
        f"{inside} of {count} chosen rates lie inside the range; at its ends: {', '.join(ends) or 'none'}; "
        f"better outside: {', '.join(outside) or 'none'}"
    )
    verdict = Verdict.FAILS if outside else Verdict.UNKNOWN if ends else Verdict.HOLDS
    return Finding(verdict, text, scales(found))


def _against_figure_1(evidence: Evidence, test: Comparison, *, same_scale: bool) -> tuple[list[bool], str, str]:
    """A test of each panel of Figure A3 beside that of Figure 1: which passed, the figures, the scale."""
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
    return results, "; ".join(parts), scales(found) if found else ""


def similar_for_large_output_damping(evidence: Evidence) -> Finding:
    """Where λ_g is large, the cells of Figures 1 and A3 are alike."""

    def test(fisher: Outcome, newton: Outcome) -> tuple[bool, str]:
        ours, theirs = losses(fisher), losses(newton)
        cells = [cell for cell in ours if cell[1] >= 1e4 and cell[0] != math.inf and cell in theirs]
        gap = median(abs(behind(_or_inf(ours[cell]), _or_inf(theirs[cell]))) for cell in cells)
        return gap <= SAME, f"median {gap:.1%} of log-loss apart over {len(cells)} cells with λ_g ≥ 10^4"

    results, text, scale = _against_figure_1(evidence, test, same_scale=True)
    if not all(results):
        return Finding(Verdict.FAILS, text, scale)
    return Finding(Verdict.HOLDS if len(results) == 4 else Verdict.UNKNOWN, text, scale)


def _or_inf(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def row_is_good(outcome: Outcome) -> tuple[bool, str]:
    """λ_a → ∞: the best of the last row ends below ∇."""
    row, plain = lowest(_row(outcome)), best(outcome).gradient
    return row < plain, f"best loss at the largest λ_a {row:.3g}, ∇ {plain:.3g}"


def row_is_better(outcome: Outcome) -> tuple[bool, str]:
    """The best of the last row (λ_a → ∞) ends below the best of the last column (ζ*)."""
    row, column = lowest(_row(outcome)), lowest(_column(outcome))
    return row < column, f"best loss λ_a → ∞ {row:.3g}, λ_g → ∞ {column:.3g}"


def row_is_more_sensitive(outcome: Outcome) -> tuple[bool, str]:
    """Fewer cells of the last row than of the last column are as good as the best of their line."""
    row, column = (_near_best(line) for line in (_row(outcome), _column(outcome)))
    return row < column, f"within 10 % of the best log-loss: {row} cells at λ_a → ∞, {column} at λ_g → ∞"


def _near_best(line: Sequence[float]) -> int:
    return sum(math.isfinite(value) and behind(value, lowest(line)) <= SAME for value in line)


def _lead(gap: float) -> str:
    if not math.isfinite(gap):
        return "diverged in every cell"
    return f"{'ahead' if gap > 0 else 'behind'} by {abs(gap):.1%} of log-loss"


def lesser_extent(evidence: Evidence) -> Finding:
    """The last row is ahead of the last column in Figure 1 too, but by less than in Figure A3."""

    def test(fisher: Outcome, newton: Outcome) -> tuple[bool, str]:
        there, here = (behind(lowest(_column(own)), lowest(_row(own))) for own in (fisher, newton))
        return 0 < here < there, f"λ_a → ∞ {_lead(here)} in Figure 1, {_lead(there)} in Figure A3"

    results, text, scale = _against_figure_1(evidence, test, same_scale=False)
    verdict = _verdict(sum(results), len(results) - sum(results), 4, "most")
    return Finding(verdict, text, scale)
