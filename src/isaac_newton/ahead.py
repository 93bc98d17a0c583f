"""The inverses of a backward pass in one go, when the first of them is asked for.

A conditioner depends on its layer's inputs alone, so all of them can be had at once. One after the other the same code runs
warm, in about half the time that it takes between the steps of a backward pass, and inverses of one size are one factorization.
"""

import math
import weakref
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from isaac_newton import kernels
from isaac_newton.inputs import Shared
from isaac_newton.site import Site

__all__ = ["Awaited", "can_wait"]

#: Forward passes whose graphs are dropped leave dead references behind.
_MOST_REFERENCES = 1024


def can_wait(input: Tensor) -> bool:
    """Whether it is worth it, on a CPU, and whether these rows may be kept beside what autograd saves."""
    return (
        input.device.type == "cpu"
        and (input.dtype is torch.float32 or input.dtype is torch.float64)
        # Activation checkpointing and offloading do not want tensors to be kept.
        and torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    )


class Awaited:
    """The rows that one use of a layer received, and their inverse once somebody has asked for any.

    Args:
        input: What the layer received.
        site: The layer's site.
        shared: What it shares with other layers that received the same input.
    """

    __slots__ = ("__weakref__", "_pass", "inverted", "rows", "shared", "site")

    def __init__(self, input: Tensor, site: Site, shared: Shared) -> None:
        rows = input.detach()
        self.rows: Float[Tensor, "rows in"] = rows if rows.dim() == 2 else rows.reshape(-1, rows.shape[-1])
        self.site, self.shared = site, shared
        self.inverted: Tensor | None = None
        self._pass = -1
        awaited = site.settings.awaited
        if len(awaited) >= _MOST_REFERENCES:
            awaited[:] = [reference for reference in awaited if reference() is not None]
        awaited.append(weakref.ref(self))

    def inverse(self) -> Tensor | None:
        """(I + a aᵀ/(bλ))⁻¹, or on the other side where that is smaller; None for the plain gradient."""
        settings = self.site.settings
        if self._pass != settings.backward_passes:
            found, settings.awaited[:] = [reference() for reference in settings.awaited], []
            together = [self, *(one for one in found if one is not None and one is not self)]
            for one in together:
                one._pass = settings.backward_passes
            _invert(together)
        return self.inverted


def _invert(together: Sequence[Awaited]) -> None:
    leaders: dict[int, Awaited] = {}
    work: list[tuple[Awaited, Tensor, float | Tensor, int]] = []
    for one in together:
        if leaders.setdefault(id(one.shared), one) is not one:
            continue
        count, features = one.rows.shape
        damping = one.site.settings.input_damping(one.rows)
        if not (count == 0 or features == 0 or (isinstance(damping, float) and damping == math.inf)):
            work.append((one, one.rows if count < features else one.rows.mT, damping, count))
    for (one, *_), (inverse, failures) in zip(work, kernels.inverses([job[1:] for job in work]), strict=True):
        one.inverted = inverse
        if isinstance(failures, Tensor) or failures:
            one.site.fell_back(failures)
    for one in together:
        one.inverted = leaders[id(one.shared)].inverted
