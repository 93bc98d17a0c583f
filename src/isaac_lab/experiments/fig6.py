"""Figure 6: ResNet-18 on CIFAR-10 with and without momentum and weight decay; ζ* in the last layer, and in all layers.

Learning rate and damping are chosen in two rounds, with as many trials for each method. Short ones find both, by their training
loss. What is best after so few epochs is often too small a rate for a whole run, so that the first seed is run whole with that
rate and with larger ones; the best by what the figure shows, the test accuracy, is run with the other seeds. What is drawn
follows from the records alone, however many of them there are.
"""

import csv
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any

import torch

from isaac_lab.data.catalogue import SETS
from isaac_lab.experiments.folder import Folder, View, read_json
from isaac_lab.experiments.recipe import Experiment
from isaac_lab.progress import Update
from isaac_lab.records import origin, write
from isaac_lab.report.figures import courses
from isaac_lab.significance import against
from isaac_lab.store import StoreError
from isaac_lab.trials import pool, times
from isaac_lab.trials.store import Store
from isaac_lab.trials.trial import Trial
from isaac_lab.trials.workload import Workload, make
from isaac_lab.trials.workloads import resnet

__all__ = ["BUDGETS", "EXPERIMENT", "METHODS", "SETTINGS", "Budget", "Cell", "cells", "choose", "summary"]

#: Of a network that says nothing: what a run that diverged counts as.
CHANCE = 0.1
#: Learning rates that are run whole at the first seed, over that of the best short trial.
LARGER = (1, 3, 10)
MODES = ("eager", "captured")
#: Of the steps that are timed. Small, so that thousands of them on a few batches leave the activations about as they were.
TIMED_RATE, TIMED_DAMPING = 0.001, 1.0

#: Of numbers.csv.
COLUMNS = (
    "panel",
    "setting",
    "method",
    "learning_rate",
    "damping",
    "seed",
    "status",
    "epoch",
    "step",
    "train_loss",
    "test_loss",
    "test_accuracy",
)


@dataclass(frozen=True)
class Method:
    """A way to condition: its name in tables."""

    label: str


#: By conditioning, a key of `trials.methods.CONDITIONINGS`; the paper has the first two.
METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "none": Method("∇"),
        "last": Method("ζ*, last layer"),
        "reduce": Method("ζ*, all layers, reduce"),
        "max_rows": Method("ζ*, all layers, 256 rows"),
    }
)


@dataclass(frozen=True)
class Setting:
    """A panel.

    Args:
        title: For people.
        optimizer: A key of `trials.methods.OPTIMIZERS`.
        weight_decay: Of all parameters.
        tuned_as: The panel whose short trials are this one's too.
    """

    title: str
    optimizer: str
    weight_decay: float
    tuned_as: str


#: The paper's, in its order. Weight decay does nothing yet in a short trial.
SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {
        "a": Setting("momentum and weight decay", "momentum", 5e-4, "b"),
        "b": Setting("momentum only", "momentum", 0.0, "b"),
        "c": Setting("plain SGD", "sgd", 0.0, "c"),
    }
)


@dataclass(frozen=True)
class Budget:
    """How much is trained at a scale.

    Args:
        epochs: Of a run; the cosine schedule goes over all of them.
        trial_epochs: Of a short trial, with a schedule of its own.
        steps: Of an epoch.
        seeds: Runs of each method in each setting.
        conditionings: The methods that are trained; the steps of all are timed.
        rates: Learning rates of ζ* by optimizer, each tried with each of `dampings`.
        plain_rates: Those of ∇: as many as ζ* has pairs, its rates among them.
        dampings: λ.
        rounds: How often methods take turns when their steps are timed.
        small: The small form of the workload.
    """

    epochs: int
    trial_epochs: int
    steps: int
    seeds: int
    conditionings: tuple[str, ...]
    rates: Mapping[str, tuple[float, ...]]
    plain_rates: Mapping[str, tuple[float, ...]]
    dampings: tuple[float, ...] = (1.0, 0.1)
    rounds: int = 21
    small: bool = False

    def candidates(self, setting: str, conditioning: str) -> tuple[Trial, ...]:
        """The short trials of a method in the setting whose short trials decide, the largest learning rates first."""
        own = SETTINGS[SETTINGS[setting].tuned_as]
        base = self._trial(own, conditioning, self.trial_epochs)
        # What a trial is like on the way decides nothing.
        base = replace(base, points=1)
        if conditioning == "none":
            return tuple(replace(base, learning_rate=rate) for rate in self.plain_rates[own.optimizer])
        pairs = [(rate, damping) for rate in self.rates[own.optimizer] for damping in self.dampings]
        return tuple(replace(base, learning_rate=rate, damping=damping) for rate, damping in pairs)

    def compared(self, setting: str, first: Trial) -> tuple[Trial, ...]:
        """The first run with the rate and the damping of the best short trial, and with larger rates."""
        rates = [float(f"{factor * first.learning_rate:.3g}") for factor in LARGER]
        return tuple(self.runs(setting, replace(first, learning_rate=rate), 1)[0] for rate in rates)

    def runs(self, setting: str, chosen: Trial, seeds: int) -> tuple[Trial, ...]:
        """What the figure shows of a method: the rate and the damping of the trial that was chosen, from other seeds."""
        base = self._trial(SETTINGS[setting], chosen.conditioning, self.epochs)
        base = replace(base, learning_rate=chosen.learning_rate, damping=chosen.damping)
        return tuple(replace(base, seed=number) for number in range(1, seeds + 1))

    def _trial(self, setting: Setting, conditioning: str, epochs: int) -> Trial:
        return Trial(
            resnet.NAME,
            setting.optimizer,
            conditioning,
            weight_decay=setting.weight_decay,
            schedule="cosine",
            steps=epochs * self.steps,
            points=epochs,
            small=self.small,
        )


_RATES = MappingProxyType({"momentum": (0.3, 0.1, 0.03), "sgd": (1.0, 0.3, 0.1)})
_PLAIN_RATES = MappingProxyType({"momentum": (0.3, 0.2, 0.1, 0.05, 0.03, 0.01), "sgd": (1.0, 0.5, 0.3, 0.1, 0.05, 0.03)})
_CIFAR_STEPS = SETS["cifar-10"].examples[0] // resnet.ResNet.batch

#: "max_rows" draws its rows on the host, so that its steps are no CUDA graph and take many times as long as the others:
#: at "quick" it is timed, not trained.
BUDGETS: Mapping[str, Budget] = MappingProxyType(
    {
        "smoke": Budget(
            2,
            1,
            resnet.SMALL_TRAIN // resnet.SMALL_BATCH,
            2,
            tuple(METHODS),
            {"momentum": (0.1,), "sgd": (0.3,)},
            {"momentum": (0.1, 0.03), "sgd": (0.3, 0.1)},
            rounds=3,
            small=True,
        ),
        "quick": Budget(30, 2, _CIFAR_STEPS, 3, tuple(METHODS)[:3], _RATES, _PLAIN_RATES),
        "paper": Budget(200, 5, _CIFAR_STEPS, 5, tuple(METHODS), _RATES, _PLAIN_RATES),
    }
)


@dataclass(frozen=True)
class Cell:
    """A method in a setting.

    Args:
        tried: By short trial, the training loss at its end; infinite where it diverged. Those that have been run.
        compared: By first run with one of several rates, the share of the test images that it gets wrong, likewise.
        chosen: The trial whose rate and damping the runs have; None before all short ones have been run, or where all diverged.
        records: Of the runs that have ended.
    """

    tried: Mapping[Trial, float]
    compared: Mapping[Trial, float]
    chosen: Trial | None
    records: tuple[Mapping[str, Any], ...]

    def accuracies(self) -> list[list[float]]:
        """Test accuracy after each epoch, a row for each run; that of chance from where one diverged."""
        rows = []
        for record in self.records:
            # The last point of a run that diverged is what ended it.
            points = record["points"] if record["status"] == "finished" else record["points"][:-1]
            known = {point["step"]: point["test_accuracy"] for point in points}
            rows.append([known.get(step, CHANCE) for step in Trial.from_mapping(record["trial"]).measured()[1:]])
        return rows

    @property
    def diverged(self) -> int:
        """How many runs did."""
        return sum(record["status"] == "diverged" for record in self.records)


def choose(tried: Mapping[Trial, float]) -> Trial | None:
    """The trial with the lowest value, the first of equal ones; None where all diverged."""
    best = min(tried, key=lambda trial: tried[trial], default=None)
    return None if best is None or math.isinf(tried[best]) else best


def cells(view: View) -> dict[tuple[str, str], Cell]:
    """By setting and conditioning, what the records say."""
    budget, store, seeds = BUDGETS[view.scale.name], Store(view.directory / "records"), _seeds(view)
    found = {}
    for setting in SETTINGS:
        for conditioning in METHODS:
            tried, first = _round(budget.candidates(setting, conditioning), store, "train_loss")
            compared, chosen = _round(() if first is None else budget.compared(setting, first), store, "test_accuracy")
            # Until larger rates have been run, what the short trials chose is what there is.
            chosen = first if len(compared) < len(LARGER) else chosen
            runs = () if chosen is None else budget.runs(setting, chosen, seeds)
            records = tuple(record for trial in runs if (record := store.get(trial)) is not None)
            found[setting, conditioning] = Cell(tried, compared, chosen, records)
    return found


def _round(trials: Sequence[Trial], store: Store, quantity: str) -> tuple[dict[Trial, float], Trial | None]:
    """What the trials that have been run ended with, the lower the better, and the best once all have."""
    ended = {trial: _ending(record, quantity) for trial in trials if (record := store.get(trial)) is not None}
    return ended, choose(ended) if len(ended) == len(trials) else None


def _ending(record: Mapping[str, Any], quantity: str) -> float:
    value = record["points"][-1][quantity] if record["status"] == "finished" and record["points"] else None
    if value is None:
        return math.inf
    return 1 - float(value) if quantity == "test_accuracy" else float(value)


def _seeds(view: View) -> int:
    """Those asked for, else those of the records, else the scale's."""
    return int(view.means.seeds or Folder(view.directory).about["seeds"] or BUDGETS[view.scale.name].seeds)


def measure(view: View) -> None:
    """Time the steps, run the short trials, then in each setting the first seed with several rates, and the other seeds."""
    budget, means, seeds = BUDGETS[view.scale.name], view.means, _seeds(view)
    # Data that are missing or corrupt are said before anything is written.
    workload = make(resnet.NAME, small=budget.small, device=view.device, folder=means.data)
    means.say(_plan(budget, seeds))
    folder = Folder(view.directory)
    # Before the first record: what is drawn after a kill has its command too.
    about = {"command": means.command} | folder.about | {"id": "fig6", "scale": view.scale.name, "seeds": seeds}
    folder.note(about)
    for mode in MODES if view.device == "cuda" else MODES[:1]:
        _time_steps(view, workload, mode)
    store, started = Store(view.directory / "records"), time.perf_counter()
    # Two settings share their short trials.
    trials = [t for name in budget.conditionings for s in ("c", "b") for t in budget.candidates(s, name)]
    new = _train(view, trials, store, f"fig6: trials of {_epochs(budget.trial_epochs)}")
    # What leaves most where it is cut off: one setting after the other, all methods of it, but the slowest at the end.
    for late in (False, True):
        names = [name for name in budget.conditionings if (name == "max_rows") is late]
        for setting in SETTINGS:
            known = cells(view)
            firsts = [first for name in names if (first := choose(known[setting, name].tried)) is not None]
            trials = [trial for first in firsts for trial in budget.compared(setting, first)]
            new += _train(view, trials, store, f"fig6: ({setting}) larger rates, runs of {_epochs(budget.epochs)}")
            known = cells(view)
            chosen = [trial for name in names if (trial := known[setting, name].chosen) is not None]
            runs = [budget.runs(setting, trial, seeds)[number] for number in range(seeds) for trial in chosen]
            new += _train(view, runs, store, f"fig6: ({setting}) runs of {_epochs(budget.epochs)}")
    if new:
        call = {"command": means.command, "seconds": time.perf_counter() - started, "runs": new, "device": view.device}
        call |= {"workers": means.workers, **origin(threads=torch.get_num_threads(), device=view.device)}
        folder.note(about | {"calls": [*about.get("calls", []), call]})


def _plan(budget: Budget, seeds: int) -> str:
    kinds = len({setting.tuned_as for setting in SETTINGS.values()}) * len(budget.conditionings)
    of_each = len(SETTINGS) * len(budget.conditionings)
    # One of the rates that are compared is chosen: its first run is one of the others too.
    numbers = (kinds * len(budget.candidates("c", "none")), of_each * (len(LARGER) + seeds - 1))
    lengths = [budget.steps * epochs for epochs in (budget.trial_epochs, budget.epochs)]
    short, whole = (f"{number} of {length:,} steps" for number, length in zip(numbers, lengths, strict=True))
    total = sum(number * length for number, length in zip(numbers, lengths, strict=True))
    return f"fig6: trials, {short}; runs, {whole}; {total:,} steps in all; what is there already is used"


def _time_steps(view: View, workload: Workload, mode: str) -> None:
    path = view.directory / f"times-{mode}.json"
    if path.exists():
        return
    budget = BUDGETS[view.scale.name]
    view.means.say(f"fig6: the time of a step, {mode}")
    base = Trial(resnet.NAME, "momentum", learning_rate=TIMED_RATE, weight_decay=SETTINGS["a"].weight_decay, small=budget.small)
    trials = {
        name: replace(base, conditioning=name, damping=0.0 if name == "none" else TIMED_DAMPING, schedule="cosine")
        for name in METHODS
    }
    record = times.measure(trials, workload, device=view.device, captured=mode == "captured", rounds=budget.rounds)
    write(path, {**record, "command": view.means.command})


def _train(view: View, trials: Sequence[Trial], store: Store, what: str) -> int:
    """Run what is not in the store; returns how many that were."""
    missing = len(store.missing(trials))
    if not missing:
        return 0
    means, started, done = view.means, time.perf_counter(), count(1)
    means.say(f"{what}, {missing} of {len(trials)} to do")

    def tick(record: Mapping[str, Any], total: int) -> None:
        number, last = next(done), record["points"][-1]
        loss, accuracy = last["train_loss"], last["test_accuracy"]
        end = f"{accuracy:.2%}, loss {loss:.3g}" if record["status"] == "finished" else "diverged"
        means.say(f"  {number}/{total} {_words(record['trial'])}: {end}, {1e3 * record['seconds_per_step']:.3g} ms")
        remaining = (time.perf_counter() - started) / number * (total - number)
        means.progress(Update("fig6", what, number, total, loss, accuracy, None, remaining, number == total))

    pool.run(trials, store, device=view.device, folder=means.data, workers=means.workers, tick=tick)
    return missing


def _words(trial: Mapping[str, Any]) -> str:
    """A trial in a few words."""
    found = (
        name
        for name, own in SETTINGS.items()
        if (own.optimizer, own.weight_decay) == (trial["optimizer"], trial["weight_decay"])
    )
    method = "∇" if trial["conditioning"] == "none" else f"ζ* {trial['conditioning']} λ {trial['damping']:g}"
    return f"({next(found)}) {method} η {trial['learning_rate']:g} seed {trial['seed']}"


def write_all(view: View) -> None:
    """The numbers and the summary; raises `StoreError` where there is no run."""
    known = cells(view)
    if not any(cell.records for cell in known.values()):
        raise StoreError(
            f"there is no run of fig6 in {view.directory / 'records'}; "
            f"isaac-newton reproduce fig6 --scale {view.scale.name} trains it"
        )
    write(view.directory / "summary.json", summary(view))
    with (view.directory / "numbers.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        for (name, conditioning), cell in known.items():
            for record in cell.records:
                table.writerows(_numbers(name, conditioning, record, BUDGETS[view.scale.name].steps))


def _epochs(number: int) -> str:
    return "1 epoch" if number == 1 else f"{number} epochs"


def _title(data: str) -> str:
    return f"Figure 6: ResNet-18 on {data.partition(' (')[0]}"


def _numbers(setting: str, conditioning: str, record: Mapping[str, Any], steps: int) -> Iterator[list[Any]]:
    trial = record["trial"]
    run = [setting, SETTINGS[setting].title, conditioning, trial["learning_rate"], trial["damping"], trial["seed"]]
    for point in record["points"]:
        values = [point[name] for name in ("train_loss", "test_loss", "test_accuracy")]
        yield [*run, record["status"], point["step"] // steps, point["step"], *values]


def summary(view: View) -> dict[str, Any]:
    """What summary.json says: curves, the table of final accuracies, the choices, and the times of steps."""
    known, budget = cells(view), BUDGETS[view.scale.name]
    records = [record for cell in known.values() for record in cell.records]
    newest = max(records, key=lambda record: str(record["time"]))
    methods = [name for name in METHODS if any(known[setting, name].records for setting in SETTINGS)]
    about = Folder(view.directory).about
    calls = about.get("calls") or [{"command": about.get("command", view.means.command)}]
    columns = [setting.title for setting in SETTINGS.values()]
    rows = [
        {
            "name": name,
            "label": METHODS[name].label,
            "ours": name != "none",
            "cells": [_summary_cell(known[setting, name]) for setting in SETTINGS],
        }
        for name in methods
    ]
    return {
        "kind": "fig6",
        "title": f"{_title(newest['data'])}: test accuracy",
        "scale": view.scale.name,
        "command": calls[-1]["command"],
        **{key: newest[key] for key in ("time", "commit", "versions", "machine")},
        "model": "ResNet-18" + (f" of width {resnet.SMALL_WIDTH}" if budget.small else ""),
        "data": newest["data"],
        "checksum": newest["checksum"],
        "arithmetic": newest["arithmetic"],
        "epochs": budget.epochs,
        "batch": resnet.SMALL_BATCH if budget.small else resnet.ResNet.batch,
        "quantity_title": "Test accuracy",
        "panels": [
            {
                "name": setting,
                "title": SETTINGS[setting].title,
                "curves": [_summary_curve(name, known[setting, name]) for name in methods if known[setting, name].records],
            }
            for setting in SETTINGS
            if any(known[setting, name].records for name in methods)
        ],
        "columns": columns,
        "rows": rows,
        "trials": [
            {"setting": setting, "method": name, quantity: value}
            | {key: getattr(trial, key) for key in ("learning_rate", "damping", "seed", "steps")}
            for (setting, name), cell in known.items()
            for quantity, ended in (
                ("train_loss", cell.tried if SETTINGS[setting].tuned_as == setting else {}),
                ("test_error", cell.compared),
            )
            for trial, value in ended.items()
        ],
        "times": {mode: _summary_times(record) for mode, record in _times(view).items()},
        "notes": [*_notes(view, known, methods), *(against(rows, columns) if methods[:1] == ["none"] else [])],
    }


def _summary_curve(name: str, cell: Cell) -> dict[str, Any]:
    rows = cell.accuracies()
    columns = list(zip(*rows, strict=True))
    return {
        "name": name,
        "label": METHODS[name].label,
        "epochs": list(range(1, 1 + len(columns))),
        "mean": [fmean(column) for column in columns],
        "std": [stdev(column) for column in columns] if len(rows) > 1 else None,
        "n": len(rows),
    }


def _summary_cell(cell: Cell) -> dict[str, Any] | None:
    if cell.chosen is None or not cell.records:
        return None
    values = [row[-1] for row in cell.accuracies()]
    settings = f"η {cell.chosen.learning_rate:g}" + (f", λ {cell.chosen.damping:g}" if cell.chosen.damping else "")
    settings += f", {cell.diverged} diverged" if cell.diverged else ""
    return {
        "mean": fmean(values),
        "std": stdev(values) if len(values) > 1 else None,
        "n": len(values),
        "values": values,
        "diverged": cell.diverged,
        "settings": settings,
    }


def _times(view: View) -> dict[str, dict[str, Any]]:
    """By mode, the record of the times of steps."""
    paths = {mode: view.directory / f"times-{mode}.json" for mode in MODES}
    return {mode: read_json(path) for mode, path in paths.items() if path.exists()}


def _summary_times(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "methods": {
            method["name"]: {"seconds_per_step": method["seconds_per_step"]["median"], "ratio": method["ratio"]}
            for method in record["methods"]
        },
        "left_out": record["left_out"],
        **{key: record[key] for key in ("time", "commit", "machine", "arithmetic")},
    }


def _notes(view: View, known: Mapping[tuple[str, str], Cell], methods: Sequence[str]) -> list[str]:
    budget = BUDGETS[view.scale.name]
    number = len(budget.candidates("c", "none"))
    notes = [
        f"Each method had {number} trials of {_epochs(budget.trial_epochs)} at one seed in {SETTINGS['b'].title} and in "
        f"{SETTINGS['c'].title}. The lowest training loss chose λ and a first η, in {SETTINGS['a'].title} those of "
        f"{SETTINGS['b'].title}. Then its first seed ran whole in each setting with {', '.join(map(str, LARGER))} times "
        "that η. The highest test accuracy at the end chose what the other seeds have.",
        "The test images that chose η are those that are reported, and the first seed is among the n. So no difference here is "
        "a result yet.",
    ]
    edges = [
        f"({setting}) {METHODS[name].label} {cell.chosen.learning_rate:g}"
        for (setting, name), cell in known.items()
        if cell.chosen is not None and len(cell.compared) == len(LARGER)
        if (rates := [trial.learning_rate for trial in cell.compared]) and cell.chosen.learning_rate in (min(rates), max(rates))
    ]
    notes += [f"At the edge of the list of its η: {', '.join(edges)}."] if edges else []
    early = [setting for (setting, _), cell in known.items() if cell.records and len(cell.compared) < len(LARGER)]
    if early:
        where = " and in ".join(SETTINGS[setting].title for setting in dict.fromkeys(early))
        notes.append(f"The larger η of {len(early)} of the curves, in {where}, are still to be run: theirs is the first one.")
    if lost := sum(cell.diverged for cell in known.values()):
        notes.append(f"{lost} of the runs diverged; from there on they count as chance, {CHANCE:.0%}.")
    for mode, record in _times(view).items():
        ratios = [(m["name"], m["ratio"]) for m in record["methods"] if m["name"] != "none"]
        text = ", ".join(f"{METHODS[n].label} {r['median']:.3f} ({r['low']:.3f}–{r['high']:.3f})" for n, r in ratios)
        text += "".join(f"; {METHODS[name].label}: {reason}" for name, reason in record["left_out"].items())
        where = record["machine"].get("gpu") or record["machine"]["cpu"] or "CPU"
        notes.append(f"Time of a step over that of ∇, {mode}, {where}, median (quartiles): {text}.")
    if "max_rows" not in methods:
        notes.append(
            f"{METHODS['max_rows'].label}: not trained at this scale. Its rows are drawn on the host, so that no CUDA graph "
            "can hold its step."
        )
    return notes


def table(view: View) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """The final test accuracy of each method in each setting, and the time of a step over that of ∇."""
    known, records = cells(view), _times(view)
    ratios = {mode: {m["name"]: f"{m['ratio']['median']:.3f}" for m in record["methods"]} for mode, record in records.items()}
    rows = []
    for (setting, name), cell in known.items():
        found = _summary_cell(cell)
        if found is None or cell.chosen is None:
            continue
        spread = f" ± {found['std']:.2%}" if found["std"] is not None else ""
        lost = f", {cell.diverged} diverged" if cell.diverged else ""
        damping = f"{cell.chosen.damping:g}" if cell.chosen.damping else "–"
        accuracy = f"{found['mean']:.2%}{spread} ({found['n']}{lost})"
        step = [own.get(name, "–") for own in ratios.values()]
        rows.append([f"({setting}) {METHODS[name].label}", f"{cell.chosen.learning_rate:g}", damping, accuracy, *step])
    return ["Method", "η", "λ", "Test accuracy (n)", *(f"Step × ∇,\n{mode}" for mode in ratios)], rows


EXPERIMENT = Experiment(
    "fig6",
    "Figure 6",
    "ResNet-18 on CIFAR-10 with and without momentum and weight decay, ζ* in the last layer and in all",
    lambda scale: (),
    write_all,
    lambda view: courses(summary(view)),
    executor="local",
    measure=measure,
    table=table,
)
