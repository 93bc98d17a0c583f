"""`isaac-newton claims`: what the paper says, sentence by sentence, and what the records say of it."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from isaac_lab.commands.reproduce import check_writable

if TYPE_CHECKING:
    from isaac_lab.claims import Claim
    from isaac_lab.evidence import Finding

__all__ = ["claims"]

STYLES = {"holds": "green", "does not hold": "bold red", "no difference shown": "yellow", "not enough data": "dim"}


def claims(
    records: Annotated[Path, typer.Option(help="Directory that isaac-newton reproduce wrote to.")] = Path("results/reproduce"),
    bench: Annotated[Path, typer.Option(help="Directory with records of isaac-newton bench.")] = Path("results/bench"),
    page: Annotated[
        Path | None,
        typer.Option(help="Fill the page of all figures and claims, such as docs/reproduction.md.", show_default=False),
    ] = None,
) -> None:
    """Check every claim of the paper on records; each verdict has the figures behind it."""
    console = Console()
    if not records.is_dir() and not bench.is_dir():
        raise typer.BadParameter(
            f"there is no {str(records)!r} and no {str(bench)!r}; isaac-newton reproduce and isaac-newton bench make records",
            param_hint="'--records'",
        )
    with console.status("Loading torch …"):
        from isaac_lab.claims import ledger
        from isaac_lab.config import ConfigError
        from isaac_lab.evidence import Evidence
        from isaac_lab.report import docs, reproduction
        from isaac_lab.store import StoreError
    try:
        evidence = Evidence(records, bench)
        found = ledger(evidence)
        console.print(_table(found))
        console.print(_counts(found), highlight=False)
        if page is not None:
            check_writable(page.parent, option="--page")
            docs.fill(page, reproduction.blocks(found, evidence, page.parent / "figures"))
            console.print(f"Page: {page}", markup=False, highlight=False, soft_wrap=True)
    except docs.DocsError as error:
        raise typer.BadParameter(str(error), param_hint="'--page'") from None
    except (StoreError, ConfigError) as error:
        raise typer.BadParameter(str(error), param_hint="'--records' / '--bench'") from None


def _table(found: Sequence[tuple["Claim", "Finding"]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_lines=False, padding=(0, 1, 1, 1))
    table.add_column("Claim", no_wrap=True)
    table.add_column("Verdict", width=9)
    table.add_column("The paper, and our records")
    for claim, finding in found:
        words = Text(f"“{claim.text}”\n")
        words.append(finding.figures, style="cyan" if finding.figures else "")
        if finding.scale:
            words.append(f"  [{finding.scale}]", style="dim")
        table.add_row(claim.number, Text(str(finding.verdict), style=STYLES[finding.verdict]), words)
    return table


def _counts(found: Sequence[tuple["Claim", "Finding"]]) -> str:
    counts = Counter(str(finding.verdict) for _, finding in found)
    return f"{len(found)} claims: " + ", ".join(f"{counts[verdict]} {verdict}" for verdict in STYLES) + "."
