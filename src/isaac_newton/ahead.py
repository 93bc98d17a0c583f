"""The inverses of a backward pass in one go, when the first of them is asked for.

A conditioner depends on its layer's inputs alone, so all of them can be had at once. On a CPU inverses of one size are one
factorization, and one after the other the same code runs warm, in about half the time that it takes between the steps of a
backward pass. On a GPU, where the host is what an eager step waits for, all of them are one or two launches.
"""

import math
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from isaac_newton import kernels
from isaac_newton.damping import number
from isaac_newton.site import Site

__all__ = ["Awaited", "can_wait"]

_CPU = (-1, 0)
_PLAIN = kernels.Conditioner(None)
_PRECISE = (torch.float32, torch.float64)
#: Forward passes whose graphs are dropped leave dead references behind.
_MOST_REFERENCES = 1024


def can_wait(input: Tensor) -> bool:
    """Whether it is worth it, and whether this input may be kept beside what autograd saves."""
    return (
        (kernels.can_fuse(input, _size_of_inverse(input)) if input.is_cuda else input.is_cpu and input.dtype in _PRECISE)
        # Activation checkpointing and offloading do not want tensors to be kept.
        and torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    )


def _size_of_inverse(input: Tensor) -> int:
    features = input.shape[-1]
    return min(features, input.numel() // max(features, 1))


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
        self.found = _PLAIN
        self._pass: int | None = None
        device = input.get_device()
        self._place = (device, torch._C._cuda_getCurrentRawStream(device)) if device >= 0 else _CPU
        awaited = site.settings.awaited
        if len(awaited) >= _MOST_REFERENCES:
            awaited[:] = [reference for reference in awaited if reference() is not None]
        awaited.append(weakref.ref(self))

    def conditioner(self) -> kernels.Conditioner:
        """(I + a aᵀ/(bλ))⁻¹, or on the other side where that is smaller, or what it makes of the rows."""
        settings = self.site.settings
        task = settings.graph_task
        if self._pass != task:
            together: list[Awaited] = [self]
            elsewhere: list[Awaited] = []
            for reference in settings.awaited:
                one = reference()
                # What runs on another stream is not there yet for this one, nor this one's for that.
                if one is not None and one is not self:
                    (together if one._place == self._place else elsewhere).append(one)
            settings.awaited[:] = [weakref.ref(one) for one in elsewhere]
            # In this order: another thread may ask for any of them meanwhile.
            for one, one.found in zip(together, _find(together), strict=True):
                one._pass = task
        return self.found


def _find(together: Sequence[Awaited]) -> list[kernels.Conditioner]:
    """The conditioners of one attachment, on one device and stream."""
    settings = together[0].site.settings
    strength, relative = number(settings.damping, settings.step)
    found: dict[int, kernels.Conditioner] = {}
    if strength == math.inf:
        return [_PLAIN] * len(together)
    asked, jobs = [], []
    for one in together:
        if id(one.input) in found:
            continue
        found[id(one.input)] = _PLAIN
        rows = one.input if one.input.dim() == 2 else one.input.reshape(-1, one.input.shape[-1])
        if rows.numel():
            asked.append(one)
            jobs.append((rows, settings.input_damping(rows) if relative else strength, one.outputs))
    for one, (conditioner, failures) in zip(asked, kernels.conditioners(jobs), strict=True):
        found[id(one.input)] = conditioner
        if isinstance(failures, Tensor) or failures:
            one.site.fell_back(failures)
    return [found[id(one.input)] for one in together]
