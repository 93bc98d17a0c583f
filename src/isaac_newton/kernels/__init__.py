"""The stages made fast, over lists of layers: on a CPU by libraries (`cpu`), on a GPU by Triton (the other files)."""

import functools
import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from isaac_newton.torch_private import differentiates_forward, has_values, is_transformed

__all__ = ["can_group", "groupable", "is_differentiable"]

_PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)


def can_group(x: Tensor) -> bool:
    """Whether the Triton kernels can take this tensor. Importing them takes a moment, so that it waits until somebody may."""
    return x.is_cuda and x.dtype in _PRECISIONS and has_triton() and not is_differentiable(x)


def groupable(xs: Sequence[Tensor]) -> list[bool]:
    """`can_group` of each, with the questions about torch's state asked once."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or is_transformed() or differentiates_forward():
        return [can_group(x) for x in xs]
    return [x.is_cuda and x.dtype in _PRECISIONS and has_triton() for x in xs]


def is_differentiable(*tensors: Tensor) -> bool:
    """Whether torch, its compiler or torch.func has to see what is done with these."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return True
    return differentiates_forward() or not all(map(has_values, tensors))


@functools.cache
def has_triton() -> bool:
    """Whether it is installed."""
    return importlib.util.find_spec("triton") is not None
