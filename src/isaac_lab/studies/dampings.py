"""Which damping trains best, and what `suggest_damping` says: a grid over λ and learning rates.

`python -m isaac_lab.studies.dampings` trains every pair on the digits, from the same weights over the same batches, and keeps
the runs in results/damping/digits; `--data mnist` does so for the classifier on MNIST. What is there already is not trained
again. docs/damping.md has the tables. The records behind them, results/damping/*.json, have the means alone.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

import isaac_newton as isaac
from isaac_lab.executors import Call
from isaac_lab.products import threads
from isaac_lab.progress import display
from isaac_lab.record import Store
from isaac_lab.studies.calls import Means, train
from isaac_lab.study import Arm, resolve
from isaac_lab.trial import Trial, Value
from isaac_lab.workload import load

DAMPINGS = tuple(10 ** (exponent / 2) for exponent in range(-6, 5))
#: Smaller dampings shrink the gradient, so the rates of SGD reach higher than one would go without.
RATES: Mapping[str, tuple[float, ...]] = {"SGD": (10.0, 3.0, 1.0, 0.3, 0.1), "Adam": (0.003, 0.001, 0.0003)}
SUGGESTED = ("suggested λ", "suggested ρ")
#: By data set and problem, a run without a method's numbers.
PROBLEMS: Mapping[str, Mapping[str, Trial]] = {
    "digits": {
        "classifier": Trial("digits-mlp", "sgd", points=1),
        "auto-encoder": Trial("digits-autoencoder", "sgd", points=1),
        "convolutions": Trial("digits-convolutions", "sgd", points=1),
    },
    "mnist": {"classifier": Trial("mnist-mlp", "sgd", points=1)},
    "fashion-mnist": {"classifier": Trial("mnist-mlp", "sgd", (), (("data", "fashion-mnist"),), points=1)},
}


def suggested(data: str, problem: str, folder: Path | None = None) -> dict[str, float]:
    """What `suggest_damping` says of the first network and its first batch, absolute and relative."""
    workload = load(PROBLEMS[data][problem], device="cpu", folder=folder)
    x, _ = next(workload.batches(0, 1))
    found = isaac.suggest_damping(workload.model(0), x)
    return dict(zip(SUGGESTED, (found.damping, found.relative), strict=True))


def arms(data: str, problem: str, optimizer: str, own: Mapping[str, float], *, seeds: int, epochs: int) -> dict[str, Arm]:
    """By λ: every learning rate from every seed; `own` is what was suggested."""
    base = PROBLEMS[data][problem]
    base = replace(base, steps=epochs * load(base, device="cpu").steps)
    settings: dict[str, dict[str, Value]] = {str(damping): {"damping": damping} for damping in DAMPINGS}
    settings |= {str(math.inf): {}, SUGGESTED[0]: {"damping": own[SUGGESTED[0]]}}
    settings[SUGGESTED[1]] = {"damping": own[SUGGESTED[1]], "relative": True}

    def arm(key: str, given: dict[str, Value]) -> Arm:
        own = replace(base, method=optimizer.lower() + ("+isaac" if given else "")).having(**given)
        trials = [replace(own, seed=seed).having(learning_rate=rate) for rate in RATES[optimizer] for seed in range(seeds)]
        return Arm(key, lambda _: trials)

    return {key: arm(key, given) for key, given in settings.items()}


def _losses(arm: Arm, store: Store) -> dict[str, float]:
    """By learning rate, the mean over seeds of the final training loss; infinite where one diverged."""
    runs = resolve(arm, store).runs
    rates = dict.fromkeys(record.trial.learning_rate for record in runs)
    return {str(rate): fmean(own.final("train_loss") for own in runs if own.trial.learning_rate == rate) for rate in rates}


def main(
    data: Literal["digits", "mnist", "fashion-mnist"] = "digits",
    seeds: int = 2,
    epochs: int = 5,
    out: Annotated[Path, typer.Option(help="Folder of the records.")] = Path("results/damping"),
) -> None:
    """Train every pair of λ and learning rate that has no record yet, and print the best loss by damping."""
    command = f"python -m isaac_lab.studies.dampings --data {data} --seeds {seeds} --epochs {epochs}"
    store, console = Store(out / data), Console()
    given = {problem: suggested(data, problem) for problem in PROBLEMS[data]}
    pairs = list(itertools.product(given, RATES))
    every = {pair: arms(data, *pair, given[pair[0]], seeds=seeds, epochs=epochs) for pair in pairs}
    with threads(1), display(console) as shown:
        means = Means(Call(command=command, progress=shown), display=shown)
        with means.writing(store):
            stages = [(", ".join(pair), list(own.values())) for pair, own in every.items()]
            train(stages, store, means, {"id": "damping", "seeds": seeds, "epochs": epochs})
    results = []
    for (problem, optimizer), own in every.items():
        losses = {key: _losses(arm, store) for key, arm in own.items()}
        results.append({"problem": problem, "optimizer": optimizer, "suggested": given[problem], "losses": losses})
    for line in [*table({"results": results}), f"Records: {store.path}"]:
        console.print(line, markup=False, soft_wrap=True)


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
    typer.run(main)
