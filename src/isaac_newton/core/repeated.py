"""Calls that activation checkpointing repeats in the backward pass: they have the mask of the call that they repeat."""

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from isaac_newton import torch_private
from isaac_newton.core.options import Run

__all__ = ["Repeats", "is_special"]

#: So many calls before a backward pass are told apart.
_MOST = 8


def is_special(run: Run) -> bool:
    """Whether the call that runs may repeat another one or be repeated, or has a mask of its own: most are not."""
    if run.is_plain or run.memory is not None:
        return True
    if torch.compiler.is_compiling():
        return False
    return torch_private.current_pass() >= 0 or torch_private.saves_elsewhere() or not torch.is_grad_enabled()


class _Call(NamedTuple):
    """What a call of a layer depends on beside its arguments: which positions count, and whether gradients stay plain."""

    mask: Tensor | None
    is_plain: bool
    shape: torch.Size


class Repeats:
    """Of one layer: the calls since the last backward pass that may be repeated."""

    def __init__(self) -> None:
        self._calls: dict[tuple[int, bool, torch.Size], _Call] = {}
        self._noted_at = -1

    def __getstate__(self) -> dict[str, object]:
        return vars(Repeats())  # graphs are not copied

    def found(self, name: str, run: Run, x: object, *, training: bool) -> tuple[Tensor | None, bool]:
        """The mask of this call, and whether its gradients are to stay plain."""
        mask = run.memory[1] if run.memory is not None and x is run.memory[0] else run.mask
        if not isinstance(x, Tensor) or torch.compiler.is_compiling():
            return mask, run.is_plain
        call = _Call(mask, run.is_plain, x.shape)
        if torch_private.current_pass() >= 0:
            call = self._first(call, name, run)
        elif torch_private.saves_elsewhere() or (training and not torch.is_grad_enabled()):
            self._note(call, run)
        return call.mask, call.is_plain

    def _note(self, call: _Call, run: Run) -> None:
        if self._noted_at != run.backward_passes:
            self._noted_at = run.backward_passes
            self._calls.clear()
        if len(self._calls) < _MOST:
            self._calls.setdefault((id(call.mask), call.is_plain, call.shape), call)

    def _first(self, repeat: _Call, name: str, run: Run) -> _Call:
        """The call that this one repeats."""
        calls = [call for call in self._calls.values() if call.shape == repeat.shape]
        if not calls:
            return repeat
        if len(calls) > 1 and not torch_private.saves_elsewhere() and run.is_news("repeats"):
            # With hooks on saved tensors the first call has made the graph, and its mask is there.
            warnings.warn(
                f"layer {name!r} is computed again in the backward pass, as reentrant checkpoints do, and since the last one "
                "it was called with several masks, or inside and outside of handle.plain(): which of these counts cannot be "
                "told. Use use_reentrant=False, or a backward pass after each forward pass",
                RuntimeWarning,
                stacklevel=2,
            )
        return calls[-1]
