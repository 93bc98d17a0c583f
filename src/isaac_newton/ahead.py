"""The conditioners of a backward pass in one go, when the first of them is asked for.

A conditioner depends on its layer's inputs alone, so all of them can be had at once. On a CPU inverses of one size are one
factorization, and one after the other the same code runs warm, in about half the time that it takes between the steps of a
backward pass. On a GPU, where the host is what an eager step waits for, all of them are one or two launches. In a step that is
captured every branch that leaves the main chain takes time there, so that several layers leave it together.
"""

import math
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isaac_newton import kernels
from isaac_newton.damping import number
from isaac_newton.kernels import streams
from isaac_newton.site import Site

__all__ = ["Awaited", "Task", "can_keep", "can_wait"]

_CPU = (-1, 0)
_PLAIN = kernels.Conditioner(None)
_PRECISE = (torch.float32, torch.float64)
#: Forward passes whose graphs are dropped leave dead references behind.
_MOST_REFERENCES = 1024
#: In place of a backward pass: a captured step has the same ones each time.
_CAPTURED = -2


def can_wait(input: Tensor) -> bool:
    """Whether it is worth it for a layer with rows of its own, and whether this input may be kept."""
    fast = kernels.can_sweep(input, _size_of_inverse(input)) if input.is_cuda else input.is_cpu and input.dtype in _PRECISE
    return fast and can_keep()


def can_keep() -> bool:
    """Whether inputs may be kept beside what autograd saves: activation checkpointing and offloading do not want it."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def _size_of_inverse(input: Tensor) -> int:
    features = input.shape[-1]
    return min(features, input.numel() // max(features, 1))


class Task(NamedTuple):
    """What there is to do for one use of a layer, and what is made of the result; without that it is the conditioner itself."""

    job: kernels.Job
    finish: Callable[[kernels.Conditioner], Any] | None = None


class Awaited:
    """What one use of a layer received, and its conditioner once somebody has asked for any.

    Args:
        input: What the layer received.
        outputs: Into how many features it turns that.
        site: The layer's site.
    """

    __slots__ = ("__weakref__", "_pass", "_place", "found", "input", "outputs", "site")

    def __init__(self, input: Tensor, outputs: int, site: Site) -> None:
        # The tensor itself, so that layers which received the same one know it.
        self.input, self.outputs, self.site = input, outputs, site
        self.found: Any = _PLAIN
        self._pass: int | None = None
        device = input.get_device()
        self._place = (device, torch._C._cuda_getCurrentRawStream(device)) if device >= 0 else _CPU
        awaited = site.settings.awaited
        if len(awaited) >= _MOST_REFERENCES:
            awaited[:] = [reference for reference in awaited if reference() is not None]
        awaited.append(weakref.ref(self))

    def conditioner(self) -> Any:
        """(I + a aᵀ/(bλ))⁻¹, or on the other side where that is smaller, or what it makes of the rows."""
        settings = self.site.settings
        task = settings.graph_task if settings.overlap is None else _CAPTURED
        if self._pass != task:
            together: list[Awaited] = [self]
            elsewhere: list[Awaited] = []
            for reference in settings.awaited:
                one = reference()
                # What runs on another stream is not there yet for this one, nor this one's for that.
                if one is not None and one is not self:
                    (together if one._place == self._place else elsewhere).append(one)
            settings.awaited[:] = [weakref.ref(one) for one in elsewhere]
            if settings.overlap is None:
                found = _find(together)
            else:
                with streams.beside(settings, *(one.input for one in together)):
                    found = _find(together)
            # In this order: another thread may ask for any of them meanwhile.
            for one, one.found in zip(together, found, strict=True):
                one._pass = task
        return self.found

    def start(self) -> None:
        """In a step that is captured: begin with those that wait once they fill a launch."""
        if len(self.site.settings.awaited) >= kernels.JOBS:
            self.conditioner()

    @property
    def same(self) -> Hashable:
        """What another one has if its conditioner is this one's."""
        return id(self.input)

    def task(self, strength: float, relative: bool) -> Any:
        """A `Task`, or what is found without one. Nothing is kept here: two threads may ask for the same one at once."""
        rows = self.input if self.input.dim() == 2 else self.input.reshape(-1, self.input.shape[-1])
        if strength == math.inf or not rows.numel():
            return _PLAIN
        return Task(kernels.Job(rows, self.site.settings.input_damping(rows) if relative else strength, self.outputs))


def _find(together: Sequence[Awaited]) -> list[Any]:
    """What those of one attachment, on one device and stream, wait for."""
    settings = together[0].site.settings
    strength, relative = number(settings.damping, settings.step)
    found: dict[Hashable, Any] = {}
    names, asked, tasks = [one.same for one in together], [], []
    for one, name in zip(together, names, strict=True):
        if name not in found:
            task = found[name] = one.task(strength, relative)
            if type(task) is Task:
                asked.append((one, name))
                tasks.append(task)
    results = kernels.conditioners([task.job for task in tasks], in_graph=settings.overlap is not None)
    for (one, name), (_, finish), (conditioner, failures) in zip(asked, tasks, results, strict=True):
        found[name] = conditioner if finish is None else finish(conditioner)
        if isinstance(failures, Tensor) or failures:
            one.site.fell_back(failures)
    return [found[name] for name in names]
