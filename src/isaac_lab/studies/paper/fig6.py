"""Figure 6: ResNet-18 on CIFAR-10 with and without momentum and weight decay; ζ* in the last layer, and in all layers.

Learning rate and damping are chosen in two rounds, with as many trials for each method. Short ones find both, by their training
loss. What is best after so few epochs is often too small a rate for a whole run, so that the first seed is run whole with that
rate and with larger ones; the best by what the figure shows, the test accuracy, is run with the other seeds. What is drawn
follows from the records alone, however many of them there are.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from statistics import fmean, stdev
from typing import Any

from isaac_lab.data.files import SETS
from isaac_lab.record import Record
from isaac_lab.records import StoreError
from isaac_lab.stats import against
from isaac_lab.studies.calls import train
from isaac_lab.studies.paper import larger
from isaac_lab.studies.paper.folder import View
from isaac_lab.studies.paper.larger import Method
from isaac_lab.studies.paper.recipe import Experiment
from isaac_lab.study import Arm, Result, Search, decides, resolve
from isaac_lab.times import MODES
from isaac_lab.trial import Trial
from isaac_lab.workload import load
from isaac_lab.workloads import resnet

#: Of a network that says nothing: what a run that diverged counts as.
CHANCE = 0.1
#: Learning rates that are run whole at the first seed, over that of the best short trial.
LARGER = (1, 3, 10)
#: Of the steps that are timed. Small, so that thousands of them on a few batches leave the activations about as they were.
TIMED_RATE, TIMED_DAMPING = 0.001, 1.0

#: By conditioning; the paper has the first two.
METHODS: Mapping[str, Method] = {
    "none": Method("∇", plain=True),
    "last": Method("ζ*, last layer", (("layers", "last"),)),
    "reduce": Method("ζ*, all layers, reduce", (("sharing", "reduce"),)),
    "max_rows": Method("ζ*, all layers, 256 rows", (("max_rows", 256),)),
}


@dataclass(frozen=True)
class Setting:
    """A panel: its optimizer, the weight decay of all parameters, and the panel whose short trials are this one's too."""

    title: str
    optimizer: str
    weight_decay: float
    tuned_as: str


#: The paper's, in its order. Weight decay does nothing yet in a short trial.
SETTINGS: Mapping[str, Setting] = {
    "a": Setting("momentum and weight decay", "momentum", 5e-4, "b"),
    "b": Setting("momentum only", "momentum", 0.0, "b"),
    "c": Setting("plain SGD", "sgd", 0.0, "c"),
}


@dataclass(frozen=True)
class Budget(larger.Budget):
    """How much is trained at a scale; the cosine schedule goes over all epochs."""

    _: KW_ONLY
    trial_epochs: int
    methods: Sequence[str]
    small: bool = False

    @property
    def steps(self) -> int:
        """Of an epoch."""
        return resnet.SMALL_TRAIN // resnet.SMALL_BATCH if self.small else SETS["cifar-10"].examples[0] // resnet.ResNet.batch

    def candidates(self, setting: str, conditioning: str) -> tuple[Trial, ...]:
        """The short trials of a method in the setting whose short trials decide, the largest learning rates first."""
        # What a trial is like on the way decides nothing.
        base = replace(self._trial(SETTINGS[setting].tuned_as, self.trial_epochs), points=1)
        return self.tried(base, METHODS[conditioning])

    def compared(self, setting: str, first: Trial) -> tuple[Trial, ...]:
        """The first run with the rate and the damping of the best short trial, and with larger rates."""
        rates = [float(f"{factor * first.learning_rate:.3g}") for factor in LARGER]
        return tuple(self.runs(setting, first.having(learning_rate=rate), 1)[0] for rate in rates)

    def runs(self, setting: str, chosen: Trial, seeds: int) -> tuple[Trial, ...]:
        """What the figure shows of a method: the rate and the damping of the trial that was chosen, from other seeds."""
        own = replace(self._trial(setting, self.epochs).having(**dict(chosen.settings)), method=chosen.method)
        return tuple(replace(own, seed=number) for number in range(1, seeds + 1))

    def _trial(self, setting: str, epochs: int) -> Trial:
        own, steps = SETTINGS[setting], epochs * self.steps
        base = Trial(resnet.NAME, own.optimizer, schedule="cosine", steps=steps, points=epochs, small=self.small)
        return base.having(weight_decay=own.weight_decay or None)


BUDGETS: Mapping[str, Budget] = {scale: Budget(**own, small=scale == "smoke") for scale, own in larger.KNOWN["fig6"].items()}


def arms(budget: Budget, seeds: int) -> dict[tuple[str, str], Arm]:
    """By setting and conditioning: short trials, then the first seed with several rates, then all seeds."""

    def arm(setting: str, name: str) -> Arm:
        return Arm(
            f"{setting}/{name}",
            lambda best: () if best is None else budget.runs(setting, best, seeds),
            (
                Search(lambda _: budget.candidates(setting, name), decides("train_loss")),
                Search(lambda found: budget.compared(setting, found.best) if found and found.best else (), _error),
            ),
        )

    return {(setting, name): arm(setting, name) for setting in SETTINGS for name in METHODS}


def _error(record: Record) -> float:
    """The share of the test images that a run gets wrong at its end."""
    accuracy = record.final("test_accuracy")
    return math.inf if math.isinf(accuracy) else 1 - accuracy


def cells(view: View) -> dict[tuple[str, str], Result]:
    """By setting and conditioning, what the records say.

    Until larger rates have been run, what the short trials chose is what there is.
    """
    store = view.store
    return {name: resolve(arm, store) for name, arm in arms(BUDGETS[view.scale.name], _seeds(view)).items()}


def accuracies(runs: Sequence[Record]) -> list[list[float]]:
    """Test accuracy after each epoch, a row for each run; that of chance from where one diverged."""
    rows = []
    for record in runs:
        # The last point of a run that diverged is what ended it.
        points = record.points if record.finished else record.points[:-1]
        known = {point["step"]: point["test_accuracy"] for point in points}
        rows.append([known.get(step, CHANCE) for step in record.trial.measured()[1:]])
    return rows


def _seeds(view: View) -> int:
    """Those asked for, else those of the records, else the scale's."""
    return int(view.means.seeds or view.store.about.get("seeds", 0) or BUDGETS[view.scale.name].seeds)


def measure(view: View) -> None:
    """Time the steps, run the short trials, then in each setting the first seed with several rates, and the other seeds."""
    budget, seeds = BUDGETS[view.scale.name], _seeds(view)
    means = larger.by_processes(view.means, view.means.call.command, small=budget.small)
    # Data that are missing or corrupt are said before anything is written.
    load(budget.candidates("c", "none")[0], device=means.call.device, folder=means.call.folder)
    means.say(_plan(budget, seeds))
    base = Trial(resnet.NAME, "momentum", schedule="cosine", small=budget.small)
    base = base.having(learning_rate=TIMED_RATE, weight_decay=SETTINGS["a"].weight_decay)
    steps = {name: method.on(base, TIMED_DAMPING) for name, method in METHODS.items()}
    every, names = arms(budget, seeds), budget.methods
    short = [Arm(arm.name, lambda best: (), arm.search[:1]) for (_, name), arm in every.items() if name in names]
    stages = [(f"fig6: trials of {_epochs(budget.trial_epochs)}", short)]
    # What leaves most where it is cut off: one setting after the other, all methods of it, but the slowest at the end.
    for late in (False, True):
        for setting in SETTINGS:
            own = [every[setting, name] for name in names if (name == "max_rows") is late]
            stages.append((f"fig6: ({setting}) runs of {_epochs(budget.epochs)}", own))
    about = {"id": "fig6", "scale": view.scale.name, "seeds": seeds}
    with means.writing(store := view.store):
        larger.clocks("fig6", dict.fromkeys(MODES, steps), budget.rounds, store, means, command=means.call.command)
        train(stages, store, means, about)


def _plan(budget: Budget, seeds: int) -> str:
    kinds = len({setting.tuned_as for setting in SETTINGS.values()}) * len(budget.methods)
    trials, steps = kinds * len(budget.candidates("c", "none")), budget.steps * budget.trial_epochs
    # One of the rates that are compared is chosen: its first run is one of the others too.
    runs, whole = len(SETTINGS) * len(budget.methods) * (len(LARGER) + seeds - 1), budget.steps * budget.epochs
    text = f"trials, {trials} of {steps:,} steps; runs, {runs} of {whole:,} steps; {trials * steps + runs * whole:,} steps"
    return f"fig6: {text} in all; what is there already is used"


def _epochs(number: int) -> str:
    return "1 epoch" if number == 1 else f"{number} epochs"


def summary(view: View) -> dict[str, Any]:
    """What the records say together: curves, the table of final accuracies, the choices, and the times of steps."""
    known, small = cells(view), BUDGETS[view.scale.name].small
    newest = max((record for cell in known.values() for record in cell.runs), key=lambda record: record.time, default=None)
    if newest is None:
        command = f"isaac-newton reproduce fig6 --scale {view.scale.name}"
        raise StoreError(f"there is no run of fig6 in {view.directory}; {command} trains it")
    methods = [name for name in METHODS if any(known[setting, name].runs for setting in SETTINGS)]
    columns = [setting.title for setting in SETTINGS.values()]
    rows = [METHODS[name].row(name, [shown_cell(known[setting, name]) for setting in SETTINGS]) for name in methods]
    panels = [
        {"name": setting, "title": own.title, "curves": curves}
        for setting, own in SETTINGS.items()
        if (curves := [_curve(name, known[setting, name].runs) for name in methods if known[setting, name].runs])
    ]
    return {
        "title": f"Figure 6: ResNet-18 on {newest.about['data'].partition(' (')[0]}: test accuracy",
        "scale": view.scale.name,
        "command": view.store.about["calls"][-1]["command"],
        "time": newest.time,
        **{key: newest.about[key] for key in ("commit", "versions", "machine")},
        "model": "ResNet-18" + (f" of width {resnet.SMALL_WIDTH}" if small else ""),
        "data": newest.about["data"],
        "quantity_title": "Test accuracy",
        "panels": panels,
        "columns": columns,
        "rows": rows,
        "times": view.times,
        "notes": [*_notes(view, known, methods), *(against(rows, columns) if methods[:1] == ["none"] else [])],
    }


def _curve(name: str, runs: Sequence[Record]) -> dict[str, Any]:
    columns = list(zip(*accuracies(runs), strict=True))
    return {
        "name": name,
        "label": METHODS[name].label,
        "epochs": list(range(1, 1 + len(columns))),
        "mean": [fmean(column) for column in columns],
        "std": [stdev(column) for column in columns] if len(runs) > 1 else None,
        "n": len(runs),
    }


def shown_cell(own: Result) -> dict[str, Any] | None:
    """The final accuracies of a method in a setting; None where there are none."""
    if own.best is None or not own.runs:
        return None
    return larger.cell([row[-1] for row in accuracies(own.runs)], own.best, sum(not record.finished for record in own.runs))


def _notes(view: View, known: Mapping[tuple[str, str], Result], methods: Sequence[str]) -> list[str]:
    budget, say = BUDGETS[view.scale.name], larger.KNOWN["notes"]["fig6"]
    number, epochs = len(budget.candidates("c", "none")), _epochs(budget.trial_epochs)
    notes = [say["chosen"].format(trials=number, epochs=epochs, larger=", ".join(map(str, LARGER))), say["seen"]]
    compared = {name: [trial.learning_rate for round_ in own.tried[1:] for trial in round_] for name, own in known.items()}
    edges = [
        f"({setting}) {METHODS[name].label} {own.best.learning_rate:g}"
        for (setting, name), own in known.items()
        if own.best is not None and len(rates := compared[setting, name]) == len(LARGER)
        if own.best.learning_rate in (min(rates), max(rates))
    ]
    early = [setting for (setting, name), own in known.items() if own.runs and len(compared[setting, name]) < len(LARGER)]
    where = " and in ".join(SETTINGS[setting].title for setting in dict.fromkeys(early))
    lost = sum(not record.finished for own in known.values() for record in own.runs)
    notes += [say["edges"].format(edges=", ".join(edges))] if edges else []
    notes += [say["early"].format(count=len(early), where=where)] if early else []
    notes += [say["lost"].format(lost=lost, chance=CHANCE)] if lost else []
    for mode, record in view.times.items():
        text = larger.ratios(record, METHODS, "{label} {median:.3f} ({low:.3f}–{high:.3f})")
        text += "".join(f"; {METHODS[name].label}: {reason}" for name, reason in record["left_out"].items())
        where = record["machine"].get("gpu") or record["machine"]["cpu"] or "CPU"
        notes.append(say["times"].format(mode=mode, where=where, text=text))
    return notes if "max_rows" in methods else [*notes, say["rows"]]


FIG6 = Experiment(
    "fig6",
    "Figure 6",
    "ResNet-18 on CIFAR-10 with and without momentum and weight decay, ζ* in the last layer and in all",
    measure=measure,
    summary=summary,
)
