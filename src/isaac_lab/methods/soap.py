"""SOAP: Adam in the eigenbases of Shampoo's factors, for all weights of one shape at once; a CUDA graph can hold most steps."""

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from isaac_lab.methods.muon import alike

#: Steps between two new bases: what its authors use to make them affordable.
EVERY = 10
MOMENTUM, SMALLEST = 0.95, 1e-8
#: A larger dimension keeps its basis.
LARGEST = 10_000


class Soap(torch.optim.Optimizer):
    """The first step only begins the factors; vectors have Adam; weight decay is decoupled."""

    def __init__(self, weights: Iterable[Any], *, lr: float, beta2: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(weights, {"lr": lr, "beta2": beta2, "weight_decay": weight_decay, "capturable": False})
        #: How many steps were taken; whoever replays graphs says so before each step.
        self.done = 0

    @property
    def special(self) -> bool:
        """Whether the next step makes new bases, which a graph of the others does not."""
        return self.done % EVERY == 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            for weights in alike(group["params"]):
                gradient = torch.stack([weight.grad for weight in weights])  # type: ignore[misc]
                state = self.state[weights[0]]
                if not state:
                    self._begin(state, gradient)
                if self.done:
                    self._descend(weights, gradient, state, group)
                self._learn(gradient, state, group["beta2"])
        self.done += 1

    @staticmethod
    def _begin(state: dict[str, Tensor], gradient: Tensor) -> None:
        """All zero: what is captured begins there."""
        state["step"] = torch.zeros((), device=gradient.device)
        state["mean"], state["square"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
        for place in _preconditioned(gradient):
            size = gradient.shape[place]
            for name in ("factor", "basis"):
                state[f"{name}{place}"] = gradient.new_zeros(len(gradient), size, size)

    def _descend(self, weights: list[Tensor], gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        rate, beta2, step = group["lr"], group["beta2"], state["step"].add_(1)
        state["mean"].lerp_(gradient, 1 - MOMENTUM)
        state["square"].lerp_(_turned(gradient, state).square(), 1 - beta2)
        direction = _turned(state["mean"], state) / state["square"].sqrt().add_(SMALLEST)
        correction = (1 - beta2**step).sqrt() / (1 - MOMENTUM**step)
        moves = _turned(direction, state, back=True) * (-rate * correction)
        torch._foreach_add_(weights, list(moves.unbind()))
        torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])

    def _learn(self, gradient: Tensor, state: dict[str, Tensor], beta2: float) -> None:
        for place in _preconditioned(gradient):
            rows = gradient.movedim(place, 1).flatten(2)
            factor, basis = state[f"factor{place}"], state[f"basis{place}"]
            factor.lerp_(rows @ rows.mT, 1 - beta2)
            if not self.done:
                basis.copy_(torch.linalg.eigh(factor).eigenvectors.flip(2))
            elif self.special:
                product = factor @ basis
                order = (basis * product).sum(1).argsort(dim=1, descending=True)
                basis.copy_(torch.linalg.qr(product.gather(2, order[:, None].expand_as(product))).Q)
                shape = [len(order), *(-1 if at == place else 1 for at in range(1, gradient.dim()))]
                state["square"].copy_(state["square"].gather(place, order.view(shape).expand_as(gradient)))


def _preconditioned(gradient: Tensor) -> list[int]:
    """Dimensions that have a basis; the first is that of the weights."""
    return [place for place in range(1, gradient.dim()) if gradient.dim() > 2 and gradient.shape[place] <= LARGEST]


def _turned(x: Float[Tensor, "some ..."], state: dict[str, Tensor], *, back: bool = False) -> Float[Tensor, "some ..."]:
    """In the eigenbases, or back."""
    for place in _preconditioned(x):
        basis = state[f"basis{place}"]
        rows = x.movedim(place, -1)
        turned = rows.flatten(1, -2) @ (basis.mT if back else basis)
        x = turned.view(rows.shape).movedim(-1, place)
    return x
