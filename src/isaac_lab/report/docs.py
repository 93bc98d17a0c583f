"""Pages are written by people in Markdown; what comes from records stands in blocks that are filled.

A block is everything between `<!-- name -->` and `<!-- /name -->`, each on a line of its own.
"""

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

from isaac_lab.records import write_whole

#: What fills each block of a page, by name. Pictures go to a folder beside the page.
Blocks: TypeAlias = dict[str, Callable[[], str]]
#: Of a line of a page.
WIDTH = 120


class DocsError(Exception):
    """A page that cannot be filled in; the message says why."""


def blocks(text: str, page: str = "the page") -> dict[str, str]:
    """What is in each block, by name, in their order.

    Raises:
        DocsError: A block does not end, or begins twice.
    """
    found: dict[str, str] = {}
    for begin in re.finditer(r"^<!-- ([\w-]+) -->\n", text, re.MULTILINE):
        name = begin[1]
        end = re.compile(rf"^<!-- /{name} -->", re.MULTILINE).search(text, begin.end())
        if end is None:
            raise DocsError(f"{page}: the block {name} does not end with <!-- /{name} -->")
        if name in found:
            raise DocsError(f"{page}: the block {name} begins twice")
        found[name] = text[begin.end() : end.start()]
    return found


def escaped(text: str) -> str:
    """With what would mean something in Markdown by chance escaped, but for `code` and **strong** words."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"(?<!\*)([*_|]|<(?=\S))(?!\*)", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def filled(text: str, made: Mapping[str, Callable[[], str]], page: str = "the page") -> str:
    """The text with its blocks filled by those that are made here; blocks of others stay.

    Raises:
        DocsError: It has none of them.
    """
    for name in _named(text, made, page):
        before, begin, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- /{name} -->")
        text = f"{before}{begin}{made[name]().rstrip()}\n{end}{after}"
    return text


def check(page: Path, names: Iterable[str]) -> None:
    """Learn before the work, and not after it, that a page is not there or has none of these blocks."""
    if not page.is_file():
        raise DocsError(f"there is no page {page}; name one that has marks to be filled in")
    _named(page.read_text(encoding="utf-8"), names, str(page))


def _named(text: str, names: Iterable[str], page: str) -> list[str]:
    known = list(names)
    here = [name for name in blocks(text, page) if name in known]
    if not here:
        wanted = next(iter(known), "block")
        raise DocsError(f"{page} has no <!-- {wanted} --> … <!-- /{wanted} --> to be filled in")
    return here


def fill(page: Path, made: Mapping[str, Callable[[], str]]) -> None:
    """Fill the blocks of a page where it stands, whole or not at all; one that is not there is made of blocks alone."""
    text = "\n".join(f"<!-- {name} -->\n<!-- /{name} -->\n" for name in made)
    if page.exists():
        text = page.read_text(encoding="utf-8")
    write_whole(page, filled(text, made, str(page)))


def wrapped(text: str, first: str = "", rest: str = "") -> str:
    """A paragraph in lines that are not too long; links and figures stay whole."""
    return textwrap.fill(
        text, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
