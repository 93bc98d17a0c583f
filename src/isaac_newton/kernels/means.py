# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Averages over positions, in one Triton launch that reads the input once."""

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float
from torch import Tensor

from isaac_newton.kernels.launch import Launch, remember

__all__ = ["average", "tap_means"]

_AVERAGES: dict[Any, Launch] = {}
_TAP_MEANS: dict[Any, Launch] = {}


def average(
    x: Float[Tensor, "samples positions features"], mask: Bool[Tensor, "samples positions"]
) -> Float[Tensor, "samples features"]:
    """The mean over the positions that count, in one launch; 0 where none does."""
    samples, positions, features = x.shape
    result = torch.empty(samples, features, dtype=torch.float32, device=x.device)
    mask = mask.view(torch.uint8)
    strides = (*x.stride(), *mask.stride())
    key = (x.shape, strides, x.dtype, x.device.index, x.data_ptr() % 16, mask.data_ptr() % 16)
    launch = _AVERAGES.get(key)
    if launch is None:
        constants = {"POSITIONS": 32, "FEATURES": 64}
        launch = remember(_AVERAGES, key, Launch(_average, (triton.cdiv(features, 64), samples, 1), 4, constants))
    launch(x, mask, result, positions, features, *strides)
    return result


def tap_means(
    x: Float[Tensor, "samples channels pixels"], taps: Float[Tensor, "pixels taps"], places: int, *, innermost: bool
) -> Float[Tensor, "samples features"]:
    """What each tap of a kernel sees on the average over its places, in one launch that reads the input once.

    Features are channels and then taps, or if `innermost` the other way round.
    """
    samples, channels, pixels = x.shape
    count = taps.shape[1]
    result = torch.empty(samples, channels * count, dtype=torch.float32, device=x.device)
    to = (1, channels) if innermost else (count, 1)
    key = (x.shape, x.stride(), x.dtype, count, innermost, x.device.index, x.data_ptr() % 16, taps.data_ptr() % 16)
    launch = _TAP_MEANS.get(key)
    if launch is None:
        # TF32 has all digits of half precision.
        precision = "tf32x3" if x.dtype is torch.float32 else "tf32"
        block, chunk = _block(channels, 16, 64), _block(pixels, 32, 128)
        constants = {"TAPS": _block(count, 16), "CHANNELS": block, "PIXELS": chunk, "PRECISION": precision}
        launch = remember(_TAP_MEANS, key, Launch(_tap_means, (triton.cdiv(channels, block), samples, 1), 4, constants))
    launch(x, taps, result, places, pixels, count, channels, *x.stride(), *to)
    return result


def _block(size: int, least: int, most: int = 1024) -> int:
    """A power of two that holds so many, within bounds."""
    return min(most, max(least, int(triton.next_power_of_2(size))))


@triton.jit
def _tap_means(
    x,
    taps,
    result,
    places,
    pixels,
    count,
    channels,
    x_sample,
    x_channel,
    x_pixel,
    to_channel,
    to_tap,
    TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sample = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    t = tl.arange(0, TAPS)
    x += sample * x_sample
    total = tl.zeros((TAPS, CHANNELS), dtype=tl.float32)
    for start in range(0, pixels, PIXELS):
        p = start + tl.arange(0, PIXELS)
        touched = tl.load(taps + p[None, :] * count + t[:, None], (t[:, None] < count) & (p[None, :] < pixels), other=0.0)
        place = p[:, None].to(tl.int64) * x_pixel + c[None, :].to(tl.int64) * x_channel
        tile = tl.load(x + place, (p[:, None] < pixels) & (c[None, :] < channels), other=0.0)
        total = tl.dot(touched.to(tl.float32), tile.to(tl.float32), total, input_precision=PRECISION)
    to = sample * channels * count + c[None, :].to(tl.int64) * to_channel + t[:, None] * to_tap
    tl.store(result + to, total / places, (t[:, None] < count) & (c[None, :] < channels))


@triton.jit
def _average(
    x,
    mask,
    result,
    positions,
    features,
    x_sample,
    x_position,
    x_feature,
    mask_sample,
    mask_position,
    POSITIONS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    sample = tl.program_id(1).to(tl.int64)
    f = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    x += sample * x_sample
    mask += sample * mask_sample
    total = tl.zeros((FEATURES,), dtype=tl.float32)
    count = tl.zeros((POSITIONS,), dtype=tl.float32)
    for start in range(0, positions, POSITIONS):
        p = start + tl.arange(0, POSITIONS)
        counts = tl.load(mask + p * mask_position, p < positions, other=0) != 0
        place = p[:, None].to(tl.int64) * x_position + f[None, :].to(tl.int64) * x_feature
        total += tl.sum(tl.load(x + place, counts[:, None] & (f[None, :] < features), other=0.0).to(tl.float32), axis=0)
        count += counts.to(tl.float32)
    tl.store(result + sample * features + f, total / tl.maximum(tl.sum(count, axis=0), 1.0), f < features)
