"""`isaac-newton demo`, `rates`, `recipes`, `race`: studies that are trained, shown and put into pages in one way."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from isaac_lab.commands import training

#: Besides workloads, what may be asked for in a race.
RULES, ALL = "rules", "all"


def demo(
    subject: Annotated[
        Literal["photograph", "search"],
        typer.Argument(
            help="photograph: a small network is fitted to one. search: first choose each method's rate on another "
            "photograph, which takes minutes."
        ),
    ] = "photograph",
    seeds: Annotated[
        int, typer.Option(callback=training.at_least_one, help="Runs of each method, each with a seed of its own.")
    ] = 2,
    device: training.DeviceOption = None,
    workers: training.Workers = 1,
    data: training.Data = None,
    out: Annotated[Path, typer.Option(help="Directory for pictures and records.")] = Path("out/demo"),
    minutes: training.Minutes = None,
    fill: training.Fill = None,
) -> None:
    """Train with and without ISAAC on an embedded photograph: progress, a table, pictures."""
    console = Console()
    with console.status("Loading torch …"):
        from isaac_lab.record import Store
        from isaac_lab.studies.calls import settled
        from isaac_lab.studies.demo import METHODS, Method, arms, chosen, searched
    # Small matrices: a GPU helps only many processes.
    on = training.chosen_device(device or "cpu", needed=True)
    search, store = subject == "search", Store(out)
    words, options = ["demo", *(["search"] if search else [])], {"--seeds": seeds, "--device": on != "cpu" and on}
    said = "each method's rate is chosen on one photograph, then " if search else ""
    training.say(console, f"A small network is fitted to a photograph: {said}{len(METHODS) * seeds} runs.")

    def read(methods: Sequence[Method]) -> Any:
        return training.report("demo").read(store, methods, seeds, on)

    def show() -> None:
        report, found = training.report("demo"), read(chosen(store, seeds) if search else METHODS)
        report.write(found, out, data)
        console.print(report.table(found).terminal(), *report.what_one_sees(found), "", sep="\n", highlight=False)
        training.say(console, f"Pictures: {out / 'pictures.png'}, {out / 'curves.png'}", f"Records: {store.path}")

    timed = {method.name: method.trial(0) for method in METHODS}
    train = settled(searched(seeds) if search else arms(seeds), store, {"id": "demo"}, timed)
    means = training.means(words, options, on, data, workers, minutes)
    work = training.Work(train, show, lambda pictures: training.report("demo").blocks(lambda: read(METHODS), pictures))
    training.perform(work, means, console, out, pages=fill)


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
        for own in training.report("race").rules(scale):
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
