"""Formulas of the docstrings as MathML, which browsers draw themselves: no script, and no network to view a page."""

import html
import re

from latex2mathml.converter import convert

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_: object) -> str:
    """Called by mkdocs with each page."""
    return _FORMULA.sub(_formula, content)


def _formula(match: re.Match[str]) -> str:
    return convert(html.unescape(match[3]), display="inline" if match[2] == "(" else "block")
