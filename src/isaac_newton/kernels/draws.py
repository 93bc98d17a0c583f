# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Rows drawn from inputs on the device, over lists: each program finds its rows by the permutation and reads these only.

What `permutation` computes in torch's operations is computed here for a few rows in each program.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from isaac_newton.kernels import permutation
from isaac_newton.kernels.permutation import permuted
from isaac_newton.kernels.tables import (
    TYPES,
    Grouped,
    Room,
    by_class,
    hinted,
    is_aligned,
    job_of,
    names,
    pick,
    remember,
    size_of,
)

__all__ = ["Window", "drawn", "drawn_positions", "permuted"]

#: Rows and features of a program.
_ROWS, _FEATURES = 16, 128
#: Numbers of a job in the table: its own, and those of each of three dimensions.
_OWN, _OF_DIMENSION = 8, 7

_ROUNDS = tl.constexpr(permutation.ROUNDS)
_WORD = tl.constexpr(permutation.WORD)
_GOLDEN = tl.constexpr(permutation.GOLDEN)
_FIRST = tl.constexpr(permutation.FIRST)
_SECOND = tl.constexpr(permutation.SECOND)


class Window(NamedTuple):
    """The rows that a layer multiplies: patches of its input. A linear layer's are its positions, with a kernel of 1.

    Args:
        x: Where the numbers are.
        sizes: Samples, channels, and one to three dimensions of space.
        strides: Of these, any.
        kernel: Pixels of a patch.
        stride: Pixels from one patch to the next.
        padding: Zeros before the first pixel.
        dilation: Pixels from one tap of the kernel to the next.
        places: Patches.
        channels_last: Whether features are (*kernel, channels) and not (channels, *kernel).
    """

    x: Tensor
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    places: tuple[int, ...]
    channels_last: bool = False


def drawn(
    windows: Sequence[Window], count: int, seed: int | Tensor, number: Sequence[int]
) -> list[Float[Tensor, "count features"]]:
    """For each window so many of its rows, without repetition, in float32: row i is the one at position `permuted`[i].

    Args:
        windows: Where to draw from; each has at least `count` positions, which are samples × places.
        count: How many.
        seed: Which draw. It may be a number in the device's memory, read when the kernel runs.
        number: Tells draws of one seed apart, one for each window.
    """
    if not windows:
        return []
    xs = [window.x for window in windows]
    addresses = [x.data_ptr() for x in xs]
    pointer = isinstance(seed, Tensor)
    types = tuple([x.dtype for x in xs])
    aligned = tuple([address % 16 for address in addresses])
    key = (types, tuple([window[1:] for window in windows]), tuple(number), count, pointer, aligned, xs[0].device)
    plan = _PLANS.get(key)
    if plan is None:
        plan = remember(_PLANS, key, _Plan(windows, count, pointer, number))
    # Always 64 bits wide, so that a compiled kernel serves every seed.
    return plan(addresses, seed if isinstance(seed, Tensor) else permutation.folded(seed) | 1 << 32)


def drawn_positions(
    xs: Sequence[Float[Tensor, "..."]], count: int, seed: int | Tensor
) -> list[Float[Tensor, "count features"]]:
    """The same of all leading dimensions of each x, which is contiguous: what linear layers multiply."""
    addresses = [x.data_ptr() for x in xs]
    pointer = isinstance(seed, Tensor)
    key = (tuple([(x.shape, x.dtype) for x in xs]), count, pointer, tuple([each % 16 for each in addresses]), xs[0].device)
    plan = _PLANS.get(key)
    if plan is None:
        plan = remember(_PLANS, key, _Plan([_positions(x) for x in xs], count, pointer, [0] * len(xs)))
    return plan(addresses, seed if isinstance(seed, Tensor) else permutation.folded(seed) | 1 << 32)


def _positions(x: Tensor) -> Window:
    """A kernel of 1 along all leading dimensions as one."""
    features = x.shape[-1]
    total = x.numel() // features
    return Window(x, (1, features, total), (total * features, 1, features), (1,), (1,), (0,), (1,), (total,))


class _Plan:
    """The launches for a list of these windows."""

    def __init__(self, windows: Sequence[Window], count: int, pointer: bool, number: Sequence[int]) -> None:
        self._device = windows[0].x.device
        features = [window.sizes[1] * prod(window.kernel) for window in windows]
        self._room = Room([(count, size) for size in features])
        self._launches = []
        programs = triton.cdiv(count, _ROWS)
        for (dtype, pointwise, unit, aligned, channels_last), members in by_class([_class(window) for window in windows]):
            how = {"POINTER": pointer, "TYPE": TYPES[dtype], "POINTWISE": pointwise, "UNIT": unit, "ALIGNED": aligned}
            how |= {"CHANNELS_LAST": channels_last, "ROWS": _ROWS, "FEATURES": _FEATURES}
            how |= {"OWN": _OWN, "OF_DIMENSION": _OF_DIMENSION}
            across = [triton.cdiv(features[member], _FEATURES) for member in members]
            numbers = [_numbers(windows[member], count, number[member], self._room.offsets[member]) for member in members]
            launch = Grouped(
                _draw, members, [programs * each for each in across], numbers, self._device, 4 if pointwise else 8, how
            )
            self._launches.append(launch)

    def __call__(self, addresses: Sequence[int], seed: int | Tensor) -> list[Tensor]:
        result = torch.empty(self._room.end, dtype=torch.float32, device=self._device)
        for launch in self._launches:
            launch((result, seed), addresses)
        return [view for view in self._room.split(result) if view is not None]


_PLANS: dict[Any, _Plan] = {}


def _class(window: Window) -> tuple[torch.dtype, bool, bool, bool, bool]:
    """What the kernel is compiled for."""
    x = window.x
    pointwise = prod(window.kernel) == 1 and not any(window.padding)
    unit = window.strides[1] == 1
    aligned = pointwise and unit and is_aligned(x.data_ptr(), window.sizes[1], window.strides[0], *window.strides[2:])
    return x.dtype, pointwise, unit, aligned, window.channels_last and not pointwise


def _numbers(window: Window, count: int, number: int, offset: int) -> list[int]:
    """What stands in the table."""
    sizes, strides = window.sizes, window.strides
    if not 1 <= len(window.kernel) <= 3:
        raise ValueError(f"a window has one to three dimensions, got {len(window.kernel)}")
    total = sizes[0] * prod(window.places)
    if total < count:
        raise ValueError(f"{count} rows cannot be drawn from {total}")
    own = [total, permutation.bits_of(total), count, sizes[1], number & permutation.WORD, offset, *strides[:2]]
    space = (strides[2:], sizes[2:], window.kernel, window.stride, window.padding, window.dilation, window.places)
    dimensions = [list(dimension) for dimension in zip(*space, strict=True)]
    # Dimensions that there are not have one pixel and one place.
    unused = [[0, 1, 1, 1, 0, 1, 1]] * (3 - len(dimensions))
    return [*own, *(each for dimension in unused + dimensions for each in dimension)]


@triton.jit
def _mixed(x):
    """A hash of 32 bits."""
    x = (x ^ (x >> 16)) * _FIRST
    x = (x ^ (x >> 15)) * _SECOND
    return x ^ (x >> 16)


@triton.jit
def _permuted_once(x, bits, start):
    """A permutation of all numbers of so many bits."""
    lower = bits // 2
    one = tl.full((), 1, dtype=tl.uint32)
    mask_low, mask_high = (one << lower) - 1, (one << (bits - lower)) - 1
    high, low = x >> lower, x & mask_low
    for each in tl.static_range(_ROUNDS):
        key = _mixed(start + tl.full((), (each * _GOLDEN) & _WORD, dtype=tl.uint32))
        if each % 2:
            high = high ^ (_mixed(low + key) & mask_high)
        else:
            low = low ^ (_mixed(high + key) & mask_low)
    return (high << lower) | low


@triton.jit
def _permuted(i, total, bits, seed, number):
    """The numbers i of a permutation of those below `total`."""
    start = _mixed(seed ^ _mixed(number + tl.full((), _GOLDEN, dtype=tl.uint32)))
    found = _permuted_once(i.to(tl.uint32), bits, start)
    while tl.max(found.to(tl.int32), axis=0) >= total:
        found = tl.where(found.to(tl.int32) < total, found, _permuted_once(found, bits, start))
    return found.to(tl.int32)


@triton.jit
def _along(numbers, place, tap):
    """Where a dimension's taps are at some places, whether they are in the image, and what is left of both numbers."""
    x_stride, extent, kernel = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    stride, padding, dilation, places = (
        tl.load(numbers + 3), tl.load(numbers + 4), tl.load(numbers + 5), tl.load(numbers + 6)
    )  # fmt: skip
    pixel = (place % places * stride - padding)[:, None] + (tap % kernel * dilation)[None, :]
    return pixel * x_stride, (pixel >= 0) & (pixel < extent), place // places, tap // kernel


@triton.jit
def _at(numbers, place, ALIGNED: tl.constexpr):
    """Where a dimension's places are, for a kernel of 1, and what is left of their number."""
    stride, places = tl.load(numbers + 3), tl.load(numbers + 6)
    return place % places * stride * size_of(numbers, ALIGNED), place // places


# fmt: off
@triton.jit(do_not_specialize=names("x", "seed"))
def _draw(
    result, seed, table,
    x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15,
    POINTER: tl.constexpr, TYPE: tl.constexpr, POINTWISE: tl.constexpr, UNIT: tl.constexpr, ALIGNED: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr, OWN: tl.constexpr, OF_DIMENSION: tl.constexpr,
):
    # fmt: on
    """Some features of some rows."""
    job, program, numbers = job_of(table, tl.program_id(0), OWN + 3 * OF_DIMENSION)
    x = hinted(pick(job, x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15), TYPE, ALIGNED)
    total, bits = tl.load(numbers).to(tl.int32), tl.load(numbers + 1).to(tl.uint32)
    count, channels = tl.load(numbers + 2), size_of(numbers + 3, ALIGNED)
    if POINTER:
        wide = tl.load(seed)
        wide = wide ^ (wide >> 32)
    else:
        wide = seed
    first, second, third = numbers + OWN, numbers + OWN + OF_DIMENSION, numbers + OWN + 2 * OF_DIMENSION
    taps = tl.load(first + 2) * tl.load(second + 2) * tl.load(third + 2)
    blocks = tl.cdiv(count, ROWS).to(tl.int32)
    i = program % blocks * ROWS + tl.arange(0, ROWS)
    f = program // blocks * FEATURES + tl.arange(0, FEATURES)
    # Beyond the last row stands the first one, so that no number is out of bounds.
    row = tl.where(i < count, i, 0)
    number = tl.load(numbers + 4).to(tl.uint32)
    place = _permuted(row, total, bits, (wide & _WORD).to(tl.uint32), number).to(tl.int64)
    features = channels if POINTWISE else channels * taps
    inside = (i < count)[:, None] & (f < features)[None, :]
    if POINTWISE:
        at, place = _at(third, place, ALIGNED)
        higher, place = _at(second, place, ALIGNED)
        highest, place = _at(first, place, ALIGNED)
        places = (at + higher + highest)[:, None]
        channel = f
        there = inside
    else:
        if CHANNELS_LAST:
            channel, tap = f % channels, f // channels
        else:
            channel, tap = f // taps, f % taps
        at, in_third, place, tap = _along(third, place, tap)
        higher, in_second, place, tap = _along(second, place, tap)
        highest, in_first, place, tap = _along(first, place, tap)
        places = at + higher + highest
        there = inside & in_third & in_second & in_first
    sample = (place * size_of(numbers + 6, ALIGNED))[:, None]
    if UNIT:
        places = places + sample + channel[None, :]
    else:
        places = places + sample + channel[None, :] * tl.load(numbers + 7)
    to = result + size_of(numbers + 5, True) + i[:, None] * features + f[None, :]
    tl.store(to, tl.load(x + places, mask=there, other=0.0).to(tl.float32), mask=inside)
