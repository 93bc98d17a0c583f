r"""Embeddings: linear in one-hot rows, so the inverse is known without a factorization.

With one-hot rows $a^\top a$ is diagonal and holds the counts of the tokens: ζ* divides the gradient of token $v$ by $1 +
c_v / (bλ)$. Dividing the output gradient at each place by the factor of its token does that, for dense and sparse gradients
alike. The rows of an `EmbeddingBag` hold several ones, and its output gradient is multiplied by $(I + a a^\top /
(bλ))^{-1}$.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isaac_newton import compiled
from isaac_newton.autograd import condition_output
from isaac_newton.conditioners import multiply_rows
from isaac_newton.layers.registry import register
from isaac_newton.layout import working_dtype
from isaac_newton.site import Site

__all__: list[str] = []


@register(nn.Embedding)
def _embedding(layer: nn.Embedding, site: Site, input: Tensor) -> Tensor:
    output = type(layer).forward(layer, input)
    divide = _divide_at_run_time if torch.compiler.is_compiling() else _divide
    return condition_output(output, layer.weight, site, divide, input, site.settings.mask, ahead=_divide_later)


def _divide_later(input: Tensor, mask: Tensor | None, site: Any) -> Callable[[Tensor], Tensor]:
    counts = _counts(input, mask, site)
    factors = _factors(counts[input], counts.sum(), _damping(counts, site)).to(working_dtype(site.layer.weight.dtype))

    def divide(g: Tensor) -> Tensor:
        site.statistics.saw_counts(site.settings.backward_passes, input.numel(), site.layer.embedding_dim)
        return (g * factors[..., None]).to(g.dtype)

    return divide


def _counts(input: Tensor, mask: Tensor | None, site: Any) -> Tensor:
    """How often each token occurs; in all ranks, where they condition together."""
    layer, settings = site.layer, site.settings
    tokens = input.reshape(-1)
    counted = torch.ones_like(tokens, dtype=torch.bool)
    if layer.padding_idx is not None:
        counted = tokens != layer.padding_idx
    if mask is not None and mask.shape == input.shape:
        counted = counted & mask.reshape(-1)
    counts = torch.zeros(layer.num_embeddings, dtype=torch.float64, device=tokens.device)
    counts = counts.index_add(0, tokens, counted.to(counts.dtype))
    if settings.ranks is not None and settings.when == "backward" and settings.look is None:
        settings.ranks.add(counts)
    return counts


def _damping(counts: Tensor, site: Any) -> float | Tensor:
    # One-hot rows as wide as the vocabulary have this mean square, which is all that a relative damping asks for.
    mean_square = torch.full((1, 1), len(counts) ** -0.5, dtype=counts.dtype, device=counts.device)
    damping: float | Tensor = site.settings.input_damping(mean_square)
    return damping


def _factors(counts: Tensor, total: Tensor, damping: float | Tensor) -> Tensor:
    return 1 / (1 + counts / (total.clamp_min(1) * damping))


def _divide(g: Tensor, input: Tensor, mask: Tensor | None, site: Any) -> Tensor:
    layer, settings = site.layer, site.settings
    counts = _counts(input, mask, site)
    if settings.look is not None:
        settings.look(site, counts)
        return g
    tokens = input.reshape(-1)
    site.statistics.saw_counts(settings.backward_passes, len(tokens), layer.embedding_dim)
    if settings.when == "step":
        place = site.place(layer.weight)._replace(groups=0)
        if site.gathers(place):
            site.curvature(place).add_counts(counts)
        return g
    total, damping = counts.sum(), _damping(counts, site)
    if settings.inspecting:
        plain = torch.zeros(len(counts), g.shape[-1], dtype=counts.dtype, device=g.device)
        plain.index_add_(0, tokens, g.reshape(-1, g.shape[-1]).to(counts.dtype))
        factor = _factors(counts, total, damping)
        site.inspect(lambda: counts / total.clamp_min(1), damping, plain, plain * factor[:, None])
    # Of the tokens that are there: the vocabulary may be much longer.
    return (g * _factors(counts[input], total, damping)[..., None]).to(g.dtype)


@compiled.operator
def _divide_at_run_time(g: Tensor, input: Tensor, mask: Tensor | None, site: int) -> Tensor:
    found = compiled.site(site)
    found.settings.enter_backward()
    return _divide(g, input, mask, found)


@register(
    nn.EmbeddingBag,
    gathers=False,
    refuse=lambda layer: "mode='max' is not linear in the weights; use 'sum' or 'mean'" if layer.mode == "max" else None,
)
def _embedding_bag(
    layer: nn.EmbeddingBag,
    site: Site,
    input: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Tensor:
    multiply = _multiply_at_run_time if torch.compiler.is_compiling() else _multiply
    given = (input, offsets, None if per_sample_weights is None else per_sample_weights.detach())
    if per_sample_weights is None or not per_sample_weights.requires_grad:
        output = _bags(layer, input, offsets, layer.weight, per_sample_weights)
        return condition_output(output, layer.weight, site, multiply, *given)
    # The gradient of the per-sample weights must stay exact: it takes the plain path, the embedding the conditioned one. The
    # second term is exactly zero.
    output = _bags(layer, input, offsets, layer.weight, per_sample_weights.detach())
    conditioned = condition_output(output, layer.weight, site, multiply, *given)
    plain = _bags(layer, input, offsets, layer.weight.detach(), per_sample_weights)
    return plain + (conditioned - conditioned.detach())


def _bags(
    layer: nn.EmbeddingBag, input: Tensor, offsets: Tensor | None, weight: Tensor, per_sample_weights: Tensor | None
) -> Tensor:
    return F.embedding_bag(
        input,
        weight,
        offsets,
        layer.max_norm,
        layer.norm_type,
        layer.scale_grad_by_freq,
        layer.mode,
        layer.sparse,
        per_sample_weights,
        layer.include_last_offset,
        layer.padding_idx,
    )


def _multiply(g: Tensor, input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None, site: Any) -> Tensor:
    return multiply_rows(g, _bag_rows(site.layer, input, offsets, per_sample_weights), site)


@compiled.operator
def _multiply_at_run_time(
    g: Tensor, input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None, site: int
) -> Tensor:
    found = compiled.site(site)
    found.settings.enter_backward()
    return _multiply(g, input, offsets, per_sample_weights, found)


def _bag_rows(layer: nn.EmbeddingBag, input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None) -> Tensor:
    """(bags, distinct tokens): how much of each token is in each bag."""
    if input.dim() == 2:
        bags = input.shape[0]
        bag = torch.arange(bags, device=input.device).repeat_interleave(input.shape[1])
    else:
        assert offsets is not None  # F.embedding_bag has refused this by now
        starts = offsets[:-1] if layer.include_last_offset else offsets
        bags = len(starts)
        bag = torch.bucketize(torch.arange(len(input), device=input.device), starts, right=True) - 1
    tokens, column = torch.unique(input, return_inverse=True)
    share = torch.ones(input.numel(), dtype=torch.float32, device=input.device)
    if layer.weight.dtype == torch.float64:
        share = share.double()
    if per_sample_weights is not None:
        share = per_sample_weights.reshape(-1).to(share.dtype)
    if layer.padding_idx is not None:
        share = share * (input.reshape(-1) != layer.padding_idx)
    if layer.mode == "mean":
        share = share / torch.zeros(bags, dtype=share.dtype, device=share.device).index_add_(0, bag, share).clamp_min(1)[bag]
    table = torch.zeros(bags, len(tokens), dtype=share.dtype, device=share.device)
    return table.index_put_((bag, column.reshape(-1)), share, accumulate=True)
