"""Muon: momentum, then five Newton–Schulz steps, for all matrices of one shape at once; a CUDA graph can hold it."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

#: Of Jordan's quintic iteration.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS, MOMENTUM, SMALLEST = 5, 0.95, 1e-7


class Muon(torch.optim.Optimizer):
    """As in torch, with kernels of convolutions as matrices with a row for each output; weight decay is decoupled."""

    def __init__(self, weights: Iterable[Any], *, lr: float, weight_decay: float = 0.0) -> None:
        # The last one tells `isaac_newton.capture` that the rate may be on the device.
        super().__init__(weights, {"lr": lr, "weight_decay": weight_decay, "capturable": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        if closure is not None or not any(weight.grad is not None for group in self.param_groups for weight in group["params"]):
            raise ValueError("Muon needs gradients, and takes no closure")
        for group in self.param_groups:
            for weights in alike(group["params"]):
                self._step(weights, group["lr"], group["weight_decay"])

    def _step(self, weights: list[Tensor], rate: Any, decay: float) -> None:
        gradients = [weight.grad.flatten(1) for weight in weights]  # type: ignore[union-attr]
        for weight, gradient in zip(weights, gradients, strict=True):
            if "momentum" not in self.state[weight]:
                self.state[weight]["momentum"] = torch.zeros_like(gradient)
        means = [self.state[weight]["momentum"] for weight in weights]
        torch._foreach_lerp_(means, gradients, 1 - MOMENTUM)
        updates = orthogonalized(torch.stack(torch._foreach_lerp(gradients, means, MOMENTUM)))
        rows, columns = updates.shape[1:]
        moves = updates.to(weights[0].dtype) * (-math.sqrt(max(1, rows / columns)) * rate)
        torch._foreach_mul_(weights, 1 - rate * decay)
        torch._foreach_add_(weights, [move.view(weight.shape) for weight, move in zip(weights, moves, strict=True)])


def alike(weights: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Those with a gradient, one shape after the other."""
    found: dict[torch.Size, list[Tensor]] = {}
    for weight in weights:
        if weight.grad is not None:
            found.setdefault(weight.shape, []).append(weight)
    yield from found.values()


def orthogonalized(updates: Float[Tensor, "some rows columns"]) -> Float[Tensor, "some rows columns"]:
    """Of each matrix roughly U Vᵀ of its singular value decomposition, in bfloat16."""
    a, b, c = COEFFICIENTS
    x = updates.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.flatten(1).norm(dim=1).clamp(min=SMALLEST)[:, None, None]
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
