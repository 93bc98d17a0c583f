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
from isaac_lab.report import parts, race_rules
from isaac_lab.report.docs import DocsError
from isaac_lab.report.parts import Block, Heading, Missing, Paragraph, Section
from isaac_lab.report.summaries import Summary, checked, find
from isaac_lab.report.tables import Row, Table
from isaac_lab.stats import LEVEL
from isaac_lab.studies import numbers
from isaac_lab.studies.race.race import BELOW_ONE, COURSES
from isaac_lab.studies.race.standings import CONTROL, lowest, pairs, summarize
from isaac_lab.words import number

Record = Mapping[str, Any]

#: The letters of the paper for what is tuned.
LETTERS = {"learning_rate": "η", "second_rate": "η₂", "beta2": "β₂", "momentum": "μ", "damping": "λ"}
#: Quantities that are shares, and shown in per cent.
SHARES = ("accuracy", "test_accuracy", "f1")
#: Times the largest loss of an untrained network: what lies above has diverged, and would press the rest flat.
CEILING = 1.5
#: Raced before there were rules.
OLD = ("mnist-autoencoder", "char-gpt")
#: Of the lines of ours, and of the others.
WIDTHS = {True: 2.6, False: 1.6}


def summaries(races: Path, name: str = "") -> list[Summary]:
    """All of each workload, the largest scale first; smoke tests only where there is nothing else.

    Args:
        races: The folder of the races.
        name: What a page calls it.
    """
    order = [*COURSES, *OLD]
    folders = sorted(path for path in races.glob("*") if path.is_dir())
    folders.sort(key=lambda path: order.index(path.name) if path.name in order else len(order))
    return [own for path in folders for own in find(path, f"{name}/{path.name}", lambda path, _: summarize(Store(path)))]


def ended(method: Record, *, higher: bool = False) -> tuple[bool, float]:
    """The order of a table: the best at the end first, then who did not run."""
    mean = (method["final"] or {}).get("mean")
    return not method["n"], math.inf if mean is None else -mean if higher else mean


def table(summary: Record) -> Table:
    """Where everybody ended, and who reached the target when; one that did not run has its reason."""
    steps, metrics = f"{summary['steps']:,} steps", summary["metric_titles"].values()
    columns = ("Method", "Settings", f"{summary['quantity_title']} at {steps}", *metrics)
    columns = (*columns, "Steps to target", "Seconds to target", "ms per step", "n")
    methods = sorted(summary["methods"], key=lambda method: ended(method, higher=summary.get("higher", False)))
    rows = tuple(_row(method, summary, len(columns)) for method in methods)
    note = "Mean ± standard deviation over seeds, the best at the end first. (2 of 3): so many seeds reached the target."
    if summary.get("rules"):
        note += " To the target: the median over seeds, in which a seed that misses it is infinite (∞)."
    return Table(f"{summary['title']}: at the budget of {steps}, and to the target", columns, rows, frozenset({0, 1}), note)


def brief(summary: Record) -> Table:
    """The same for a terminal, of those that ran."""
    whole = table({**summary, "methods": [method for method in summary["methods"] if method["n"]]})
    kept = [0, 2, *range(len(whole.columns) - 4, len(whole.columns))]
    rows = tuple(replace(row, cells=tuple(row.cells[place] for place in kept)) for row in whole.rows)
    columns = tuple(whole.columns[place] for place in kept)
    columns = (columns[0], "At the end", "Steps", "Seconds", "ms per step", "n")
    return Table(whole.caption, columns, rows, note=whole.note)


def _row(method: Record, summary: Record, columns: int) -> Row:
    if not method["n"]:
        return Row((method["label"], f"not run: {method['reason']}", *["–"] * (columns - 2)), method["ours"])
    known = [(method["final"], _style(summary["quantity"]))]
    known += [(method["metrics"][name], _style(name)) for name in summary["metric_titles"]]
    cells = [method["label"], _settings(method), *(_spread(found, style) for found, style in known)]
    each, timed, ruled = method["seconds_per_step"], method["seconds_per_step"] is not None, bool(summary.get("rules"))
    # Nobody knows the seconds of steps that have not been timed.
    cells.append(_reached(method["steps_to_target"], ",.0f", ruled=ruled))
    cells.append(_reached(method["seconds_to_target"], ".3g", ruled=ruled) if timed else "–")
    cells.append("–" if each is None else f"{1e3 * each:.3g} ({method['mode']})")
    cells.append(f"{method['n']}" + (f", {method['diverged']} diverged" if method["diverged"] else ""))
    marks = {columns - 1: "bad"} if method["diverged"] else {}
    marks |= {columns - 3: "bad"} if None in method["steps_to_target"]["values"] else {}
    return Row(tuple(cells), method["ours"], marks=marks)


def _style(quantity: str) -> str:
    return ".1%" if quantity in SHARES else ".3g"


def _settings(method: Record) -> str:
    words = [
        f"{LETTERS[name]} {value:.2g}" if name not in BELOW_ONE else f"{LETTERS[name]} {value:.4g}"
        for name, value in method["settings"].items()
    ]
    return " ".join(words) + (" (edge)" if method["edge"] else "")


def _spread(found: Record, style: str) -> str:
    """Mean ± deviation."""
    if found["mean"] is None:
        return "–"
    coarse = ".1g" if style == ".3g" else style
    return format(found["mean"], style) + ("" if found["std"] is None else f" ± {found['std']:{coarse}}")


def _reached(found: Record, style: str, *, ruled: bool = False) -> str:
    """The mean over seeds; by the rules the median, in which a seed that misses the target is infinite."""
    there = [value for value in found["values"] if value is not None]
    if not there:
        return "–" if found["values"] == [] else "never"
    if len(there) == len(found["values"]) and not ruled:
        return _spread(found, style)
    share = "" if len(there) == len(found["values"]) else f" ({len(there)} of {len(found['values'])})"
    middle = found["median"] if ruled else found["mean"]
    return ("∞" if middle is None else format(middle, style)) + share


def compared(summary: Record) -> Table:
    """Who is better than whom, by the comparisons that the rules name."""
    labels = {method["name"]: method["label"] for method in summary["methods"]}
    sign = 1 if summary["higher"] else -1
    rows = []
    for own in summary["compared"]:
        shown = own["holm"] < LEVEL
        verdict = "not shown" if not shown else "better" if sign * own["value"] > 0 else "worse"
        cells = (
            *(labels[name] for name in own["names"]),
            f"{own['value']:+.3g}",
            f"{own['p']:.2g}",
            f"{own['holm']:.2g}",
            verdict,
        )
        rows.append(Row(cells, shown and verdict == "better"))
    note = f"Mean difference over {summary['seeds']} seeds, paired t-test, adjusted by Holm for all comparisons of this table."
    return Table(
        "Compared at the end",
        ("Method", "With", "Difference", "p", "p, Holm", "Verdict"),
        tuple(rows),
        frozenset({0, 1, 5}),
        note,
    )


def clocks(summary: Record) -> Table:
    """The time of a step on both clocks, with ISAAC switched off, and until the first step is ready."""
    rows = []
    for method in summary["methods"]:
        if method["n"] and method["clocks"]:
            both = [_milliseconds(method["clocks"].get(mode)) for mode in ("eager", "captured")]
            mode = method["mode"]
            ready = method["ready"].get(mode)
            control = _milliseconds(method["control"].get(mode)) if method["ours"] else ""
            rows.append(Row((method["label"], *both, control, "–" if ready is None else f"{ready:.2g}"), method["ours"]))
    columns = ("Method", "Eager, ms", "Captured, ms", f"{CONTROL.removeprefix(', ')}, ms", "Ready, s")
    note = (
        "Median of a step, methods taking turns, nobody else on the device. Captured: as one CUDA graph, where it can be. "
        "Ready: to make, compile and capture it, the machine's first one included."
    )
    return Table("The time of a step", columns, tuple(rows), note=note)


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.3g}"


def said(summary: Record) -> list[str]:
    """What a reader has to know of the table."""
    target = "none" if summary["target"] is None else f"{summary['target']:.4g}"
    lines = [f"Target: {_lower(summary['quantity_title'])} {target} ({summary['target_by']})."]
    known = {method["name"]: method for method in summary["methods"] if method["n"]}
    for name in summary.get("published", {}).keys() & known.keys():
        style, mean = _style(summary["quantity"]).replace(".3g", ".5g"), known[name]["final"]["mean"]
        here = "diverges here" if mean is None else f"reaches {mean:{style}} here"
        lines.append(f"{known[name]['label']} {here}; published: {summary['published'][name]:{style}}.")
    if summary.get("rules"):
        lines.append(
            f"{summary['trials']} tuning trials of each method on a part of the training set, {summary['seeds']} fresh seeds."
        )
        lines.append(
            f"Rules {summary['rules']}: `isaac-newton race rules`. Edge: nothing was tried beyond one of the settings."
        )
    else:
        lines.append(
            f"{summary['trials']} tuning trials with seed 0, then seeds 1 to {summary['seeds']}; batches of {summary['batch']}."
        )
        lines.append(f"Made before there were rules: what was searched is in `rules.toml` of commit {summary['commit']}.")
        lines.append("Edge: the lowest or highest learning rate that was tried. Captured: as one CUDA graph.")
    return lines


def _lower(title: str) -> str:
    """Within a sentence."""
    return title if title[:2].isupper() or title[:2] == "F1" else title[:1].lower() + title[1:]


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
        "Means over n seeds. p: Welch's t-test, of races with rules paired and adjusted by Holm; from 0.05 on no difference is "
        "shown.",
    )


def blocks(races: Path, pictures: Path) -> dict[str, Callable[[], str]]:
    """What fills each block of a page: the one table, and each race with its picture; smoke tests say nothing of the methods.

    Args:
        races: The folder of the races.
        pictures: Directory for the pictures, beside the page.
    """

    def found() -> list[Summary]:
        raced = [summary for summary in summaries(races) if summary.scale != "smoke"]
        if not raced:
            raise DocsError(f"{races} has no race but smoke tests")
        return raced

    return {
        "race": lambda: ends(found(), once=True).markdown(),
        "races": lambda: _sections(found(), pictures),
        "race-rules": lambda: race_rules.markdown("standard"),
    }


def _sections(found: Sequence[Summary], pictures: Path) -> str:
    made = []
    for summary in found:
        race = summary.data
        name = f"race-{race['workload']}-{summary.scale}.svg"
        draw(figure(race), pictures / name)
        alt = f"{race['quantity_title']} of all methods against steps and against seconds"
        notes = "\n".join(f"- {textwrap.fill(line, 116, subsequent_indent='  ')}" for line in said(race))
        tables = [table(race), *([compared(race), clocks(race)] if race.get("rules") else [])]
        origin = f"`{race['command']}`,\n{race['time']}, commit {race['commit']}"
        title, shown = f"## {race['title']}, scale {race['scale']}", "\n".join(one.markdown() for one in tables)
        made.append(f"{title}\n\n![{alt}]({pictures.name}/{name})\n\n{shown}\n{notes}\n\n{origin}")
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
    highest = max((loss for loss in starts if loss is not None), default=math.inf)
    ceiling = math.inf if summary.get("higher") else CEILING * highest
    methods: list[Method] = []
    drawn: list[Line] = []
    for method in sorted(summary["methods"], key=lambda own: _arrived(own, summary)):
        if method["curves"]:
            own = look(_known_as(method["name"]), len(methods))
            methods.append(Method(method["label"], replace(own, width=WIDTHS[method["ours"]]), method["ours"]))
            drawn += _lines(method["label"], method["curves"], ceiling)
    title, value = summary["quantity_title"], summary["target"]
    quantity = Axis("loss", title, ".4~g")
    fields = [Axis("step", "Steps", ",d"), Axis("seconds", "Seconds", ",.3~r")]
    target = Target(value, f"target {number(value, 3)}", summary["target_by"]) if value else None
    logarithmic = Axis("seconds", "Seconds", label="Seconds (log)", logarithmic=True)
    scales = lines.scales(logarithmic_first=not summary.get("higher"))
    controls = (lines.axes([*fields, logarithmic]), scales, lines.RUNS, lines.quantities([quantity]))
    best = lowest(summary)
    ending = f"Best at the budget: {best}." if best else ""
    alt = (
        f"{title} of {len(methods)} methods over training, {summary['title']}. Solid lines have ISAAC. "
        f"{ending} The numbers are in the table below."
    )
    chart = lines.chart(name, "", alt, drawn, methods, [*fields, quantity], target=target, picture=(500, 400))
    timed = any(value for line in drawn for value in line.columns["seconds"])
    views = ({"Horizontal": "Steps"}, *([{"Horizontal": logarithmic.label}] if timed else []))
    caption = "Solid: with ISAAC. Broken, same colour: the same optimizer without it."
    return Figure(f"figure-{name}", (chart,), summary["title"], _subtitle(summary), controls, tuple(methods), (views,), caption)


def _arrived(method: Record, summary: Record) -> tuple[int, float]:
    """Who is at the target first in seconds comes first; then who never is, by the value at the end; then who did not run."""
    if not method["n"]:
        return 3, 0.0
    seconds, steps = method["seconds_to_target"], method["steps_to_target"]
    if None not in steps["values"]:
        return 0, steps["mean"] if seconds["mean"] is None else seconds["mean"]
    final = method["final"]["mean"]
    return (2, 0.0) if final is None else (1, -final if summary.get("higher") else final)


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
    made: list[Block] = [ends(found)] if found else [Missing("The race", "isaac-newton race --scale standard")]
    seen: set[str] = set()
    for summary in found:
        with checked(summary):
            workload = summary.data["workload"]
            made += _race(summary, identifier(workload, summary.scale) if workload in seen else identifier(workload))
            seen.add(workload)
    lead = (
        "ISAAC beside the optimizers that people would pick instead. **Races at the scales full and quick are short and "
        "unevenly tuned, from before there were rules: read them as "
        "a first look.** The network, data, batch and initial weights are the same. Each method had the same number of trials, "
        "but not the same search. The target is the loss of AdamW's worst seed. The target on CoLA lies just below predicting "
        "by frequency, so that race measures nothing. The page docs/integrity.md says what was withdrawn."
    )
    return Section("race", "The race", lead, tuple(made))


def _race(summary: Summary, id: str) -> list[Block]:
    data = summary.data
    about = [data["data"], f"{data['steps']:,} steps of {data['batch']:,}", f"{data['trials']} tuning trials for each method"]
    text = " · ".join([*about, f"{data['seeds']} seeds", data["mode"]])
    target = f"Target: {_lower(data['quantity_title'])} {number(data['target'], 4)} ({data['target_by']})."
    return [
        Heading(f"race-{id}", f"{data['title']}, scale “{summary.scale}”"),
        Paragraph(f"{summary.warning}{text}. {target if data['target'] else 'No target.'}"),
        parts.Figure(figure(data, f"curve-{id}")),
        table(data),
        *([compared(data), clocks(data)] if data.get("rules") else []),
        summary.source,
    ]
