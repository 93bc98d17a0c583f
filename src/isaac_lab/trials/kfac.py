"""K-FAC as its users run it, on BackPACK's factors: averages over the steps, renewed now and then with their inverses."""

import copy
import importlib
import warnings
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Kfac"]

#: Of the averages, each time that they are renewed.
DECAY = 0.95


class Kfac:
    """Forward and backward pass that leave λ² (B + λI)⁻¹ ∇ (A + λI)⁻¹ in `.grad` of the weights of linear layers.

    A and B are averages of what single batches have, B from one sampled label per example. The first are plain means, so that
    the start does not weigh more than what follows. λ² as in ζ.

    Args:
        model: What is trained; its linear layers see one row per example.
        loss_fn: Of outputs and targets.
        damping: λ.
        every: Steps between two renewals.
    """

    def __init__(self, model: nn.Module, loss_fn: nn.Module, damping: float, every: int) -> None:
        # Optional, and without types of its own.
        self._backpack: Any = importlib.import_module("backpack")
        self._extensions: Any = importlib.import_module("backpack.extensions")
        # The loss is shared with the other methods, whose steps BackPACK's hooks would slow down.
        self._model, self._loss_fn = self._backpack.extend(model), self._backpack.extend(copy.deepcopy(loss_fn))
        self._weights: list[Any] = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
        self._damping, self._every, self._steps = damping, every, 0
        self._averages: list[list[Tensor]] = []
        self._inverses: list[list[Tensor]] = []

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of a batch."""
        with warnings.catch_warnings():
            # Torch warns where the network's input needs no gradient, as it should not.
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            loss = self._renewed(x, y) if self._steps % self._every == 0 else self._plain(x, y)
        self._steps += 1
        for weight, (left, right) in zip(self._weights, self._inverses, strict=True):
            weight.grad = self._damping**2 * left @ weight.grad @ right
        return loss

    def _plain(self, x: Tensor, y: Tensor) -> Tensor:
        # Nothing is kept for factors that nobody asks for.
        with self._backpack.disable():
            loss: Tensor = self._loss_fn(self._model(x), y)
            loss.backward()
        return loss

    def _renewed(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self._loss_fn(self._model(x), y)
        with self._backpack.backpack(self._extensions.KFAC(mc_samples=1)):
            loss.backward()
        found = [list(weight.kfac) for weight in self._weights]
        for weight in self._weights:
            del weight.kfac
        renewals = self._steps // self._every
        kept = min(DECAY, renewals / (renewals + 1))
        self._averages = [
            [kept * average + (1 - kept) * factor for average, factor in zip(averages, factors, strict=True)]
            for averages, factors in zip(self._averages or found, found, strict=True)
        ]
        self._inverses = [[self._inverse(average) for average in averages] for averages in self._averages]
        return loss

    def _inverse(self, factor: Tensor) -> Tensor:
        return torch.inverse(factor + self._damping * torch.eye(len(factor), device=factor.device, dtype=factor.dtype))
