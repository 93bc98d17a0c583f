"""Where an experiment's results lie: records, times of steps, and run.json, which says with what settings they were made.

OUT/<ID>/<scale>/records/        what was trained
OUT/<ID>/<scale>/run.json        settings, commands, seconds
OUT/<ID>/<scale>/steps-a.json    times of steps, for the panels that have an axis in seconds
OUT/<ID>/<scale>/figure.png, figure.svg, numbers.csv
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from isaac_lab.experiments import clock, recipe
from isaac_lab.experiments.recipe import Experiment, Outcome, Panel, Scale
from isaac_lab.progress import Update
from isaac_lab.records import write
from isaac_lab.store import Store, StoreError

__all__ = ["Folder", "Means", "View", "panels", "view"]

FORMAT = "isaac-newton reproduction"
VERSION = 1


@dataclass(frozen=True)
class Folder:
    """The results of one experiment at one scale."""

    directory: Path

    @property
    def store(self) -> Store:
        """Its records."""
        return Store(self.directory / "records")

    @property
    def about(self) -> dict[str, Any]:
        """What run.json says; raises `StoreError` for one that this version did not write."""
        path = self.directory / "run.json"
        if not path.exists():
            return {"format": FORMAT, "version": VERSION, "settings": [], "seeds": 0, "panels": {}}
        known = read_json(path)
        if known.get("format") != FORMAT or known.get("version") != VERSION:
            raise StoreError(f"{path} is not of a version that this isaac-newton reads; choose another directory")
        return known

    def note(self, about: Mapping[str, Any]) -> None:
        """Write run.json; whoever looks sees the old one or the new one."""
        self.directory.mkdir(parents=True, exist_ok=True)
        temporary = self.directory / "run.json.part"
        write(temporary, dict(about))
        temporary.replace(self.directory / "run.json")

    def steps(self, panel: str) -> Path:
        """The file with the times of a panel's steps."""
        return self.directory / f"steps-{panel}.json"


@dataclass(frozen=True)
class Means:
    """What an experiment that runs trials of its own takes from the command line.

    Args:
        data: Folder with data sets; None for the usual places.
        model: Folder or hub name of a pre-trained encoder; empty for the one that the scale says.
        seeds: Runs of each cell; 0 leaves it to the experiment.
        workers: Processes that train.
        command: How this was called, for the record.
        say: Called with what is being done now.
        progress: Called when one of the runs has ended.
    """

    data: Path | None = None
    model: str = ""
    seeds: int = 0
    workers: int = 1
    command: str = ""
    say: Callable[[str], object] = lambda what: None
    progress: Callable[[Update], None] = lambda update: None


@dataclass(frozen=True)
class View:
    """All that a figure or a claim is made from.

    Args:
        experiment: Of which experiment.
        scale: At which scale, with the seeds that were asked for.
        directory: For the figure.
        outcomes: The panels that have been run, whole.
        steps: By panel, the record of the times of its steps.
        about: By experiment whose records are used, its run.json.
        bench: Directory with records of benchmarks.
        device: "cpu" or "cuda": where a measurement that is made now runs.
        means: With what else it is made.
    """

    experiment: Experiment
    scale: Scale
    directory: Path
    outcomes: tuple[Outcome, ...]
    steps: Mapping[str, Mapping[str, Any]]
    about: Mapping[str, Mapping[str, Any]]
    bench: Path = Path("results/bench")
    device: str = "cpu"
    means: "Means" = field(default_factory=lambda: Means())

    def outcome(self, panel: str) -> Outcome | None:
        """Of this panel, if it has been run."""
        return next((outcome for outcome in self.outcomes if outcome.panel.name == panel), None)

    def seconds_per_step(self, panel: str) -> dict[str, float]:
        """By group; empty where they were not measured."""
        return clock.seconds_per_step(self.steps[panel]) if panel in self.steps else {}


def panels(experiment: Experiment, out: Path, scale: Scale) -> list[tuple[Panel, Folder, Scale, Sequence[str]]]:
    """The experiment's panels as they were run: with their folders, and the seeds and settings found there."""
    result = []
    for name in [panel.name for panel in experiment.panels(scale)]:
        home = next(panel.home for panel in experiment.panels(scale) if panel.name == name)
        folder = Folder(out / home / scale.name)
        about = folder.about
        own = replace(scale, all_seeds=about["seeds"])
        panel = next(panel for panel in experiment.panels(own) if panel.name == name)
        result.append((recipe.selected([panel], about["settings"])[0], folder, own, about["settings"]))
    return result


def view(experiment: Experiment, out: Path, scale: Scale, **more: Any) -> View:
    """What is there of an experiment; raises `StoreError` where it cannot be read."""
    outcomes, steps, about, found = [], {}, {}, {}
    for panel, folder, own, settings in panels(experiment, out, scale):
        if panel.home not in found:
            found[panel.home] = {record.config.key: record for record in folder.store.records()}
            about[panel.home] = folder.about
        outcome = recipe.outcome(panel, own, found[panel.home], settings)
        if outcome is not None:
            outcomes.append(outcome)
            if folder.steps(panel.name).exists():
                steps[panel.name] = read_json(folder.steps(panel.name))
    return View(experiment, scale, out / experiment.id / scale.name, tuple(outcomes), steps, about, **more)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file; one that is damaged is named."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot read {path}: {error}") from None
    if not isinstance(known, dict):
        raise StoreError(f"{path} is not a record")
    return known
