"""Records that nobody trained: for tests of figures and claims, written by the store itself."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from isaac_lab.record import Record, Store
from isaac_lab.studies.paper import EXPERIMENTS, recipe
from isaac_lab.studies.paper.recipe import SCALES, Panel
from isaac_lab.study import settle
from isaac_lab.trial import Trial

#: Final training loss of a run; infinite for one that diverges.
Losses = Callable[[Trial], float]
START = 2.3
ABOUT = {"data": "digits", "executor": "local", "machine": {"cpu": "a processor"}, "commit": None, "versions": {}}


def record(trial: Trial, losses: Sequence[float | None], *, status: str = "finished", accuracy: float | None = 0.9) -> Record:
    """A run with these training losses, from the untrained network on."""
    curve: dict[str, list[float | None]] = {"step": [100.0 * place for place in range(len(losses))], "train_loss": [*losses]}
    curve["test_loss"] = [None if loss is None else 2 * loss for loss in losses]
    curve |= {} if accuracy is None else {"test_accuracy": [accuracy] * len(losses)}
    return Record(trial, status, curve, 0.01, ABOUT, "2026")


class Memory:
    """A store without a folder, which gives every run the curve START, loss."""

    def __init__(self, losses: Losses) -> None:
        self.losses, self.records = losses, dict[Trial, Record]()

    def get(self, trial: Trial) -> Record | None:
        return self.records.get(trial)

    def train(self, due: Sequence[Trial]) -> None:
        self.records |= {trial: trained(trial, self.losses(trial)) for trial in due}


def settled(own: Panel, scale: str, losses: Losses) -> Memory:
    """All runs of a panel."""
    memory = Memory(losses)
    settle(list(recipe.arms(own, SCALES[scale]).values()), memory, memory.train)
    return memory


def experiment(out: Path, identity: str, scale: str, losses: Losses, *, panels: Iterable[str] = ()) -> None:
    """All records of an experiment at a scale."""
    calls = []
    store = Store(out / identity / scale)
    for panel in EXPERIMENTS[identity].panels(SCALES[scale]):
        if panel.home == identity and (not panels or panel.name in panels):
            with store.writing():
                store.add(*settled(panel, scale, losses).records.values())
            call = {"panel": panel.name, "command": "isaac-newton reproduce", "seconds": 61.0, "runs": 3, "executor": "local"}
            calls.append(call | {"machine": {"cpu": "a processor"}})
    store.note({"id": identity, "scale": scale, "settings": [], "seeds": 0, "calls": calls})


def trained(trial: Trial, loss: float) -> Record:
    diverged = loss == float("inf")
    curve = [START] if diverged else [START, *[loss] * trial.points]
    accuracy = None if trial.workload.endswith("autoencoder") else 0.9
    return record(trial, curve, status="diverged" if diverged else "finished", accuracy=accuracy)
