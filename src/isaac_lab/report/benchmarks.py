"""Benchmark records as tables and pictures: for the terminal, and for pages, on which every figure names its record."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from isaac_lab.bench.published import BARS, DAMPING, PAPER, paper_ratio, standings
from isaac_lab.bench.runs import file_stem
from isaac_lab.bench.steps import BASELINE
from isaac_lab.charts import dots, lines
from isaac_lab.charts.draw import pictures
from isaac_lab.charts.figure import Figure, Look, Method, identifier, look
from isaac_lab.charts.lines import Axis, Line, Panel
from isaac_lab.records import write, write_whole
from isaac_lab.report import WORDS, parts
from isaac_lab.report.docs import Blocks
from isaac_lab.report.parts import Block, Heading, Source, missing
from isaac_lab.report.tables import Row, Table, table

Record = dict[str, Any]

NAMES, MODES = (WORDS["bench"][key] for key in ("names", "modes"))
KINDS = ("table2", "scaling", "shapes", "models", "grid")
#: Columns of words; all others hold numbers.
LEFT = ("Model", "Method", "Size", "What", "Verdict", "Record")
CURVES = (Method("measured, with quartiles", look("zeta_star")), Method("multiply-adds", Look("grey", "6 4")))
SCALED = {"batch": "By batch size, at width {}", "width": "By width, at batch size {}"}
#: Of Table 2; the plain gradient is 1 by definition.
METHODS = {name: NAMES[name] for name in ("paper", "zeta_star", "zeta", "kfac")}
LOOKS = tuple(Method(label, look("formula" if name == "paper" else name)) for name, label in METHODS.items())
MODELS = {"autoencoder": "auto-encoder"}
#: By quantity what it is, and what a bar calls it.
QUANTITIES = {"time": ("Time", "ratio"), "memory": ("Peak memory", "memory")}


def blocks(records: Mapping[str, Record], figures: Path) -> Blocks:
    """The bars, and every record of each benchmark; records by file name, oldest first."""

    def every(kind: str) -> str:
        found: list[Block] = []
        for name, record in records.items():
            if record.get("kind") == kind:
                found.append(Heading(name, title(record)))
                found += [parts.Figure(scaling_curves(record), f"bench-{Path(name).stem}")] if kind == "scaling" else []
                found += _shown(name, record)
        return parts.markdown(found, figures, level=3) or "Not measured yet."

    return {"bars": lambda: bars(records).markdown()} | {kind: partial(every, kind) for kind in KINDS}


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
    cases, body = record["cases"], []
    if record["kind"] == "scaling":
        for case in cases:
            plain, ours = (_times(entry(case, name), compact=compact) for name in (BASELINE, "zeta_star"))
            body.append([case["title"], plain[0], *ours, f"{case['theory']:.3f}"])
        return table(["Size", "gradient, ms", "ζ*, ms", "× gradient", "Multiply-adds"], body, LEFT, title(record))
    headings = ["Model", "Method", "ms/step", "× gradient"]
    published = record["kind"] == "table2"
    with_memory = any("peak_bytes" in method for case in cases for method in case["methods"])
    headings += ["Paper"] if published else []
    headings += ["Peak MB", "Above", "Paper MB"] if with_memory else []
    for case in cases:
        for method in case["methods"]:
            # Records from before K-FAC had factors of its own.
            old = method["name"] == "kfac" and "backpack-for-pytorch" in record["versions"]
            name = "K-FAC, BackPACK" if old else NAMES.get(method["name"], method["name"])
            own = [case["title"], name, *_times(method, compact=compact)]
            if published:
                ratio = paper_ratio(case["name"], method["name"], record["mode"].split("-")[0])
                own.append("–" if ratio is None else f"{ratio:.2f}")
            body.append(own + (_memory(case, method) if with_memory else []))
    return table(headings, body, LEFT, title(record))


def _times(method: Record, *, compact: bool) -> list[str]:
    """Three significant digits, never in the exponential form, and the ratio."""
    if "ratio" not in method:
        return [method.get("skipped", "–"), ""]
    each = [1e3 * method["seconds_per_step"][key] for key in ("low", "median", "high")]
    low, median, high = (f"{value:.0f}" if value >= 100 else f"{value:#.3g}" for value in each)
    ratio = method["ratio"]
    digits = (1 if ratio["median"] >= 10 else 2) if compact else 3
    times_gradient = f"{ratio['median']:.{digits}f} ({ratio['low']:.{digits}f}–{ratio['high']:.{digits}f})"
    return [median if compact else f"{median} ({low}–{high})", "1" if method["name"] == BASELINE else times_gradient]


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
    for curve, name in SCALED.items():
        cases = [case for case in record["cases"] if case["curve"] == curve and "ratio" in entry(case, "zeta_star")]
        if cases:
            sizes, ratios = [case[curve] for case in cases], [entry(case, "zeta_star")["ratio"] for case in cases]
            middle, low, high = ([ratio[end] for ratio in ratios] for end in ("median", "low", "high"))
            measured = {"size": sizes, "ratio": middle, "ratio_low": low, "ratio_high": high}
            counted = {"size": sizes, "ratio": [case["theory"] for case in cases]}
            known = (("median", measured), ("counted", counted))
            drawn = [Line(own, run, found) for own, (run, found) in zip(CURVES, known, strict=True)]
            name = name.format(cases[0]["width" if curve == "batch" else "batch"])
            alt = f"{name}: ratios of {min(middle):.2f} to {max(middle):.2f}."
            panels.append(Panel(f"scaling-{curve}", name, alt, drawn))
    return lines.figure(
        "figure-scaling",
        panels,
        [Axis("ratio", "Time of a ζ* step over that of a plain one", ".3~g")],
        [Axis("size", "Batch size or width", ",d", logarithmic=True)],
        logarithmic=False,
        title="What ζ* costs, three linear layers",
        subtitle=f"{title(record)}. 1 is the plain step.",
    )


def table2(records: Mapping[str, Record]) -> Figure:
    """Dots for times and, after them, for memory, a chart for each record that has any."""
    charts = []
    for quantity, (what, _) in QUANTITIES.items():
        for name, record in records.items():
            found = points(record, quantity)
            if any(point["value"] is not None for point in found):
                star = [f"{point['model']} {point['words']}" for point in found if point["method"] == "ζ*" and point["value"]]
                alt = f"{title(record)}: {what.lower()} of a step over the plain gradient step. ζ*: {'; '.join(star)}. "
                alt += "All numbers are in the tables below."
                own = identifier("cost", quantity, name.removesuffix(".json"))
                charts.append(dots.chart(own, f"{what}: {title(record)}", alt, found, LOOKS, ratio=True))
    heading = "Table 2: time and memory of a step, relative to the plain gradient step"
    words = WORDS["costs"]["picture"]
    return Figure("figure-table2", tuple(charts), heading, words, methods=LOOKS, caption=words)


def points(record: Record, quantity: str) -> list[dict[str, Any]]:
    """Of every model and method: ours with quartiles, the paper's and the bar, over the plain gradient step."""
    found, time = [], quantity == "time"
    wanted = ("table2", record["mode"], QUANTITIES[quantity][1])
    known = [bar for bar in reversed(BARS) if (bar.kind, bar.mode, bar.quantity) == wanted]
    limits = {(bar.method, model): limit for bar in known for model, limit in bar.limits.items()}
    for case in record["cases"]:
        model, plain = case["name"], PAPER[BASELINE].get(case["name"])
        for name, label in METHODS.items():
            if time:
                own, paper = entry(case, name).get("ratio", {}), paper_ratio(model, name, record["mode"].split("-")[0])
            else:
                ratio, printed = memory_ratio(case, name), PAPER["zeta_star" if name == "paper" else name].get(model)
                own = {} if ratio is None else {"median": ratio, "low": ratio, "high": ratio}
                paper = printed.megabytes / plain.megabytes if printed and plain else None
            if not own and (paper is None or not time):
                continue
            middle, low, high = (own.get(key) for key in ("median", "low", "high"))
            limit = limits.get((name, model))
            limit = limit if limit is None or time else 1 + limit / 100
            within = f" ({low:.3f} to {high:.3f})" if low != high else ""
            point = {"model": MODELS.get(model, f"5 × {model}"), "method": label, "value": middle, "low": low, "high": high}
            point |= {"paper": paper, "limit": limit, "words": "not measured" if middle is None else f"{middle:.3f} ×{within}"}
            point["paper_words"] = "–" if paper is None else f"{paper:.2f} ×"
            found.append(point | {"limit_words": "–" if limit is None else f"at most {limit:g} ×"})
    return found


def section(records: Mapping[str, Record], directory: str) -> list[Block]:
    """Of the HTML page: Table 2 as dots and, record by record, as tables, and the bars."""
    order = list(MODES)
    shown = [name for name, record in records.items() if record.get("kind") == "table2"]
    shown.sort(key=lambda name: order.index(records[name]["mode"]) if records[name]["mode"] in order else len(order))
    found: list[Block] = [parts.Figure(table2({name: records[name] for name in shown}), small=True)] if shown else []
    for name in shown:
        found += _shown(f"{directory}/{name}", records[name])
    reached = standings(records)
    missed = [value > limit for _, _, limit, value, _ in reached if value is not None]
    text = WORDS["costs"]["bars"].format(damping=DAMPING, measured=len(missed), missed=sum(missed))
    return [*(found or [missing("Table 2", "bench table2")]), Heading("bars", "The bars"), text, bars(records)]


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
