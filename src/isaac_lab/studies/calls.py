"""Train what is due of a study, write down who trained it, and time its steps."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from isaac_lab import times
from isaac_lab.data.files import DataError
from isaac_lab.executors import Call, run
from isaac_lab.products import threads
from isaac_lab.progress import Display
from isaac_lab.record import Store
from isaac_lab.records import origin
from isaac_lab.study import Arm, outstanding
from isaac_lab.trial import Trial

Found = TypeVar("Found")


@dataclass(frozen=True)
class Means:
    """What the command line says of how to train."""

    call: Call = field(default_factory=Call)  # executor, device, workers, data, time limit
    model: str = ""  # folder or hub name of a pre-trained encoder; empty for the one that the scale says
    seeds: int = 0  # runs of each cell; 0 leaves it to the experiment
    display: Display | None = None  # where progress is shown; None for nowhere

    def say(self, what: str) -> None:
        """A line for people."""
        if self.display is not None:
            self.display.say(what)

    @contextmanager
    def writing(self, store: Store) -> Iterator[None]:
        """Be the only one who writes to a store; what a kill had torn is said, what is corrupt before anything is written."""
        with store.writing(self.call.command) as mended:
            for said in mended:
                self.say(said)
            store.records()
            yield

    @property
    def threads(self) -> int:
        """Of small networks: matrices of theirs gain nothing from more than one, and no result depends on it; 0 for all."""
        return int(self.call.device == "cpu")


def train(
    stages: Iterable[tuple[str, Sequence[Arm] | Callable[[], Sequence[Trial]]]],
    store: Store,
    means: Means,
    about: Mapping[str, Any],
    panel: str = "",
) -> None:
    """Train one stage of a study after the other, round after round; within `Means.writing` only.

    Who trains what is written down before the first run and after each round: a kill forgets nothing that has ended.

    Args:
        stages: What is said, and the arms that are trained together, or what says the runs that are due.
        store: Where to.
        means: How.
        about: What about.json says besides the calls.
        panel: That of the call.
    """
    call, known, started = means.call, store.about, time.perf_counter()
    calls = known.get("calls", [])
    entry: dict[str, Any] = {"panel": panel} if panel else {}
    entry |= {"command": call.command, "seconds": 0.0, "runs": 0, "executor": call.executor, "device": call.device}
    entry |= {"workers": call.workers, **origin(threads=1, device=call.device)}

    def trained(runs: int) -> None:
        entry["runs"] += runs
        entry["seconds"] = round(time.perf_counter() - started, 3)
        if entry["runs"] or not calls:
            store.note({**known, **about, "calls": [*calls, entry]})

    trained(0)
    for what, own in stages:
        while due := own() if callable(own) else outstanding(own, store):
            if means.display is not None:
                means.display.begin(what, len(due))
            try:
                run(due, store, call)
            finally:
                # What ended before time was up counts too.
                trained(len(due) - len(store.missing(due)))
    trained(0)


def clock(name: str, timed: Mapping[str, Trial], store: Store, means: Means, said: str, **how: Any) -> None:
    """Time the steps of these runs, methods taking turns, unless the store knows; ratios are relative to the first."""
    if timed and name not in store.times():
        means.say(said)
        options = {"device": means.call.device, "folder": means.call.folder, **how}
        store.add_times(name, times.measure(timed, **options))


def modes(device: str) -> tuple[str, ...]:
    """In which steps are timed on a device."""
    return times.MODES if device == "cuda" else times.MODES[:1]


def each_with_data(tasks: Mapping[str, Callable[[], Found]], means: Means) -> dict[str, Found]:
    """What these return whose data are there. Of several, what is missing is told; of the only one, raised."""
    found = {}
    for name, task in tasks.items():
        try:
            found[name] = task()
        except DataError as error:
            if len(tasks) == 1:
                raise
            means.say(f"{name} is left out: {error}")
    return found


def settled(
    arms: Sequence[Arm], store: Store, about: Mapping[str, Any], timed: Mapping[str, Trial], turn: float = 0.1
) -> Callable[[Means], None]:
    """What trains a study in one store, and then times these steps on this device; `about` says its "id", which is its name."""

    def everything(means: Means) -> None:
        with threads(means.threads), means.writing(store):
            train([(str(about["id"]), arms)], store, means, about)
            clock(means.call.device, timed, store, means, "the time of a step, methods taking turns", rounds=5, turn=turn)

    return everything
