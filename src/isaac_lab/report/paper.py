"""The paper's figures and tables as files and on a terminal: which picture and which table each experiment has."""

from collections.abc import Callable, Mapping

from isaac_lab.charts.draw import pictures
from isaac_lab.charts.figure import Figure
from isaac_lab.record import Store
from isaac_lab.report import costs, curves, grids, larger
from isaac_lab.report.tables import Table
from isaac_lab.studies import numbers
from isaac_lab.studies.paper import tab2
from isaac_lab.studies.paper.folder import View

__all__ = ["figure", "stores", "table", "write"]

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
    """Of an experiment without panels, where there is one."""
    if view.experiment.id == "fig6":
        return larger.accuracies(view)
    return larger.fine_tuned(summary(view)) if view.experiment.id == "tab1" else None


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
