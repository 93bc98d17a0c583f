"""`attach` from the definition: each use of a weight has its whole gradient multiplied by (I + rᵀr/(kλ))⁻¹, r written out.

Slow and obvious. A hook of torch's on a copy of the weight does it, so that autograd itself says what a gradient is, in which
order it comes, and what a second derivative sees.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import isaac_newton as isaac


def rows(layer: nn.Module, x: Tensor, sharing: str) -> Tensor:
    """What feeds the conditioner: (rows, features)."""
    if isinstance(layer, nn.Conv2d):
        view = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride).mT
    else:
        view = x.reshape(len(x), -1, x.shape[-1]) if x.dim() > 1 else x[None, None]
    return view.mean(1) if sharing == "reduce" else view.flatten(0, 1)


def conditioner(r: Tensor, damping: float | isaac.Relative) -> Tensor:
    """(I + rᵀr/(kλ))⁻¹ by a dense inverse; a relative λ is ρ times the mean eigenvalue of rᵀr/k."""
    moment = r.T @ r / len(r)
    strength = damping.ratio * moment.trace() / len(moment) if isinstance(damping, isaac.Relative) else damping
    return torch.linalg.inv(torch.eye(len(moment), dtype=r.dtype) + moment / strength)


def attach(
    model: nn.Module,
    damping: float | isaac.Relative,
    *,
    sharing: str = "expand",
    bias: str = "plain",
    max_rows: int | None = None,
) -> None:
    for layer in model.modules():
        if isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.groups == 1):
            assert max_rows is None or max_rows >= 1000, "the rows that are drawn are not known here"
            layer.forward = functools.partial(_forward, layer, damping, sharing, bias)  # type: ignore[method-assign]


def _forward(layer: Any, damping: float | isaac.Relative, sharing: str, bias: str, x: Tensor) -> Tensor:
    weight, b = layer.weight, layer.bias
    r, matrix = rows(layer, x, sharing), weight.flatten(1).clone()
    if bias == "joint":
        r, matrix = torch.cat([r, torch.ones_like(r[:, :1])], 1), torch.cat([matrix, b[:, None]], 1)
    if matrix.requires_grad:
        # The gradient of `matrix` is that of this use as a whole, second derivatives included.
        matrix.register_hook(lambda gradient: gradient @ conditioner(r, damping))
    if bias == "joint":
        matrix, b = matrix[:, :-1], matrix[:, -1]
    if isinstance(layer, nn.Conv2d):
        return F.conv2d(x, matrix.reshape(weight.shape), b, layer.stride, layer.padding, layer.dilation)
    return F.linear(x, matrix, b)
