"""One conditioned layer as the backward pass sees it."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isaac_newton import compiled
from isaac_newton.curvature import Curvature, Place
from isaac_newton.settings import Settings
from isaac_newton.statistics import Statistics

__all__ = ["Site"]

_NEEDS_ATTACHMENT = "when='step' needs a layer that was attached with isaac_newton.attach"


class Site:
    """One conditioned layer as the backward pass sees it: its name, the settings it shares, its own statistics."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self.settings = settings
        self.statistics = Statistics()
        #: With `when="step"`: what each matrix of the layer has gathered.
        self.curvatures: dict[Place, Curvature] = {}
        self.number = compiled.number(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, number=compiled.number(self))

    def place(self, weight: Tensor, *, transposed: bool = False, bias: Tensor | None = None) -> Place:
        """Where the gradient of this weight will be found at the step. Only the attached layer knows its parameters."""
        raise TypeError(_NEEDS_ATTACHMENT)

    def is_empty(self, place: Place) -> bool:
        """Whether the parameter has no gradient yet: nothing was accumulated since the last step."""
        raise TypeError(_NEEDS_ATTACHMENT)

    def leaves(self, place: Place) -> None:
        """Called at the end of a backward pass that gathered for this place."""
        raise TypeError(_NEEDS_ATTACHMENT)

    def gathers(self, place: Place) -> bool:
        """Whether the next step will look at what the backward passes before it gather."""
        curvature, settings = self.curvatures.get(place), self.settings
        return settings.decay > 0 or curvature is None or curvature.conditioner is None or curvature.age >= settings.refresh

    def curvature(self, place: Place) -> Curvature:
        """That of one matrix, ready to gather in the current backward pass."""
        curvature = self.curvatures.setdefault(place, Curvature())
        if curvature.enter(torch._C._current_graph_task_id()):
            torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self.leaves, place))
            # A pass that starts from an empty gradient starts from nothing here too, so a batch whose step was skipped (an
            # overflow under a `GradScaler`) leaves no trace.
            if curvature.gathered and self.is_empty(place):
                curvature.clear()
                self.settings.warn_about_dropped()
        return curvature

    def fell_back(self, failures: int | Tensor = 1) -> None:
        """A factorization failed. On a GPU the number is not known yet: it is read with `Handle.statistics`."""
        if isinstance(failures, Tensor):
            self.statistics.count_on_device(failures)
        else:
            self.statistics.fallbacks += failures
            self.settings.warn_about_failure()

    def inspect(self, values: Callable[[], Tensor], damping: float | Tensor, plain: Tensor, conditioned: Tensor) -> None:
        """Record what conditioning did: the eigenvalues of the inputs' second moment, and the gradient before and after.

        Only where values are there to be looked at: not in captured steps and `torch.func`.
        """
        settings = self.settings
        traced = torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(plain)
        if not traced and settings.overlap is None:
            occasion = settings.steps if settings.when == "step" else settings.backward_passes
            self.statistics.inspect(occasion, values(), float(damping), plain, conditioned)
