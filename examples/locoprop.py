"""A rule like LocoProp's (2022): each layer takes a few steps on a loss of its own, which knows `handle.curvature` only.

That loss is the mean of ‖D a + γ g‖² / 2 over a layer's inputs a and output gradients g, plus ‖D‖² / 2η, in the change D of
its weight. Its gradient is D S + γ ∇ + D/η, so that no batch is looked at twice.
"""

import math
import os

import torch
from torch import nn
from torch.nn import functional as F

import isaac_newton as isaac

STEPS = int(os.environ.get("ISAAC_EXAMPLE_STEPS", "200"))


class LocoProp(torch.optim.Optimizer):
    def __init__(self, model: nn.Module, lr: float, strength: float = 1000.0, inner: int = 50) -> None:
        super().__init__(model.parameters(), {"lr": lr, "strength": strength, "inner": inner})
        self.names = {p: name for name, p in model.named_parameters()}
        # With λ = ∞ gradients stay plain: the handle only gathers.
        self.handle = isaac.attach(model, damping=math.inf, when="step", decay=0.9, warm_up=5)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.handle.step()
        curvature = self.handle.curvature
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):  # none in the warm-up
                change, name = torch.zeros_like(p), self.names[p]
                if name not in curvature:  # a bias
                    p.sub_(group["lr"] * p.grad)
                    continue
                s, weak = curvature[name].to(p.dtype), 1 / group["strength"]
                rate = 1 / (s.trace() + weak)  # below one over the largest eigenvalue
                for _ in range(group["inner"]):
                    change -= rate * (change @ s + group["lr"] * p.grad + weak * change)
                p.add_(change)


def train(with_isaac: bool, rate: float) -> float:
    torch.manual_seed(0)  # the same data and initial weights for both
    teacher, model = (nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 5)) for _ in range(2))
    x = torch.rand(1000, 20) * torch.logspace(-1, 1, 20)  # directions of very different size
    y = teacher(x).detach()
    optimizer = LocoProp(model, rate) if with_isaac else torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(STEPS):
        batch = torch.randint(len(x), (100,))
        optimizer.zero_grad()
        F.mse_loss(model(x[batch]), y[batch]).backward()
        optimizer.step()
    return F.mse_loss(model(x), y).item()


if __name__ == "__main__":
    for name, with_isaac in {"SGD": False, "LocoProp": True}.items():
        loss, rate = min((train(with_isaac, rate), rate) for rate in (0.03, 0.1, 0.3, 1.0, 3.0))
        print(f"{name:8} loss {loss:.4f} after {STEPS} steps, at the best of five learning rates ({rate})")
