"""Where runs are trained: in this process, in several, many at once as an ensemble, or on Ray. The records are the same.

| Executor    | A run is                     | After a kill it goes on from | A run whose worker dies         |
|-------------|------------------------------|------------------------------|---------------------------------|
| `local`     | trained after the one before | its last epoch               |                                 |
| `processes` | a task of a worker           | its last epoch               | goes on in a new one, once      |
| `ensemble`  | one of many networks at once | its group's last epoch       |                                 |
| `ray`       | a task of the cluster        | its start                    | begins again, up to three times |
"""

import contextlib
import gc
import importlib
import math
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from isaac_lab.config import Config
from isaac_lab.engine import Training, can_stack
from isaac_lab.products import float32_products
from isaac_lab.progress import Progress, Reporter, Update
from isaac_lab.records import installed, origin
from isaac_lab.store import Epoch, Record, Store, StoreError

if TYPE_CHECKING:
    from isaac_lab.data.sets import Dataset

__all__ = ["EXECUTORS", "ExecutorError", "plan", "run"]

#: Of the memory that is free, so much may be filled by an ensemble.
SHARE_OF_MEMORY = 0.6
#: How often Ray begins a run again whose worker died.
RAY_RETRIES = 3


class ExecutorError(Exception):
    """An executor that is not there, or that lost its workers."""


@dataclass(frozen=True)
class Job:
    """What all runs of one call have in common; sent to other processes."""

    scale: str
    executor: str
    device: str
    data_folder: Path | None
    tensor_cores: bool
    checkpoint_every: int


@dataclass(frozen=True)
class Group:
    """Runs that are trained together: one, or an ensemble."""

    configs: tuple[Config, ...]
    stacked: bool


def run(
    configs: Sequence[Config],
    store: Store,
    *,
    executor: str = "local",
    device: str = "cpu",
    scale: str,
    resume: bool = True,
    data_folder: Path | None = None,
    progress: Progress | None = None,
    workers: int = 2,
    tensor_cores: bool = False,
    copies: int = 256,
    checkpoint_every: int = 1,
) -> list[Record]:
    """Train what is not trained yet, and return the records of all `configs`, in their order.

    Args:
        configs: The runs.
        store: Where their records are, and go.
        executor: A key of `EXECUTORS`.
        device: "cpu" or "cuda".
        scale: What the runs are a part of, for their records.
        resume: Leave out what has ended, and go on with what has not. Otherwise none of the runs may be there.
        data_folder: Where the data are; None for the usual places.
        progress: Called after each epoch.
        workers: Of the executor `processes`.
        tensor_cores: Let a GPU multiply in TF32. The inverses do not change.
        copies: The most networks of an ensemble; there are fewer where memory says so.
        checkpoint_every: So many epochs lie between checkpoints. A kill costs at most as many, and large ensembles have large
            checkpoints.
    """
    if executor not in EXECUTORS:
        raise ExecutorError(f"there is no executor {executor!r}; there are {', '.join(EXECUTORS)}")
    if device not in ("cpu", "cuda"):
        raise ExecutorError(f"device must be cpu or cuda, got {device!r}")
    if device == "cuda" and executor != "ray" and not torch.cuda.is_available():
        raise ExecutorError("this machine has no CUDA device that torch can use; use the device cpu")
    for name, value in {"workers": workers, "copies": copies, "checkpoint_every": checkpoint_every}.items():
        if value < 1:
            raise ExecutorError(f"{name} must be >= 1, got {value}")
    known = {record.config.key: record for record in store.records()}
    if not resume and (there := [config for config in configs if config.key in known]):
        raise StoreError(
            f"{store.directory} has records of {len(there)} of these runs already; resume them, or choose another directory"
        )
    job = Job(scale, executor, device, data_folder, tensor_cores, checkpoint_every)
    wanted = {config.key: config for config in configs}
    pending = [config for key, config in wanted.items() if key not in known or known[key].status == "unfinished"]
    groups = plan(pending, store, executor=executor, device=device, copies=copies, data_folder=data_folder)
    EXECUTORS[executor](groups, store, job, progress or _nobody, workers)
    store.tidy()
    known = {record.config.key: record for record in store.records()}
    return [replace(known[config.key], config=config) for config in configs]


def plan(
    configs: Sequence[Config],
    store: Store,
    *,
    executor: str,
    device: str = "cpu",
    copies: int = 256,
    data_folder: Path | None = None,
) -> list[Group]:
    """How the executor would train these runs: first the groups that were begun, as they were begun."""
    alone = [config for config in configs if executor != "ensemble" or not can_stack(config)]
    rest = {config.key: config for config in configs if config not in alone}
    groups: list[Group] = []
    for begun in store.unfinished(stacked=True) if rest else []:
        keys = {config.key for config in begun}
        # Runs that diverged are still a part of their group, but nobody waits for them.
        waiting = {c.key for c in begun if (record := store.record(c)) is not None and record.status == "unfinished"}
        if waiting & rest.keys() and waiting <= rest.keys():
            groups.append(Group(begun, stacked=True))
            rest = {key: config for key, config in rest.items() if key not in keys}
    for alike in _alike(list(rest.values())):
        data = _dataset(alike[0].data, data_folder)
        most = min(copies, _fitting(alike[0], data, device))
        parts = math.ceil(len(alike) / most)
        bounds = [len(alike) * part // parts for part in range(parts + 1)]
        # Neighbours with one learning rate are updated faster.
        alike.sort(key=lambda config: config.learning_rate)
        groups += [Group(tuple(alike[low:high]), stacked=True) for low, high in pairwise(bounds)]
    return groups + [Group((config,), stacked=False) for config in alone]


def _local(groups: Sequence[Group], store: Store, job: Job, progress: Progress, workers: int) -> None:
    for group in groups:
        # An ensemble leaves out what cannot be stacked; the record says so.
        _train(group, store, job if group.stacked or job.executor != "ensemble" else replace(job, executor="local"), progress)
        _give_back_memory(job.device)


def _train(group: Group, store: Store, job: Job, progress: Progress) -> None:
    """Train one group to its end, with all that a kill may need."""
    data = _dataset(group.configs[0].data, job.data_folder)
    about = _origin(job, data)
    with float32_products(tensor_cores=job.tensor_cores), contextlib.ExitStack() as stack:
        # Before anything is written: it may not fit the data.
        training = Training(group.configs, data, stacked=group.stacked, device=job.device)
        log = stack.enter_context(
            store.open(group.configs, stacked=group.stacked, scale=job.scale, executor=job.executor, origin=about)
        )
        if log.checkpoint is not None:
            training.load_state(log.checkpoint["state"])
        report = Reporter(group.configs, progress)
        for epoch in training.epochs():
            # After the last epoch the end follows at once, and a checkpoint of many networks takes longer than an epoch.
            if epoch.number and epoch.number % job.checkpoint_every == 0 and not training.ended:
                log.save(training.state(), epoch)
            log.append(epoch)
            report(epoch)
        log.end(training.digests())


def _processes(groups: Sequence[Group], store: Store, job: Job, progress: Progress, workers: int) -> None:
    """Workers that each train one run after the other; one that dies is replaced, and its run tried once more."""
    waiting = deque((group, 0) for group in groups)
    busy: dict[Connection, tuple[Group, int]] = {}
    alive: dict[Connection, multiprocessing.process.BaseProcess] = {}
    try:
        while waiting or busy:
            while waiting and len(busy) < workers:
                idle = next((connection for connection in alive if connection not in busy), None)
                connection = idle or _start_worker(alive, store, job)
                busy[connection] = waiting.popleft()
                with contextlib.suppress(OSError):  # it died meanwhile; `recv` will tell
                    connection.send(busy[connection][0])
            for ready in wait(list(busy)):
                connection = next(known for known in busy if known is ready)
                try:
                    message = connection.recv()
                except (EOFError, OSError):
                    group, tries = busy.pop(connection)
                    process = alive.pop(connection)
                    process.join()
                    if tries:
                        raise ExecutorError(
                            f"the worker for run {group.configs[0].key} died twice, with exit code {process.exitcode} (-9 is a "
                            "kill, often for want of memory: use fewer workers). What is finished is kept"
                        ) from None
                    waiting.appendleft((group, tries + 1))
                    continue
                if isinstance(message, Update):
                    progress(message)
                    continue
                del busy[connection]
                if message is not None:
                    raise message
    finally:
        for process in alive.values():
            process.kill()
            process.join()


def _start_worker(alive: dict[Connection, multiprocessing.process.BaseProcess], store: Store, job: Job) -> Connection:
    # A forked child would inherit the threads that torch has started, in whatever state they are.
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there, store.directory, job), daemon=True)
    process.start()
    there.close()
    alive[here] = process
    return here


def _work(connection: Connection, directory: Path, job: Job) -> None:
    """A worker: trains what it is sent until nobody sends any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started us will end us
    torch.set_num_threads(1)
    store = Store(directory)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            group = connection.recv()
            try:
                _train(group, store, job, connection.send)
            except (EOFError, BrokenPipeError):
                raise
            except Exception as error:
                connection.send(error)
            else:
                connection.send(None)


def _ray(groups: Sequence[Group], store: Store, job: Job, progress: Progress, workers: int) -> None:
    """A task of the cluster for each run. The workers return what they saw; only this process writes."""
    if not installed("ray"):
        raise ExecutorError("the executor ray needs Ray; install it with: pip install 'isaac-newton[ray]'")
    ray: Any = importlib.import_module("ray")
    ours = not ray.is_initialized()
    if ours:
        ray.init(log_to_driver=False)
    try:
        options = {"num_cpus": 1, "num_gpus": int(job.device == "cuda"), "max_retries": RAY_RETRIES}
        remote = ray.remote(**options)(train_remotely)
        tasks = {remote.remote(group, job): group for group in groups}
        while tasks:
            (done,), _ = ray.wait(list(tasks), num_returns=1)
            group = tasks.pop(done)
            try:
                epochs, weights, about = ray.get(done)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except ray.exceptions.RayError as error:
                raise ExecutorError(f"Ray lost run {group.configs[0].key}: {error}; what is finished is kept") from None
            report = Reporter(group.configs, progress)
            with store.open(group.configs, stacked=False, scale=job.scale, executor=job.executor, origin=about) as log:
                for epoch in epochs:
                    log.append(epoch)
                    report(epoch)
                log.end(weights)
    finally:
        if ours:
            ray.shutdown()


def train_remotely(group: Group, job: Job) -> tuple[list[Epoch], list[str | None], dict[str, Any]]:
    """What a Ray worker does."""
    torch.set_num_threads(1)
    data = _dataset(group.configs[0].data, job.data_folder)
    with float32_products(tensor_cores=job.tensor_cores):
        training = Training(group.configs, data, stacked=False, device=job.device)
        return list(training.epochs()), training.digests(), _origin(job, data)


_Executor: TypeAlias = Callable[[Sequence[Group], Store, Job, Progress, int], None]
EXECUTORS: dict[str, _Executor] = {"local": _local, "processes": _processes, "ensemble": _local, "ray": _ray}


def _alike(configs: Sequence[Config]) -> list[list[Config]]:
    """Runs that an ensemble can train together: they differ in learning rate, dampings and seed only."""
    found: dict[Config, list[Config]] = {}
    # Without ζ there is no curvature to agree on: such runs join any that are otherwise alike.
    for config in sorted(configs, key=lambda config: config.sector != "zeta"):
        rest = replace(config, learning_rate=1.0, damping=1.0, output_damping=1.0, seed=0)
        places = [rest] if config.sector == "zeta" else [rest, replace(rest, curvature=_other(rest.curvature))]
        found.setdefault(next((place for place in places if place in found), rest), []).append(config)
    return list(found.values())


def _other(curvature: str) -> str:
    return "empirical" if curvature == "sampled" else "sampled"


def _fitting(config: Config, data: "Dataset", device: str) -> int:
    """How many networks fit in the memory that is free."""
    features = data.train_images.shape[1]
    sizes = [features, *config.hidden, data.classes if config.task == "classification" else features]
    parameters = sum(fan_in * fan_out for fan_in, fan_out in pairwise(sizes))
    # Weights, gradients and what the optimizer keeps, as much again for what is computed on the way; activations and ḡ.
    kept = {"sgd": 2, "momentum": 3, "adam": 4}[config.optimizer]
    floats = 2 * kept * parameters + 8 * config.batch * sum(sizes)
    if device == "cuda":
        _give_back_memory(device)
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
        torch.cuda.empty_cache()


@lru_cache(maxsize=2)
def _dataset(name: str, folder: Path | None) -> "Dataset":
    from isaac_lab.data.sets import load

    return load(name, folder)


def _origin(job: Job, data: "Dataset") -> dict[str, Any]:
    about = _process(torch.get_num_threads(), job.device)
    return about | {"data": {"name": data.name, "checksum": data.checksum}, "tensor_cores": job.tensor_cores}


@lru_cache(maxsize=2)
def _process(threads: int, device: str) -> dict[str, Any]:
    """Asked once: git takes longer than a short run."""
    return origin(threads=threads, packages=("torch", "numpy"), device=device)


def _nobody(update: Update) -> None:
    pass
