r"""Embeddings: linear in one-hot rows, so the inverse is known without a factorization.

With one-hot rows $a^\top a$ is diagonal and holds the counts of the tokens: ζ* divides the gradient of token $v$ by $1 +
c_v / (bλ)$. The rows of an `EmbeddingBag` hold several ones, and of its gradient the tokens that were there are multiplied.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isaac_newton import torch_private
from isaac_newton.core import run_time, traced
from isaac_newton.core.conditioner import invert, multiply
from isaac_newton.core.gradient import hand_out
from isaac_newton.core.layer import ConditionedLayer, layer_of
from isaac_newton.core.moments import Moment
from isaac_newton.core.rows import Rows
from isaac_newton.layers.registry import register
from isaac_newton.math import equations
from isaac_newton.math.damping import relative_damping
from isaac_newton.torch_private import full_precision, has_values, sparse_parts

__all__: list[str] = []

#: Called with the gradient of the weight, what the layer was called with, and the layer.
Transform: TypeAlias = Callable[..., Tensor]


class _Tokens:
    """One call of an embedding: what its weight's gradient goes through."""

    size = 1

    def __init__(self, transform: Transform, given: Sequence[Tensor | None], layer: ConditionedLayer) -> None:
        self._transform, self._given, self._layer = transform, given, layer

    def condition(
        self, gradients: Sequence[Tensor | None], saved: Tensor | None, wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """The conditioned gradient."""
        if gradients[0] is None or not wanted[0]:
            return list(gradients)
        run = self._layer.run
        run.enter_pass()
        started = run.clock.now() if run.clock.running else 0.0
        with full_precision(gradients[0]):
            result: list[Tensor | None] = [self._transform(gradients[0], *self._given, self._layer)]
        if started:
            run.clock.add(started)
        return result


def _name_of(
    weight: Tensor, layer: ConditionedLayer, transform: Transform, at_run_time: Transform, *given: Tensor | None
) -> Tensor:
    """The weight under another name, for one call."""
    if torch.compiler.is_compiling():
        return traced.hand_out(weight, at_run_time, layer.number, *given)
    if not (torch.is_grad_enabled() and (weight.requires_grad or torch_private.wants_gradient(weight))):
        return weight
    if layer.run.row_observer is not None:
        transform(weight.detach(), *given, layer)
        return weight
    if traced.is_traced():
        if layer.run.options.when == "step":
            raise RuntimeError("when='step' conditions the .grad of parameters, and torch.func has none: use when='backward'")
        return traced.hand_out(weight, lambda g, *rest: transform(g, *rest[:-1], layer), layer.number, *given)
    return hand_out(_Tokens(transform, given, layer), None, weight)[0]


def _shorten(layer: nn.Embedding | nn.EmbeddingBag, input: Tensor) -> None:
    """`max_norm`: torch shortens the vectors of these tokens in place, which it must not do in a weight under another name."""
    if layer.max_norm is not None:
        torch.embedding_renorm_(layer.weight.detach(), input.contiguous(), layer.max_norm, layer.norm_type)


@register(nn.Embedding)
def _embedding(layer: nn.Embedding, site: ConditionedLayer, input: Tensor) -> Tensor:
    _shorten(layer, input)
    weight = _name_of(layer.weight, site, _divide, _divide_at_run_time, input, site.run.mask)
    return F.embedding(input, weight, layer.padding_idx, None, 2.0, layer.scale_grad_by_freq, layer.sparse)


def _counts(input: Tensor, mask: Tensor | None, site: ConditionedLayer) -> tuple[Tensor, Tensor | int]:
    """How often each token occurs, and all of them together; in all ranks, where they condition together."""
    layer: Any = site.module
    run = site.run
    tokens = input.reshape(-1)
    counted = None if layer.padding_idx is None else tokens != layer.padding_idx
    if mask is not None and mask.shape == input.shape:
        run.mask_met = True
        counted = mask.reshape(-1) if counted is None else counted & mask.reshape(-1)
    elif mask is not None and input.dim() > 1:
        run.mask_missed = input.shape
    counts = torch.zeros(layer.num_embeddings, dtype=torch.float64, device=tokens.device)
    each = counts.new_ones(()).expand(len(tokens)) if counted is None else counted.to(counts.dtype)
    counts = counts.index_add(0, tokens, each)
    ranks = run.options.ranks if run.options.when == "backward" and run.row_observer is None else None
    if ranks is not None:
        counts = ranks.total(site.name, counts)
    # Small operations take the host of a GPU longer than the device: where all tokens count, it knows how many there are.
    return counts, max(len(tokens), 1) if counted is None and ranks is None else counts.sum().clamp_min(1)


def _divide(g: Tensor, input: Tensor, mask: Tensor | None, site: ConditionedLayer) -> Tensor:
    layer: Any = site.module
    run = site.run
    where = site.slice(layer.weight)
    if where is not None and run.row_observer is None and site.rests(where._replace(groups=0)):
        site.pass_by(where, g)
        return g
    counts, total = _counts(input, mask, site)
    if run.row_observer is not None:
        run.row_observer(site, counts)
        return g
    site.statistics.note_counts(run.backward_passes, input.numel(), layer.embedding_dim)
    if where is not None:
        site.keep(where._replace(groups=0), Moment.of_counts(counts))
        if site.left is not None:
            site.left.append(g)
        return g
    tokens = input.reshape(-1).long()
    damping, relative = run.damping_now()
    if relative == "largest":
        damping = relative_damping(counts.amax() / total, damping)
    elif relative:
        damping = damping * (1 / len(counts))  # one-hot rows as wide as the vocabulary have that mean square
    factors = (counts / (total * damping)).add_(1).reciprocal_()
    if run.options.keep_norm:
        factors = factors * _lengthening(g, factors, counts, tokens)
    if run.inspecting:
        plain = g.to_dense().to(counts.dtype)
        site.inspect(lambda: counts / total, damping, plain, plain * factors[:, None])
    done = _scaled(g, factors, tokens)
    if site.left is not None:
        site.left.append(done)
    return done


def _lengthening(g: Tensor, factors: Tensor, counts: Tensor, tokens: Tensor) -> Tensor:
    """What makes the divided gradient as long as the plain one: only the rows of tokens that were there are not zero."""
    if g.is_sparse:
        values, indices = sparse_parts(g.coalesce())
        tokens = indices[0]
        often = torch.ones_like(tokens, dtype=counts.dtype)
    else:
        values = g[tokens]
        often = torch.zeros_like(counts).index_add_(0, tokens, torch.ones_like(tokens, dtype=counts.dtype))[tokens]
    squares = values.to(factors.dtype).square().sum(1) / often
    return equations.quotient(squares.sum().sqrt(), (squares * factors[tokens].square()).sum().sqrt())


def _scaled(g: Tensor, factors: Tensor, tokens: Tensor) -> Tensor:
    """The rows of a gradient times these factors, which are 1 but for the tokens that were there."""
    if g.is_sparse:
        values, indices = sparse_parts(g)
        values = values * factors[indices[0]][:, None].to(values.dtype)
        return torch.sparse_coo_tensor(indices, values, g.shape, is_coalesced=g.is_coalesced(), check_invariants=False)
    if torch.is_grad_enabled() or not has_values(g) or not g.is_contiguous():
        return (g * factors[:, None]).to(g.dtype)
    # The vocabulary may be much longer than the text. A token that occurs twice is written twice, with the same numbers.
    done = g.index_select(0, tokens) * factors.index_select(0, tokens)[:, None]
    return g.index_copy_(0, tokens, done.to(g.dtype))


@run_time.operator
def _divide_at_run_time(g: Tensor, input: Tensor, mask: Tensor | None, site: int) -> Tensor:
    layer_of(site).run.enter_pass()
    return _divide(g.clone(), input, mask, layer_of(site))


@register(
    nn.EmbeddingBag,
    gathers=False,
    refuse=lambda layer: "mode='max' is not linear in the weights; use 'sum' or 'mean'" if layer.mode == "max" else None,
)
def _embedding_bag(
    layer: nn.EmbeddingBag,
    site: ConditionedLayer,
    input: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Tensor:
    _shorten(layer, input)
    given = (input, offsets, None if per_sample_weights is None else per_sample_weights.detach())
    weight = _name_of(layer.weight, site, _multiply, _multiply_at_run_time, *given)
    return F.embedding_bag(
        input,
        weight,
        offsets,
        None,
        2.0,
        layer.scale_grad_by_freq,
        layer.mode,
        layer.sparse,
        per_sample_weights,
        layer.include_last_offset,
        layer.padding_idx,
    )


def _multiply(g: Tensor, input: Tensor, offsets: Tensor | None, shares: Tensor | None, site: ConditionedLayer) -> Tensor:
    layer: Any = site.module
    r, tokens, often = _bag_rows(layer, input, offsets, shares)
    run = site.run
    if run.row_observer is not None:
        run.row_observer(site, r[None])
        return g
    sparse = g.is_sparse
    whole = g.coalesce() if sparse else g
    part = whole.index_select(0, tokens).to_dense() if sparse else whole[tokens]
    # Torch has divided each row by how often its token came, where it was asked to: that comes last.
    divided = often[:, None].to(r.dtype) if layer.scale_grad_by_freq else 1.0
    plain = (part.to(r.dtype) * divided).mT
    strength, relative = run.damping_now()
    rows = Rows(r, len(r), in_difference=r.shape[0] < r.shape[1])
    (made,) = invert([rows], strength, relative, keep_norm=run.options.keep_norm)
    site.fell_back(made.failures)
    (conditioned,) = multiply([plain], [made])
    site.saw(made, layer.embedding_dim, plain, conditioned, own=False)
    values = (conditioned.mT / divided).to(g.dtype)
    if sparse:
        return torch.sparse_coo_tensor(tokens[None], values, g.shape, is_coalesced=True, check_invariants=False)
    return g.index_copy(0, tokens, values)


@run_time.operator
def _multiply_at_run_time(g: Tensor, input: Tensor, offsets: Tensor | None, shares: Tensor | None, site: int) -> Tensor:
    layer_of(site).run.enter_pass()
    return _multiply(g, input, offsets, shares, layer_of(site))


def _bag_rows(
    layer: nn.EmbeddingBag, input: Tensor, offsets: Tensor | None, shares: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(bags, distinct tokens): how much of each token is in each bag; the tokens, in order; how often each came."""
    if input.dim() == 2:
        bags = input.shape[0]
        bag = torch.arange(bags, device=input.device).repeat_interleave(input.shape[1])
    else:
        assert offsets is not None  # F.embedding_bag has refused this by now
        starts = offsets[:-1] if layer.include_last_offset else offsets
        bags = len(starts)
        bag = torch.bucketize(torch.arange(len(input), device=input.device), starts, right=True) - 1
    tokens, column, often = torch.unique(input.long(), return_inverse=True, return_counts=True)
    dtype = torch.float64 if layer.weight.dtype == torch.float64 else torch.float32
    share = torch.ones(input.numel(), dtype=dtype, device=input.device)
    if shares is not None:
        share = shares.reshape(-1).to(dtype)
    if layer.padding_idx is not None:
        share = share * (input.reshape(-1) != layer.padding_idx)
    if layer.mode == "mean":
        share = share / torch.zeros(bags, dtype=dtype, device=share.device).index_add_(0, bag, share).clamp_min(1)[bag]
    table = torch.zeros(bags, len(tokens), dtype=dtype, device=share.device)
    return table.index_put_((bag, column.reshape(-1)), share, accumulate=True), tokens, often
