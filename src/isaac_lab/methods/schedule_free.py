"""Schedule-Free AdamW: gradients between a fast iterate and the average of all, which is measured; a CUDA graph can hold it."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

#: How near to the average gradients are taken.
NEAR, SMALLEST = 0.9, 1e-8


class ScheduleFree(torch.optim.Optimizer):
    """Kept is the distance of the fast iterate from the weights, zero at the start; weight decay is at the weights."""

    def __init__(self, weights: Iterable[Any], *, lr: float, beta2: float = 0.999, weight_decay: float = 0.0) -> None:
        super().__init__(weights, {"lr": lr, "beta2": beta2, "weight_decay": weight_decay, "capturable": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            for weight in weights:
                if not self.state[weight]:
                    self._begin(weight)
            share, correction, rate = self._numbers(self.state[weights[0]], group)
            directions = []
            for weight in weights:
                square = self.state[weight]["square"]
                square.mul_(group["beta2"]).addcmul_(weight.grad, weight.grad, value=1 - group["beta2"])
                direction = weight.grad / (square / correction).sqrt_().add_(SMALLEST)
                directions.append(direction.add_(weight, alpha=group["weight_decay"]))
            ahead = [self.state[weight]["ahead"] for weight in weights]
            torch._foreach_add_(weights, torch._foreach_mul(ahead, share))
            torch._foreach_add_(weights, torch._foreach_mul(directions, rate * (NEAR * (1 - share) - 1)))
            torch._foreach_sub_(ahead, torch._foreach_mul(directions, rate * NEAR))
            torch._foreach_mul_(ahead, 1 - share)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The weights are the average of all iterates within, and what they were afterwards."""
        weights = [weight for weight, own in self.state.items() if own]
        before = [weight.detach().clone() for weight in weights]
        with torch.no_grad():
            for weight in weights:
                weight.add_(self.state[weight]["ahead"], alpha=1 - 1 / NEAR)
        try:
            yield
        finally:
            with torch.no_grad():
                for weight, own in zip(weights, before, strict=True):
                    weight.copy_(own)

    def _begin(self, weight: Tensor) -> None:
        numbers = {name: torch.zeros((), device=weight.device) for name in ("step", "highest", "total")}
        self.state[weight] = {"ahead": torch.zeros_like(weight), "square": torch.zeros_like(weight), **numbers}

    @staticmethod
    def _numbers(state: dict[str, Tensor], group: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """The weight of the newest iterate in the average, Adam's correction, and the rate; all on the device."""
        rate = torch.as_tensor(group["lr"], dtype=torch.float32, device=state["step"].device)
        step, highest = state["step"].add_(1), state["highest"].copy_(torch.maximum(state["highest"], rate))
        weight = highest.square()
        return weight / state["total"].add_(weight), 1 - group["beta2"] ** step, rate
