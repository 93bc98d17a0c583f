"""From records to the HTML page: its sections, and the template that they fill.

Every text is escaped, data cannot end its script, and style and script come from files.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from isaac_lab.claims import counts, ledger
from isaac_lab.claims.evidence import Evidence
from isaac_lab.records import installed, origin
from isaac_lab.report import WORDS, benchmarks, paper, race
from isaac_lab.report.parts import Block, Figure, Ledger, Source
from isaac_lab.studies.paper import EXPERIMENTS
from isaac_lab.words import versions_of


class PageError(RuntimeError):
    """Something that the page needs is not there; the message says what to do."""


def check_installed() -> None:
    """Raise `PageError` where the extra is missing."""
    for module, package in (("vl_convert", "vl-convert-python"), ("jinja2", "jinja2")):
        if not installed(module):
            raise PageError(f"isaac-newton report needs {package}; install it with: pip install 'isaac-newton[report]'")


def build(results: Path) -> str:
    """The whole page as HTML.

    Args:
        results: Folder with bench, race and reproduce.

    Raises:
        PageError: Where the extra is missing.
        StoreError: Where records cannot be read.
    """
    check_installed()
    import vl_convert

    # A page tells nothing of the machine it was made on.
    name = results.name if results.is_absolute() else results.as_posix()
    # First what is read at once, so that nobody waits for an error.
    races = race.summaries(results / "race", f"{name}/race")
    evidence = Evidence(results / "reproduce", results / "bench")
    found = ledger(evidence)
    folders = tuple(f"{name}/{part}" for part in ("race", "reproduce", "bench") if (results / part).is_dir())
    names = {claim.about: EXPERIMENTS[claim.about].name for claim, _ in found}
    claimed = tuple(folder for folder in folders if not folder.endswith("/race"))
    about = origin(threads=1)
    charts = f"Vega {vl_convert.get_vega_version()}, Vega-Lite {vl_convert.get_vegalite_versions()[-1]}"
    sections: dict[str, Sequence[Block]] = {
        "summary": [Source(folders, ("isaac-newton report",))],
        "race": race.section(races),
        "grids": paper.section("grids", evidence, f"{name}/reproduce"),
        "curves": paper.section("curves", evidence, f"{name}/reproduce"),
        "costs": benchmarks.section(evidence.benchmarks, f"{name}/bench"),
        "larger": paper.section("larger", evidence, f"{name}/reproduce"),
        "claims": [Ledger(found, counts(found), names), Source(claimed, ("isaac-newton claims",))],
        "again": [
            WORDS["sections"]["again"]["how"],
            f"This page: {versions_of(about)}, {charts}, commit {about['commit'] or 'unknown'}.",
        ],
    }
    return render(sections, WORDS["sections"], library())


@cache
def library() -> str:
    """Vega, Vega-Lite and Vega-Embed: one script without a network."""
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def render(sections: Mapping[str, Sequence[Block]], titled: Mapping[str, Mapping[str, str]], library: str) -> str:
    """The template filled with these sections, their titles and leads, and the script that draws their charts."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"words": _words, "data": _data, "table": lambda table: _raw(table.html(_words))}
    environment.filters["kind"] = lambda block: type(block).__name__
    figures = [block.shown for blocks in sections.values() for block in blocks if isinstance(block, Figure)]
    charts = {chart.id: {"spec": chart.spec, "values": chart.values} for figure in figures for chart in figure.charts}
    # In a string or a regular expression, the only places where it can stand, the backslash changes nothing.
    safe = re.sub(r"</(script)", r"<\\/\1", library, flags=re.IGNORECASE).replace("<!--", "<\\!--")
    return environment.get_template("page.html").render(
        sections=sections,
        titled=titled,
        charts=charts,
        style=_raw(_asset("style.css")),
        script=_raw(_asset("page.js")),
        # In a function of its own: its names are not ours.
        library=_raw(f"(function () {{{safe}\n}})();"),
    )


def _asset(name: str) -> str:
    return (files("isaac_lab.report") / "assets" / name).read_text(encoding="utf-8")


def _raw(text: str) -> Any:
    import markupsafe

    return markupsafe.Markup(text)


def _words(text: str) -> Any:
    """Escaped, with `code`, **strong** and the indices of dampings as elements."""
    escaped = str(_raw("{}").format(text))
    escaped = re.sub(r"`([^`]+)`", r"<code>\1</code>", escaped)
    escaped = re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", escaped)
    return _raw(re.sub(r"λ_([ag])\b", r"λ<sub>\1</sub>", escaped))


def _data(value: Any) -> Any:
    """JSON that may stand inside of a script element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _raw(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))
