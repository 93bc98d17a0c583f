"""The paper's Table 2 as dots: what a step of each method costs over the plain one, beside the paper's figure and the bar."""

from collections.abc import Mapping, Sequence
from typing import Any

from isaac_lab.bench.published import BARS, DAMPING, PAPER, paper_ratio, standings
from isaac_lab.bench.steps import BASELINE
from isaac_lab.charts import dots
from isaac_lab.charts.figure import Chart, Figure, Method, identifier, look
from isaac_lab.report import WORDS, parts
from isaac_lab.report.benchmarks import MODES, NAMES, bars, entry, memory_ratio, title
from isaac_lab.report.parts import Block, Heading, Section, Source, missing
from isaac_lab.report.tables import Row, Table, table

Record = dict[str, Any]

#: The plain gradient is 1 by definition.
METHODS = {name: NAMES[name] for name in ("paper", "zeta_star", "zeta", "kfac")}
LOOKS = tuple(Method(label, look("formula" if name == "paper" else name)) for name, label in METHODS.items())
MODELS = {"autoencoder": "auto-encoder"}
#: By quantity what it is, and what a bar calls it.
QUANTITIES = {"time": ("Time", "ratio"), "memory": ("Peak memory", "memory")}
NOTES = WORDS["costs"]


def figure(records: Mapping[str, Record], quantity: str, *, heading: str = "") -> Figure:
    """A chart for each record that has any; `quantity` is a key of `QUANTITIES`."""
    charts = tuple(_chart(name, record, quantity) for name, record in records.items() if points(record, quantity))
    return Figure(f"figure-{quantity}", charts, heading, NOTES["picture"], methods=LOOKS, caption=NOTES["picture"])


def both(records: Mapping[str, Record], *, heading: str) -> Figure:
    """Times and, after them, memory."""
    charts = [chart for quantity in QUANTITIES for chart in figure(records, quantity).charts]
    return Figure("figure-table2", tuple(charts), heading, NOTES["picture"], methods=LOOKS)


def _chart(name: str, record: Record, quantity: str) -> Chart:
    found, (what, _) = points(record, quantity), QUANTITIES[quantity]
    star = [f"{point['model']} {point['words']}" for point in found if point["method"] == "ζ*" and point["value"]]
    alt = (
        f"{title(record)}: {what.lower()} of a step over the plain gradient step. ζ*: {'; '.join(star)}. "
        "All numbers are in the tables below."
    )
    own = identifier("cost", quantity, name.removesuffix(".json"))
    return dots.chart(own, f"{what}: {title(record)}", alt, found, LOOKS, ratio=True)


def points(record: Record, quantity: str) -> list[dict[str, Any]]:
    """Of every model and method: ours, the paper's and the bar, over the plain gradient step; none without any of ours."""
    found = []
    for case in record["cases"]:
        for name, label in METHODS.items():
            own, paper = relative(case, name, quantity), published(record, case["name"], name, quantity)
            if own is None and (paper is None or quantity == "memory"):
                continue
            middle, low, high = own or (None, None, None)
            limit = _limit(record, case["name"], name, quantity)
            within = f" ({low:.3f} to {high:.3f})" if low != high else ""
            point: dict[str, Any] = {"model": MODELS.get(case["name"], f"5 × {case['name']}"), "method": label}
            point |= {"value": middle, "low": low, "high": high, "paper": paper, "limit": limit}
            point["words"] = "not measured" if middle is None else f"{middle:.3f} ×{within}"
            point["paper_words"] = "–" if paper is None else f"{paper:.2f} ×"
            point["limit_words"] = "–" if limit is None else f"at most {limit:g} ×"
            found.append(point)
    return found if any(point["value"] is not None for point in found) else []


def _limit(record: Record, model: str, method: str, quantity: str) -> float | None:
    wanted = ("table2", record["mode"], method, QUANTITIES[quantity][1])
    found = [own.limits.get(model) for own in BARS if (own.kind, own.mode, own.method, own.quantity) == wanted]
    limit = next((limit for limit in found if limit is not None), None)
    return limit if limit is None or quantity == "time" else 1 + limit / 100


def relative(case: Record, name: str, quantity: str) -> tuple[float, float, float] | None:
    """A method's time or peak memory over the plain gradient's: median and quartiles, or three times the same number."""
    if quantity == "time":
        found = entry(case, name).get("ratio")
        return (found["median"], found["low"], found["high"]) if found else None
    ratio = memory_ratio(case, name)
    return None if ratio is None else (ratio, ratio, ratio)


def published(record: Record, model: str, method: str, quantity: str) -> float | None:
    """The same in the paper."""
    if quantity == "time":
        return paper_ratio(model, method, record["mode"].split("-")[0])
    own = PAPER["zeta_star" if method == "paper" else method].get(model)
    return own.megabytes / PAPER[BASELINE][model].megabytes if own and model in PAPER[BASELINE] else None


def section(records: Mapping[str, Record], directory: str) -> Section:
    """Charts and a table of time and of memory from every record of Table 2, and the bars."""
    order = list(MODES)
    shown = [name for name, record in records.items() if record.get("kind") == "table2"]
    shown.sort(key=lambda name: order.index(records[name]["mode"]) if records[name]["mode"] in order else len(order))
    found: list[Block] = [] if shown else [missing("Table 2", "bench table2")]
    for quantity, (what, _) in QUANTITIES.items() if shown else ():
        chosen = {name: records[name] for name in shown}
        found.append(Heading(f"costs-{quantity}", f"{what} of a step"))
        found += [parts.Figure(figure(chosen, quantity), small=True), _compared(list(chosen.values()), quantity)]
    reached = standings(records)
    missed = [value > limit for _, _, limit, value, _ in reached if value is not None]
    text = NOTES["bars"].format(damping=DAMPING, measured=len(missed), missed=sum(missed))
    found += [Heading("bars", "The bars"), text, bars(records)]
    names = dict.fromkeys([*shown, *(name for *_, name in reached if name)])
    found += [Source.of([f"{directory}/{name}"], [records[name]]) for name in names]
    return Section.of("costs", found)


def _compared(records: Sequence[Record], quantity: str) -> Table:
    """A line for each method and mode: ours, and the paper's in parentheses."""
    lines: list[tuple[str, str, dict[str, dict[str, Any]]]] = []
    for record in records:
        found = points(record, quantity)
        for method in METHODS.values():
            own = {point["model"]: point for point in found if point["method"] == method}
            lines += [(title(record), method, own)] if own else []
    models = list(dict.fromkeys(model for _, _, own in lines for model in own))
    rows = []
    for where, method, own in lines:
        cells = [where, method]
        marks: dict[int, str] = {}
        for model in models:
            ratio, paper, limit = (own.get(model, {}).get(key) for key in ("value", "paper", "limit"))
            missed = ratio is not None and limit is not None and ratio > limit
            marks |= {len(cells): "bad"} if missed else {}
            text = ("–" if ratio is None else f"{ratio:.2f}") + (" (–)" if paper is None else f" ({paper:.2f})")
            cells.append(text + (" †" if missed else ""))
        rows.append(Row(tuple(cells), method == METHODS["zeta_star"], marks=marks))
    columns = ("Where", "Method", *models)
    return table(columns, rows, columns[:2], f"{QUANTITIES[quantity][0]} of a step: ours (the paper's)", NOTES["compared"])
