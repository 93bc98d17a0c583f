"""`isaac-newton scaling`: what ζ* would cost on large GPTs under FSDP2, on paper, and how well small ones agree."""

import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from isaac_lab.commands.training import check_writable
from isaac_lab.scaling import LIMIT, MACHINES, SHAPES, Machine, Workload

__all__ = ["scaling"]

RECORD = Path("results/scaling/checks.json")
GPUS = "8,64,256,1024"
LENGTH = 2048


def scaling(
    gpu: Annotated[str, typer.Option(help="h100 or h200.")] = "h100",
    sizes: Annotated[str, typer.Option(help=f"Comma-separated models: {', '.join(SHAPES)}; all unless named.")] = "",
    gpus: Annotated[str, typer.Option(help="Comma-separated numbers of GPUs.")] = GPUS,
    tokens: Annotated[int, typer.Option(help="Tokens per GPU and micro-batch.")] = 8192,
    length: Annotated[int, typer.Option(help="Tokens in a sequence.")] = LENGTH,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches per step.")] = 1,
    limit: Annotated[float, typer.Option(help="Percent that should not be passed.")] = 100 * LIMIT,
    assume: Annotated[
        list[str] | None,
        typer.Option("--set", help="An assumption, such as step=0.45 or network=25e9 (bytes per second); may be repeated."),
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Check the model on small GPTs and write the record.")] = False,
    rounds: Annotated[int, typer.Option(help="With --measure: how often timed methods take turns.")] = 15,
    record: Annotated[Path, typer.Option(help="The record of the checks.")] = RECORD,
    bench: Annotated[Path, typer.Option(help="With --measure: records of isaac-newton bench to compare with.")] = Path(
        "results/bench"
    ),
    page: Annotated[
        Path | None, typer.Option(help="Write the page as Markdown, such as docs/scaling.md.", show_default=False)
    ] = None,
) -> None:
    """What ζ* would cost on GPTs of 124M to 70B parameters under FSDP2: a model, checked on small ones."""
    console = Console()
    machine = _machine(gpu, assume or [])
    shapes = tuple(SHAPES[name] for name in _names(sizes))
    counts = _counts(gpus)
    if not 0 < limit < 1000:
        raise typer.BadParameter(f"must be a percentage above 0, got {limit}", param_hint="'--limit'")
    if rounds < 1:
        raise typer.BadParameter(f"must be at least 1, got {rounds}", param_hint="'--rounds'")
    try:
        work = Workload(gpus=counts[0], tokens=tokens, length=length, micro_batches=micro_batches)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--tokens' / '--length' / '--micro-batches'") from None
    if page is not None and not measure and not record.is_file():
        raise typer.BadParameter(
            f"there is no {str(record)!r}; isaac-newton scaling --measure makes it", param_hint="'--record'"
        )
    if page is not None and page.is_dir():
        raise typer.BadParameter(f"{str(page)!r} is a directory; name a file, such as docs/scaling.md", param_hint="'--page'")
    checked = None if page is None or measure else _read(record)
    for path, option, wanted in ((record, "--record", measure), (page, "--page", page is not None)):
        if wanted and path is not None:
            check_writable(path.parent, option=option)
    if measure:
        _measure(record, bench, rounds, console)
        if page is None:
            return
    from isaac_lab.records import write_whole
    from isaac_lab.report import scaling as report
    from isaac_lab.report import scaling_figure

    plan = report.Plan(machine, shapes, counts, work, limit / 100)
    if page is None:
        found = report.cells(plan)
        for rows in (report.naive_rows, report.chosen_rows):
            console.print(_table(*rows(found, plan.limit)))
        console.print(
            f"A model, not a measurement: {machine.name}, {tokens:,} tokens per GPU in sequences of {length:,}. Shares of the "
            "plain step's time, bytes sent and peak memory; settings below the limit are with TF32. More: docs/scaling.md.",
            highlight=False,
        )
        return
    picture = page.with_suffix("") / "overhead.svg"
    picture.parent.mkdir(parents=True, exist_ok=True)
    scaling_figure.draw(plan, picture)
    checked = checked or _read(record)
    changed = {"--gpu": (gpu, "h100"), "--sizes": (sizes, ""), "--gpus": (gpus, GPUS), "--tokens": (tokens, 8192)}
    changed |= {"--length": (length, LENGTH), "--micro-batches": (micro_batches, 1), "--limit": (limit, 100 * LIMIT)}
    options = [f"{name} {value}" for name, (value, default) in changed.items() if value != default]
    options += [f"--set {shlex.quote(one)}" for one in assume or []]
    command = " ".join(["isaac-newton scaling --page", page.as_posix(), *options])
    text = report.page(plan, checked, picture=f"{picture.parent.name}/{picture.name}", command=command)
    write_whole(page, text)
    console.print(f"Page: {page}", markup=False, highlight=False, soft_wrap=True)


def _machine(gpu: str, assumptions: Sequence[str]) -> Machine:
    if gpu.lower() not in MACHINES:
        raise typer.BadParameter(f"unknown GPU {gpu!r}; known: {', '.join(MACHINES)}", param_hint="'--gpu'")
    machine = MACHINES[gpu.lower()]
    known = {field.name: field.type for field in dataclasses.fields(Machine) if field.name not in ("name", "exact_inverses")}
    for text in assumptions:
        name, _, value = text.partition("=")
        if name not in known:
            raise typer.BadParameter(f"no assumption {name!r}; known: {', '.join(known)}", param_hint="'--set'")
        try:
            number: Any = int(value) if known[name] is int else float(value)
            machine = dataclasses.replace(machine, **{name: number})
        except ValueError as error:
            raise typer.BadParameter(f"{text!r}: {error}", param_hint="'--set'") from None
    return machine


def _read(path: Path) -> dict[str, Any]:
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict) or found.get("kind") != "scaling checks":
        message = f"{str(path)!r} is no record of isaac-newton scaling --measure"
        raise typer.BadParameter(message, param_hint="'--record'")
    return found


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in SHAPES]
    if unknown:
        raise typer.BadParameter(f"unknown model {', '.join(unknown)}; known: {', '.join(SHAPES)}", param_hint="'--sizes'")
    return [name for name in SHAPES if name in names or not names]


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        counts = ()
    if not counts or counts[0] < 2:
        raise typer.BadParameter(
            f"must be whole numbers of at least 2 with commas between, got {text!r}", param_hint="'--gpus'"
        )
    return counts


def _measure(path: Path, bench: Path, rounds: int, console: Console) -> None:
    with console.status("Loading torch …") as status:
        from isaac_lab.bench import scaling_checks
        from isaac_lab.records import write

        found = scaling_checks.record(bench, lambda what: status.update(f"Checking {what} …"), rounds=rounds)
    write(path, found)
    console.print(f"Record: {path}, {len(found['checks'])} checks.", markup=False, highlight=False, soft_wrap=True)


def _table(headings: Sequence[str], body: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for heading in headings:
        is_words = heading == "Model" or heading.endswith("setting")
        table.add_column(heading, justify="left" if is_words else "right", overflow="fold")
    for line in body:
        table.add_row(*(cell.replace("**", "") for cell in line))
    return table
