"""A training step as CUDA graphs: one for each shape of batch, such as sentences padded to the longest of a few."""

from collections.abc import Callable

from torch import Size, Tensor

import isaac_newton as isaac

__all__ = ["Graphs"]


class Graphs:
    """A step that replays the graph of its batch's shape.

    A shape that comes seldom never gets one: its first steps run as they are.

    Args:
        step: What a training step does.
        warmup: Steps of a shape that run as they are.
    """

    def __init__(self, step: Callable[..., Tensor], warmup: int) -> None:
        self._step, self._warmup = step, warmup
        self._steps: dict[tuple[Size, ...], Callable[..., Tensor]] = {}

    def __call__(self, *batch: Tensor) -> Tensor:
        """One training step."""
        shapes = tuple(tensor.shape for tensor in batch)
        if shapes not in self._steps:
            self._steps[shapes] = isaac.capture(self._step, *batch, warmup=self._warmup)
        return self._steps[shapes](*batch)
