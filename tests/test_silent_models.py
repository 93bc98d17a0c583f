"""What users attach to, in a few lines each: blocks of vision models, tied language models, PEFT, trainers, adversarial loops.

Gradients are held against `definition.attach`, in float64. Warnings are errors, so a loop that is right does not warn.
"""

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import definition
import isaac_newton as isaac
from definition import conditioner
from reference import assert_close
from test_silent import DAMPING, X2, Language, Side, X, Y, assert_right, loss_of, mlp, one_hot

PICTURES = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def is_dense(name: str, layer: nn.Module) -> bool:
    """What the definition has."""
    return isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.groups == 1)


def assert_as_defined(model: nn.Module, step: Callable[[nn.Module], Any], **options: Any) -> isaac.Handle:
    """One step on the model and on a twin of it that follows the definition."""
    twin = copy.deepcopy(model)
    definition.attach(twin, DAMPING, **options)
    handle = isaac.attach(model, DAMPING, layers=is_dense, **options)
    for one in (model, twin):
        step(one)
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None:
            assert_close(mine.grad, theirs.grad)
    return handle


def on_pictures(model: nn.Module) -> None:
    model(PICTURES).square().mean().backward()


# ------------------------------------------------------------------------------------------------------------- vision models


class Attention(nn.Module):
    """As in timm, with qkv in one layer; BEiT multiplies by its weight without calling it."""

    def __init__(self, width: int, beit: bool) -> None:
        super().__init__()
        self.beit, self.qkv, self.proj = beit, nn.Linear(width, 3 * width, bias=not beit), nn.Linear(width, width)
        if beit:
            self.q_bias, self.v_bias = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.beit:
            bias = torch.cat([self.q_bias, torch.zeros_like(self.v_bias), self.v_bias])
            qkv = F.linear(x, self.qkv.weight, bias)
        else:
            qkv = self.qkv(x)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
        output: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return output


class ViT(nn.Module):
    def __init__(self, beit: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.attention = nn.Conv2d(3, 8, 4, 4), Attention(8, beit)
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 17, 8))
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        x = x + self.attention(self.norms[0](x))
        return (x + self.mlp(self.norms[1](x)))[:, 0]


class Swin(nn.Module):
    """Attention in windows that are shifted, with a table of biases."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.norm, self.qkv, self.proj = nn.Conv2d(3, 8, 2, 2), nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.bias_table, self.reduction = nn.Parameter(torch.randn(16, 16)), nn.Linear(32, 16, bias=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).permute(0, 2, 3, 1)
        windows = torch.roll(self.norm(x), (-2, -2), (1, 2)).unflatten(1, (2, 4)).unflatten(3, (2, 4)).transpose(2, 3)
        q, k, v = self.qkv(windows.reshape(-1, 16, 8)).chunk(3, -1)
        seen = self.proj(F.scaled_dot_product_attention(q, k, v, self.bias_table)).reshape(windows.shape)
        x = x + torch.roll(seen.transpose(2, 3).reshape(x.shape), (2, 2), (1, 2))
        merged: Tensor = self.reduction(torch.cat([x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], -1))
        return merged


class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.spatial, self.norm = nn.Conv2d(3, 8, 4, 4), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.LayerNorm(8)
        self.up, self.down, self.gamma = nn.Linear(8, 32), nn.Linear(32, 8), nn.Parameter(torch.full((8,), 0.5))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return x + (self.gamma * self.down(F.gelu(self.up(self.norm(self.spatial(x).permute(0, 2, 3, 1)))))).permute(0, 3, 1, 2)


class EfficientNet(nn.Module):
    """Expansion, convolution of each channel, squeeze and excitation, projection."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.expand, self.project = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 8, 1), nn.Conv2d(8, 4, 1)
        self.spatial, self.squeeze, self.excite = (
            nn.Conv2d(8, 8, 3, padding=1, groups=8),
            nn.Conv2d(8, 2, 1),
            nn.Conv2d(2, 8, 1),
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in (8, 8, 4))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = start = self.stem(x)
        x = F.silu(self.norms[1](self.spatial(F.silu(self.norms[0](self.expand(x))))))
        x = x * torch.sigmoid(self.excite(F.silu(self.squeeze(x.mean((2, 3), keepdim=True)))))
        return start + self.norms[2](self.project(x))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("make", [ViT, Swin, ConvNeXt, EfficientNet])
def test_a_block_of_a_vision_model_follows_the_definition(make: Callable[[], nn.Module], training: bool) -> None:
    handle = assert_as_defined(make().train(training), on_pictures)
    assert all(len(line) <= 120 for line in str(handle).splitlines())


def test_beits_qkv_is_used_outside_its_layer_and_named_once() -> None:
    model, plain = ViT(beit=True), ViT(beit=True)
    handle = isaac.attach(model, DAMPING)
    with pytest.warns(RuntimeWarning, match=r"layers 'attention.qkv' received .* F.linear") as caught:
        on_pictures(model)
    assert len(caught) == 1
    on_pictures(plain)
    assert_close(model.attention.qkv.weight.grad, plain.attention.qkv.weight.grad)
    on_pictures(model)  # said once
    assert "used outside its layer" in str(handle)
    live = sum(p.numel() for n, p in model.named_parameters() if n.endswith("weight") and p.dim() > 1 and "qkv" not in n)
    assert f"{100 * live / sum(p.numel() for p in model.parameters()):.1f} %" in str(handle)


def test_where_nothing_is_called_that_is_said_too() -> None:
    model = nn.ModuleList([nn.Linear(6, 4).double()])
    handle = isaac.attach(model, DAMPING)
    with pytest.warns(RuntimeWarning, match="'0' received a gradient"):
        F.linear(X, model[0].weight).sum().backward()
    assert "0 layers conditioned, 0.0 %" in str(handle)


# ----------------------------------------------------------------------------------------------------------- what stays torch's


def test_fgsm_moves_no_schedule_and_its_batch_is_conditioned() -> None:
    def pattern(s: Side) -> None:
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad(loss_of(s.model, x), x)
        s.forget()
        loss_of(s.model, X + 0.1 * slope.sign()).backward()
        s.optimizer.step()

    side = assert_right(pattern, "backward")
    assert side.handle is not None
    assert side.handle.backward_passes == 1


def test_a_pinn_is_conditioned_with_its_residual() -> None:
    points = torch.linspace(0, 1, 12, dtype=torch.float64)[:, None]

    def step(model: nn.Module) -> None:
        x = points.clone().requires_grad_()
        u = model(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        ((bend + u).square().mean() + (model(points[:1]) - 1).square().sum()).backward()

    assert_as_defined(mlp(1, 8, 8, 1), step)


def test_both_networks_of_a_gan_follow_the_definition() -> None:
    noise = torch.randn(7, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def steps(generator: nn.Module, critic: nn.Module) -> list[dict[str, Tensor]]:
        found = []
        fake = generator(noise)
        F.softplus(-critic(X)).mean().backward()
        F.softplus(critic(fake.detach())).mean().backward()
        found.append({name: p.grad.clone() for name, p in critic.named_parameters() if p.grad is not None})
        critic.zero_grad()
        F.softplus(-critic(fake)).mean().backward()
        found.append({name: p.grad.clone() for name, p in generator.named_parameters() if p.grad is not None})
        return found

    pairs = [(mlp(3, 6, 6), mlp(6, 8, 1)) for _ in range(2)]
    for mine, theirs in zip(*pairs, strict=True):
        isaac.attach(mine, DAMPING)
        definition.attach(theirs, DAMPING)
    for actual, expected in zip(*(steps(*pair) for pair in pairs), strict=True):
        for name, gradient in expected.items():
            assert_close(actual[name], gradient)


def test_a_tied_head_has_both_of_its_gradients_conditioned() -> None:
    """As in nanoGPT: one weight, one layer that looks words up and one that multiplies."""
    model, twin, ids = Language(), Language(), torch.arange(12).reshape(3, 4) % 7
    isaac.attach(model, DAMPING)
    F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    embedded = twin.embedding(ids)
    hidden = torch.tanh(twin.middle(embedded))
    scores = twin.head(hidden)
    to_words, to_scores = torch.autograd.grad(F.cross_entropy(scores.flatten(0, 1), ids.flatten()), (embedded, scores))
    rows, a = one_hot(ids, 12), hidden.detach().flatten(0, 1)
    looked_up = conditioner(rows, DAMPING) @ rows.T @ to_words.flatten(0, 1)
    multiplied = to_scores.flatten(0, 1).T @ a @ conditioner(a, DAMPING)
    assert_close(model.head.weight.grad, looked_up + multiplied)


# -------------------------------------------------------------------------------------------------------------- PEFT, trainers


def lora(model: nn.Module) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"], r=2, init_lora_weights=False))


def test_peft_before_attach_is_conditioned() -> None:
    model = lora(mlp(6, 8, 4)).double()
    twin = copy.deepcopy(model)
    handle = isaac.attach(model, DAMPING)
    definition.attach(twin, DAMPING)
    for one in (model, twin):
        loss_of(one).backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    for name, p in trained.items():
        assert_close(p.grad, twin.get_parameter(name).grad)
    assert "plain: frozen" in str(handle)


def test_peft_after_attach_is_named() -> None:
    model = mlp(6, 8, 4)
    handle = isaac.attach(model, DAMPING)
    adapted = lora(model).double()
    with pytest.warns(RuntimeWarning, match=r"layers '0.lora_A.default', '0.lora_B.default' came after attach"):
        loss_of(adapted).backward()
    text = str(handle)
    assert "came after attach" in text
    assert "plain: frozen" in text


def padded() -> tuple[Any, dict[str, Tensor]]:
    """A small language model and a batch in which most is padding."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 30}
    config = transformers.BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=2)
    mask = torch.arange(12) < torch.tensor([12, 3, 1, 2])[:, None]
    ids = torch.randint(1, 30, (4, 12)) * mask
    batch = {"input_ids": ids, "attention_mask": mask.long(), "labels": torch.tensor([0, 1, 1, 0])}
    return transformers.BertForSequenceClassification(config), batch


def without_padding() -> dict[str, Tensor]:
    """The weights after a step of SGD in which the mask was set by hand."""
    model, batch = padded()
    handle = isaac.attach(model, DAMPING)
    handle.mask = batch["attention_mask"]
    model(**batch).loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * (p.grad if p.grad is not None else 0)
    return dict(model.state_dict())


def by_hand(model: Any, batch: dict[str, Tensor], folder: Path) -> None:
    isaac.attach(model, DAMPING)
    model.eval()  # another batch in between, without gradients
    with torch.no_grad():
        model(batch["input_ids"][:1, :3])
    model.train()
    model(**batch).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def by_trainer(model: Any, batch: dict[str, Tensor], folder: Path) -> None:
    from transformers import Trainer, TrainingArguments

    from isaac_newton.integrations.transformers import IsaacCallback

    samples = [{name: values[number] for name, values in batch.items()} for number in range(4)]
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    arguments = TrainingArguments(str(folder), max_steps=1, per_device_train_batch_size=4, max_grad_norm=0.0, **quiet)
    schedule = (optimizer := torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0))
    Trainer(model, arguments, train_dataset=samples, optimizers=schedule, callbacks=[IsaacCallback(DAMPING)]).train()


def by_lightning(model: Any, batch: dict[str, Tensor], folder: Path) -> None:
    import lightning.pytorch as lightning

    from isaac_newton.integrations.lightning import IsaacCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model.train()

        def training_step(self, batch: Any) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(max_steps=1, accelerator="cpu", callbacks=[IsaacCallback(DAMPING)], **quiet)
    trainer.fit(Module(), torch.utils.data.DataLoader([batch], batch_size=None))


def by_accelerate(model: Any, batch: dict[str, Tensor], folder: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    isaac.attach(model, DAMPING)
    accelerator.backward(model(**batch).loss)
    optimizer.step()


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*pin_memory", "ignore:.*num_workers"
)
@pytest.mark.filterwarnings("ignore:.*(TRANSFORMERS_CACHE|litlogger|isinstance.treespec|lr_scheduler)")
@pytest.mark.parametrize("train", [by_hand, by_trainer, by_lightning, by_accelerate])
def test_padding_is_left_out_by_itself(train: Callable[..., None], tmp_path: Path) -> None:
    model, batch = padded()
    train(model, batch, tmp_path)
    for name, value in without_padding().items():
        if value.dim() > 1:
            assert_close(model.state_dict()[name], value, 1e-6)


class TakesMask(nn.Module):
    """Anything that is called with an attention mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 4)
        self.double()

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        output: Tensor = self.layer(x)
        return output


def test_a_mask_belongs_to_its_call_and_one_set_by_hand_goes_before() -> None:
    x, mask = torch.stack([X[:4], X2[:4]]), torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    model = TakesMask()
    handle = isaac.attach(model, DAMPING)

    def gradient(**given: Any) -> Tensor:
        model.zero_grad()
        model(x, **given).square().sum().backward()
        assert model.layer.weight.grad is not None
        return model.layer.weight.grad.clone()

    every, some = gradient(), gradient(attention_mask=mask)
    assert (some - every).norm() > 0.01 * every.norm()
    assert torch.equal(gradient(), every)  # that of the call before is not kept
    assert torch.equal(gradient(attention_mask=torch.zeros(2, 1, 4, 4)), every)  # who sees whom, not what counts
    handle.mask = mask
    assert torch.equal(gradient(), some)
    assert torch.equal(gradient(attention_mask=torch.ones(2, 4)), some)
    handle.detach()
    assert not model._forward_pre_hooks


def test_detaching_a_copy_takes_its_hooks_along() -> None:
    model = TakesMask()
    isaac.attach(model, DAMPING)
    twin = copy.deepcopy(model)
    isaac.detach(twin)
    assert not twin._forward_pre_hooks
    assert model._forward_pre_hooks


def test_a_mask_of_what_is_padding_is_noticed() -> None:
    handle = isaac.attach(mlp(6, 8, 4), DAMPING)
    counts = torch.arange(5) < torch.tensor([5, 2, 3])[:, None]
    handle.mask = counts
    handle.mask = counts & torch.tensor([True, False, True])[:, None]  # an empty sample
    handle.mask = counts.flip(1)  # padded on the left
    with pytest.warns(RuntimeWarning, match="give ~mask"):
        handle.mask = ~counts


# ------------------------------------------------------------------------------------------------------------------- the report


def alternating(model: nn.Module) -> Iterator[int]:
    for number in itertools.count(1):
        model.zero_grad()
        (model[0](X) if number % 2 else model[1](X)).square().mean().backward()
        yield number


def test_layers_that_are_not_always_called_do_not_warn_and_say_when_they_were() -> None:
    model = nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(6, 4)]).double()
    handle = isaac.attach(model, DAMPING)
    passes = alternating(model)
    for _ in range(5):
        next(passes)
    text = str(handle)
    assert "ζ*, not seen since pass 4" in text
    assert "ζ*, but not seen yet" in text
    assert "2 layers conditioned, 57.1 %" in text


def test_a_parametrized_layer_is_reported_as_what_it_is() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 8, bias=False)), nn.Linear(8, 4)).double()
    plain = copy.deepcopy(model)
    handle = isaac.attach(model, DAMPING)
    for one in (model, plain):
        loss_of(one).backward()
    original = [one[0].parametrizations.weight.original1.grad for one in (model, plain)]
    assert (original[0] - original[1]).norm() > 0.01 * original[1].norm()
    assert set(handle.conditioned) == {"0", "0.parametrizations.weight", "1"}
    assert not handle.skipped
    assert "plain" not in str(handle)


def test_a_wrapped_or_flattened_layer_does_not_break_the_report() -> None:
    model = mlp(6, 8, 4)
    handle = isaac.attach(model, DAMPING)
    model[0] = nn.Sequential(model[0])
    loss_of(model).backward()
    del model[2]._parameters["weight"]  # as FSDP does, which keeps one flat parameter
    model[2].weight = torch.zeros(4, 8).double()
    text = str(handle)
    assert "0.0 " in text
    assert "replaced" not in text
    assert "2 layers conditioned" in text


def test_no_line_of_the_report_is_long_and_every_option_is_in_it() -> None:
    names = [f"a_name_that_is_as_long_as_those_of_large_models.encoder_layer_number_{'x' * n}" for n in range(3)]
    model = nn.Module()
    for name in names:
        outer, inner = name.split(".")
        model.add_module(outer, getattr(model, outer, nn.Module()))
        getattr(model, outer).add_module(inner, nn.Linear(6, 4))
        getattr(model, outer).add_module(inner + "_norm", nn.LayerNorm(6))
    options = {"max_rows": 3, "sharing": "reduce", "bias": "joint", "when": "step", "decay": 0.5, "refresh": 2, "power": 0.5}
    lines = str(isaac.attach(model, isaac.Relative(0.5), **options)).splitlines()
    assert max(map(len, lines)) <= 120
    footer = " ".join(lines[-3:])
    for name, value in options.items():
        assert f"{name}={value!r}" in footer


def test_the_loss_of_handle_backward_is_the_one_that_was_computed() -> None:
    model = mlp(6, 8, 4)
    handle = isaac.attach(model, DAMPING, output_damping=1.0)
    output = model(X)
    with pytest.raises(ValueError, match="loss_fn is a CrossEntropy, but the loss was computed by MseLoss"):
        handle.backward(F.mse_loss(output, output.detach() + 1), output, nn.CrossEntropyLoss())
    with pytest.raises(ValueError, match="reduction='mean', but the loss was computed with 'sum'"):
        handle.backward(F.cross_entropy(output, Y, reduction="sum"), output, nn.CrossEntropyLoss())
    handle.backward(3 * F.cross_entropy(output, Y) + output.square().mean(), output, nn.CrossEntropyLoss())


def test_a_state_of_another_width_is_refused() -> None:
    def averaged(*widths: int) -> isaac.Handle:
        model = mlp(*widths)
        handle = isaac.attach(model, DAMPING, when="step", decay=0.5)
        model(torch.ones(3, widths[0]).double()).sum().backward()
        handle.step()
        return handle

    state = averaged(6, 8, 4).state_dict()
    with pytest.raises(ValueError, match="layer '0' was made for 8 outputs and rows of 6 features, and this one has 7"):
        averaged(6, 7, 4).load_state_dict(state)


def test_a_damping_set_by_hand_comes_back_and_one_given_anew_stays() -> None:
    first = isaac.attach(mlp(6, 4), 0.5)
    first.damping = 0.25
    state = first.state_dict()
    same = isaac.attach(mlp(6, 4), 0.5)
    same.load_state_dict(state)
    assert same.damping == 0.25
    other = isaac.attach(mlp(6, 4), 2.0)
    with pytest.warns(RuntimeWarning, match=r"damping=0.25, and this handle was given 2.0 anew"):
        other.load_state_dict(state)
    assert other.damping == 2.0


def test_a_correct_loop_with_everything_around_it_does_not_warn() -> None:
    model = mlp(6, 8, 4)
    handle = isaac.attach(model, DAMPING)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(9):
            optimizer.zero_grad()
            (loss_of(model) + 1e-3 * sum(p.square().sum() for p in model.parameters())).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            average.update_parameters(model)
            if number == 4:
                model[0].requires_grad_(False)
            with torch.no_grad():
                model.eval()(X)
            model.train()
        print(handle)
