"""A further hunt, from the pages alone: what gave a wrong gradient, an unclear error or a false warning, in few lines each."""

import copy
import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import isaac_newton as isaac
from test_hunted import LAMBDA, batch, close, conditioner, mlp, same

KEPT = torch.arange(6) < torch.tensor([6, 3, 4])[:, None]
OTHER = torch.arange(6) < torch.tensor([2, 5, 6])[:, None]


def seen_by(model: nn.Module) -> dict[str, list[Tensor]]:
    """What the linear layers of a plain model are called with from now on."""
    seen: dict[str, list[Tensor]] = {}
    for name, layer in model.named_modules():
        if type(layer) is nn.Linear:
            layer.register_forward_hook(lambda _, args, out, name=name: seen.setdefault(name, []).append(args[0].detach()))
    return seen


def assert_rows(model: nn.Module, plain: nn.Module, rows: dict[str, Tensor]) -> None:
    """Each of these weights has the plain gradient times the conditioner of its rows."""
    assert rows
    for name, r in rows.items():
        close(model.get_submodule(name).weight.grad, plain.get_submodule(name).weight.grad @ conditioner(r))


# ------------------------------------------------------------------------------------------------ derivatives of the gradient


def derivative(gradients: Callable[[Tensor], dict[str, Tensor]], x: Tensor, along: Tensor) -> dict[str, Tensor]:
    """By differences."""
    after, before = gradients(x + 1e-6 * along), gradients(x - 1e-6 * along)
    return {name: (after[name] - before[name]) / 2e-6 for name in after}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(
    ("layer", "shape", "options"),
    [
        (lambda: nn.Linear(6, 4), (5, 6), {}),
        (lambda: nn.Linear(6, 4), (9, 6), {"keep_norm": True}),
        (lambda: nn.Linear(6, 4), (3, 5, 6), {"sharing": "reduce"}),
        (lambda: nn.Linear(6, 4), (9, 6), {"damping": isaac.Relative(0.3, to="largest")}),
        (lambda: nn.Conv2d(2, 3, 3), (2, 2, 5, 5), {}),
        (lambda: nn.GRU(5, 3), (4, 2, 5), {}),
    ],
    ids=["linear", "norm kept", "reduce", "relative", "convolution", "recurrent"],
)
def test_forward_over_reverse(layer: Callable[[], nn.Module], shape: tuple[int, ...], options: dict[str, Any]) -> None:
    """`jvp(grad(f))`, as Hessian-vector products are written: torch's own derivative of `cholesky_inverse` is wrong."""
    model, x = layer().double(), torch.rand(*shape, dtype=torch.float64) + 1
    isaac.attach(model, **({"damping": LAMBDA} | options))
    weights, along = {name: p.detach() for name, p in model.named_parameters()}, torch.randn_like(x)

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        output = functional_call(model, weights, (x,))
        return (output if isinstance(output, Tensor) else output[0]).square().sum()

    def gradients(x: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = grad(loss)(weights, x)
        return found

    expected = derivative(gradients, x, along)
    for name, tangent in jvp(gradients, (x,), (along,))[1].items():
        close(tangent, expected[name])


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("options", [{"damping": LAMBDA}, {}], ids=["paper", "automatic"])
def test_forward_over_reverse_without_torch_func(options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    isaac.attach(model, **options)
    x, along = torch.rand(4, 6, dtype=torch.float64) + 1, batch(4)

    def gradients(x: Tensor) -> dict[str, Tensor]:
        weights = dict(model.named_parameters())
        return dict(zip(weights, torch.autograd.grad(model(x).square().sum(), list(weights.values())), strict=True))

    expected = derivative(gradients, x, along)
    with forward_ad.dual_level():
        found = gradients(forward_ad.make_dual(x.clone().requires_grad_(), along))
        for name, gradient in found.items():
            close(forward_ad.unpack_dual(gradient).tangent, expected[name])


# --------------------------------------------------------------------------------------------------------------------- traces


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("layer", [nn.Linear, isaac.Linear])
def test_a_model_traced_while_training_is_the_plain_one(layer: type[nn.Linear]) -> None:
    """A trace would keep the rows of the batch that it was made with."""
    model = nn.Sequential(layer(6, 7), nn.Tanh()).double()
    plain = nn.Sequential(nn.Linear(6, 7), nn.Tanh()).double()
    plain.load_state_dict(model.state_dict())
    if layer is nn.Linear:
        isaac.attach(model, damping=LAMBDA)
    traced: Any = torch.jit.trace(model, batch(9))
    x = batch(5)
    plain(x).square().sum().backward()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", RuntimeWarning)
        traced(x).square().sum().backward()
    same(model, plain)
    assert len(said) == (layer is nn.Linear)  # nobody called the layers of an attached model


# ---------------------------------------------------------------------------------------------------------------------- masks


def bart(**options: Any) -> Any:
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.BartConfig(
        vocab_size=30, d_model=16, dropout=0, max_position_embeddings=20, tie_word_embeddings=False, **sizes, **heads
    )
    return transformers.BartForConditionalGeneration(config).double()


def translation(length: int, mask: Tensor | None = None) -> dict[str, Any]:
    ids = torch.where(KEPT, torch.randint(3, 30, (3, 6)), 1)
    labels = torch.randint(3, 30, (3, length))
    return {"input_ids": ids, "attention_mask": KEPT.long(), "labels": labels, "decoder_attention_mask": mask}


@pytest.mark.parametrize("when", ["backward", "step"])
@pytest.mark.parametrize("length", [5, 6], ids=["other length", "same length"])
def test_keys_and_values_of_a_decoder_have_the_encoders_mask(length: int, when: str) -> None:
    mine = None if length == 5 else OTHER
    model = bart()
    plain = copy.deepcopy(model)
    seen, handle = seen_by(plain), isaac.attach(model, damping=LAMBDA, when=when)
    data = translation(length, None if mine is None else mine.long())
    for one in (model, plain):
        one(**data).loss.backward()
    if when == "step":
        handle.step()
    rows = {}
    for name, (x,) in seen.items():
        of_encoder = "model.encoder" in name or "encoder_attn.k_proj" in name or "encoder_attn.v_proj" in name
        mask = KEPT if of_encoder else mine
        rows[name] = x if mask is None else x[mask]
    assert_rows(model, plain, rows)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("length", [5, 6], ids=["other length", "same length"])
def test_a_checkpointed_encoder_and_decoder_have_their_own_masks(length: int, reentrant: bool) -> None:
    """What a checkpoint computes again has the mask of the first time, not the one of whoever was called last."""
    model = bart()
    twin = copy.deepcopy(model)
    isaac.attach(model, damping=LAMBDA)
    isaac.attach(twin, damping=LAMBDA)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    data = translation(length, None if length == 5 else OTHER.long())
    for one in (model, twin):
        one.train()
        one(**data, use_cache=False).loss.backward()
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            close(layer.weight.grad, twin.get_submodule(name).weight.grad)


def test_the_mask_of_a_text_is_not_that_of_an_image_of_the_same_length() -> None:
    tower = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = tower | {"vocab_size": 30, "max_position_embeddings": 8, "eos_token_id": 29, "bos_token_id": 1, "pad_token_id": 0}
    config = transformers.CLIPConfig(text_config=text, vision_config=tower | {"image_size": 8, "patch_size": 4})
    model = transformers.CLIPModel(config).double()
    plain = copy.deepcopy(model)
    mask = KEPT[:, :5]  # five tokens; four patches and a class token
    seen = seen_by(plain)
    isaac.attach(model, damping=LAMBDA)
    ids, pixels = torch.randint(3, 28, (3, 5)), torch.randn(3, 3, 8, 8, dtype=torch.float64)
    for one in (model, plain):
        one(input_ids=ids, attention_mask=mask.long(), pixel_values=pixels, return_loss=True).loss.backward()
    assert_rows(
        model, plain, {name: x[mask] if name.startswith("text_model") and x.dim() == 3 else x for name, (x,) in seen.items()}
    )


@pytest.mark.parametrize("when", ["backward", "step"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_a_transformer_with_positions_first(kind: type[nn.Module], sharing: str, when: str) -> None:
    """Torch's default layout: the linear layers beside the attention have it too."""
    layer: Any = kind(8, 2, 16, dropout=0.0)
    model, x = layer.double(), torch.randn(6, 3, 8, dtype=torch.float64)
    plain = copy.deepcopy(model)
    seen, handle = seen_by(plain), isaac.attach(model, damping=LAMBDA, when=when, sharing=sharing)
    handle.mask = KEPT
    for one in (model, plain):
        one(*[x] * (1 if kind is nn.TransformerEncoderLayer else 2)).square().sum().backward()
    if when == "step":
        handle.step()
    rows = {name: seen[name][0].transpose(0, 1) for name in ("linear1", "linear2")}
    if sharing == "reduce":
        means = {name: [sample[kept].mean(0) for sample, kept in zip(r, KEPT, strict=True)] for name, r in rows.items()}
        assert_rows(model, plain, {name: torch.stack(r) for name, r in means.items()})
    else:
        assert_rows(model, plain, {name: r[KEPT] for name, r in rows.items()})


def test_a_mask_of_samples_is_warned_about_where_layers_cannot_take_it() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(18, 4))
    isaac.attach(model, damping=LAMBDA).mask = torch.tensor([1, 0, 1])
    with pytest.warns(RuntimeWarning, match=r"has the shape \(3,\), with which inputs do not begin \(one has \(3, 3, 3\)\)"):
        model(torch.randn(3, 1, 5, 5)).sum().backward()


# ---------------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", ["forward", "backward"])
def test_plain_is_decided_by_the_forward_pass_of_a_checkpoint_too(inside: str, reentrant: bool) -> None:
    model = mlp()
    twin, x = copy.deepcopy(model), batch().requires_grad_()
    handle, other = isaac.attach(model, damping=LAMBDA), isaac.attach(twin, damping=LAMBDA)
    if inside == "backward":
        with handle.plain():
            pass  # nobody looks at calls before the first block
        output = checkpoint(model, x, use_reentrant=reentrant)
        with handle.plain():
            output.square().sum().backward()
    else:
        with handle.plain():
            output = checkpoint(model, x, use_reentrant=reentrant)
        output.square().sum().backward()
        other.damping = float("inf")
    twin(x).square().sum().backward()
    same(model, twin)


@pytest.mark.parametrize("when", ["backward", "step"])
def test_two_masks_before_one_backward_pass_through_reentrant_checkpoints_warn(when: str) -> None:
    """Warned about, because nothing tells which of the two calls a reentrant checkpoint computes again."""
    model = mlp()
    handle = isaac.attach(model, damping=LAMBDA, when=when)
    outputs = []
    for mask in (KEPT, OTHER):
        handle.mask = mask
        outputs.append(checkpoint(model, torch.randn(3, 6, 6, dtype=torch.float64, requires_grad=True), use_reentrant=True))
    with pytest.warns(RuntimeWarning, match="which of these counts cannot be told"):
        (outputs[0].sum() + outputs[1].sum()).backward()


@pytest.mark.parametrize("when", ["backward", "step"])
def test_two_masks_before_one_backward_pass_through_other_checkpoints_are_right(when: str) -> None:
    model = mlp()
    twin = copy.deepcopy(model)
    handles = [isaac.attach(one, damping=LAMBDA, when=when) for one in (model, twin)]
    xs = [torch.randn(3, 6, 6, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    for one, handle in zip((model, twin), handles, strict=True):
        outputs = []
        for mask, x in zip((KEPT, OTHER), xs, strict=True):
            handle.mask = mask
            outputs.append(checkpoint(one, x, use_reentrant=False) if one is model else one(x))
        (outputs[0].square().sum() + outputs[1].square().sum()).backward()
        if when == "step":
            handle.step()
    same(model, twin)


# ---------------------------------------------------------------------------------------------------------------- when="step"


@pytest.mark.parametrize("when", ["backward", "step"])
def test_a_model_that_was_attached_can_be_freed(when: str) -> None:
    """A search over settings makes many."""
    model = mlp()
    handle = isaac.attach(model, damping=LAMBDA, when=when)
    model(batch()).sum().backward()
    weight = weakref.ref(model[0].weight)
    del model, handle
    gc.collect()
    assert weight() is None


def in_threads(model: nn.Module, xs: list[Tensor]) -> None:
    threads = [threading.Thread(target=lambda x=x: model(x).square().sum().backward()) for x in xs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_rows_of_several_threads_all_count() -> None:
    """Two passes that end at once lost the rows of one of them, now and then."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(30):
            model, xs = mlp(), [batch(3 + i) for i in range(4)]
            twin = copy.deepcopy(model)
            handles = [isaac.attach(one, damping=LAMBDA, when="step") for one in (model, twin)]
            in_threads(model, xs)
            for x in xs:
                twin(x).square().sum().backward()
            for handle in handles:
                handle.step()
            same(model, twin)
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("options", [{"decay": 0.9}, {"refresh": 3}], ids=["decay", "refresh"])
@pytest.mark.parametrize("change", ["more outputs", "fewer features"])
def test_a_weight_of_another_size_begins_anew(change: str, options: dict[str, Any]) -> None:
    """As a head that gets more classes, or neurons that are pruned: outputs were conditioned twice, features an error."""
    model = mlp()
    handle = isaac.attach(model, damping=LAMBDA, when="step", **options)
    model(batch()).square().sum().backward()
    handle.step()
    model.zero_grad()
    if change == "more outputs":
        model[2].weight = nn.Parameter(torch.cat([model[2].weight.detach(), batch(3, 7)]))
        model[2].bias = nn.Parameter(batch(1, 7)[0])
    else:
        for layer, name, chosen in ((model[0], "weight", slice(5)), (model[0], "bias", slice(5))):
            setattr(layer, name, nn.Parameter(getattr(layer, name).detach()[chosen].clone()))
        model[2].weight = nn.Parameter(model[2].weight.detach()[:, :5].clone())
    plain, x = copy.deepcopy(model), batch()
    isaac.detach(plain)
    seen = seen_by(plain)
    for one in (model, plain):
        one(x).square().sum().backward()
    handle.step()
    rows = {name: r for name, (r,) in seen.items()}
    assert_rows(model, plain, {"2": rows["2"]} if change == "more outputs" else rows)


def test_a_weight_that_nobody_calls_is_warned_about_once() -> None:
    """It also said that gradients were summed by hand, which nobody had done."""
    model = mlp()
    handle = isaac.attach(model, damping=LAMBDA, when="step")
    with pytest.warns(RuntimeWarning, match="nobody called these layers"):
        F.linear(model[:2](batch()), model[2].weight).square().sum().backward()
    handle.step()


# ------------------------------------------------------------------------------------------------------- layers and adapters


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("options", [{}, {"keep_norm": True}], ids=["paper", "norm kept"])
def test_tokens_in_int32(kind: type[nn.Module], options: dict[str, Any]) -> None:
    """An error before: `index_copy_(): Expected a long tensor`."""
    layer: Any = kind(7, 3)
    model, ids = layer.double(), torch.randint(7, (4, 3))
    twin = copy.deepcopy(model)
    for one in (model, twin):
        isaac.attach(one, damping=LAMBDA, **options)
    model(ids.int()).square().sum().backward()
    twin(ids).square().sum().backward()
    same(model, twin)


def test_isaacs_own_linear_in_an_attached_model_is_not_reported_as_plain() -> None:
    model = nn.Sequential(isaac.Linear(6, 7, la=LAMBDA), nn.Tanh(), nn.Linear(7, 4))
    line = next(line for line in str(isaac.attach(model)).splitlines() if line.startswith("0 "))
    assert "ζ* by itself" in line
    assert "plain" not in line


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_rows_that_a_weight_cannot_multiply_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error came in the backward pass: `mat1 and mat2 shapes cannot be multiplied`."""
    monkeypatch.setattr("isaac_newton.layers.registry._REGISTRY", {})

    @isaac.register(Doubled)
    def doubled(layer: Doubled, site: isaac.Site, x: Tensor) -> Tensor:
        weight, bias = isaac.condition(layer.weight, layer.bias, x[:, :5], site)
        return 2 * F.linear(x, weight, bias)

    model = Doubled(6, 4)
    isaac.attach(model, damping=LAMBDA)
    with pytest.raises(
        ValueError, match=r"a weight of shape \(4, 6\) multiplies rows of 6 features, got an input of shape \(9, 5\)"
    ):
        model(torch.randn(9, 6))
