"""What people train is covered: nearly every matrix of common models is conditioned, nothing else changes, at little cost."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn

import isaac_newton as isaac
from reference import TOLERANCE, assert_close, relative_error

#: A model with random weights, and how to get an output tensor from it or from a copy.
Case: TypeAlias = tuple[nn.Module, Callable[[nn.Module], Tensor]]
Gradients: TypeAlias = dict[str, Tensor | None]

BATCH, LENGTH, WIDTH, VOCABULARY = 3, 7, 16, 23
EXACT = TOLERANCE[torch.float64]


class UNet(nn.Module):
    """Down by strided convolutions, up by transposed ones, with a skip connection at each size."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.down = nn.ModuleList([nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.Conv2d(6, 8, 3, stride=2, padding=1)])
        self.norms = nn.ModuleList([nn.GroupNorm(2, 6), nn.GroupNorm(2, 8)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(8, 6, 2, stride=2), nn.ConvTranspose2d(12, 4, 4, stride=2, padding=1)])
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.first(x).tanh()]
        for convolution, norm in zip(self.down, self.norms, strict=True):
            skips.append(norm(convolution(skips[-1])).tanh())
        x = skips.pop()
        for transposed in self.up:
            x = torch.cat([transposed(x).tanh(), skips.pop()], dim=1)
        output: Tensor = self.last(x)
        return output


def unet() -> Case:
    x = torch.randn(BATCH, 3, 8, 8, dtype=torch.float64)
    return UNet(), lambda model: model(x)


def transformer() -> Case:
    source, target = (torch.randn(BATCH, length, WIDTH, dtype=torch.float64) for length in (LENGTH, LENGTH + 2))
    model = nn.Transformer(WIDTH, nhead=2, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=24, batch_first=True)
    return model, lambda model: model(source, target)


def hugging_face(name: str, output: str, inputs: Callable[[], dict[str, Tensor]], **config: Any) -> Callable[[], Case]:
    """Builds the class `name` from a small `config`; it is called with `inputs` and returns, among others, `output`."""

    def build() -> Case:
        model_type = getattr(pytest.importorskip("transformers"), name)
        values = inputs()
        return model_type(model_type.config_class(**config)), lambda model: model(**values)[output]

    return build


def tokens() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(VOCABULARY, (BATCH, LENGTH))}


def padded_tokens() -> dict[str, Tensor]:
    lengths = torch.arange(LENGTH, LENGTH - BATCH, -1)
    return {**tokens(), "attention_mask": (torch.arange(LENGTH) < lengths[:, None]).long()}


def two_sequences() -> dict[str, Tensor]:
    return {**tokens(), "decoder_input_ids": torch.randint(VOCABULARY, (BATCH, LENGTH - 2))}


def images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 16, 16, dtype=torch.float64)}


def sounds() -> dict[str, Tensor]:
    features = torch.randn(BATCH, 5, 2 * LENGTH, dtype=torch.float64)
    return {"input_features": features, "decoder_input_ids": torch.randint(VOCABULARY, (BATCH, LENGTH - 2))}


WORDS = {"vocab_size": VOCABULARY}
LAYERS = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
MODELS: dict[str, Callable[[], Case]] = {
    # The loss of the hidden states leaves the pooler without a gradient.
    "BERT": hugging_face("BertModel", "last_hidden_state", padded_tokens, **WORDS, **LAYERS),
    "RoBERTa": hugging_face("RobertaForSequenceClassification", "logits", padded_tokens, **WORDS, **LAYERS),
    "DistilBERT": hugging_face(
        "DistilBertForSequenceClassification", "logits", padded_tokens, **WORDS, dim=WIDTH, n_layers=2, n_heads=2, hidden_dim=24
    ),
    # Its output layer is its embedding: one weight in two layers.
    "GPT-2": hugging_face(
        "GPT2LMHeadModel",
        "logits",
        tokens,
        **WORDS,
        n_embd=WIDTH,
        n_layer=2,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "Llama": hugging_face("LlamaForCausalLM", "logits", tokens, **WORDS, **LAYERS, num_key_value_heads=1),
    "T5": hugging_face(
        "T5ForConditionalGeneration",
        "logits",
        two_sequences,
        **WORDS,
        d_model=WIDTH,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
    ),
    "ViT": hugging_face(
        "ViTForImageClassification", "logits", images, **LAYERS, image_size=16, patch_size=4, hidden_dropout_prob=0.1
    ),
    "ResNet": hugging_face(
        "ResNetForImageClassification",
        "logits",
        images,
        embedding_size=8,
        hidden_sizes=[16, 32],
        depths=[2, 2],
        layer_type="basic",
    ),
    "Whisper": hugging_face(
        "WhisperForConditionalGeneration",
        "logits",
        sounds,
        **WORDS,
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        num_mel_bins=5,
        max_source_positions=LENGTH,
        dropout=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    ),
    "nn.Transformer": transformer,
    "U-Net": unet,
}
every_model = pytest.mark.parametrize("model_name", MODELS)


def twins(case: Case) -> tuple[nn.Module, nn.Module, Callable[[nn.Module], Tensor]]:
    """A model in float64 and training mode, a copy of it to attach, and how to run them."""
    plain, run = case
    plain.double().train()
    return plain, copy.deepcopy(plain), run


def step(model: nn.Module, run: Callable[[nn.Module], Tensor]) -> tuple[Tensor, Gradients]:
    """Output and gradients of one training step; dropout draws the same numbers in each."""
    torch.manual_seed(1)
    output = run(model)
    (output * torch.randn(output.shape, dtype=output.dtype)).mean().backward()
    return output, {name: p.grad for name, p in model.named_parameters()}


def is_linear(layer: nn.Module) -> bool:
    """Hugging Face's `Conv1D` is a linear layer with a transposed weight."""
    return isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"


def record(model: nn.Module) -> dict[str, list[tuple[Tensor, Tensor, Tensor]]]:
    """Of every use of a linear layer in the backward passes to come: output gradients, inputs, and which of them count."""
    seen: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
    masks: list[Tensor | None] = [None]

    def called(_: nn.Module, args: object, kwargs: dict[str, Any]) -> None:
        masks[0] = kwargs.get("attention_mask")

    model.register_forward_pre_hook(called, with_kwargs=True)
    for name, layer in model.named_modules():
        if is_linear(layer) and all(p.requires_grad for p in layer.parameters()):

            def forward(_: nn.Module, args: tuple[Tensor], output: Tensor, name: str = name) -> None:
                a, (mask,) = args[0].detach(), masks
                fits = mask is not None and mask.shape == a.shape[:-1]
                counts = mask.flatten().bool() if mask is not None and fits else torch.ones(a.shape[:-1].numel()).bool()
                a = a.flatten(0, -2)
                output.register_hook(lambda g: seen.setdefault(name, []).append((g.flatten(0, -2), a, counts)))

            layer.register_forward_hook(forward)
    return seen


def zeta_star(g: Tensor, a: Tensor, counts: Tensor) -> Tensor:
    """By an explicit inverse, made of the rows that count."""
    r = a[counts]
    return g.T @ a @ torch.linalg.inv(torch.eye(a.shape[1], dtype=a.dtype) + r.T @ r / len(r))


def conditioned_weights(model: nn.Module, handle: isaac.Handle) -> set[str]:
    owned = {id(p) for layer in handle.conditioned.values() for p in layer.parameters(recurse=False) if p.dim() > 1}
    return {name for name, p in model.named_parameters() if id(p) in owned}


def embeddings(model: nn.Module) -> set[str]:
    """Tables of embeddings, and those that a model keeps as bare parameters (positions, a class token)."""
    owned = {
        id(p)
        for module in model.modules()
        if isinstance(module, nn.Embedding) or type(module).__name__.endswith("Embeddings")
        for p in module.parameters(recurse=False)
    }
    return {name for name, p in model.named_parameters() if id(p) in owned}


@every_model
def test_nearly_every_matrix_and_convolution_is_conditioned(model_name: str) -> None:
    model, _ = MODELS[model_name]()
    handle = isaac.attach(model)
    conditioned = conditioned_weights(model, handle)
    matrices = {name: p for name, p in model.named_parameters() if p.dim() > 1 and name not in embeddings(model)}
    covered = [p for name, p in matrices.items() if name in conditioned]
    assert len(covered) >= 0.99 * len(matrices)
    assert sum(p.numel() for p in covered) >= 0.99 * sum(p.numel() for p in matrices.values())
    plain = {name.rpartition(".")[0] for name, p in model.named_parameters() if p.dim() > 1 and name not in conditioned}
    assert all(handle.skipped[name] for name in plain)


@every_model
def test_a_step_conditions_these_weights_and_leaves_every_other_gradient_plain(model_name: str) -> None:
    plain, attached, run = twins(MODELS[model_name]())
    conditioned = conditioned_weights(attached, isaac.attach(attached))
    (_, expected), (_, actual) = step(plain, run), step(attached, run)
    assert any(gradient is not None for gradient in expected.values())
    for name, gradient in actual.items():
        usual = expected[name]
        if usual is None:
            assert gradient is None, f"{name} has a gradient, and none in the plain model"
            continue
        assert gradient is not None, f"{name} has no gradient"
        assert gradient.isfinite().all(), name
        if name in conditioned:
            assert relative_error(gradient, usual) > EXACT, f"{name} is not conditioned"
        else:
            # Biases of keys have a gradient of zero but for rounding, of which there is no relative error.
            torch.testing.assert_close(gradient, usual, rtol=EXACT, atol=1e-12)


@pytest.mark.parametrize("model_name", [name for name in MODELS if name != "U-Net"])
def test_linear_layers_inside_a_model_get_zeta_star(model_name: str) -> None:
    plain, attached, run = twins(MODELS[model_name]())
    isaac.attach(attached, 1.0)
    seen = record(plain)
    step(plain, run)
    _, gradients = step(attached, run)
    tied = embeddings(plain)
    linear = {name: uses for name, uses in seen.items() if f"{name}.weight" in gradients.keys() - tied}
    assert linear
    for name, uses in linear.items():
        expected = torch.stack([zeta_star(*use) for use in uses]).sum(0)
        layer = plain.get_submodule(name)
        assert_close(gradients[f"{name}.weight"], expected if isinstance(layer, nn.Linear) else expected.T)


@every_model
def test_the_forward_pass_is_bit_for_bit_the_plain_one(model_name: str) -> None:
    plain, attached, run = twins(MODELS[model_name]())
    isaac.attach(attached)
    assert torch.equal(step(plain, run)[0], step(attached, run)[0])
    plain.eval()
    attached.eval()
    assert torch.equal(run(plain), run(attached))
    with torch.no_grad():
        assert torch.equal(run(plain), run(attached))


@pytest.mark.parametrize(("model_name", "targets"), [("BERT", ["query", "value"]), ("GPT-2", ["c_attn", "c_fc"])])
def test_low_rank_adapters_are_conditioned_and_the_frozen_model_stays_frozen(model_name: str, targets: list[str]) -> None:
    peft = pytest.importorskip("peft")
    model, run = MODELS[model_name]()
    # Adapters start at zero unless told otherwise, and then half of their gradients are zero.
    options = {"r": 4, "lora_dropout": 0.1, "init_lora_weights": False, "fan_in_fan_out": model_name == "GPT-2"}
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, **options))
    plain, attached, run = twins((adapted, run))
    conditioned = conditioned_weights(attached, isaac.attach(attached, 1.0))
    seen = record(plain)
    (output, expected), (same, actual) = step(plain, run), step(attached, run)
    assert torch.equal(output, same)
    adapters = {name for name, p in attached.named_parameters() if p.requires_grad}
    assert len(adapters) == 2 * 2 * len(targets)
    assert adapters <= conditioned
    for name, gradient in actual.items():
        if name in adapters:
            (use,) = seen[name.removesuffix(".weight")]
            assert_close(expected[name], use[0].T @ use[1])
            assert_close(gradient, zeta_star(*use))
        else:
            assert gradient is None, f"{name} is frozen and has a gradient"


def test_a_long_report_folds_equal_blocks() -> None:
    def block() -> nn.Sequential:
        shapes = {"query": (4, 4), "norm": (4,), "up": (4, 8), "down": (8, 4)}
        layers = {name: nn.LayerNorm(*shape) if name == "norm" else nn.Linear(*shape) for name, shape in shapes.items()}
        return nn.Sequential(OrderedDict(layers))

    model = nn.Sequential(*(block() for _ in range(50)))
    handle = isaac.attach(model, exclude="7.up")
    model(torch.randn(3, 4)).square().sum().backward()
    lines = str(handle).splitlines()
    assert len(lines) < 30
    for name, count in {"{0–49}.query": 50, "{0–49}.norm": 50, "{0–6,8–49}.up": 49, "{0–49}.down": 50}.items():
        assert sum(line.startswith(f"{name} ×{count} ") for line in lines) == 1
    (other,) = (line for line in lines if line.startswith("7.up "))
    assert "exclude='7.up'" in other
    assert any(line.startswith("149 layers conditioned") for line in lines)


def test_averaged_rows_cost_less_than_two_percent_in_layers_of_berts_shape() -> None:
    model = nn.Sequential(nn.Linear(768, 768), nn.Linear(768, 3072))
    handle = isaac.attach(model, sharing="reduce")
    model(torch.randn(8, 128, 768)).mean().backward()
    for seen in handle.statistics.values():
        assert seen.rows == 8
        assert 0 < seen.extra_multiplications < 0.02 * seen.own_multiplications


@pytest.mark.parametrize("bias", ["plain", "joint"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_gpt2s_linear_layer_agrees_with_explicit_rows(bias: str, sharing: str) -> None:
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    plain = pytorch_utils.Conv1D(4, 6).double()
    attached = copy.deepcopy(plain)
    isaac.attach(attached, 0.3, bias=bias, sharing=sharing)
    x, g = torch.randn(5, 3, 6, dtype=torch.float64), torch.randn(5, 3, 4, dtype=torch.float64)
    assert torch.equal(attached(x), plain(x))
    attached(x).backward(g)
    plain(x).backward(g)
    r = x.mean(1) if sharing == "reduce" else x.reshape(-1, 6)
    gradient = plain.weight.grad.T
    if bias == "joint":
        r = torch.cat([r, torch.ones(len(r), 1, dtype=torch.float64)], dim=1)
        gradient = torch.cat([gradient, plain.bias.grad[:, None]], dim=1)
    expected = 0.3 * gradient @ torch.linalg.inv(r.T @ r / len(r) + 0.3 * torch.eye(r.shape[1], dtype=torch.float64))
    assert_close(attached.weight.grad, expected[:, :6].T)
    assert_close(attached.bias.grad, expected[:, 6] if bias == "joint" else plain.bias.grad)
