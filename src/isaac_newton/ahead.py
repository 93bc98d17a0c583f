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

__all__ = ["Awaited"]

#: Forward passes whose graphs are dropped leave dead references behind.
_MOST_REFERENCES = 1024


class Awaited:
    """The rows that one use of a layer saved, and their inverse once somebody has asked for any.

    Args:
        site: The layer's site.
        shared: What it shares with other layers that received the same input.
    """

    __slots__ = ("__weakref__", "_inverse", "_pass", "_stream", "rows", "shared", "site")

    def __init__(self, site: Site, shared: Shared) -> None:
        self.site, self.shared = site, shared
        self.rows: Float[Tensor, "rows in"] | None = None
        self._inverse: Tensor | None = None
        self._pass = -1
        self._stream = 0

    def saved(self, rows: Tensor) -> None:
        """These are the rows; they must carry no graph."""
        self.rows = rows if rows.dim() == 2 else rows.flatten(0, -2)
        if rows.is_cuda:
            self._stream = torch._C._cuda_getCurrentRawStream(rows.device.index)
        awaited = self.site.settings.awaited
        if len(awaited) >= _MOST_REFERENCES:
            awaited[:] = [reference for reference in awaited if reference() is not None]
        awaited.append(weakref.ref(self))

    def inverse(self) -> Tensor | None:
        """(I + a aᵀ/(bλ))⁻¹, or on the other side where that is smaller; None for the plain gradient."""
        settings = self.site.settings
        if self._pass != settings.backward_passes:
            found, settings.awaited[:] = [reference() for reference in settings.awaited], []
            together = [self, *(one for one in found if one is not None and one is not self)]
            # What another stream has written may not be there yet.
            settings.awaited.extend(weakref.ref(one) for one in together if not self._is_beside(one))
            _invert([one for one in together if self._is_beside(one)])
        inverse, self._inverse = self._inverse, None
        # Asked again, through a graph that is kept, it is computed again.
        self._pass = -1
        return inverse

    def _is_beside(self, other: "Awaited") -> bool:
        assert self.rows is not None
        assert other.rows is not None
        return self.rows.device == other.rows.device and self._stream == other._stream


def _invert(together: Sequence[Awaited]) -> None:
    leaders: dict[int, Awaited] = {}
    work: list[tuple[Awaited, Tensor, float | Tensor, int]] = []
    for one in together:
        one._pass = one.site.settings.backward_passes
        if leaders.setdefault(id(one.shared), one) is not one:
            continue
        assert one.rows is not None
        count, features = one.rows.shape
        damping = one.site.settings.input_damping(one.rows)
        if not (count == 0 or features == 0 or (isinstance(damping, float) and damping == math.inf)):
            work.append((one, one.rows if count < features else one.rows.mT, damping, count))
    for (one, *_), (inverse, failures) in zip(work, kernels.inverses([job[1:] for job in work]), strict=True):
        one._inverse = inverse
        if isinstance(failures, Tensor) or failures:
            one.site.fell_back(failures)
    for one in together:
        one._inverse = leaders[id(one.shared)]._inverse
