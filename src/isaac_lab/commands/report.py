"""`isaac-newton report`: one HTML page of everything the records say."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from isaac_lab.commands.claims import say_own_runs
from isaac_lab.commands.training import check_writable, named_errors, place, say


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
