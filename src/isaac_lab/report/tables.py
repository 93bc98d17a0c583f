"""One table for terminal, Markdown and HTML: rows of words under headings."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import rich.table


@dataclass(frozen=True)
class Row:
    """Of a table."""

    cells: tuple[str, ...]  # the first one is the row's heading
    ours: bool = False  # whether it is about this library
    note: str = ""  # in place of all cells but the first: why there are none
    marks: Mapping[int, str] = field(default_factory=dict)  # by the number of a cell, "good" or "bad"


@dataclass(frozen=True)
class Table:
    """Rows under headings: words in the columns that `words` numbers, numbers in all others. The note says how to read it."""

    kind: ClassVar[str] = "table"
    caption: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    words: frozenset[int] = frozenset({0})
    note: str = ""

    def markdown(self) -> str:
        """As Markdown, ours bold, without caption and note."""
        alignment = ("---" if place in self.words else "--:" for place in range(len(self.columns)))
        body = ((_bold(cells[0]), *cells[1:]) if row.ours else cells for row in self.rows for cells in [self._whole(row)])
        lines = [self.columns, tuple(alignment), *body]
        return "".join("| " + " | ".join(_one_line(cell) for cell in line) + " |\n" for line in lines)

    def terminal(self) -> "rich.table.Table":
        """For rich: numbers to the right, ours bold; **strong** words without their stars."""
        import rich.table
        from rich import box
        from rich.markup import escape as plain

        made = rich.table.Table(box=box.SIMPLE_HEAD, title=self.caption or None, title_justify="left", caption_justify="left")
        made.caption, made.pad_edge, made.collapse_padding = self.note or None, False, True
        for place, heading in enumerate(self.columns):
            # Words go over several lines, numbers are not broken.
            own = [] if place in self.words else [heading, *(row.cells[place] for row in self.rows if place < len(row.cells))]
            widest = max((len(word) for text in own for word in text.split()), default=0)
            made.add_column(
                plain(heading), justify="left" if place in self.words else "right", overflow="fold", min_width=widest or None
            )
        for row in self.rows:
            cells = (plain(cell.replace("**", "").replace("`", "")) for cell in self._whole(row))
            made.add_row(*cells, style="bold" if row.ours else "")
        return made

    def html(self, words: Callable[[str], str] = escape) -> str:
        """As an element that scrolls sideways; `words` escapes a text, and may know more of it."""
        head = "".join(f'<th scope="col"{self._class(place)}>{escape(name)}</th>\n' for place, name in enumerate(self.columns))
        body = "".join(self._html(row, words) for row in self.rows)
        note = f'<p class="small">{escape(self.note)}</p>\n' if self.note else ""
        return (
            f'<div class="scroll" role="region" aria-label="{escape(self.caption)}" tabindex="0">\n<table>\n'
            f"<caption><span>{words(self.caption)}</span></caption>\n<thead><tr>\n{head}</tr></thead>\n"
            f"<tbody>\n{body}</tbody>\n</table>\n</div>\n{note}"
        )

    def only(self, places: Sequence[int]) -> "Table":
        """These columns alone."""
        rows = []
        for row in self.rows:
            cells = tuple(row.cells[old] for old in places if old < len(row.cells))
            marks = {new: row.marks[old] for new, old in enumerate(places) if old in row.marks}
            rows.append(replace(row, cells=cells, marks=marks))
        words = frozenset(new for new, old in enumerate(places) if old in self.words)
        return replace(self, columns=tuple(self.columns[old] for old in places), rows=tuple(rows), words=words)

    def _html(self, row: Row, words: Callable[[str], str]) -> str:
        first, *others = enumerate(row.cells)
        cells = "".join(
            f"<td{self._class(place, cell, row.marks.get(place, ''))}>{words(_figures(cell))}</td>\n" for place, cell in others
        )
        if row.note:
            cells = f'<td class="words note" colspan="{len(self.columns) - 1}">{words(row.note)}</td>\n'
        ours = ' class="ours"' if row.ours else ""
        return f'<tr{ours}>\n<th scope="row">{words(first[1])}</th>\n{cells}</tr>\n'

    def _class(self, place: int, cell: str = "", mark: str = "") -> str:
        """Words are to the left, and long ones have room."""
        known = {"words": place in self.words, "wide": place in self.words and len(cell) > 24, mark: bool(mark)}
        names = " ".join(name for name, there in known.items() if there)
        return f' class="{names}"' if names else ""

    def _whole(self, row: Row) -> tuple[str, ...]:
        """With the note in its place, and nothing where cells are missing."""
        cells = (row.cells[0], row.note) if row.note else row.cells
        return (*cells, *[""] * (len(self.columns) - len(cells)))


def table(
    columns: Sequence[str],
    body: Iterable[Row | Sequence[str]],
    words: Iterable[str] | None = None,
    caption: str = "",
    note: str = "",
) -> Table:
    """From headings and rows or cells; `words` names the columns that hold words, all of them unless given."""
    named = set(columns) if words is None else set(words)
    places = frozenset(place for place, heading in enumerate(columns) if heading in named)
    rows = tuple(row if isinstance(row, Row) else Row(tuple(row)) for row in body)
    return Table(caption, tuple(columns), rows, places, note)


def spread(found: Mapping[str, Any], style: str, coarse: str = "") -> str:
    """Mean ± deviation of a sample, the deviation in a style of its own where there is one; a dash for nothing."""
    if found["mean"] is None:
        return "–"
    return f"{found['mean']:{style}}" + ("" if found["std"] is None else f" ± {found['std']:{coarse or style}}")


def _one_line(cell: str) -> str:
    """What would end a cell does not: headings of a terminal may go over two lines."""
    return re.sub(r"(?<!\\)\|", r"\\|", cell.replace("\n", " "))


def _figures(cell: str) -> str:
    """A figure with its deviation and unit stays on one line; what is in parentheses or after a comma may go to the next."""
    figure, *rest = re.split(r"(?= \()|(?<=,)(?= )", cell, maxsplit=1)
    return "".join([figure.replace(" ", "\u00a0"), *rest]) if re.match(r"[−+≤]? ?\d", cell) else cell


def _bold(cell: str) -> str:
    return "**" + cell.replace("*", "\\*") + "**"
