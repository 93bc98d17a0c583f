"""Train what is due of a study, and write down who trained it."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from isaac_lab.executors import Call, run
from isaac_lab.progress import Display
from isaac_lab.record import Store
from isaac_lab.records import origin
from isaac_lab.trial import Trial


@dataclass(frozen=True)
class Means:
    """What the command line says of how to train.

    Args:
        call: Executor, device, workers, data, time limit.
        model: Folder or hub name of a pre-trained encoder; empty for the one that the scale says.
        seeds: Runs of each cell; 0 leaves it to the experiment.
        display: Where progress is shown; None for nowhere.
    """

    call: Call = field(default_factory=Call)
    model: str = ""
    seeds: int = 0
    display: Display | None = None

    def say(self, what: str) -> None:
        """A line for people."""
        if self.display is not None:
            self.display.say(what)


@contextmanager
def calling(store: Store, means: Means, about: Mapping[str, Any], panel: str = "") -> Iterator[Callable[[int], None]]:
    """Write down who trains what, before the first run and after each round: a kill forgets nothing that has ended.

    Yields a function that is told how many runs were trained.
    """
    call = means.call
    known = store.about
    calls = known.get("calls", [])
    entry: dict[str, Any] = {"panel": panel} if panel else {}
    entry |= {"command": call.command, "seconds": 0.0, "runs": 0, "executor": call.executor, "device": call.device}
    entry |= {"workers": call.workers, **origin(threads=1, device=call.device)}
    started = time.perf_counter()

    def trained(runs: int) -> None:
        entry["runs"] += runs
        entry["seconds"] = round(time.perf_counter() - started, 3)
        if entry["runs"] or not calls:
            store.note({**known, **about, "calls": [*calls, entry]})

    trained(0)
    yield trained
    trained(0)


def trainer(store: Store, means: Means, trained: Callable[[int], None], what: str) -> Callable[[Sequence[Trial]], None]:
    """Trains a round of a study, and writes it down; what ended before time was up counts too."""

    def train(due: Sequence[Trial]) -> None:
        if means.display is not None:
            means.display.begin(what, len(due))
        try:
            run(due, store, means.call)
        finally:
            trained(len(due) - len(store.missing(due)))

    return train
