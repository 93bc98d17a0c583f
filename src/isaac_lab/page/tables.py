"""The section of the larger models: Table 1 (fine-tuning) and Figure 6 (ResNet-18), from the summaries of their runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isaac_lab.claims.evidence import Evidence
from isaac_lab.page.parts import Block, Figure, Heading, Missing, Paragraph, Row, Section, Table, identifier
from isaac_lab.page.summaries import Summary, checked, find
from isaac_lab.report.figures import courses
from isaac_lab.words import spread

__all__ = ["section"]

TITLES = {"tab1": "Table 1", "fig6": "Figure 6"}


def section(results: Path, directory: str, evidence: Evidence) -> Section:
    """Whatever there is of both."""

    def name(path: Path) -> str:
        return f"{directory}/{path.relative_to(results).as_posix()}"

    blocks: list[Block] = []
    for kind, title in TITLES.items():
        found = find(results / "reproduce" / kind, name, lambda _, scale, kind=kind: evidence.summary(kind, scale))  # type: ignore[misc]
        if not found:
            blocks += [Heading(kind, title), Missing(title, f"isaac-newton reproduce {kind} --scale quick")]
        for place, summary in enumerate(found):
            with checked(summary):
                blocks += _blocks(summary, identifier(kind, summary.scale) if place else kind)
    lead = "A language model fine-tuned on three tasks (the paper's Table 1), and a ResNet-18 on images (its Figure 6)."
    return Section("larger", "Larger models: Table 1 and Figure 6", lead, tuple(blocks))


def _blocks(summary: Summary, id: str) -> list[Block]:
    data = summary.data
    about = " · ".join(str(part) for part in (data.get("model"), f"scale “{summary.scale}”") if part)
    marked = "**Smoke test: it shows that the code runs, and nothing of the methods.** " if summary.scale == "smoke" else ""
    blocks: list[Block] = [Heading(id, data["title"]), Paragraph(f"{marked}{about}.")]
    if data.get("panels"):
        blocks.append(Figure(courses(data, id), tuple(_ends(panel) for panel in data["panels"]), small=True))
    blocks += [_table(data)] if data.get("rows") else []
    blocks += [Paragraph(note) for note in data.get("notes") or ()]
    return [*blocks, summary.source]


def _table(data: Mapping[str, Any]) -> Table:
    rows = []
    for row in data["rows"]:
        cells = [_cell(cell) for cell in row["cells"]]
        rows.append(Row((row["label"], *cells), bool(row.get("ours"))))
    note = "Mean ± standard deviation over n seeds, with the settings that were chosen."
    return Table(data["title"], ("Method", *data["columns"]), tuple(rows), note=note)


def _cell(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "–"
    more = [f"n {cell['n']}"] if cell.get("n") else []
    more += [str(cell["settings"])] if cell.get("settings") else []
    return spread(cell) + (f" ({', '.join(more)})" if more else "")


def _ends(panel: Mapping[str, Any]) -> Table:
    rows = []
    for curve in panel["curves"]:
        last = {"mean": curve["mean"][-1], "std": (curve.get("std") or [None])[-1]}
        rows.append(Row((curve["label"], f"{curve['epochs'][-1]:g}", spread(last, 4), str(curve.get("n", "–")))))
    return Table(f"({panel['name']}) {panel['title']}: at the end", ("Method", "Epochs", "Mean ± deviation", "n"), tuple(rows))
