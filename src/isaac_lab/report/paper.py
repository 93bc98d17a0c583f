"""The paper's figures and tables as files and on a terminal: which picture and which table each experiment has."""

import math
from collections.abc import Callable, Mapping

from isaac_lab.charts.draw import pictures
from isaac_lab.charts.figure import Figure
from isaac_lab.record import Record, Store
from isaac_lab.report import costs, curves, grids, larger
from isaac_lab.report.tables import Row, Table
from isaac_lab.report.views import calls_of
from isaac_lab.studies import numbers
from isaac_lab.studies.paper import tab2
from isaac_lab.studies.paper.folder import View
from isaac_lab.studies.paper.recipe import final_loss
from isaac_lab.words import damping

HEADING = "Table 2: time and memory of a step, relative to the plain gradient step"
FIGURES: Mapping[str, Callable[[View], Figure]] = {
    **dict.fromkeys(grids.TITLES, grids.figure),
    **dict.fromkeys(curves.FIGURES, curves.figure),
    "fig6": lambda view: larger.courses(summary(view)),
    "tab1": lambda view: larger.scores(summary(view)),
    "tab2": lambda view: costs.both(tab2.records(view), heading=HEADING),
}


def figure(view: View) -> Figure:
    """What an experiment shows; raises `StoreError` where there is no run of it."""
    return FIGURES[view.experiment.id](view)


def summary(view: View) -> dict[str, object]:
    """Of an experiment without panels."""
    return view.experiment.summary(view) if view.experiment.summary else {}


def table(view: View) -> Table | None:
    """Of the best run of each group; of an experiment without panels its own table, where there is one."""
    if view.outcomes:
        return _best(view)
    if view.experiment.id == "fig6":
        return larger.accuracies(view)
    return larger.fine_tuned(summary(view)) if view.experiment.id == "tab1" else None


def _best(view: View) -> Table:
    """Where the best run of each group ended, its learning rate, and how many diverged."""
    accuracy = any(r.points and r.points[-1].get("test_accuracy") is not None for o in view.outcomes for r in o.all())
    columns = ("Panel", "Group", "Rate", "λ_a", "λ_g", "Train\nloss", *(["Test\nacc."] if accuracy else []), "Diverged")
    rows = []
    for outcome in view.outcomes:
        for name, records in outcome.records.items():
            rate = outcome.rates[name]
            cells = ["–"] * (len(columns) - 3) + ["at every rate"]
            if records and rate is not None:
                best = min(records, key=final_loss)
                cells = [f"{rate:g}", damping(best.trial.damping), damping(best.trial.output_damping)]
                cells.append("–" if math.isinf(final_loss(best)) else f"{final_loss(best):.3g}")
                cells += [_accuracy(best)] if accuracy else []
                cells.append(f"{sum(not record.finished for record in records)} of {len(records)}")
            rows.append(Row((outcome.panel.name, name, *cells)))
    note = "The run of each group with the lowest final training loss. Rate: chosen by short runs."
    return Table("", columns, tuple(rows), frozenset({0, 1}), note)


def _accuracy(record: Record) -> str:
    found = record.points[-1].get("test_accuracy") if record.points else None
    return "–" if found is None else f"{found:.2%}"


def trained(view: View) -> list[str]:
    """What the training of each panel took, over all calls."""
    found = []
    for outcome in view.outcomes:
        calls = [call for call in calls_of(view, outcome) if "panel" in call]
        how = ", ".join(dict.fromkeys(f"{call['executor']} on {call['device']}" for call in calls if "device" in call))
        if calls:
            runs, seconds = (sum(call[key] for call in calls) for key in ("runs", "seconds"))
            found.append(f"Panel {outcome.panel.name}: {runs} runs trained in {seconds:.1f} s ({how}).")
    return found


def stores(view: View) -> list[Store]:
    """Where its records are; figures that show another's runs use that one's."""
    homes = [view.directory.parent.parent / home / view.scale.name for home in view.about or [view.experiment.id]]
    return [store for home in homes if (store := Store(home)).path.exists()]


def write(view: View) -> None:
    """The picture, and every measurement as numbers.csv."""
    shown = figure(view)
    view.directory.mkdir(parents=True, exist_ok=True)
    if records := [record for store in stores(view) for record in store.records()]:
        numbers.write(view.directory / "numbers.csv", records)
    pictures(shown, view.directory / "figure")
