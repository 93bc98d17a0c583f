"""The section of the race: ISAAC beside the optimizers that people would pick instead, workload by workload."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isaac_lab.page.parts import Block, Figure, Heading, Missing, Paragraph, Row, Section, Table, identifier
from isaac_lab.page.summaries import Summary, checked, find
from isaac_lab.record import Store
from isaac_lab.studies.race.draw import figure
from isaac_lab.studies.race.ends import lowest, pairs
from isaac_lab.studies.race.standings import summarize
from isaac_lab.words import number, percent, spread, times

__all__ = ["section", "summaries"]

Record = Mapping[str, Any]

#: Workloads whose names hold these come first, in this order.
ORDER = ("mnist-mlp", "mnist-autoencoder", "fashion-autoencoder", "cifar-resnet18", "char-gpt", "cola")


def summaries(results: Path, directory: str) -> list[Summary]:
    """All of each workload, the largest scale first; smoke tests only where there is nothing else."""
    folders = [path for path in sorted((results / "race").glob("*")) if path.is_dir()]
    folders.sort(key=lambda path: next((place for place, part in enumerate(ORDER) if part in path.name), len(ORDER)))

    def name(path: Path) -> str:
        return f"{directory}/{path.relative_to(results).as_posix()}"

    return [summary for folder in folders for summary in find(folder, name, lambda path, _: summarize(Store(path)))]


def _reached(method: Record) -> bool:
    """Whether every seed reached the target."""
    found = method.get("seconds_to_target")
    return bool(found and found.get("mean") is not None and all(value is not None for value in found["values"]))


def section(found: Sequence[Summary]) -> Section:
    """All races, the answer first."""
    blocks: list[Block] = [_answer(found)] if found else []
    seen: set[str] = set()
    for summary in found:
        with checked(summary):
            workload = summary.data["workload"]
            blocks += _race(summary, identifier(workload, summary.scale) if workload in seen else identifier(workload))
            seen.add(workload)
    if not found:
        blocks.append(Missing("The race", "isaac-newton race --scale quick"))
    lead = (
        "ISAAC beside the optimizers that people would pick instead. **These races are short and unevenly tuned: read them as "
        "a first look.** The network, data, batch and initial weights are the same. Each method had the same number of trials, "
        "but not the same search. The target is the loss of AdamW's worst seed. The target on CoLA lies just below predicting "
        "by frequency, so that race measures nothing. The page docs/integrity.md says what was withdrawn."
    )
    return Section("race", "The race", lead, tuple(blocks))


def _answer(found: Sequence[Summary]) -> Table:
    rows = []
    for summary in found:
        with checked(summary):
            scale = "smoke test" if summary.scale == "smoke" else summary.scale
            title = f"{summary.data['title']} ({scale}, n = {summary.data['seeds']})"
            for pair in pairs(summary.data):
                own, shown, mark = pair.difference, "–", {}
                if own is not None:
                    shown, mark = own.words.removeprefix("p = "), {4: "good"} if own.behind else {4: "bad"} if own.ahead else {}
                ends = [number(end["mean"], 4) for end in (pair.alone, pair.ours)]
                rows.append(Row((title, pair.label, *ends, shown, lowest(summary.data) or "–"), marks=mark))
    return Table(
        "Loss at the end of the budget, alone and with ISAAC",
        ("Workload", "Optimizer", "Alone", "With ISAAC", "p", "Lowest of all"),
        tuple(rows),
        frozenset({0, 1, 5}),
        "Means over n seeds, lower is better. p: Welch's t-test; from 0.05 on no difference is shown.",
    )


def _race(summary: Summary, id: str) -> list[Block]:
    data = summary.data
    about = [data.get("data"), f"{data['steps']:,} steps of {data['batch']:,}"]
    about += [f"{data['trials_per_method']} tuning trials for each method", f"{data['seeds']} seeds", data.get("mode")]
    text = " · ".join(str(part) for part in about if part)
    marked = "**Smoke test: it shows that the code runs, and nothing of the methods.** " if summary.scale == "smoke" else ""
    target = (
        f"Target: {data['quantity_title'].lower()} {number(data['target'], 4)} ({data['target_by']})."
        if data.get("target")
        else "No target."
    )
    return [
        Heading(f"race-{id}", f"{data['title']}, scale “{summary.scale}”"),
        Paragraph(f"{marked}{text}. {target}"),
        Figure(figure(data, f"curve-{id}")),
        _table(data),
        summary.source,
    ]


def _table(data: Record) -> Table:
    methods: Sequence[Record] = data["methods"]
    metrics = list(dict.fromkeys(name for method in methods for name in method.get("metrics") or ()))

    def order(method: Record) -> tuple[bool, float]:
        mean = (method.get("final") or {}).get("mean")
        return not method.get("n"), math.inf if mean is None else mean

    headings = ["Method", f"{data['quantity_title']} at the budget", "Steps to target", "Seconds to target"]
    headings += [name.replace("_", " ").capitalize() for name in metrics]
    headings += ["ms per step", "× SGD", "n", "Diverged", "Settings", "Mode"]
    rows = tuple(_row(method, metrics, data) for method in sorted(methods, key=order))
    note = (
        "Mean ± standard deviation over seeds, the lowest at the end first. × SGD: the time of a step over that of SGD. "
        "(2 of 3 seeds): the mean is of those that reached the target."
    )
    return Table(
        f"{data['title']}: to the target, and at the budget of {data['steps']:,} steps",
        tuple(headings),
        rows,
        frozenset({0, len(headings) - 2, len(headings) - 1}),
        note,
    )


def _row(method: Record, metrics: Sequence[str], data: Record) -> Row:
    ours = bool(method.get("ours"))
    if not method.get("n"):
        return Row((method["label"],), ours, f"not run: {method.get('reason') or 'no reason is recorded'}")
    cells = [method["label"], spread(method.get("final"))]
    cells += [_to_target(method.get(f"{unit}_to_target")) for unit in ("steps", "seconds")]
    for name in metrics:
        cells.append(_metric(name, (method.get("metrics") or {}).get(name)))
    each = method.get("seconds_per_step")
    cells += ["–" if each is None else number(1e3 * each), times(method.get("ratio_to_sgd"))]
    diverged = method.get("diverged") or 0
    cells += [str(method["n"]), str(diverged), _settings(method.get("settings")), method.get("mode") or data.get("mode") or "–"]
    marks = {len(cells) - 3: "bad"} if diverged else {}
    if not _reached(method):
        marks[3] = "bad"
    if method.get("reason"):
        cells[0] += f" ({method['reason']})"
    return Row(tuple(cells), ours, marks=marks)


def _to_target(found: Record | None) -> str:
    """Those that reached it, and how many did where not all did."""
    values = list((found or {}).get("values") or ())
    reached = [value for value in values if value is not None]
    if not found or not reached:
        return "not reached"
    return spread(found) + ("" if len(reached) == len(values) else f" ({len(reached)} of {len(values)} seeds)")


def _metric(name: str, found: Record | None) -> str:
    if found is None or found.get("mean") is None:
        return "–"
    if "accuracy" in name:
        deviation = found.get("std")
        return percent(found["mean"]) + ("" if deviation is None else f" ± {percent(deviation)}")
    return spread(found)


def _settings(settings: Record | None) -> str:
    if not settings:
        return "–"
    return ", ".join(
        f"{name.replace('_', ' ')} {value:g}" if isinstance(value, float) else f"{name.replace('_', ' ')} {value}"
        for name, value in settings.items()
    )
