"""What the page is made of: sections of blocks, as plain data that the template turns into HTML."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from isaac_lab.charts import figure
from isaac_lab.claims.evidence import Claim, Finding
from isaac_lab.report.docs import wrapped
from isaac_lab.report.tables import Table
from isaac_lab.words import versions_of


@dataclass(frozen=True)
class Paragraph:
    """Prose; `code` between backticks."""

    kind: ClassVar[str] = "paragraph"
    text: str


@dataclass(frozen=True)
class Heading:
    """Of a part of a section; links to itself."""

    kind: ClassVar[str] = "heading"
    id: str
    title: str


@dataclass(frozen=True)
class Missing:
    """Says that there is no record, and the command that makes one."""

    kind: ClassVar[str] = "missing"
    what: str
    command: str


@dataclass(frozen=True)
class Source:
    """Where numbers come from.

    Args:
        records: Files or folders, as the page should call them.
        commands: That wrote them.
        commits: They were written at.
        times: They were written at, ISO 8601.
        machines: They were measured on.
        versions: Of packages, as words.
    """

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

        def each(key: str) -> tuple[str, ...]:
            return tuple(dict.fromkeys(str(call[key]) for call in known if call.get(key)))

        machines = dict.fromkeys(_machine(call.get("machine") or {}) for call in known)
        versions = dict.fromkeys(versions_of(call) for call in known)
        return cls(
            tuple(dict.fromkeys(records)),
            each("command"),
            each("commit"),
            tuple(sorted(each("time"))),
            tuple(filter(None, machines)),
            tuple(filter(None, versions)),
        )

    @property
    def days(self) -> str:
        """The day of the records, or the first and the last."""
        days = sorted({time[:10] for time in self.times})
        return " to ".join(dict.fromkeys((days[0], days[-1]))) if days else ""


def _machine(machine: Mapping[str, Any]) -> str:
    if machine.get("gpu"):
        return str(machine["gpu"])
    threads = machine.get("threads")
    how = f", {threads} thread{'' if threads == 1 else 's'}" if threads else ""
    return f"{machine['cpu']}{how}" if machine.get("cpu") else ""


def made_by(name: str, record: Mapping[str, Any], settings: str = "") -> str:
    """Below a table in Markdown: the record that it is from, the command, the settings and the machine."""
    machine = record["machine"]
    hardware = ", ".join(str(part) for part in (machine.get("gpu"), machine["cpu"], f"{machine['cores']} cores") if part)
    return wrapped(
        f"Record: `{name}`, {record['time'][:10]}, commit {record['commit'] or 'unknown'}. Command: `{record['command']}`. "
        f"{settings}{hardware}; {versions_of(record)}."
    )


@dataclass(frozen=True)
class Figure:
    """A figure, and tables of its numbers; small charts stand side by side."""

    kind: ClassVar[str] = "figure"
    shown: figure.Figure
    tables: tuple[Table, ...] = ()
    small: bool = False

    @property
    def charts(self) -> tuple[figure.Chart, ...]:
        """Of the figure."""
        return self.shown.charts


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
    """The claims, to be filtered.

    Args:
        found: Every claim with what the records say of it.
        counts: By verdict, how many have it.
        names: By the id of an experiment, what it is in the paper.
    """

    kind: ClassVar[str] = "ledger"
    found: Sequence[tuple[Claim, Finding]]
    counts: Mapping[str, int]
    names: Mapping[str, str]


Block: TypeAlias = Paragraph | Heading | Missing | Source | Table | Figure | Tiles | Ledger


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading that links to itself; `lead` says what one sees."""

    id: str
    title: str
    lead: str
    blocks: tuple[Block, ...]

    @property
    def sources(self) -> tuple[Source, ...]:
        """Of its numbers."""
        return tuple(block for block in self.blocks if isinstance(block, Source))
