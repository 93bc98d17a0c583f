"""Figure 6: ResNet-18 on CIFAR-10 with and without momentum and weight decay; ζ* in the last layer, and in all layers.

Learning rate and damping are chosen in two rounds, with as many trials for each method. Short ones find both, by their training
loss. What is best after so few epochs is often too small a rate for a whole run, so that the first seed is run whole with that
rate and with larger ones; the best by what the figure shows, the test accuracy, is run with the other seeds. What is drawn
follows from the records alone, however many of them there are.
"""

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any

from isaac_lab import times
from isaac_lab.data.catalogue import SETS
from isaac_lab.experiments.folder import View, calling, trainer
from isaac_lab.experiments.recipe import Experiment
from isaac_lab.record import Record, StoreError
from isaac_lab.records import write_whole
from isaac_lab.report.figures import courses
from isaac_lab.significance import against
from isaac_lab.study import Arm, Result, Search, lowest, resolve, settle
from isaac_lab.trial import Trial
from isaac_lab.workload import load
from isaac_lab.workloads import resnet

__all__ = ["BUDGETS", "EXPERIMENT", "METHODS", "SETTINGS", "Budget", "Cell", "arms", "cells", "summary"]

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
    settings: tuple[tuple[str, str | int], ...] = ()


#: By conditioning; the paper has the first two.
METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "none": Method("∇"),
        "last": Method("ζ*, last layer", (("layers", "last"),)),
        "reduce": Method("ζ*, all layers, reduce", (("sharing", "reduce"),)),
        "max_rows": Method("ζ*, all layers, 256 rows", (("max_rows", 256),)),
    }
)


@dataclass(frozen=True)
class Setting:
    """A panel.

    Args:
        title: For people.
        optimizer: Name of a method.
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
            return tuple(base.having(learning_rate=rate) for rate in self.plain_rates[own.optimizer])
        pairs = [(rate, damping) for rate in self.rates[own.optimizer] for damping in self.dampings]
        return tuple(base.having(learning_rate=rate, damping=damping) for rate, damping in pairs)

    def compared(self, setting: str, first: Trial) -> tuple[Trial, ...]:
        """The first run with the rate and the damping of the best short trial, and with larger rates."""
        rates = [float(f"{factor * first.learning_rate:.3g}") for factor in LARGER]
        return tuple(self.runs(setting, first.having(learning_rate=rate), 1)[0] for rate in rates)

    def runs(self, setting: str, chosen: Trial, seeds: int) -> tuple[Trial, ...]:
        """What the figure shows of a method: the rate and the damping of the trial that was chosen, from other seeds."""
        base = self._trial(SETTINGS[setting], conditioning_of(chosen), self.epochs)
        base = base.having(learning_rate=chosen.learning_rate, damping=chosen.get("damping"))
        return tuple(replace(base, seed=number) for number in range(1, seeds + 1))

    def _trial(self, setting: Setting, conditioning: str, epochs: int) -> Trial:
        decay = (("weight_decay", setting.weight_decay),) if setting.weight_decay else ()
        return Trial(
            resnet.NAME,
            setting.optimizer if conditioning == "none" else f"{setting.optimizer}+isaac",
            (*METHODS[conditioning].settings, *decay),
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


def conditioning_of(trial: Trial) -> str:
    """A key of `METHODS`."""
    own = tuple((name, value) for name, value in trial.settings if name in ("layers", "max_rows", "sharing"))
    return next(name for name, method in METHODS.items() if method.settings == own)


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
    records: tuple[Record, ...]

    def accuracies(self) -> list[list[float]]:
        """Test accuracy after each epoch, a row for each run; that of chance from where one diverged."""
        rows = []
        for record in self.records:
            # The last point of a run that diverged is what ended it.
            points = record.points if record.finished else record.points[:-1]
            known = {point["step"]: point["test_accuracy"] for point in points}
            rows.append([known.get(step, CHANCE) for step in record.trial.measured()[1:]])
        return rows

    @property
    def diverged(self) -> int:
        """How many runs did."""
        return sum(not record.finished for record in self.records)


def arms(budget: Budget, seeds: int) -> dict[tuple[str, str], Arm]:
    """By setting and conditioning: short trials, then the first seed with several rates, then all seeds."""

    def arm(setting: str, name: str) -> Arm:
        return Arm(
            f"{setting}/{name}",
            lambda best: () if best is None else budget.runs(setting, best, seeds),
            (
                Search(lambda _: budget.candidates(setting, name), lowest("train_loss")),
                Search(lambda best: () if best is None else budget.compared(setting, best), _error),
            ),
        )

    return {(setting, name): arm(setting, name) for setting in SETTINGS for name in METHODS}


def _error(record: Record) -> float:
    """The share of the test images that a run gets wrong at its end."""
    accuracy = record.final("test_accuracy")
    return math.inf if math.isinf(accuracy) else 1 - accuracy


def cells(view: View) -> dict[tuple[str, str], Cell]:
    """By setting and conditioning, what the records say.

    Until larger rates have been run, what the short trials chose is what there is.
    """
    store = view.store
    return {name: _cell(resolve(arm, store)) for name, arm in arms(BUDGETS[view.scale.name], _seeds(view)).items()}


def _cell(found: Result) -> Cell:
    return Cell(found.tried[0], found.tried[1] if len(found.tried) > 1 else {}, found.best, found.runs)


def _seeds(view: View) -> int:
    """Those asked for, else those of the records, else the scale's."""
    return int(view.means.seeds or view.store.about.get("seeds", 0) or BUDGETS[view.scale.name].seeds)


def measure(view: View) -> None:
    """Time the steps, run the short trials, then in each setting the first seed with several rates, and the other seeds."""
    budget, means, seeds, store = BUDGETS[view.scale.name], view.means, _seeds(view), view.store
    # Data that are missing or corrupt are said before anything is written.
    load(budget.candidates("c", "none")[0], device=means.call.device, folder=means.call.folder)
    means.say(_plan(budget, seeds))
    every = arms(budget, seeds)
    with store.writing(means.call.command) as mended:
        for said in mended:
            means.say(said)
        about = {"id": "fig6", "scale": view.scale.name, "seeds": seeds}
        with calling(store, means, about) as trained:
            for mode in MODES if means.call.device == "cuda" else MODES[:1]:
                _time_steps(view, mode)
            short = [
                Arm(arm.name, lambda best: (), arm.search[:1]) for (_, n), arm in every.items() if n in budget.conditionings
            ]
            settle(short, store, trainer(store, means, trained, f"fig6: trials of {_epochs(budget.trial_epochs)}"))
            # What leaves most where it is cut off: one setting after the other, all methods of it, but the slowest at the end.
            for late in (False, True):
                names = [name for name in budget.conditionings if (name == "max_rows") is late]
                for setting in SETTINGS:
                    what = f"fig6: ({setting}) runs of {_epochs(budget.epochs)}"
                    settle([every[setting, name] for name in names], store, trainer(store, means, trained, what))


def _plan(budget: Budget, seeds: int) -> str:
    kinds = len({setting.tuned_as for setting in SETTINGS.values()}) * len(budget.conditionings)
    of_each = len(SETTINGS) * len(budget.conditionings)
    # One of the rates that are compared is chosen: its first run is one of the others too.
    numbers = (kinds * len(budget.candidates("c", "none")), of_each * (len(LARGER) + seeds - 1))
    lengths = [budget.steps * epochs for epochs in (budget.trial_epochs, budget.epochs)]
    short, whole = (f"{number} of {length:,} steps" for number, length in zip(numbers, lengths, strict=True))
    total = sum(number * length for number, length in zip(numbers, lengths, strict=True))
    return f"fig6: trials, {short}; runs, {whole}; {total:,} steps in all; what is there already is used"


def _time_steps(view: View, mode: str) -> None:
    store, budget, call = view.store, BUDGETS[view.scale.name], view.means.call
    if mode in store.times():
        return
    view.means.say(f"fig6: the time of a step, {mode}")
    fixed = {"learning_rate": TIMED_RATE, "weight_decay": SETTINGS["a"].weight_decay}
    trials = {
        name: Trial(
            resnet.NAME,
            "momentum" if name == "none" else "momentum+isaac",
            (*method.settings, *fixed.items(), *(() if name == "none" else (("damping", TIMED_DAMPING),))),
            schedule="cosine",
            small=budget.small,
        )
        for name, method in METHODS.items()
    }
    options = {"device": call.device, "captured": mode == "captured", "rounds": budget.rounds, "folder": call.folder}
    store.add_times(mode, {**times.measure(trials, **options), "command": call.command})  # type: ignore[arg-type]


def write_all(view: View) -> None:
    """The numbers and the summary; raises `StoreError` where there is no run."""
    known = cells(view)
    if not any(cell.records for cell in known.values()):
        raise StoreError(
            f"there is no run of fig6 in {view.directory}; isaac-newton reproduce fig6 --scale {view.scale.name} trains it"
        )
    file = io.StringIO()
    table = csv.writer(file, lineterminator="\n")
    table.writerow(COLUMNS)
    for (name, conditioning), cell in known.items():
        for record in cell.records:
            table.writerows(_numbers(name, conditioning, record, BUDGETS[view.scale.name].steps))
    write_whole(view.directory / "numbers.csv", file.getvalue())


def _epochs(number: int) -> str:
    return "1 epoch" if number == 1 else f"{number} epochs"


def _title(data: str) -> str:
    return f"Figure 6: ResNet-18 on {data.partition(' (')[0]}"


def _numbers(setting: str, conditioning: str, record: Record, steps: int) -> Iterator[list[Any]]:
    trial = record.trial
    run = [setting, SETTINGS[setting].title, conditioning, trial.learning_rate, trial.get("damping", 0.0), trial.seed]
    for point in record.points:
        values = [point[name] for name in ("train_loss", "test_loss", "test_accuracy")]
        yield [*run, record.status, point["step"] // steps, point["step"], *values]


def summary(view: View) -> dict[str, Any]:
    """What the records say together: curves, the table of final accuracies, the choices, and the times of steps."""
    known, budget = cells(view), BUDGETS[view.scale.name]
    records = [record for cell in known.values() for record in cell.records]
    newest = max(records, key=lambda record: record.time)
    methods = [name for name in METHODS if any(known[setting, name].records for setting in SETTINGS)]
    about = view.store.about
    calls = about.get("calls") or [{"command": about.get("command", view.means.call.command)}]
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
        "title": f"{_title(newest.about['data'])}: test accuracy",
        "scale": view.scale.name,
        "command": calls[-1]["command"],
        "time": newest.time,
        **{key: newest.about[key] for key in ("commit", "versions", "machine")},
        "model": "ResNet-18" + (f" of width {resnet.SMALL_WIDTH}" if budget.small else ""),
        "data": newest.about["data"],
        "checksum": newest.about["checksum"],
        "arithmetic": newest.about["arithmetic"],
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
            | {
                "learning_rate": trial.learning_rate,
                "damping": trial.get("damping", 0.0),
                "seed": trial.seed,
                "steps": trial.steps,
            }
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
    settings = f"η {cell.chosen.learning_rate:g}" + (f", λ {damping:g}" if (damping := cell.chosen.get("damping")) else "")
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
    known = view.store.times()
    return {mode: known[mode] for mode in MODES if mode in known}


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
        damping = f"{cell.chosen.damping:g}" if cell.chosen.get("damping") else "–"
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
    summary=summary,
)
