"""Run many trials: those that have no record yet, in this process or in several that share a device."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import Any

import torch

from isaac_lab.trials import loop, workloads  # noqa: F401  (fills the registry)
from isaac_lab.trials.store import Store
from isaac_lab.trials.trial import Trial
from isaac_lab.trials.workload import Workload, make

__all__ = ["run"]

#: Called with each trial that has ended and how many there are in all.
Tick = Callable[[dict[str, Any], int], object]


def run(
    trials: Sequence[Trial],
    store: Store,
    *,
    device: str = "cpu",
    folder: Path | None = None,
    workers: int = 1,
    tick: Tick = lambda record, total: None,
) -> list[dict[str, Any]]:
    """The records of all trials, in their order; what is not in the store is trained and added.

    Args:
        trials: What to run.
        store: Where records are and go.
        device: "cpu" or "cuda".
        folder: Where data sets are looked for first.
        workers: Processes. Those of one GPU share it: most optimizers leave it idle between their small operations.
        tick: Told of each new record.
    """
    missing = store.missing(trials)
    for record in _records(missing, device, folder, min(workers, len(missing))):
        store.add(record)
        tick(record, len(missing))
    found = [store.get(trial) for trial in trials]
    return [record for record in found if record is not None]


def _records(trials: Sequence[Trial], device: str, folder: Path | None, workers: int) -> Iterator[dict[str, Any]]:
    if workers <= 1:
        for trial in trials:
            yield _one(trial, device, folder)
        return
    context = multiprocessing.get_context("spawn")
    threads = max(1, (os.cpu_count() or 1) // workers)
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(threads,)) as pool:
        futures = [pool.submit(_one, trial, device, folder) for trial in trials]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _begin(threads: int) -> None:
    """In a new process: so many threads, and an end when the process that started it is killed."""
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        # Nobody is left to take a result, and a GPU should not wait for one.
        os._exit(1)


def _one(trial: Trial, device: str, folder: Path | None) -> dict[str, Any]:
    return loop.run(trial, _workload(trial.workload, trial.small, device, folder), device=device)


@cache
def _workload(name: str, small: bool, device: str, folder: Path | None) -> Workload:
    """Loaded once in each process."""
    return make(name, small=small, device=device, folder=folder)
