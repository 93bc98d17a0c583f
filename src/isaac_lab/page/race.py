"""The section of the race: ISAAC against the optimizers that people would pick instead, workload by workload."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isaac_lab.page import lines
from isaac_lab.page.lines import Axis, Line, Target
from isaac_lab.page.parts import Block, Figure, Heading, Method, Missing, Paragraph, Row, Section, Table, identifier
from isaac_lab.page.summaries import Summary, checked, find
from isaac_lab.page.words import number, percent, spread, times
from isaac_lab.race.standings import summarize
from isaac_lab.record import Store

__all__ = ["Standing", "section", "standings", "summaries"]

Record = Mapping[str, Any]

#: Workloads whose names hold these come first, in this order.
ORDER = ("mnist-mlp", "mnist-autoencoder", "fashion-autoencoder", "cifar-resnet18", "char-gpt", "cola")
#: A method with ISAAC has the hue of what it is put on.
HUES = {
    "sgd": "black",
    "momentum": "sky",
    "adamw": "blue",
    "muon": "red",
    "soap": "green",
    "shampoo": "orange",
    "singd": "pink",
    "kfac": "yellow",
}
SPARE = ("grey", "orange", "green", "pink")
#: Of methods without ISAAC, whether or not they have a hue of their own.
DASHES = {True: (5, 4), False: (8, 3, 2, 3)}
#: Who people would pick instead.
RIVALS = {"adamw": "AdamW", "muon": "Muon", "soap": "SOAP"}
#: Times the largest loss of an untrained network: what lies above has diverged, and would press the rest flat.
CEILING = 1.5


def summaries(results: Path, directory: str) -> list[Summary]:
    """All of each workload, the largest scale first; smoke tests only where there is nothing else."""
    folders = [path for path in sorted((results / "race").glob("*")) if path.is_dir()]
    folders.sort(key=lambda path: next((place for place, part in enumerate(ORDER) if part in path.name), len(ORDER)))

    def name(path: Path) -> str:
        return f"{directory}/{path.relative_to(results).as_posix()}"

    return [summary for folder in folders for summary in find(folder, name, lambda path, _: summarize(Store(path)))]


@dataclass(frozen=True)
class Standing:
    """The best of ours in a race against its rivals; "best" has the shortest time to the target in all seeds.

    Args:
        title: Of the workload.
        ours: Label of the method; None where none of ours reaches the target in all seeds.
        seconds: By rival: its time over ours; infinite where it does not reach the target, None where it did not run.
        steps: The same for steps.
        first: Label of the fastest method of all; None where nobody reaches the target.
        first_is_ours: Whether that is ours.
        scale: Of the race.
    """

    title: str
    ours: str | None
    seconds: Mapping[str, float | None]
    steps: Mapping[str, float | None]
    first: str | None
    first_is_ours: bool
    scale: str


def standings(found: Sequence[Summary]) -> list[Standing]:
    """Of every race."""
    result = []
    for summary in found:
        with checked(summary):
            result.append(_standing(summary))
    return result


def _standing(summary: Summary) -> Standing:
    methods: list[Record] = summary.data["methods"]
    reached = sorted((method for method in methods if _reached(method)), key=lambda m: float(m["seconds_to_target"]["mean"]))
    ours = next((method for method in reached if method.get("ours")), None)

    def ratio(rival: str, key: str) -> float | None:
        other = next((method for method in methods if method["name"] == rival and method.get("n")), None)
        if ours is None or other is None:
            return None
        return float(other[key]["mean"]) / float(ours[key]["mean"]) if _reached(other) else math.inf

    first = reached[0] if reached else None
    return Standing(
        summary.data["title"],
        ours["label"] if ours else None,
        {rival: ratio(rival, "seconds_to_target") for rival in RIVALS},
        {rival: ratio(rival, "steps_to_target") for rival in RIVALS},
        first["label"] if first else None,
        bool(first and first.get("ours")),
        summary.scale,
    )


def _reached(method: Record) -> bool:
    """Whether every seed reached the target."""
    found = method.get("seconds_to_target")
    return bool(found and found.get("mean") is not None and all(value is not None for value in found["values"]))


def section(found: Sequence[Summary]) -> Section:
    """All races, the answer first."""
    blocks: list[Block] = []
    if found:
        blocks += _answer(standings(found))
    seen: set[str] = set()
    for summary in found:
        with checked(summary):
            workload = summary.data["workload"]
            blocks += _race(summary, identifier(workload, summary.scale) if workload in seen else identifier(workload))
            seen.add(workload)
    if not found:
        blocks.append(Missing("The race", "isaac-newton race --scale quick"))
    lead = (
        "ISAAC against the optimizers that people would pick instead: the same network, data, batch and initial weights, the "
        "same number of tuning trials for each method. The target is the loss that tuned AdamW reaches; the clock covers "
        "training steps only."
    )
    return Section("race", "The race", lead, tuple(blocks))


def _answer(found: Sequence[Standing]) -> list[Block]:
    rows = []
    for standing in found:
        cells = [
            f"{standing.title} ({'smoke test' if standing.scale == 'smoke' else standing.scale})",
            standing.first or "nobody",
            standing.ours or "none reaches it",
        ]
        marks: dict[int, str] = {1: "good"} if standing.first_is_ours else {}
        for ratios in (standing.seconds, standing.steps):
            for rival in RIVALS:
                marks |= _mark(len(cells), ratios[rival])
                cells.append(_ratio(ratios[rival]))
        rows.append(Row(tuple(cells), marks=marks))
    headings = [f"{what} of {label}" for what in ("Seconds", "Steps") for label in RIVALS.values()]
    table = Table(
        "How much longer the others take to the target than the best of ours",
        ("Workload", "First at the target", "Best of ours", *headings),
        tuple(rows),
        frozenset({0, 1, 2}),
        "Time (or steps) of the other method over that of the method with ISAAC that is fastest in seconds, means over seeds. "
        "Above 1 ISAAC is faster. Not reached: the other does not reach the target in every seed. "
        "–: there is nothing to compare.",
    )
    return [table]


def _ratio(value: float | None) -> str:
    return "not reached" if value == math.inf else times(value)


def _mark(place: int, value: float | None) -> dict[int, str]:
    return {} if value is None else {place: "good" if value > 1 else "bad"}


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
        _figure(data, f"curve-{id}"),
        _table(data),
        summary.source,
    ]


def _figure(data: Record, name: str) -> Figure:
    methods: list[Method] = []
    drawn: list[Line] = []
    taken: dict[str, str] = {}
    starts = [curve["loss"][0] for method in data["methods"] for curve in method.get("curves") or () if curve["loss"]]
    ceiling = CEILING * max((loss for loss in starts if loss is not None), default=math.inf)
    for method in data["methods"]:
        curves = method.get("curves") or []
        if not curves:
            continue
        label, ours = method["label"], bool(method.get("ours"))
        base = method["name"].removeprefix("isaac-")
        hue = taken.setdefault(base, HUES.get(base) or SPARE[len([b for b in taken if b not in HUES]) % len(SPARE)])
        methods.append(Method(label, hue, () if ours else DASHES[base in HUES], 2.6 if ours else 1.6, ours))
        seeds = [_columns(curve, ceiling) for curve in curves]
        over = lines.mean(label, seeds, "step", ("loss",))
        each = [Line(label, f"seed {curve['seed']}", own) for curve, own in zip(curves, seeds, strict=True)]
        # Seeds that have no step in common have no mean, and are shown in place of it.
        drawn += [over] if over else [replace(line, over_seeds=True) for line in each]
        drawn += each
    methods = lines.apart(methods)
    quantity = Axis("loss", data["quantity_title"], ".4~g")
    fields = [Axis("step", "Steps", ",d"), Axis("seconds", "Seconds", ",.3~r")]
    target = Target(data["target"], f"target {number(data['target'], 3)}", data["target_by"]) if data.get("target") else None
    controls = (
        lines.axes([*fields, Axis("seconds", "Seconds", label="Seconds (log)", logarithmic=True)]),
        lines.scales(logarithmic_first=True),
        lines.RUNS,
        lines.quantities([quantity]),
    )
    description = (
        f"{data['quantity_title']} of {len(methods)} methods over training, {data['title']}. Solid lines have ISAAC. "
        f"{_ending(data)} The numbers are in the table below."
    )
    chart = lines.chart(name, "", description, drawn, methods, [*fields, quantity], target=target)
    return Figure(
        f"figure-{name}",
        (chart,),
        "Solid: with ISAAC. Dashed, same colour: the same optimizer without it.",
        controls,
        tuple(methods),
    )


def _columns(curve: Record, ceiling: float) -> dict[str, list[float | None]]:
    kept = [
        (step, seconds, loss)
        for step, seconds, loss in zip(curve["steps"], curve["seconds"], curve["loss"], strict=True)
        if loss is not None and loss <= ceiling
    ]
    return {"step": [row[0] for row in kept], "seconds": [row[1] for row in kept], "loss": [row[2] for row in kept]}


def _ending(data: Record) -> str:
    ends = [(m["final"]["mean"], m["label"]) for m in data["methods"] if m.get("final") and m["final"].get("mean") is not None]
    return f"Lowest at the budget: {min(ends)[1]}, {number(min(ends)[0])}." if ends else ""


def _table(data: Record) -> Table:
    methods: Sequence[Record] = data["methods"]
    metrics = list(dict.fromkeys(name for method in methods for name in method.get("metrics") or ()))
    plain = next((m for m in methods if m["name"] == "adamw" and _reached(m)), None)
    adamw = float(plain["seconds_to_target"]["mean"]) if plain else None

    def order(method: Record) -> tuple[bool, bool, float]:
        mean = (method.get("seconds_to_target") or {}).get("mean")
        return not method.get("n"), not _reached(method), math.inf if mean is None else mean

    headings = ["Method", "Seconds to target", "× AdamW", "Steps to target", f"{data['quantity_title']} at the budget"]
    headings += [name.replace("_", " ").capitalize() for name in metrics]
    headings += ["ms per step", "× SGD", "n", "Diverged", "Settings", "Mode"]
    rows = tuple(_row(method, metrics, adamw, data) for method in sorted(methods, key=order))
    note = (
        "Mean ± standard deviation over seeds, the fastest first. × AdamW: seconds to the target over those of AdamW, below 1 "
        "is faster. × SGD: the time of a step over that of SGD. (2 of 3 seeds): the mean is of those that reached the target."
    )
    return Table(
        f"{data['title']}: to the target, and at the budget of {data['steps']:,} steps",
        tuple(headings),
        rows,
        frozenset({0, len(headings) - 2, len(headings) - 1}),
        note,
    )


def _row(method: Record, metrics: Sequence[str], adamw: float | None, data: Record) -> Row:
    ours = bool(method.get("ours"))
    if not method.get("n"):
        return Row((method["label"],), ours, f"not run: {method.get('reason') or 'no reason is recorded'}")
    seconds = method.get("seconds_to_target") or {}
    relative = seconds["mean"] / adamw if adamw and _reached(method) else None
    cells = [
        method["label"],
        _to_target(method.get("seconds_to_target")),
        times(relative),
        _to_target(method.get("steps_to_target")),
    ]
    cells.append(spread(method.get("final")))
    for name in metrics:
        cells.append(_metric(name, (method.get("metrics") or {}).get(name)))
    each = method.get("seconds_per_step")
    cells += ["–" if each is None else number(1e3 * each), times(method.get("ratio_to_sgd"))]
    diverged = method.get("diverged") or 0
    cells += [str(method["n"]), str(diverged), _settings(method.get("settings")), method.get("mode") or data.get("mode") or "–"]
    marks = {len(cells) - 3: "bad"} if diverged else {}
    if relative is not None and ours:
        marks[2] = "good" if relative < 1 else "bad"
    if not _reached(method):
        marks[1] = "bad"
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
