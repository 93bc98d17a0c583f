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
_BEGIN = r"^<!-- ([\w-]+) -->\n"
_BLOCK = re.compile(rf"{_BEGIN}(.*?)(?=^<!-- /\1 -->)", re.MULTILINE | re.DOTALL)


class DocsError(Exception):
    """A page that cannot be filled in; the message says why."""


def blocks(text: str, page: str = "the page") -> dict[str, str]:
    """What is in each block, by name, in their order.

    Raises:
        DocsError: A block does not end, or begins twice.
    """
    found, begun = dict(_BLOCK.findall(text)), re.findall(_BEGIN, text, re.MULTILINE)
    for name in begun:
        if name not in found:
            raise DocsError(f"{page}: the block {name} does not end with <!-- /{name} -->")
        if begun.count(name) > 1:
            raise DocsError(f"{page}: the block {name} begins twice")
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
    _check(text, made, page)

    def fill(found: re.Match[str]) -> str:
        return f"<!-- {found[1]} -->\n{made[found[1]]().rstrip()}\n" if found[1] in made else found[0]

    return _BLOCK.sub(fill, text)


def check(page: Path, names: Iterable[str]) -> None:
    """Learn before the work, and not after it, that a page is not there or has none of these blocks."""
    if not page.is_file():
        raise DocsError(f"there is no page {page}; name one that has marks to be filled in")
    _check(page.read_text(encoding="utf-8"), names, str(page))


def _check(text: str, names: Iterable[str], page: str) -> None:
    wanted = list(names)
    if not blocks(text, page).keys() & set(wanted):
        name = next(iter(wanted), "block")
        raise DocsError(f"{page} has no <!-- {name} --> … <!-- /{name} --> to be filled in")


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
