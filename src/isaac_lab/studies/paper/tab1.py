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
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from isaac_lab.data import text
from isaac_lab.products import threads
from isaac_lab.record import Record, Store
from isaac_lab.records import StoreError
from isaac_lab.stats import against
from isaac_lab.studies import finals
from isaac_lab.studies.calls import train
from isaac_lab.studies.paper import larger
from isaac_lab.studies.paper.folder import View
from isaac_lab.studies.paper.larger import Budget, Method
from isaac_lab.studies.paper.recipe import Experiment
from isaac_lab.study import Arm, Result, Search, resolve
from isaac_lab.trial import Trial
from isaac_lab.workloads import encoders, glue

#: Of the grid; those that the table shows follow it.
TUNING_SEED = 0
#: The rows of the table; with "reduce" the mean of a sentence's tokens is a row.
METHODS: Mapping[str, Method] = {
    "gradient": Method("∇", plain=True),
    "expand": Method("ζ*"),
    "reduce": Method("ζ* reduce", (("sharing", "reduce"),)),
}


@dataclass(frozen=True)
class Task:
    """A workload, the optimizer that the paper uses for it, and its scores: names in the records, with headings."""

    name: str
    title: str
    optimizer: str
    metrics: Mapping[str, str]
    methods: tuple[str, ...] = tuple(METHODS)
    shown: bool = True  # whether it is in the table, over seeds; otherwise its grid is all there is, for a claim

    @property
    def columns(self) -> list[str]:
        """The headings of the table."""
        return [f"{self.title} ({heading})" for heading in self.metrics.values()]

    def ended(self, record: Record) -> bool:
        """Whether a run went to its end, with scores that are numbers."""
        return all(math.isfinite(record.final(metric)) for metric in self.metrics)

    def value(self, record: Record) -> float:
        """The mean of the scores at the end of a run, where lower is better; infinite where it diverged."""
        return -fmean(record.final(metric) for metric in self.metrics) if self.ended(record) else math.inf


_SIMILARITY = {"pearson": "Pearson", "spearman": "Spearman"}
TASKS = (
    Task("cola", "CoLA", "adam", {"matthews": "Matthews"}),
    Task("mrpc", "MRPC", "adam", {"accuracy": "accuracy", "f1": "F1"}),
    Task("stsb", "STS-B", "momentum", _SIMILARITY),
    # The paper says that Adam did not work well there.
    Task("stsb", "STS-B with Adam", "adam", _SIMILARITY, methods=("expand",), shown=False),
)
SHOWN = [task for task in TASKS if task.shown]
COLUMNS = [column for task in SHOWN for column in task.columns]
#: What is trained together; where time ends early, STS-B is what is missing.
STAGES = (TASKS[:2], TASKS[2:])

PLANS: Mapping[str, Budget] = {scale: Budget(**own) for scale, own in larger.KNOWN["tab1"].items()}
NOTES: Mapping[str, str] = larger.KNOWN["notes"]["tab1"]


@dataclass(frozen=True)
class Run:
    """What about.json says: the encoder and the checksum of its weights, runs of each cell, steps by workload, the scale."""

    model: str
    weights: str
    seeds: int
    steps: Mapping[str, int]
    scale: str


def grid(run: Run, task: Task, method: str) -> tuple[Trial, ...]:
    """The settings that a method may choose from; equally many for each, where no earlier grid was run."""
    base = Trial(task.name, task.optimizer, schedule="linear", steps=run.steps[task.name], points=PLANS[run.scale].epochs)
    base = replace(base, seed=TUNING_SEED, small=run.scale == "smoke").varied(model=run.model)
    return PLANS[run.scale].tried(base, METHODS[method])


def arms(run: Run) -> dict[tuple[str, str], Arm]:
    """By title of the task and method: a grid at the tuning seed, and what was best there at other seeds."""

    def arm(task: Task, method: str) -> Arm:
        seeds = range(TUNING_SEED + 1, TUNING_SEED + 1 + run.seeds) if task.shown else ()
        return Arm(
            f"{task.title}/{method}",
            lambda best: finals(best, seeds),
            (Search(lambda _: grid(run, task, method), task.value),),
        )

    return {(task.title, method): arm(task, method) for task in TASKS for method in task.methods}


def measure(view: View) -> None:
    """Time the steps, then train what is due."""
    # Two threads would wait for each other longer than they compute on toy tasks.
    with _encoder(view) as encoder, threads(int(view.scale.small)):
        plan, steps, store = PLANS[view.scale.name], {}, view.store
        for task in TASKS:
            known = text.load(f"toy-{task.name}" if view.scale.small else task.name, view.means.call.folder)
            steps[task.name] = plan.epochs * -(-len(known.train) // glue.Glue.batch)
        run = Run(encoder.name, encoder.weights, view.means.seeds or plan.seeds, steps, view.scale.name)
        for name, before in store.about.items():
            if name in ("model", "weights", "steps") and before != (value := getattr(run, name)):
                raise StoreError(f"{view.directory} was made with {name} {before}, this is {value}; name another --out")
        view.means.say(_plan(run))
        every, stages = arms(run), []
        for stage in STAGES:
            titles = " and ".join(task.title for task in stage if task.shown)
            stages.append((f"Table 1, {titles}", [every[task.title, name] for task in stage for name in task.methods]))
        # On real batches of CoLA, and captured on batches of one shape.
        base = Trial("cola", "adam", (("learning_rate", 1e-5),), (("model", run.model),), small=view.scale.small)
        bases = {"eager": base, "captured": replace(base, workload="cola-64")}
        timed = {mode: {name: own.on(base, 1.0) for name, own in METHODS.items()} for mode, base in bases.items()}
        # With the encoder's name in place of its folder's.
        given, named = (f"--model {shlex.quote(name)}" for name in (Path(view.means.model).name, run.model))
        means = larger.by_processes(view.means, view.means.call.command.replace(given, named), small=view.scale.small)
        with means.writing(store):
            larger.clocks("tab1", timed, plan.rounds, store, means, weights=run.weights)
            train(stages, store, means, {"id": "tab1", **asdict(run)})


@contextlib.contextmanager
def _encoder(view: View) -> Iterator[encoders.Encoder]:
    """The encoder of this scale; processes that are started in the block find it too."""
    if view.scale.small:
        if view.means.model:
            view.means.say(f"--model is not used at smoke scale, which trains a {encoders.TINY} on toy tasks.")
        yield encoders.tiny()
        return
    before = os.environ.get(encoders.ENCODER, "")
    if not (source := view.means.model or before):
        raise encoders.EncoderError(
            f"Table 1 at scale {view.scale.name} needs a pre-trained encoder: name a folder of one, or its name on the Hugging "
            f"Face hub, with --model or {encoders.ENCODER}"
        )
    found = encoders.encoder(source)
    os.environ[encoders.ENCODER] = source
    try:
        yield found
    finally:
        del os.environ[encoders.ENCODER]
        os.environ |= {encoders.ENCODER: before} if before else {}


def _plan(run: Run) -> str:
    """How many runs and steps there will be."""
    lines, total = [], 0
    for task in TASKS:
        tried = sum(len(grid(run, task, method)) for method in task.methods)
        runs = tried + (len(task.methods) * run.seeds if task.shown else 0)
        total += runs * run.steps[task.name]
        lines.append(f"{task.title} {runs} runs of {run.steps[task.name]:,} steps, {tried} of them to choose settings")
    return f"Table 1 with {run.model}, {total:,} training steps in all: {'; '.join(lines)}."


def _found(view: View) -> tuple[Run, Mapping[str, Any]]:
    """What was run, and how it was called last."""
    known = view.store.about
    if not known:
        raise StoreError(
            f"there is nothing of Table 1 in {view.directory}; isaac-newton reproduce tab1 --scale {view.scale.name} trains it"
        )
    return Run(**{field.name: known[field.name] for field in fields(Run)}), known["calls"][-1]


def summary(view: View) -> dict[str, Any]:
    """The table with all that is needed to read it."""
    run, call = _found(view)
    store = view.store
    found = {name: resolve(arm, store) for name, arm in arms(run).items()}
    rows = []
    for name, method in METHODS.items():
        cells = [cell for task in SHOWN for cell in _cells(found[task.title, name], task)]
        rows.append({**method.row(name, cells), "model": run.model})
    columns, what, published = COLUMNS, "CoLA, MRPC and STS-B", _published()
    if run.scale == "smoke":
        # No score on generated sentences is called one on GLUE.
        columns = [column.replace(task.title, f"toy-{task.name}") for task in SHOWN for column in task.columns]
        what, published = "toy tasks", []
    return {
        "title": f"Table 1: {run.model} fine-tuned on {what}",
        "scale": run.scale,
        **{name: call[name] for name in ("command", "time", "commit", "versions", "machine")},
        "model": run.model,
        "weights": run.weights,
        "columns": columns,
        "rows": [*rows, *published],
        "times": view.times,
        # Of each grid: what its settings reached at the tuning seed, and how many are still to be tried.
        "tried": [
            {
                "task": task,
                "method": method,
                "settings": [{"score": None if value == math.inf else -value} for value in own.tried[0].values()],
                "missing": 0 if own.best else len(own.due),
            }
            for (task, method), own in found.items()
        ],
        "notes": [*_notes(run, call.get("device", "cpu"), view.times, store), *against(rows, columns)],
    }


def _cells(found: Result, task: Task) -> list[dict[str, Any] | None]:
    if not found.runs:
        return [None] * len(task.metrics)
    finished = [record for record in found.runs if task.ended(record)]
    chosen, lost = found.runs[0].trial, len(found.runs) - len(finished)
    optimizer = f"{'Adam' if chosen.method.startswith('adam') else 'SGD with momentum'}, "
    return [larger.cell([own.final(metric) for own in finished], chosen, lost, optimizer) for metric in task.metrics]


def _published() -> list[dict[str, Any]]:
    """The rows of the paper."""
    rows = []
    for own in larger.KNOWN["printed"]:
        model, more = f"{own['model']} (paper)", {"n": 10, "settings": "as printed in the paper"}
        known = {column: {"mean": mean / 100, "std": std / 100, **more} for column, (mean, std) in own["scores"].items()}
        cells = [known.get(column) for column in COLUMNS]
        row = {"label": f"{own['method']}, {model}", "model": model, "method": None, "ours": False, "paper": True}
        rows.append({**row, "cells": cells})
    return rows


def _spent(store: Store) -> str:
    """How many settings each method has tried at the tuning seed, in grids that were changed later too."""
    trials = [record.trial for record in store.records() if record.trial.seed == TUNING_SEED]
    tuned = Counter((trial.workload, trial.method, trial.get("sharing")) for trial in trials)
    parts, equal = [], True
    for task in TASKS:
        counts = {}
        for name in task.methods:
            like = METHODS[name].on(Trial(task.name, task.optimizer), 1.0)
            counts[METHODS[name].label] = tuned[task.name, like.method, like.get("sharing")]
        equal &= len(set(counts.values())) == 1
        parts.append(f"{task.title} {', '.join(f'{label} {count}' for label, count in counts.items())}")
    said = NOTES["spent"].format(spent="; ".join(parts))
    return said if equal else f"{said} {NOTES['uneven']}"


def _notes(run: Run, device: str, timed: Mapping[str, Any], store: Store) -> list[str]:
    plan = PLANS[run.scale]
    plain, own = (
        {name: ", ".join(f"{rate:g}" for rate in known) for name, known in rates.items()}
        for rates in (plan.plain_rates, plan.rates)
    )
    dampings = ", ".join(f"{damping:g}" for damping in plan.dampings)
    notes = [
        NOTES["tiny"] if run.model == encoders.TINY else NOTES["encoder"].format(model=run.model),
        NOTES["means"].format(seeds=run.seeds, epochs=plan.epochs),
        _spent(store),
        NOTES["grid"].format(plain=plain, own=own, dampings=dampings),
        NOTES["chosen"],
        NOTES["rows"],
        *([NOTES["cuda"]] if device == "cuda" else []),
    ]
    batches = {"eager": "padded as in training", "captured": "without padding, the step as one CUDA graph"}
    for mode, record in timed.items():
        text = larger.ratios(record, METHODS, "{label} {median:.3f} × ({low:.3f} to {high:.3f})")
        notes.append(NOTES["times"].format(mode=mode, workload=record["workload"], batches=batches[mode], text=text))
    return notes


TAB1 = Experiment(
    "tab1",
    "Table 1",
    "the encoder of --model fine-tuned on CoLA, MRPC and STS-B: scores of ∇ and ζ* over seeds",
    measure=measure,
    summary=summary,
)
