"""The paper's figures and tables as files, on a terminal and on pages: what each experiment has."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from isaac_lab.charts.draw import pictures
from isaac_lab.charts.figure import Figure
from isaac_lab.claims.evidence import Evidence
from isaac_lab.record import Record, Store
from isaac_lab.report import costs, curves, grids, larger, parts
from isaac_lab.report.parts import Block, Heading, Notes, Section, Source, missing
from isaac_lab.report.tables import Table
from isaac_lab.report.tables import table as made
from isaac_lab.report.views import calls_of, setting, source
from isaac_lab.studies import numbers
from isaac_lab.studies.paper import EXPERIMENTS, tab2
from isaac_lab.studies.paper.folder import View
from isaac_lab.studies.paper.recipe import final_loss
from isaac_lab.words import damping

Summary = Mapping[str, Any]

HEADING = "Table 2: time and memory of a step, relative to the plain gradient step"
#: Of a view and, where an experiment has no panels, its summary.
FIGURES: Mapping[str, Callable[[View, Summary], Figure]] = {
    **dict.fromkeys(grids.FIGURES, lambda view, about: grids.figure(view)),
    **dict.fromkeys(curves.FIGURES, lambda view, about: curves.figure(view)),
    "fig6": lambda view, about: larger.courses(about),
    "tab1": lambda view, about: larger.scores(about),
    "tab2": lambda view, about: costs.both(tab2.records(view), heading=HEADING),
}
#: The numbers behind a figure.
TABLES: Mapping[str, Callable[[View, Summary], list[Table]]] = {
    **dict.fromkeys(grids.FIGURES, lambda view, about: grids.tables(view)),
    **dict.fromkeys(curves.FIGURES, lambda view, about: curves.tables(view)),
    **dict.fromkeys(("fig6", "tab1"), lambda view, about: [larger.settings(about)]),
}


def figure(view: View) -> Figure:
    """What an experiment shows; raises `StoreError` where there is no run of it."""
    return FIGURES[view.experiment.id](view, summary(view))


def summary(view: View) -> Summary:
    """Of an experiment without panels."""
    return view.experiment.summary(view) if view.experiment.summary else {}


def table(view: View, about: Summary | None = None) -> Table | None:
    """Of the best run of each group; of an experiment without panels its own table, where there is one."""
    if view.outcomes:
        return _best(view)
    if view.experiment.id == "fig6":
        return larger.accuracies(view)
    return larger.fine_tuned(about or summary(view)) if view.experiment.id == "tab1" else None


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
            rows.append((outcome.panel.name, name, *cells))
    note = "The run of each group with the lowest final training loss. Rate: chosen by short runs."
    return made(columns, rows, columns[:2], note=note)


def _accuracy(record: Record) -> str:
    found = record.points[-1].get("test_accuracy") if record.points else None
    return "–" if found is None else f"{found:.2%}"


def trained(view: View) -> list[str]:
    """What the training of each panel took, over all calls."""
    found = []
    for outcome in view.outcomes:
        calls = [call for call in calls_of(view, outcome) if "panel" in call]
        hows = [" on ".join(call[key] for key in ("executor", "device") if key in call) for call in calls]
        if calls:
            runs, seconds = (sum(call[key] for call in calls) for key in ("runs", "seconds"))
            found.append(
                f"Panel {outcome.panel.name}: {runs} runs trained in {seconds:.1f} s ({', '.join(dict.fromkeys(hows))})."
            )
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


def blocks(view: View, about: Summary, directory: str) -> list[Block]:
    """An experiment on a page, as it was run at one scale; `directory` is what the page calls the folder of all."""
    name, scale = view.experiment.id, view.scale.name
    tables = tuple(TABLES[name](view, about))
    shown = parts.Figure(FIGURES[name](view, about), f"{name}-{scale}", tables, small=name not in curves.FIGURES)
    if view.outcomes:
        timed = " Seconds are steps × the time of a step, measured alone on one CPU thread." if view.steps else ""
        return [f"{setting(view)}.{timed}", shown, Notes(tuple(trained(view))), source(view, directory)]
    own, where = table(view, about), Source.of([f"{directory}/{name}/{scale}"], [about])
    return [f"{about['model']} · scale “{scale}”.", shown, *([own] if own else []), Notes(tuple(about["notes"])), where]


def views(evidence: Evidence, id: str) -> list[View]:
    """What there is of an experiment at each scale that counts."""
    return [view for view in evidence.views(id) if view.outcomes or evidence.summary(id, view.scale.name)]


#: Of the HTML page: which experiments each shows.
SECTIONS = {"grids": tuple(grids.FIGURES), "curves": tuple(curves.FIGURES), "larger": ("tab1", "fig6")}


def section(id: str, evidence: Evidence, directory: str) -> Section:
    """Of the HTML page: these experiments at every scale; curves at the largest one that has all of them."""
    found: list[Block] = []
    for name in SECTIONS[id]:
        experiment, known = EXPERIMENTS[name], views(evidence, name)
        if id == "curves":
            known = [view for view in known if curves.is_whole(view)][:1]
        found.append(Heading(f"{id}-{name}".lower(), f"{experiment.name}: {experiment.shows}"))
        found += [] if known else [missing(experiment.name, f"reproduce {name} --scale quick")]
        for view in known:
            found += blocks(view, evidence.summary(name, view.scale.name), directory)
    return Section.of(id, found)
