"""Torch's Muon without two limits that have nothing to do with the method: no convolutions, no new rate in a CUDA graph."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Muon"]


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` finds the updates, at a learning rate of 1; they are added here, at whatever the rate is.

    The kernel of a convolution is a matrix with a row for each output, as those have it who train such networks with Muon.

    Args:
        weights: Matrices and kernels.
        lr: The learning rate; a tensor on the device in a captured step.
        weight_decay: Decoupled, in proportion to the rate.
    """

    def __init__(self, weights: Iterable[Tensor], *, lr: float, weight_decay: float) -> None:
        # The last one tells `isaac_newton.capture` that the rate may be on the device.
        super().__init__(weights, {"lr": lr, "weight_decay": weight_decay, "capturable": False})
        (group,) = self.param_groups
        self._updates = [nn.Parameter(torch.zeros_like(weight.flatten(1))) for weight in group["params"]]
        self.inner = torch.optim.Muon(self._updates, lr=1.0, weight_decay=0.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step."""
        (group,) = self.param_groups
        pairs = [
            (weight, update) for weight, update in zip(group["params"], self._updates, strict=True) if weight.grad is not None
        ]
        if closure is not None or not pairs:
            raise ValueError("Muon needs gradients, and takes no closure")
        for weight, update in pairs:
            update.grad = weight.grad.flatten(1)
        weights, updates = (list(tensors) for tensors in zip(*pairs, strict=True))
        torch._foreach_zero_(updates)
        self.inner.step()
        rate = group["lr"]
        torch._foreach_mul_(updates, rate)
        torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])
        torch._foreach_add_(weights, [update.view(weight.shape) for weight, update in pairs])
        for update in updates:
            # Nobody needs the gradient any more.
            update.grad = None
