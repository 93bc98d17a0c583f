"""A training method: an optimizer, its learning rate, and the damping where ISAAC conditions the gradients."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

import isaac_newton as isaac

__all__ = ["OPTIMIZERS", "Method"]

OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = MappingProxyType(
    {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam}
)


@dataclass(frozen=True)
class Method:
    """How to train; the same for every model and every seed.

    Args:
        name: What tables and pictures call it.
        optimizer: A key of `OPTIMIZERS`. Methods with the same optimizer are one family: compare them with each other.
        learning_rate: Of the optimizer; its other options stay torch's defaults.
        damping: λ_a of `isaac_newton.attach`, or None for the plain gradient.
    """

    name: str
    optimizer: str
    learning_rate: float
    damping: float | None = None

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be > 0 and finite, got {self.learning_rate}")
        if self.damping is not None and not self.damping > 0:
            raise ValueError(f"damping must be > 0, got {self.damping}; use None for the plain gradient")

    @property
    def conditioned(self) -> bool:
        """Whether ISAAC conditions the gradients."""
        return self.damping is not None

    def prepare(self, model: nn.Module) -> torch.optim.Optimizer:
        """Attach ISAAC to `model` if the method says so, and return the optimizer for its parameters."""
        if self.damping is not None:
            isaac.attach(model, damping=self.damping)
        return OPTIMIZERS[self.optimizer](model.parameters(), lr=self.learning_rate)
