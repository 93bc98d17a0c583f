"""`isaac-newton demo`: train with and without ISAAC on embedded data; progress, a table, pictures."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from isaac_lab.commands import training

#: Passes over the digits that their settings are tuned for.
EPOCHS = 15


def _count(help: str) -> Any:
    return typer.Option(callback=training.at_least_one, help=help)


def demo(
    subject: Annotated[
        Literal["photograph", "digits", "search"],
        typer.Argument(
            help="photograph: a small network is fitted to one. digits: a classifier. search: first choose each method's "
            "rate on another photograph, which takes minutes."
        ),
    ] = "photograph",
    seeds: Annotated[int | None, _count("Runs of each method, each with a seed of its own. Unless given: 2; digits 3.")] = None,
    epochs: Annotated[
        int | None, _count("Of the digits: passes over the images. Unless given: 15, for which the settings are tuned.")
    ] = None,
    device: training.DeviceOption = None,
    workers: training.Workers = 1,
    data: training.Data = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for pictures and records. Unless given: out/demo; digits out/digits.")
    ] = None,
    minutes: training.Minutes = None,
    fill: training.Fill = None,
) -> None:
    """Train with and without ISAAC on an embedded photograph: progress, a table, pictures."""
    digits = subject == "digits"
    if epochs and not digits:
        raise typer.BadParameter("only the digits are trained by epochs: isaac-newton demo digits", param_hint="'--epochs'")
    if fill and digits:
        raise typer.BadParameter("only the photograph has a page: isaac-newton demo --fill …", param_hint="'--fill'")
    seeds, epochs = seeds or (3 if digits else 2), epochs or EPOCHS
    out = out or Path("out/digits" if digits else "out/demo")
    console = Console()
    with console.status("Loading torch …"):
        from isaac_lab.studies.calls import Means
    # Small matrices: a GPU helps only many processes.
    on = training.chosen_device(device or "cpu", needed=True)
    words = ["demo", *([] if subject == "photograph" else [subject])]
    options = {"--seeds": seeds, "--epochs": digits and epochs, "--device": on != "cpu" and on}
    call = training.how_to_train(training.command_line(words, options), on, data, workers, minutes)
    if digits:
        work = _digits(console, out, seeds, epochs)
    else:
        work = _photograph(console, out, seeds, on, data, search=subject == "search")
    training.perform(work, Means(call), console, out, pages=fill)


def _digits(console: Console, out: Path, seeds: int, epochs: int) -> training.Work:
    from isaac_lab.record import Store
    from isaac_lab.studies.digits import METHODS, arms, summarize

    store = Store(out)
    runs = len(METHODS) * seeds
    training.say(console, f"Training the paper's 5-layer ReLU network on digits: {runs} runs of {epochs} epochs.")

    def show() -> None:
        from isaac_lab.charts.draw import pictures
        from isaac_lab.report import digits as report

        found = summarize(store, seeds, epochs)
        pictures(report.figure(found), out / "curves.png", suffixes=[".png"])
        console.print(report.table(found).terminal(), *report.what_one_sees(found), "", sep="\n")
        training.say(console, f"Picture: {out / 'curves.png'}", f"Records: {store.path}")

    return training.Work(training.settled(arms(seeds, epochs), store, {"id": "digits"}, {}), show)


def _photograph(console: Console, out: Path, seeds: int, on: str, data: Path | None, *, search: bool) -> training.Work:
    from isaac_lab.record import Store
    from isaac_lab.studies.demo import METHODS, arms, chosen, searched

    store = Store(out)
    said = "each method's rate is chosen on one photograph, then " if search else ""
    training.say(console, f"A small network is fitted to a photograph: {said}{len(METHODS) * seeds} runs.")

    def show() -> None:
        from isaac_lab.report import demo as report

        found = report.read(store, chosen(store, seeds) if search else METHODS, seeds, on)
        report.write(found, out, data)
        console.print(report.table(found).terminal(), *report.what_one_sees(found), "", sep="\n", highlight=False)
        training.say(console, f"Pictures: {out / 'pictures.png'}, {out / 'curves.png'}", f"Records: {store.path}")

    def blocks(pictures: Path) -> training.Blocks:
        from isaac_lab.report import demo as report

        return report.blocks(lambda: report.read(store, METHODS, seeds, on), pictures)

    timed = {method.name: method.trial(0) for method in METHODS}
    due = searched(seeds) if search else arms(seeds)
    return training.Work(training.settled(due, store, {"id": "demo"}, timed), show, blocks)
