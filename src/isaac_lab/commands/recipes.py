"""`isaac-newton recipes`: public training scripts, the same with one line, and at the best of five rates."""

from dataclasses import replace
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
    Model,
    ScaleChoice,
    Work,
    Workers,
    chosen_device,
    command_line,
    how_to_train,
    listed,
    named_errors,
    out_option,
    perform,
    place,
    say,
    use_encoder,
)

__all__ = ["recipes"]


def recipes(
    scale: Annotated[
        ScaleChoice,
        typer.Option(help="smoke: seconds, small networks. quick: minutes a recipe on a CPU. standard: published settings."),
    ] = ScaleChoice.SMOKE,
    recipes: Annotated[str, typer.Option(help="Comma-separated recipes; all unless given.")] = "",
    device: DeviceOption = None,
    workers: Workers = 1,
    data: Data = None,
    out: Annotated[Path | None, out_option("Records, tables and picture: OUT/SCALE", "recipes")] = None,
    model: Model = "",
    minutes: Minutes = None,
    draw_only: DrawOnly = False,
    fill: Fill = None,
) -> None:
    """Train each recipe plain and with `isaac.attach(model)`, and say whether the line helped, did nothing or did harm."""
    console = Console()
    with console.status("Loading torch …"):
        from isaac_lab.studies.calls import Means
        from isaac_lab.studies.recipes import RecipeError, Request, chosen, run
    on, out = chosen_device(device, needed=not draw_only), place(out, "recipes", draw_only=draw_only)
    use_encoder(model)
    request = Request(out, scale.value, listed(recipes))
    with named_errors(more={RecipeError: "--recipes"}):
        chosen(request.recipes)
    options = {"--scale": scale.value, "--device": on, "--model": model and Path(model).name}

    def show() -> None:
        from isaac_lab.report import recipes as report

        store = request.store
        found = report.write(store, scale.value)
        console.print(report.brief(found).terminal())
        say(console, report.summed_up(found))
        say(
            console, f"Picture: {store.folder / 'figure.png'}", f"Tables: {store.folder / 'table.md'}", f"Records: {store.path}"
        )

    def blocks(pictures: Path) -> Blocks:
        from isaac_lab.report import recipes as report

        return report.blocks(out, pictures)

    work = Work(lambda means: run(replace(request, means=means)), show, blocks, {RecipeError: "--out"})
    means = Means(how_to_train(command_line(["recipes"], options), on, data, workers, minutes))
    perform(work, means, console, out, draw_only=draw_only, pages=fill)
