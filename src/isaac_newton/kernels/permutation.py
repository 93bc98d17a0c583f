"""Rows are drawn by a keyed permutation, so that every device finds the same ones by itself: here in torch's operations.

A number of m bits is cut into two halves. In turn each half is changed by a hash of the other one and of a key (a Feistel
network): that can be undone, so that different numbers stay different. Numbers that are too large are permuted again until they
are not. So the first k numbers are k rows without repetition, each set of rows alike likely, for a random seed.
"""

import functools
from typing import TypeVar

import torch
from jaxtyping import Int64
from torch import Tensor

__all__ = ["FIRST", "GOLDEN", "ROUNDS", "SECOND", "WORD", "bits_of", "draw_seed", "folded", "permuted"]

_Number = TypeVar("_Number", int, Tensor)

#: Each half is changed six times: with fewer, pairs of very few rows are not alike likely.
ROUNDS = 12
#: All arithmetic is modulo 2³².
WORD = 0xFFFFFFFF
#: 2³² over the golden ratio, and two odd factors whose bits look random.
GOLDEN, FIRST, SECOND = 0x9E3779B9, 0x8DA6B343, 0xC2B2AE35

#: Numbers of so many bits are permuted all at once where some are too large: permuting these again is a look at a table.
_FEW_BITS = 12


def bits_of(total: int) -> int:
    """Bits of the numbers below `total`."""
    if not 0 < total < 2**31:
        raise ValueError(f"rows are drawn from 1 to 2³¹ − 1 positions, got {total}")
    return (total - 1).bit_length()


def draw_seed(backward_passes: int) -> int:
    """The seed of the rows that are drawn in a backward pass."""
    return (torch.initial_seed() + 0x9E3779B97F4A7C15 * backward_passes) % 2**63


def folded(seed: int) -> int:
    """A seed of 64 bits in 32."""
    return (seed ^ (seed >> 32)) & WORD


@functools.lru_cache(maxsize=16)
def permuted(total: int, count: int, seed: int, number: int, device: torch.device | str) -> Int64[Tensor, " count"]:
    """The first numbers of a permutation of those below `total`. Layers of one size share a draw: do not write to it.

    Args:
        total: How many there are.
        count: How many to return.
        seed: Which permutation.
        number: Tells apart permutations of one seed.
        device: Where.
    """
    bits = bits_of(total)
    start = _mixed(folded(seed) ^ _mixed((number + GOLDEN) & WORD))
    keys = [_mixed((start + each * GOLDEN) & WORD) for each in range(ROUNDS)]
    if total < 1 << bits and bits <= _FEW_BITS:
        table = _permuted_once(torch.arange(1 << bits, device=device), bits, keys)
        found = table[:count]
        while count and found.amax() >= total:
            found = torch.where(found < total, found, table[found])
        return found
    found = _permuted_once(torch.arange(count, device=device), bits, keys)
    while count and found.amax() >= total:
        found = torch.where(found < total, found, _permuted_once(found, bits, keys))
    return found


def _permuted_once(x: Tensor, bits: int, keys: list[int]) -> Tensor:
    """A permutation of all numbers of so many bits."""
    lower = bits // 2
    high, low = x >> lower, x & ((1 << lower) - 1)
    for number, key in enumerate(keys):
        if number % 2:
            high = high ^ (_mixed((low + key) & WORD) & ((1 << (bits - lower)) - 1))
        else:
            low = low ^ (_mixed((high + key) & WORD) & ((1 << lower) - 1))
    return (high << lower) | low


def _mixed(x: _Number) -> _Number:
    """A hash of 32 bits."""
    x = ((x ^ (x >> 16)) * FIRST) & WORD
    x = ((x ^ (x >> 15)) * SECOND) & WORD
    return x ^ (x >> 16)
