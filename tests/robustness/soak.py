"""Thousands of steps with everything that goes wrong in training: no crash, no silently wrong gradient, no growing memory.

`python tests/robustness/soak.py --steps 20000` draws small models of every layer type with random shapes, options and dampings
from 1e-6 to 1e6, and trains each for a few steps. Batches of one row, zeros, NaN and infinity, factorizations that fail,
accumulation, skipped steps, copies and resumes come at random. A sample of the gradients is compared with `dense`.
"""

import argparse
import gc
import random
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accidents import TOLERANCE, Run
from models import MODELS
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from isaac_lab.records import origin, write
from isaac_newton.math import patches as rows

__all__ = ["Report", "main", "soak"]


@dataclass
class Report:
    """What happened."""

    steps: int = 0
    seconds: float = 0.0
    models: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    checked: Counter[str] = field(default_factory=Counter)
    #: Largest error over what is allowed, by layer type; at most 1.
    worst: dict[str, float] = field(default_factory=dict)
    fallbacks: int = 0
    warnings: int = 0
    #: (step, resident MiB, tensors alive)
    memory: list[tuple[int, float, int]] = field(default_factory=list)

    @property
    def growth(self) -> tuple[float, int]:
        """MiB and tensors more at the end than after the first tenth."""
        settled = self.memory[max(len(self.memory) // 10, 1)]
        return self.memory[-1][1] - settled[1], self.memory[-1][2] - settled[2]

    def take_note(self, steps: int, checkpoints: int = 40) -> None:
        """Between two models, when nothing should be alive: what is."""
        if self.steps >= len(self.memory) * steps / checkpoints:
            self.memory.append((self.steps, _resident(), _tensors()))


def soak(steps: int, *, seed: int = 0, tick: Callable[[int], object] = lambda step: None) -> Report:
    """Run so many steps; raises at the first wrong gradient."""
    report, started = Report(), time.perf_counter()
    draw = random.Random(seed)
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        while report.steps < steps:
            run = Run(draw, report)
            try:
                for _ in range(min(draw.randint(5, 40), steps - report.steps)):
                    run.step()
                    report.steps += 1
                    tick(report.steps)
            except Exception as error:
                raise RuntimeError(f"step {report.steps} of seed {seed}: {run}") from error
            run.end()
            del run
            report.take_note(steps)
    report.seconds = time.perf_counter() - started
    return report


def plain(steps: int, *, seed: int = 0) -> Report:
    """As many steps of models as random without the library: what torch itself keeps for every new shape."""
    report, draw = Report(), random.Random(seed)
    torch.manual_seed(seed)
    while report.steps < steps:
        model, batch = MODELS[draw.choice(list(MODELS))](draw)
        for _ in range(min(draw.randint(5, 40), steps - report.steps)):
            for _ in range(draw.choice([1, 1, 1, 2, 3])):
                model(batch(1 if draw.random() < 0.15 else draw.randint(2, 40))).square().mean().backward()
            report.steps += 1
        del model, batch
        report.take_note(steps)
    return report


def _resident() -> float:
    """MiB of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * 4096 / 2**20


def _tensors() -> int:
    """So many are alive."""
    # Matrices of convolutions are kept on purpose, of the last 64 sizes: no more of them after any number of steps.
    rows._TAPS.clear()
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def main(arguments: list[str] | None = None) -> None:
    """Run, write the record, print a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/robustness/soak.json"))
    parser.add_argument("--plain", action="store_true", help="only measure the memory of as many steps without the library")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.plain:
        print(plain(options.steps, seed=options.seed).growth[0])
        return
    console = Console()
    with Progress(console=console) as progress:
        task = progress.add_task("soak", total=options.steps)
        report = soak(options.steps, seed=options.seed, tick=lambda step: progress.update(task, completed=step))
    megabytes, tensors = report.growth
    # In a process of its own, where nothing is warm either.
    command = [sys.executable, __file__, "--plain", "--steps", str(options.steps)]
    without = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    record = origin(threads=1) | {
        "kind": "soak",
        "command": f"python tests/robustness/soak.py --steps {options.steps} --seed {options.seed}",
        "seed": options.seed,
        "tolerance": {str(dtype): limits for dtype, limits in TOLERANCE.items()},
        "growth": {"MiB": megabytes, "MiB without the library": without, "tensors": tensors},
        **{name: dict(value) if isinstance(value, Counter) else value for name, value in vars(report).items()},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write(options.out, record)
    console.print(
        f"{report.steps:,} steps, {sum(report.models.values()):,} models, {sum(report.checked.values()):,} gradients compared, "
        f"{report.fallbacks:,} fallbacks; worst error {max(report.worst.values()):.2f} of what is allowed; "
        f"memory {megabytes:+.1f} MiB ({without:+.1f} without the library) and {tensors:+d} tensors. Record: {options.out}"
    )


if __name__ == "__main__":
    main()
