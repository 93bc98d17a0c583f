"""Run an experiment: train what is due, time the steps, and write down how."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from isaac_lab.bench import timing
from isaac_lab.products import threads
from isaac_lab.record import Store
from isaac_lab.records import StoreError
from isaac_lab.studies import StudyError
from isaac_lab.studies.calls import Means, clock, train
from isaac_lab.studies.paper import recipe
from isaac_lab.studies.paper.folder import View, view
from isaac_lab.studies.paper.recipe import SCALES, Experiment, Panel, Scale
from isaac_lab.trial import TrialError


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    scale: str = "smoke"
    out: Path = Path("results/reproduce")  # directory for all experiments
    resume: bool = True  # leave out what is there; otherwise none of the runs may be
    panels: tuple[str, ...] = ()  # names; none for all
    settings: tuple[str, ...] = ()  # "name=value" for every run
    bench: Path = Path("results/bench")  # directory with records of benchmarks, for Table 2
    means: Means = field(default_factory=Means)


def run(experiment: Experiment, request: Request) -> View:
    """Train and time; what is there already is used. Raises `StudyError` for a panel that is not there."""
    scale = replace(SCALES[request.scale], all_seeds=request.means.seeds)
    every = {panel.name: panel for panel in experiment.panels(scale)}
    if unknown := [name for name in request.panels if name not in every]:
        known_ones = ", ".join(every) or "none"
        raise StudyError(f"{experiment.id} has no panel {', '.join(map(repr, unknown))}; it has {known_ones}")
    if request.settings and not every:
        raise TrialError(f"{experiment.id} takes no settings; it has no runs of this kind")
    panels = recipe.selected([own for name, own in every.items() if name in (request.panels or every)], request.settings)
    for home in dict.fromkeys([*(panel.home for panel in panels), experiment.id]):
        _check(Store(request.out / home / scale.name), request, matters=bool(panels))
    # Matrices this small gain nothing from more threads than one.
    with threads(int(scale.small)):
        for panel in panels:
            _run_panel(panel, scale, request)
    found = known(experiment, request)
    experiment.measure(found)
    return found


def known(experiment: Experiment, request: Request) -> View:
    """What is there of an experiment; raises `StoreError` where that is nothing."""
    found = view(experiment, request.out, SCALES[request.scale], bench=request.bench, means=request.means)
    if not found.outcomes and (panels := experiment.panels(found.scale)):
        folders = sorted({str(request.out / panel.home / request.scale) for panel in panels})
        raise StoreError(
            f"there is no whole panel of {experiment.id} in {', '.join(folders)}; "
            f"isaac-newton reproduce {experiment.id} --scale {request.scale} trains it"
        )
    return found


def _check(store: Store, request: Request, *, matters: bool) -> None:
    """Records that were made with other settings are not mixed with these; with --no-resume there may be none."""
    about = store.about
    if not request.resume and (count := len(store.records())):
        raise StoreError(f"{store.folder} has {count} records already; use --resume, or name another --out")
    if matters and about.get("calls") and about.get("settings", []) != list(request.settings):
        made = f"with --set {' --set '.join(about['settings'])}" if about.get("settings") else "without --set"
        raise StoreError(f"{store.folder} was made {made}; name another --out")


def _run_panel(panel: Panel, scale: Scale, request: Request) -> None:
    means, what = request.means, f"{panel.home} {panel.name}"
    about = {"id": panel.home, "scale": scale.name, "settings": list(request.settings), "seeds": means.seeds}
    store = Store(request.out / panel.home / scale.name)
    # Small rates, so that thousands of steps on a few batches leave the activations about as they were.
    timed = {group.name: group.cells[0].having(learning_rate=0.001) for group in panel.clocked}
    said = f"{what}: the time of a step on one CPU thread"
    with means.writing(store):
        with threads(1):
            clock(f"steps-{panel.name}", timed, store, means, said, device="cpu", rounds=scale.rounds, turn=timing.TURN)
        arms = list(recipe.arms(panel, scale).values())
        train([(f"{what} ({panel.title})", arms)], store, means, about, panel.name)
