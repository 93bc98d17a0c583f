"""`F.linear` whose backward pass, torch's own, finds other rows where it saved its input.

A weight gradient is gᵀa, and a is what the forward pass saved. A saved-tensor hook that hands out (I + a aᵀ/(bλ))⁻¹ a instead
makes torch form ζ*, in C++, while input and bias gradients do not look at a at all. That spares the host a Python function in
the backward pass, which is most of what conditioning costs a small network on a GPU.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["can_replace", "linear"]


def can_replace(input: Tensor, weight: Tensor) -> bool:
    """Whether a forward pass saves this input as it is, and saves it here."""
    return (
        input.dtype is weight.dtype
        # Half-precision rows would be rounded once more.
        and (input.dtype is torch.float32 or input.dtype is torch.float64)
        and not torch.is_autocast_enabled(input.device.type)
        and not torch._C._are_functorch_transforms_active()
        # Only the innermost hooks are called. Others (activation checkpointing, offloading) must see the tensor.
        and torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        and torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        and input.numel() > 0
    )


def linear(input: Tensor, weight: Tensor, bias: Tensor | None, replace: Callable[[Tensor], Tensor]) -> Tensor | None:
    """`F.linear`; `replace` is called with the rows in a backward pass that forms the weight's gradient.

    None where it never would be, because the forward pass saved something else.
    """
    saved = _Saved(input, replace)
    torch._C._autograd._push_saved_tensors_default_hooks(saved.pack, _unpack)
    try:
        output = F.linear(input, weight, bias)
    finally:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    return None if saved.rows is None else output


class _Saved:
    """The rows as the forward pass saved them."""

    __slots__ = ("_pointer", "_replace", "_version", "rows")

    def __init__(self, input: Tensor, replace: Callable[[Tensor], Tensor]) -> None:
        self._pointer, self._replace = input.data_ptr(), replace
        self._version = 0
        self.rows: Tensor | None = None

    def pack(self, tensor: Tensor) -> Any:
        """Keep the input; the weight is saved as it is."""
        if tensor.data_ptr() != self._pointer:
            return tensor
        self.rows, self._version = tensor, tensor._version
        return self

    def unpack(self) -> Tensor:
        """What the backward pass gets."""
        rows = self.rows
        assert rows is not None
        if rows._version != self._version:
            # Torch checks this only where there are no hooks.
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: the input of "
                f"a linear layer, {tuple(rows.shape)}, is at version {rows._version}, expected {self._version}"
            )
        # The last edge of either kind of product leads to the weight.
        weight = torch._C._current_autograd_node().next_functions[-1][0]
        if weight is None or not torch._C._will_engine_execute_node(weight):
            return rows
        return self._replace(rows)


def _unpack(saved: Any) -> Tensor:
    return saved.unpack() if type(saved) is _Saved else saved
