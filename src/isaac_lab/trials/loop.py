"""Run a trial: train, measure on the way, and return its record."""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from isaac_lab.products import float32_products
from isaac_lab.records import origin
from isaac_lab.trials import methods
from isaac_lab.trials.graphs import Graphs
from isaac_lab.trials.trial import Trial
from isaac_lab.trials.workload import Workload

__all__ = ["FORMAT", "run"]

#: Of a record; raised when a field changes its meaning.
FORMAT = 1
#: A loss above this, or one that is no number, ends the trial as diverged.
LARGEST_LOSS = 1e6
#: Steps that run as they are before a CUDA graph is captured.
WARM_UP = 3


def run(
    trial: Trial, workload: Workload, *, device: str = "cpu", tick: Callable[[int, float], object] = lambda step, loss: None
) -> dict[str, Any]:
    """Train from the trial's seed for its steps.

    Seconds are those of the training steps, without measuring. The first steps compile, tune and capture; they are counted at
    the mean of all others. Where batches have several shapes, that is so for the first shape only.

    Args:
        trial: What to do.
        workload: What to train.
        device: "cpu" or "cuda".
        tick: Called after each measurement with the step and the training loss.
    """
    if trial.model != workload.network:
        raise ValueError(f"the trial is of {trial.model or 'no named network'!r}, the workload has {workload.network!r}")
    with float32_products(tensor_cores=workload.tensor_cores):
        return _run(trial, workload, device, tick)


def _run(trial: Trial, workload: Workload, device: str, tick: Callable[[int, float], object]) -> dict[str, Any]:
    torch.manual_seed(trial.seed)
    model = workload.model(trial.seed)
    training = methods.prepare(trial, workload, model)
    captured = device == "cuda" and methods.capturable(trial)
    batches = _endless(workload, trial.seed)
    step = Graphs(training.step, WARM_UP) if captured else training.step
    points: list[dict[str, float]] = []
    done = timed = 0
    seconds, status = 0.0, "finished"

    def advance(count: int) -> None:
        nonlocal done
        for batch in itertools.islice(batches, count):
            training.set_rate(trial.rate(done))
            step(*batch)
            done += 1
        if device == "cuda":
            torch.cuda.synchronize()

    for stop in trial.measured():
        try:
            advance(min(stop, WARM_UP + 1) - done if done <= WARM_UP else 0)
            started, before = time.perf_counter(), done
            advance(stop - done)
        except (RuntimeError, ValueError) as error:
            # A method of others that cannot factorize what it was led to, or will not draw from a distribution that is none.
            if not isinstance(error, LinAlgError) and workload.evaluate(model)["train_loss"] <= LARGEST_LOSS:
                raise
            status = "diverged"
            break
        seconds, timed = seconds + time.perf_counter() - started, timed + done - before
        measured = workload.evaluate(model)
        points.append({"step": done, **measured})
        tick(done, measured["train_loss"])
        # Written so that NaN is caught.
        if not measured["train_loss"] <= LARGEST_LOSS:
            status = "diverged"
            break
    per_step = seconds / timed if timed else math.nan
    for point in points:
        point["seconds"] = point["step"] * per_step
    threads = torch.get_num_threads()
    package = methods.OPTIMIZERS[trial.optimizer].package
    return {
        "kind": "trial",
        "format": FORMAT,
        "trial": asdict(trial),
        "data": workload.data,
        "checksum": workload.checksum,
        "weights": workload.weights,
        "arithmetic": workload.arithmetic,
        "status": status,
        "mode": "captured" if captured else "eager",
        "seconds_per_step": per_step,
        "points": points,
        **origin(threads=threads, packages=tuple({"torch": None, package: None}), device=device),
    }


def _endless(workload: Workload, seed: int) -> Iterator[tuple[Tensor, ...]]:
    for epoch in itertools.count():
        yield from workload.batches(seed, epoch)
