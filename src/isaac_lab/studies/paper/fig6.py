"""Figure 6: ResNet-18 on CIFAR-10 with and without momentum and weight decay; ζ* in the last layer, and in all layers.

Learning rate and damping are chosen in two rounds, with as many trials for each method. Short ones find both, by their training
loss. What is best after so few epochs is often too small a rate for a whole run, so that the first seed is run whole with that
rate and with larger ones; the best by what the figure shows, the test accuracy, is run with the other seeds. What is drawn
follows from the records alone, however many of them there are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

from isaac_lab import times
from isaac_lab.record import Record
from isaac_lab.records import StoreError
from isaac_lab.stats import against, sample
from isaac_lab.studies.calls import calling, trainer
from isaac_lab.studies.paper.folder import View
from isaac_lab.studies.paper.images import BUDGETS, CHANCE, LARGER, Budget, Cell, arms
from isaac_lab.studies.paper.images import METHODS as METHODS
from isaac_lab.studies.paper.images import SETTINGS as SETTINGS
from isaac_lab.studies.paper.recipe import Experiment
from isaac_lab.study import Arm, Result, resolve, settle
from isaac_lab.trial import Trial
from isaac_lab.workload import load
from isaac_lab.workloads import resnet

MODES = ("eager", "captured")
#: Of the steps that are timed. Small, so that thousands of them on a few batches leave the activations about as they were.
TIMED_RATE, TIMED_DAMPING = 0.001, 1.0


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
    budget, seeds, store = BUDGETS[view.scale.name], _seeds(view), view.store
    call = view.means.call
    executor = "processes" if call.workers > 1 and not budget.small else "local"
    means = replace(view.means, call=replace(call, executor=executor))
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
    base = Trial(resnet.NAME, "momentum", schedule="cosine", small=budget.small)
    base = base.having(learning_rate=TIMED_RATE, weight_decay=SETTINGS["a"].weight_decay)
    trials = {name: method.on(base, TIMED_DAMPING) for name, method in METHODS.items()}
    options = {"device": call.device, "captured": mode == "captured", "rounds": budget.rounds, "folder": call.folder}
    store.add_times(mode, {**times.measure(trials, **options), "command": call.command})  # type: ignore[arg-type]


def _epochs(number: int) -> str:
    return "1 epoch" if number == 1 else f"{number} epochs"


def _title(data: str) -> str:
    return f"Figure 6: ResNet-18 on {data.partition(' (')[0]}"


def _newest(view: View, known: Mapping[tuple[str, str], Cell]) -> Record:
    records = [record for cell in known.values() for record in cell.records]
    if not records:
        command = f"isaac-newton reproduce fig6 --scale {view.scale.name}"
        raise StoreError(f"there is no run of fig6 in {view.directory}; {command} trains it")
    return max(records, key=lambda record: record.time)


def summary(view: View) -> dict[str, Any]:
    """What the records say together: curves, the table of final accuracies, the choices, and the times of steps."""
    known, budget = cells(view), BUDGETS[view.scale.name]
    newest = _newest(view, known)
    methods = [name for name in METHODS if any(known[setting, name].records for setting in SETTINGS)]
    about = view.store.about
    calls = about.get("calls") or [{"command": about.get("command", view.means.call.command)}]
    columns = [setting.title for setting in SETTINGS.values()]
    rows = [
        {
            "name": name,
            "label": METHODS[name].label,
            "ours": name != "none",
            "cells": [shown_cell(known[setting, name]) for setting in SETTINGS],
        }
        for name in methods
    ]
    return {
        "title": f"{_title(newest.about['data'])}: test accuracy",
        "scale": view.scale.name,
        "command": calls[-1]["command"],
        "time": newest.time,
        **{key: newest.about[key] for key in ("commit", "versions", "machine")},
        "model": "ResNet-18" + (f" of width {resnet.SMALL_WIDTH}" if budget.small else ""),
        "data": newest.about["data"],
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
        "times": {
            mode: {"methods": {own["name"]: own for own in record["methods"]}, "machine": record["machine"]}
            for mode, record in times_of(view).items()
        },
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


def shown_cell(cell: Cell) -> dict[str, Any] | None:
    """The final accuracies of a method in a setting; None where there are none."""
    if cell.chosen is None or not cell.records:
        return None
    found = sample([row[-1] for row in cell.accuracies()])
    settings = f"η {cell.chosen.learning_rate:g}" + (f", λ {damping:g}" if (damping := cell.chosen.get("damping")) else "")
    settings += f", {cell.diverged} diverged" if cell.diverged else ""
    return found | {"diverged": cell.diverged, "settings": settings}


def times_of(view: View) -> dict[str, dict[str, Any]]:
    """By mode, the record of the times of steps."""
    known = view.store.times()
    return {mode: known[mode] for mode in MODES if mode in known}


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
    for mode, record in times_of(view).items():
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


EXPERIMENT = Experiment(
    "fig6",
    "Figure 6",
    "ResNet-18 on CIFAR-10 with and without momentum and weight decay, ζ* in the last layer and in all",
    executor="local",
    measure=measure,
    summary=summary,
)
