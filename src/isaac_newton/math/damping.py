"""What the damping λ can be: a number, relative to the layer's inputs, or a schedule of either."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from isaac_newton.math.equations import check_damping

__all__ = ["AUTO", "Damping", "Relative", "RelativeTo", "as_float", "check", "number", "relative_damping", "relative_to"]

#: What a damping is a multiple of: nothing, or an eigenvalue of the rows' second moment.
RelativeTo: TypeAlias = Literal["", "mean", "largest"]


@dataclass(frozen=True)
class Relative:
    r"""A damping that follows the size of the layer's inputs: $ρ$ times an eigenvalue of $a^\top a / b$, per layer and step.

    The result no longer depends on the scale of the inputs, and one $ρ$ serves layers of different scales. The mean
    eigenvalue is the mean square of the inputs' numbers. The largest one is estimated by eight products with a vector. The
    estimate is never above it, and good to four digits where the eigenvalue stands out.

    Args:
        ratio: $ρ > 0$.
        to: Which eigenvalue, the "mean" or the "largest".
    """

    ratio: float
    to: Literal["mean", "largest"] = "mean"

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", as_float(self.ratio, "ratio"))
        if math.isinf(self.ratio):
            raise ValueError("ratio must be finite, got inf; use damping=math.inf for the plain gradient")
        if self.to not in ("mean", "largest"):
            raise ValueError(f"to must be one of 'mean', 'largest', got {self.to!r}")


Damping: TypeAlias = float | Relative | Callable[[int], "float | Relative"]


def check(value: Any, name: str = "damping") -> Damping:
    """Return `value` if it can be a damping, else say why not."""
    if isinstance(value, str) and value == "auto" and name == "damping":
        return AUTO
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


#: What `damping="auto"` stands for: the evidence is in docs/damping.md.
AUTO = Relative(0.1, to="largest")


def relative_to(value: Damping) -> RelativeTo | None:
    """What a damping is relative to, whatever its number; None for a schedule, which says so step by step."""
    if callable(value):
        return None
    return value.to if isinstance(value, Relative) else ""


def number(value: Damping, step: int) -> tuple[float, RelativeTo]:
    """λ or ρ at this step, and what it is relative to."""
    if callable(value):
        scheduled = value(step)
        if callable(scheduled):
            raise TypeError(f"a damping schedule must return a number or isaac.Relative, got {scheduled!r} at step {step}")
        try:
            value = check(scheduled)
        except (TypeError, ValueError) as error:
            raise type(error)(f"the damping schedule returned {scheduled!r} at step {step}: {error}") from None
    if isinstance(value, Relative):
        return value.ratio, value.to
    assert not callable(value)
    return value, ""


def relative_damping(eigenvalue: Float[Tensor, "*groups"], ratio: float | Tensor) -> Float[Tensor, "*groups"]:
    """ρ times an eigenvalue of xᵀx / rows."""
    # All-zero rows have no curvature to damp: any positive λ gives the plain gradient, so keep it off zero.
    return (ratio * eigenvalue).clamp_min(torch.finfo(eigenvalue.dtype).tiny)
