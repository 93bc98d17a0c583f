"""`isaac-newton rates`: test accuracy over five learning rates, plain and with one line."""

import shlex
import time
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
    perform,
    shown_later,
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
    out: Annotated[
        Path | None,
        typer.Option(
            help="Records, table and picture: OUT/SCALE. Unless given: out/rates; to draw only, results/rates.",
            show_default=False,
        ),
    ] = None,
    minutes: Minutes = None,
    draw_only: Annotated[bool, typer.Option("--draw-only", help="Table and picture again from OUT; train nothing.")] = False,
    fill: Annotated[
        list[Path] | None,
        typer.Option(help="Then put table and picture into this page, where it has marks for them.", show_default=False),
    ] = None,
) -> None:
    """Train a CNN on Fashion-MNIST at five learning rates, plain and with `isaac.attach(model)`."""
    started = time.perf_counter()
    console = Console()
    with console.status("Loading torch …"):
        from isaac_lab.executors import Call
        from isaac_lab.record import Store
        from isaac_lab.studies.rates import arms
    on = chosen_device(device, needed=not draw_only)
    out = out or Path("results/rates" if draw_only else "out/rates")
    store = Store(out / scale.value)
    how = "processes" if workers > 1 else "local"
    words = ["isaac-newton", "rates", "--scale", scale.value, "--device", on]
    call = Call(how, on, data, workers, until=deadline(minutes), command=shlex.join(words))
    if not draw_only:
        check_writable(out)
        pairs = arms(scale.value)
        timed = {arm.finals(None)[0].method: arm.finals(None)[0] for pair in pairs.values() for arm in pair}
        turn = 0.01 if scale is ScaleChoice.SMOKE else 0.1
        about = {"id": "rates", "scale": scale.value}
        perform([arm for pair in pairs.values() for arm in pair], store, call, console, about, timed, turn)
    with shown_later(console):
        from isaac_lab.report import rates as report
        from isaac_lab.report.docs import DocsError

        try:
            found = report.write(store, scale.value)
            for page in fill or []:
                report.fill(page, out)
        except report.RatesError as error:
            raise typer.BadParameter(str(error), param_hint="'--out'") from None
        except DocsError as error:
            raise typer.BadParameter(str(error), param_hint="'--fill'") from None
        console.print(report.table(found).terminal())
        console.print(report.summed_up(found), markup=False, highlight=False)
    for name, file in {"Picture": "figure.png", "Table": "table.md", "Records": "trials.jsonl"}.items():
        console.print(f"{name}: {store.folder / file}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"Done in {time.perf_counter() - started:.0f} s.", markup=False, highlight=False)
