"""The command line: `isaac-newton demo`, `bench`, `data`, `reproduce`, `claims`, `race`, `report` and more."""

import io
import sys
from typing import Annotated

try:
    import typer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}: the laboratory needs it; pip install 'isaac-newton[lab]'") from None

from isaac_lab.commands import bench, data, records, reproduce, scaling, studies

# Help in boxes cuts names of options at 80 columns; plain help does not.
app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data.app, name="data")
for command in (studies.demo, bench.bench, reproduce.reproduce, records.claims, studies.race, studies.rates, studies.recipes):
    app.command()(command)
app.command()(records.report)
app.command()(scaling.scaling)


def _version(wanted: bool) -> None:
    if wanted:
        from isaac_newton import __version__

        typer.echo(f"isaac-newton {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """ISAAC Newton: see and measure what it does to training."""


def main() -> None:
    """The console script."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that has no ± should show a question mark, not end half a minute of training with an error.
        sys.stdout.reconfigure(errors="replace")
    app(prog_name="isaac-newton")
