"""The section of compatibility: what works with what, from the page that the conformance tests write."""

import re
from pathlib import Path

from isaac_lab.page.parts import Missing, Paragraph, Promises, Section, Source
from isaac_lab.records import StoreError

__all__ = ["parse", "section"]

COMMAND = "python tests/compatibility.py"


def section(page: Path, name: str) -> Section:
    """The tables of that page in one, or the command that makes it."""
    lead = "What works with what: each promise with the tests that show it, and how they ended."
    title = "Compatibility"
    if not page.is_file():
        return Section("compatibility", title, lead, (Missing("The compatibility table", COMMAND),))
    versions, found = parse(page)
    about = (Paragraph(f"Versions: {versions}."),) if versions else ()
    return Section("compatibility", title, lead, (*about, found, Source((name,), (COMMAND,))))


def parse(page: Path) -> tuple[str, Promises]:
    """The versions and the tables of docs/compatibility.md."""
    try:
        text = page.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot read {page}: {error}") from None
    areas: dict[str, list[tuple[str, ...]]] = {}
    columns: tuple[str, ...] = ()
    for line in text.splitlines():
        if line.startswith("## "):
            areas[line.removeprefix("## ").strip()] = []
        elif line.startswith("|") and areas:
            cells = _cells(line)
            if set("".join(cells)) <= set("-: "):
                continue
            # The heading of each table is the same.
            if cells == columns or not columns:
                columns = cells
            elif len(cells) != len(columns):
                raise StoreError(f"{page} has a row of {len(cells)} cells under {len(columns)} headings: {line[:60]}")
            else:
                next(reversed(areas.values())).append(cells)
    versions = re.search(r"Versions:\s+(.+?)\.\n\n", text, re.DOTALL)
    rows = {area: tuple(own) for area, own in areas.items() if own}
    return " ".join(versions[1].split()) if versions else "", Promises(columns, rows)


def _cells(line: str) -> tuple[str, ...]:
    inner = line.strip().removeprefix("|").removesuffix("|")
    return tuple(cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", inner))
