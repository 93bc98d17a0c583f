"""What pages say of the races: how much faster than the optimizers that people would pick, in one table, and each race."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isaac_lab.race.course import COURSES
from isaac_lab.race.draw import draw
from isaac_lab.race.standings import speed_up, summarize
from isaac_lab.race.tables import markdown, ordered, speed
from isaac_lab.record import Store
from isaac_lab.records import write_whole

__all__ = ["PageError", "fill", "headline", "marks", "sections", "summaries"]

Record = Mapping[str, Any]

#: Who people would pick instead.
RIVALS = ("adamw", "muon", "soap")
#: The largest first; smoke tests say nothing of the methods.
SCALES = ("full", "quick")
HEADINGS = ("Workload", "Best of ours", "Compared with", "Steps", "Seconds", "Seconds, both eager")
#: In a page: the one table, and all races, go between `<!-- race -->` and `<!-- /race -->`, or the same with `races`.
MARKS = ("race", "races")


class PageError(Exception):
    """A page that cannot be filled in; the message says why."""


def summaries(races: Path) -> dict[Path, dict[str, Any]]:
    """By folder, the races on each workload, the largest scale first, in the order of the workloads."""
    folders = [races / workload / scale for workload in COURSES for scale in SCALES]
    return {folder: summarize(Store(folder)) for folder in folders if (folder / "about.json").is_file()}


def headline(races: Path) -> str:
    """The table as Markdown: the best of ours on each workload beside each rival, good or bad; "" where there are no races.

    A cell says how many times as long the rival takes to the target, the loss that tuned AdamW ends at; above 1, ours is
    faster. With ≥, a seed of the rival does not get there in the budget. The best of ours is the first at the target in
    seconds; where none of ours gets there, the one that ends lowest.
    """
    known = summaries(races).values()
    if not known:
        return ""
    lines = [_line(HEADINGS), _line(["---", "---", "---", *["--:"] * 3])]
    for race in known:
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


def sections(races: Path, pictures: Path) -> str:
    """Each race with its picture, which is drawn, and everyone in it, as Markdown."""
    found = []
    for folder, race in summaries(races).items():
        name = f"{folder.parent.name}-{folder.name}.png"
        pictures.mkdir(parents=True, exist_ok=True)
        draw(race, (pictures / name).with_suffix(""), suffixes=("png",))
        title, table = markdown(race).split("\n", 1)
        alt = f"{race['quantity_title']} of all methods against steps and against seconds"
        found.append(f"#{title}\n\n![{alt}]({pictures.name}/{name})\n{table.rstrip()}")
    return "\n\n".join(found)


def marks(page: Path) -> list[str]:
    """Those that the page has."""
    text = page.read_text(encoding="utf-8")
    found = [mark for mark in MARKS if 0 <= text.find(f"<!-- {mark} -->\n") < text.find(f"<!-- /{mark} -->")]
    if not found:
        raise PageError(f"{page} has no <!-- {MARKS[0]} --> … <!-- /{MARKS[0]} --> to be filled in")
    return found


def fill(page: Path, races: Path) -> None:
    """Put what the races say where a page has marks for it; pictures go into a folder with the page's name beside it."""
    found, text = marks(page), page.read_text(encoding="utf-8")
    if not summaries(races):
        raise PageError(f"{races} has no race of scale {' or '.join(SCALES)} for {page}")
    made = {"race": lambda: headline(races), "races": lambda: sections(races, page.with_suffix(""))}
    for mark in found:
        before, _, rest = text.partition(f"<!-- {mark} -->\n")
        _, end, after = rest.partition(f"<!-- /{mark} -->")
        text = f"{before}<!-- {mark} -->\n{made[mark]()}\n{end}{after}"
    write_whole(page, text)


def _line(cells: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"
