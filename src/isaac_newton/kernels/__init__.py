"""How the equations are made fast: the same results as `equations`, at the lowest cost a device allows."""

import torch
from jaxtyping import Float
from torch import Tensor

from isaac_newton import equations
from isaac_newton.kernels import dense

__all__ = ["inverse"]


def inverse(x: Float[Tensor, "*groups k l"], scale: float | Tensor) -> tuple[Float[Tensor, "*groups k k"] | None, int]:
    """(I + s·x xᵀ)⁻¹ and the number of factorizations that failed; None where `x` is not finite and there is no inverse."""
    # Values of CUDA tensors cost a wait to look at; those of traced and batched tensors are not there.
    if torch.compiler.is_compiling() or x.device.type != "cpu" or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return equations.inverse(equations.precise(x), scale), 0
    return dense.inverse(x, float(scale))
