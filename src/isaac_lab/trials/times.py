"""Seconds of a training step of each method on one workload: they take turns in one process, eager and captured."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from isaac_lab.bench import timing
from isaac_lab.products import float32_products
from isaac_lab.records import origin
from isaac_lab.trials import methods
from isaac_lab.trials.graphs import Graphs
from isaac_lab.trials.loop import WARM_UP
from isaac_lab.trials.trial import Trial
from isaac_lab.trials.workload import Workload

__all__ = ["measure", "seconds"]

#: Seconds of a method's turn: several of the longest periods in which a method does something once.
TURN = 0.2
#: Batches that a method goes round and round with.
BATCHES = 8


def measure(
    trials: Mapping[str, Trial],
    workload: Workload,
    *,
    device: str = "cpu",
    captured: bool = False,
    rounds: int = 7,
    tick: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """A record with the time of a step of each of these trials.

    Args:
        trials: By name; the first is what ratios are relative to.
        workload: What they train.
        device: "cpu" or "cuda".
        captured: Whether the steps are CUDA graphs; those that cannot be are left out.
        rounds: How often they take turns.
        tick: Called after each round.
    """
    with float32_products(tensor_cores=workload.tensor_cores):
        return _measure(trials, workload, device, captured, rounds, tick)


def _measure(
    trials: Mapping[str, Trial], workload: Workload, device: str, captured: bool, rounds: int, tick: Callable[[], object]
) -> dict[str, Any]:
    steps: dict[str, Callable[[], object]] = {}
    left_out: dict[str, str] = {}
    for name, trial in trials.items():
        reason = methods.unable(trial, workload)
        if not reason and captured and not methods.capturable(trial):
            reason = "cannot be a CUDA graph"
        if reason:
            left_out[name] = reason
        else:
            steps[name] = _step(trial, workload, captured=captured)

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    timings = timing.measure(steps, rounds=rounds, turn=TURN, wait=wait, tick=tick)
    ratios = timing.ratios(timings.seconds, next(iter(steps)))
    entries = [
        {
            "name": name,
            "trial": asdict(trials[name]),
            "seconds_per_step": asdict(timing.spread(timings.seconds[name])),
            "ratio": asdict(timing.spread(ratios[name])),
            "steps_per_turn": timings.steps_per_turn[name],
        }
        for name in timings.seconds
    ]
    packages = dict.fromkeys(["torch", *(methods.OPTIMIZERS[trials[name].optimizer].package for name in steps)])
    return {
        "kind": "times of trials",
        "mode": "captured" if captured else "eager",
        "arithmetic": workload.arithmetic,
        "settings": {"rounds": rounds, "turn_seconds": TURN},
        **origin(threads=torch.get_num_threads(), packages=tuple(packages), device=device),
        "methods": entries,
        "left_out": left_out,
    }


def seconds(record: Mapping[str, Any]) -> dict[str, float]:
    """The median of each method."""
    return {method["name"]: float(method["seconds_per_step"]["median"]) for method in record["methods"]}


def _step(trial: Trial, workload: Workload, *, captured: bool) -> Callable[[], object]:
    torch.manual_seed(trial.seed)
    model = workload.model(trial.seed)
    training = methods.prepare(trial, workload, model)
    batches = list(itertools.islice(workload.batches(trial.seed, 0), BATCHES))
    step = Graphs(training.step, WARM_UP) if captured else training.step
    turns = itertools.cycle(batches)
    if captured:
        # Until the graph of each shape is there.
        for batch in batches * (WARM_UP + 1):
            step(*batch)
    return lambda: step(*next(turns))
