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
#: So many graphs of each method share the rounds: where its tensors happen to lie makes a graph a little faster or slower.
CAPTURES = 3


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
        rounds: How often they take turns; at least as often as there are captures.
        tick: Called after each round.
    """
    with float32_products(tensor_cores=workload.tensor_cores):
        return _measure(trials, workload, device, captured, rounds, tick)


def _measure(
    trials: Mapping[str, Trial], workload: Workload, device: str, captured: bool, rounds: int, tick: Callable[[], object]
) -> dict[str, Any]:
    able: dict[str, Trial] = {}
    left_out: dict[str, str] = {}
    for name, trial in trials.items():
        reason = methods.unable(trial, workload)
        if not reason and captured and not methods.capturable(trial):
            reason = "cannot be a CUDA graph"
        if reason:
            left_out[name] = reason
        else:
            able[name] = trial

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    captures = min(CAPTURES, rounds) if captured else 1
    seconds: dict[str, list[float]] = {name: [] for name in able}
    per_turn: dict[str, int] = {}
    for number in range(captures):
        steps = {name: _step(trial, workload, captured=captured) for name, trial in able.items()}
        share = rounds // captures + (number < rounds % captures)
        timings = timing.measure(steps, rounds=share, turn=TURN, wait=wait, tick=tick)
        per_turn = timings.steps_per_turn
        for name, values in timings.seconds.items():
            seconds[name] += values
    ratios = timing.ratios(seconds, next(iter(able)))
    entries = [
        {
            "name": name,
            "trial": asdict(trials[name]),
            "seconds_per_step": asdict(timing.spread(values)),
            "ratio": asdict(timing.spread(ratios[name])),
            "steps_per_turn": per_turn[name],
        }
        for name, values in seconds.items()
    ]
    packages = dict.fromkeys(["torch", *(methods.OPTIMIZERS[trial.optimizer].package for trial in able.values())])
    return {
        "kind": "times of trials",
        "mode": "captured" if captured else "eager",
        "arithmetic": workload.arithmetic,
        "settings": {"rounds": rounds, "turn_seconds": TURN, "captures": captures if captured else 0},
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
