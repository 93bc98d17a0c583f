"""One input, one conditioner: layers that receive the same tensor compute its inverse once per backward pass."""

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["Inputs", "Shared"]

_T = TypeVar("_T")


class Shared:
    """What the layers that received one tensor compute together.

    A value lasts until the end of the backward pass. In a step that is captured it lasts as long as the layers' graph, and the
    layers have one branch of the CUDA graph between them: what one of them computes the others read in its turn.
    """

    __slots__ = ("__weakref__", "_task", "_values", "branch", "users")

    def __init__(self) -> None:
        self.users = 0
        #: Whose branch of a CUDA graph it is: the first of the layers; None unless a step is being captured.
        self.branch: object = None
        self._task = -1
        self._values: dict[Hashable, Any] = {}

    def get(self, key: Hashable, compute: Callable[[], _T]) -> _T:
        """`compute()`, or what it returned when another layer asked."""
        if self.branch is not None:
            if key not in self._values:
                self._values[key] = compute()
            kept: _T = self._values[key]
            return kept
        task = torch._C._current_graph_task_id() if self.users > 1 else -1
        if task == -1:
            # One layer shares with nobody; outside of a backward pass nothing says when a value is outdated.
            return compute()
        if task != self._task:
            # A pass that raised has not run its callback, so a new one starts from nothing.
            self._task = task
            self._values.clear()
            torch.autograd.Variable._execution_engine.queue_callback(self._values.clear)
        if key not in self._values:
            self._values[key] = compute()
        value: _T = self._values[key]
        return value


class Inputs:
    """The tensors that layers of one attachment received, by identity and version; nothing here keeps a tensor alive."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Tensor], int, weakref.ref[Shared]]] = {}

    def shared(self, x: Tensor, branch: object = None) -> Shared:
        """The `Shared` of this tensor as it is now; a new one if it was changed in place since a layer last received it.

        In a step that is captured the layer that asks offers a `branch`.
        """
        entry = self._entries.get(id(x))
        shared = None
        # An address is used again after its tensor is gone: the reference, not the number, says whether this is the same one.
        if entry is not None and entry[0]() is x and entry[1] == x._version:
            shared = entry[2]()
        if shared is None:
            shared = Shared()
            shared.branch = branch
            if len(self._entries) > 64:
                self._entries = {key: entry for key, entry in self._entries.items() if entry[2]() is not None}
            self._entries[id(x)] = (weakref.ref(x), x._version, weakref.ref(shared))
        shared.users += 1
        return shared

    def __deepcopy__(self, memo: dict[int, object]) -> "Inputs":
        return Inputs()

    def __reduce__(self) -> tuple[type["Inputs"], tuple[()]]:
        return Inputs, ()
