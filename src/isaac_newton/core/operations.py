"""What layers compute, and their gradients one by one: captured steps form those of weights beside the chain of the others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from isaac_newton.torch_private import convolution_gradients, copy_each, is_autocast_on

__all__ = ["LINEAR", "Convolution", "Forward", "Operation", "autocast_type", "copies", "half_type"]

#: `operation(input, weight, bias)`.
Forward: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@runtime_checkable
class Operation(Protocol):
    """A function of an input, a weight and a bias."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The output."""

    def input_gradient(self, g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """From the output's gradient."""

    def weight_gradient(self, g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Likewise; of the weight only the form is looked at."""

    def bias_gradient(self, g: Tensor) -> Tensor:
        """Likewise."""


def autocast_type(x: Tensor) -> torch.dtype | None:
    """The type to which autocast will bring this, if that is another one."""
    if not is_autocast_on() or x.dtype is not torch.float32:
        return None
    kind = "cuda" if x.is_cuda else x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def copies(xs: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Copies of all in this type, by few launches."""
    results = [torch.empty_like(x, dtype=dtype) for x in xs]
    copy_each(results, xs)
    return results


def half_type(x: Tensor) -> torch.dtype | None:
    """The type in which the layer will multiply this if that has half precision, else None."""
    kind, dtype = "cuda" if x.is_cuda else x.device.type, x.dtype
    if is_autocast_on() and torch.is_autocast_enabled(kind) and dtype is not torch.float64:
        return torch.get_autocast_dtype(kind)
    return dtype if dtype in (torch.bfloat16, torch.float16) else None


class _Linear:
    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def input_gradient(self, g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        # Under autocast g is in the half type while the weight is not: do as torch does, multiply in g's type.
        return g @ (weight if weight.dtype is g.dtype else weight.to(g.dtype))

    def weight_gradient(self, g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return g.reshape(-1, g.shape[-1]).mT @ x.reshape(-1, x.shape[-1])

    def bias_gradient(self, g: Tensor) -> Tensor:
        return g.reshape(-1, g.shape[-1]).sum(0)


#: `F.linear`.
LINEAR: Operation = _Linear()


@dataclass(frozen=True)
class Convolution:
    """A convolution of batches, in as many dimensions as its stride has; what is padded is zero."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The output."""
        return torch.convolution(x, weight, bias, self.stride, self.padding, self.dilation, False, self._none, self.groups)

    def input_gradient(self, g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """From the output's gradient."""
        return self._gradients(g, x, weight, [True, False, False])[0]

    def weight_gradient(self, g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Likewise."""
        return self._gradients(g, x, weight, [False, True, False])[1]

    def bias_gradient(self, g: Tensor) -> Tensor:
        """Likewise."""
        return g.sum([dimension for dimension in range(g.dim()) if dimension != 1])

    @property
    def _none(self) -> list[int]:
        return [0] * len(self.stride)

    def _gradients(self, g: Tensor, x: Tensor, weight: Tensor, wanted: list[bool]) -> Sequence[Tensor]:
        how = (self.stride, self.padding, self.dilation, False, self._none, self.groups)
        return convolution_gradients(g, x, weight, how, wanted)
