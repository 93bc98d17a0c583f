"""What a "row" is: the inputs of a layer, brought into one layout in which every layer looks linear.

A *view* has the shape (groups, samples, *positions, *features): a strided view of the input, nothing copied.
`positions` says how many of its dimensions are positions: none for a plain batch, one for a sequence, two for the places of
a two-dimensional convolution. `gather` turns it into the rows that feed a conditioner, (groups, rows, features), and is the
only place that copies.
"""

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Padding", "Sharing", "gather", "patches", "sequence"]

Sharing: TypeAlias = Literal["expand", "reduce"]
Padding: TypeAlias = Sequence[int] | Literal["same", "valid"]


def sequence(x: Float[Tensor, "..."]) -> tuple[Tensor, int]:
    """The view of a linear layer's input: (samples, *positions, features); a vector is one sample without positions."""
    x = x if x.dim() > 1 else x[None]
    return x[None], x.dim() - 2


def patches(
    x: Float[Tensor, "samples channels *space"],
    *,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Padding,
    dilation: Sequence[int],
    groups: int,
    padding_mode: str = "zeros",
) -> tuple[Tensor, int]:
    """The view of a convolution's input: what the kernel sees at each place, (groups, samples, *places, channels, *kernel)."""
    sides: list[int] = []
    for dim in reversed(range(len(kernel))):
        if padding == "valid":
            before = after = 0
        elif padding == "same":
            total = dilation[dim] * (kernel[dim] - 1)
            before, after = total // 2, total - total // 2
        else:
            before = after = int(padding[dim])
        sides += [before, after]
    if any(sides):
        x = F.pad(x, sides, mode="constant" if padding_mode == "zeros" else padding_mode)
    for dim in range(len(kernel)):
        x = x.unfold(2 + dim, dilation[dim] * (kernel[dim] - 1) + 1, stride[dim])[..., :: dilation[dim]]
    # (samples, channels, *places, *kernel) -> (groups, samples, *places, channels of the group, *kernel)
    space = len(kernel)
    x = x.unflatten(1, (groups, x.shape[1] // groups))
    places, window = range(3, 3 + space), range(3 + space, 3 + 2 * space)
    return x.permute(1, 0, *places, 2, *window), space


def gather(
    view: Tensor,
    positions: int,
    *,
    sharing: Sharing = "expand",
    max_rows: int | None = None,
    mask: Bool[Tensor, "..."] | None = None,
    seed: int = 0,
) -> Float[Tensor, "groups rows features"]:
    """The rows that feed a conditioner.

    Args:
        view: (groups, samples, *positions, *features).
        positions: How many dimensions are positions.
        sharing: "expand": each position of each sample is a row. "reduce": a sample's positions are averaged to one row.
        max_rows: At most this many rows, drawn without replacement, all alike likely: rᵀr / rows stays unbiased.
        mask: (samples, *positions), true where a position counts.
        seed: Of the draw.
    """
    groups, features = view.shape[0], view.shape[2 + positions :]
    width = math.prod(features)
    if sharing == "reduce":
        view = _average(view, positions, mask)
        if mask is not None and positions == 0:
            view = view[:, mask]
        mask, positions = None, 0
    places = view.shape[1 : 2 + positions]
    count = math.prod(places) if mask is None else int(mask.sum())
    if max_rows is None or count <= max_rows:
        rows = view if mask is None else view[:, mask]
        return rows.reshape(groups, count, width)
    random = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(count, generator=random)[:max_rows].to(view.device)
    if mask is not None:
        drawn = mask.reshape(-1).nonzero().squeeze(1)[drawn]
    # Indexing the view copies the drawn rows only, whatever the size of all the patches.
    index: tuple[slice | Tensor, ...] = (slice(None), *torch.unravel_index(drawn, places))
    return view[index].reshape(groups, max_rows, width)


def _average(view: Tensor, positions: int, mask: Tensor | None) -> Tensor:
    """(groups, samples, *features): the mean over the positions that count."""
    if positions == 0:
        return view
    dims = tuple(range(2, 2 + positions))
    if mask is None:
        return view.mean(dims)
    weight = mask.reshape(1, *mask.shape, *[1] * (view.dim() - 2 - positions)).to(view.dtype)
    # A sample without a position that counts has the row 0, which conditions nothing.
    return (view * weight).sum(dims) / weight.sum(dims).clamp_min(1)
