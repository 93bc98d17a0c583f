"""`isaac-newton reproduce`: run a figure or table of the paper again, and draw it."""

import enum
import math
import shlex
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from isaac_lab.commands.training import DeviceChoice, Minutes, check_writable, chosen_device, deadline, goes_on, named_errors

# torch takes seconds to import and `--help` should not: the command imports it.
if TYPE_CHECKING:
    from isaac_lab.record import Record
    from isaac_lab.studies.paper.folder import View
    from isaac_lab.studies.paper.recipe import Experiment, Outcome
    from isaac_lab.studies.paper.runner import Request

__all__ = ["reproduce"]


class ScaleChoice(enum.StrEnum):
    """How much of the paper is run."""

    SMOKE = "smoke"
    QUICK = "quick"
    PAPER = "paper"


class ExecutorChoice(enum.StrEnum):
    """What trains."""

    LOCAL = "local"
    PROCESSES = "processes"
    ENSEMBLE = "ensemble"
    RAY = "ray"


def reproduce(
    id: Annotated[
        str, typer.Argument(metavar="ID", help="A figure or table: fig1 … fig6, figA1 … figA3, tab1, tab2; or all; or list.")
    ],
    scale: Annotated[
        ScaleChoice,
        typer.Option(help="smoke: digits, under a minute. quick: the paper's networks, few epochs. paper: as printed."),
    ] = ScaleChoice.SMOKE,
    data: Annotated[Path | None, typer.Option(help="Folder with the data sets.", show_default=False)] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Records and figures: OUT/ID/SCALE. Unless given: out/reproduce; to draw only, results/reproduce.",
            show_default=False,
        ),
    ] = None,
    executor: Annotated[
        ExecutorChoice | None, typer.Option(help="Unless given: ensemble for grids, local for curves.", show_default=False)
    ] = None,
    device: Annotated[DeviceChoice | None, typer.Option(help="Unless given: cuda if there is one.", show_default=False)] = None,
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
    minutes: Minutes = None,
    draw_only: Annotated[bool, typer.Option("--draw-only", help="Draw again from the records in OUT; train nothing.")] = False,
) -> None:
    """Train what a figure of the paper needs, draw it, and say where everything is."""
    console = Console()
    with console.status("Loading torch …"):
        from isaac_lab.executors import Call
        from isaac_lab.studies.calls import Means
        from isaac_lab.studies.paper import EXPERIMENTS
        from isaac_lab.studies.paper.runner import Request
    if id == "list":
        console.print(_list(EXPERIMENTS.values()))
        return
    if id != "all" and id not in EXPERIMENTS:
        raise typer.BadParameter(f"there is no {id!r}; there are {', '.join(EXPERIMENTS)}, all and list", param_hint="ID")
    chosen = list(EXPERIMENTS.values()) if id == "all" else [EXPERIMENTS[id]]
    out = out or Path("results/reproduce" if draw_only else "out/reproduce")
    call = Call(
        executor=executor.value if executor else "",
        device=chosen_device(device, needed=not draw_only),
        folder=data,
        workers=workers,
        tensor_cores=tensor_cores,
        copies=copies,
        seconds=checkpoint_seconds,
        until=deadline(minutes),
    )
    request = Request(
        scale=scale.value,
        out=out,
        resume=resume,
        panels=tuple(name.strip() for name in panels.split(",") if name.strip()),
        settings=tuple(setting or ()),
        bench=bench,
        means=Means(call, model=model, seeds=seeds),
    )
    if not draw_only:
        check_writable(out)
    left_out = []
    for experiment in chosen:
        try:
            _perform(experiment, request, console, draw_only=draw_only)
        except typer.BadParameter as error:
            if id != "all":
                raise
            # What one of them lacks, an encoder or a data set, is no reason to lose the others.
            console.print(f"{experiment.id} is left out: {error.format_message()}\n", markup=False, highlight=False)
            left_out.append(experiment.id)
    if left_out:
        console.print(f"Left out: {', '.join(left_out)}; the reasons are above.", markup=False, highlight=False)
        raise typer.Exit(2)


def _perform(experiment: "Experiment", request: "Request", console: Console, *, draw_only: bool) -> None:
    from isaac_lab.progress import display
    from isaac_lab.report import paper
    from isaac_lab.studies.paper import runner

    started = time.perf_counter()
    call = request.means.call
    call = replace(call, command=_command(experiment, request), executor=call.executor or experiment.executor)
    try:
        with named_errors(), goes_on(console):
            if draw_only:
                view = runner.known(experiment, request)
            else:
                call.check()
                with display(console) as shown:
                    means = replace(request.means, call=replace(call, progress=shown), display=shown)
                    view = runner.run(experiment, replace(request, means=means))
            paper.write(view)
    except runner.NothingToDrawError as error:
        raise typer.BadParameter(str(error), param_hint="'--out'") from None
    except runner.UnknownPanelError as error:
        raise typer.BadParameter(str(error), param_hint="'--panels'") from None
    _report(view, console, seconds=time.perf_counter() - started)


def _command(experiment: "Experiment", request: "Request") -> str:
    """How to run this again, without the places of this machine."""
    means, call = request.means, request.means.call
    words = ["isaac-newton", "reproduce", experiment.id, "--scale", request.scale, "--device", call.device]
    words += ["--executor", call.executor] if call.executor else []
    words += ["--panels", ",".join(request.panels)] if request.panels else []
    words += ["--seeds", str(means.seeds)] if means.seeds else []
    words += ["--model", Path(means.model).name] if means.model else []
    words += ["--tensor-cores"] if call.tensor_cores else []
    return shlex.join(words + [word for setting in request.settings for word in ("--set", setting)])


def _list(experiments: Iterable["Experiment"]) -> Table:
    from isaac_lab.report.tables import table

    rows = [[experiment.id, experiment.name, experiment.shows] for experiment in experiments]
    return table(["ID", "In the paper", "What it shows"], rows).terminal()


def _report(view: "View", console: Console, *, seconds: float) -> None:
    from isaac_lab.report import paper
    from isaac_lab.report.views import setting

    console.print(f"\n{view.experiment.name}: {view.experiment.shows}", markup=False, highlight=False)
    if view.outcomes:
        console.print(setting(view), markup=False, highlight=False)
        console.print(_table(view))
        for line in _times(view):
            console.print(line, markup=False, highlight=False)
    elif (table := paper.table(view)) is not None:
        console.print(table.terminal())
    places = [f"Figure: {view.directory / 'figure.png'}, .svg"]
    places += [f"Numbers: {path}" for path in [view.directory / "numbers.csv"] if path.exists()]
    places += [f"Records: {store.path}" for store in paper.stores(view)]
    for place in places:
        console.print(place, markup=False, highlight=False, soft_wrap=True)
    console.print(f"Done in {seconds:.0f} s.\n", markup=False, highlight=False)


def _times(view: "View") -> list[str]:
    """What the training of each panel took, over all calls."""
    lines = []
    for outcome in view.outcomes:
        calls = [c for c in view.about[outcome.panel.home].get("calls", ()) if c.get("panel") == outcome.panel.name]
        how = ", ".join(dict.fromkeys(f"{call['executor']} on {call['device']}" for call in calls if "device" in call))
        if calls:
            runs, seconds = (sum(call[key] for call in calls) for key in ("runs", "seconds"))
            lines.append(f"Panel {outcome.panel.name}: {runs} runs trained in {seconds:.1f} s ({how}).")
    return lines


def _table(view: "View") -> Table:
    """The best run of each group: where it ended, its learning rate, and how many diverged."""
    from isaac_lab.report.tables import Row
    from isaac_lab.report.tables import Table as Shown

    with_accuracy = any(r.points and r.points[-1].get("test_accuracy") is not None for o in view.outcomes for r in o.all())
    columns = ("Panel", "Group", "Rate", "λ_a", "λ_g", "Train\nloss", *(["Test\nacc."] if with_accuracy else []), "Diverged")
    rows = tuple(Row((o.panel.name, name, *_row(o, name, with_accuracy))) for o in view.outcomes for name in o.records)
    note = "The run of each group with the lowest final training loss. Rate: chosen by short runs."
    return Shown("", columns, rows, frozenset({0, 1}), note).terminal()


def _row(outcome: "Outcome", name: str, with_accuracy: bool) -> list[str]:
    from isaac_lab.studies.paper.recipe import final_loss

    records, rate = outcome.records[name], outcome.rates[name]
    if not records or rate is None:
        return ["–", "–", "–", "–", *(["–"] if with_accuracy else []), "at every rate"]
    best = min(records, key=final_loss)
    diverged = sum(not record.finished for record in records)
    loss = final_loss(best)
    cells = [f"{rate:g}", _damping(best.trial.damping), _damping(best.trial.output_damping)]
    cells.append("–" if math.isinf(loss) else f"{loss:.3g}")
    cells += [_accuracy(best)] if with_accuracy else []
    return [*cells, f"{diverged} of {len(records)}"]


def _damping(value: float) -> str:
    return "∞" if value == math.inf else f"{value:g}"


def _accuracy(record: "Record") -> str:
    accuracy = record.points[-1].get("test_accuracy") if record.points else None
    return "–" if accuracy is None else f"{accuracy:.2%}"
