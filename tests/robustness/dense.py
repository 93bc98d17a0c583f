"""What an attached layer should leave in `.grad`: slow, obvious and in float64, from what the layer saw.

Shares no code with the library: rows are written out, second moments inverted densely.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Use", "conditioner", "kfac", "matrix", "moment", "plain", "rows", "unmatrix", "zeta", "zeta_star"]


class Use(NamedTuple):
    """One call of a layer: what it received, and the gradient of what it returned."""

    inputs: tuple[Any, ...]
    gradient: Tensor


def zeta_star(g: Tensor, a: Tensor, damping: float) -> Tensor:
    """λ gᵀa (aᵀa/b + λI)⁻¹."""
    return zeta(g, g, a, float("inf"), damping)


def zeta(g: Tensor, gbar: Tensor, a: Tensor, output_damping: float, damping: float) -> Tensor:
    """(I + ḡᵀḡ/(bλ_g))⁻¹ gᵀa (I + aᵀa/(bλ_a))⁻¹."""
    g, gbar, a = g.double(), gbar.double(), a.double()
    b = max(a.shape[0], 1)
    left = torch.eye(g.shape[1], dtype=torch.float64) + gbar.T @ gbar / (b * output_damping)
    right = torch.eye(a.shape[1], dtype=torch.float64) + a.T @ a / (b * damping)
    result: Tensor = torch.linalg.solve(left, torch.linalg.solve(right, g.T @ a, left=False))
    return result


def kfac(g: Tensor, gbar: Tensor, a: Tensor, damping: float) -> Tensor:
    """(ḡᵀḡ/b + λI)⁻¹ gᵀa (aᵀa/b + λI)⁻¹."""
    return zeta(g, gbar, a, damping, damping) / damping**2


def conditioner(moment: Tensor, damping: float, power: float = 1.0) -> Tensor:
    """(I + S/λ)^−p for each group."""
    values, vectors = torch.linalg.eigh(moment)
    result: Tensor = vectors @ torch.diag_embed((1 + values.clamp_min(0) / damping) ** -power) @ vectors.mT
    return result


def moment(r: Tensor) -> tuple[Tensor, int]:
    """Σ rᵀr of rows (groups, rows, features), and how many rows these are."""
    return r.mT @ r, r.shape[1]


def rows(layer: Any, inputs: tuple[Any, ...], *, reduce: bool = False, joint: bool = False) -> Tensor:
    """The rows of a layer's input (groups, rows, features), in float64."""
    x = inputs[0] if isinstance(layer, nn.Embedding | nn.EmbeddingBag) else inputs[0].double()
    if isinstance(layer, nn.Embedding):
        view, reduce = F.one_hot(x.reshape(1, -1, 1), layer.num_embeddings).double(), False
    elif isinstance(layer, nn.EmbeddingBag):
        view = F.one_hot(x, layer.num_embeddings).double().mean(1)[None, :, None]
    elif isinstance(layer, nn.Conv1d | nn.Conv2d):
        kernel, stride, padding = layer.kernel_size, layer.stride, tuple(map(int, layer.padding))
        if isinstance(layer, nn.Conv1d):  # a sequence is an image of one line
            x = x[:, :, None]
            kernel, stride, padding = (1, *kernel), (1, *stride), (0, *padding)
        patches = F.unfold(x, kernel, 1, padding, stride)
        view = patches.unflatten(1, (layer.groups, -1)).permute(1, 0, 3, 2)
    elif isinstance(layer, nn.ConvTranspose1d):
        view = x.unflatten(1, (layer.groups, -1)).permute(1, 0, 3, 2)
    else:
        view = x.reshape(1, x.shape[0], -1, x.shape[-1])
    view = view.mean(2) if reduce else view.flatten(1, 2)
    return torch.cat([view, torch.ones_like(view[..., :1])], dim=-1) if joint else view


def plain(layer: Any, use: Use) -> tuple[Tensor, Tensor | None]:
    """The gradients of weight and bias that torch forms in float64, for an unattached copy of the layer."""
    for parameter in layer.parameters():
        parameter.grad = None
    inputs = tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in use.inputs)
    if isinstance(layer, nn.MultiheadAttention):
        layer(*inputs, need_weights=False)[0].backward(use.gradient.double())
        return layer.in_proj_weight.grad, layer.in_proj_bias.grad  # type: ignore[return-value]
    layer(*inputs).backward(use.gradient.double())
    bias = getattr(layer, "bias", None)
    return layer.weight.grad, None if bias is None else bias.grad


def matrix(layer: Any, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A gradient as one matrix (groups, outputs, features), with the bias as a last column."""
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        return weight.T[None]
    groups = getattr(layer, "groups", 1)
    result = weight.reshape(groups, weight.shape[0] // groups, -1)
    if isinstance(layer, nn.ConvTranspose1d):
        return result.mT
    return result if bias is None else torch.cat([result, bias.reshape(groups, -1, 1)], dim=-1)


def unmatrix(layer: Any, gradient: Tensor, shape: Sequence[int], *, joint: bool = False) -> tuple[Tensor, Tensor | None]:
    """The way back: weight and, where it was joined, bias."""
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        return gradient[0].T, None
    if isinstance(layer, nn.ConvTranspose1d):
        return gradient.mT.reshape(*shape), None
    if joint:
        return gradient[..., :-1].reshape(*shape), gradient[..., -1].reshape(-1)
    return gradient.reshape(*shape), None
