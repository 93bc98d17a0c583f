"""Checks of claims about BERT and ResNet-18 (section E4), on the summaries of Table 1 and Figure 6.

Scores of BERT are those on dev, accuracies of ResNet-18 those of the test images; both are means over seeds. A difference
counts only where Welch's t-test over the seeds has p < 0.05. The encoder is whatever the records are of; verdicts name it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from isaac_lab.claims.evidence import Evidence, Finding, Verdict, decide, unknown
from isaac_lab.stats import Difference, contrast
from isaac_lab.studies.paper.fig6 import METHODS as CONDITIONINGS
from isaac_lab.studies.paper.fig6 import SETTINGS
from isaac_lab.studies.paper.larger import ratios
from isaac_lab.studies.paper.tab1 import METHODS, TASKS, Task

Cell: TypeAlias = Mapping[str, Any]
COLA, MRPC, STSB, STSB_WITH_ADAM = TASKS
#: "Rather small": less than half a percentage point, fifty of CIFAR-10's 10,000 test images.
SMALL = 0.005
#: How a difference of accuracies is said.
POINTS = ", difference {gap:+.2f} points ({words})"
#: "Within 1 %".
CLOSE = 0.01


def ahead(differences: Iterable[Difference]) -> Verdict:
    """Of differences that should all be above 0: one that is behind decides, then one in which the seeds show nothing."""
    known = list(differences)
    if any(own.behind for own in known):
        return Verdict.FAILS
    return Verdict.HOLDS if all(own.ahead for own in known) else Verdict.UNDECIDED


@dataclass(frozen=True)
class Compared:
    """A way to condition beside ∇, in a column: the cells of both, their names, and the difference."""

    title: str
    labels: tuple[str, str]
    cells: tuple[Cell, Cell]
    difference: Difference

    def said(self, unit: str = "", form: str = ", difference {gap:+.2f} ({words})") -> str:
        """For people, in per cent."""
        both = ", ".join(_score(label, cell, unit) for label, cell in zip(self.labels, self.cells, strict=True))
        return f"{self.title}: {both}{form.format(gap=100 * self.difference.value, words=self.difference.words)}"


def _score(label: str, cell: Cell, unit: str = "") -> str:
    lost = f", {cell['diverged']} diverged" if cell["diverged"] else ""
    if cell["mean"] is None:
        return f"{label} all {cell['diverged']} diverged"
    spread = f" ± {100 * cell['std']:.2f}{unit}" if cell["std"] is not None else ""
    return f"{label} {100 * cell['mean']:.2f}{unit}{spread} (n {cell['n']}{lost})"


def _compared(summary: Cell, methods: Mapping[str, str], columns: Sequence[str], *, lost: bool) -> list[Compared]:
    """What methods, by name with a label, have in these columns; nothing unless both have as many runs, two at least.

    Where runs that diverged are `lost`, they count as a score of 0.
    """
    rows = [row["cells"] for name in methods for row in summary["rows"] if row.get("method") == name]
    both = [[cells[summary["columns"].index(column)] for column in columns] for cells in rows]
    known = [cell for cells in both for cell in cells]
    # Half of a comparison is none.
    if len(both) < 2 or None in known or len(runs := {cell["n"] + cell["diverged"] for cell in known}) > 1 or min(runs) < 2:
        return []
    labels, found = tuple(methods.values()), []
    for column, ours, plain in zip(columns, *both, strict=True):
        values = ([*cell["values"], *[0.0] * (cell["diverged"] if lost else 0)] for cell in (ours, plain))
        found.append(Compared(column, (labels[0], labels[1]), (ours, plain), contrast(*values)))
    return found


# BERT


def _scores(summary: Cell, method: str, *tasks: Task) -> list[Compared]:
    """All scores of these tasks; nothing where one task has none."""
    found = [_compared(summary, {method: METHODS[method].label, "gradient": "∇"}, own.columns, lost=True) for own in tasks]
    return [own for task in found for own in task] if all(found) else []


def _said(verdict: Verdict, summary: Cell, parts: Iterable[str], scale: str) -> Finding:
    return Finding(verdict, f"{summary['model']}: {'; '.join(parts)}", scale)


def scores_better(evidence: Evidence, task: str, method: str) -> Finding:
    """A method is ahead of ∇ in all scores of a task."""
    own = next(own for own in TASKS if own.title == task)
    for scale, summary in evidence.summaries("tab1").items():
        if found := _scores(summary, method, own):
            return _said(ahead(one.difference for one in found), summary, (one.said() for one in found), scale)
    return unknown(f"missing: {task} of tab1, two seeds at least and as many of ∇ as of {METHODS[method].label}")


def adam_works(evidence: Evidence) -> Finding:
    """With Adam, ζ* trains CoLA and MRPC: no run diverged, and no score is shown to be behind that of ∇."""
    for scale, summary in evidence.summaries("tab1").items():
        if found := _scores(summary, "expand", COLA, MRPC):
            fails = any(own.cells[0]["diverged"] or own.difference.behind for own in found)
            parts = (own.said(form=" ({words})") for own in found)
            return _said(Verdict.FAILS if fails else Verdict.HOLDS, summary, parts, scale)
    return unknown("missing: CoLA and MRPC of tab1, two seeds at least and as many of ∇ as of ζ*")


def adam_fails_on_similarity(evidence: Evidence) -> Finding:
    """On STS-B the best setting of ζ* with Adam is behind the best with SGD and momentum."""
    for scale, summary in evidence.summaries("tab1").items():
        adam, momentum = (_best(summary, task) for task in (STSB_WITH_ADAM, STSB))
        if adam is not None and momentum is not None:
            text = "best mean of Pearson and Spearman over the grid at the tuning seed: "
            text += f"Adam {100 * adam:.2f}, SGD with momentum {100 * momentum:.2f}"
            return _said(Verdict.HOLDS if adam < momentum else Verdict.FAILS, summary, [text], scale)
    return unknown("missing: the grids of ζ* on STS-B of tab1, with Adam and with SGD and momentum")


def _best(summary: Cell, task: Task) -> float | None:
    """What the best setting of ζ* reached; minus infinity where all diverged, None where some have not been tried."""
    for tried in summary["tried"]:
        if (tried["task"], tried["method"]) == (task.title, "expand") and not tried["missing"]:
            return max((own["score"] for own in tried["settings"] if own["score"] is not None), default=-math.inf)
    return None


# ResNet-18


def _accuracies(evidence: Evidence) -> tuple[dict[str, Compared], str]:
    """By setting, ζ* in the last layer and ∇, where two runs of each have ended; at the scale that has most settings."""

    def known(summary: Cell) -> dict[str, Compared]:
        pairs = {
            name: _compared(summary, {"last": "ζ*", "none": "∇"}, [own.title], lost=False) for name, own in SETTINGS.items()
        }
        return {name: own[0] for name, own in pairs.items() if own and min(cell["n"] for cell in own[0].cells) >= 2}

    found = [(known(summary), scale) for scale, summary in evidence.summaries("fig6").items()]
    return max(found, key=lambda item: len(item[0]), default=({}, ""))


def _reached(verdict: Verdict, known: Mapping[str, Compared], scale: str) -> Finding:
    missing = [own.title for setting, own in SETTINGS.items() if setting not in known]
    more = [f"missing: {', '.join(missing)} of fig6"] if missing else []
    return Finding(verdict, "; ".join([*(own.said("%", POINTS) for own in known.values()), *more]), scale)


def accuracies_better(evidence: Evidence) -> Finding:
    """ζ* is ahead in all settings; one in which it is behind decides, then one in which the seeds show nothing."""
    known, scale = _accuracies(evidence)
    verdict = ahead(own.difference for own in known.values())
    lacking = verdict is Verdict.HOLDS and len(known) < len(SETTINGS)
    return _reached(Verdict.UNKNOWN if lacking else verdict, known, scale)


def small_by_default(evidence: Evidence) -> Finding:
    """With momentum and weight decay ζ* is ahead, by little."""
    known, scale = _accuracies(evidence)
    if "a" not in known:
        return unknown(f"missing: {SETTINGS['a'].title} of fig6")
    gap, text = known["a"].difference, known["a"].said("%", POINTS)
    if not gap.ahead and not gap.behind:
        return Finding(Verdict.UNDECIDED, text, scale)
    return decide(gap.ahead and gap.value < SMALL, text, scale)


def large_without(evidence: Evidence) -> Finding:
    """In plain SGD ζ* is ahead, by more than in both other settings."""
    known, scale = _accuracies(evidence)
    if "c" in known and (verdict := ahead([known["c"].difference])) is not Verdict.HOLDS:
        return _reached(verdict, known, scale)
    if len(known) < len(SETTINGS):
        return _reached(Verdict.UNKNOWN, known, scale)
    values = {setting: [cell["values"] for cell in own.cells] for setting, own in known.items()}
    gaps = [contrast(*values["c"], *values[other], weights=(1, -1, -1, 1)) for other in ("a", "b")]
    return _reached(ahead(gaps), known, scale)


def within_one_percent(evidence: Evidence, mode: str) -> Finding:
    """A step of ζ* in the last layer takes as long as one of ∇."""
    for scale, summary in evidence.summaries("fig6").items():
        times = summary["times"].get(mode)
        if times is None or "last" not in times["methods"] or "gpu" not in times["machine"]:
            continue
        text = ratios(times, CONDITIONINGS, "{label} {median:.3f} ({low:.3f}–{high:.3f})")
        figures = f"time of a step over that of ∇, {mode}, {times['machine']['gpu']}, median (quartiles): {text}"
        return decide(abs(times["methods"]["last"]["ratio"]["median"] - 1) <= CLOSE, figures, scale)
    return unknown(f"missing: times of fig6 on a GPU, {mode}")
