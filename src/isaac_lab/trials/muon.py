"""Muon for networks with convolutions: torch's takes matrices, and a kernel is one with a row for each output."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from isaac_newton.rows import has_channels_innermost

__all__ = ["Muon"]


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` that takes the kernels of convolutions too, as those do who train such networks with it.

    The order of a matrix's columns makes no difference to Muon, so that of the memory is taken, and nothing is copied.

    Args:
        weights: Matrices and kernels.
        options: Of `torch.optim.Muon`.
    """

    def __init__(self, weights: Iterable[Tensor], **options: Any) -> None:
        weights = list(weights)
        self._kernels = {weight: nn.Parameter(_matrix(weight.detach(), weight)) for weight in weights if weight.dim() > 2}
        super().__init__([self._kernels.get(weight, weight) for weight in weights], **options)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also of the kernels."""
        super().zero_grad(set_to_none)
        for kernel in self._kernels:
            kernel.grad = None

    def step(self, closure: Any = None) -> Any:
        """One step with the gradients that the kernels have."""
        for kernel, matrix in self._kernels.items():
            matrix.grad = None if kernel.grad is None else _matrix(kernel.grad, kernel)
        return super().step(closure)  # type: ignore[no-untyped-call]


def _matrix(x: Tensor, kernel: Tensor) -> Tensor:
    """A row for each output, in the order of the kernel's memory."""
    return (x.movedim(1, -1) if has_channels_innermost(kernel) else x).flatten(1)
