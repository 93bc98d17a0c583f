r"""ζ* as the paper prints it, with the explicit inverse of its appendix A: what the library is compared with.

$ζ^* = g^\top \bigl(I - \tfrac{1}{λ}\, X (\tfrac{1}{λ} X + I)^{-1}\bigr) a$ with $X = a a^\top / b$ (Theorem 3).
"""

import functools
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F


def zeta_star_as_printed(g: Float[Tensor, "rows out"], a: Float[Tensor, "rows in"], damping: float) -> Float[Tensor, "out in"]:
    """The printed form, term by term and in the precision of its arguments."""
    gram = a @ a.mT / a.shape[0]
    identity = torch.eye(a.shape[0], device=a.device, dtype=a.dtype)
    middle = identity - gram @ torch.inverse(gram / damping + identity) / damping
    return g.mT @ middle @ a


def attach_formula(model: nn.Module, damping: float) -> None:
    """Let every linear layer of `model` compute its weight gradient by the printed form."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.__dict__["forward"] = functools.partial(_forward, layer, damping)


def _forward(layer: nn.Linear, damping: float, input: Tensor) -> Tensor:
    output: Tensor = _Linear.apply(input, layer.weight, layer.bias, damping)  # type: ignore[no-untyped-call]
    return output


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, damping: float) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.damping = damping
        return F.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        a, weight = ctx.saved_tensors
        needs_input, _, needs_bias = ctx.needs_input_grad[:3]
        grad_input = g @ weight if needs_input else None
        return grad_input, zeta_star_as_printed(g, a, ctx.damping), g.sum(0) if needs_bias else None, None
