"""`isaac-newton bench`: measure the time and memory of a training step, and fill the page of the records."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from isaac_lab.commands.training import Device, among, at_least_one, check_writable, chosen_device, named_errors, say

KINDS = ("table2", "scaling", "shapes", "models", "grid")


def _positive(value: float) -> float:
    if not 0 < value < math.inf:
        raise typer.BadParameter(f"must be > 0 and finite, got {value}")
    return value


def bench(
    what: Annotated[
        Literal["table2", "scaling", "shapes", "models", "grid", "all", "page"],
        typer.Argument(
            help="table2: models and methods of the paper's Table 2. scaling: ζ* by batch size and by width. shapes: attention "
            "and convolutions. models: BERT, GPT-2, ViT, ResNet-50, an MLP, as people train them. grid: all networks of a "
            "panel of Figure 1 at once. page: fill docs/benchmarks.md with records."
        ),
    ],
    device: Annotated[Device, typer.Option(help="CUDA is measured eager and, if possible, as one CUDA graph.")] = "cpu",
    threads: Annotated[int, typer.Option(callback=at_least_one, help="Threads of the CPU.")] = 1,
    rounds: Annotated[int, typer.Option(callback=at_least_one, help="How often the methods take turns.")] = 20,
    models: Annotated[
        str,
        typer.Option(
            help="Comma-separated. Of table2: 100, 400, 1600, 6400, autoencoder. Of models: bert, bert-large, gpt2, vit, "
            "resnet50, mlp-256, mlp-1024, field. All unless given."
        ),
    ] = "",
    methods: Annotated[
        str,
        typer.Option(
            help="Beside the gradient. Of table2: paper, zeta_star, zeta, kfac. Of models: auto, expand, reduce, max_rows=64, "
            "max_rows=256. All unless given."
        ),
    ] = "",
    damping: Annotated[float, typer.Option(callback=_positive, help="λ of all methods.")] = 1.0,
    memory: Annotated[bool, typer.Option(help="Of table2: measure peak memory too.")] = True,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Of models: torch.compile each model, in place of eager and captured.")
    ] = False,
    budget: Annotated[
        float, typer.Option(callback=_positive, help="Of scaling: seconds for one point; larger ones are left out.")
    ] = 60.0,
    records: Annotated[Path, typer.Option(help="Of page: directory with records.")] = Path("results/bench"),
    out: Annotated[
        Path | None, typer.Option(help="Directory for the records, or the page; unless given out/bench, or docs/benchmarks.md.")
    ] = None,
) -> None:
    """Measure the time and memory of a training step; the methods take turns in one process."""
    if what == "page":
        _page(records, out or Path("docs/benchmarks.md"))
        return
    if compiled and what != "models":
        raise typer.BadParameter("compiled steps are measured of models only", param_hint="'--compiled'")
    settings = {"threads": threads, "rounds": rounds, "damping": damping, "memory": memory, "budget": budget}
    settings["compiled"] = compiled
    _measure(KINDS if what == "all" else (what,), device, out or Path("out/bench"), models, methods, settings)


def _page(records: Path, out: Path) -> None:
    from isaac_lab.records import read
    from isaac_lab.report import benchmarks, docs

    with named_errors("--records"):
        found = read(records)
    if not found:
        message = f"no records (*.json) in {str(records)!r}; isaac-newton bench writes them"
        raise typer.BadParameter(message, param_hint="'--records'")
    check_writable(out.parent)
    with named_errors(page="--out"):
        docs.fill(out, benchmarks.blocks(found, out.parent / "figures"))
    say(Console(), f"Page: {out}, from {len(found)} record{'' if len(found) == 1 else 's'}.")


def _measure(kinds: Sequence[str], device: Device, out: Path, models: str, methods: str, settings: dict[str, Any]) -> None:
    console = Console()
    with console.status("Loading torch …"):
        from isaac_lab.bench.runs import Plan, measure, named
        from isaac_lab.report import benchmarks
    chosen_device(device, needed=True)
    known = named(kinds[0] if len(kinds) == 1 else "table2", device)
    chosen = among(models, known[0], "model", "--models", repr), among(methods, known[1], "method", "--methods", repr)
    check_writable(out)
    with console.status("Measuring …") as status:
        plan = Plan(device, *chosen, **settings, say=lambda what: status.update(f"Measuring {what} …"))
        for kind in kinds:
            # With "all" the names are Table 2's.
            every = replace(plan, models=(), methods=()) if kind == "models" and len(kinds) > 1 else plan
            for record in measure(kind, every):
                benchmarks.show(record, out, console)
