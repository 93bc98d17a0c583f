"""How settings are found: the same number of points for every method, fixed beforehand, and the one that ends lowest."""

import math

from isaac_lab.record import Record

__all__ = ["LAST", "ending", "places"]

#: Measurements at the end of a tuning run whose mean decides: a single one is noisy.
LAST = 3
#: Of the Halton sequence, one for each dimension.
PRIMES = (2, 3, 5)


def places(dimensions: int, count: int) -> list[tuple[float, ...]]:
    """Points of the unit cube: evenly from end to end where there is one dimension, else those of the Halton sequence."""
    if dimensions == 1:
        return [(number / (count - 1) if count > 1 else 0.5,) for number in range(count)]
    return [tuple(_halton(number, prime) for prime in PRIMES[:dimensions]) for number in range(1, count + 1)]


def _halton(number: int, base: int) -> float:
    """The digits of a number in this base, mirrored at the point."""
    result, weight = 0.0, 1.0
    while number:
        number, digit = divmod(number, base)
        weight /= base
        result += digit * weight
    return result


def ending(record: Record, quantity: str) -> float:
    """What a run is judged by: the mean of its last measurements; infinite where it diverged."""
    values = record.column(quantity)[-LAST:]
    if not record.finished or not all(math.isfinite(value) for value in values):
        return math.inf
    return math.fsum(values) / len(values)
