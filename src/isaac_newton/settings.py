"""What one attachment has been told: shared by all of its layers, changeable while training."""

import math
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from isaac_newton.damping import Damping, check, current

__all__ = ["BiasMode", "OutputCurvature", "OutputDamping", "Settings", "Statistics"]

BiasMode: TypeAlias = Literal["plain", "joint"]
OutputCurvature: TypeAlias = Literal["sampled", "exact", "empirical"]
OutputDamping: TypeAlias = Damping | Literal["kfac"]


@dataclass
class Settings:
    """The options of `attach`, validated, and where training stands.

    `backward_passes` is what a damping schedule is called with. `collecting` is true during the extra passes of
    `Handle.backward`, in which layers record ḡ and form no weight gradient. `empirical_scale` times the square root of its
    rows turns a layer's g into ḡ for the empirical Fisher; None: the loss is the mean over as many terms as the layer has rows.
    """

    damping: Damping = 1.0
    bias: BiasMode = "plain"
    output_damping: OutputDamping = math.inf
    output_curvature: OutputCurvature = "sampled"
    samples: int = 1
    backward_passes: int = 0
    collecting: bool = False
    empirical_scale: float | None = None
    _graph_task: int = field(default=-1, repr=False)

    def __post_init__(self) -> None:
        self.damping = check(self.damping)
        if self.output_damping != "kfac":
            self.output_damping = check(self.output_damping, "output_damping")
        check_choice("bias", self.bias, BiasMode)
        check_choice("output_curvature", self.output_curvature, OutputCurvature)
        if not isinstance(self.samples, int) or isinstance(self.samples, bool) or self.samples < 1:
            raise ValueError(f"samples must be a whole number >= 1, got {self.samples!r}")

    @property
    def conditions_outputs(self) -> bool:
        """Whether this is ζ rather than ζ*."""
        return self.output_damping != math.inf

    @property
    def needs_extra_pass(self) -> bool:
        """Whether ḡ has to be backpropagated beside g."""
        return self.conditions_outputs and self.output_curvature != "empirical"

    def enter_backward(self) -> None:
        """Count backward passes: every layer calls this, the first one in a pass counts."""
        task = torch._C._current_graph_task_id()
        if task != self._graph_task:
            self._graph_task = task
            self.backward_passes += 1

    def dampings(self, a: Tensor, gbar: Tensor | None) -> tuple[float | Tensor, float | Tensor]:
        """λ_a and λ_g for this layer in the current backward pass."""
        step = max(self.backward_passes - 1, 0)
        damping = current(self.damping, step, a, len(a))
        if self.output_damping == "kfac":
            return damping, damping
        return damping, math.inf if gbar is None else current(self.output_damping, step, gbar, len(a))


@dataclass
class Statistics:
    """What happened in one layer: `fallbacks` counts factorizations that failed and were redone with a larger damping."""

    fallbacks: int = 0


def check_choice(name: str, value: object, choices: object) -> None:
    """Refuse a value that is not one of a `Literal`'s."""
    allowed = get_args(choices)
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
