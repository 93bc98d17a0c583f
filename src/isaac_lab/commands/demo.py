"""`isaac-newton demo`: train with and without ISAAC on embedded data; progress, a table, pictures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from isaac_lab.commands import training


def demo(
    subject: Annotated[
        Literal["photograph", "search"],
        typer.Argument(
            help="photograph: a small network is fitted to one. search: first choose each method's rate on another "
            "photograph, which takes minutes."
        ),
    ] = "photograph",
    seeds: Annotated[
        int, typer.Option(callback=training.at_least_one, help="Runs of each method, each with a seed of its own.")
    ] = 2,
    device: training.DeviceOption = None,
    workers: training.Workers = 1,
    data: training.Data = None,
    out: Annotated[Path, typer.Option(help="Directory for pictures and records.")] = Path("out/demo"),
    minutes: training.Minutes = None,
    fill: training.Fill = None,
) -> None:
    """Train with and without ISAAC on an embedded photograph: progress, a table, pictures."""
    console = Console()
    with console.status("Loading torch …"):
        from isaac_lab.record import Store
        from isaac_lab.studies.calls import settled
        from isaac_lab.studies.demo import METHODS, Method, arms, chosen, searched
    # Small matrices: a GPU helps only many processes.
    on = training.chosen_device(device or "cpu", needed=True)
    search, store = subject == "search", Store(out)
    words, options = ["demo", *(["search"] if search else [])], {"--seeds": seeds, "--device": on != "cpu" and on}
    said = "each method's rate is chosen on one photograph, then " if search else ""
    training.say(console, f"A small network is fitted to a photograph: {said}{len(METHODS) * seeds} runs.")

    def read(methods: Sequence[Method]) -> Any:
        return training.report("demo").read(store, methods, seeds, on)

    def show() -> None:
        report, found = training.report("demo"), read(chosen(store, seeds) if search else METHODS)
        report.write(found, out, data)
        console.print(report.table(found).terminal(), *report.what_one_sees(found), "", sep="\n", highlight=False)
        training.say(console, f"Pictures: {out / 'pictures.png'}, {out / 'curves.png'}", f"Records: {store.path}")

    timed = {method.name: method.trial(0) for method in METHODS}
    train = settled(searched(seeds) if search else arms(seeds), store, {"id": "demo"}, timed)
    means = training.means(words, options, on, data, workers, minutes)
    work = training.Work(train, show, lambda pictures: training.report("demo").blocks(lambda: read(METHODS), pictures))
    training.perform(work, means, console, out, pages=fill)
