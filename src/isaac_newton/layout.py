"""How a layer's input becomes the rows of a conditioner, and its gradient a matrix that they multiply."""

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from isaac_newton import kernels, rows
from isaac_newton.curvature import Place
from isaac_newton.settings import Settings

__all__ = ["Arrange", "Layout", "cast", "working_dtype"]

#: Brings a layer's input into the layout of `rows`: the view, and how many of its dimensions are positions.
Arrange: TypeAlias = Callable[[Tensor], tuple[Tensor, int]]


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`."""
    # Even a `to` that has nothing to do takes its time, and there are many.
    return x if x.dtype is dtype else x.to(dtype)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """What linear algebra runs in where tensors have this dtype."""
    return dtype if dtype is torch.float64 else torch.float32


class Layout:
    """How a layer's input becomes rows, and its gradient a matrix (groups, outputs, features)."""

    def __init__(self, arrange: Arrange, transposed: bool, mask: Tensor | None, place: Place | None = None) -> None:
        self.arrange = arrange
        self.transposed = transposed
        self.mask = mask
        self.place = place

    def rows(
        self, input: Tensor, settings: Settings, *, drop: bool = True
    ) -> tuple[Float[Tensor, "groups rows features"], int, Bool[Tensor, " rows"] | None]:
        """The rows of the conditioner, in float32 or better, how many rows the layer multiplied, and which of the former count.

        None for all: a mask drops the others. Without `drop` they may stay, as zeros, and nobody has to look at the mask.
        """
        patches = self.arrange if isinstance(self.arrange, rows.Patches) else None
        # A mask may be one of something else in the network.
        masked = self.mask is not None and (patches is None or self.mask.shape == patches.places(input))
        if settings.sharing == "reduce" and patches is not None and not masked:
            means, count = _average_patch(input, patches)
            gathered = rows.gather(means, 0, max_rows=settings.max_rows, seed=settings.seed)
            return gathered, count * means.shape[1], None
        # Averages of half-precision numbers are formed in float32, without a copy of all of them.
        view, positions = self.arrange(input if settings.sharing == "reduce" else cast(input, working_dtype(input.dtype)))
        places = view.shape[1 : 2 + positions]
        mask = self.mask if self.mask is not None and self.mask.shape == places else None
        if mask is not None and not drop and settings.max_rows is None and (settings.sharing == "expand" or positions == 0):
            counted = mask.reshape(-1)
            blank = rows.gather(view, positions, sharing=settings.sharing).masked_fill(~counted[:, None], 0)
            return blank, math.prod(places), counted
        of_sequences = view.dim() == 4 and positions == 1 and len(view) == 1
        if settings.sharing == "reduce" and mask is not None and of_sequences and kernels.can_average(view):
            view, positions, mask = kernels.average(view[0], mask)[None], 0, None
        gathered = rows.gather(
            view, positions, sharing=settings.sharing, max_rows=settings.max_rows, mask=mask, seed=settings.seed
        )
        return gathered, math.prod(places), None

    def matrix(self, gradient: Tensor, groups: int) -> Float[Tensor, "groups outputs features"]:
        """A gradient in the shape of the weight as one matrix per group."""
        if self._innermost:
            gradient = gradient.movedim(1, -1)
        matrix = gradient.reshape(groups, gradient.shape[0] // groups, -1)
        return matrix.mT if self.transposed else matrix

    def unmatrix(self, matrix: Float[Tensor, "groups outputs features"], like: Tensor) -> Tensor:
        """The way back."""
        matrix = matrix.mT if self.transposed else matrix
        if self._innermost:
            return cast(matrix.reshape(like.movedim(1, -1).shape).movedim(-1, 1), like.dtype)
        return cast(matrix.reshape(like.shape), like.dtype)

    @property
    def _innermost(self) -> bool:
        return isinstance(self.arrange, rows.Patches) and self.arrange.innermost


def _average_patch(input: Tensor, patches: rows.Patches) -> tuple[Float[Tensor, "groups samples features"], int]:
    """`patches.average`, by one kernel where that can be."""
    if patches.groups > 1 or math.prod(patches.kernel) > kernels.MOST_TAPS or not kernels.can_average(input):
        return patches.average(input)
    x, taps, places = patches.touched(input)
    return kernels.tap_means(x, taps, max(places, 1), innermost=patches.innermost)[None], places
