"""Run an experiment: train what is not there yet, time the steps, write down how, and draw."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from isaac_lab import executors
from isaac_lab.charts.draw import pictures
from isaac_lab.config import Config, ConfigError
from isaac_lab.data.sets import load
from isaac_lab.experiments import clock, recipe
from isaac_lab.experiments.folder import Folder, Means, View, view
from isaac_lab.experiments.recipe import SCALES, Experiment, Panel, Scale
from isaac_lab.progress import Update
from isaac_lab.records import origin, write
from isaac_lab.store import Record, Store, StoreError

__all__ = ["NothingToDrawError", "Request", "UnknownPanelError", "chosen", "draw", "run"]


class NothingToDrawError(Exception):
    """No panel has been run, whole."""


class UnknownPanelError(Exception):
    """A panel that the experiment does not have."""


@dataclass(frozen=True)
class Request:
    """What the command line asks for.

    Args:
        scale: A key of `SCALES`.
        out: Directory for all experiments.
        data: Folder with data sets; None for the usual places.
        executor: What trains; empty for what suits the experiment.
        device: "cpu" or "cuda".
        resume: Leave out what is there; otherwise none of the runs may be.
        panels: Names of panels; none for all.
        seeds: Runs of each cell; 0 leaves it to the experiment.
        settings: "field=value" for every run.
        bench: Directory with records of benchmarks, for Table 2.
        model: Folder or hub name of a pre-trained encoder, for Table 1.
        workers: Of the executor `processes`.
        tensor_cores: Let a GPU multiply in TF32.
        copies: The most networks of an ensemble.
        checkpoint_every: So many epochs lie between checkpoints.
        command: How this was called, for the record.
        say: Called with what is being done now.
        progress: Called after each epoch.
    """

    scale: str = "smoke"
    out: Path = Path("results/reproduce")
    data: Path | None = None
    executor: str = ""
    device: str = "cpu"
    resume: bool = True
    panels: tuple[str, ...] = ()
    seeds: int = 0
    settings: tuple[str, ...] = ()
    bench: Path = Path("results/bench")
    model: str = ""
    workers: int = 2
    tensor_cores: bool = False
    copies: int = 256
    checkpoint_every: int = 1
    command: str = ""
    say: Callable[[str], object] = lambda what: None
    progress: Callable[[Update], None] = lambda update: None


def chosen(experiment: Experiment, request: Request) -> tuple[Panel, ...]:
    """The panels asked for, with the settings asked for; raises `UnknownPanelError` for one that is not there."""
    scale = _scale(request)
    all_panels = experiment.panels(scale)
    unknown = [name for name in request.panels if name not in [panel.name for panel in all_panels]]
    if unknown:
        known = ", ".join(panel.name for panel in all_panels) or "none"
        raise UnknownPanelError(f"{experiment.id} has no panel {', '.join(map(repr, unknown))}; it has {known}")
    if request.settings and not all_panels:
        raise ConfigError(f"{experiment.id} takes no settings; it has no runs of this kind")
    wanted = [panel for panel in all_panels if not request.panels or panel.name in request.panels]
    return recipe.selected(wanted, request.settings)


def run(experiment: Experiment, request: Request) -> View:
    """Train, time and draw; what is there already is used."""
    scale = _scale(request)
    panels = chosen(experiment, request)
    for panel in panels:
        _check(Folder(request.out / panel.home / scale.name), request)
    for name in sorted({cell.data for panel in panels for cell in panel.cells}):
        # Data that are missing or corrupt are said before anything is written.
        load(name, request.data)
    for panel in panels:
        _run_panel(panel, scale, experiment, request)
    directory = request.out / experiment.id / scale.name
    if not panels and not request.resume and (count := len(list((directory / "records").glob("*.json")))):
        raise _in_the_way(directory, count)
    directory.mkdir(parents=True, exist_ok=True)
    experiment.measure(_view(experiment, request))
    return draw(experiment, request)


def draw(experiment: Experiment, request: Request) -> View:
    """The figure and its numbers from what is there."""
    known = _view(experiment, request)
    if not known.outcomes and experiment.panels(known.scale):
        folders = sorted({str(request.out / panel.home / request.scale) for panel in experiment.panels(known.scale)})
        raise NothingToDrawError(
            f"there is no whole panel of {experiment.id} in {', '.join(folders)}; "
            f"isaac-newton reproduce {experiment.id} --scale {request.scale} trains it"
        )
    known.directory.mkdir(parents=True, exist_ok=True)
    experiment.write(known)
    pictures(experiment.figure(known), known.directory / "figure")
    return known


def _view(experiment: Experiment, request: Request) -> View:
    means = Means(
        data=request.data,
        model=request.model,
        seeds=request.seeds,
        workers=request.workers,
        command=request.command,
        say=request.say,
        progress=request.progress,
    )
    return view(experiment, request.out, SCALES[request.scale], bench=request.bench, device=request.device, means=means)


def _scale(request: Request) -> Scale:
    return replace(SCALES[request.scale], all_seeds=request.seeds)


def _check(folder: Folder, request: Request) -> None:
    """Records that were made with other settings are not mixed with these; with --no-resume there may be none."""
    about = folder.about
    if not request.resume and (count := len(folder.store.records())):
        raise _in_the_way(folder.directory, count)
    if about["panels"] and about["settings"] != list(request.settings):
        made = f"with --set {' --set '.join(about['settings'])}" if about["settings"] else "without --set"
        raise StoreError(f"{folder.directory} was made {made}; name another --out")


def _in_the_way(directory: Path, count: int) -> StoreError:
    return StoreError(f"{directory} has {count} records already; use --resume, or name another --out")


def _run_panel(panel: Panel, scale: Scale, experiment: Experiment, request: Request) -> None:
    folder = Folder(request.out / panel.home / scale.name)
    executor = request.executor or experiment.executor
    trained = _Trained(folder.store, executor, request)
    # Before the first record: who resumes after a kill must find the settings.
    about = folder.about
    entry: dict[str, Any] = about["panels"].setdefault(panel.name, {"calls": []})
    about |= {"id": panel.home, "scale": scale.name, "settings": list(request.settings), "seeds": request.seeds}
    folder.note(about)
    started = time.perf_counter()
    recipe.train(panel, scale, trained, request.settings)
    seconds = time.perf_counter() - started
    if panel.clocked and not folder.steps(panel.name).exists():
        request.say(f"{panel.home} {panel.name}: the time of a step on one CPU thread")
        write(folder.steps(panel.name), clock.measure(_clocked(panel), rounds=scale.rounds))
    if trained.new or not entry["calls"]:
        call = {"command": request.command, "seconds": seconds, "runs": trained.new, "executor": executor}
        entry["calls"].append(
            {**call, "device": request.device, **origin(threads=torch.get_num_threads(), device=request.device)}
        )
        folder.note(about)


def _clocked(panel: Panel) -> dict[str, Config]:
    return {group.name: group.cells[0] for group in panel.clocked}


class _Trained:
    """The executor as a `recipe.Trainer`, which counts the runs that were not there before."""

    def __init__(self, store: Store, executor: str, request: Request) -> None:
        self._store, self._executor, self._request = store, executor, request
        self._before = {record.config.key for record in store.records() if record.status != "unfinished"}
        self.new = 0

    def __call__(self, configs: Sequence[Config], what: str) -> Sequence[Record]:
        request = self._request
        keys = {config.key for config in configs}
        self.new += len(keys - self._before)
        self._before |= keys
        request.say(f"{what} ({len(keys)} runs)")
        return executors.run(
            configs,
            self._store,
            executor=self._executor,
            device=request.device,
            scale=request.scale,
            data_folder=request.data,
            progress=request.progress,
            workers=request.workers,
            tensor_cores=request.tensor_cores,
            copies=request.copies,
            checkpoint_every=request.checkpoint_every,
        )
