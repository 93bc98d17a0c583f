"""Benchmarks on a terminal: a bar while they run, then files and a table."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from isaac_lab.bench import figure
from isaac_lab.bench.runs import BENCHMARKS, Plan, case_count, file_stem
from isaac_lab.charts.draw import pictures
from isaac_lab.records import write, write_whole
from isaac_lab.report import benchmarks
from isaac_lab.report.tables import table

__all__ = ["run"]


def run(kinds: Sequence[str], plan: Plan, out: Path, console: Console) -> None:
    """Run these benchmarks and write each record as soon as it is there; prints nothing but results unless on a terminal."""
    live = console.is_terminal and not console.is_dumb_terminal
    columns = (TextColumn("{task.description:<32}"), BarColumn(bar_width=12), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not live) as progress:
        task = progress.add_task("", total=sum(case_count(kind, plan) for kind in kinds))
        plan = replace(plan, tick=lambda what, advance: progress.update(task, description=what, advance=advance))
        for kind in kinds:
            for record in BENCHMARKS[kind](plan):
                _show(record, out, console)


def _show(record: dict[str, Any], out: Path, console: Console) -> None:
    path = out / f"{file_stem(record)}.json"
    write(path, record)
    write_whole(path.with_suffix(".md"), benchmarks.markdown(path.name, record))
    if record["kind"] == "scaling":
        pictures(figure.figure(record), path)
    headings, rows = benchmarks.rows(record, compact=True)
    if record["kind"] == "scaling":
        console.print(_table(f"scaling, {record['mode']}", headings, rows))
    else:
        for title, own in itertools.groupby(rows, key=lambda row: row[0]):
            console.print(_table(f"{title}, {record['mode']}", headings[1:], [row[1:] for row in own]))
    console.print(benchmarks.CAPTION)
    if record.get("left_out"):
        console.print(f"Left out (--budget): {'; '.join(record['left_out'])}.")
    console.print(f"Record: {path}\n", markup=False, soft_wrap=True)


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    # The terminal has 80 columns: what the paper's memory was is in the Markdown file.
    shown = [number for number, heading in enumerate(headings) if heading != "Paper MB"]
    body = [[row[number] for number in shown] for row in rows]
    return table([headings[number] for number in shown], body, benchmarks.LEFT, title).terminal()
