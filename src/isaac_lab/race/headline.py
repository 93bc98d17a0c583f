"""The answer in one table: how much faster than the optimizers that people would pick, to the same loss."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isaac_lab.race.course import COURSES
from isaac_lab.race.standings import speed_up
from isaac_lab.race.tables import ordered, speed

__all__ = ["headline", "shown", "summaries", "with_headline"]

Record = Mapping[str, Any]

#: Who people would pick instead.
RIVALS = ("adamw", "muon", "soap")
#: The largest first; smoke tests say nothing of the methods.
SCALES = ("full", "quick")
HEADINGS = ("Workload", "Best of ours", "Compared with", "Steps", "Seconds", "Seconds, both eager")
#: Around the table in the README.
BETWEEN = re.compile(r"(<!-- race -->\n)(.*?)(\n?<!-- /race -->)", re.DOTALL)


def summaries(results: Path) -> list[dict[str, Any]]:
    """The races in a folder of results, that of the largest scale for each workload, in the order of the workloads."""
    found = []
    for workload in COURSES:
        paths = [results / "race" / workload / scale / "summary.json" for scale in SCALES]
        there = next((path for path in paths if path.is_file()), None)
        if there is not None:
            found.append(json.loads(there.read_text(encoding="utf-8")))
    return found


def headline(results: Path) -> str:
    """The table as Markdown: the best of ours on each workload beside each rival, good or bad; "" where there are no races.

    A cell says how many times as long the rival takes to the target, the loss that tuned AdamW ends at; above 1, ours is
    faster. With ≥, a seed of the rival does not get there in the budget. The best of ours is the first at the target in
    seconds; where none of ours gets there, the one that ends lowest.
    """
    races = summaries(results)
    if not races:
        return ""
    lines = [_line(HEADINGS), _line(["---", "---", "---", *["--:"] * 3])]
    for race in races:
        best = next((method for method in ordered(race) if method["ours"] and method["n"]), None)
        rivals = [method for method in race["methods"] if method["name"] in RIVALS]
        for number, rival in enumerate(rivals):
            first = [f"{race['title']} ({race['scale']}, n = {race['seeds']})", _mode(best) if best else "none ran"]
            lines.append(_line([*(["", ""] if number else first), _mode(rival), *_cells(race, best, rival)]))
    return "\n".join(lines)


def _mode(method: Record) -> str:
    return f"{method['label']} ({method['mode']})" if method["n"] else str(method["label"])


def _cells(race: Record, best: Record | None, rival: Record) -> list[str]:
    if not rival["n"]:
        return [f"not run: {rival['reason']}", "–", "–"]
    if best is None or None in best["steps_to_target"]["values"]:
        return ["ours does not reach the target", "–", "–"]
    units = (None, "seconds_per_step", "seconds_per_step_eager")
    return [speed(speed_up(best, rival, race["steps"], unit)) for unit in units]


def shown(readme: str) -> str | None:
    """The table that a README has between `<!-- race -->` and `<!-- /race -->`; None where there are no such marks."""
    found = BETWEEN.search(readme)
    return found.group(2) if found else None


def with_headline(readme: str, results: Path) -> str:
    """The README with the table of these results."""
    return BETWEEN.sub(lambda found: found.group(1) + headline(results) + "\n" + found.group(3).lstrip("\n"), readme)


def _line(cells: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"
