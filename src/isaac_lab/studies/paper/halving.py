"""How a learning rate is chosen at paper scale: by successive halving that ends in whole runs, none of which is shown.

All methods of a panel have equally many runs. Each rate is tried in a few *places*: cells of a sector, or seeds where there is
one cell. A round keeps the best rates, each in its best places, and trains them for longer. Afterwards two rates beside the
best are run whole, twice: those that an early round had left out, and where the best lies at an end, those beyond.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from isaac_lab.record import Record
from isaac_lab.study import Result, Search, decides
from isaac_lab.trial import Trial

#: Added to the seeds: no run that chooses is one that is shown.
SEED = 100
#: How often two rates beside the best are run whole: it may walk to a hundred times the largest of the list.
STEPS = 2
#: More than any loss that is not called diverged. Of runs that diverged the smaller rate is the better start.
LOST = 1e9


@dataclass(frozen=True)
class Round:
    """The best so many rates, each in its best so many places, for so many epochs."""

    epochs: int
    rates: int = 0
    places: int = 0


#: The first has all rates in all places, the last is whole.
ROUNDS = (Round(2), Round(10, 4, 3), Round(40, 2, 2))


def searches(rates: Sequence[float], places: Sequence[Trial], lasting: Callable[[Trial, int], Trial]) -> tuple[Search, ...]:
    """The rounds of a group.

    Args:
        rates: Those of the list.
        places: Whole runs without a rate.
        lasting: The same run for so many epochs.
    """

    def run(like: Trial, rate: float, epochs: int) -> Trial:
        # What a run is like on the way decides nothing.
        own = replace(lasting(like.having(learning_rate=rate), min(epochs, places[0].points)), points=1)
        return replace(own, split="validation")

    def candidates(found: Result | None) -> list[Trial]:
        if found is None:
            hidden = [replace(place, seed=place.seed + SEED, split="validation") for place in places]
            return [run(place, rate, ROUNDS[0].epochs) for rate in sorted(rates, reverse=True) for place in hidden]
        if (number := len(found.tried)) < len(ROUNDS):
            own, ranked = ROUNDS[number], _ranked(found.tried[-1])
            better = list(ranked.items())[: own.rates]
            return [run(like, rate, own.epochs) for rate, tried in better for like in tried[: own.places]]
        whole = _ranked({trial: value for tried in found.tried[len(ROUNDS) - 1 :] for trial, value in tried.items()})
        best, tried = next(iter(whole.items()))
        beside = [like.having(learning_rate=rate) for rate in _beside(best, whole) for like in tried[: ROUNDS[-1].places]]
        return [tried[0], *beside]

    # Where every rate has diverged in the end, nothing is left to be run.
    values = [*[_value] * (len(ROUNDS) + STEPS - 1), decides("train_loss")]
    return tuple(Search(candidates, value) for value in values)


def _value(record: Record) -> float:
    loss = record.final("train_loss")
    return loss if math.isfinite(loss) else LOST * (1 + record.trial.learning_rate)


def _ranked(values: Mapping[Trial, float]) -> dict[float, list[Trial]]:
    """By rate its runs, the best first; the rate with the best run first, of equal ones the larger rate."""
    found: dict[float, list[Trial]] = {}
    for trial in sorted(values, key=lambda trial: (values[trial], -trial.learning_rate)):
        found.setdefault(trial.learning_rate, []).append(trial)
    return found


def smaller(trial: Trial) -> list[Trial]:
    """A run with the next smaller rates, down to a hundredth."""
    place = round(2 * math.log10(trial.learning_rate))
    return [trial.having(learning_rate=_rate(place - number)) for number in range(1, 5)]


def _rate(number: int) -> float:
    """Of 1, 3, 10, 30 and so on, and 0.3, 0.1 in the other direction; 1 has the number 0."""
    return float(f"{1 if number % 2 == 0 else 3}e{number // 2}")


def _beside(rate: float, known: Collection[float]) -> list[float]:
    """Two rates that are not known: the nearest on each side, or the next two beyond an end."""
    sides = (1, 1) if rate == max(known) else (-1, -1) if rate == min(known) else (1, -1)
    found: list[float] = []
    for side in sides:
        at = round(2 * math.log10(rate))
        while _rate(at) in (*known, *found):
            at += side
        found.append(_rate(at))
    return found
