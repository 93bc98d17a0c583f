"""From records to the page: reads them, makes the sections, fills the template."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from isaac_lab.claims import counts, ledger
from isaac_lab.claims.evidence import Evidence
from isaac_lab.records import installed, origin
from isaac_lab.report import costs, curves, grids, headline, larger, race, render
from isaac_lab.report import ledger as claims
from isaac_lab.report.parts import Figure, Missing, Paragraph, Section, Source
from isaac_lab.report.tables import Row, Table
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
    name = _called(results)
    # First what is read at once, so that nobody waits for an error.
    races = race.summaries(results / "race", f"{name}/race")
    evidence = Evidence(results / "reproduce", results / "bench")
    raced, models = race.section(races), larger.section(results, name, evidence)
    found = ledger(evidence)
    folders = tuple(f"{name}/{part}" for part in ("race", "reproduce", "bench") if (results / part).is_dir())
    sections = [
        headline.section(evidence, races, counts(found), folders),
        raced,
        grids.section(evidence, f"{name}/reproduce"),
        curves.section(evidence, f"{name}/reproduce"),
        costs.section(evidence.benchmarks, f"{name}/bench"),
        models,
        claims.section(found, tuple(folder for folder in folders if not folder.endswith("/race"))),
    ]
    benchmarks = [Source.of([f"{name}/bench/{file}"], [record]) for file, record in evidence.benchmarks.items()]
    sections.append(_again(sections, benchmarks))
    charts = [chart for section in sections for block in section.blocks if isinstance(block, Figure) for chart in block.charts]
    data = {chart.id: {"spec": chart.spec, "values": chart.values} for chart in charts}
    return render.page(sections, data, library())


def _called(path: Path) -> str:
    """As it was named; of an absolute path the last part, because a page tells nothing of the machine it was made on."""
    return path.name if path.is_absolute() else path.as_posix()


@cache
def library() -> str:
    """Vega, Vega-Lite and Vega-Embed: one script without a network."""
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def _again(sections: Sequence[Section], more: Sequence[Source]) -> Section:
    import vl_convert

    about = origin(threads=1)
    charts = f"Vega {vl_convert.get_vega_version()}, Vega-Lite {vl_convert.get_vegalite_versions()[-1]}"
    lead = (
        "The page is made from records alone; nothing on it is typed by hand but the paper's sentences and figures, the tests "
        "and the bars."
    )
    text = (
        "`pip install 'isaac-newton[lab,report]'`, then `isaac-newton report` in a checkout. The commands that made the "
        "records stand with the figures."
    )
    made = f"This page: {versions_of(about)}, {charts}, commit {about['commit'] or 'unknown'}."
    rows: dict[str, Row] = {}
    for source in (*(source for section in sections for source in section.sources), *more):
        # Of several records at once it is not known which has which commit.
        if len(source.records) == 1 and source.times:
            each = (source.days, ", ".join(source.commits), "; ".join(source.machines), "; ".join(source.versions))
            rows[source.records[0]] = Row((source.records[0], *(cell or "–" for cell in each)))
    missing = [block for section in sections for block in section.blocks if isinstance(block, Missing)]
    blocks: list[Any] = [Paragraph(text), Paragraph(made)]
    if missing:
        blocks.append(Paragraph("Not there yet: " + "; ".join(f"{block.what} (`{block.command}`)" for block in missing) + "."))
    columns = ("Record", "Day", "Commit", "Machine", "Versions")
    blocks.append(
        Table("The records behind this page", columns, tuple(rows[name] for name in sorted(rows)), frozenset(range(5)))
    )
    return Section("again", "Make this page again", lead, tuple(blocks))
