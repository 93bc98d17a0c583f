"""Records that nobody trained: for tests of figures and claims, written by the store itself."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from isaac_lab.config import Config
from isaac_lab.experiments import EXPERIMENTS, recipe
from isaac_lab.experiments.folder import Folder
from isaac_lab.experiments.recipe import SCALES
from isaac_lab.store import Epoch, Point, Record, Store

#: Final training loss of a run; infinite for one that diverges.
Losses = Callable[[Config], float]
START = 2.3


def record(config: Config, losses: Sequence[float], *, status: str = "finished", accuracy: float | None = 0.9) -> Record:
    """A run with these training losses, from the untrained network on."""
    points = tuple(Point(epoch, 100 * epoch, loss, 2 * loss, accuracy, float(epoch)) for epoch, loss in enumerate(losses))
    return Record(config, status, points, {}, "local", "quick")


def trainer(losses: Losses, store: Store | None = None) -> recipe.Trainer:
    """Gives every run the curve START, loss; writes it to `store` too."""

    def train(configs: Sequence[Config], what: str) -> list[Record]:
        found = [_record(config, losses(config)) for config in configs]
        if store is not None:
            _write(store, found)
        return found

    return train


def experiment(out: Path, identity: str, scale: str, losses: Losses, *, panels: Iterable[str] = ()) -> None:
    """All records of an experiment at a scale."""
    for panel in EXPERIMENTS[identity].panels(SCALES[scale]):
        if panel.home == identity and (not panels or panel.name in panels):
            folder = Folder(out / identity / scale)
            recipe.train(panel, SCALES[scale], trainer(losses, folder.store))
            about = folder.about
            call = {"command": "isaac-newton reproduce", "seconds": 61.0, "runs": 3, "executor": "local"}
            about["panels"][panel.name] = {"calls": [call | {"machine": {"cpu": "a processor"}}]}
            folder.note(about | {"id": identity, "scale": scale})


def _record(config: Config, loss: float) -> Record:
    diverged = loss == float("inf")
    curve = [START] if diverged else [START, *[loss] * config.epochs]
    accuracy = None if config.task == "autoencoder" else 0.9
    return record(config, curve, status="diverged" if diverged else "finished", accuracy=accuracy)


def _write(store: Store, records: Sequence[Record]) -> None:
    known = {known.config.key for known in store.records()}
    new = list({record.config.key: record for record in records if record.config.key not in known}.values())
    for epochs in sorted({record.config.epochs for record in new}):
        own = [record for record in new if record.config.epochs == epochs]
        origin = {"machine": {"cpu": "a processor"}, "time": "", "commit": None, "versions": {}}
        # One file for all: the store does not ask whether they could have been trained together.
        with store.open([r.config for r in own], stacked=True, scale="test", executor="local", origin=origin) as log:
            for number in range(epochs + 1):
                points = tuple(r.points[number] if number < len(r.points) else None for r in own)
                gone = tuple(place for place, r in enumerate(own) if r.status == "diverged" and number == len(r.points))
                log.append(Epoch(number, 100 * number, float(number), float(number), points, gone))
            log.end(["digest"] * len(own))
