"""From records to the HTML page: its sections, and the template that they fill.

Every text is escaped, data cannot end its script, and style and script come from files.
"""

import json
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from isaac_lab.claims import counts, ledger
from isaac_lab.claims.evidence import Claim, Evidence, Finding
from isaac_lab.records import installed, origin
from isaac_lab.report import WORDS, costs, headline, paper, race
from isaac_lab.report.parts import Figure, Ledger, Section, Source
from isaac_lab.studies.paper import EXPERIMENTS
from isaac_lab.words import versions_of

ASSETS = files("isaac_lab.report") / "assets"


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
    # A page tells nothing of the machine it was made on.
    name = results.name if results.is_absolute() else results.as_posix()
    # First what is read at once, so that nobody waits for an error.
    races = race.summaries(results / "race", f"{name}/race")
    evidence = Evidence(results / "reproduce", results / "bench")
    found = ledger(evidence)
    folders = tuple(f"{name}/{part}" for part in ("race", "reproduce", "bench") if (results / part).is_dir())
    grids, curves, larger = (paper.section(part, evidence, f"{name}/reproduce") for part in paper.SECTIONS)
    sections = [
        headline.section(evidence, races, counts(found), folders),
        race.section(races),
        grids,
        curves,
        costs.section(evidence.benchmarks, f"{name}/bench"),
        larger,
        _claims(found, [folder for folder in folders if not folder.endswith("/race")]),
        _again(),
    ]
    return render(sections, library())


def _claims(found: Sequence[tuple[Claim, Finding]], records: Sequence[str]) -> Section:
    names = {claim.about: EXPERIMENTS[claim.about].name for claim, _ in found}
    source = Source(tuple(records), ("isaac-newton claims",))
    return Section.of("claims", [Ledger(found, counts(found), names), source])


def _again() -> Section:
    """How to make the page again."""
    import vl_convert

    about = origin(threads=1)
    charts = f"Vega {vl_convert.get_vega_version()}, Vega-Lite {vl_convert.get_vegalite_versions()[-1]}"
    made = f"This page: {versions_of(about)}, {charts}, commit {about['commit'] or 'unknown'}."
    return Section.of("again", [WORDS["sections"]["again"]["how"], made])


@cache
def library() -> str:
    """Vega, Vega-Lite and Vega-Embed: one script without a network."""
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def render(sections: Sequence[Section], library: str) -> str:
    """The template filled with these sections and the script that draws their charts."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"words": _words, "data": _data, "table": lambda table: _raw(table.html(_words))}
    figures = [block.shown for section in sections for block in section.blocks if isinstance(block, Figure)]
    charts = {chart.id: {"spec": chart.spec, "values": chart.values} for figure in figures for chart in figure.charts}
    # In a string or a regular expression, the only places where it can stand, the backslash changes nothing.
    safe = re.sub(r"</(script)", r"<\\/\1", library, flags=re.IGNORECASE).replace("<!--", "<\\!--")
    return environment.get_template("page.html").render(
        sections=sections,
        charts=charts,
        style=_raw(_asset("style.css")),
        script=_raw(_asset("page.js")),
        # In a function of its own: its names are not ours.
        library=_raw(f"(function () {{{safe}\n}})();"),
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
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _raw(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))
