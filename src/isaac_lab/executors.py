"""Where runs are trained: here, in several processes, many at once as an ensemble, or on Ray. The records are the same.

| Executor    | A run is                     | After a kill it goes on from | A run whose worker dies         |
|-------------|------------------------------|------------------------------|---------------------------------|
| `local`     | trained after the one before | its last checkpoint          |                                 |
| `processes` | a task of a worker           | its last checkpoint          | goes on in a new one, once      |
| `ensemble`  | one of many networks at once | its group's last checkpoint  |                                 |
| `ray`       | a task of the cluster        | its start                    | begins again, up to three times |
"""

import contextlib
import gc
import importlib
import math
import multiprocessing
import multiprocessing.context
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import torch

from isaac_lab.method import check
from isaac_lab.networks import alike
from isaac_lab.progress import Progress, Update, measured, nobody
from isaac_lab.record import Record, Store
from isaac_lab.records import installed, origin
from isaac_lab.training import Options, StoppedError, train
from isaac_lab.trial import Trial
from isaac_lab.workload import Workload, load

#: Of the memory that is free, so much may be filled by an ensemble.
SHARE_OF_MEMORY = 0.6
#: How often Ray begins a run again whose worker died.
RAY_RETRIES = 3
Group: TypeAlias = tuple[Trial, ...]


class ExecutorError(Exception):
    """An executor that is not there, or that lost its workers."""


@dataclass(frozen=True)
class Call:
    """How runs are trained; what is not said here, `training.Options` says."""

    executor: str = "local"
    device: str = "cpu"
    folder: Path | None = None  # where data sets are looked for first; None for the usual places
    workers: int = 2  # processes. Those of one GPU share it: most optimizers leave it idle between their small operations
    tensor_cores: bool = False
    copies: int = 256  # the most networks of an ensemble; there are fewer where memory says so
    seconds: float = 30.0
    until: float | None = None
    command: str = ""  # how this was called, for the records
    progress: Progress = field(default=nobody, compare=False)  # who is told of what is trained

    def check(self) -> None:
        """Refuse what cannot be."""
        most, there = 8 * (os.cpu_count() or 1), torch.cuda.is_available() or self.executor == "ray"
        wrong = {
            f"there is no executor {self.executor!r}; there are {', '.join(EXECUTORS)}": self.executor not in EXECUTORS,
            f"device must be cpu or cuda, got {self.device!r}": self.device not in ("cpu", "cuda"),
            "this machine has no CUDA device that torch can use; use the device cpu": self.device == "cuda" and not there,
            f"workers must be 1 to {most} on this machine, got {self.workers}": not 1 <= self.workers <= most,
            f"copies must be >= 1, got {self.copies}": self.copies < 1,
        }
        if messages := [message for message, is_so in wrong.items() if is_so]:
            raise ExecutorError(messages[0])


def run(trials: Sequence[Trial], store: Store, call: Call) -> int:
    """Train what has no record yet; returns how many runs that were. Within `store.writing` only.

    When time is up, a StoppedError is raised; what has ended is in the store, the rest goes on from checkpoints.
    """
    call.check()
    pending = store.missing(trials)
    if call.until is not None and pending and time.time() >= call.until:
        raise StoppedError
    groups = plan(pending, store, call)
    for group in groups:
        # Data that are missing or corrupt, and runs that cannot be, are said before anything is trained.
        _checked(group[0], call)
    EXECUTORS[call.executor](groups, store, call)
    return len(pending)


def plan(trials: Sequence[Trial], store: Store, call: Call) -> list[Group]:
    """How these runs would be trained: first the groups that were begun, as they were begun."""
    if call.executor != "ensemble":
        return [(trial,) for trial in trials]
    rest = {trial.key: trial for trial in trials if alike(trial) is not None}
    groups: list[Group] = []
    for begun in store.begun():
        keys = {trial.key for trial in begun}
        if len(begun) > 1 and keys <= rest.keys():
            groups.append(tuple(begun))
            rest = {key: trial for key, trial in rest.items() if key not in keys}
    for own in _together(list(rest.values())):
        most = min(call.copies, _fitting(own[0], call))
        parts = math.ceil(len(own) / most)
        bounds = [len(own) * part // parts for part in range(parts + 1)]
        # Neighbours with one learning rate are updated faster.
        own.sort(key=lambda trial: trial.learning_rate)
        groups += [tuple(own[low:high]) for low, high in pairwise(bounds)]
    return groups + [(trial,) for trial in trials if alike(trial) is None]


def _together(trials: Sequence[Trial]) -> list[list[Trial]]:
    """Runs that differ in learning rate, dampings and seed only. Without ζ there is no curvature to agree on."""
    found: dict[Trial, list[Trial]] = {}
    for trial in sorted(trials, key=lambda trial: math.isinf(trial.output_damping)):
        own = alike(trial)
        assert own is not None
        places = [own] if own.settings else [own, own.having(curvature="sampled"), own.having(curvature="empirical")]
        found.setdefault(next((place for place in places if place in found), own), []).append(trial)
    return list(found.values())


def _train(group: Group, folder: Path | None, call: Call, tick: Progress) -> list[Record]:
    """Train one group to its end, with all that a kill may need where there is a folder for it."""
    workload = load(group[0], device=call.device, folder=call.folder)
    about = _origin(torch.get_num_threads(), call.device, call.command)
    how = "local" if call.executor == "ensemble" and len(group) == 1 else call.executor
    options = Options(call.device, call.tensor_cores, call.seconds, call.until, {**about, "executor": how})

    def told(step: int, seconds: float, found: list[dict[str, float] | None]) -> None:
        tick(Update(group, step, measured(found), step / seconds if seconds else None))

    checkpoint = None if folder is None else Store(folder).checkpoint(group)
    return train(group, workload, options, checkpoint=checkpoint, tick=told)


def _keep(store: Store, group: Group, records: Sequence[Record], call: Call) -> None:
    store.add(*records)
    # Not before: a kill in between must find the one or the other.
    store.checkpoint(group).remove()
    call.progress(Update(group, group[0].steps, ended=tuple(records)))


def _local(groups: Sequence[Group], store: Store, call: Call) -> None:
    for group in groups:
        _keep(store, group, _train(group, store.folder, call, call.progress), call)
        _give_back_memory(call.device)


def _processes(groups: Sequence[Group], store: Store, call: Call) -> None:
    """A pool; where a worker dies the pool is a new one, and what it had is tried once more."""
    waiting, lost = list(groups), False
    while waiting:
        try:
            for group, records in _pool(waiting, store, call):
                waiting.remove(group)
                _keep(store, group, records, call)
                lost = False
        except BrokenProcessPool:
            if lost:
                words = "a worker died twice (killed, often for want of memory: use fewer workers). What has ended is kept"
                raise ExecutorError(words) from None
            lost = True


def _pool(groups: Sequence[Group], store: Store, call: Call) -> Iterator[tuple[Group, list[Record]]]:
    context = _workers(call.device)
    count = min(call.workers, len(groups))
    # Of a GPU's workers each may prepare its batches with several; on a CPU one each gives the same bits as anywhere.
    threads = 1 if call.device == "cpu" else max(1, (os.cpu_count() or 1) // count)
    quiet = replace(call, progress=nobody)
    with ProcessPoolExecutor(count, mp_context=context, initializer=_begin, initargs=(threads, dict(os.environ))) as pool:
        futures = {pool.submit(_train, group, store.folder, quiet, nobody): group for group in groups}
        stopped: StoppedError | None = None
        try:
            for future in as_completed(futures):
                try:
                    yield futures[future], future.result()
                except StoppedError as error:
                    stopped = error
            if stopped is not None:
                raise stopped
        except BaseException:
            # Those at work would end what they do first, and a run may take hours.
            workers = list((pool._processes or {}).values())
            for process in workers:
                process.kill()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in workers:
                process.join()
            raise


def _workers(device: str) -> multiprocessing.context.BaseContext:
    """How a worker comes to be: a child forked from here would inherit torch's threads, in whatever state they are.

    So a server that has imported all this, and computed nothing, forks workers at once. Where there is none, and on a GPU,
    whose driver minds forks, each begins from nothing.
    """
    if device != "cpu" or "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "isaac_lab.workloads.mlp", "isaac_lab.workloads.resnet"])
    return context


def _begin(threads: int, environment: Mapping[str, str]) -> None:
    """In a new process: so many threads, the environment of now, and an end when the process that started it is killed."""
    os.environ.update(environment)  # a server has that of when it began
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started us will end us
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        # Nobody is left to take a result, and a GPU should not wait for one.
        os._exit(1)


def _ray(groups: Sequence[Group], store: Store, call: Call) -> None:
    """A task of the cluster for each run. The workers return records; only this process writes."""
    if not installed("ray"):
        raise ExecutorError("the executor ray needs Ray; install it with: pip install 'isaac-newton[ray]'")
    ray: Any = importlib.import_module("ray")
    ours = not ray.is_initialized()
    if ours:
        ray.init(log_to_driver=False)
    try:
        remote = ray.remote(num_cpus=1, num_gpus=int(call.device == "cuda"), max_retries=RAY_RETRIES)(train_remotely)
        tasks = {remote.remote(group, replace(call, until=None, progress=nobody)): group for group in groups}
        while tasks:
            (done,), _ = ray.wait(list(tasks), num_returns=1)
            group = tasks.pop(done)
            try:
                _keep(store, group, ray.get(done), call)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except ray.exceptions.RayError as error:
                raise ExecutorError(f"Ray lost {group[0].title}: {error}; what has ended is kept") from None
    finally:
        if ours:
            ray.shutdown()


def train_remotely(group: Group, call: Call) -> list[Record]:
    """What a Ray worker does; it has no folder in common with us, so it keeps no checkpoint."""
    torch.set_num_threads(1)
    return _train(group, None, call, nobody)


#: Takes groups, the store of this process, and how.
EXECUTORS: dict[str, Callable[[Sequence[Group], Store, Call], None]] = {
    "local": _local,
    "processes": _processes,
    "ensemble": _local,
    "ray": _ray,
}


@lru_cache(maxsize=64)
def _checked(trial: Trial, call: Call) -> Workload:
    check(trial)
    return load(trial, device="cpu" if call.executor == "ray" else call.device, folder=call.folder)


def _fitting(trial: Trial, call: Call) -> int:
    """How many networks fit in the memory that is free."""
    workload: Any = load(trial, device=call.device, folder=call.folder)
    parameters = sum(fan_in * fan_out for fan_in, fan_out in pairwise(workload.sizes))
    # Weights, gradients and what the optimizer keeps, as much again for what is computed on the way; activations and ḡ.
    kept = {"sgd": 2, "momentum": 3, "adam": 4}[trial.method.partition("+")[0]]
    floats = 2 * kept * parameters + 8 * workload.batch * sum(workload.sizes)
    if call.device == "cuda":
        _give_back_memory(call.device)
        free, _ = torch.cuda.mem_get_info()
    else:
        try:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, ValueError, OSError):
            return 2**20  # this system does not tell
    return max(1, int(SHARE_OF_MEMORY * free / (4 * floats)))


def _give_back_memory(device: str) -> None:
    """A trained group is full of references to itself, which wait for the garbage collector with all that they hold."""
    if device == "cuda":
        gc.collect()
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()


@lru_cache(maxsize=4)
def _origin(threads: int, device: str, command: str) -> dict[str, Any]:
    """Asked once: git takes longer than a short run."""
    about = origin(threads=threads, packages=("torch", "numpy"), device=device)
    del about["time"]
    return {**about, **({"command": command} if command else {})}
