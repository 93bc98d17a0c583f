"""`isaac-newton demo`: train with and without ISAAC on embedded data; progress, a table, pictures."""

import enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from isaac_lab.commands.training import (
    Data,
    DeviceChoice,
    DeviceOption,
    Minutes,
    Work,
    Workers,
    at_least_one,
    chosen_device,
    command_line,
    how_to_train,
    perform,
    say,
    settled,
)

__all__ = ["Subject", "demo"]


class Subject(enum.StrEnum):
    """What is shown."""

    PHOTOGRAPH = "photograph"
    DIGITS = "digits"
    SEARCH = "search"


#: Passes over the digits that their settings are tuned for.
EPOCHS = 15


def demo(
    subject: Annotated[
        Subject,
        typer.Argument(
            help="photograph: a small network is fitted to one. digits: a classifier. search: first choose each method's "
            "rate on another photograph, which takes minutes."
        ),
    ] = Subject.PHOTOGRAPH,
    seeds: Annotated[
        int | None,
        typer.Option(
            callback=at_least_one,
            help="Runs of each method, each with a seed of its own. Unless given: 2; digits 3.",
            show_default=False,
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            callback=at_least_one,
            help="Of the digits: passes over the training images. Unless given: 15, for which the settings are tuned.",
            show_default=False,
        ),
    ] = None,
    device: DeviceOption = None,
    workers: Workers = 1,
    data: Data = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory for pictures and records. Unless given: out/demo; digits out/digits.", show_default=False),
    ] = None,
    minutes: Minutes = None,
) -> None:
    """Train with and without ISAAC on an embedded photograph: progress, a table, pictures."""
    digits = subject is Subject.DIGITS
    if epochs and not digits:
        raise typer.BadParameter("only the digits are trained by epochs: isaac-newton demo digits", param_hint="'--epochs'")
    seeds, epochs = seeds or (3 if digits else 2), epochs or EPOCHS
    out = out or Path("out/digits" if digits else "out/demo")
    console = Console()
    with console.status("Loading torch …"):
        from isaac_lab.studies.calls import Means
    # Small matrices: a GPU helps only many processes.
    on = chosen_device(device or DeviceChoice.CPU, needed=True)
    words = ["demo", *([] if subject is Subject.PHOTOGRAPH else [subject.value])]
    options = {"--seeds": seeds, "--epochs": digits and epochs, "--device": on != "cpu" and on}
    means = Means(how_to_train(command_line(words, options), on, data, workers, minutes))
    if digits:
        work = _digits(console, out, seeds, epochs)
    else:
        work = _photograph(console, out, seeds, on, data, search=subject is Subject.SEARCH)
    perform(work, means, console, out)


def _digits(console: Console, out: Path, seeds: int, epochs: int) -> Work:
    from isaac_lab.record import Store
    from isaac_lab.studies.digits import METHODS, arms, summarize

    store = Store(out)
    say(console, f"Training the paper's 5-layer ReLU network on digits: {len(METHODS) * seeds} runs of {epochs} epochs.")

    def show() -> None:
        from isaac_lab.charts.draw import pictures
        from isaac_lab.report import digits as report

        found = summarize(store, seeds, epochs)
        pictures(report.figure(found), out / "curves.png", suffixes=[".png"])
        console.print(report.table(found).terminal(), *report.what_one_sees(found), "", sep="\n")
        say(console, f"Picture: {out / 'curves.png'}", f"Records: {store.path}")

    return Work(settled(arms(seeds, epochs), store, {"id": "digits"}, {}), show)


def _photograph(console: Console, out: Path, seeds: int, on: str, data: Path | None, *, search: bool) -> Work:
    from isaac_lab.record import Store
    from isaac_lab.studies.demo import METHODS, arms, searched

    store = Store(out)
    said = "each method's rate is chosen on one photograph, then " if search else ""
    say(console, f"A small network is fitted to a photograph: {said}{len(METHODS) * seeds} runs.")

    def show() -> None:
        from isaac_lab.report import demo as report

        found = report.write(store, seeds, on, data)
        console.print(report.table(found).terminal(), *report.what_one_sees(found), "", sep="\n", highlight=False)
        say(console, f"Pictures: {out / 'pictures.png'}, {out / 'curves.png'}", f"Records: {store.path}")

    timed = {method.name: method.trial(0) for method in METHODS}
    return Work(settled(searched(seeds) if search else arms(seeds), store, {"id": "demo"}, timed), show)
