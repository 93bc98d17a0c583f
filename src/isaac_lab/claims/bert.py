"""The paper's sentences on BERT (section E4), as checks on the summary of `isaac-newton reproduce tab1`.

Scores are those on dev, means over seeds. A difference counts only where Welch's t-test over the seeds has p < 0.05. The
encoder is whatever the records are of, and every verdict names it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from isaac_lab.claims.checks import ahead, unknown
from isaac_lab.claims.evidence import Check, Claim, Evidence, Finding, Verdict
from isaac_lab.stats import Difference, contrast
from isaac_lab.studies.paper.finetuning import METHODS, TASKS, Task

PLAIN = "gradient"
COLA, MRPC, STSB, STSB_WITH_ADAM = TASKS


def _cells(summary: Mapping[str, Any], method: str, task: Task) -> list[dict[str, Any]]:
    """One for each score of the task; none unless each is there."""
    rows = [row["cells"] for row in summary["rows"] if row.get("method") == method]
    cells = [rows[0][summary["columns"].index(column)] for column in task.columns] if rows else []
    return [] if any(cell is None for cell in cells) else cells


def _difference(ours: Mapping[str, Any], plain: Mapping[str, Any]) -> Difference:
    """Of the means; runs that diverged count as a score of 0."""
    return contrast(*([*cell["values"], *[0.0] * cell["diverged"]] for cell in (ours, plain)))


def _enough(ours: Sequence[Mapping[str, Any]], plain: Sequence[Mapping[str, Any]]) -> bool:
    """Whether both have the same number of runs, two at least: half of a comparison is none."""
    runs = {cell["n"] + cell["diverged"] for cell in (*ours, *plain)}
    return bool(ours) and bool(plain) and len(runs) == 1 and min(runs) >= 2


def outperforms(task: Task, method: str) -> Check:
    """A method is ahead of ∇ in all scores of a task."""

    def check(evidence: Evidence) -> Finding:
        for scale, summary in evidence.summaries("tab1").items():
            ours, plain = (_cells(summary, name, task) for name in (method, PLAIN))
            if not _enough(ours, plain):
                continue
            differences = [_difference(own, other) for own, other in zip(ours, plain, strict=True)]
            parts = [
                f"{column}: {_shown(METHODS[method].label, own)}, {_shown('∇', other)}, difference {100 * found.value:+.2f} "
                f"({found.words})"
                for column, own, other, found in zip(task.columns, ours, plain, differences, strict=True)
            ]
            return _finding(ahead(differences), summary, parts, scale)
        return unknown(f"missing: {task.title} of tab1, two seeds at least and as many of ∇ as of {METHODS[method].label}")

    return check


def adam_works(evidence: Evidence) -> Finding:
    """With Adam, ζ* trains CoLA and MRPC: no run diverged, and no score is shown to be behind that of ∇."""
    for scale, summary in evidence.summaries("tab1").items():
        pairs = [(task, _cells(summary, "expand", task), _cells(summary, PLAIN, task)) for task in (COLA, MRPC)]
        if not all(_enough(ours, plain) for _, ours, plain in pairs):
            continue
        parts, holds = [], True
        for task, ours, plain in pairs:
            for column, own, other in zip(task.columns, ours, plain, strict=True):
                found = _difference(own, other)
                holds &= not own["diverged"] and not found.behind
                parts.append(f"{column}: {_shown('ζ*', own)}, {_shown('∇', other)} ({found.words})")
        return _finding(Verdict.HOLDS if holds else Verdict.FAILS, summary, parts, scale)
    return unknown("missing: CoLA and MRPC of tab1, two seeds at least and as many of ∇ as of ζ*")


def adam_fails_on_similarity(evidence: Evidence) -> Finding:
    """On STS-B the best setting of ζ* with Adam is behind the best with SGD and momentum."""
    for scale, summary in evidence.summaries("tab1").items():
        adam, momentum = (_best(summary, task) for task in (STSB_WITH_ADAM, STSB))
        if adam is None or momentum is None:
            continue
        parts = [
            f"best mean of Pearson and Spearman over the grid at the tuning seed: Adam {100 * adam:.2f}, SGD with momentum "
            f"{100 * momentum:.2f}"
        ]
        return _finding(Verdict.HOLDS if adam < momentum else Verdict.FAILS, summary, parts, scale)
    return unknown("missing: the grids of ζ* on STS-B of tab1, with Adam and with SGD and momentum")


def _best(summary: Mapping[str, Any], task: Task) -> float | None:
    """What the best setting of ζ* reached; minus infinity where all diverged, None where some have not been tried."""
    for tried in summary["tried"]:
        if (tried["task"], tried["optimizer"], tried["method"]) == (task.title, task.optimizer, "expand") and not tried[
            "missing"
        ]:
            return max((own["score"] for own in tried["settings"] if own["score"] is not None), default=-math.inf)
    return None


def _finding(verdict: Verdict, summary: Mapping[str, Any], parts: Sequence[str], scale: str) -> Finding:
    return Finding(verdict, f"{summary['model']}: {'; '.join(parts)}", scale)


def _shown(label: str, cell: Mapping[str, Any]) -> str:
    lost = f", {cell['diverged']} diverged" if cell["diverged"] else ""
    if cell["mean"] is None:
        return f"{label} all {cell['diverged']} diverged"
    spread = f" ± {100 * cell['std']:.2f}" if cell["std"] is not None else ""
    return f"{label} {100 * cell['mean']:.2f}{spread} (n {cell['n']}{lost})"


_RULE = "Mean over seeds on dev, in percent, each method at the best of its settings. "
_COUNTS = "with p < 0.05 in Welch's t-test over seeds. "
_OTHER = "The paper's models are BERT-Base and BERT-Mini; the verdict is of the encoder that it names. "
_TOKENS, _REDUCE = "Each token is a row (expand).", "The mean of a sentence's tokens is a row (reduce)."
_COLA = (
    "For the “Corpus of Linguistic Acceptability” (CoLA) data set, we fine-tune both the BERT-Base and the BERT-Mini models "
    "and find that we outperform the gradient descent baseline in both cases."
)
_MRPC = (
    "For the “Microsoft Research Paraphrase Corpus” (MRPC) data set, we fine-tune the BERT-Base model and find that we "
    "outperform the baseline both in terms of accuracy and F1-score."
)
_STSB = (
    "Finally, on the “Semantic Textual Similarity Benchmark” (STS-B) data set, we fine-tune the BERT-Mini model and achieve "
    "higher Pearson and Spearman correlations than the baseline."
)


def _pair(number: str, text: str, task: Task, scores: str) -> tuple[Claim, Claim]:
    """The sentence checked for both meanings of a row."""
    test = f"{_RULE}ζ* is ahead of ∇ in {scores} {_COUNTS}{_OTHER}"
    return (
        Claim(number, text, "tab1", test + _TOKENS, outperforms(task, "expand")),
        Claim(f"{number}r", text, "tab1", test + _REDUCE, outperforms(task, "reduce")),
    )


BERT: tuple[Claim, ...] = (
    *_pair("E4.1", _COLA, COLA, "Matthews correlation,"),
    *_pair("E4.2", _MRPC, MRPC, "accuracy and in F1,"),
    *_pair("E4.3", _STSB, STSB, "both correlations,"),
    Claim(
        "E4.4",
        "While for training with CoLA and MRPC, we were able to use the Adam optimizer (which is recommended for this task and "
        "model) in conjunction with ζ* in place of the gradient, …",
        "tab1",
        f"{_RULE}No run of ζ* diverged, and in Matthews correlation, accuracy and F1 it is not behind ∇ "
        f"with p < 0.05. {_OTHER}{_TOKENS}",
        adam_works,
    ),
    Claim(
        "E4.4b",
        "for STS-B Adam did not work well.",
        "tab1",
        "ζ* with Adam, full runs at the tuning seed, one seed only: the best mean of both correlations on dev is below "
        f"the best with SGD and momentum. {_OTHER}{_TOKENS}",
        adam_fails_on_similarity,
    ),
)
