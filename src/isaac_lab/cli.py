"""The command line: `isaac-newton demo`, `bench`, `data`, `reproduce`, `claims`, `race`, `report` and more."""

import io
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

try:
    import typer
    from rich import box
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Table
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}: the laboratory needs it; pip install 'isaac-newton[lab]'") from None

from isaac_lab.commands import data
from isaac_lab.commands.bench import bench
from isaac_lab.commands.claims import claims
from isaac_lab.commands.race import race
from isaac_lab.commands.recipes import recipes
from isaac_lab.commands.report import report
from isaac_lab.commands.reproduce import reproduce
from isaac_lab.commands.scaling import scaling as scaling_on_paper
from isaac_lab.commands.training import check_writable

# torch takes seconds to import and `--help` should not: the commands import them.
if TYPE_CHECKING:
    from isaac_lab.demo import Measurement, Run, Summary

__all__ = ["app", "main"]

# Help in boxes cuts names of options at 80 columns; plain help does not.
app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data.app, name="data")
app.command()(bench)
app.command()(reproduce)
app.command()(claims)
app.command()(race)
app.command()(recipes)
app.command()(report)
app.command("scaling")(scaling_on_paper)


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


def _at_least_one(value: int) -> int:
    if value < 1:
        raise typer.BadParameter(f"must be at least 1, got {value}")
    return value


@app.command()
def demo(
    epochs: Annotated[
        int, typer.Option(callback=_at_least_one, help="Passes over the training images; the settings are tuned for 15.")
    ] = 15,
    seeds: Annotated[int, typer.Option(callback=_at_least_one, help="Runs of each method, each with a seed of its own.")] = 3,
    out: Annotated[Path, typer.Option(help="Directory for the picture and the records.")] = Path("out/demo"),
) -> None:
    """Train with and without ISAAC on embedded images of digits: progress, a table, a picture."""
    started = time.perf_counter()
    check_writable(out)
    console = Console()
    with console.status("Loading torch …"):
        from isaac_lab.charts.draw import pictures
        from isaac_lab.demo import records, summarize, what_one_sees
        from isaac_lab.records import write
        from isaac_lab.report import curves
    runs = _train(console, epochs=epochs, seeds=seeds)
    picture, numbers = out / "curves.png", out / "records.json"
    pictures(curves.figure(runs), picture, suffixes=[".png"])
    seconds = time.perf_counter() - started
    write(numbers, records(runs, seconds=seconds))
    console.print(_table(summarize(runs)))
    for sentence in what_one_sees(runs):
        console.print(sentence)
    console.print(f"\nPicture: {picture}\nRecords: {numbers}\nDone in {seconds:.0f} s.", markup=False, soft_wrap=True)


def _train(console: Console, *, epochs: int, seeds: int) -> list["Run"]:
    """All runs, with bars on a terminal and a line per run elsewhere."""
    from isaac_lab.data import digits
    from isaac_lab.demo import Run, one_thread, schedule, train

    data, plan = digits.load(), schedule(seeds)
    console.print(
        f"Training the paper's 5-layer ReLU network on {len(data.train_labels)} digits: {len(plan)} runs of {epochs} epochs."
    )
    live = console.is_terminal and not console.is_dumb_terminal
    runs: list[Run] = []
    with one_thread(), _progress(console, disable=not live) as progress:
        overall = progress.add_task("All runs", total=len(plan) * epochs, state="")
        current = progress.add_task("", total=epochs, state="")
        for seed, method in plan:
            label = f"{method.name}, seed {seed}"
            progress.reset(current, description=label, state="")
            measurements = []
            for measurement in train(method, data, seed=seed, epochs=epochs):
                measurements.append(measurement)
                progress.update(current, completed=measurement.epoch, state=_state(measurement))
                progress.update(overall, completed=len(runs) * epochs + measurement.epoch)
            runs.append(Run(method, seed, tuple(measurements)))
            if not live:
                console.print(f"{label}: {_state(measurements[-1])}")
    return runs


def _progress(console: Console, *, disable: bool) -> Progress:
    return Progress(
        TextColumn("{task.description:<20}"),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[state]}"),
        console=console,
        disable=disable,
    )


def _state(measurement: "Measurement") -> str:
    return f"loss {measurement.train_loss:#.2g}, accuracy {measurement.test_accuracy:.1%}"


CAPTION = (
    "Mean ± standard deviation over seeds, after the last epoch. Epochs to best plain: the first epoch at which the mean "
    "training loss is at or below the lowest that the same optimizer has without ISAAC. Seconds: training steps only, median.\n"
)


def _table(summaries: tuple["Summary", ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, caption=CAPTION, caption_justify="left")
    table.add_column("Method", no_wrap=True)
    for heading in ("Training\nloss", "Test\naccuracy", "Epochs to\nbest plain", "Seconds\nper epoch"):
        table.add_column(heading, justify="right", no_wrap=True)
    for summary in summaries:
        table.add_row(
            summary.method.name,
            _with_spread(summary.train_loss, summary.train_loss_spread, "#.2g"),
            _with_spread(summary.test_accuracy, summary.test_accuracy_spread, ".1%"),
            "never" if summary.epochs_to_plain is None else str(summary.epochs_to_plain),
            f"{summary.seconds_per_epoch:.3f}",
            style="bold" if summary.method.conditioned else "",
        )
    return table


def _with_spread(mean: float, spread: float | None, style: str) -> str:
    return format(mean, style) if spread is None else f"{mean:{style}} ± {spread:{style}}"
