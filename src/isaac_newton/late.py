"""Products of a captured step that wait for the end of its backward pass: then a few launches do them all, in place.

A small network's step is a long chain of short kernels. Every branch off that chain takes its time, and what a branch for each
layer would do, multiply a gradient by what a few rows say, is shorter than that.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from isaac_newton import kernels
from isaac_newton.kernels import streams

__all__ = ["Late", "put_off"]


class Late(NamedTuple):
    """A gradient that is plain until the backward pass ends.

    Args:
        parameter: Whose it is; nobody reads its `.grad` before.
        gradient: As autograd gets it.
        matrix: The shape (1, outputs, features) in which its rows lie in memory.
        r: Rows of the conditioner.
        damping: λ, on the device.
        branch: Whose branch the rows were computed on.
    """

    parameter: Tensor
    gradient: Tensor
    matrix: torch.Size
    r: Float[Tensor, "1 rows in"]
    damping: Tensor
    branch: object

    def target(self) -> Float[Tensor, "1 out in"]:
        """The gradient that there is now: autograd's, a copy of it, or what `torch.autograd.grad` returns."""
        found = self.gradient if self.parameter.grad is None else self.parameter.grad
        strides = (self.matrix[1] * self.matrix[2], self.matrix[2], 1)
        return found.detach().as_strided(self.matrix, strides)


def put_off(late: Late, others: list[Late]) -> None:
    """Do this one when the backward pass that is running has ended, with all the others."""
    others.append(late)
    if len(others) == 1:
        torch.autograd.Variable._execution_engine.queue_callback(lambda: _run(others))


def _run(late: list[Late]) -> None:
    found = late[:]
    late.clear()
    for branch in {id(one.branch): one.branch for one in found}.values():
        streams.join(branch)
    groups = [found[start : start + kernels.JOBS] for start in range(0, len(found), kernels.JOBS)]
    for group in groups:
        targets = [one.target() for one in group]
        with streams.beside(group[0].branch, *targets):
            kernels.multiply_each([(target, one.r, one.damping) for target, one in zip(targets, group, strict=True)])
    for group in groups:
        streams.join(group[0].branch)
