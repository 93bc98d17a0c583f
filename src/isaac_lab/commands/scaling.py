"""`isaac-newton scaling`: what ζ* would cost on large GPTs under FSDP2, on paper, and how well small ones agree."""

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from isaac_lab.commands.training import among, command_line, named_errors, say
from isaac_lab.scaling.overhead import LIMIT
from isaac_lab.scaling.sizes import H100, SHAPES, Machine, Workload

RECORD = Path("results/scaling/checks.json")
GPUS = "8,64,256,1024"
LENGTH = 2048


def scaling(
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
    record: Annotated[Path, typer.Option(help="The record of the checks.")] = RECORD,
    page: Annotated[Path | None, typer.Option(help="Fill the tables of a page, docs/scaling.md.")] = None,
) -> None:
    """What ζ* would cost on GPTs of 124M to 70B parameters under FSDP2: a model, checked on small ones."""
    console, machine = Console(), _machine(assume or [])
    shapes, counts = tuple(SHAPES[name] for name in among(sizes, tuple(SHAPES), "model", "--sizes")), _counts(gpus)
    if not 0 < limit < 1000:
        raise typer.BadParameter(f"must be a percentage above 0, got {limit}", param_hint="'--limit'")
    try:
        work = Workload(gpus=counts[0], tokens=tokens, length=length, micro_batches=micro_batches)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--tokens' / '--length' / '--micro-batches'") from None
    from isaac_lab.report import scaling as report

    plan = report.Plan(machine, shapes, counts, work, limit / 100)
    if page is None:
        found = report.cells(plan)
        for made in (report.automatic, report.chosen):
            console.print(made(found, plan.limit).terminal())
        console.print(
            f"A model, not a measurement: {machine.name}, {tokens:,} tokens per GPU in sequences of {length:,}. Shares of the "
            "plain step's time, bytes sent and peak memory; settings below the limit are with TF32. More: docs/scaling.md.",
            highlight=False,
        )
        return
    given = {"--sizes": (sizes, ""), "--gpus": (gpus, GPUS), "--tokens": (tokens, 8192), "--length": (length, LENGTH)}
    given |= {"--micro-batches": (micro_batches, 1), "--limit": (limit, 100 * LIMIT)}
    options = {name: value for name, (value, default) in given.items() if value != default}
    command = command_line(["scaling"], {"--page": "docs/scaling.md", **options, "--set": tuple(assume or ())})
    checked = _read(record)
    from isaac_lab.charts.draw import draw
    from isaac_lab.report import docs

    with named_errors("--page", page="--page"):
        docs.fill(page, report.blocks(plan, checked, command))
        draw(report.figure(plan), page.parent / "figures" / "scaling-overhead.svg")
    say(console, f"Page: {page}")


def _machine(assumptions: Sequence[str]) -> Machine:
    machine = H100
    known = {field.name: field.type for field in dataclasses.fields(Machine) if field.metadata}
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
    if not path.is_file():
        message = f"there is no {str(path)!r}; python tests/scaling/scaling_checks.py makes it"
        raise typer.BadParameter(message, param_hint="'--record'")
    with contextlib.suppress(ValueError):
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict) and found.get("kind") == "scaling checks":
            return found
    raise typer.BadParameter(f"{str(path)!r} is no record of scaling_checks.py", param_hint="'--record'")


def _counts(text: str) -> tuple[int, ...]:
    with contextlib.suppress(ValueError):
        counts = tuple(sorted({int(part) for part in text.split(",")}))
        if counts[0] >= 2:
            return counts
    said = f"must be whole numbers of at least 2 with commas between, got {text!r}"
    raise typer.BadParameter(said, param_hint="'--gpus'")
