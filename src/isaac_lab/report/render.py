"""The template filled: every text is escaped, data cannot end its script, and style and script come from files."""

import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from isaac_lab.report.parts import Section

ASSETS = files("isaac_lab.report") / "assets"


def page(sections: Sequence[Section], charts: Mapping[str, Any], library: str) -> str:
    """The page.

    Args:
        sections: In their order.
        charts: By the id of an element: "spec" and "values".
        library: The script that draws them.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"words": _words, "data": _data, "table": lambda table: _raw(table.html(_words))}
    return environment.get_template("page.html").render(
        sections=sections,
        charts=charts,
        style=_raw(_asset("style.css")),
        script=_raw(_asset("page.js")),
        # In a function of its own: its names are not ours.
        library=_raw(f"(function () {{{_script(library)}\n}})();"),
    )


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _raw(text: str) -> Any:
    import markupsafe

    return markupsafe.Markup(text)


def _words(text: str) -> Any:
    """Escaped, with `code`, **strong** and the indices of dampings as elements."""
    import markupsafe

    escaped = str(markupsafe.escape(text))
    escaped = re.sub(r"`([^`]+)`", r"<code>\1</code>", escaped)
    escaped = re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", escaped)
    return _raw(re.sub(r"λ_([ag])\b", r"λ<sub>\1</sub>", escaped))


def _data(value: Any) -> Any:
    """JSON that may stand inside of a script element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain)
    return _raw(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not data")


def _script(text: str) -> str:
    """In a string or a regular expression, the only places where it can stand, the backslash changes nothing."""
    return re.sub(r"</(script)", r"<\\/\1", text, flags=re.IGNORECASE).replace("<!--", "<\\!--")
