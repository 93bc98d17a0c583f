"""FOOF (Benzing, 2022) as an optimizer of one's own: momentum of plain gradients, times the inverse of `handle.curvature`."""

import math
import os

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import isaac_newton as isaac

STEPS = int(os.environ.get("ISAAC_EXAMPLE_STEPS", "200"))


class FOOF(torch.optim.Optimizer):
    def __init__(self, model: nn.Module, lr: float, damping: float, momentum: float = 0.9, every: int = 10) -> None:
        super().__init__(model.parameters(), {"lr": lr, "damping": damping, "momentum": momentum})
        self.names, self.every, self.inverses = {p: name for name, p in model.named_parameters()}, every, dict[str, Tensor]()
        # With λ = ∞ gradients stay plain: the handle only gathers.
        self.handle = isaac.attach(model, damping=math.inf, when="step", decay=0.95, refresh=every, gather=2, warm_up=5)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.handle.step()
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):  # none in the warm-up
                name, state = self.names[p], self.state[p]
                direction = state["momentum"] = group["momentum"] * state.get("momentum", torch.zeros_like(p)) + p.grad
                if state.setdefault("age", 0) % self.every == 0 and name in self.handle.curvature:
                    self.inverses[name] = self.handle.factor(name, group["damping"]) / group["damping"]  # (S + λI)⁻¹
                state["age"] += 1
                p.sub_(group["lr"] * (direction @ self.inverses[name] if name in self.inverses else direction))


def train(with_isaac: bool, rate: float) -> float:
    torch.manual_seed(0)  # the same data and initial weights for both
    teacher, model = (nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 5)) for _ in range(2))
    x = torch.rand(1000, 20) * torch.logspace(-1, 1, 20)  # directions of very different size
    y = teacher(x).detach()
    sgd = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    optimizer = FOOF(model, rate, 0.1) if with_isaac else sgd
    for _ in range(STEPS):
        batch = torch.randint(len(x), (100,))
        optimizer.zero_grad()
        F.mse_loss(model(x[batch]), y[batch]).backward()
        optimizer.step()
    return F.mse_loss(model(x), y).item()


if __name__ == "__main__":
    for name, with_isaac in {"SGD": False, "FOOF": True}.items():
        loss, rate = min((train(with_isaac, rate), rate) for rate in (0.03, 0.1, 0.3, 1.0, 3.0))
        print(f"{name:5} loss {loss:.4f} after {STEPS} steps, at the best of five learning rates ({rate})")
