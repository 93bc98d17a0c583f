"""How the equations are made fast: the same results as `equations`, at the lowest cost a device allows."""

import functools
import importlib.util

import torch
from jaxtyping import Float
from torch import Tensor

from isaac_newton import equations
from isaac_newton.kernels import dense

__all__ = ["inverse"]


def inverse(
    x: Float[Tensor, "*groups k l"], damping: float | Tensor, rows: int
) -> tuple[Float[Tensor, "*groups k k"] | None, int]:
    """(I + x xᵀ/(rows·λ))⁻¹ and the number of factorizations that failed; None where `x` is not finite and there is none."""
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(x):
        # The values of traced and batched tensors are not there to be looked at.
        return equations.inverse(equations.precise(x), 1 / (rows * damping)), 0
    if x.device.type == "cpu":
        return dense.inverse(x, 1 / (rows * float(damping)))
    if x.device.type == "cuda" and x.dtype is torch.float32 and x.shape[-2] <= 128 and _has_triton():
        from isaac_newton.kernels import fused  # importing Triton takes a moment, and needs a GPU to be of use

        # In a graph the host does not count and the device does.
        return fused.inverse(x, damping, rows, launches=2 if torch.cuda.is_current_stream_capturing() else 1), 0
    return equations.inverse(equations.precise(x), 1 / (rows * damping)).to(x.dtype), 0


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
