"""A race as people see it: its picture, its table with the rules below, the pages that show it, and its part of the report."""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from isaac_lab.charts import lines
from isaac_lab.charts.draw import draw, pictures
from isaac_lab.charts.figure import Figure, Method, identifier, look
from isaac_lab.charts.lines import Axis, Line, Target
from isaac_lab.record import Store
from isaac_lab.report import parts
from isaac_lab.report.docs import DocsError
from isaac_lab.report.parts import Block, Heading, Missing, Paragraph, Section
from isaac_lab.report.summaries import Summary, checked, find
from isaac_lab.report.tables import Row, Table
from isaac_lab.studies import numbers
from isaac_lab.studies.race.race import COURSES
from isaac_lab.studies.race.standings import lowest, pairs, summarize
from isaac_lab.words import number

__all__ = ["blocks", "ends", "figure", "rules", "section", "summaries", "table", "write"]

Record = Mapping[str, Any]

#: The letters of the paper for what is tuned.
LETTERS = {"learning_rate": "η", "second_rate": "η₂", "damping": "λ"}
#: Times the largest loss of an untrained network: what lies above has diverged, and would press the rest flat.
CEILING = 1.5
#: Of the lines of ours, and of the others.
WIDTHS = {True: 2.6, False: 1.6}


def summaries(races: Path, name: str = "") -> list[Summary]:
    """All of each workload, the largest scale first; smoke tests only where there is nothing else.

    Args:
        races: The folder of the races.
        name: What a page calls it.
    """
    order = list(COURSES)
    folders = sorted(path for path in races.glob("*") if path.is_dir())
    folders.sort(key=lambda path: order.index(path.name) if path.name in order else len(order))
    return [own for path in folders for own in find(path, f"{name}/{path.name}", lambda path, _: summarize(Store(path)))]


def ended(method: Record) -> tuple[bool, float]:
    """The order of a table: the lowest at the end first, then who did not run."""
    mean = (method["final"] or {}).get("mean")
    return not method["n"], math.inf if mean is None else mean


def table(summary: Record) -> Table:
    """Where everybody ended, and who reached the target when; one that did not run has its reason."""
    steps, metrics = f"{summary['steps']:,} steps", summary["metric_titles"].values()
    columns = ("Method", "Settings", f"{summary['quantity_title']} at {steps}", *metrics)
    columns = (*columns, "Steps to target", "Seconds to target", "ms per step", "n")
    rows = tuple(_row(method, summary, len(columns)) for method in sorted(summary["methods"], key=ended))
    note = "Mean ± standard deviation over seeds, the lowest at the end first. (2 of 3): so many seeds reached the target."
    return Table(f"{summary['title']}: at the budget of {steps}, and to the target", columns, rows, frozenset({0, 1}), note)


def _row(method: Record, summary: Record, columns: int) -> Row:
    if not method["n"]:
        return Row((method["label"], f"not run: {method['reason']}", *["–"] * (columns - 2)), method["ours"])
    metrics = [(method["metrics"][name], ".1%" if "accuracy" in name else ".3g") for name in summary["metric_titles"]]
    cells = [method["label"], _settings(method)]
    cells += [_spread(found, style) for found, style in [(method["final"], ".3g"), *metrics]]
    each, timed = method["seconds_per_step"], method["seconds_per_step"] is not None
    # Nobody knows the seconds of steps that have not been timed.
    cells += [_reached(method["steps_to_target"], ",.0f"), _reached(method["seconds_to_target"], ".3g") if timed else "–"]
    cells.append("–" if each is None else f"{1e3 * each:.3g} ({method['mode']})")
    cells.append(f"{method['n']}" + (f", {method['diverged']} diverged" if method["diverged"] else ""))
    marks = {columns - 1: "bad"} if method["diverged"] else {}
    marks |= {columns - 3: "bad"} if None in method["steps_to_target"]["values"] else {}
    return Row(tuple(cells), method["ours"], marks=marks)


def _settings(method: Record) -> str:
    words = [f"{LETTERS[name]} {value:.2g}" for name, value in method["settings"].items()]
    return " ".join(words) + (" (edge)" if method["edge"] else "")


def _spread(found: Record, style: str) -> str:
    """Mean ± deviation."""
    if found["mean"] is None:
        return "–"
    coarse = ".1g" if style == ".3g" else style
    return format(found["mean"], style) + ("" if found["std"] is None else f" ± {found['std']:{coarse}}")


def _reached(found: Record, style: str) -> str:
    there = [value for value in found["values"] if value is not None]
    if not there:
        return "–" if found["values"] == [] else "never"
    if len(there) == len(found["values"]):
        return _spread(found, style)
    return f"{found['mean']:{style}} ({len(there)} of {len(found['values'])})"


def rules(summary: Record) -> list[str]:
    """The rules of the race, with every range that was searched."""
    ranges: dict[str, list[str]] = {}
    for method in summary["methods"]:
        if method["tuning"]:
            text = ", ".join(f"{LETTERS[name]} {low:g} to {high:g}" for name, (low, high) in method["ranges"].items())
            ranges.setdefault(text, []).append(method["label"])
    decay = summary["decay"]
    target = "none" if summary["target"] is None else f"{summary['target']:.4g}"
    relative = "relative to the layers' inputs" if summary["relative"] else "absolute"
    reduced = ["ISAAC conditions with the average position or patch of each example (`reduce`)."]
    return [
        f"Target: {summary['quantity_title'].lower()} {target} ({summary['target_by']}).",
        f"The same network ({summary['arithmetic']}), batches of {summary['batch']}, initial weights and schedule "
        f"({summary['schedule']}) for all.",
        f"{summary['trials']} tuning trials for each method, with seed 0 over the whole budget. The mean of the "
        "last three measurements decides.",
        "Trials are evenly spaced in the logarithm where the learning rate alone is tuned. Where there are two numbers they "
        "are points of a Halton sequence: fewer values of each.",
        f"Then seeds 1 to {summary['seeds']}: mean ± standard deviation.",
        f"Steps to the target: on straight lines between {summary['points']} measurements. Seconds: steps × the "
        "median time of a step, with all methods taking turns. Captured: as one CUDA graph.",
        "Edge: the lowest or highest learning rate that was tried.",
        f"Weight decay: {decay['decoupled']:g} for AdamW, Muon and SOAP, {decay['added']:g} for others.",
        *(reduced if summary["conditioning"] == "reduce" else []),
        f"λ of ISAAC is {relative}; where it is tuned with Muon, η₂ of AdamW beside it moves with η.",
        *(f"Searched by {', '.join(labels)}: {text}." for text, labels in ranges.items()),
    ]


def ends(found: Sequence[Summary], *, once: bool = False) -> Table:
    """Where each optimizer ended with ISAAC and without, with Welch's p over seeds; `once`: each race is named in one row."""
    rows = []
    for summary in found:
        with checked(summary):
            race = summary.data
            scale = "smoke test" if summary.scale == "smoke" else summary.scale
            title, winner = f"{race['title']} ({scale}, n = {race['seeds']})", lowest(race) or "–"
            for pair in pairs(race):
                own, shown, marks = pair.difference, "–", {}
                if own is not None:
                    shown = own.words.removeprefix("p = ")
                    marks = {4: "good"} if own.behind else {4: "bad"} if own.ahead else {}
                means = ["–" if end["mean"] is None else f"{end['mean']:.4g}" for end in (pair.alone, pair.ours)]
                rows.append(Row((title, pair.label, *means, shown, winner), marks=marks))
                title, winner = ("", "") if once else (title, winner)
    return Table(
        "Loss at the end of the budget, alone and with ISAAC",
        ("Workload", "Optimizer", "Loss alone", "Loss with ISAAC", "p", "Lowest of all"),
        tuple(rows),
        frozenset({0, 1, 5}),
        "Means over n seeds, lower is better. p: Welch's t-test; from 0.05 on no difference is shown.",
    )


def blocks(races: Path, pictures: Path) -> dict[str, Callable[[], str]]:
    """What fills each block of a page: the one table, and each race with its picture; smoke tests say nothing of the methods.

    Args:
        races: The folder of the races.
        pictures: Directory for the pictures, beside the page.
    """
    found = [summary for summary in summaries(races) if summary.scale != "smoke"]
    if not found:
        raise DocsError(f"{races} has no race of scale full or quick")
    return {"race": lambda: ends(found, once=True).markdown(), "races": lambda: _sections(found, pictures)}


def _sections(found: Sequence[Summary], pictures: Path) -> str:
    made = []
    for summary in found:
        race = summary.data
        name = f"race-{race['workload']}-{summary.scale}.svg"
        draw(figure(race), pictures / name)
        alt = f"{race['quantity_title']} of all methods against steps and against seconds"
        said = "\n".join(f"- {textwrap.fill(rule, 116, subsequent_indent='  ')}" for rule in rules(race))
        origin = f"`{race['command']}`,\n{race['time']}, commit {race['commit']}"
        title = f"## {race['title']}, scale {race['scale']}"
        made.append(f"{title}\n\n![{alt}]({pictures.name}/{name})\n\n{table(race).markdown()}\n{said}\n\n{origin}")
    return "\n\n".join(made)


def write(store: Store) -> dict[str, Any]:
    """The picture, and every measurement as numbers.csv; returns the summary."""
    summary = summarize(store)
    numbers.write(store.folder / "numbers.csv", store.records())
    pictures(figure(summary), store.folder / "figure")
    return summary


def figure(summary: Record, name: str = "race") -> Figure:
    """The loss over steps and over seconds; what has ISAAC is solid, what it is compared with broken.

    Args:
        summary: Of the race.
        name: Of its chart on the page.
    """
    starts = [curve["loss"][0] for method in summary["methods"] for curve in method["curves"] if curve["loss"]]
    ceiling = CEILING * max((loss for loss in starts if loss is not None), default=math.inf)
    methods: list[Method] = []
    drawn: list[Line] = []
    for method in sorted(summary["methods"], key=_arrived):
        if method["curves"]:
            own = look(_known_as(method["name"]), len(methods))
            methods.append(Method(method["label"], replace(own, width=WIDTHS[method["ours"]]), method["ours"]))
            drawn += _lines(method["label"], method["curves"], ceiling)
    title, value = summary["quantity_title"], summary["target"]
    quantity = Axis("loss", title, ".4~g")
    fields = [Axis("step", "Steps", ",d"), Axis("seconds", "Seconds", ",.3~r")]
    target = Target(value, f"target {number(value, 3)}", summary["target_by"]) if value else None
    logarithmic = Axis("seconds", "Seconds", label="Seconds (log)", logarithmic=True)
    scales = lines.scales(logarithmic_first=True)
    controls = (lines.axes([*fields, logarithmic]), scales, lines.RUNS, lines.quantities([quantity]))
    finals = [(method["final"]["mean"], method["label"]) for method in summary["methods"] if method["final"]]
    last = [(mean, label) for mean, label in finals if mean is not None]
    ending = f"Lowest at the budget: {min(last)[1]}, {number(min(last)[0])}." if last else ""
    alt = (
        f"{title} of {len(methods)} methods over training, {summary['title']}. Solid lines have ISAAC. "
        f"{ending} The numbers are in the table below."
    )
    chart = lines.chart(name, "", alt, drawn, methods, [*fields, quantity], target=target, picture=(500, 400))
    timed = any(value for line in drawn for value in line.columns["seconds"])
    views = ({"Horizontal": "Steps"}, *([{"Horizontal": logarithmic.label}] if timed else []))
    caption = "Solid: with ISAAC. Broken, same colour: the same optimizer without it."
    return Figure(f"figure-{name}", (chart,), summary["title"], _subtitle(summary), controls, tuple(methods), (views,), caption)


def _arrived(method: Record) -> tuple[int, float]:
    """Who is at the target first in seconds comes first; then who never is, by the loss at the end; then who did not run."""
    if not method["n"]:
        return 3, 0.0
    seconds, steps = method["seconds_to_target"], method["steps_to_target"]
    if None not in steps["values"]:
        return 0, steps["mean"] if seconds["mean"] is None else seconds["mean"]
    final = method["final"]["mean"]
    return (1, final) if final is not None else (2, 0.0)


def _known_as(name: str) -> str:
    """The name of its look."""
    base = name.removeprefix("isaac-").removesuffix("-running")
    ours = f"{base}+isaac" if name.startswith("isaac-") else base
    return f"{ours} running" if name.endswith("-running") else ours


def _lines(label: str, curves: Sequence[Record], ceiling: float) -> list[Line]:
    """The mean over seeds, and each of them."""
    seeds = [_columns(curve, ceiling) for curve in curves]
    over = lines.mean(label, seeds, "step", ("loss",))
    each = [Line(label, f"seed {curve['seed']}", own) for curve, own in zip(curves, seeds, strict=True)]
    # Seeds that have no step in common have no mean, and are shown in place of it.
    return [*([over] if over else [replace(line, over_seeds=True) for line in each]), *each]


def _columns(curve: Record, ceiling: float) -> dict[str, list[float | None]]:
    rows = zip(curve["steps"], curve["seconds"], curve["loss"], strict=True)
    kept = [row for row in rows if row[2] is not None and row[2] <= ceiling]
    return {name: [row[place] for row in kept] for place, name in enumerate(("step", "seconds", "loss"))}


def _subtitle(summary: Record) -> str:
    smoke = "A smoke test: it shows that the code runs, and nothing of the methods. " if summary["scale"] == "smoke" else ""
    left = [method["label"] for method in summary["methods"] if not method["n"]]
    missing = f" Not run: {', '.join(left)}." if left else ""
    how = "each in one CUDA graph where it can be" if summary["mode"] == "captured" else "eager"
    return (
        f"{smoke}Mean of {summary['seeds']} seeds; bands from the lowest to the highest. {len(summary['methods']) - len(left)} "
        f"methods, {summary['trials']} tuning trials each. Seconds of training steps, {how}. In the legend: who reaches the "
        f"target first comes first.{missing}"
    )


def section(found: Sequence[Summary]) -> Section:
    """All races on the page, the answer first."""
    made: list[Block] = [ends(found)] if found else [Missing("The race", "isaac-newton race --scale quick")]
    seen: set[str] = set()
    for summary in found:
        with checked(summary):
            workload = summary.data["workload"]
            made += _race(summary, identifier(workload, summary.scale) if workload in seen else identifier(workload))
            seen.add(workload)
    lead = (
        "ISAAC beside the optimizers that people would pick instead. **These races are short and unevenly tuned: read them as "
        "a first look.** The network, data, batch and initial weights are the same. Each method had the same number of trials, "
        "but not the same search. The target is the loss of AdamW's worst seed. The target on CoLA lies just below predicting "
        "by frequency, so that race measures nothing. The page docs/integrity.md says what was withdrawn."
    )
    return Section("race", "The race", lead, tuple(made))


def _race(summary: Summary, id: str) -> list[Block]:
    data = summary.data
    about = [data["data"], f"{data['steps']:,} steps of {data['batch']:,}", f"{data['trials']} tuning trials for each method"]
    text = " · ".join([*about, f"{data['seeds']} seeds", data["mode"]])
    target = f"Target: {data['quantity_title'].lower()} {number(data['target'], 4)} ({data['target_by']})."
    return [
        Heading(f"race-{id}", f"{data['title']}, scale “{summary.scale}”"),
        Paragraph(f"{summary.warning}{text}. {target if data['target'] else 'No target.'}"),
        parts.Figure(figure(data, f"curve-{id}")),
        table(data),
        summary.source,
    ]
