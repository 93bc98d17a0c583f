"""Table 1: an encoder fine-tuned on CoLA, MRPC and STS-B, by the gradient and by ζ*, first grids of settings and then seeds.

The encoder is whatever `--model` names. A grid has equally many settings for each method: the gradient so many learning rates,
ζ* so many pairs of a learning rate and a damping. Each is a full training run at seed 0, and the one with the best dev scores
at its end is run again at other seeds. Where a grid was changed, the notes count its earlier runs too. GLUE's test labels are
not public, so the scores are those of settings that were chosen on dev; the paper speaks of a grid search and does not say on
what.
"""

import contextlib
import math
import os
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from isaac_lab import times
from isaac_lab.data import text
from isaac_lab.products import threads
from isaac_lab.record import Store
from isaac_lab.records import StoreError
from isaac_lab.stats import against, sample
from isaac_lab.studies.calls import Means, calling, trainer
from isaac_lab.studies.paper import finetuning
from isaac_lab.studies.paper.finetuning import (
    COLUMNS,
    METHODS,
    PAPER,
    PAPER_RUNS,
    STAGES,
    TASKS,
    TUNING_SEED,
    Run,
    Task,
    arms,
    ended,
    grid,
)
from isaac_lab.studies.paper.folder import View
from isaac_lab.studies.paper.recipe import Experiment
from isaac_lab.study import Result, resolve, settle
from isaac_lab.trial import Trial
from isaac_lab.workloads import encoders, glue


def measure(view: View) -> None:
    """Time the steps, then train what is due."""
    # Two threads would wait for each other longer than they compute on toy tasks.
    with _encoder(view) as encoder, threads(int(view.scale.small)):
        run, store = _run(view, encoder), view.store
        known = store.about
        for name, value in (("model", run.model), ("weights", run.weights), ("steps", dict(run.steps))):
            if known and known[name] != value:
                raise StoreError(f"{view.directory} was made with {name} {known[name]}, this is {value}; name another --out")
        for record in store.records():
            if record.about["weights"] != run.weights:
                raise StoreError(f"{store.folder} has runs with other weights of {run.model}; name another --out")
        view.means.say(_plan(run))
        means = _means(view, run)
        about = {"id": "tab1", "model": run.model, "weights": run.weights, "seeds": run.seeds, "steps": dict(run.steps)}
        with store.writing(means.call.command) as mended:
            for said in mended:
                means.say(said)
            with calling(store, means, about | {"scale": run.scale}) as trained:
                _time(view, run, store)
                every = arms(run)
                for stage in STAGES:
                    own = [every[task.title, method] for task in stage for method in task.methods]
                    titles = " and ".join(task.title for task in stage if task.shown)
                    settle(own, store, trainer(store, means, trained, f"Table 1, {titles}"))


def _means(view: View, run: Run) -> Means:
    """With the encoder's name in place of its folder's; another process takes longer to start than a toy task to train."""
    call, model = view.means.call, view.means.model
    given, known = (shlex.quote(name) for name in (Path(model).name, run.model))
    command = call.command.replace(f"--model {given}", f"--model {known}")
    executor = "processes" if call.workers > 1 and not view.scale.small else "local"
    return replace(view.means, call=replace(call, command=command, executor=executor))


@contextlib.contextmanager
def _encoder(view: View) -> Iterator[encoders.Encoder]:
    """The encoder of this scale; processes that are started in the block find it too."""
    if view.scale.small:
        if view.means.model:
            view.means.say(f"--model is not used at smoke scale, which trains a {encoders.TINY} on toy tasks.")
        yield encoders.tiny()
        return
    before = os.environ.get(encoders.ENCODER)
    source = view.means.model or before
    if not source:
        raise encoders.EncoderError(
            f"Table 1 at scale {view.scale.name} needs a pre-trained encoder: name a folder of one, or its name on the Hugging "
            f"Face hub, with --model or {encoders.ENCODER}"
        )
    found = encoders.encoder(source)
    os.environ[encoders.ENCODER] = source
    try:
        yield found
    finally:
        if before is None:
            del os.environ[encoders.ENCODER]
        else:
            os.environ[encoders.ENCODER] = before


def _run(view: View, encoder: encoders.Encoder) -> Run:
    plan, small = finetuning.PLANS[view.scale.name], view.scale.small
    batch = glue.Glue.batch
    examples = {
        task.name: len(text.load(f"toy-{task.name}" if small else task.name, view.means.call.folder).train) for task in TASKS
    }
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


def _time(view: View, run: Run, store: Store) -> None:
    """The time of a step: on real batches of CoLA, and captured on batches of one shape."""
    call, known = view.means.call, store.times()
    wanted = {"eager": "cola", **({"captured": "cola-64"} if call.device == "cuda" else {})}
    for mode, name in wanted.items():
        if mode in known:
            continue
        view.means.say(f"Time of a step, {mode}, {name}")
        base = Trial(name, "adam", (("learning_rate", 1e-5),), (("model", run.model),), small=view.scale.small)
        trials = {method: own.on(base, 1.0) for method, own in METHODS.items()}
        record = times.measure(
            trials, device=call.device, captured=mode == "captured", rounds=run.plan.rounds, folder=call.folder
        )
        store.add_times(mode, record | {"weights": run.weights})


def _found(view: View) -> tuple[Run, Mapping[str, Any]]:
    """What was run, and how it was called last."""
    known = view.store.about
    if not known:
        raise StoreError(
            f"there is nothing of Table 1 in {view.directory}; isaac-newton reproduce tab1 --scale {view.scale.name} trains it"
        )
    return Run(**{name: known[name] for name in ("model", "weights", "seeds", "steps", "scale")}), known["calls"][-1]


def summary(view: View) -> dict[str, Any]:
    """The table with all that is needed to read it."""
    run, call = _found(view)
    store = view.store
    found = {name: resolve(arm, store) for name, arm in arms(run).items()}
    shown = [task for task in TASKS if task.shown]
    rows = [
        {
            "label": METHODS[method].label,
            "model": run.model,
            "method": method,
            "ours": method != "gradient",
            "cells": [cell for task in shown for cell in _cells(found[task.title, method], task)],
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
    timed = store.times()
    ratios: dict[str, Any] = {mode: _ratios(timed[mode]) for mode in ("eager", "captured") if mode in timed}
    return {
        "title": f"Table 1: {run.model} fine-tuned on {what}",
        "scale": run.scale,
        **{name: call[name] for name in ("command", "time", "commit", "versions", "machine")},
        "model": run.model,
        "weights": run.weights,
        "columns": columns,
        "rows": [*rows, *published],
        "times": ratios,
        "tried": _tried(run, found),
        "notes": [*_notes(run, call.get("device", "cpu"), ratios, _spent(store)), *against(rows, columns)],
    }


def _toy(column: str) -> str:
    """No score on generated sentences is called one on GLUE."""
    task = next(task for task in TASKS if column in task.columns)
    return column.replace(task.title, f"toy-{task.name}")


def _cells(found: Result, task: Task) -> list[dict[str, Any] | None]:
    if not found.runs:
        return [None] * len(task.metrics)
    finished = [record for record in found.runs if ended(record, task)]
    lost = len(found.runs) - len(finished)
    settings = _settings(found.runs[0].trial) + (f", {lost} diverged" if lost else "")
    return [
        {**sample([record.final(metric) for record in finished]), "diverged": lost, "settings": settings}
        for metric in task.metrics
    ]


def _settings(trial: Trial) -> str:
    damping = f", λ {trial.damping:g}" if trial.get("damping") else ""
    return f"{'Adam' if trial.method.startswith('adam') else 'SGD with momentum'}, η {trial.learning_rate:g}{damping}"


def _published(mean: float, std: float) -> dict[str, Any]:
    return {"mean": mean / 100, "std": std / 100, "n": PAPER_RUNS, "settings": "as printed in the paper"}


def _ratios(record: Mapping[str, Any]) -> dict[str, Any]:
    entries = {entry["name"]: entry["ratio"] | {"seconds": entry["seconds_per_step"]["median"]} for entry in record["methods"]}
    return {"workload": record["workload"], "methods": entries, "left_out": record["left_out"]}


def _tried(run: Run, found: Mapping[tuple[str, str], Result]) -> list[dict[str, Any]]:
    """By task and method: what each setting of its grid reached at the tuning seed."""
    result = []
    for task in TASKS:
        for method in task.methods:
            tried = found[task.title, method].tried[0]
            settings = [{"score": None if value == math.inf else -value} for value in tried.values()]
            of = {"task": task.title, "optimizer": task.optimizer, "method": method}
            result.append({**of, "settings": settings, "missing": len(grid(run, task, method)) - len(settings)})
    return result


def _spent(store: Store) -> str:
    """How many settings each method has tried at the tuning seed, in grids that were changed later too."""
    trials = [record.trial for record in store.records() if record.trial.seed == TUNING_SEED]
    tuned = Counter((trial.workload, trial.method, trial.get("sharing")) for trial in trials)
    parts, equal = [], True
    for task in TASKS:
        counts = {
            name: tuned[
                task.name,
                task.optimizer + ("" if name == "gradient" else "+isaac"),
                dict(METHODS[name].settings).get("sharing"),
            ]
            for name in task.methods
        }
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
    if run.model == encoders.TINY:
        return ["A smoke test: random weights and generated sentences say nothing about ζ*.", *notes]
    other = "The paper's rows are of BERT-Base and BERT-Mini: compare the difference between the methods, not the scores."
    return [f"The encoder is {run.model}. {other}", *notes]


EXPERIMENT = Experiment(
    "tab1",
    "Table 1",
    "the encoder of --model fine-tuned on CoLA, MRPC and STS-B: scores of ∇ and ζ* over seeds",
    executor="local",
    measure=measure,
    summary=summary,
)
