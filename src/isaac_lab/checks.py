"""The checks of claims about training: what "similar", "unstable" or "almost identical" means, in numbers, and why."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Literal, TypeAlias

from isaac_lab.evidence import Check, Evidence, Finding, Verdict
from isaac_lab.experiments.fig5 import SELECTIONS
from isaac_lab.experiments.grids import accuracies, losses
from isaac_lab.experiments.recipe import RATES, Outcome
from isaac_lab.record import Record

#: Whether a panel passes, and the figures that say so.
Test: TypeAlias = Callable[[Outcome], tuple[bool, str]]

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
#: Curves of Figure 2 and their names, and the dampings that are drawn and those that are not.
METHODS = {"K-FAC": "kfac", "ζ": "zeta", "ζ*": "zeta_star"}
DRAWN = [f"{group} {damping}" for group in METHODS.values() for damping in ("0.1", "0.01")]
SMALLER = [f"{group} {damping}" for group in ("kfac", "zeta") for damping in ("0.001", "0.0001")]


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


def best(outcome: Outcome) -> Best:
    """Of a grid."""
    values = losses(outcome)
    return Best(
        _lowest(v for (_, g), v in values.items() if g != math.inf),
        _lowest(v for (a, g), v in values.items() if g == math.inf and a != math.inf),
        _lowest([values[math.inf, math.inf]]),
    )


def _lowest(values: Iterable[float]) -> float:
    return min((value for value in values if math.isfinite(value)), default=math.inf)


def _column(outcome: Outcome) -> list[float]:
    """ζ*: the losses over λ_a at λ_g = ∞."""
    return [v for (a, g), v in losses(outcome).items() if g == math.inf and a != math.inf]


def _row(outcome: Outcome) -> list[float]:
    """λ_a → ∞: the losses over λ_g at the largest λ_a of the grid."""
    values = losses(outcome)
    largest = max(a for a, g in values if a != math.inf)
    return [v for (a, g), v in values.items() if a == largest and g != math.inf]


def _final(outcome: Outcome, group: str) -> float:
    """Final training loss of a curve, mean over seeds; infinite where one diverged."""
    records = outcome.records[group]
    if not records or not all(record.finished for record in records):
        return math.inf
    return fmean(record.final("train_loss") for record in records)


def _by_step(outcome: Outcome, group: str) -> dict[int, float]:
    """Training loss of a curve at each measurement after the start, mean over seeds, as far as all seeds go."""
    rows = [
        {int(point["step"]): math.nan if point["train_loss"] is None else point["train_loss"] for point in record.points[1:]}
        for record in outcome.records[group]
    ]
    common = set.intersection(*(set(row) for row in rows)) if rows else set()
    return {step: fmean(row[step] for row in rows) for step in sorted(common)}


def _at_time(outcome: Outcome, group: str, per_step: float, seconds: float) -> float:
    """Training loss after so many seconds, straight between epochs on a logarithmic scale; infinite before the first epoch."""
    records = outcome.records[group]
    if not records or not all(record.finished for record in records):
        return math.inf
    known = [(step * per_step, loss) for step, loss in _by_step(outcome, group).items()]
    if not known or seconds < known[0][0]:
        return math.inf
    for (early, above), (late, below) in pairwise(known):
        if early <= seconds <= late:
            share = (seconds - early) / (late - early)
            return math.exp((1 - share) * math.log(above) + share * math.log(below))
    return known[-1][1]


def unknown(what: str) -> Finding:
    """There is nothing to decide it by."""
    return Finding(Verdict.UNKNOWN, what)


def decide(holds: bool, figures: str, scale: str) -> Finding:
    """One way or the other."""
    return Finding(Verdict.HOLDS if holds else Verdict.FAILS, figures, scale)


def _scales(found: Mapping[tuple[str, str], Outcome]) -> str:
    scales = {outcome.label for outcome in found.values()}
    if len(scales) == 1:
        return scales.pop()
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
        return Finding(_verdict(passed, len(results) - passed, len(names), need), "; ".join(parts), _scales(found))

    return check


def _verdict(passed: int, failed: int, count: int, need: Literal["all", "most"]) -> Verdict:
    if failed if need == "all" else failed >= count / 2:
        return Verdict.FAILS
    if passed == count if need == "all" else passed > count / 2:
        return Verdict.HOLDS
    return Verdict.UNKNOWN


def figure2(groups: Sequence[str], test: Test, *, panel: str = "a") -> Check:
    """A test of curves of Figure 2."""

    def check(evidence: Evidence) -> Finding:
        outcome = evidence.outcome("fig2", panel)
        if outcome is None or any(group not in outcome.records for group in groups):
            return unknown(f"missing: fig2 {panel}")
        return decide(*test(outcome), outcome.label)

    return check


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
    values = accuracies(outcome)
    star = max((v for (a, g), v in values.items() if g == math.inf and a != math.inf and math.isfinite(v)), default=0.0)
    zeta = max((v for (_, g), v in values.items() if g != math.inf and math.isfinite(v)), default=0.0)
    return keeps_up and star >= zeta - 2 * POINT, f"{text}; best accuracy ζ {zeta:.2%}, ζ* {star:.2%}"


def trains_well(outcome: Outcome) -> tuple[bool, str]:
    """The best ζ* ends below ∇ in training loss, and not below it in test accuracy."""
    own, values = best(outcome), accuracies(outcome)
    star = max((v for (a, g), v in values.items() if g == math.inf and a != math.inf and math.isfinite(v)), default=0.0)
    plain = values[math.inf, math.inf]
    text = f"loss ζ* {own.zeta_star:.3g}, ∇ {own.gradient:.3g}; accuracy ζ* {star:.2%}, ∇ {plain:.2%}"
    return own.zeta_star < own.gradient and (math.isnan(plain) or star >= plain - POINT), text


def similar_and_cheaper(evidence: Evidence) -> Finding:
    """ζ* ends where K-FAC does, and its step takes at most half as long."""
    costs = {name: evidence.ratio("cpu-1thread", "autoencoder", name) for name in ("zeta_star", "kfac")}
    star, kfac = costs["zeta_star"], costs["kfac"]
    if star is None or kfac is None:
        return unknown("missing: K-FAC and ζ* on the auto-encoder, bench cpu-1thread")

    def test(outcome: Outcome) -> tuple[bool, str]:
        own, other = _final(outcome, "zeta_star 0.1"), _final(outcome, "kfac 0.1")
        gap = behind(own, other)
        text = f"λ = 0.1: loss ζ* {own:.3g}, K-FAC {other:.3g}; time of a step × gradient: ζ* {star:.2f}, K-FAC {kfac:.1f}"
        return gap <= SAME and kfac >= 2 * star, text

    return figure2(("zeta_star 0.1", "kfac 0.1"), test)(evidence)


def almost_identical(outcome: Outcome) -> tuple[bool, str]:
    """K-FAC, ζ and ζ* at λ = 0.1 lie on each other."""
    groups = ("kfac 0.1", "zeta 0.1", "zeta_star 0.1")
    if any(math.isinf(_final(outcome, group)) for group in groups):
        return False, f"diverged: {', '.join(group for group in groups if math.isinf(_final(outcome, group)))}"
    curves = [_by_step(outcome, group) for group in groups]
    spread = [max(values) / min(values) - 1 for values in zip(*(curve.values() for curve in curves), strict=True)]
    ends = ", ".join(f"{name} {_final(outcome, group):.4g}" for name, group in zip(("K-FAC", "ζ", "ζ*"), groups, strict=True))
    text = f"at the end {ends}; difference at the end {spread[-1]:.1%}, median over epochs {median(spread):.1%}"
    return spread[-1] < IDENTICAL and median(spread) < IDENTICAL, text


def faster_convergence(outcome: Outcome) -> tuple[bool, str]:
    """One of the methods ends lower with λ = 0.01 than with λ = 0.1."""
    pairs = {name: (_final(outcome, f"{group} 0.1"), _final(outcome, f"{group} 0.01")) for name, group in METHODS.items()}
    text = "; ".join(f"{name}: λ = 0.1 {large:.4g}, λ = 0.01 {small:.4g}" for name, (large, small) in pairs.items())
    return any(small < large for large, small in pairs.values()), text


def _stability(outcome: Outcome, damping: float) -> dict[str, bool]:
    return {name: not unstable(outcome.records[f"{group} {damping:g}"]) for name, group in METHODS.items()}


def _stability_text(outcome: Outcome, damping: float) -> str:
    parts = []
    for name, stable in _stability(outcome, damping).items():
        group = f"{METHODS[name]} {damping:g}"
        rate, tried = outcome.rates[group], outcome.tried.get(group, {})
        lost = sum(math.isinf(loss) for loss in tried.values())
        about = "every rate diverged" if rate is None else f"at η = {rate:g}"
        about += f", {lost} of {len(tried)} rates diverged in trials" if tried and rate is not None else ""
        parts.append(f"{name} {'stable' if stable else 'unstable'} ({about})")
    return f"λ = {damping:g}: {', '.join(parts)}"


def only_star_is_unstable(outcome: Outcome) -> tuple[bool, str]:
    """At λ = 0.01 ζ* is unstable, K-FAC and ζ are not."""
    stable = _stability(outcome, 0.01)
    return stable["K-FAC"] and stable["ζ"] and not stable["ζ*"], _stability_text(outcome, 0.01)


def good_at_moderate_damping(outcome: Outcome) -> tuple[bool, str]:
    """ζ* at λ = 0.1 is stable and ends below ∇."""
    own, plain = _final(outcome, "zeta_star 0.1"), _final(outcome, "gradient")
    stable = not unstable(outcome.records["zeta_star 0.1"])
    return stable and own < plain, f"ζ* at λ = 0.1 {'stable' if stable else 'unstable'}, loss {own:.4g}; ∇ {plain:.4g}"


def unstable_below(outcome: Outcome) -> tuple[bool, str]:
    """K-FAC and ζ are unstable at the dampings that are not drawn."""
    lost = [not _stability(outcome, damping)[name] for damping in (0.001, 0.0001) for name in ("K-FAC", "ζ")]
    return all(lost), "; ".join(_stability_text(outcome, damping) for damping in (0.001, 0.0001))


def smallest_valid(evidence: Evidence) -> Finding:
    """The smallest λ at which K-FAC is stable is one that the paper names."""
    first, second = evidence.outcome("fig2", "a"), evidence.outcome("fig2", "b")
    if first is None or second is None:
        return unknown(f"missing: {', '.join(f'fig2 {n}' for n, o in (('a', first), ('b', second)) if o is None)}")
    where = {0.1: first, 0.01: first, 0.001: second, 0.0001: second}
    stable = {damping: _stability(outcome, damping)["K-FAC"] for damping, outcome in where.items()}
    text = "K-FAC: " + ", ".join(f"λ = {damping:g} {'stable' if own else 'unstable'}" for damping, own in stable.items())
    smallest = min((damping for damping, own in stable.items() if own), default=None)
    return decide(smallest in (0.01, 0.001), text, _scales({("fig2", "a"): first, ("fig2", "b"): second}))


def best_per_time(evidence: Evidence) -> Finding:
    """In the time that ∇ takes, a ζ* curve gets lowest."""
    outcome = evidence.outcome("fig2", "a")
    if outcome is None:
        return unknown("missing: fig2 a")
    seconds = {group: evidence.seconds("fig2", "a", group) for group in outcome.records}
    if any(value is None for value in seconds.values()):
        return unknown("missing: step times of fig2")
    plain = max((record.points[-1]["step"] for record in outcome.records["gradient"]), default=0) * (seconds["gradient"] or 0.0)
    values = {group: _at_time(outcome, group, seconds[group] or 0.0, plain) for group in outcome.records}
    text = f"training loss after {plain:.3g} s on one CPU thread, when ∇ is through: "
    ends = {group: "–" if math.isinf(value) else f"{value:.4g}" for group, value in sorted(values.items(), key=_second)}
    text += ", ".join(f"{group} {value}" for group, value in ends.items())
    star = min(values[group] for group in values if group.startswith("zeta_star"))
    return decide(star <= min(values.values()) and math.isfinite(star), text, outcome.label)


def _second(item: tuple[str, float]) -> float:
    return item[1]


def competitive(evidence: Evidence) -> Finding:
    """ζ* ends about as low as the best of the first- and second-order methods."""
    first, second = evidence.outcome("figA1", "a"), evidence.outcome("figA1", "c")
    if first is None or second is None:
        return unknown("missing: figA1")
    star = min(_final(first, "zeta_star 0.1"), _final(first, "zeta_star 0.01"))
    others = {group: _final(first, group) for group in ("gradient", "kfac 0.1", "kfac 0.01")}
    others |= {group: _final(second, group) for group in second.records}
    gap = behind(star, min(others.values()))
    ends = ", ".join(f"{group} {value:.4g}" for group, value in sorted(others.items(), key=_second))
    text = f"final training loss ζ* {star:.4g}; {ends}"
    return decide(gap <= SAME, text, _scales({("figA1", "a"): first, ("figA1", "c"): second}))


def selected_layers_beat(names: Sequence[str]) -> Check:
    """Each of these selections of layers against ∇."""

    def check(evidence: Evidence) -> Finding:
        outcome = evidence.outcome("fig5", "a")
        if outcome is None:
            return unknown("missing: fig5 a")
        plain = _final(outcome, "none")
        values = {name: _final(outcome, name) for name in names}
        text = f"∇ {plain:.3g}; " + ", ".join(f"layers {name} {value:.3g}" for name, value in values.items())
        return decide(all(value < plain for value in values.values()), f"{text} ({_seeds(outcome)})", outcome.label)

    return check


def _seeds(outcome: Outcome) -> str:
    count = len({record.trial.seed for record in outcome.all()})
    return f"mean of {count} seeds" if count > 1 else "one seed"


def individual_layers(evidence: Evidence) -> Finding:
    """Half of the selections of layers at least end below ∇."""
    outcome = evidence.outcome("fig5", "a")
    if outcome is None:
        return unknown("missing: fig5 a")
    plain = _final(outcome, "none")
    values = [_final(outcome, name) for name in SELECTIONS if name != "all"]
    text = f"∇ {plain:.3g}; median of the {len(values)} selections {median(values):.3g}, worst {max(values):.3g}"
    return decide(median(values) < plain, text, outcome.label)


def last_three(evidence: Evidence) -> Finding:
    """ζ* in layers 3, 4, 5 ends where ∇ does."""
    outcome = evidence.outcome("fig5", "a")
    if outcome is None:
        return unknown("missing: fig5 a")
    own, plain = _final(outcome, "3-5"), _final(outcome, "none")
    gap = behind(own, plain)
    text = f"layers 3, 4, 5 {own:.3g}, ∇ {plain:.3g}: {abs(gap):.0%} of log-loss {'worse' if gap > 0 else 'better'}"
    return decide(abs(gap) <= SAME, text, outcome.label)


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
    return Finding(verdict, text, _scales(found))


def similar_for_large_output_damping(evidence: Evidence) -> Finding:
    """Where λ_g is large, the cells of Figures 1 and A3 are alike."""
    found: dict[tuple[str, str], Outcome] = {}
    parts, results = [], []
    for panel in "abcd":
        fisher, newton = evidence.outcome("figA3", panel), evidence.outcome("fig1", panel)
        if fisher is None or newton is None or fisher.scale != newton.scale:
            parts.append(f"{panel}: missing at one scale")
            continue
        found["figA3", panel] = fisher
        ours, theirs = losses(fisher), losses(newton)
        cells = [cell for cell in ours if cell[1] >= 1e4 and cell[0] != math.inf and cell in theirs]
        gaps = [abs(behind(_or_inf(ours[cell]), _or_inf(theirs[cell]))) for cell in cells]
        results.append(median(gaps) <= SAME)
        parts.append(f"{panel}: median {median(gaps):.1%} of log-loss apart over {len(cells)} cells with λ_g ≥ 10^4")
    text = "; ".join(parts)
    if not all(results):
        return Finding(Verdict.FAILS, text, _scales(found))
    return Finding(Verdict.HOLDS if len(results) == 4 else Verdict.UNKNOWN, text, _scales(found) if found else "")


def _or_inf(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def row_is_good(outcome: Outcome) -> tuple[bool, str]:
    """λ_a → ∞: the best of the last row ends below ∇."""
    row, plain = _lowest(_row(outcome)), best(outcome).gradient
    return row < plain, f"best loss at the largest λ_a {row:.3g}, ∇ {plain:.3g}"


def row_is_better(outcome: Outcome) -> tuple[bool, str]:
    """The best of the last row (λ_a → ∞) ends below the best of the last column (ζ*)."""
    row, column = _lowest(_row(outcome)), _lowest(_column(outcome))
    return row < column, f"best loss λ_a → ∞ {row:.3g}, λ_g → ∞ {column:.3g}"


def row_is_more_sensitive(outcome: Outcome) -> tuple[bool, str]:
    """Fewer cells of the last row than of the last column are as good as the best of their line."""
    row, column = (_near_best(line) for line in (_row(outcome), _column(outcome)))
    return row < column, f"within 10 % of the best log-loss: {row} cells at λ_a → ∞, {column} at λ_g → ∞"


def _near_best(line: Sequence[float]) -> int:
    lowest = _lowest(line)
    return sum(math.isfinite(value) and behind(value, lowest) <= SAME for value in line)


def _lead(gap: float) -> str:
    if not math.isfinite(gap):
        return "diverged in every cell"
    return f"{'ahead' if gap > 0 else 'behind'} by {abs(gap):.1%} of log-loss"


def lesser_extent(evidence: Evidence) -> Finding:
    """The last row is ahead of the last column in Figure 1 too, but by less than in Figure A3."""
    found: dict[tuple[str, str], Outcome] = {}
    passed, parts = 0, []
    for panel in "abcd":
        fisher, newton = evidence.outcome("figA3", panel), evidence.outcome("fig1", panel)
        if fisher is None or newton is None:
            parts.append(f"{panel}: missing")
            continue
        found["figA3", panel] = fisher
        there, here = (behind(_lowest(_column(own)), _lowest(_row(own))) for own in (fisher, newton))
        passed += 0 < here < there
        parts.append(f"{panel}: λ_a → ∞ {_lead(here)} in Figure 1, {_lead(there)} in Figure A3")
    failed, text = len(found) - passed, "; ".join(parts)
    verdict = Verdict.HOLDS if passed > 2 else Verdict.FAILS if failed >= 2 else Verdict.UNKNOWN
    return Finding(verdict, text, _scales(found) if found else "")
