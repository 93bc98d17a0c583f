"""`isaac-newton rates`: test accuracy over five learning rates, plain and with one line."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from isaac_lab.commands.training import (
    Blocks,
    Data,
    DeviceOption,
    DrawOnly,
    Fill,
    Minutes,
    ScaleChoice,
    Work,
    Workers,
    chosen_device,
    command_line,
    how_to_train,
    out_option,
    perform,
    place,
    say,
    settled,
)

__all__ = ["rates"]


def rates(
    scale: Annotated[
        ScaleChoice,
        typer.Option(help="smoke: seconds, a small network. quick: minutes of a CPU. standard: 8 seeds, for a GPU."),
    ] = ScaleChoice.SMOKE,
    device: DeviceOption = None,
    workers: Workers = 1,
    data: Data = None,
    out: Annotated[Path | None, out_option("Records, table and picture: OUT/SCALE", "rates")] = None,
    minutes: Minutes = None,
    draw_only: DrawOnly = False,
    fill: Fill = None,
) -> None:
    """Train a CNN on Fashion-MNIST at five learning rates, plain and with `isaac.attach(model)`."""
    console = Console()
    with console.status("Loading torch …"):
        from isaac_lab.record import Store
        from isaac_lab.studies.calls import Means
        from isaac_lab.studies.rates import arms
    on, out = chosen_device(device, needed=not draw_only), place(out, "rates", draw_only=draw_only)
    command = command_line(["rates"], {"--scale": scale.value, "--device": on})
    store, pairs = Store(out / scale.value), arms(scale.value)
    timed = {arm.finals(None)[0].method: arm.finals(None)[0] for pair in pairs.values() for arm in pair}
    every = [arm for pair in pairs.values() for arm in pair]
    turn = 0.01 if scale is ScaleChoice.SMOKE else 0.1

    def show() -> None:
        from isaac_lab.report import rates as report

        found = report.write(store, scale.value)
        console.print(report.table(found).terminal())
        say(console, report.summed_up(found), f"Picture: {store.folder / 'figure.png'}")
        say(console, f"Table: {store.folder / 'table.md'}", f"Records: {store.path}")

    def blocks(pictures: Path) -> Blocks:
        from isaac_lab.report import rates as report

        return report.blocks(out, pictures)

    work = Work(settled(every, store, {"id": "rates", "scale": scale.value}, timed, turn), show, blocks)
    means = Means(how_to_train(command, on, data, workers, minutes))
    perform(work, means, console, out, draw_only=draw_only, pages=fill)
