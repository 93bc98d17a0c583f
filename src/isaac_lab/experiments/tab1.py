"""Table 1: an encoder fine-tuned on CoLA, MRPC and STS-B, by the gradient and by ζ*, first grids of settings and then seeds.

The encoder is whatever `--model` names. A grid has equally many settings for each method: the gradient so many learning rates,
ζ* so many pairs of a learning rate and a damping. Each is a full training run at seed 0, and the one with the best dev scores
at its end is run again at other seeds. Where a grid was changed, the notes count its earlier runs too. GLUE's test labels are
not public, so the scores are those of settings that were chosen on dev; the paper speaks of a grid search and does not say on
what.
"""

import contextlib
import csv
import json
import os
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from isaac_lab.data import text
from isaac_lab.experiments import finetuning
from isaac_lab.experiments.finetuning import (
    COLUMNS,
    METHODS,
    PAPER,
    PAPER_RUNS,
    STAGES,
    TASKS,
    TUNING_SEED,
    Run,
    Task,
    ended,
    grid,
    over_seeds,
    score,
)
from isaac_lab.experiments.folder import View, read_json
from isaac_lab.experiments.recipe import Experiment
from isaac_lab.progress import Update
from isaac_lab.records import origin, write
from isaac_lab.report.figures import scores
from isaac_lab.significance import against
from isaac_lab.store import StoreError
from isaac_lab.trials import pool, times
from isaac_lab.trials.store import Store
from isaac_lab.trials.trial import Trial
from isaac_lab.trials.workload import make
from isaac_lab.trials.workloads import glue

__all__ = ["EXPERIMENT", "summary"]


def measure(view: View) -> None:
    """Time the steps, then train what is missing."""
    with _encoder(view) as encoder, _threads(view):
        run = _run(view, encoder)
        known = _about(view)
        for name, value in (("model", run.model), ("weights", run.weights), ("steps", dict(run.steps))):
            if known and known[name] != value:
                raise StoreError(f"{view.directory} was made with {name} {known[name]}, this is {value}; name another --out")
        view.means.say(_plan(run))
        store = Store(view.directory / "records")
        started, trained = time.perf_counter(), 0
        calls = known["calls"] if known else []
        call = {"command": _command(view, run), "workers": _workers(view), "device": view.device}
        call |= origin(threads=torch.get_num_threads(), packages=("torch", "transformers"), device=view.device)
        # Before the first record: who draws after a kill must know what was asked for.
        _note(view, run, [*calls, call])
        timed = _time(view, run)
        for stage in STAGES:
            for part in (grid, lambda run, task, method: over_seeds(run, task, method, store)):
                trials = [trial for task in stage for method in task.methods for trial in part(run, task, method)]
                trained += _train(view, run, store, trials)
        call |= {"seconds": time.perf_counter() - started, "runs": trained}
        _note(view, run, [*calls, call] if trained or timed or not calls else calls)


@contextlib.contextmanager
def _encoder(view: View) -> Iterator[glue.Encoder]:
    """The encoder of this scale; processes that are started in the block find it too."""
    if view.scale.small:
        if view.means.model:
            view.means.say(f"--model is not used at smoke scale, which trains a {glue.TINY} on toy tasks.")
        yield glue.tiny()
        return
    before = os.environ.get(glue.ENCODER)
    source = view.means.model or before
    if not source:
        raise glue.EncoderError(
            f"Table 1 at scale {view.scale.name} needs a pre-trained encoder: name a folder of one, or its name on the Hugging "
            f"Face hub, with --model or {glue.ENCODER}"
        )
    found = glue.encoder(source)
    os.environ[glue.ENCODER] = source
    try:
        yield found
    finally:
        if before is None:
            del os.environ[glue.ENCODER]
        else:
            os.environ[glue.ENCODER] = before


@contextlib.contextmanager
def _threads(view: View) -> Iterator[None]:
    """One for toy tasks: two would wait for each other longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if view.scale.small else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _run(view: View, encoder: glue.Encoder) -> Run:
    plan, small = finetuning.PLANS[view.scale.name], view.scale.small
    batch = glue.Glue.batch
    examples = {task.name: len(text.load(f"toy-{task.name}" if small else task.name, view.means.data).train) for task in TASKS}
    steps = {name: plan.epochs * -(-count // batch) for name, count in examples.items()}
    return Run(encoder.name, encoder.weights, view.means.seeds or plan.seeds, steps, view.scale.name)


def _plan(run: Run) -> str:
    """How many runs and steps there will be."""
    lines, total = [], 0
    for task in TASKS:
        tried = sum(len(grid(run, task, method)) for method in task.methods)
        runs = tried + (len(task.methods) * run.seeds if task.shown else 0)
        total += runs * run.steps[task.name]
        lines.append(f"{task.title} {runs} runs of {run.steps[task.name]:,} steps, {tried} of them to choose settings")
    return f"Table 1 with {run.model}, {total:,} training steps in all: {'; '.join(lines)}."


def _command(view: View, run: Run) -> str:
    """How this was called, with the encoder's name in place of its folder's."""
    given, known = (shlex.quote(name) for name in (Path(view.means.model).name, run.model))
    return view.means.command.replace(f"--model {given}", f"--model {known}")


def _workers(view: View) -> int:
    # Another process takes longer to start than a toy task to train.
    return 1 if view.scale.small else view.means.workers


def _train(view: View, run: Run, store: Store, trials: Sequence[Trial]) -> int:
    """Train what has no record; returns how many these were."""
    for trial in trials:
        known = store.get(trial)
        if known is not None and known["weights"] != run.weights:
            raise StoreError(f"{store.folder} has runs with other weights of {run.model}; name another --out")
    done = 0

    def tick(record: dict[str, Any], total: int) -> None:
        nonlocal done
        done += 1
        last = record["points"][-1]
        metrics = next(task.metrics for task in TASKS if task.name == record["trial"]["workload"])
        shown = ", ".join(f"{heading} {last[name]:.4f}" for name, heading in metrics.items())
        ended = shown if record["status"] == "finished" else record["status"]
        view.means.say(f"{done} of {total}: {Trial.from_mapping(record['trial']).title}: {ended}")
        rate = record["seconds_per_step"]
        update = Update(
            name=f"tab1 {trials[0].workload} {trials[0].seed}",
            title=f"Table 1, {trials[0].workload}",
            epoch=done,
            epochs=total,
            train_loss=last["train_loss"],
            test_accuracy=last.get("accuracy"),
            steps_per_second=1 / rate if rate else None,
            remaining=None,
            ended=done == total,
        )
        view.means.progress(update)

    pool.run(trials, store, device=view.device, folder=view.means.data, workers=_workers(view), tick=tick)
    return done


def _time(view: View, run: Run) -> bool:
    """The time of a step: on real batches of CoLA, and captured on batches of one shape; returns whether any was measured."""
    wanted = {"eager": "cola", **({"captured": "cola-64"} if view.device == "cuda" else {})}
    missing = {mode: name for mode, name in wanted.items() if not _times(view, mode).exists()}
    for mode, name in missing.items():
        view.means.say(f"Time of a step, {mode}, {name}")
        workload = make(name, small=view.scale.small, device=view.device, folder=view.means.data)
        trials = {
            method: Trial(
                name,
                "adam",
                METHODS[method].conditioning,
                learning_rate=1e-5,
                damping=0.0 if method == "gradient" else 1.0,
                small=view.scale.small,
                model=run.model,
            )
            for method in METHODS
        }
        record = times.measure(trials, workload, device=view.device, captured=mode == "captured", rounds=run.plan.rounds)
        write(_times(view, mode), record | {"workload": workload.title, "weights": run.weights})
    return bool(missing)


def _times(view: View, mode: str) -> Path:
    return view.directory / f"times-{mode}.json"


def _about(view: View) -> dict[str, Any] | None:
    path = view.directory / "run.json"
    if not path.exists():
        return None
    known = read_json(path)
    if known.get("kind") != "tab1":
        raise StoreError(f"{path} is not of Table 1; name another --out")
    return known


def _note(view: View, run: Run, calls: Sequence[Mapping[str, Any]]) -> None:
    temporary = view.directory / "run.json.part"
    about = {"kind": "tab1", "model": run.model, "weights": run.weights, "seeds": run.seeds, "steps": dict(run.steps)}
    write(temporary, about | {"scale": run.scale, "calls": list(calls)})
    temporary.replace(view.directory / "run.json")


def _found(view: View) -> tuple[Run, Mapping[str, Any]]:
    """What was run, and how it was called last."""
    known = _about(view)
    if known is None:
        raise StoreError(
            f"there is nothing of Table 1 in {view.directory}; isaac-newton reproduce tab1 --scale {view.scale.name} trains it"
        )
    return Run(**{name: known[name] for name in ("model", "weights", "seeds", "steps", "scale")}), known["calls"][-1]


def summary(view: View) -> dict[str, Any]:
    """The table with all that is needed to read it."""
    run, call = _found(view)
    store = Store(view.directory / "records")
    shown = [task for task in TASKS if task.shown]
    rows = [
        {
            "label": METHODS[method].label,
            "model": run.model,
            "method": method,
            "ours": method != "gradient",
            "cells": [cell for task in shown for cell in _cells(run, task, method, store)],
        }
        for method in METHODS
    ]
    published: list[dict[str, Any]] = [
        {
            "label": f"{label}, {model} (paper)",
            "model": f"{model} (paper)",
            "method": None,
            "ours": False,
            "paper": True,
            "cells": [cell and _published(*cell) for cell in cells],
        }
        for (label, model), cells in PAPER.items()
    ]
    columns, what = COLUMNS, "CoLA, MRPC and STS-B"
    if run.scale == "smoke":
        columns, what, published = [_toy(column) for column in COLUMNS], "toy tasks", []
    ratios = {mode: _ratios(_times(view, mode)) for mode in ("eager", "captured") if _times(view, mode).exists()}
    return {
        "kind": "tab1",
        "title": f"Table 1: {run.model} fine-tuned on {what}",
        "scale": run.scale,
        **{name: call[name] for name in ("command", "time", "commit", "versions", "machine")},
        "model": run.model,
        "weights": run.weights,
        "columns": columns,
        "rows": [*rows, *published],
        "times": ratios,
        "tried": _tried(run, store),
        "notes": [*_notes(run, call["device"], ratios, _spent(store)), *against(rows, columns)],
    }


def _toy(column: str) -> str:
    """No score on generated sentences is called one on GLUE."""
    task = next(task for task in TASKS if column in task.columns)
    return column.replace(task.title, f"toy-{task.name}")


def _cells(run: Run, task: Task, method: str, store: Store) -> list[dict[str, Any] | None]:
    trials = over_seeds(run, task, method, store)
    records = [record for trial in trials if (record := store.get(trial)) is not None]
    if not records:
        return [None] * len(task.metrics)
    finished = [record for record in records if ended(record, task)]
    lost = len(records) - len(finished)
    scores = {metric: [float(record["points"][-1][metric]) for record in finished] for metric in task.metrics}
    return [
        {
            "mean": fmean(values) if values else None,
            "std": stdev(values) if len(values) > 1 else None,
            "n": len(values),
            "diverged": lost,
            "settings": _settings(trials[0]) + (f", {lost} diverged" if lost else ""),
            "values": values,
        }
        for values in scores.values()
    ]


def _settings(trial: Trial) -> str:
    damping = f", λ {trial.damping:g}" if trial.damping else ""
    return f"{'Adam' if trial.optimizer == 'adam' else 'SGD with momentum'}, η {trial.learning_rate:g}{damping}"


def _published(mean: float, std: float) -> dict[str, Any]:
    return {"mean": mean / 100, "std": std / 100, "n": PAPER_RUNS, "settings": "as printed in the paper"}


def _ratios(path: Path) -> dict[str, Any]:
    record = read_json(path)
    entries = {entry["name"]: entry["ratio"] | {"seconds": entry["seconds_per_step"]["median"]} for entry in record["methods"]}
    return {"workload": record["workload"], "methods": entries, "left_out": record["left_out"]}


def _tried(run: Run, store: Store) -> list[dict[str, Any]]:
    """By task and method: what each setting of its grid reached at the tuning seed."""
    found = []
    for task in TASKS:
        for method in task.methods:
            trials = grid(run, task, method)
            settings = [_reached(record, task) for trial in trials if (record := store.get(trial)) is not None]
            of = {"task": task.title, "optimizer": task.optimizer, "method": method}
            found.append({**of, "settings": settings, "missing": len(trials) - len(settings)})
    return found


def _reached(record: Mapping[str, Any], task: Task) -> dict[str, Any]:
    finished, trial = ended(record, task), record["trial"]
    kept = {name: trial[name] for name in ("learning_rate", "damping")}
    return kept | {"status": record["status"], "score": score(record, task) if finished else None}


def _spent(store: Store) -> str:
    """How many settings each method has tried at the tuning seed, in grids that were changed later too."""
    trials = [json.loads(path.read_text(encoding="utf-8"))["trial"] for path in sorted(store.folder.glob("*.json"))]
    tuned = Counter((t["workload"], t["optimizer"], t["conditioning"]) for t in trials if t["seed"] == TUNING_SEED)
    parts, equal = [], True
    for task in TASKS:
        counts = {name: tuned[task.name, task.optimizer, METHODS[name].conditioning] for name in task.methods}
        equal &= len(set(counts.values())) == 1
        parts.append(f"{task.title} " + ", ".join(f"{METHODS[name].label} {count}" for name, count in counts.items()))
    uneven = " The numbers differ: the grid of ζ* was changed, and run again, after its first had not been ahead of ∇."
    return f"Settings tried at seed {TUNING_SEED}, each a full run: {'; '.join(parts)}.{'' if equal else uneven}"


def _notes(run: Run, device: str, ratios: Mapping[str, Any], spent: str) -> list[str]:
    plan = run.plan
    adam, momentum = (", ".join(f"{rate:g}" for rate in plan.rates[name]) for name in ("adam", "momentum"))
    own, own_momentum = (", ".join(f"{rate:g}" for rate in plan.conditioned[name]) for name in ("adam", "momentum"))
    dampings = ", ".join(f"{damping:g}" for damping in plan.dampings)
    notes = [
        f"Mean and standard deviation over {run.seeds} seeds on dev; {plan.epochs} epochs, batch 8, warm-up over a tenth of "
        "the steps, then linear decay to 0. Adam for CoLA and MRPC, SGD with momentum 0.9 for STS-B.",
        spent,
        f"The last grid decided, by the best dev scores. ∇: η of {adam} (SGD: {momentum}). ζ*: η of {own} (SGD: "
        f"{own_momentum}), each with λ of {dampings}.",
        f"Seed {TUNING_SEED} is not among those of the table. The scores are on dev too, because GLUE's test labels are not "
        "public. The paper does not say on what its grid search chose.",
        "ζ*: each token is a row of the conditioner. ζ* reduce: the mean of a sentence's tokens is. Padding is left out of "
        "both. All linear layers and embeddings are conditioned.",
    ]
    if device == "cuda":
        notes.append("Trained on a GPU in bf16 (autocast), the weights in float32.")
    for mode, timed in ratios.items():
        shown = ", ".join(
            f"{METHODS[name].label} {ratio['median']:.3f} × ({ratio['low']:.3f} to {ratio['high']:.3f})"
            for name, ratio in timed["methods"].items()
            if name != "gradient"
        )
        batches = "padded as in training" if mode == "eager" else "without padding, the step as one CUDA graph"
        notes.append(f"Time of a step over that of ∇ with Adam, {mode} ({timed['workload']}, {batches}; quartiles): {shown}.")
    if run.model == glue.TINY:
        return ["A smoke test: random weights and generated sentences say nothing about ζ*.", *notes]
    other = "The paper's rows are of BERT-Base and BERT-Mini: compare the difference between the methods, not the scores."
    return [f"The encoder is {run.model}. {other}", *notes]


def write_all(view: View) -> None:
    """Numbers.csv and summary.json."""
    found = summary(view)
    write(view.directory / "summary.json", found)
    run, _ = _found(view)
    store = Store(view.directory / "records")
    metrics = list(dict.fromkeys(metric for task in TASKS for metric in task.metrics))
    columns = ["stage", "task", "optimizer", "method", "learning_rate", "damping", "seed", "status", "train_loss", "dev_loss"]
    with (view.directory / "numbers.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow([*columns, *metrics])
        for task, method in [(each, method) for each in TASKS for method in each.methods]:
            for stage, trials in (("grid", grid(run, task, method)), ("seeds", over_seeds(run, task, method, store))):
                for trial in trials:
                    if (record := store.get(trial)) is not None:
                        numbers = [trial.learning_rate, trial.damping, trial.seed, record["status"]]
                        last = record["points"][-1]
                        losses = [_rounded(last["train_loss"]), _rounded(last["test_loss"])]
                        scores = [_rounded(last.get(metric)) for metric in metrics]
                        table.writerow([stage, task.name, task.optimizer, method, *numbers, *losses, *scores])


def _rounded(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def table(view: View) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """The paper's table, in percent, with the time of a step over that of the gradient."""
    found = summary(view)
    modes = list(found["times"])
    headings = ["Method", *(column.replace(" (", "\n(") for column in found["columns"]), *(f"Step,\n{mode}" for mode in modes)]
    rows: list[list[str]] = []
    for model, group in groupby(found["rows"], key=lambda row: str(row["model"])):
        rows.append([model, *[""] * (len(headings) - 1)])
        for row in group:
            label = f"  {row['label'].partition(',')[0]}"
            rows.append([label, *map(_shown, row["cells"]), *(_ratio(found, mode, row["method"]) for mode in modes)])
    return headings, rows


def _shown(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "–"
    if cell["mean"] is None:
        return "diverged"
    spread = f" ± {100 * cell['std']:.2f}" if cell["std"] is not None else ""
    diverged = f" ({cell['diverged']} diverged)" if cell.get("diverged") else ""
    return f"{100 * cell['mean']:.2f}{spread}{diverged}"


def _ratio(found: Mapping[str, Any], mode: str, method: str | None) -> str:
    entry = found["times"][mode]["methods"].get(method)
    return f"{entry['median']:.2f} ×" if entry else "–"


EXPERIMENT = Experiment(
    "tab1",
    "Table 1",
    "the encoder of --model fine-tuned on CoLA, MRPC and STS-B: scores of ∇ and ζ* over seeds",
    lambda scale: (),
    write_all,
    lambda view: scores(summary(view)),
    executor="local",
    measure=measure,
    table=table,
)
