"""One table for terminal, Markdown and HTML: rows of words under headings."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import rich.table


@dataclass(frozen=True)
class Row:
    """Of a table."""

    cells: tuple[str, ...]  # the first one is the row's heading
    ours: bool = False  # whether it is about this library
    marks: Mapping[int, str] = field(default_factory=dict)  # by the number of a cell, "good" or "bad"


@dataclass(frozen=True)
class Table:
    """Rows under headings: words in the columns that `words` names, numbers in all others. The note says how to read it."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    words: frozenset[str]
    note: str = ""

    def markdown(self) -> str:
        """As Markdown, ours bold, without caption and note."""
        alignment = ("---" if heading in self.words else "--:" for heading in self.columns)
        lines = [self.columns, tuple(alignment), *(row.cells for row in self.rows)]
        for place, row in enumerate(self.rows, 2):
            if row.ours:
                lines[place] = ("**" + row.cells[0].replace("*", "\\*") + "**", *row.cells[1:])
        # What would end a cell does not: headings of a terminal may go over two lines.
        whole = ([re.sub(r"(?<!\\)\|", r"\\|", cell.replace("\n", " ")) for cell in line] for line in lines)
        return "".join(f"| {' | '.join(line)} |\n" for line in whole)

    def terminal(self) -> "rich.table.Table":
        """For rich: numbers to the right, ours bold; **strong** words without their stars."""
        import rich.table
        from rich import box
        from rich.markup import escape as plain

        made = rich.table.Table(box=box.SIMPLE_HEAD, title=self.caption or None, title_justify="left", caption_justify="left")
        made.caption, made.pad_edge, made.collapse_padding = self.note or None, False, True
        for place, heading in enumerate(self.columns):
            # Words go over several lines, numbers are not broken.
            own = [] if heading in self.words else [heading, *(row.cells[place] for row in self.rows)]
            widest = max((len(word) for text in own for word in text.split()), default=0)
            made.add_column(
                plain(heading), justify="left" if heading in self.words else "right", overflow="fold", min_width=widest or None
            )
        for row in self.rows:
            cells = (plain(cell.replace("**", "").replace("`", "")) for cell in row.cells)
            made.add_row(*cells, style="bold" if row.ours else "")
        return made

    def html(self, words: Callable[[str], str] = escape) -> str:
        """As an element that scrolls sideways; `words` escapes a text, and may know more of it."""
        head = "".join(f'<th scope="col"{self._class(place)}>{escape(name)}</th>\n' for place, name in enumerate(self.columns))
        body = ""
        for row in self.rows:
            cells = "".join(
                f"<td{self._class(place, cell, row.marks.get(place, ''))}>{words(_figures(cell))}</td>\n"
                for place, cell in enumerate(row.cells[1:], 1)
            )
            ours = ' class="ours"' if row.ours else ""
            body += f'<tr{ours}>\n<th scope="row">{words(row.cells[0])}</th>\n{cells}</tr>\n'
        note = f'<p class="small">{escape(self.note)}</p>\n' if self.note else ""
        return (
            f'<div class="scroll" role="region" aria-label="{escape(self.caption)}" tabindex="0">\n<table>\n'
            f"<caption><span>{words(self.caption)}</span></caption>\n<thead><tr>\n{head}</tr></thead>\n"
            f"<tbody>\n{body}</tbody>\n</table>\n</div>\n{note}"
        )

    def only(self, places: Sequence[int]) -> "Table":
        """These columns alone; the last one is −1."""
        rows, places = [], [place % len(self.columns) for place in places]
        for row in self.rows:
            marks = {new: row.marks[old] for new, old in enumerate(places) if old in row.marks}
            rows.append(replace(row, cells=tuple(row.cells[old] for old in places), marks=marks))
        return replace(self, columns=tuple(self.columns[old] for old in places), rows=tuple(rows))

    def _class(self, place: int, cell: str = "", mark: str = "") -> str:
        """Words are to the left, and long ones have room."""
        words = self.columns[place] in self.words
        names = " ".join(filter(None, ("words" if words else "", "wide" if words and len(cell) > 24 else "", mark)))
        return f' class="{names}"' if names else ""


def table(
    columns: Sequence[str],
    body: Iterable[Row | Sequence[str]],
    words: Iterable[str] | None = None,
    caption: str = "",
    note: str = "",
) -> Table:
    """From headings and rows or cells, of which the last may be missing; `words` names the columns of words, else all are."""
    rows = [row if isinstance(row, Row) else Row(tuple(row)) for row in body]
    whole = (replace(row, cells=(*row.cells, *[""] * (len(columns) - len(row.cells)))) for row in rows)
    return Table(caption, tuple(columns), tuple(whole), frozenset(columns if words is None else words), note)


def spread(found: Mapping[str, Any], style: str, coarse: str = "") -> str:
    """Mean ± deviation of a sample, the deviation in a style of its own where there is one; a dash for nothing."""
    if found["mean"] is None:
        return "–"
    return f"{found['mean']:{style}}" + ("" if found["std"] is None else f" ± {found['std']:{coarse or style}}")


def _figures(cell: str) -> str:
    """A figure with its deviation and unit stays on one line; what is in parentheses or after a comma may go to the next."""
    figure, *rest = re.split(r"(?= \()|(?<=,)(?= )", cell, maxsplit=1)
    return "".join([figure.replace(" ", "\u00a0"), *rest]) if re.match(r"[−+≤]? ?\d", cell) else cell
