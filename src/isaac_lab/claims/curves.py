"""Checks of claims about curves of training, Figures 2, 5 and A1: what "almost identical" or "unstable" means, in numbers."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from itertools import accumulate
from statistics import fmean, median

import numpy as np

from isaac_lab.claims.evidence import Check, Evidence, Finding, decide, unknown
from isaac_lab.claims.grids import SAME, behind, scales
from isaac_lab.record import Record
from isaac_lab.studies.paper.figures import SELECTIONS
from isaac_lab.studies.paper.recipe import Outcome

#: "Almost identical": so much relative difference of two losses; a line in a plot of a few decades is about as thick.
IDENTICAL = 0.10
#: "Unstable": diverged, or at some epoch a training loss so many times the lowest before it; noise between epochs is less.
JUMP = 2.0
FIG2, FIG2_SMALL, FIG5 = ("fig2", "a"), ("fig2", "b"), ("fig5", "a")
#: Curves of Figure 2 and their names, and the dampings that are drawn and those that are not.
METHODS = {"K-FAC": "kfac", "ζ": "zeta", "ζ*": "zeta_star"}
DRAWN = [f"{group} {damping}" for group in METHODS.values() for damping in ("0.1", "0.01")]
SMALLER = [f"{group} {damping}" for group in ("kfac", "zeta") for damping in ("0.001", "0.0001")]


def curves(panel: tuple[str, str], groups: Sequence[str] = ()) -> Callable[[Callable[[Outcome], tuple[bool, str]]], Check]:
    """The check that the curves of a panel pass a test, if it has been run with these groups."""

    def made(test: Callable[[Outcome], tuple[bool, str]]) -> Check:
        @wraps(test)
        def check(evidence: Evidence) -> Finding:
            outcome = evidence.outcome(*panel)
            if outcome is None or any(group not in outcome.records for group in groups):
                return unknown(f"missing: {' '.join(panel)}")
            return decide(*test(outcome), outcome.label)

        return check

    return made


def unstable(records: Sequence[Record]) -> bool:
    """Whether a run diverged, or jumped to twice the lowest training loss it had; without records every rate diverged."""
    for record in records:
        losses = record.column("train_loss")
        before = [math.inf, *accumulate(losses, min)]
        jumps = any(not math.isfinite(loss) or loss > JUMP * lowest for loss, lowest in zip(losses, before, strict=False))
        if jumps or not record.finished:
            return True
    return not records


def _final(outcome: Outcome, group: str) -> float:
    """Final training loss of a curve, mean over seeds; infinite where one diverged."""
    records = outcome.records[group]
    if not records or not all(record.finished for record in records):
        return math.inf
    return fmean(record.final("train_loss") for record in records)


def _sorted(values: Mapping[str, float]) -> str:
    """The lowest first, for people."""
    ordered = sorted(values.items(), key=lambda item: item[1])
    return ", ".join(f"{name} {'–' if math.isinf(value) else f'{value:.4g}'}" for name, value in ordered)


def _by_step(outcome: Outcome, group: str) -> dict[int, float]:
    """Training loss of a curve at each measurement after the start, mean over seeds, as far as all seeds go."""
    rows = [
        {int(point["step"]): math.nan if point["train_loss"] is None else point["train_loss"] for point in record.points[1:]}
        for record in outcome.records[group]
    ]
    common = set.intersection(*(set(row) for row in rows)) if rows else set()
    return {step: fmean(row[step] for row in rows) for step in sorted(common)}


def similar_and_cheaper(evidence: Evidence) -> Finding:
    """ζ* ends where K-FAC does, and its step takes at most half as long."""
    star, kfac = (evidence.ratio("cpu-1thread", "autoencoder", name) for name in ("zeta_star", "kfac"))
    if star is None or kfac is None:
        return unknown("missing: K-FAC and ζ* on the auto-encoder, bench cpu-1thread")

    @curves(FIG2, ("zeta_star 0.1", "kfac 0.1"))
    def check(outcome: Outcome) -> tuple[bool, str]:
        own, other = _final(outcome, "zeta_star 0.1"), _final(outcome, "kfac 0.1")
        text = f"λ = 0.1: loss ζ* {own:.3g}, K-FAC {other:.3g}; time of a step × gradient: ζ* {star:.2f}, K-FAC {kfac:.1f}"
        return behind(own, other) <= SAME and kfac >= 2 * star, text

    return check(evidence)


@curves(FIG2, DRAWN)
def almost_identical(outcome: Outcome) -> tuple[bool, str]:
    """K-FAC, ζ and ζ* at λ = 0.1 lie on each other."""
    groups = {name: f"{group} 0.1" for name, group in METHODS.items()}
    if lost := [group for group in groups.values() if math.isinf(_final(outcome, group))]:
        return False, f"diverged: {', '.join(lost)}"
    rows = zip(*(_by_step(outcome, group).values() for group in groups.values()), strict=True)
    spread = [max(values) / min(values) - 1 for values in rows]
    ends = ", ".join(f"{name} {_final(outcome, group):.4g}" for name, group in groups.items())
    text = f"at the end {ends}; difference at the end {spread[-1]:.1%}, median over epochs {median(spread):.1%}"
    return spread[-1] < IDENTICAL and median(spread) < IDENTICAL, text


@curves(FIG2, DRAWN)
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


@curves(FIG2, DRAWN)
def only_star_is_unstable(outcome: Outcome) -> tuple[bool, str]:
    """At λ = 0.01 ζ* is unstable, K-FAC and ζ are not."""
    stable = _stability(outcome, 0.01)
    return stable["K-FAC"] and stable["ζ"] and not stable["ζ*"], _stability_text(outcome, 0.01)


@curves(FIG2, ("zeta_star 0.1", "gradient"))
def good_at_moderate_damping(outcome: Outcome) -> tuple[bool, str]:
    """ζ* at λ = 0.1 is stable and ends below ∇."""
    own, plain = _final(outcome, "zeta_star 0.1"), _final(outcome, "gradient")
    stable = not unstable(outcome.records["zeta_star 0.1"])
    return stable and own < plain, f"ζ* at λ = 0.1 {'stable' if stable else 'unstable'}, loss {own:.4g}; ∇ {plain:.4g}"


@curves(FIG2_SMALL, SMALLER)
def unstable_below(outcome: Outcome) -> tuple[bool, str]:
    """K-FAC and ζ are unstable at the dampings that are not drawn."""
    lost = [not _stability(outcome, damping)[name] for damping in (0.001, 0.0001) for name in ("K-FAC", "ζ")]
    return all(lost), "; ".join(_stability_text(outcome, damping) for damping in (0.001, 0.0001))


def smallest_valid(evidence: Evidence) -> Finding:
    """The smallest λ at which K-FAC is stable is one that the paper names."""
    found = {panel: outcome for panel in (FIG2, FIG2_SMALL) if (outcome := evidence.outcome(*panel))}
    if missing := [" ".join(panel) for panel in (FIG2, FIG2_SMALL) if panel not in found]:
        return unknown(f"missing: {', '.join(missing)}")
    where = {0.1: FIG2, 0.01: FIG2, 0.001: FIG2_SMALL, 0.0001: FIG2_SMALL}
    stable = {damping: _stability(found[panel], damping)["K-FAC"] for damping, panel in where.items()}
    text = "K-FAC: " + ", ".join(f"λ = {damping:g} {'stable' if own else 'unstable'}" for damping, own in stable.items())
    smallest = min((damping for damping, own in stable.items() if own), default=None)
    return decide(smallest in (0.01, 0.001), text, scales(found))


def best_per_time(evidence: Evidence) -> Finding:
    """In the time that ∇ takes, a ζ* curve gets lowest; between epochs losses are straight on a logarithmic scale."""

    @curves(FIG2)
    def check(outcome: Outcome) -> tuple[bool, str]:
        steps = max((record.points[-1]["step"] for record in outcome.records["gradient"]), default=0)
        plain, values = steps * seconds.get("gradient", 0.0), dict.fromkeys(outcome.records, math.inf)
        for group, known in ((group, _by_step(outcome, group)) for group in outcome.records):
            if known and math.isfinite(_final(outcome, group)):
                times, losses = [step * seconds[group] for step in known], [math.log(max(x, 1e-300)) for x in known.values()]
                # Before the first epoch it is infinite.
                values[group] = math.exp(np.interp(plain, times, losses, left=math.inf))
        star = min(values[group] for group in values if group.startswith("zeta_star"))
        text = f"training loss after {plain:.3g} s on one CPU thread, when ∇ is through: {_sorted(values)}"
        return star <= min(values.values()) and math.isfinite(star), text

    groups = outcome.records if (outcome := evidence.outcome(*FIG2)) else ()
    seconds = {group: value for group in groups if (value := evidence.seconds(*FIG2, group)) is not None}
    return check(evidence) if len(seconds) == len(groups) else unknown("missing: step times of fig2")


def competitive(evidence: Evidence) -> Finding:
    """ζ* ends about as low as the best of the first- and second-order methods."""
    first, second = evidence.outcome("figA1", "a"), evidence.outcome("figA1", "c")
    if first is None or second is None:
        return unknown("missing: figA1")
    star = min(_final(first, "zeta_star 0.1"), _final(first, "zeta_star 0.01"))
    others = {group: _final(first, group) for group in ("gradient", "kfac 0.1", "kfac 0.01")}
    others |= {group: _final(second, group) for group in second.records}
    text = f"final training loss ζ* {star:.4g}; {_sorted(others)}"
    holds = behind(star, min(others.values())) <= SAME
    return decide(holds, text, scales({("figA1", "a"): first, ("figA1", "c"): second}))


@curves(FIG5)
def selected_layers_beat(outcome: Outcome) -> tuple[bool, str]:
    """Each selection of layers ends below ∇, but for the last three layers."""
    plain = _final(outcome, "none")
    values = {name: _final(outcome, name) for name in SELECTIONS if name != "3-5"}
    text = f"∇ {plain:.3g}; " + ", ".join(f"layers {name} {value:.3g}" for name, value in values.items())
    count = len({record.trial.seed for record in outcome.all()})
    seeds = f"mean of {count} seeds" if count > 1 else "one seed"
    return all(value < plain for value in values.values()), f"{text} ({seeds})"


@curves(FIG5)
def individual_layers(outcome: Outcome) -> tuple[bool, str]:
    """Half of the selections of layers at least end below ∇."""
    plain = _final(outcome, "none")
    values = [_final(outcome, name) for name in SELECTIONS if name != "all"]
    text = f"∇ {plain:.3g}; median of the {len(values)} selections {median(values):.3g}, worst {max(values):.3g}"
    return median(values) < plain, text


@curves(FIG5)
def last_three(outcome: Outcome) -> tuple[bool, str]:
    """ζ* in layers 3, 4, 5 ends where ∇ does."""
    own, plain = _final(outcome, "3-5"), _final(outcome, "none")
    gap = behind(own, plain)
    text = f"layers 3, 4, 5 {own:.3g}, ∇ {plain:.3g}: {abs(gap):.0%} of log-loss {'worse' if gap > 0 else 'better'}"
    return abs(gap) <= SAME, text
