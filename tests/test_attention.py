"""Attention in all its forms: torch's output bit for bit, every projection conditioned by what it multiplies."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isaac_newton as isaac
from reference import assert_close
from test_layers import DAMPING, right

FORMS: dict[str, dict[str, Any]] = {
    "packed": {},
    "batch first": {"batch_first": True},
    "without bias": {"bias": False},
    "separate projections": {"kdim": 12, "vdim": 10},
    "bias for keys and values": {"add_bias_kv": True},
    "zero attention": {"add_zero_attn": True},
    "dropout": {"dropout": 0.4},
}


def inputs(form: dict[str, Any], kind: str) -> tuple[Tensor, Tensor, Tensor]:
    query = torch.randn(5, 3, 16, dtype=torch.float64)
    key = torch.randn(7, 3, form.get("kdim", 16), dtype=torch.float64)
    value = torch.randn(7, 3, form.get("vdim", 16), dtype=torch.float64)
    if kind == "self":
        key = value = query
    elif kind == "keys are values":
        value = key
    if form.get("batch_first"):
        return query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
    return query, key, value


def rows_of(x: Tensor, batch_first: bool, sharing: str) -> Tensor:
    x = x if batch_first else x.transpose(0, 1)
    return x.mean(1) if sharing == "reduce" else x.reshape(-1, x.shape[-1])


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("kind", ["self", "keys are values", "cross"])
@pytest.mark.parametrize("name", FORMS)
def test_projections_are_conditioned_by_query_key_and_value(name: str, kind: str, sharing: str) -> None:
    form = FORMS[name]
    if kind != "cross" and "kdim" in form:
        kind = "cross"
    plain = nn.MultiheadAttention(16, 4, dtype=torch.float64, **form)
    attached = copy.deepcopy(plain)
    isaac.attach(attached, DAMPING, sharing=sharing)
    query, key, value = inputs(form, kind)
    mask = torch.rand(5, len(key) if not form.get("batch_first") else key.shape[1]) < 0.3
    mask[:, 0] = False
    seen: dict[str, Tensor] = {}
    results = []
    for module in (plain, attached):
        torch.manual_seed(1)
        output, weights = module(query, key, value, attn_mask=mask)
        results.append((output, weights))
        output.square().sum().backward()
    for expected, actual in zip(*results, strict=True):
        assert torch.equal(expected, actual)
    batch_first = bool(form.get("batch_first"))
    gradients = {parameter: p.grad for parameter, p in attached.named_parameters()}
    torches = {parameter: p.grad for parameter, p in plain.named_parameters()}
    for part, x in (("q", query), ("k", key), ("v", value)):
        seen[part] = rows_of(x, batch_first, sharing)
        if "kdim" in form:
            assert_close(gradients[f"{part}_proj_weight"], right(torches[f"{part}_proj_weight"], seen[part]))
    if "kdim" not in form:
        chunks = zip(torches["in_proj_weight"].chunk(3), (seen["q"], seen["k"], seen["v"]), strict=True)
        assert_close(gradients["in_proj_weight"], torch.cat([right(chunk, r) for chunk, r in chunks]))
    for parameter in torches:
        if "weight" not in parameter:
            assert_close(gradients[parameter], torches[parameter], 1e-14)
    assert (gradients["out_proj.weight"] - torches["out_proj.weight"]).norm() > 1e-3 * torches["out_proj.weight"].norm()


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_the_output_projection_is_conditioned_by_the_heads_outputs(sharing: str) -> None:
    plain = nn.MultiheadAttention(8, 2, dtype=torch.float64, batch_first=True)
    attached = copy.deepcopy(plain)
    isaac.attach(attached, DAMPING, sharing=sharing)
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    # The heads' outputs, from the formula.
    q, k, v = (x @ w.T + b for w, b in zip(plain.in_proj_weight.chunk(3), plain.in_proj_bias.chunk(3), strict=True))
    q, k, v = (t.reshape(3, 5, 2, 4).transpose(1, 2) for t in (q, k, v))
    heads = (torch.softmax(q @ k.mT / 2, -1) @ v).transpose(1, 2).reshape(3, 5, 8).detach()
    for module in (plain, attached):
        module(x, x, x, need_weights=False)[0].square().sum().backward()
    r = heads.mean(1) if sharing == "reduce" else heads.reshape(-1, 8)
    assert_close(attached.out_proj.weight.grad, right(plain.out_proj.weight.grad, r))


def test_unbatched_attention_is_one_sample() -> None:
    plain = nn.MultiheadAttention(8, 2, dtype=torch.float64)
    attached = copy.deepcopy(plain)
    isaac.attach(attached, DAMPING, sharing="reduce")
    x = torch.randn(5, 8, dtype=torch.float64)
    for module in (plain, attached):
        module(x, x, x)[0].square().sum().backward()
    assert_close(attached.in_proj_weight.grad, right(plain.in_proj_weight.grad, x.mean(0, keepdim=True)))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")  # torch's, about its own speed
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_torchs_transformer_gives_the_same_bits_and_conditions_every_matrix(norm_first: bool, batch_first: bool) -> None:
    plain = nn.Transformer(16, 4, 2, 2, 32, norm_first=norm_first, batch_first=batch_first, dropout=0.2)
    attached = copy.deepcopy(plain)
    handle = isaac.attach(attached, DAMPING)
    source, target = torch.randn(3, 3, 16), torch.randn(3, 3, 16)
    causal = nn.Transformer.generate_square_subsequent_mask(3)
    results = []
    for module in (plain, attached):
        torch.manual_seed(5)
        output = module(source, target, tgt_mask=causal)
        output.square().sum().backward()
        results.append(output)
    assert torch.equal(*results)
    plain.eval()
    attached.eval()
    with torch.no_grad():  # torch's fused path, where it takes it
        assert torch.equal(plain(source, target), attached(source, target))
    matrices = [name for name, p in plain.named_parameters() if p.dim() > 1]
    for name in matrices:
        mine, theirs = attached.get_parameter(name).grad, plain.get_parameter(name).grad
        assert mine is not None
        assert theirs is not None
        assert (mine - theirs).norm() > 1e-3 * theirs.norm()
    assert "encoder.layers.0.self_attn" in handle.conditioned
    assert "encoder.layers.0.self_attn.out_proj" in handle.conditioned


def test_what_is_said_of_an_attention_layer_holds_for_its_parts() -> None:
    model = nn.TransformerEncoderLayer(16, 4, 32)
    handle = isaac.attach(model, layers="linear*")
    assert "not selected" in handle.skipped["self_attn"]
    assert "part of 'self_attn'" in handle.skipped["self_attn.out_proj"]
    handle.detach()
    handle = isaac.attach(model, layers="self_attn")
    assert set(handle.conditioned) == {"self_attn", "self_attn.out_proj"}


def test_attached_attention_copies_and_pickles() -> None:
    model = nn.MultiheadAttention(8, 2, dtype=torch.float64)
    isaac.attach(model, DAMPING)
    x = torch.randn(4, 2, 8, dtype=torch.float64)
    model(x, x, x)[0].sum().backward()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.zero_grad()
        twin(x, x, x)[0].sum().backward()
        assert torch.equal(twin.in_proj_weight.grad, model.in_proj_weight.grad)


def test_zeta_reaches_into_attention() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    plain = copy.deepcopy(model)
    handle = isaac.attach(model, 0.1, output_damping=0.1)
    x = torch.randn(3, 4, 8, dtype=torch.float64)
    output = model(x)
    handle.backward(output.square().mean(), output, nn.MSELoss())
    plain(x).square().mean().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert p.grad.isfinite().all()
        difference = (p.grad - plain.get_parameter(name).grad).norm()
        assert difference > 0 if p.dim() > 1 else difference < 1e-12


def test_a_mask_leaves_padding_out_of_attention_too() -> None:
    plain = nn.MultiheadAttention(8, 2, dtype=torch.float64, batch_first=True)
    attached = copy.deepcopy(plain)
    handle = isaac.attach(attached, DAMPING)
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    handle.mask = mask = torch.arange(5) < torch.tensor([5, 3, 1])[:, None]
    for module in (plain, attached):
        module(x, x, x, key_padding_mask=~mask)[0].square().sum().backward()
    assert_close(attached.in_proj_weight.grad, right(plain.in_proj_weight.grad, x[mask]))
