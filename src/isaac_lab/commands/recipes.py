"""`isaac-newton recipes`: public training scripts, the same with one line, and at the best of five rates."""

import os
import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from isaac_lab.commands.training import (
    Data,
    DeviceOption,
    Minutes,
    ScaleChoice,
    Workers,
    check_writable,
    chosen_device,
    deadline,
    goes_on,
    named_errors,
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
    out: Annotated[
        Path | None,
        typer.Option(
            help="Records, tables and picture: OUT/SCALE. Unless given: out/recipes; to draw only, results/recipes.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="Folder or hub name of a pre-trained encoder; or ISAAC_ENCODER.")] = "",
    minutes: Minutes = None,
    draw_only: Annotated[bool, typer.Option("--draw-only", help="Tables and picture again from OUT; train nothing.")] = False,
    fill: Annotated[
        list[Path] | None,
        typer.Option(
            help="Then put the recipes into this page, where it has marks for them, such as docs/recipes-suite.md.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train each recipe plain and with `isaac.attach(model)`, and say whether the line helped, did nothing or did harm."""
    started = time.perf_counter()
    console = Console()
    with console.status("Loading torch …"):
        from isaac_lab.executors import Call
        from isaac_lab.progress import display
        from isaac_lab.report import recipes as report
        from isaac_lab.report.docs import DocsError
        from isaac_lab.studies.calls import Means
        from isaac_lab.studies.recipes import RecipeError, Request, chosen, run
        from isaac_lab.workloads import glue
    names = tuple(name.strip() for name in recipes.split(",") if name.strip())
    on = chosen_device(device, needed=not draw_only)
    if model:
        # Where the processes that train look for it too.
        os.environ[glue.ENCODER] = model
    out = out or Path("results/recipes" if draw_only else "out/recipes")
    words = ["isaac-newton", "recipes", "--scale", scale.value, "--device", on]
    words += ["--model", Path(model).name] if model else []
    how = "processes" if workers > 1 else "local"
    call = Call(how, on, data, workers, until=deadline(minutes), command=shlex.join(words))
    request = Request(out, scale.value, names)
    try:
        chosen(names)
    except RecipeError as error:
        raise typer.BadParameter(str(error), param_hint="'--recipes'") from None
    try:
        with named_errors(), goes_on(console):
            if not draw_only:
                check_writable(out)
                call.check()
                with display(console) as shown:
                    means = Means(replace(call, progress=shown), display=shown)
                    run(Request(out, scale.value, names, means))
            found = report.write(request.store, scale.value)
            for page in fill or []:
                report.fill(page, out)
    except RecipeError as error:
        raise typer.BadParameter(str(error), param_hint="'--out'") from None
    except DocsError as error:
        raise typer.BadParameter(str(error), param_hint="'--fill'") from None
    console.print(report.brief(found).terminal())
    console.print(report.summed_up(found), markup=False, highlight=False)
    folder = request.store.folder
    for name, file in {"Picture": "figure.png", "Tables": "table.md", "Records": "trials.jsonl"}.items():
        console.print(f"{name}: {folder / file}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"Done in {time.perf_counter() - started:.0f} s.", markup=False, highlight=False)
