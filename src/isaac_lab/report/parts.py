"""What pages are made of: blocks as plain data, which the HTML page and the Markdown pages both show."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from isaac_lab.charts import figure
from isaac_lab.charts.draw import draw, pictures
from isaac_lab.claims.evidence import Claim, Finding
from isaac_lab.records import write_whole
from isaac_lab.report.docs import escaped, wrapped
from isaac_lab.report.tables import Table
from isaac_lab.words import versions_of


@dataclass(frozen=True)
class Heading:
    """Of a part of a section; links to itself."""

    id: str
    title: str


@dataclass(frozen=True)
class Source:
    """Where numbers come from: files or folders, by which commands, and what these say of themselves, each thing once."""

    records: tuple[str, ...]
    commands: tuple[str, ...] = ()
    about: str = ""  # at which commit, when, where, and with which versions

    @classmethod
    def of(cls, records: Iterable[str], calls: Iterable[Mapping[str, Any]]) -> "Source":
        """From the entries "command", "commit", "time", "machine" and "versions" of records; none of them has to be there."""
        known = list(calls)

        def each(found: Iterable[str | None]) -> list[str]:
            return list(dict.fromkeys(filter(None, found)))

        commands, commits = (each(call.get(key) for call in known) for key in ("command", "commit"))
        days = sorted(each((call.get("time") or "")[:10] for call in known))
        machines, versions = each(_machine(call.get("machine") or {}) for call in known), each(map(versions_of, known))
        made = f"commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}" if commits else ""
        parts = (made, " to ".join(dict.fromkeys(days[:1] + days[-1:])), "; ".join(machines), "; ".join(versions))
        return cls(tuple(dict.fromkeys(records)), tuple(commands), " · ".join(filter(None, parts)))

    @property
    def markdown(self) -> str:
        """All of it, in a paragraph."""
        records, commands = (", ".join(f"`{name}`" for name in names) for names in (self.records, self.commands))
        return wrapped(f"Record: {records}, by {commands}; {self.about}.")


def _machine(machine: Mapping[str, Any]) -> str:
    counted = [(machine.get(f"{what}s"), what) for what in ("core", "thread")]
    numbers = [f"{count} {what}{'' if count == 1 else 's'}" for count, what in counted if count]
    return ", ".join(filter(None, (machine.get("gpu"), machine.get("cpu"), *numbers)))


@dataclass(frozen=True)
class Figure:
    """A figure, and tables of its numbers; small charts stand side by side. Beside a Markdown page its file has the name."""

    shown: figure.Figure
    name: str = ""
    tables: tuple[Table, ...] = ()
    small: bool = False


@dataclass(frozen=True)
class Ledger:
    """Every claim with what the records say of it, how many have which verdict, and by experiment its name in the paper."""

    found: Sequence[tuple[Claim, Finding]]
    counts: Mapping[str, int]
    names: Mapping[str, str]


#: A text is a paragraph, with `code` between backticks and **strong** words; several are what a reader has to know, in points.
Block: TypeAlias = str | Sequence[str] | Heading | Source | Table | Figure | Ledger


def missing(what: str, command: str) -> str:
    """In place of what has no record."""
    return f"{what}: no record yet. This makes one: `isaac-newton {command}`."


def markdown(blocks: Iterable[Block], pictures: Path, level: int = 2) -> str:
    """The blocks for a Markdown page, with headings of a level; without the numbers behind figures."""
    made = []
    for block in blocks:
        match block:
            case str():
                made.append(wrapped(escaped(block)))
            case Heading():
                made.append(f"{'#' * level} {block.title}")
            case Source():
                made.append(block.markdown)
            case Table():
                made.append(block.markdown().rstrip())
            case Figure():
                draw(block.shown, pictures / f"{block.name}.svg")
                made.append(f"![{block.shown.title}]({pictures.name}/{block.name}.svg)")
            case Ledger():
                raise TypeError("the ledger is for the HTML page alone")
            case _:
                made.append("\n".join(wrapped(escaped(note), "- ", "  ") for note in block))
    return "\n\n".join(made)


def leave(folder: Path, title: str, shown: figure.Figure, blocks: Sequence[Block]) -> None:
    """Beside the records of a study: the blocks under a title as table.md, and the picture."""
    write_whole(folder / "table.md", f"{markdown([f'# {title}', *blocks], folder)}\n")
    pictures(shown, folder / "figure")
