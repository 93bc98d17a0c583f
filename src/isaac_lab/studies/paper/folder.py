"""Where an experiment's records and figure are, and what they say together.

OUT/<ID>/<scale>/trials.jsonl    the runs; figures that show another's runs use that one's records
OUT/<ID>/<scale>/times.jsonl     times of steps, for what has an axis in seconds
OUT/<ID>/<scale>/about.json      settings, and the calls that trained: command, machine, runs, seconds
OUT/<ID>/<scale>/figure.png, figure.svg, numbers.csv
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from isaac_lab.record import Store
from isaac_lab.studies.calls import Means
from isaac_lab.studies.paper import recipe
from isaac_lab.studies.paper.recipe import Experiment, Outcome, Panel, Scale
from isaac_lab.times import seconds


@dataclass(frozen=True)
class View:
    """All that a figure or a claim is made from.

    Args:
        experiment: Of which experiment.
        scale: At which scale, with the seeds that were asked for.
        directory: For the figure.
        outcomes: The panels that have been run, whole.
        steps: By panel, the record of the times of its steps.
        about: By experiment whose records are used, its about.json.
        bench: Directory with records of benchmarks.
        means: With what is trained and measured now.
    """

    experiment: Experiment
    scale: Scale
    directory: Path
    outcomes: tuple[Outcome, ...]
    steps: Mapping[str, Mapping[str, Any]]
    about: Mapping[str, Mapping[str, Any]]
    bench: Path = Path("results/bench")
    means: Means = field(default_factory=Means)

    @property
    def store(self) -> Store:
        """The experiment's own records."""
        return Store(self.directory)

    def outcome(self, panel: str) -> Outcome | None:
        """Of this panel, if it has been run."""
        return next((outcome for outcome in self.outcomes if outcome.panel.name == panel), None)

    def seconds_per_step(self, panel: str) -> dict[str, float]:
        """By group; empty where they were not measured."""
        return seconds(self.steps[panel]) if panel in self.steps else {}


def panels(experiment: Experiment, out: Path, scale: Scale) -> list[tuple[Panel, Store, Scale, Sequence[str]]]:
    """The experiment's panels as they were run: with their stores, and the seeds and settings found there."""
    result = []
    stores: dict[str, Store] = {}
    for name, home in [(panel.name, panel.home) for panel in experiment.panels(scale)]:
        store = stores.setdefault(home, Store(out / home / scale.name))
        about = store.about
        settings = about.get("settings", [])
        own = replace(scale, all_seeds=about.get("seeds", 0))
        panel = next(panel for panel in experiment.panels(own) if panel.name == name)
        result.append((recipe.selected([panel], settings)[0], store, own, settings))
    return result


def view(experiment: Experiment, out: Path, scale: Scale, **more: Any) -> View:
    """What is there of an experiment; raises `StoreError` where it cannot be read."""
    outcomes: list[Outcome] = []
    steps: dict[str, dict[str, Any]] = {}
    about: dict[str, dict[str, Any]] = {}
    for panel, store, own, settings in panels(experiment, out, scale):
        about.setdefault(panel.home, store.about)
        outcome = recipe.outcome(panel, own, store, settings)
        if outcome is not None:
            outcomes.append(outcome)
            timed = store.times() if panel.clocked else {}
            if f"steps-{panel.name}" in timed:
                steps[panel.name] = timed[f"steps-{panel.name}"]
    return View(experiment, scale, out / experiment.id / scale.name, tuple(outcomes), steps, about, **more)
