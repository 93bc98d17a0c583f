"""`isaac-newton rates`: test accuracy over five learning rates, plain and with one line."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from isaac_lab.commands import training


def rates(
    scale: Annotated[
        training.Scale,
        typer.Option(help="smoke: seconds, a small network. quick: minutes of a CPU. standard: 8 seeds, for a GPU."),
    ] = "smoke",
    device: training.DeviceOption = None,
    workers: training.Workers = 1,
    data: training.Data = None,
    out: Annotated[Path | None, training.out_option("Records, table and picture: OUT/SCALE", "rates")] = None,
    minutes: training.Minutes = None,
    draw_only: training.DrawOnly = False,
    fill: training.Fill = None,
) -> None:
    """Train a CNN on Fashion-MNIST at five learning rates, plain and with `isaac.attach(model)`."""
    console = Console()
    with console.status("Loading torch …"):
        from isaac_lab.record import Store
        from isaac_lab.studies.calls import settled
        from isaac_lab.studies.rates import arms
    on, out = training.chosen_device(device, needed=not draw_only), training.place(out, "rates", only_read=draw_only)
    store, every = Store(out / scale), [arm for pair in arms(scale).values() for arm in pair]
    timed = {arm.finals(None)[0].method: arm.finals(None)[0] for arm in every}
    train = settled(every, store, {"id": "rates", "scale": scale}, timed, turn=0.01 if scale == "smoke" else 0.1)

    def show() -> None:
        report = training.report("rates")
        found = report.write(store, scale)
        console.print(report.table(found).terminal())
        training.say(console, report.summed_up(found), prose=True)
        training.say_files(console, store.folder, Picture="figure.png", Table="table.md", Records="trials.jsonl")

    work = training.Work(train, show, lambda pictures: training.report("rates").blocks(out, pictures))
    means = training.means(["rates"], {"--scale": scale, "--device": on}, on, data, workers, minutes)
    training.perform(work, means, console, out, draw_only=draw_only, pages=fill)
