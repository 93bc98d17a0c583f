"""Embeddings and bags agree with explicit one-hot rows and a dense float64 inverse."""

import copy

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import isaac_newton as isaac
from reference import assert_close
from test_layers import DAMPING, right


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=2),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 0, 2]),
    st.integers(0, 2**31),
)
def test_embeddings_divide_by_the_counts_of_their_tokens(
    shape: list[int], sparse: bool, by_frequency: bool, padding_idx: int | None, seed: int
) -> None:
    assume(not (sparse and by_frequency))  # torch refuses that
    torch.manual_seed(seed)
    layer = nn.Embedding(5, 3, padding_idx=padding_idx, sparse=sparse, scale_grad_by_freq=by_frequency, dtype=torch.float64)
    tokens = torch.randint(5, shape)
    attached = copy.deepcopy(layer)
    isaac.attach(attached, DAMPING)
    g = torch.randn(*shape, 3, dtype=torch.float64)
    assert torch.equal(attached(tokens), layer(tokens))
    attached(tokens).backward(g)
    layer(tokens).backward(g)
    real = tokens[tokens != padding_idx] if padding_idx is not None else tokens.reshape(-1)
    onehot = F.one_hot(real.reshape(-1), 5).double()
    actual, plain = (p.weight.grad.to_dense() for p in (attached, layer))
    assert attached.weight.grad.is_sparse == sparse
    expected = right(plain.T, onehot).T if len(real) else plain
    assert_close(actual, expected)


def test_a_relative_damping_of_an_embedding_is_that_of_one_hot_rows() -> None:
    layer = nn.Embedding(7, 3, dtype=torch.float64)
    isaac.attach(layer, isaac.Relative(0.5))
    tokens, g = torch.randint(7, (10,)), torch.randn(10, 3, dtype=torch.float64)
    layer(tokens).backward(g)
    onehot = F.one_hot(tokens, 7).double()
    damping = 0.5 * onehot.square().sum(1).mean().item() / 7
    assert_close(layer.weight.grad, right(g.T @ onehot, onehot, damping).T)


@pytest.mark.parametrize("vocabulary", [5, 60])
@pytest.mark.parametrize("form", ["2-D", "offsets", "include_last_offset"])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding_idx", [None, 1])
@pytest.mark.parametrize("weights", ["none", "fixed", "learned"])
def test_embedding_bags_are_conditioned_by_what_is_in_the_bags(
    vocabulary: int, form: str, mode: str, padding_idx: int | None, weights: str
) -> None:
    if weights != "none" and mode != "sum":
        with pytest.raises(NotImplementedError):  # torch's rule
            nn.EmbeddingBag(5, 3, mode=mode)(torch.tensor([[1, 2]]), per_sample_weights=torch.ones(1, 2))
        return
    layer = nn.EmbeddingBag(
        vocabulary,
        3,
        mode=mode,
        padding_idx=padding_idx,
        include_last_offset=form == "include_last_offset",
        dtype=torch.float64,
    )
    attached = copy.deepcopy(layer)
    isaac.attach(attached, DAMPING)
    if form == "2-D":
        args: tuple[Tensor, ...] = (torch.randint(vocabulary, (6, 4)),)
        bags = [list(row) for row in args[0].tolist()]
    else:
        tokens, starts = torch.randint(vocabulary, (13,)), [0, 4, 4, 9]
        ends = [*starts[1:], 13]
        args = (tokens, torch.tensor([*starts, 13] if form == "include_last_offset" else starts))
        bags = [tokens[start:end].tolist() for start, end in zip(starts, ends, strict=True)]
    per_sample = None
    if weights != "none":
        per_sample = torch.rand(args[0].shape, dtype=torch.float64, requires_grad=weights == "learned")
    expected, actual = (module(*args, per_sample_weights=per_sample) for module in (layer, attached))
    assert torch.equal(expected, actual)
    g = torch.randn_like(expected)
    table, place = torch.zeros(len(bags), vocabulary, dtype=torch.float64), 0
    for number, bag in enumerate(bags):
        counted = [token for token in bag if token != padding_idx]
        for token in bag:
            share = 1.0 if per_sample is None else per_sample.reshape(-1)[place].item()
            place += 1
            if token != padding_idx:
                table[number, token] += share / (len(counted) if mode == "mean" else 1)
    actual.backward(g)
    if weights == "learned":
        assert per_sample is not None
        assert per_sample.grad is not None
        learned = per_sample.grad.clone()
        per_sample.grad = None
        expected.backward(g)
        assert_close(learned, per_sample.grad, 1e-14)
    assert_close(attached.weight.grad, right(g.T @ table, table).T)


def test_a_bag_of_maxima_is_not_linear() -> None:
    with pytest.raises(ValueError, match="mode='max' is not linear"):
        isaac.attach(nn.EmbeddingBag(5, 3, mode="max"))


def test_a_mask_leaves_padding_out_of_an_embeddings_counts() -> None:
    layer = nn.Embedding(5, 3, dtype=torch.float64)
    handle = isaac.attach(layer, DAMPING)
    tokens, g = torch.randint(5, (4, 6)), torch.randn(4, 6, 3, dtype=torch.float64)
    handle.mask = mask = torch.arange(6) < torch.tensor([6, 4, 2, 1])[:, None]
    output = layer(tokens)
    handle.mask = None  # what counts is the mask at the forward pass
    output.backward(g)
    plain = torch.zeros(5, 3, dtype=torch.float64).index_add_(0, tokens.reshape(-1), g.reshape(-1, 3))
    assert_close(layer.weight.grad, right(plain.T, F.one_hot(tokens[mask], 5).double()).T)
