"""The paper's Table 2 as dots: what a step of each method costs over the plain one, beside the paper's figure and the bar."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from isaac_lab.bench.published import BARS, DAMPING, PAPER, paper_ratio, standings
from isaac_lab.bench.steps import BASELINE
from isaac_lab.charts import dots
from isaac_lab.charts.figure import Chart, Figure, Method, identifier, look
from isaac_lab.report import parts
from isaac_lab.report.benchmarks import as_table, bars, entry, memory_ratio
from isaac_lab.report.parts import Block, Heading, Missing, Paragraph, Section, Source
from isaac_lab.report.tables import Row, Table

Record = dict[str, Any]

#: Names; the plain gradient is 1 by definition.
METHODS = {"paper": "ζ* as printed", "zeta_star": "ζ*", "zeta": "ζ", "kfac": "K-FAC"}
MODES = {"cuda-captured": "GPU, the whole step as one CUDA graph", "cuda-eager": "GPU, eager", "cpu-1thread": "CPU, one thread"}
MODELS = {"autoencoder": "auto-encoder"}
CAPTION = (
    "Over the plain gradient step, log scale. Filled: ours, with quartiles. Hollow diamond: the paper's table. Upright stroke: "
    "the bar set beforehand."
)


def figure(records: Mapping[str, Record], quantity: str, *, heading: str = "") -> Figure:
    """A chart for each record that has any; `quantity` is "time" or "memory"."""
    methods = tuple(Method(label, look("formula" if name == "paper" else name)) for name, label in METHODS.items())
    charts = tuple(_chart(name, record, quantity, methods) for name, record in records.items() if points(record, quantity))
    return Figure(f"figure-{quantity}", charts, heading, CAPTION, methods=methods, caption=CAPTION)


def both(records: Mapping[str, Record], *, heading: str) -> Figure:
    """Times and, after them, memory."""
    time, memory = (figure(records, quantity, heading=heading) for quantity in ("time", "memory"))
    return Figure("figure-table2", (*time.charts, *memory.charts), heading, CAPTION, methods=time.methods)


def title(record: Record) -> str:
    """How and where a record was measured."""
    machine = record["machine"]
    how = MODES.get(record["mode"], f"CPU, {machine['threads']} threads")
    return f"{how} ({machine.get('gpu') or machine['cpu']})"


def _chart(name: str, record: Record, quantity: str, methods: tuple[Method, ...]) -> Chart:
    found = points(record, quantity)
    what = "time" if quantity == "time" else "peak memory"
    star = [f"{point['model']} {point['words']}" for point in found if point["method"] == "ζ*" and point["value"]]
    alt = (
        f"{title(record)}: {what} of a step over the plain gradient step. ζ*: {'; '.join(star)}. "
        "All numbers are in the tables below."
    )
    own = identifier("cost", quantity, name.removesuffix(".json"))
    return dots.chart(own, f"{what.capitalize()}: {title(record)}", alt, found, methods, ratio=True)


def points(record: Record, quantity: str) -> list[dict[str, Any]]:
    """Of every model and method: ours, the paper's and the bar, over the plain gradient step; none without any of ours."""
    found = []
    for case in record["cases"]:
        for name, label in METHODS.items():
            middle, low, high = relative(case, name, quantity)
            paper = published(record, case["name"], name, quantity)
            limit = _limit(record, case["name"], name, quantity)
            if middle is None and (paper is None or quantity == "memory"):
                continue
            own = (
                "not measured" if middle is None else f"{middle:.3f} ×" + (f" ({low:.3f} to {high:.3f})" if low != high else "")
            )
            found.append(
                {
                    "model": MODELS.get(case["name"], f"5 × {case['name']}"),
                    "method": label,
                    "value": middle,
                    "low": None if middle is None else low,
                    "high": None if middle is None else high,
                    "paper": paper,
                    "limit": limit,
                    "words": own,
                    "paper_words": "–" if paper is None else f"{paper:.2f} ×",
                    "limit_words": "–" if limit is None else f"at most {limit:g} ×",
                }
            )
    return found if any(point["value"] is not None for point in found) else []


def _limit(record: Record, model: str, method: str, quantity: str) -> float | None:
    for bar in BARS:
        if (bar.kind, bar.mode, bar.method) == ("table2", record["mode"], method) and model in bar.limits:
            if (bar.quantity, quantity) == ("ratio", "time"):
                return bar.limits[model]
            if (bar.quantity, quantity) == ("memory", "memory"):
                return 1 + bar.limits[model] / 100
    return None


def relative(case: Record, name: str, quantity: str) -> tuple[float | None, float, float]:
    """A method's time or peak memory over the plain gradient's: median and quartiles, or three times the same number."""
    if quantity == "time":
        found = entry(case, name).get("ratio")
        return (found["median"], found["low"], found["high"]) if found else (None, 0.0, 0.0)
    ratio = memory_ratio(case, name)
    return (None, 0.0, 0.0) if ratio is None else (ratio, ratio, ratio)


def published(record: Record, model: str, method: str, quantity: str) -> float | None:
    """The same in the paper."""
    if quantity == "time":
        return paper_ratio(model, method, record["mode"].split("-")[0])
    own = PAPER["zeta_star" if method == "paper" else method].get(model)
    return own.megabytes / PAPER[BASELINE][model].megabytes if own and model in PAPER[BASELINE] else None


def section(records: Mapping[str, Record], directory: str) -> Section:
    """Charts and tables of every record of Table 2, and the bars."""
    chosen = {name: record for name, record in records.items() if record.get("kind") == "table2"}
    order = list(MODES)
    named = sorted(chosen.items(), key=lambda item: order.index(item[1]["mode"]) if item[1]["mode"] in order else len(order))
    blocks: list[Block] = []
    if not named:
        blocks.append(Missing("Table 2", "isaac-newton bench table2"))
    else:
        for quantity, name_of in (("time", "Time of a step"), ("memory", "Peak memory of a step")):
            blocks.append(Heading(identifier("costs", quantity), name_of))
            blocks.append(parts.Figure(figure(dict(named), quantity), small=True))
            blocks.append(_compared([record for _, record in named], quantity))
        blocks.append(Heading("costs-numbers", "All numbers, record by record"))
        for name, record in named:
            shown = as_table(record)
            ours = [row.cells[1] == METHODS["zeta_star"] for row in shown.rows]
            own = (Row(tuple(cell or "–" for cell in row.cells), mine) for row, mine in zip(shown.rows, ours, strict=True))
            blocks.append(replace(shown, caption=title(record), rows=tuple(own), folded=True))
            blocks.append(Source.of([f"{directory}/{name}"], [record]))
    blocks += _bars(records, directory)
    lead = (
        "What a training step costs over the plain gradient step, at the paper's batch of 60, beside the paper's own Table 2. "
        "1 × is as fast as the plain step. A step is zero_grad, forward, backward and SGD. The methods take turns in one "
        "process."
    )
    return Section("costs", "What a step costs: Table 2", lead, tuple(blocks))


def _compared(records: list[Record], quantity: str) -> Table:
    """A line for each method and mode: ours, and the paper's in parentheses."""
    models: dict[str, str] = {}
    lines = []
    for record in records:
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for point in points(record, quantity):
            models[point["model"]] = point["model"]
            found.setdefault(point["method"], {})[point["model"]] = point
        lines += [(title(record), method, own) for method, own in found.items()]
    table = []
    for where, method, own in lines:
        cells = [where, method]
        marks: dict[int, str] = {}
        for model in models:
            point = own.get(model, {})
            ratio, paper, limit = (point.get(key) for key in ("value", "paper", "limit"))
            missed = ratio is not None and limit is not None and ratio > limit
            marks |= {len(cells): "bad"} if missed else {}
            text = ("–" if ratio is None else f"{ratio:.2f}") + (" (–)" if paper is None else f" ({paper:.2f})")
            cells.append(text + (" †" if missed else ""))
        table.append(Row(tuple(cells), method == METHODS["zeta_star"], marks=marks))
    what = "Time" if quantity == "time" else "Peak memory"
    note = (
        "Times the plain gradient step. In parentheses: the same ratio in the paper's table, on its machines. †: above the bar "
        "set beforehand."
    )
    return Table(f"{what} of a step: ours (the paper's)", ("Where", "Method", *models), tuple(table), frozenset({0, 1}), note)


def _bars(records: Mapping[str, Record], directory: str) -> list[Block]:
    found = standings(records)
    measured = [(value, limit) for _, _, limit, value, _ in found if value is not None]
    text = (
        f"Bars are what this project set itself as the most a step may cost, all at λ = {DAMPING:g}. Of {len(measured)} that "
        f"were measured, {sum(value > limit for value, limit in measured)} are missed."
    )
    names = dict.fromkeys(name for *_, name in found if name)
    source = [Source.of((f"{directory}/{name}" for name in names), (records[name] for name in names))] if names else []
    return [Heading("bars", "The bars"), Paragraph(text), bars(records), *source]
