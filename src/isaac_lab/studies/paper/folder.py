"""Where an experiment's records and figure are, and what they say together.

OUT/<ID>/<scale>/trials.jsonl    the runs; figures that show another's runs use that one's records
OUT/<ID>/<scale>/times.jsonl     times of steps, for what has an axis in seconds
OUT/<ID>/<scale>/about.json      settings, and the calls that trained: command, machine, runs, seconds
OUT/<ID>/<scale>/figure.png, figure.svg, numbers.csv
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from isaac_lab.record import Store
from isaac_lab.studies.calls import Means
from isaac_lab.studies.paper import recipe
from isaac_lab.studies.paper.recipe import Experiment, Outcome, Scale
from isaac_lab.times import MODES, seconds


@dataclass(frozen=True)
class View:
    """All that a figure or a claim is made from."""

    experiment: Experiment
    scale: Scale  # with the seeds that were asked for
    directory: Path  # of the figure
    outcomes: tuple[Outcome, ...]  # of the panels that have been run, whole
    steps: Mapping[str, Mapping[str, Any]]  # by panel, the record of the times of its steps
    about: Mapping[str, Mapping[str, Any]]  # by experiment whose records are used, its about.json
    bench: Path = Path("results/bench")  # directory with records of benchmarks
    means: Means = field(default_factory=Means)  # with what is trained and measured now

    @property
    def store(self) -> Store:
        """The experiment's own records."""
        return Store(self.directory)

    @property
    def times(self) -> dict[str, dict[str, Any]]:
        """By mode, what is known of the times of steps, by method."""
        known = self.store.times()
        return {
            mode: {**known[mode], "methods": {own["name"]: own for own in known[mode]["methods"]}}
            for mode in MODES
            if mode in known
        }

    def outcome(self, panel: str) -> Outcome | None:
        """Of this panel, if it has been run."""
        return next((outcome for outcome in self.outcomes if outcome.panel.name == panel), None)

    def seconds_per_step(self, panel: str) -> dict[str, float]:
        """By group; empty where they were not measured."""
        return seconds(self.steps[panel]) if panel in self.steps else {}


def view(experiment: Experiment, out: Path, scale: Scale, **more: Any) -> View:
    """What is there of an experiment, as it was run, with the seeds and settings then; raises `StoreError`."""
    outcomes: list[Outcome] = []
    steps: dict[str, dict[str, Any]] = {}
    stores = {panel.home: Store(out / panel.home / scale.name) for panel in experiment.panels(scale)}
    about = {home: store.about for home, store in stores.items()}
    for place, home in enumerate(panel.home for panel in experiment.panels(scale)):
        own, settings = replace(scale, all_seeds=about[home].get("seeds", 0)), about[home].get("settings", [])
        # A panel that was run whole when trials of one length chose its rates counts, until it has been run again.
        for then in dict.fromkeys([own, replace(own, halving=False)]):
            (panel,) = recipe.selected([experiment.panels(then)[place]], settings)
            if (outcome := recipe.outcome(panel, then, stores[home], settings)) is not None:
                outcomes.append(outcome)
                if panel.clocked and (timed := stores[home].times().get(f"steps-{panel.name}")):
                    steps[panel.name] = timed
                break
    return View(experiment, scale, out / experiment.id / scale.name, tuple(outcomes), steps, about, **more)
