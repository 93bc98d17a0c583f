"""Seconds of a training step of each method: they take turns in one process, eager, captured, or on one CPU thread."""

import itertools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from isaac_lab import method, methods
from isaac_lab.bench import timing
from isaac_lab.networks import WARM_UP, Graphs
from isaac_lab.products import float32_products
from isaac_lab.records import origin
from isaac_lab.trial import Trial
from isaac_lab.workload import Workload, load

MODES = ("eager", "captured")
#: Seconds of a method's turn: several of the longest periods in which a method does something once.
TURN = 0.2
#: Batches that a method goes round and round with; PPO plays once in so many steps.
BATCHES = 16
#: So many graphs of each method share the rounds: where its tensors happen to lie makes a graph a little faster or slower.
CAPTURES = 3


def measure(
    trials: Mapping[str, Trial],
    *,
    device: str = "cpu",
    captured: bool = False,
    rounds: int = 7,
    turn: float = TURN,
    folder: Path | None = None,
    tick: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """A record with the time of a step of each of these runs, by name; the first is what ratios are relative to.

    Where the steps are to be captured, those that cannot be CUDA graphs are left out. `rounds` is how often they take turns of
    about so many seconds, at least as often as there are captures; `tick` is called after each round.
    """
    workloads = {name: load(trial, device=device, folder=folder) for name, trial in trials.items()}
    reasons = {name: methods.unable(trial, workloads[name]) for name, trial in trials.items()}
    if captured:
        reasons |= {n: "cannot be a CUDA graph" for n, t in trials.items() if not (reasons[n] or method.capturable(t))}
    able = {name: trial for name, trial in trials.items() if not reasons[name]}
    first = workloads[next(iter(able))]
    captures = min(CAPTURES, rounds) if captured else 1
    seconds: dict[str, list[float]] = {name: [] for name in able}
    ready: dict[str, float] = {}
    per_turn: dict[str, int] = {}
    with float32_products(tensor_cores=first.tensor_cores):
        for number in range(captures):
            steps = {}
            for name, trial in able.items():
                started = time.perf_counter()
                steps[name] = _step(trial, workloads[name], captured=captured)
                _wait(device)
                ready.setdefault(name, time.perf_counter() - started)
            share = rounds // captures + (number < rounds % captures)
            timings = timing.measure(steps, rounds=share, turn=turn, wait=lambda: _wait(device), tick=tick)
            per_turn = timings.steps_per_turn
            for name, values in timings.seconds.items():
                seconds[name] += values
    found = timing.entries(seconds, per_turn)
    entries = [{"name": name, "trial": trials[name].as_json(), **entry} for name, entry in found.items()]
    packages = dict.fromkeys(["torch", *(method.find(trial.method)[0].package for trial in able.values())])
    return {
        "kind": "times of trials",
        "mode": "captured" if captured else "eager",
        "arithmetic": first.arithmetic,
        "workload": first.title,
        "settings": {"rounds": rounds, "turn_seconds": turn, "captures": captures if captured else 0},
        **origin(threads=torch.get_num_threads(), packages=tuple(packages), device=device),
        "methods": entries,
        "left_out": {name: reason for name, reason in reasons.items() if reason},
        # Seconds until the first step that is timed can begin: what is made, compiled and captured.
        "ready": {name: round(own, 3) for name, own in ready.items()},
    }


def seconds(record: Mapping[str, Any]) -> dict[str, float]:
    """The median of each method."""
    return {entry["name"]: float(entry["seconds_per_step"]["median"]) for entry in record["methods"]}


def start(trial: Trial, workload: Workload, device: str) -> str:
    """Why the method cannot run, or "": it takes a few steps, in the mode in which the run will be trained.

    An error of our own, or of torch's, is not a reason: it is raised.
    """
    if reason := methods.unable(trial, workload):
        return reason
    try:
        step = _step(trial, workload, captured=device == "cuda" and method.capturable(trial))
        for _ in range(WARM_UP):
            step()
        _wait(device)
    except method.UnableError as error:
        return str(error)
    except Exception as error:
        if method.find(trial.method)[0].package == "torch":
            raise
        # Others' code may refuse a network in any way it likes.
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    return ""


def _step(trial: Trial, workload: Workload, *, captured: bool) -> Callable[[], object]:
    torch.manual_seed(trial.seed)
    prepared = methods.prepare(trial, workload, workload.model(trial.seed))
    batches = list(itertools.islice(workload.batches(trial.seed, 1), BATCHES))
    if prepared.draws:
        batches = [(*b, n) for b, n in zip(batches, workload.draws(trial.seed, 1), strict=False)]
    step: Callable[..., object] = Graphs(prepared, WARM_UP) if captured else prepared.step
    turns = itertools.cycle(batches)
    if captured:
        # Until the graph of each shape is there.
        for batch in batches * (WARM_UP + 1):
            step(*batch)
    return lambda: step(*next(turns))


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
