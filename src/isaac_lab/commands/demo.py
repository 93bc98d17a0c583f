"""`isaac-newton demo`: train with and without ISAAC on embedded data; progress, a table, a picture."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from isaac_lab.commands.training import Minutes, at_least_one, check_writable, deadline, goes_on, named_errors

__all__ = ["demo"]


def demo(
    epochs: Annotated[
        int, typer.Option(callback=at_least_one, help="Passes over the training images; the settings are tuned for 15.")
    ] = 15,
    seeds: Annotated[int, typer.Option(callback=at_least_one, help="Runs of each method, each with a seed of its own.")] = 3,
    out: Annotated[Path, typer.Option(help="Directory for the picture and the records.")] = Path("out/demo"),
    minutes: Minutes = None,
) -> None:
    """Train with and without ISAAC on embedded images of digits: progress, a table, a picture."""
    started = time.perf_counter()
    check_writable(out)
    console = Console()
    with console.status("Loading torch …"):
        from isaac_lab import times
        from isaac_lab.charts.draw import pictures
        from isaac_lab.executors import Call
        from isaac_lab.progress import display
        from isaac_lab.record import Store
        from isaac_lab.report import demo as report
        from isaac_lab.studies.calls import Means, calling, trainer
        from isaac_lab.studies.demo import METHODS, arms, summarize
        from isaac_lab.study import settle
    console.print(f"Training the paper's 5-layer ReLU network on digits: {len(METHODS) * seeds} runs of {epochs} epochs.")
    store, command = Store(out), f"isaac-newton demo --epochs {epochs} --seeds {seeds}"
    # Matrices this small gain nothing from more threads than one, and the result does not depend on their number.
    with named_errors(), goes_on(console), times.threads(1), display(console) as shown, store.writing(command) as mended:
        for said in mended:
            shown.say(said)
        means = Means(Call(until=deadline(minutes), command=command, progress=shown), display=shown)
        with calling(store, means, {"id": "demo"}) as trained:
            settle(arms(seeds, epochs), store, trainer(store, means, trained, "demo"))
    found = summarize(store, seeds, epochs)
    pictures(report.figure(found), out / "curves.png", suffixes=[".png"])
    console.print(report.table(found).terminal())
    for sentence in report.what_one_sees(found):
        console.print(sentence)
    seconds = time.perf_counter() - started
    said = f"\nPicture: {out / 'curves.png'}\nRecords: {store.path}\nDone in {seconds:.0f} s."
    console.print(said, markup=False, soft_wrap=True)
