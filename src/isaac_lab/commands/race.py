"""`isaac-newton race`: ISAAC against the optimizers that people would pick instead, in short races."""

import enum
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from isaac_lab.commands.training import (
    Data,
    DeviceOption,
    Minutes,
    Workers,
    check_writable,
    chosen_device,
    deadline,
    goes_on,
    named_errors,
)

# torch takes seconds to import and `--help` should not: the command imports it.
if TYPE_CHECKING:
    from isaac_lab.studies.race.race import Course
    from isaac_lab.studies.race.runner import Request


class ScaleChoice(enum.StrEnum):
    """How much is run."""

    SMOKE = "smoke"
    STANDARD = "standard"


#: Besides workloads, what may be asked for.
RULES, ALL = "rules", "all"


def race(
    workload: Annotated[str, typer.Argument(metavar="WORKLOAD", help="A workload; or all; or rules.")] = ALL,
    scale: Annotated[
        ScaleChoice,
        typer.Option(help="smoke: small networks, embedded data. standard: the race by its rules, hours on a GPU."),
    ] = ScaleChoice.SMOKE,
    device: DeviceOption = None,
    workers: Workers = 1,
    data: Data = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Records and pictures: OUT/WORKLOAD/SCALE. Unless given: out/race; to draw only, results/race.",
            show_default=False,
        ),
    ] = None,
    methods: Annotated[
        str, typer.Option(help="Comma-separated methods; all unless given. Who sets the target always races.")
    ] = "",
    model: Annotated[
        str, typer.Option(help="Folder or hub name of a pre-trained encoder, for cola and mrpc; or ISAAC_ENCODER.")
    ] = "",
    times: Annotated[
        bool, typer.Option(help="--no-times leaves them to a later call, when nobody else uses the device.")
    ] = True,
    minutes: Minutes = None,
    draw_only: Annotated[bool, typer.Option("--draw-only", help="Draw again from the records in OUT; train nothing.")] = False,
    fill: Annotated[
        list[Path] | None,
        typer.Option(
            help="Then put the races into this page, where it has marks for them, such as README.md.", show_default=False
        ),
    ] = None,
) -> None:
    """Tune every method with the same number of trials, then train it with other seeds, and show where it ended."""
    started = time.perf_counter()
    console = Console()
    with console.status("Loading torch …"):
        from isaac_lab.executors import Call
        from isaac_lab.record import Store
        from isaac_lab.report import docs
        from isaac_lab.report import race as report
        from isaac_lab.studies.calls import Means
        from isaac_lab.studies.race import runner
        from isaac_lab.studies.race.race import COURSES, SCALES
        from isaac_lab.workloads import glue
    if workload == RULES:
        _rules(console, scale.value)
        return
    if workload != ALL and workload not in COURSES:
        there = f"{', '.join(COURSES)}, {ALL} and {RULES}"
        raise typer.BadParameter(f"there is no workload {workload!r}; there are {there}", param_hint="WORKLOAD")
    chosen = list(COURSES.values()) if workload == ALL else [COURSES[workload]]
    names = tuple(name.strip() for name in methods.split(",") if name.strip())
    on = chosen_device(device, needed=not draw_only)
    if model:
        # Where the processes that train look for it too.
        os.environ[glue.ENCODER] = model
    out = out or Path("results/race" if draw_only else "out/race")
    words = ["isaac-newton", "race", "WORKLOAD", "--scale", scale.value, "--device", on, "--workers", str(workers)]
    words += ["--methods", ",".join(names)] if names else []
    words += ["--model", Path(model).name] if model else []
    call = Call(device=on, folder=data, workers=workers, until=deadline(minutes), command=shlex.join(words))
    request = runner.Request(out, SCALES[scale.value], names, times, Means(call))
    try:
        with named_errors(), goes_on(console):
            runner.check_methods(names)
            for page in fill or []:
                docs.check(page, ("race", "races"))
            # A page shows all races that are committed, also where there is none of this scale.
            folders = runner.folders(chosen, request, needed=not fill) if draw_only else _raced(chosen, request, console)
            found = [report.write(Store(folder)) for folder in folders]
            for page in fill or []:
                docs.fill(page, report.blocks(out, page.parent / "figures"))
    except runner.UnknownMethodError as error:
        raise typer.BadParameter(str(error), param_hint="'--methods'") from None
    except runner.RaceError as error:
        raise typer.BadParameter(str(error), param_hint="'--out'") from None
    except docs.DocsError as error:
        raise typer.BadParameter(str(error), param_hint="'--fill'") from None
    for folder, summary in zip(folders, found, strict=True):
        _report(folder, summary, console)
    console.print(f"Done in {time.perf_counter() - started:.0f} s.", markup=False, highlight=False)


def _raced(chosen: "Sequence[Course]", request: "Request", console: Console) -> list[Path]:
    from isaac_lab.progress import display
    from isaac_lab.studies.race import runner

    check_writable(request.out)
    request.means.call.check()
    with display(console) as shown:
        means = replace(request.means, call=replace(request.means.call, progress=shown), display=shown)
        return runner.run(chosen, replace(request, means=means))


def _rules(console: Console, scale: str) -> None:
    from isaac_lab.report.race_rules import rules

    for own in rules(scale):
        console.print(own.terminal())


def _report(folder: Path, summary: Mapping[str, Any], console: Console) -> None:
    from isaac_lab.report import race as report

    console.print()
    for table in (report.brief(summary), report.compared(summary), report.clocks(summary)):
        if table.rows:
            console.print(table.terminal())
    reasons = dict.fromkeys(method["reason"] for method in summary["methods"] if not method["n"])
    for reason in reasons:
        labels = ", ".join(method["label"] for method in summary["methods"] if method["reason"] == reason)
        console.print(f"{labels} did not run: {reason}.", markup=False, highlight=False)
    console.print(" ".join(report.said(summary)), markup=False, highlight=False, style="dim")
    for place in (f"Picture: {folder}/figure.png, .svg", f"Numbers: {folder}/numbers.csv", f"Records: {folder}/trials.jsonl"):
        console.print(place, markup=False, highlight=False, soft_wrap=True)
