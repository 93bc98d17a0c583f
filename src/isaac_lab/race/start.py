"""The start of a race: a few steps of a method tell whether it can run on a network at all, and how long a step takes."""

import time
from collections.abc import Callable
from itertools import cycle, islice

import torch

import isaac_newton as isaac
from isaac_lab.trials import methods
from isaac_lab.trials.loop import WARM_UP
from isaac_lab.trials.trial import Trial
from isaac_lab.trials.workload import Workload

__all__ = ["seconds", "start"]

#: Steps that are timed, after those that warm up and capture.
TIMED = 3


def start(trial: Trial, workload: Workload, device: str) -> tuple[float, str]:
    """Seconds of a step, and why the method cannot run, or "".

    An error of our own, or of torch's, is not a reason: it is raised.
    """
    reason = methods.unable(trial, workload)
    if reason:
        return 0.0, reason
    try:
        return seconds(trial, workload, device), ""
    except methods.UnableError as error:
        return 0.0, str(error)
    except Exception as error:
        if not methods.OPTIMIZERS[trial.optimizer].module:
            raise
        # Others' code may refuse a network in any way it likes.
        return 0.0, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"


def seconds(trial: Trial, workload: Workload, device: str) -> float:
    """Of a step, roughly, in the mode in which the trial will run."""
    torch.manual_seed(trial.seed)
    training = methods.prepare(trial, workload, workload.model(trial.seed))
    first, *more = islice(workload.batches(trial.seed, 0), WARM_UP + 1 + TIMED)
    # Those of other shapes would be captured, not timed.
    batches = [first, *(batch for batch in more if batch[0].shape == first[0].shape)]
    step: Callable[..., object] = training.step
    if device == "cuda" and methods.capturable(trial):
        step = isaac.capture(training.step, *first, warmup=WARM_UP)
    for batch in islice(cycle(batches), WARM_UP + 1):
        step(*batch)
    counted = batches[WARM_UP + 1 :] or batches
    _wait(device)
    started = time.perf_counter()
    for batch in counted:
        step(*batch)
    _wait(device)
    return (time.perf_counter() - started) / len(counted)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
