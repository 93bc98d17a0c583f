# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Averages over positions, over lists: one launch reads each input once."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float
from torch import Tensor

from isaac_newton.kernels import MOST_TAPS
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

__all__ = ["means", "tap_means"]

#: Positions and features that a program adds up at once.
_POSITIONS, _FEATURES = 32, 64


def means(
    xs: Sequence[Float[Tensor, "_ _ _"]], masks: Sequence[Bool[Tensor, "_ _"] | None]
) -> list[Float[Tensor, "samples features"]]:
    """The mean over the positions that count, in float32; 0 where none does.

    Args:
        xs: Samples, positions, features, with any strides.
        masks: For each x which positions of which samples count; None: all. The others are not read.
    """
    if not xs:
        return []
    # Where there is no mask nothing is read.
    others = [x if mask is None else mask for x, mask in zip(xs, masks, strict=True)]
    addresses, mask_addresses = [x.data_ptr() for x in xs], [x.data_ptr() for x in others]
    inputs = tuple([(x.shape, x.stride(), x.dtype) for x in xs])
    strides = tuple([None if mask is None else mask.stride() for mask in masks])
    key = (inputs, strides, tuple([address % 16 for address in addresses]), xs[0].device)
    plan = _MEANS.get(key)
    if plan is None:
        plan = remember(_MEANS, key, _means_plan(xs, masks))
    return plan(addresses, mask_addresses)


def tap_means(
    xs: Sequence[Float[Tensor, "_ _ _"]],
    taps: Sequence[Float[Tensor, "_ _"]],
    places: Sequence[int],
    channels_last: Sequence[bool],
) -> list[Float[Tensor, "samples features"]]:
    """What each tap of a kernel sees on the average over its places, in float32.

    Args:
        xs: Samples, channels, pixels, with any strides.
        taps: For each x which pixels a tap sees, and how often: pixels × taps, contiguous; at most 64 taps.
        places: For each x the number of places.
        channels_last: For each x whether features are (taps, channels) and not (channels, taps).
    """
    if not xs:
        return []
    addresses, tap_addresses = [x.data_ptr() for x in xs], [tap.data_ptr() for tap in taps]
    inputs = tuple([(x.shape, x.stride(), x.dtype) for x in xs])
    counts = tuple([(tap.shape[1], tap.dtype) for tap in taps])
    aligned = tuple([address % 16 for address in addresses])
    key = (inputs, counts, tuple(places), tuple(channels_last), aligned, xs[0].device)
    plan = _TAP_MEANS.get(key)
    if plan is None:
        plan = remember(_TAP_MEANS, key, _tap_means_plan(xs, taps, places, channels_last))
    return plan(addresses, tap_addresses)


class _Plan:
    """The launches for a list, and room for their results."""

    def __init__(self, room: Room, device: torch.device, launches: Sequence[Grouped]) -> None:
        self._room, self._device, self._launches = room, device, launches

    def __call__(self, *addresses: Sequence[int]) -> list[Tensor]:
        result = torch.empty(self._room.end, dtype=torch.float32, device=self._device)
        for launch in self._launches:
            launch((result,), *addresses)
        return [view for view in self._room.split(result) if view is not None]


_MEANS: dict[Any, _Plan] = {}
_TAP_MEANS: dict[Any, _Plan] = {}


def _means_plan(xs: Sequence[Tensor], masks: Sequence[Tensor | None]) -> _Plan:
    room = Room([(x.shape[0], x.shape[2]) for x in xs])
    classes, numbers = [], []
    for x, mask, offset in zip(xs, masks, room.offsets, strict=True):
        aligned = x.stride(2) == 1 and is_aligned(x.data_ptr(), x.shape[2], *x.stride()[:2])
        classes.append((x.dtype, mask is not None, x.stride(2) == 1, x.stride(1) == 1, aligned))
        numbers.append([*x.shape[1:], *x.stride(), *((0, 0) if mask is None else mask.stride()), offset])
    launches = []
    for (dtype, masked, features_contiguous, positions_contiguous, aligned), members in by_class(classes):
        how = {"TYPE": TYPES[dtype], "MASKED": masked, "FEATURES_CONTIGUOUS": features_contiguous}
        how |= {"POSITIONS_CONTIGUOUS": positions_contiguous, "ALIGNED": aligned}
        how |= {"POSITIONS": _POSITIONS, "FEATURES": _FEATURES}
        programs = [xs[n].shape[0] * triton.cdiv(xs[n].shape[2], _FEATURES) for n in members]
        launches.append(Grouped(_mean, members, programs, [numbers[n] for n in members], xs[0].device, 4, how))
    return _Plan(room, xs[0].device, launches)


def _tap_means_plan(
    xs: Sequence[Tensor], taps: Sequence[Tensor], places: Sequence[int], channels_last: Sequence[bool]
) -> _Plan:
    room = Room([(x.shape[0], x.shape[1] * tap.shape[1]) for x, tap in zip(xs, taps, strict=True)])
    classes, numbers = [], []
    for x, tap, count, last, offset in zip(xs, taps, places, channels_last, room.offsets, strict=True):
        _, channels, pixels = x.shape
        if tap.shape[1] > MOST_TAPS:
            raise ValueError(f"a kernel has at most {MOST_TAPS} taps here, got {tap.shape[1]}")
        sizes = (_block(tap.shape[1], 16, MOST_TAPS), _block(channels, 16, 64), _block(pixels, 32, 64))
        contiguous = (x.stride(1) == 1, x.stride(2) == 1)
        lengths = (channels, x.stride(2)) if contiguous[0] else (pixels, x.stride(1))
        aligned = any(contiguous) and is_aligned(x.data_ptr(), x.stride(0), *lengths)
        classes.append((x.dtype, tap.dtype, *contiguous, aligned, *sizes))
        to = (1, channels) if last else (tap.shape[1], 1)
        numbers.append([channels, pixels, tap.shape[1], count, *x.stride(), *to, offset])
    launches = []
    for (dtype, tap_type, by_channel, by_pixel, aligned, count, channels, pixels), members in by_class(classes):
        how = {"TYPE": TYPES[dtype], "TAP_TYPE": TYPES[tap_type], "CHANNELS_CONTIGUOUS": by_channel}
        # TF32 has all digits of half precision.
        precision = "tf32x3" if torch.float32 in (dtype, tap_type) else "tf32"
        how |= {"PIXELS_CONTIGUOUS": by_pixel, "ALIGNED": aligned, "PRECISION": precision}
        how |= {"TAPS": count, "CHANNELS": channels, "PIXELS": pixels}
        programs = [xs[n].shape[0] * triton.cdiv(xs[n].shape[1], channels) for n in members]
        launches.append(Grouped(_tap_mean, members, programs, [numbers[n] for n in members], xs[0].device, 4, how))
    return _Plan(room, xs[0].device, launches)


def _block(size: int, least: int, most: int) -> int:
    """A power of two that holds so many, within bounds."""
    return min(most, max(least, int(triton.next_power_of_2(size))))


@triton.jit
def _stride(place, ONE: tl.constexpr, ALIGNED: tl.constexpr):
    """A stride of the table, unless the kernel is compiled for 1."""
    if ONE:
        stride = tl.full((), 1, dtype=tl.int64)
    else:
        stride = size_of(place, ALIGNED)
    return stride


# fmt: off
@triton.jit(do_not_specialize=names("xm"))
def _mean(
    result, table,
    x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15,
    m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15,
    TYPE: tl.constexpr, MASKED: tl.constexpr, FEATURES_CONTIGUOUS: tl.constexpr, POSITIONS_CONTIGUOUS: tl.constexpr,
    ALIGNED: tl.constexpr, POSITIONS: tl.constexpr, FEATURES: tl.constexpr,
):
    # fmt: on
    """The mean of some features of a sample."""
    job, program, numbers = job_of(table, tl.program_id(0), 8)
    x = hinted(pick(job, x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15), TYPE, ALIGNED)
    mask = pick(job, m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15).to(tl.pointer_type(tl.int8))
    positions, features = tl.load(numbers).to(tl.int32), size_of(numbers + 1, ALIGNED)
    across = tl.cdiv(features, FEATURES).to(tl.int32)
    sample = (program // across).to(tl.int64)
    f = program % across * FEATURES + tl.arange(0, FEATURES)
    x += sample * size_of(numbers + 2, ALIGNED)
    mask += sample * tl.load(numbers + 5)
    by_position = _stride(numbers + 3, POSITIONS_CONTIGUOUS, ALIGNED)
    by_feature = _stride(numbers + 4, FEATURES_CONTIGUOUS, False)
    total = tl.zeros((POSITIONS, FEATURES), dtype=tl.float32)
    count = tl.zeros((POSITIONS,), dtype=tl.float32)
    for start in range(0, positions, POSITIONS):
        p = start + tl.arange(0, POSITIONS)
        counts = p < positions
        if MASKED:
            counts = tl.load(mask + p * tl.load(numbers + 6), mask=counts, other=0) != 0
        places = p[:, None] * by_position + f[None, :] * by_feature
        total += tl.load(x + places, mask=counts[:, None] & (f[None, :] < features), other=0.0).to(tl.float32)
        count += counts.to(tl.float32)
    mean = tl.sum(total, axis=0) / tl.maximum(tl.sum(count, axis=0), 1.0)
    tl.store(result + size_of(numbers + 7, True) + sample * features + f, mean, mask=f < features)


# fmt: off
@triton.jit(do_not_specialize=names("xw"))
def _tap_mean(
    result, table,
    x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15,
    w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15,
    TYPE: tl.constexpr, TAP_TYPE: tl.constexpr, CHANNELS_CONTIGUOUS: tl.constexpr, PIXELS_CONTIGUOUS: tl.constexpr,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr, TAPS: tl.constexpr, CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
):
    # fmt: on
    """What all taps see of some channels of a sample."""
    job, program, numbers = job_of(table, tl.program_id(0), 10)
    x = hinted(pick(job, x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15), TYPE, ALIGNED)
    taps = hinted(pick(job, w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15), TAP_TYPE, False)
    channels = size_of(numbers, ALIGNED and CHANNELS_CONTIGUOUS)
    pixels = size_of(numbers + 1, ALIGNED and not CHANNELS_CONTIGUOUS).to(tl.int32)
    count, places = tl.load(numbers + 2), tl.load(numbers + 3)
    across = tl.cdiv(channels, CHANNELS).to(tl.int32)
    sample = (program // across).to(tl.int64)
    c = program % across * CHANNELS + tl.arange(0, CHANNELS)
    t = tl.arange(0, TAPS)
    x += sample * size_of(numbers + 4, ALIGNED)
    by_channel = _stride(numbers + 5, CHANNELS_CONTIGUOUS, ALIGNED)
    by_pixel = _stride(numbers + 6, PIXELS_CONTIGUOUS, ALIGNED)
    total = tl.zeros((TAPS, CHANNELS), dtype=tl.float32)
    for start in range(0, pixels, PIXELS):
        p = start + tl.arange(0, PIXELS)
        touched = tl.load(taps + p[None, :] * count + t[:, None], mask=(t[:, None] < count) & (p[None, :] < pixels), other=0.0)
        inside = (p[:, None] < pixels) & (c[None, :] < channels)
        tile = tl.load(x + p[:, None] * by_pixel + c[None, :] * by_channel, mask=inside, other=0.0)
        total = tl.dot(touched.to(tl.float32), tile.to(tl.float32), total, input_precision=PRECISION)
    to = result + tl.load(numbers + 9) + sample * channels * count
    to += c[None, :] * tl.load(numbers + 7) + t[:, None] * tl.load(numbers + 8)
    tl.store(to, total / places.to(tl.float32), mask=(t[:, None] < count) & (c[None, :] < channels))
