"""`isaac-newton demo`: train with and without ISAAC on embedded data; progress, a table, pictures."""

import enum
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from isaac_lab.commands.training import (
    Data,
    DeviceChoice,
    DeviceOption,
    Minutes,
    Workers,
    at_least_one,
    check_writable,
    chosen_device,
    deadline,
    perform,
    shown_later,
)

if TYPE_CHECKING:
    from isaac_lab.executors import Call

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
    fill: Annotated[
        Path | None,
        typer.Option(
            help="Of the photograph: then put table and pictures into this page, where it has marks.", show_default=False
        ),
    ] = None,
) -> None:
    """Train with and without ISAAC on an embedded photograph: progress, a table, pictures."""
    started = time.perf_counter()
    digits = subject is Subject.DIGITS
    if epochs and not digits:
        raise typer.BadParameter("only the digits are trained by epochs: isaac-newton demo digits", param_hint="'--epochs'")
    if fill and digits:
        raise typer.BadParameter("only the photograph has a page: isaac-newton demo --fill …", param_hint="'--fill'")
    seeds, epochs = seeds or (3 if digits else 2), epochs or EPOCHS
    out = out or Path("out/digits" if digits else "out/demo")
    check_writable(out)
    console = Console()
    with console.status("Loading torch …"):
        from isaac_lab.executors import Call
    # Small matrices: a GPU helps only many processes.
    on = chosen_device(device or DeviceChoice.CPU, needed=True)
    words = ["isaac-newton", "demo", *([] if subject is Subject.PHOTOGRAPH else [subject.value]), "--seeds", str(seeds)]
    words += ["--epochs", str(epochs)] if digits else []
    words += ["--device", on] if on != "cpu" else []
    how = "processes" if workers > 1 else "local"
    call = Call(how, on, data, workers, until=deadline(minutes), command=shlex.join(words))
    if digits:
        _digits(call, console, out, seeds, epochs)
    else:
        _photograph(call, console, out, seeds, search=subject is Subject.SEARCH)
    if fill:
        _fill(fill, out, seeds)
    said = f"Records: {out / 'trials.jsonl'}\nDone in {time.perf_counter() - started:.0f} s."
    console.print(said, markup=False, highlight=False, soft_wrap=True)


def _fill(page: Path, out: Path, seeds: int) -> None:
    from isaac_lab.report import demo as report
    from isaac_lab.report.docs import DocsError

    try:
        report.fill(page, out, seeds)
    except DocsError as error:
        raise typer.BadParameter(str(error), param_hint="'--fill'") from None


def _digits(call: "Call", console: Console, out: Path, seeds: int, epochs: int) -> None:
    from isaac_lab.charts.draw import pictures
    from isaac_lab.record import Store
    from isaac_lab.report import digits as report
    from isaac_lab.studies.digits import METHODS, arms, summarize

    console.print(f"Training the paper's 5-layer ReLU network on digits: {len(METHODS) * seeds} runs of {epochs} epochs.")
    store = Store(out)
    perform(arms(seeds, epochs), store, call, console, {"id": "digits"}, {})
    found = summarize(store, seeds, epochs)
    pictures(report.figure(found), out / "curves.png", suffixes=[".png"])
    console.print(report.table(found).terminal())
    for sentence in report.what_one_sees(found):
        console.print(sentence)
    console.print(f"\nPicture: {out / 'curves.png'}", markup=False, highlight=False, soft_wrap=True)


def _photograph(call: "Call", console: Console, out: Path, seeds: int, *, search: bool) -> None:
    from isaac_lab.record import Store
    from isaac_lab.studies.demo import METHODS, arms, chosen, searched

    runs = len(METHODS) * seeds
    said = "each method's rate is chosen on one photograph, then " if search else ""
    console.print(f"A small network is fitted to a photograph: {said}{runs} runs.", highlight=False, soft_wrap=True)
    store, timed = Store(out), {method.name: method.trial(0) for method in METHODS}
    perform(searched(seeds) if search else arms(seeds), store, call, console, {"id": "demo"}, timed)
    with shown_later(console):
        from isaac_lab.report import demo as report

        found = report.write(store, chosen(store, seeds) if search else METHODS, seeds, call.device, call.folder)
        for shown in (report.table(found).terminal(), *report.what_one_sees(found)):
            console.print(shown, highlight=False)
        names = ", ".join(str(out / f"{name}.png") for name in ("pictures", "curves"))
        console.print(f"\nPictures: {names}", markup=False, highlight=False, soft_wrap=True)
