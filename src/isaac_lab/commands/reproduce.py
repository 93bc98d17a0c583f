"""`isaac-newton reproduce`: run a figure or table of the paper again, and draw it."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from isaac_lab.commands import training

# torch takes seconds to import and `--help` should not: the command imports it.
if TYPE_CHECKING:
    from isaac_lab.studies.paper.folder import View
    from isaac_lab.studies.paper.recipe import Experiment
    from isaac_lab.studies.paper.runner import Request


def reproduce(
    id: Annotated[
        str, typer.Argument(metavar="ID", help="A figure or table: fig1 … fig6, figA1 … figA3, tab1, tab2; or all; or list.")
    ],
    scale: Annotated[
        Literal["smoke", "quick", "paper"],
        typer.Option(help="smoke: digits, under a minute. quick: the paper's networks, few epochs. paper: as printed."),
    ] = "smoke",
    data: training.Data = None,
    out: Annotated[Path | None, training.out_option("Records and figures: OUT/ID/SCALE", "reproduce")] = None,
    executor: Annotated[
        Literal["local", "processes", "ensemble", "ray"] | None,
        typer.Option(help="Unless given: ensemble for grids, local for curves."),
    ] = None,
    device: training.DeviceOption = None,
    resume: Annotated[bool, typer.Option(help="Go on with what is there; --no-resume wants an empty directory.")] = True,
    panels: Annotated[str, typer.Option(help="Comma-separated panels, such as a,b; all unless given.")] = "",
    seeds: Annotated[int, typer.Option(min=0, help="Runs of each cell; 0: what the experiment needs.")] = 0,
    setting: Annotated[list[str] | None, typer.Option("--set", help="field=value for every run, such as epochs=2.")] = None,
    bench: Annotated[Path, typer.Option(help="Records of isaac-newton bench, for tab2.")] = Path("results/bench"),
    model: Annotated[str, typer.Option(help="Folder or hub name of a pre-trained encoder, for tab1.")] = "",
    workers: Annotated[int, typer.Option(min=1, help="Processes, of the executor processes, tab1 and fig6.")] = 2,
    tensor_cores: Annotated[bool, typer.Option(help="Let a GPU multiply in TF32.")] = False,
    copies: Annotated[int, typer.Option(min=1, help="The most networks of an ensemble.")] = 256,
    checkpoint_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds between checkpoints; those of a large grid are large.")
    ] = 30.0,
    minutes: training.Minutes = None,
    draw_only: training.DrawOnly = False,
) -> None:
    """Train what a figure of the paper needs, draw it, and say where everything is."""
    console = Console()
    with console.status("Loading torch …"):
        from isaac_lab.executors import Call
        from isaac_lab.report.tables import table
        from isaac_lab.studies.calls import Means
        from isaac_lab.studies.paper import EXPERIMENTS
        from isaac_lab.studies.paper.runner import Request
    if id == "list":
        rows = [[experiment.id, experiment.name, experiment.shows] for experiment in EXPERIMENTS.values()]
        console.print(table(["ID", "In the paper", "What it shows"], rows).terminal())
        return
    if id != "all" and id not in EXPERIMENTS:
        raise typer.BadParameter(f"there is no {id!r}; there are {', '.join(EXPERIMENTS)}, all and list", param_hint="ID")
    on, until = training.chosen_device(device, needed=not draw_only), training.deadline(minutes)
    call = Call(executor or "", on, data, workers, tensor_cores, copies, checkpoint_seconds, until)
    out, wanted, settings = training.place(out, "reproduce", only_read=draw_only), training.listed(panels), tuple(setting or ())
    request = Request(scale, out, resume, wanted, settings, bench, Means(call, model=model, seeds=seeds))
    left_out = []
    for experiment in EXPERIMENTS.values() if id == "all" else [EXPERIMENTS[id]]:
        try:
            _perform(experiment, request, console, draw_only=draw_only)
        except typer.BadParameter as error:
            if id != "all":
                raise
            # What one of them lacks, an encoder or a data set, is no reason to lose the others.
            training.say(console, f"{experiment.id} is left out: {error.format_message()}\n")
            left_out.append(experiment.id)
    if left_out:
        training.say(console, f"Left out: {', '.join(left_out)}; the reasons are above.")
        raise typer.Exit(2)


def _perform(experiment: "Experiment", request: "Request", console: Console, *, draw_only: bool) -> None:
    from isaac_lab.studies import StudyError
    from isaac_lab.studies.paper import runner

    means, call = request.means, request.means.call
    # How to run this again, without the places of this machine.
    options: dict[str, object] = {"--scale": request.scale, "--device": call.device, "--executor": call.executor}
    options |= {"--panels": ",".join(request.panels), "--seeds": means.seeds, "--model": Path(means.model).name}
    options |= {"--tensor-cores": call.tensor_cores, "--set": request.settings}
    command = training.command_line(["reproduce", experiment.id], options)
    call = replace(call, command=command, executor=call.executor or experiment.executor)
    work = training.Work(
        train=lambda means: runner.run(experiment, replace(request, means=means)),
        show=lambda: _show(runner.known(experiment, request), console),
        errors={StudyError: "--panels"},
    )
    training.perform(work, replace(means, call=call), console, request.out, draw_only=draw_only)
    console.print()


def _show(view: "View", console: Console) -> None:
    paper, experiment = training.report("paper"), view.experiment
    paper.write(view)
    about = [training.report("views").setting(view)] if view.outcomes else []
    training.say(console, f"\n{experiment.name}: {experiment.shows}", *about, prose=True)
    if (table := paper.table(view)) is not None:
        console.print(table.terminal())
    training.say(console, *paper.trained(view))
    numbers = {"Numbers": "numbers.csv"} if (view.directory / "numbers.csv").exists() else {}
    training.say_files(console, view.directory, Figure="figure.png, .svg", **numbers)
    training.say(console, *(f"Records: {store.path}" for store in paper.stores(view)))
