"""How long a step takes: methods take turns in one process, so that a slow moment of the machine strikes all of them."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import quantiles
from typing import Any

#: Seconds that one method's turn should take: long against the clock's resolution and the caches' warm-up.
TURN = 0.05
WARM_UP = 3


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Timings:
    """What `measure` saw: seconds per step of each method, one number per round, or of one step of what was left out."""

    steps_per_turn: dict[str, int]
    seconds: dict[str, list[float]]
    too_slow: dict[str, float]


def measure(
    steps: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    turn: float = TURN,
    limit: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
    wait: Callable[[], object] = lambda: None,
    tick: Callable[[], object] = lambda: None,
) -> Timings:
    """Time every step in `rounds` rounds; within a round the methods follow each other, each round starts with the next one.

    Args:
        steps: What to time, by name.
        rounds: How many rounds.
        turn: About how many seconds a method's turn takes; one step at least.
        limit: Methods that need more seconds than this for one step are left out, but never the first.
        clock: Returns seconds.
        wait: Called before the clock is read: waits for a device that computes by itself.
        tick: Called after each round.
    """
    per_turn: dict[str, int] = {}
    too_slow: dict[str, float] = {}
    for name, step in steps.items():
        fastest = math.inf
        for _ in range(WARM_UP):
            fastest = min(fastest, _seconds(step, 1, clock, wait))
            if fastest > limit and per_turn:
                too_slow[name] = fastest
                break
        else:
            per_turn[name] = max(1, round(turn / fastest)) if fastest > 0 else 1
    names = list(per_turn)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(_seconds(steps[name], per_turn[name], clock, wait))
        tick()
    return Timings(per_turn, seconds, too_slow)


def ratios(seconds: Mapping[str, Sequence[float]], baseline: str) -> dict[str, list[float]]:
    """For each round, every method's time over the baseline's in the same round."""
    return {
        name: [own / plain for own, plain in zip(values, seconds[baseline], strict=True)] for name, values in seconds.items()
    }


def entries(seconds: Mapping[str, Sequence[float]], per_turn: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """What a record says of each method; ratios are relative to the first."""
    relative = ratios(seconds, next(iter(seconds)))
    return {
        name: {
            "seconds_per_step": asdict(spread(values)),
            "ratio": asdict(spread(relative[name])),
            "steps_per_turn": per_turn[name],
        }
        for name, values in seconds.items()
    }


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles, interpolated between the values."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def _seconds(step: Callable[[], object], count: int, clock: Callable[[], float], wait: Callable[[], object]) -> float:
    """Seconds per step over `count` steps."""
    wait()
    started = clock()
    for _ in range(count):
        step()
    wait()
    return (clock() - started) / count
