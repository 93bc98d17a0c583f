"""Benchmark records as tables: rows for the terminal, and the Markdown page, in which every figure names its record."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from isaac_lab.bench.published import PAPER, paper_ratio, standings
from isaac_lab.bench.runs import file_stem
from isaac_lab.bench.steps import BASELINE
from isaac_lab.charts import lines
from isaac_lab.charts.draw import pictures
from isaac_lab.charts.figure import Figure, Look, Method, look
from isaac_lab.charts.lines import Axis, Line, Panel
from isaac_lab.records import write, write_whole
from isaac_lab.report import WORDS, parts
from isaac_lab.report.docs import Blocks
from isaac_lab.report.parts import Block, Heading, Source
from isaac_lab.report.tables import Row, Table, table

Record = dict[str, Any]

NAMES, MODES = (WORDS["bench"][key] for key in ("names", "modes"))
KINDS = ("table2", "scaling", "shapes", "models", "grid")
#: Columns of words; all others hold numbers.
LEFT = ("Model", "Method", "Size", "What", "Verdict", "Record")
CURVES = (Method("measured, with quartiles", look("zeta_star"), ours=True), Method("multiply-adds", Look("grey", (6, 4))))
SCALED = {"batch": "By batch size, at width {}", "width": "By width, at batch size {}"}
RATIO = {"ratio": "median", "ratio_low": "low", "ratio_high": "high"}


def blocks(records: Mapping[str, Record], figures: Path) -> Blocks:
    """The bars, and every record of each benchmark; records by file name, oldest first."""
    return {"bars": lambda: bars(records).markdown()} | {kind: partial(_records, kind, records, figures) for kind in KINDS}


def _records(kind: str, records: Mapping[str, Record], figures: Path) -> str:
    found: list[Block] = []
    for name, record in records.items():
        if record.get("kind") == kind:
            found.append(Heading(name, title(record)))
            found += [parts.Figure(scaling_curves(record), f"bench-{Path(name).stem}")] if kind == "scaling" else []
            found += _shown(name, record)
    return parts.markdown(found, figures, level=3) or "Not measured yet."


def _shown(name: str, record: Record) -> list[Block]:
    left_out = [WORDS["bench"]["left_out"].format(points="; ".join(points)) for points in [record.get("left_out")] if points]
    return [as_table(record), *left_out, Source.of([name], [record])]


def markdown(name: str, record: Record) -> str:
    """One record as a table, with the name of its file, its command and where it ran."""
    return parts.markdown(_shown(name, record), Path()) + "\n"


def title(record: Record) -> str:
    """How and where a record was measured."""
    machine, threads = record["machine"], record["machine"]["threads"]
    how = MODES.get(record["mode"], f"CPU, {threads} thread{'' if threads == 1 else 's'}")
    return f"{how} ({machine.get('gpu') or machine['cpu'] or machine['architecture']})"


def as_table(record: Record, *, compact: bool = False) -> Table:
    """One record as a table; `compact` for a terminal of 80 columns, without quartiles of times."""
    cases = record["cases"]
    if record["kind"] == "scaling":
        headings = ["Size", "gradient, ms", "ζ*, ms", "× gradient", "Multiply-adds"]
        return table(headings, [_point(case, compact) for case in cases], LEFT)
    headings = ["Model", "Method", "ms/step", "× gradient"]
    published = record["kind"] == "table2"
    with_memory = any("peak_bytes" in method for case in cases for method in case["methods"])
    headings += ["Paper"] if published else []
    headings += ["Peak MB", "Above", "Paper MB"] if with_memory else []
    body = []
    for case in cases:
        for method in case["methods"]:
            own = [case["title"], _name(method["name"], record), *_times(method, compact=compact)]
            if published:
                ratio = paper_ratio(case["name"], method["name"], record["mode"].split("-")[0])
                own.append("–" if ratio is None else f"{ratio:.2f}")
            body.append(own + (_memory(case, method) if with_memory else []))
    return table(headings, body, LEFT)


def _name(method: str, record: Record) -> str:
    # Records from before K-FAC had factors of its own.
    old = method == "kfac" and "backpack-for-pytorch" in record["versions"]
    return "K-FAC, BackPACK" if old else NAMES.get(method, method)


def _point(case: Record, compact: bool) -> list[str]:
    """A point of the scaling curves in one row."""
    plain, ours = (entry(case, name) or {"skipped": "–"} for name in (BASELINE, "zeta_star"))
    times, ratio = _times(ours, compact=compact)
    return [case["title"], _times(plain, compact=compact)[0], times, ratio, f"{case['theory']:.3f}"]


def _times(method: Record, *, compact: bool) -> list[str]:
    if "skipped" in method:
        return [method["skipped"], ""]
    low, median, high = (_milliseconds(method["seconds_per_step"][key]) for key in ("low", "median", "high"))
    ratio = method["ratio"]
    digits = (1 if ratio["median"] >= 10 else 2) if compact else 3
    times_gradient = f"{ratio['median']:.{digits}f} ({ratio['low']:.{digits}f}–{ratio['high']:.{digits}f})"
    if method["name"] == BASELINE:
        times_gradient = "1"
    return [median if compact else f"{median} ({low}–{high})", times_gradient]


def _milliseconds(seconds: float) -> str:
    """Three significant digits, never in the exponential form."""
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def _memory(case: Record, method: Record) -> list[str]:
    published = PAPER.get("zeta_star" if method["name"] == "paper" else method["name"], {}).get(case["name"])
    paper = f"{published.megabytes:.1f}" if published else ""
    if "peak_bytes" not in method:
        return ["", "", paper]
    above = 100 * ((memory_ratio(case, method["name"]) or math.nan) - 1)
    return [f"{method['peak_bytes'] / 1e6:.2f}", "" if math.isnan(above) else f"{above:+.{2 if above < 100 else 0}f} %", paper]


def entry(case: Record, name: str) -> Record:
    """What was measured of a method; nothing where it was not."""
    return next((method for method in case["methods"] if method["name"] == name), {})


def memory_ratio(case: Record, name: str) -> float | None:
    """A method's peak memory over that of the plain gradient."""
    own, plain = entry(case, name), entry(case, BASELINE)
    return float(own["peak_bytes"] / plain["peak_bytes"]) if "peak_bytes" in own and "peak_bytes" in plain else None


def bars(records: Mapping[str, Record]) -> Table:
    """Every bar, what was measured, and whether it is reached; from the newest record that has the figure."""
    rows = []
    for bar, case, limit, value, name in standings(records):
        unit = {"ratio": "", "memory": " %", "ms": " ms"}[bar.quantity]
        cells = [bar.title, case, f"≤ {limit:g}{unit}"]
        if value is None:
            rows.append(Row((*cells, "–", "not measured", "")))
            continue
        reached = value <= limit
        verdict = "reached" if reached else f"**missed by {value - limit:.3f}{unit}**"
        rows.append(Row((*cells, f"{value:.3f}{unit}", verdict, f"`{name}`"), marks={4: "good" if reached else "bad"}))
    return table(("What", "Model", "Bar", "Measured", "Verdict", "Record"), rows, LEFT, "Bars, reached and missed")


def scaling_curves(record: Record) -> Figure:
    """A chart by batch size and one by width."""
    panels = []
    for curve in SCALED:
        cases = [case for case in record["cases"] if case["curve"] == curve and "ratio" in entry(case, "zeta_star")]
        panels += [_panel(curve, cases)] if cases else []
    return lines.figure(
        "figure-scaling",
        panels,
        CURVES,
        [Axis("ratio", "Time of a ζ* step over that of a plain one", ".3~g")],
        [Axis("size", "Batch size or width", ",d", logarithmic=True)],
        logarithmic=False,
        title="What ζ* costs, three linear layers",
        subtitle=f"{title(record)}. 1 is the plain step.",
    )


def _panel(curve: str, cases: list[Record]) -> Panel:
    sizes, ratios = [case[curve] for case in cases], [entry(case, "zeta_star")["ratio"] for case in cases]
    measured = {name: [ratio[end] for ratio in ratios] for name, end in RATIO.items()}
    counted = {"size": sizes, "ratio": [case["theory"] for case in cases]}
    drawn = [
        Line(CURVES[0].label, "median", {"size": sizes, **measured}, over_seeds=True),
        Line(CURVES[1].label, "counted", counted, over_seeds=True),
    ]
    name = SCALED[curve].format(cases[0]["width" if curve == "batch" else "batch"])
    alt = f"{name}: ratios of {min(measured['ratio']):.2f} to {max(measured['ratio']):.2f}."
    return Panel(f"scaling-{curve}", name, alt, drawn)


def show(record: Record, out: Path, console: Console) -> None:
    """Write a record as soon as it is there, as JSON and as Markdown, and print its tables."""
    path = out / f"{file_stem(record)}.json"
    write(path, record)
    write_whole(path.with_suffix(".md"), markdown(path.name, record))
    shown = as_table(record, compact=True)
    if record["kind"] == "scaling":
        pictures(scaling_curves(record), path)
        console.print(replace(shown, caption=f"scaling, {record['mode']}").terminal())
    else:
        # The terminal has 80 columns: what the paper's memory was is in the Markdown file.
        kept = [place for place, heading in enumerate(shown.columns) if heading not in ("Model", "Paper MB")]
        for title, own in itertools.groupby(shown.rows, key=lambda row: row.cells[0]):
            console.print(replace(shown, rows=tuple(own), caption=f"{title}, {record['mode']}").only(kept).terminal())
    console.print(WORDS["bench"]["caption"])
    if record.get("left_out"):
        console.print(f"Left out (--budget): {'; '.join(record['left_out'])}.")
    console.print(f"Record: {path}\n", markup=False, soft_wrap=True)
