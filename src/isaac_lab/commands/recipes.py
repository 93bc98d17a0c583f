"""`isaac-newton recipes`: public training scripts, the same with one line, and at the best of five rates."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from isaac_lab.commands import training


def recipes(
    scale: Annotated[
        training.Scale,
        typer.Option(help="smoke: seconds, small networks. quick: minutes a recipe on a CPU. standard: published settings."),
    ] = "smoke",
    recipes: Annotated[str, typer.Option(help="Comma-separated recipes; all unless given.")] = "",
    device: training.DeviceOption = None,
    workers: training.Workers = 1,
    data: training.Data = None,
    out: Annotated[Path | None, training.out_option("Records, tables and picture: OUT/SCALE", "recipes")] = None,
    model: training.Model = "",
    minutes: training.Minutes = None,
    draw_only: training.DrawOnly = False,
    fill: training.Fill = None,
) -> None:
    """Train each recipe plain and with `isaac.attach(model)`, and say whether the line helped, did nothing or did harm."""
    console = Console()
    with console.status("Loading torch …"):
        from isaac_lab.record import Store
        from isaac_lab.studies import StudyError
        from isaac_lab.studies.recipes import chosen, run
    on, out = training.chosen_device(device, needed=not draw_only), training.place(out, "recipes", only_read=draw_only)
    store = Store(out / scale)
    with training.named_errors(more={StudyError: "--recipes"}):
        wanted = chosen(training.listed(recipes))

    def show() -> None:
        from isaac_lab.studies.verdicts import summed_up

        report = training.report("recipes")
        found = report.write(store, scale)
        console.print(report.brief(found).terminal())
        training.say(console, summed_up(found))
        training.say_files(console, store.folder, Picture="figure.png", Tables="table.md", Records="trials.jsonl")

    work = training.Work(
        train=lambda means: run(wanted, store, scale, means),
        show=show,
        blocks=lambda pictures: training.report("recipes").blocks(out, pictures),
        errors={StudyError: "--out"},
    )
    options = {"--scale": scale, "--device": on, "--model": training.use_encoder(model)}
    means = training.means(["recipes"], options, on, data, workers, minutes)
    training.perform(work, means, console, out, draw_only=draw_only, pages=fill)
