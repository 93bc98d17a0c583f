"""The stages made fast, over lists of layers: on a CPU by libraries (`cpu`), on a GPU by Triton (the other files)."""

import importlib.util
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from isaac_newton.torch_private import differentiates_forward, has_values, is_transformed

__all__ = [
    "GRAM",
    "HAS_TRITON",
    "MOST_INVERTED",
    "MOST_SMALL",
    "MOST_SUBTRACTED",
    "MOST_TAPS",
    "MULTIPLIED",
    "SCALED",
    "Inverted",
    "groupable",
    "is_differentiable",
]

#: What the Triton kernels take, at most: taps of a convolution's kernel that are averaged, rows that are subtracted, and the
#: smaller side of what one program or many invert. Larger ones are torch's.
MOST_TAPS, MOST_SUBTRACTED, MOST_SMALL, MOST_INVERTED = 64, 256, 128, 1024
#: Kinds of results that kernels are asked for: also the product with x; both times 1/(kλ); also the Gram matrix.
MULTIPLIED, SCALED, GRAM = 1, 2, 4
#: Whether it is installed.
HAS_TRITON = importlib.util.find_spec("triton") is not None
_PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)


class Inverted(NamedTuple):
    """P = (I + x xᵀ/(kλ))⁻¹ or Q = (I + xᵀx/(kλ))⁻¹, λ, and what was asked for beside it; without P and Q: the identity."""

    inverse: Float[Tensor, "*groups small small"] | None = None
    multiplied: Float[Tensor, "*groups k n"] | None = None
    damping: float | Tensor = math.inf
    gram: Float[Tensor, "small small"] | None = None

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Of P x, P and x xᵀ; what is not there has that of P."""
        assert self.inverse is not None
        start = self.inverse.data_ptr()
        multiplied, gram = (start if tensor is None else tensor.data_ptr() for tensor in (self.multiplied, self.gram))
        return multiplied, start, gram


def groupable(xs: Sequence[Tensor]) -> list[bool]:
    """Which tensors the Triton kernels can take. Importing them takes a moment, so that it waits until somebody may."""
    watched = torch.is_grad_enabled() or torch.compiler.is_compiling() or is_transformed() or differentiates_forward()
    return [HAS_TRITON and x.is_cuda and x.dtype in _PRECISIONS and not (watched and is_differentiable(x)) for x in xs]


def is_differentiable(*tensors: Tensor) -> bool:
    """Whether torch, its compiler or torch.func has to see what is done with these."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return True
    watched = torch.compiler.is_compiling() or is_transformed()
    return differentiates_forward() or (watched and not all(map(has_values, tensors)))
