"""What the damping λ can be: a number, relative to the layer's inputs, or a schedule of either."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from isaac_newton.math.equations import check_damping

__all__ = ["Damping", "Relative", "as_float", "check", "number", "relative_damping"]


@dataclass(frozen=True)
class Relative:
    r"""A damping that follows the size of the layer's inputs: $λ = ρ · \overline{‖a‖^2} / n$, per layer and step.

    $\overline{‖a‖^2}$ is the mean squared norm of the rows and $n$ their width, so $λ$ is $ρ$ times the mean eigenvalue of
    $a^\top a / b$. The result no longer depends on the scale of the inputs, and one $ρ$ serves layers of different scales.

    Args:
        ratio: $ρ > 0$.
    """

    ratio: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", as_float(self.ratio, "ratio"))
        if math.isinf(self.ratio):
            raise ValueError("ratio must be finite, got inf; use damping=math.inf for the plain gradient")


Damping: TypeAlias = float | Relative | Callable[[int], "float | Relative"]


def check(value: Any, name: str = "damping") -> Damping:
    """Return `value` if it can be a damping, else say why not."""
    if isinstance(value, Relative) or (callable(value) and not isinstance(value, type)):
        checked: Damping = value
        return checked
    return as_float(value, name)


def as_float(value: float | Tensor, name: str) -> float:
    """A damping that is a number, as a float."""
    check_damping(value, name)
    if isinstance(value, Tensor):
        # It is read now, once: what it holds has to be looked at too.
        value = value.item()
        check_damping(value, name)
    return float(value)


def number(value: Damping, step: int) -> tuple[float, bool]:
    """λ or ρ at this step, and whether it is ρ."""
    if callable(value):
        scheduled = value(step)
        if callable(scheduled):
            raise TypeError(f"a damping schedule must return a number or isaac.Relative, got {scheduled!r} at step {step}")
        try:
            value = check(scheduled)
        except (TypeError, ValueError) as error:
            raise type(error)(f"the damping schedule returned {scheduled!r} at step {step}: {error}") from None
    if isinstance(value, Relative):
        return value.ratio, True
    assert not callable(value)
    return value, False


def relative_damping(mean_square: Float[Tensor, "*groups"], ratio: float | Tensor) -> Float[Tensor, "*groups"]:
    """ρ times the mean eigenvalue of xᵀx / rows, which is the mean square of the rows' numbers."""
    # All-zero rows have no curvature to damp: any positive λ gives the plain gradient, so keep it off zero.
    return (ratio * mean_square).clamp_min(torch.finfo(mean_square.dtype).tiny)
