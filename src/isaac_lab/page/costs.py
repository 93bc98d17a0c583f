"""The section of Table 2: what a step costs over the plain one, beside the paper's figures and the bars set here."""

from collections.abc import Mapping
from typing import Any

from isaac_lab.bench.published import DAMPING
from isaac_lab.bench.standing import standings
from isaac_lab.page.parts import Block, Figure, Heading, Missing, Paragraph, Row, Section, Source, Table, identifier
from isaac_lab.report.benchmarks import LEFT, rows
from isaac_lab.report.costs import METHODS, MODES, figure, points, title
from isaac_lab.words import number

__all__ = ["section"]

Record = dict[str, Any]

UNITS = {"ratio": " ×", "memory": " %", "ms": " ms"}


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
            blocks.append(Figure(figure(dict(named), quantity), small=True))
            blocks.append(_compared([record for _, record in named], quantity))
        blocks.append(Heading("costs-numbers", "All numbers, record by record"))
        for name, record in named:
            headings, body = rows(record)
            table = tuple(Row(tuple(cell or "–" for cell in cells), cells[1] == METHODS["zeta_star"]) for cells in body)
            words = frozenset(place for place, heading in enumerate(headings) if heading in LEFT)
            blocks.append(Table(title(record), tuple(headings), table, words, folded=True))
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
    body, missed = [], 0
    for bar, case, limit, value, name in found:
        unit = UNITS[bar.quantity]
        if value is None:
            body.append(Row((bar.title, case, f"≤ {limit:g}{unit}", "–", "not measured", "–")))
            continue
        reached = value <= limit
        missed += not reached
        verdict = "reached" if reached else f"missed by {number(value - limit, 2)}{unit}"
        cells = (bar.title, case, f"≤ {limit:g}{unit}", f"{value:.3f}{unit}", verdict, name)
        body.append(Row(cells, marks={4: "good" if reached else "bad"}))
    measured = sum(value is not None for *_, value, _ in found)
    text = (
        f"Bars are what this project set itself as the most a step may cost, all at λ = {DAMPING:g}. Of {measured} that were "
        f"measured, {missed} are missed."
    )
    columns = ("What", "Model", "Bar", "Measured", "Verdict", "Record")
    table = Table("Bars, reached and missed", columns, tuple(body), frozenset({0, 1, 4, 5}))
    names = dict.fromkeys(name for *_, name in found if name)
    source = [Source.of((f"{directory}/{name}" for name in names), (records[name] for name in names))] if names else []
    return [Heading("bars", "The bars"), Paragraph(text), table, *source]
