"""What pages are made of: blocks as plain data, which the HTML page and the Markdown pages both show."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from isaac_lab.charts import figure
from isaac_lab.charts.draw import draw
from isaac_lab.claims.evidence import Claim, Finding
from isaac_lab.report import WORDS
from isaac_lab.report.docs import escaped, wrapped
from isaac_lab.report.tables import Table
from isaac_lab.words import versions_of


@dataclass(frozen=True)
class Heading:
    """Of a part of a section; links to itself."""

    kind: ClassVar[str] = "heading"
    id: str
    title: str


@dataclass(frozen=True)
class Notes:
    """What a reader has to know, point by point."""

    kind: ClassVar[str] = "notes"
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """Where numbers come from: files or folders, and what these say of themselves, each thing once; times are ISO 8601."""

    kind: ClassVar[str] = "source"
    records: tuple[str, ...]
    commands: tuple[str, ...] = ()
    commits: tuple[str, ...] = ()
    times: tuple[str, ...] = ()
    machines: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()

    @classmethod
    def of(cls, records: Iterable[str], calls: Iterable[Mapping[str, Any]]) -> "Source":
        """From the entries "command", "commit", "time", "machine" and "versions" of records; none of them has to be there."""
        known = list(calls)
        each = [[call.get(key) or "" for call in known] for key in ("command", "commit", "time")]
        each += [[_machine(call.get("machine") or {}) for call in known], [versions_of(call) for call in known]]
        commands, commits, times, *rest = (tuple(dict.fromkeys(filter(None, found))) for found in each)
        return cls(tuple(dict.fromkeys(records)), commands, commits, tuple(sorted(times)), *rest)

    @property
    def days(self) -> str:
        """The day of the records, or the first and the last."""
        days = sorted({time[:10] for time in self.times})
        return " to ".join(dict.fromkeys((days[0], days[-1]))) if days else ""

    @property
    def about(self) -> str:
        """At which commit, when, where, and with which versions."""
        commits = f"commit{'s' if len(self.commits) > 1 else ''} {', '.join(self.commits)}" if self.commits else ""
        return " · ".join(filter(None, (commits, self.days, "; ".join(self.machines), "; ".join(self.versions))))

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

    kind: ClassVar[str] = "figure"
    shown: figure.Figure
    name: str = ""
    tables: tuple[Table, ...] = ()
    small: bool = False


@dataclass(frozen=True)
class Tile:
    """A figure that a reader wants first: the number, what it is, and the section that has the rest."""

    number: str
    label: str
    detail: str
    section: str


@dataclass(frozen=True)
class Tiles:
    """A row of them."""

    kind: ClassVar[str] = "tiles"
    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class Ledger:
    """Every claim with what the records say of it, how many have which verdict, and by experiment its name in the paper."""

    kind: ClassVar[str] = "ledger"
    found: Sequence[tuple[Claim, Finding]]
    counts: Mapping[str, int]
    names: Mapping[str, str]


#: A text is a paragraph, with `code` between backticks and **strong** words.
Block: TypeAlias = str | Heading | Notes | Source | Table | Figure | Tiles | Ledger


def missing(what: str, command: str) -> str:
    """In place of what has no record."""
    return f"{what}: no record yet. This makes one: `isaac-newton {command}`."


@dataclass(frozen=True)
class Section:
    """A part of the HTML page with a heading that links to itself; `lead` says what one sees."""

    id: str
    title: str
    lead: str
    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, id: str, blocks: Iterable[Block]) -> "Section":
        """With the title and the lead of words.toml."""
        known = WORDS["sections"][id]
        return cls(id, known["title"], known["lead"], tuple(blocks))


def markdown(blocks: Iterable[Block], pictures: Path, level: int = 2) -> str:
    """The same blocks for a Markdown page, with headings of a level; without the numbers behind figures."""
    made = []
    for block in blocks:
        match block:
            case str():
                made.append(wrapped(escaped(block)))
            case Heading():
                made.append(f"{'#' * level} {block.title}")
            case Notes():
                made.append("\n".join(wrapped(escaped(note), "- ", "  ") for note in block.notes))
            case Source():
                made.append(block.markdown)
            case Table():
                made.append(block.markdown().rstrip())
            case Figure():
                draw(block.shown, pictures / f"{block.name}.svg")
                made.append(f"![{block.shown.title}]({pictures.name}/{block.name}.svg)")
            case _:
                raise TypeError(f"{type(block).__name__} is for the HTML page alone")
    return "\n\n".join(made)
