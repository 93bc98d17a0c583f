"""Which damping trains best, and what `suggest_damping` says: a grid over λ and learning rates.

`python -m isaac_lab.bench.dampings` trains every pair on the digits, from the same weights over the same batches, and writes
results/damping/digits.json; `--data mnist` does so for the classifier on MNIST. A record that is there already is gone on with:
only what it lacks is trained. docs/damping.md has the tables.
"""

import argparse
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F

import isaac_newton as isaac
from isaac_lab.data.sets import Dataset, load
from isaac_lab.demo import BATCH_SIZE, OPTIMIZERS, batch_orders
from isaac_lab.models import relu_layers, relu_network
from isaac_lab.records import origin, write

__all__ = ["DAMPINGS", "PROBLEMS", "RATES", "Problem", "final_loss", "main", "measure", "table"]

DAMPINGS = tuple(10 ** (exponent / 2) for exponent in range(-6, 5))
#: Smaller dampings shrink the gradient, so the rates of SGD reach higher than one would go without.
RATES: Mapping[str, tuple[float, ...]] = {"SGD": (10.0, 3.0, 1.0, 0.3, 0.1), "Adam": (0.003, 0.001, 0.0003)}
SUGGESTED = ("suggested λ", "suggested ρ")

#: By damping, then by learning rate.
Losses = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Problem:
    """A network and what it learns."""

    network: Callable[[int, int], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    targets: Callable[[Dataset], Tensor]


def _convolutions(pixels: int, classes: int) -> nn.Module:
    side = math.isqrt(pixels)
    return nn.Sequential(
        nn.Unflatten(1, (1, side, side)),
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * (side // 4) ** 2, 128), nn.ReLU(), nn.Linear(128, classes)),
    )


CLASSIFIER = Problem(relu_network, F.cross_entropy, lambda data: data.train_labels)
PROBLEMS: Mapping[str, Mapping[str, Problem]] = {
    "digits": {
        "classifier": CLASSIFIER,
        "auto-encoder": Problem(
            lambda pixels, _: relu_layers([pixels, 200, 100, 20, 100, 200, pixels]), F.mse_loss, lambda data: data.train_images
        ),
        "convolutions": Problem(_convolutions, F.cross_entropy, lambda data: data.train_labels),
    },
    "mnist": {"classifier": CLASSIFIER},
    "fashion-mnist": {"classifier": CLASSIFIER},
}


def network(problem: Problem, data: Dataset, seed: int) -> nn.Module:
    """The network that every run starts from at this seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return problem.network(data.train_images.shape[1], data.classes)


def final_loss(
    problem: Problem, data: Dataset, *, optimizer: str, rate: float, damping: float | isaac.Relative, seed: int, epochs: int
) -> float:
    """The training loss over all images after the last epoch; infinite where training diverged."""
    model, targets = network(problem, data, seed), problem.targets(data)
    isaac.attach(model, damping)
    steps = OPTIMIZERS[optimizer](model.parameters(), lr=rate)
    for batches in batch_orders(len(targets), seed=seed, epochs=epochs):
        for batch in batches:
            steps.zero_grad()
            loss = problem.loss(model(data.train_images[batch]), targets[batch])
            if not math.isfinite(loss.item()):
                return math.inf
            loss.backward()
            steps.step()
    with torch.no_grad():
        loss = problem.loss(model(data.train_images), targets)
    return loss.item() if math.isfinite(loss.item()) else math.inf


def measure(
    problem: Problem, data: Dataset, optimizer: str, *, seeds: int, epochs: int, known: Losses, console: Console, name: str
) -> dict[str, Any]:
    """The mean final loss by damping and learning rate, with the suggestion for the first network and batch."""
    suggested = isaac.suggest_damping(network(problem, data, 0), data.train_images[:BATCH_SIZE])
    dampings: dict[str, float | isaac.Relative] = {str(damping): damping for damping in (*DAMPINGS, math.inf)}
    dampings |= zip(SUGGESTED, (suggested.damping, isaac.Relative(suggested.relative)), strict=True)
    losses: Losses = {}
    for key, damping in track(dampings.items(), f"{name}, {optimizer}", console=console):
        losses[key] = known.get(key) or {
            str(rate): fmean(
                final_loss(problem, data, optimizer=optimizer, rate=rate, damping=damping, seed=seed, epochs=epochs)
                for seed in range(seeds)
            )
            for rate in RATES[optimizer]
        }
    numbers = dict(zip(SUGGESTED, (suggested.damping, suggested.relative), strict=True))
    return {"problem": name, "optimizer": optimizer, "suggested": numbers, "losses": losses}


def main(arguments: list[str] | None = None) -> None:
    """Measure, write the record after each problem, print the best loss by damping."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=PROBLEMS, default="digits")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("results/damping"), help="folder of the record")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console, path = Console(), options.out / f"{options.data}.json"
    known = _known(path, options.seeds, options.epochs)
    command = f"python -m isaac_lab.bench.dampings --data {options.data} --seeds {options.seeds} --epochs {options.epochs}"
    results: list[dict[str, Any]] = []
    record = origin(threads=1, packages=("torch", "scikit-learn"))
    record |= {"kind": "dampings", "command": command, "seeds": options.seeds, "epochs": options.epochs, "batch": BATCH_SIZE}
    options.out.mkdir(parents=True, exist_ok=True)
    data = load(options.data)
    for name, problem in PROBLEMS[options.data].items():
        for optimizer in RATES:
            own = known.get((name, optimizer), {})
            sizes = {"seeds": options.seeds, "epochs": options.epochs}
            results.append(measure(problem, data, optimizer, **sizes, known=own, console=console, name=name))
            write(path, record | {"results": results})
    for line in table({"results": results}):
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"Record: {path}", markup=False, soft_wrap=True)


def _known(path: Path, seeds: int, epochs: int) -> dict[tuple[str, str], Losses]:
    """What a record has of the grid. The suggestions are trained anew: they follow the library."""
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if (record.get("seeds"), record.get("epochs")) != (seeds, epochs):
        return {}
    return {
        (result["problem"], result["optimizer"]): {
            key: {rate: math.inf if loss is None else loss for rate, loss in rates.items()}
            for key, rates in result["losses"].items()
            if key not in SUGGESTED
        }
        for result in record["results"]
    }


def table(record: Mapping[str, Any]) -> list[str]:
    """Markdown: the mean final loss at the best learning rate, by damping."""
    results = record["results"]
    columns = [f"{result['problem']}, {result['optimizer']}" for result in results]
    lines = ["| λ | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    keys = [*map(str, DAMPINGS), str(math.inf), *SUGGESTED]
    lowest = [min(_best(result["losses"][key]) for key in keys[: len(DAMPINGS)]) for result in results]
    for key in keys:
        cells = []
        for result, least in zip(results, lowest, strict=True):
            loss = _best(result["losses"][key])
            text = f"{loss:.2g}" + (f" (at {result['suggested'][key]:.2g})" if key in SUGGESTED else "")
            cells.append(f"**{text}**" if loss == least else text)
        name = key if key in SUGGESTED else "∞ (plain)" if key == "inf" else f"{float(key):.3g}"
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _best(rates: Mapping[str, float | None]) -> float:
    return min((loss for loss in rates.values() if loss is not None), default=math.inf)


if __name__ == "__main__":
    main()
