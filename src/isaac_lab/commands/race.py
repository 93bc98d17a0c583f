"""`isaac-newton race`: ISAAC against the optimizers that people would pick instead, by rules fixed before the runs."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from isaac_lab.commands import training

#: Besides workloads, what may be asked for.
RULES, ALL = "rules", "all"


def race(
    workload: Annotated[str, typer.Argument(metavar="WORKLOAD", help="A workload; or all; or rules.")] = ALL,
    scale: Annotated[
        Literal["smoke", "standard"],
        typer.Option(help="smoke: small networks, embedded data. standard: the race by its rules, hours on a GPU."),
    ] = "smoke",
    device: training.DeviceOption = None,
    workers: training.Workers = 1,
    data: training.Data = None,
    out: Annotated[Path | None, training.out_option("Records and pictures: OUT/WORKLOAD/SCALE", "race")] = None,
    methods: Annotated[
        str, typer.Option(help="Comma-separated methods; all unless given. Who sets the target always races.")
    ] = "",
    model: training.Model = "",
    times: Annotated[
        bool, typer.Option(help="--no-times leaves them to a later call, when nobody else uses the device.")
    ] = True,
    minutes: training.Minutes = None,
    draw_only: training.DrawOnly = False,
    fill: training.Fill = None,
) -> None:
    """Tune every method with the same number of trials, then train it with other seeds, and show where it ended."""
    console = Console()
    with console.status("Loading torch …"):
        from isaac_lab.studies import StudyError, refuse_unknown
        from isaac_lab.studies.race import runner
        from isaac_lab.studies.race.race import COURSES, ENTRANTS, SCALES
    if workload == RULES:
        for own in training.report("race_rules").rules(scale):
            console.print(own.terminal())
        return
    if workload != ALL and workload not in COURSES:
        there = f"{', '.join(COURSES)}, {ALL} and {RULES}"
        raise typer.BadParameter(f"there is no workload {workload!r}; there are {there}", param_hint="WORKLOAD")
    chosen = list(COURSES.values()) if workload == ALL else [COURSES[workload]]
    on, out = training.chosen_device(device, needed=not draw_only), training.place(out, "race", only_read=draw_only)
    request = runner.Request(out, SCALES[scale], training.listed(methods), times)
    with training.named_errors(more={StudyError: "--methods"}):
        refuse_unknown(request.methods, ENTRANTS, "method")
    options = {"--scale": scale, "--device": on, "--workers": workers, "--methods": ",".join(request.methods)}
    options["--model"] = training.use_encoder(model)

    def show() -> None:
        # A page shows all races that are committed, also where there is none of this scale.
        for folder in runner.folders(chosen, request, needed=not fill):
            _show(folder, console)

    work = training.Work(
        train=lambda means: runner.run(chosen, replace(request, means=means)),
        show=show,
        blocks=lambda pictures: training.report("race").blocks(out, pictures),
        errors={StudyError: "--out"},
    )
    means = training.means(["race", "WORKLOAD"], options, on, data, workers, minutes)
    training.perform(work, means, console, out, draw_only=draw_only, pages=fill)


def _show(folder: Path, console: Console) -> None:
    from isaac_lab.record import Store

    report = training.report("race")
    summary = report.write(Store(folder))
    for table in (report.brief(summary), report.compared(summary), report.clocks(summary)):
        if table.rows:
            console.print(table.terminal())
    reasons = dict.fromkeys(method["reason"] for method in summary["methods"] if not method["n"])
    for reason in reasons:
        labels = ", ".join(method["label"] for method in summary["methods"] if method["reason"] == reason)
        training.say(console, f"{labels} did not run: {reason}.", prose=True)
    training.say(console, " ".join(report.said(summary)), prose=True)
    training.say_files(console, folder, Picture="figure.png, .svg", Numbers="numbers.csv", Records="trials.jsonl")
