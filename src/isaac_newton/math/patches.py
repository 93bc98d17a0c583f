"""What a convolution's kernel sees: its patches as a view of the input, and their mean without forming any of them."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from isaac_newton.torch_private import has_values

__all__ = ["Padding", "Patches", "is_channels_last"]

Padding: TypeAlias = Sequence[int] | Literal["same", "valid"]


def is_channels_last(x: Tensor) -> bool:
    """Whether dimension 1 comes last in memory, and so not as torch has it by default."""
    if x.dim() == 4:  # the most frequent case, in half the time
        return not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    return x.dim() > 2 and not x.is_contiguous() and x.movedim(1, -1).is_contiguous()


@dataclass(frozen=True)
class Patches:
    """What a convolution's kernel sees at each place of its input; the arguments are those of the layer.

    `channels_last` says in which order: channels after the kernel's places, as such weights have them in
    memory.
    """

    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Padding
    dilation: Sequence[int]
    groups: int = 1
    padding_mode: str = "zeros"
    channels_last: bool = False

    def view(self, x: Float[Tensor, "..."]) -> tuple[Tensor, int]:
        """The view (groups, samples, *places, channels of the group, *kernel); an input without samples is one sample.

        If `channels_last`, (groups, samples, *places, *kernel, channels of the group).
        """
        x = self._padded(self.batched(x), self.margins())
        for dim, (kernel, stride, dilation) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True)):
            x = x.unfold(2 + dim, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
        # (samples, channels, *places, *kernel) -> (groups, samples, *places, channels of the group, *kernel)
        space = len(self.kernel)
        x = x.unflatten(1, (self.groups, x.shape[1] // self.groups))
        places, window = range(3, 3 + space), range(3 + space, 3 + 2 * space)
        return x.permute(1, 0, *places, *((*window, 2) if self.channels_last else (2, *window))), space

    __call__ = view

    def average(self, x: Float[Tensor, "..."]) -> tuple[Float[Tensor, "groups samples features"], int]:
        """The mean of a sample's patches, in float32 or better, and how many these are, without forming any of them.

        The mean of what one tap of the kernel sees is a sum over the pixels that it touches: a product with a matrix of zeros
        and ones, which factors over the dimensions.
        """
        x, sizes, total = self._sizes(x)
        samples, channels = x.shape[:2]
        taps = math.prod(self.kernel)
        at_once = x.device.type == "cuda" or taps <= _FEW_TAPS
        sums = _sums_at_once(x, sizes) if at_once else _sums_by_dimension(x, sizes)
        sums = sums.reshape(samples, self.groups, channels // self.groups, taps)
        sums = (sums.mT if self.channels_last else sums).reshape(samples, self.groups, channels // self.groups * taps)
        return (sums / max(total, 1)).transpose(0, 1), total

    def places(self, x: Float[Tensor, "..."]) -> tuple[int, ...]:
        """Samples, and the kernel's places in each dimension."""
        return self.places_of(self.batched(x).shape)

    def places_of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The same of an input with samples and this shape."""
        samples, _, *space = shape
        margins = self.margins()
        return (samples, *(self._places(dim, size, margins[dim]) for dim, size in enumerate(space)))

    def touched(
        self, x: Float[Tensor, "..."]
    ) -> tuple[Float[Tensor, "samples channels pixels"], Float[Tensor, "pixels taps"], int]:
        """What `average` is a product of: pixels, 1 where a tap of the kernel touches a pixel at some place, and the places."""
        x, sizes, total = self._sizes(x)
        return x.flatten(2), _taps(sizes, x), total

    def _sizes(self, x: Float[Tensor, "..."]) -> tuple[Float[Tensor, "samples channels ..."], tuple["_Size", ...], int]:
        """The input with samples and, unless they are zeros, its margins; its dimensions; and how many places there are."""
        x, margins = self.batched(x), self.margins()
        if self.padding_mode != "zeros":
            x, margins = self._padded(x, margins), [(0, 0)] * len(margins)
        sizes = tuple(
            _Size(size, self._places(dim, size, margin), self.kernel[dim], self.stride[dim], self.dilation[dim], margin[0])
            for dim, (size, margin) in enumerate(zip(x.shape[2:], margins, strict=True))
        )
        return x, sizes, math.prod([size.places for size in sizes])

    def _places(self, dim: int, size: int, margin: tuple[int, int]) -> int:
        return (size + sum(margin) - self.dilation[dim] * (self.kernel[dim] - 1) - 1) // self.stride[dim] + 1

    def batched(self, x: Tensor) -> Tensor:
        """With a dimension of samples: an input without is one sample."""
        return x if x.dim() == len(self.kernel) + 2 else x[None]

    def margins(self) -> list[tuple[int, int]]:
        """How far each dimension is padded, before and after."""
        if self.padding == "valid":
            return [(0, 0)] * len(self.kernel)
        if self.padding == "same":
            totals = [dilation * (kernel - 1) for kernel, dilation in zip(self.kernel, self.dilation, strict=True)]
            return [(total // 2, total - total // 2) for total in totals]
        return [(int(width), int(width)) for width in self.padding]

    def _padded(self, x: Tensor, margins: Sequence[tuple[int, int]]) -> Tensor:
        sides = [side for margin in reversed(margins) for side in margin]
        if not any(sides):
            return x
        return F.pad(x, sides, mode="constant" if self.padding_mode == "zeros" else self.padding_mode)


class _Size(NamedTuple):
    """One dimension of a convolution: pixels, places of the kernel, its arguments, and zeros before the first pixel."""

    pixels: int
    places: int
    kernel: int
    stride: int
    dilation: int
    before: int

    def taps(self, like: Tensor) -> Float[Tensor, "pixels kernel"]:
        """1 where a tap of the kernel touches a pixel at some place."""
        first = torch.arange(self.kernel, device=like.device) * self.dilation - self.before
        offset = torch.arange(self.pixels, device=like.device)[:, None] - first
        return ((offset >= 0) & (offset % self.stride == 0) & (offset < self.places * self.stride)).to(like.dtype)


#: Matrices of taps by their sizes, dtype and device: small, the same in every step, and dozens of launches to make.
_TAPS: dict[tuple[object, ...], Tensor] = {}
_MOST_TAPS = 64
#: So many are counted at once on a CPU; more in one dimension after the other.
_FEW_TAPS = 9


def _taps(sizes: tuple[_Size, ...], like: Tensor) -> Float[Tensor, "pixels kernel"]:
    """The taps of several dimensions as one matrix."""
    # What is made in a graph, or of tensors without values, is not there for others.
    if not has_values(like) or type(like) is not Tensor:
        return functools.reduce(torch.kron, [size.taps(like) for size in sizes])
    key = (sizes, like.dtype, like.device)
    found = _TAPS.get(key)
    if found is None:
        found = functools.reduce(torch.kron, [size.taps(like) for size in sizes])
        capturing = like.is_cuda and torch.cuda.is_current_stream_capturing()
        if type(found) is Tensor and not capturing:
            if len(_TAPS) >= _MOST_TAPS:
                _TAPS.clear()
            _TAPS[key] = found
    return found


def _sums_by_dimension(x: Float[Tensor, "samples channels ..."], sizes: tuple[_Size, ...]) -> Float[Tensor, "..."]:
    """Of the pixels that each tap touches, (samples · channels · taps): fewest multiplications."""
    x = x if x.dtype is torch.float64 else x.float()
    tail = 1
    for size in reversed(sizes):
        taps = _taps((size,), x)
        x = x.reshape(-1, size.pixels) @ taps if tail == 1 else taps.mT @ x.reshape(-1, size.pixels, tail)
        tail *= size.kernel
    return x


def _sums_at_once(x: Float[Tensor, "samples channels ..."], sizes: tuple[_Size, ...]) -> Float[Tensor, "samples channels taps"]:
    """The same by one product that reads the input once, as it lies in memory and on a GPU in the dtype that it has."""
    differentiable = x.requires_grad and torch.is_grad_enabled()
    half, on_gpu = x.dtype in (torch.float16, torch.bfloat16), x.device.type == "cuda"
    if half and (differentiable or not on_gpu):
        x, half = x.float(), False
    more: dict[str, Any] = {"out_dtype": torch.float32} if half else {}
    taps = _taps(sizes, x)
    samples, channels = x.shape[:2]
    # The compiler does not know how tensors of a backward pass lie in memory.
    if not torch.compiler.is_compiling() and is_channels_last(x):
        inner = x.movedim(1, -1).reshape(samples, len(taps), channels)
        sums: Tensor = torch.bmm(taps.mT.expand(samples, -1, -1), inner, **more)
        return sums.mT
    x = x.reshape(samples * channels, len(taps))
    # On a CPU a product of few rows takes a third of the time of one of few columns.
    sums = torch.mm(x, taps, **more) if on_gpu else torch.mm(taps.mT, x.mT).mT
    return sums.reshape(samples, channels, taps.shape[1])
