"""What pages say of the races: where each optimizer ended with ISAAC and without, in one table, and each race."""

from pathlib import Path
from typing import Any

from isaac_lab.charts.draw import draw
from isaac_lab.record import Store
from isaac_lab.report import docs
from isaac_lab.report.docs import DocsError as PageError
from isaac_lab.studies.race.course import COURSES
from isaac_lab.studies.race.draw import figure
from isaac_lab.studies.race.ends import lowest, pairs
from isaac_lab.studies.race.standings import summarize
from isaac_lab.studies.race.tables import markdown

__all__ = ["PageError", "fill", "headline", "marks", "sections", "summaries"]

#: The largest first; smoke tests say nothing of the methods.
SCALES = ("full", "quick")
HEADINGS = ("Workload", "Optimizer", "Loss alone", "Loss with ISAAC", "p", "Lowest of all")
#: In a page: the one table, and all races, go between `<!-- race -->` and `<!-- /race -->`, or the same with `races`.
MARKS = ("race", "races")


def summaries(races: Path) -> dict[Path, dict[str, Any]]:
    """By folder, the races on each workload, the largest scale first, in the order of the workloads."""
    folders = [races / workload / scale for workload in COURSES for scale in SCALES]
    return {folder: summarize(Store(folder)) for folder in folders if (folder / "about.json").is_file()}


def headline(races: Path) -> str:
    """The table as Markdown: loss at the end of the budget, with Welch's p over seeds; "" where there are no races."""
    known = summaries(races).values()
    if not known:
        return ""
    lines = [_line(HEADINGS), _line(["---", "---", *["--:"] * 3, "---"])]
    for race in known:
        title = f"{race['title']} ({race['scale']}, n = {race['seeds']})"
        for number, pair in enumerate(pairs(race)):
            means = ["–" if end["mean"] is None else f"{end['mean']:.4g}" for end in (pair.alone, pair.ours)]
            shown = "–" if pair.difference is None else pair.difference.words.removeprefix("p = ")
            winner = lowest(race) or "–"
            lines.append(_line(["" if number else title, pair.label, *means, shown, "" if number else winner]))
    return "\n".join(lines)


def sections(races: Path, pictures: Path) -> str:
    """Each race with its picture, which is drawn, and everyone in it, as Markdown."""
    found = []
    for folder, race in summaries(races).items():
        name = f"race-{folder.parent.name}-{folder.name}.svg"
        draw(figure(race), pictures / name)
        title, table = markdown(race).split("\n", 1)
        alt = f"{race['quantity_title']} of all methods against steps and against seconds"
        found.append(f"#{title}\n\n![{alt}]({pictures.name}/{name})\n{table.rstrip()}")
    return "\n\n".join(found)


def marks(page: Path) -> list[str]:
    """Those that the page has."""
    found = [mark for mark in docs.blocks(page.read_text(encoding="utf-8"), str(page)) if mark in MARKS]
    if not found:
        raise PageError(f"{page} has no <!-- {MARKS[0]} --> … <!-- /{MARKS[0]} --> to be filled in")
    return found


def fill(page: Path, races: Path) -> None:
    """Put what the races say where a page has marks for it; pictures go into `figures` beside it."""
    if not summaries(races):
        raise PageError(f"{races} has no race of scale {' or '.join(SCALES)} for {page}")
    docs.fill(page, {"race": lambda: headline(races), "races": lambda: sections(races, page.parent / "figures")})


def _line(cells: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"
