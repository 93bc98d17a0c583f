"""Trainers: each module here has the callback for one of them and imports it; what the callbacks share is in this file."""

import inspect
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from statistics import fmean
from typing import Any, Literal

import torch
from torch import nn

from isaac_newton.api.attach import attach
from isaac_newton.api.handle import Handle
from isaac_newton.core.options import Options, Run
from isaac_newton.math.damping import Damping, check, number

__all__ = ["Attaching"]


class Attaching:
    """What the callback of any trainer does: attach when training begins, detach when it ends.

    Attributes:
        handle: The model's while it trains, to look at or to change the damping with; None before and after.
    """

    def __init__(self, damping: Damping | Literal["auto"] = "auto", **options: Any) -> None:
        super().__init__()
        _check(damping, options)
        self.handle: Handle | None = None
        self._damping = damping
        self._options = options

    def detach(self) -> None:
        """Make the model plain again, if it is not. Call it by hand where the trainer cannot say that training has ended."""
        if self.handle is not None:
            self.handle.detach()
            self.handle = None

    def _attach(
        self, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], state: Mapping[str, Any] | None = None
    ) -> None:
        # A run that ended in an exception may have left it attached.
        self.detach()
        self.handle = attach(model, self._damping, **self._options)
        if self._options.get("when") == "step":
            for optimizer in optimizers:
                self.handle.bind(optimizer)
        if state is not None:
            self.handle.load_state_dict(state)

    def _values(self) -> dict[str, float]:
        """What to log: λ (or ρ), mean rows per layer, fallbacks in all of them, multiply-adds relative to the layers' own."""
        handle = self.handle
        assert handle is not None
        done = handle.steps if self._options.get("when") == "step" else handle.backward_passes
        layers = handle.statistics.values()
        own = sum(layer.own_multiplications for layer in layers)
        return {
            "isaac_damping": number(handle.damping, max(done - 1, 0))[0],
            "isaac_rows": fmean(layer.rows for layer in layers),
            "isaac_fallbacks": float(sum(layer.fallbacks for layer in layers)),
            "isaac_extra_multiplications": sum(layer.extra_multiplications for layer in layers) / max(own, 1),
        }


def _check(damping: Damping | Literal["auto"], options: Mapping[str, Any]) -> None:
    """Refuse at once what `attach` would refuse when training begins, as far as that can be seen without a model."""
    inspect.signature(attach).bind(None, damping, **options)
    known = {field.name for field in fields(Options) if field.init}
    checked = Options(**{name: value for name, value in options.items() if name in known and value is not None})
    run = Run(checked, check(damping), options.get("output_damping", math.inf))
    if run.needs_extra_pass:
        raise ValueError(
            f"ζ with output_curvature={checked.output_curvature!r} needs handle.backward in place of loss.backward(), which a "
            "trainer calls itself; use output_curvature='empirical', or output_damping=math.inf for ζ*"
        )
