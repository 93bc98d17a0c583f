"""`isaac-newton claims` and `report`: what the records say of the paper's sentences, and one HTML page of all of them."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from isaac_lab.commands.training import check_writable, named_errors, place, say


def claims(
    records: Annotated[
        Path | None,
        typer.Option(help="Directory that isaac-newton reproduce wrote to. Unless given: results/reproduce, or out/reproduce."),
    ] = None,
    bench: Annotated[
        Path | None,
        typer.Option(help="Directory with records of isaac-newton bench. Unless given: results/bench, or out/bench."),
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="Fill the page of all figures and claims, such as docs/reproduction.md.")
    ] = None,
) -> None:
    """Check every claim of the paper on records; each verdict has the figures behind it."""
    console = Console()
    read, measured = place(records, "reproduce"), place(bench, "bench")
    for path, option, maker in ((read, "--records", "reproduce"), (measured, "--bench", "bench")):
        # Without benchmarks, what needs them lacks data; a folder that is named must be there.
        if not path.is_dir() and (bench is not None or path is read):
            raise typer.BadParameter(
                f"there is no folder {str(path)!r}; isaac-newton {maker} makes records", param_hint=f"'{option}'"
            )
    with console.status("Loading torch …"):
        from isaac_lab.claims import counts, ledger
        from isaac_lab.claims.evidence import Evidence
        from isaac_lab.report import docs, paper
        from isaac_lab.report.tables import table
    with named_errors("--records", page="--page"):
        evidence = Evidence(read, measured)
        found = ledger(evidence)
        # The sentence, below it our figures.
        rows = [
            [claim.number, str(own.verdict), f"“{claim.text}”\n{own.figures}{own.scale and f'  [{own.scale}]'}\n"]
            for claim, own in found
        ]
        console.print(table(["Claim", "Verdict", "The paper, and our records"], rows).terminal())
        counted = ", ".join(f"{count} {verdict}" for verdict, count in counts(found).items())
        console.print(f"{len(found)} claims: {counted}.", highlight=False)
        if page is not None:
            check_writable(page.parent, option="--page")
            docs.fill(page, paper.pages(found, evidence, page.parent / "figures"))
            say(console, f"Page: {page}")
    say_own_runs(console, read, "--records")


def say_own_runs(console: Console, read: Path, option: str) -> None:
    """What lies in out/, where runs go unless told otherwise, and whether it was counted."""
    own = Path("out/reproduce")
    found = sorted(f"{path.parts[-3]} ({path.parts[-2]})" for path in own.glob("*/*/trials.jsonl"))
    if not found:
        return
    text = f"Your own runs in {own}: {', '.join(found)}. "
    if own.resolve() == read.resolve():
        text += "They were read; smoke runs prove nothing and decide no claim."
    else:
        text += "They are not counted here: smoke runs prove nothing, and others count with "
        text += f"{option} {own if option == '--records' else own.parent}."
    say(console, text)


def report(
    out: Annotated[Path, typer.Option(help="The page; one file that needs no network.")] = Path("out/report.html"),
    results: Annotated[
        Path | None, typer.Option(help="Folder with records: bench, race, reproduce. Unless given: results, or out.")
    ] = None,
) -> None:
    """Make one HTML page of all records: the race, heat maps, curves, costs, claims."""
    started = time.perf_counter()
    read = place(results)
    if not read.is_dir():
        raise typer.BadParameter(
            f"there is no folder {str(read)!r}; run this in a checkout, or name the folder with bench, race and reproduce",
            param_hint="'--results'",
        )
    if out.is_dir():
        raise typer.BadParameter(
            f"{str(out)!r} is a folder; name a file, such as {str(out / 'report.html')!r}", param_hint="'--out'"
        )
    console = Console()
    with console.status("Loading torch …"):
        from isaac_lab.records import write_whole
        from isaac_lab.report.page import PageError, build, check_installed
    try:
        check_installed()
    except PageError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(code=2) from None
    check_writable(out.parent)
    with named_errors("--results"), console.status("Reading the records …"):
        text = build(read)
    with named_errors():
        write_whole(out, text)
    say_own_runs(console, read / "reproduce", "--results")
    say(console, f"Page: {out} ({out.stat().st_size / 1e6:.1f} MB, {time.perf_counter() - started:.0f} s)")
