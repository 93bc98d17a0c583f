"""when="step": curvature gathered over micro-batches and steps, gradients conditioned once, right before the optimizer."""

import copy
import math
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import isaac_newton as isaac
from reference import zeta_star

torch.manual_seed(0)


def mlp(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 3)).to(dtype)


class Mixed(nn.Module):
    """One of everything that gathers: embedding, attention, convolution with groups, a joint bias, a reused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.conv = nn.Conv1d(8, 6, 3, groups=2)
        self.transposed = nn.ConvTranspose1d(6, 4, 2)
        self.twice = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.transposed(F.relu(self.conv(x.mT))).mT
        return self.head(self.twice(torch.tanh(self.twice(x))).mean(1))


def mixed() -> Mixed:
    torch.manual_seed(2)
    return Mixed().double()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float = 1e-9) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        scale = theirs[name].abs().max().clamp_min(1e-12)
        assert (ours[name] - theirs[name]).abs().max() <= tolerance * scale, name


@pytest.fixture
def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    return torch.randint(11, (8, 6)), torch.randint(3, (8,))


@pytest.mark.parametrize("options", [{}, {"bias": "joint"}, {"sharing": "reduce"}, {"damping": isaac.Relative(0.3)}])
def test_one_batch_gives_what_backward_gives(tokens, options) -> None:
    x, y = tokens
    expected, model = mixed(), mixed()
    options = {"damping": 0.2} | options
    isaac.attach(expected, **options, exclude="twice")
    F.cross_entropy(expected(x), y).backward()
    handle = isaac.attach(model, when="step", **options, exclude="twice")
    F.cross_entropy(model(x), y).backward()
    handle.step()
    assert_same(gradients(model), gradients(expected))


@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize("extra", [{}, {"decay": 0.5, "power": 0.5}, {"power": 0.7, "bias": "joint"}])
def test_micro_batches_equal_one_batch(tokens, parts, extra) -> None:
    x, y = tokens
    one, many = mixed(), mixed()
    handles = [isaac.attach(model, damping=0.2, when="step", **extra) for model in (one, many)]
    F.cross_entropy(one(x), y).backward()
    for part_x, part_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
        (F.cross_entropy(many(part_x), part_y) / parts).backward()
    for handle in handles:
        handle.step()
    assert_same(gradients(many), gradients(one))


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_micro_batches_equal_one_batch_in_float32(parts) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(64, 30), torch.randint(5, (64,))
    one = nn.Sequential(nn.Linear(30, 100), nn.ReLU(), nn.Linear(100, 5))
    many = copy.deepcopy(one)
    handles = [isaac.attach(model, damping=0.1, when="step") for model in (one, many)]
    F.cross_entropy(one(x), y).backward()
    for part_x, part_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
        (F.cross_entropy(many(part_x), part_y) / parts).backward()
    plain = gradients(one)
    for handle in handles:
        handle.step()
    for name, gradient in gradients(many).items():
        # The rounding is that of the plain gradient, which conditioning makes smaller.
        assert (gradient - gradients(one)[name]).abs().max() <= 1e-6 * plain[name].abs().max()


def test_a_layer_used_twice_gathers_both_inputs() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 5, bias=False).double()
    x = torch.randn(4, 5, dtype=torch.float64)
    handle = isaac.attach(layer, damping=0.3, when="step")
    middle = layer(x)
    middle.retain_grad()
    output = layer(middle)
    output.backward(torch.ones_like(output))
    a = torch.cat([x, middle.detach()])
    g = torch.cat([middle.grad, torch.ones_like(output)])
    handle.step()
    torch.testing.assert_close(layer.weight.grad, zeta_star(g, a, 0.3), rtol=1e-9, atol=1e-12)


def test_a_running_average_is_the_weighted_mean_of_second_moments() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 3, bias=False).double()
    handle = isaac.attach(layer, damping=0.5, when="step", decay=0.8)
    average, total = torch.zeros(4, 4, dtype=torch.float64), 0.0
    for _ in range(5):
        x, g = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
        layer.zero_grad()
        layer(x).backward(g)
        plain = layer.weight.grad.clone()
        handle.step()
        average, total = 0.8 * average + 0.2 * x.T @ x / 6, 0.8 * total + 0.2
        expected = plain @ torch.linalg.inv(torch.eye(4, dtype=torch.float64) + average / total / 0.5)
        torch.testing.assert_close(layer.weight.grad, expected, rtol=1e-9, atol=1e-12)


def test_power_takes_the_root_of_the_conditioner_and_zero_gives_the_gradient() -> None:
    torch.manual_seed(0)
    x, g = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(x.T @ x / 6)
    for power in (0, 0.25, 0.5, 1):
        layer = nn.Linear(4, 3, bias=False).double()
        handle = isaac.attach(layer, damping=0.5, when="step", power=power)
        layer(x).backward(g)
        plain = layer.weight.grad.clone()
        handle.step()
        expected = plain @ (vectors * (1 + values / 0.5).pow(-power)) @ vectors.T
        torch.testing.assert_close(layer.weight.grad, expected, rtol=1e-9, atol=1e-12)


def test_refresh_keeps_a_conditioner_for_so_many_steps_and_gathers_nothing_meanwhile() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 3, bias=False).double()
    handle = isaac.attach(layer, damping=0.5, when="step", refresh=3)
    kept = None
    for step in range(7):
        x, g = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
        layer.zero_grad()
        layer(x).backward(g)
        plain = layer.weight.grad.clone()
        handle.step()
        if step % 3 == 0:
            kept = torch.linalg.inv(torch.eye(4, dtype=torch.float64) + x.T @ x / 6 / 0.5)
        torch.testing.assert_close(layer.weight.grad, plain @ kept, rtol=1e-9, atol=1e-12)


def test_a_schedule_is_called_with_the_number_of_steps() -> None:
    seen = []

    def schedule(step: int) -> float:
        seen.append(step)
        return 1.0

    model = mlp()
    handle = isaac.attach(model, damping=schedule, when="step", layers="0")
    for _ in range(3):
        for _ in range(2):
            model(torch.randn(4, 9, dtype=torch.float64)).sum().backward()
        handle.step()
    assert seen == [0, 1, 2]


def test_a_bound_optimizer_conditions_by_itself_and_stops_when_detached() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(5, 9, dtype=torch.float64), torch.randint(3, (5,))
    by_hand, bound = mlp(), mlp()
    optimizers = [torch.optim.Adam(model.parameters(), 0.1) for model in (by_hand, bound)]
    handle = isaac.attach(by_hand, damping=0.1, when="step")
    other = isaac.attach(bound, damping=0.1, when="step").bind(optimizers[1])
    for _ in range(3):
        for model, optimizer in zip((by_hand, bound), optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if model is by_hand:
                handle.step()
            optimizer.step()
    assert_same(dict(bound.named_parameters()), dict(by_hand.named_parameters()))
    other.detach()
    bound.zero_grad()
    F.cross_entropy(bound(x), y).backward()
    before = gradients(bound)
    optimizers[1].step()
    assert_same(gradients(bound), before, 0)


@pytest.mark.parametrize("by_name", [True, False])
def test_a_closure_is_followed_by_the_conditioning(by_name) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(5, 9, dtype=torch.float64), torch.randint(3, (5,))
    expected, model = mlp(), mlp()
    isaac.attach(expected, damping=0.1)
    F.cross_entropy(expected(x), y).backward()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    isaac.attach(model, damping=0.1, when="step").bind(optimizer)

    def closure() -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    assert loss.item() == F.cross_entropy(expected(x), y).item()
    assert_same(gradients(model), gradients(expected))


def test_two_optimizers_condition_their_own_parameters() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(5, 9, dtype=torch.float64), torch.randint(3, (5,))
    expected, model = mlp(), mlp()
    handle = isaac.attach(expected, damping=0.1, when="step")
    F.cross_entropy(expected(x), y).backward()
    handle.step()
    first = torch.optim.SGD(model[0].parameters(), 0.0)
    second = torch.optim.SGD(model[2].parameters(), 0.0)
    other = isaac.attach(model, damping=0.1, when="step").bind(first).bind(second)
    F.cross_entropy(model(x), y).backward()
    plain = model[2].weight.grad.clone()
    first.step()
    assert torch.equal(model[2].weight.grad, plain)
    second.step()
    assert_same(gradients(model), gradients(expected))
    assert other.steps == 1


def test_stray_forward_passes_change_nothing(tokens) -> None:
    x, y = tokens
    expected, model = mixed(), mixed()
    handles = [isaac.attach(m, damping=0.2, when="step", decay=0.9) for m in (expected, model)]
    for step in range(3):
        for m, handle in zip((expected, model), handles, strict=True):
            m.zero_grad()
            if m is model:
                m(torch.randint(11, (3, 6)))
                torch.randn(step)
            F.cross_entropy(m(x), y).backward()
            handle.step()
    assert_same(gradients(model), gradients(expected), 0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_changes_nothing(reentrant) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(5, 9, dtype=torch.float64, requires_grad=True), torch.randint(3, (5,))
    expected, model = mlp(), mlp()
    handles = [isaac.attach(m, damping=0.1, when="step", decay=0.5) for m in (expected, model)]
    for _ in range(2):
        expected.zero_grad(), model.zero_grad()
        for _ in range(2):
            F.cross_entropy(expected(x), y).backward()
            hidden = checkpoint(model[:2], x, use_reentrant=reentrant)
            F.cross_entropy(checkpoint(model[2], hidden, use_reentrant=reentrant), y).backward()
        for handle in handles:
            handle.step()
        assert_same(gradients(model), gradients(expected), 1e-12)


def test_a_batch_whose_step_was_skipped_leaves_no_trace() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(5, 9, dtype=torch.float64), torch.randint(3, (5,))
    expected, model = mlp(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    handle = isaac.attach(expected, damping=0.1, when="step")
    isaac.attach(model, damping=0.1, when="step").bind(optimizer)
    F.cross_entropy(expected(x), y).backward()
    handle.step()
    model(100 * torch.randn(5, 9, dtype=torch.float64)).sum().backward()  # and no step, as after an overflow
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert_same(gradients(model), gradients(expected))


def test_inputs_that_are_not_finite_enter_no_average() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 3, bias=False).double()
    handle = isaac.attach(layer, damping=0.5, when="step", decay=0.8)
    layer(torch.randn(6, 4, dtype=torch.float64)).sum().backward()
    handle.step()
    before = handle.state_dict()["curvature"][""]
    layer.zero_grad()
    layer(torch.full((6, 4), math.nan, dtype=torch.float64)).sum().backward()
    handle.step()
    after = handle.state_dict()["curvature"][""]
    assert layer.weight.grad.isnan().any()
    for place in before:
        assert torch.equal(before[place]["average"], after[place]["average"])


def test_an_input_written_over_before_the_step_does_not_matter() -> None:
    torch.manual_seed(0)
    buffer, g = torch.randn(2, 9, dtype=torch.float64), torch.randn(2, 7, dtype=torch.float64)
    layer = nn.Linear(9, 7, bias=False).double()
    handle = isaac.attach(layer, damping=0.5, when="step")
    layer(buffer).backward(g)
    first = buffer.clone()
    buffer.normal_()
    layer(buffer).backward(g)
    expected = zeta_star(torch.cat([g, g]), torch.cat([first, buffer]), 0.5)
    buffer.zero_()
    handle.step()
    torch.testing.assert_close(layer.weight.grad, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "options", [{}, {"decay": 0.9, "refresh": 7, "power": 0.5}, {"damping": isaac.Relative(0.2), "decay": 0.5}]
)
def test_the_steps_after_a_resume_are_bit_identical(tmp_path, options) -> None:
    options = {"damping": 0.1} | options

    def make() -> tuple[nn.Module, torch.optim.Optimizer, isaac.Handle]:
        model = mlp(torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        return model, optimizer, isaac.attach(model, when="step", **options).bind(optimizer)

    def train(model, optimizer, steps: range) -> None:
        for step in steps:
            random = torch.Generator().manual_seed(step)
            x, y = torch.randn(12, 9, generator=random), torch.randint(3, (12,), generator=random)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    model, optimizer, handle = make()
    train(model, optimizer, range(15))
    path = tmp_path / "checkpoint.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "isaac": handle.state_dict()}, path)
    train(model, optimizer, range(15, 35))

    resumed, other, new = make()
    saved = torch.load(path)
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    new.load_state_dict(saved["isaac"])
    train(resumed, other, range(15, 35))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))


def test_copies_and_pickles_gather_for_themselves() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 9, dtype=torch.float64)
    model = mlp()
    handle = isaac.attach(model, damping=0.1, when="step")
    model(x).sum().backward()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(x).sum().backward()
        mine, its = model[0].forward.gatherings["weight"], twin[0].forward.gatherings["weight"]
        assert mine is not its
        assert mine.moments.keys() == its.moments.keys()
        assert all(a.rows is not b.rows for a, b in zip(mine.moments.values(), its.moments.values(), strict=True))
    handle.step()


def test_forgetting_to_bind_is_noticed() -> None:
    model = mlp()
    isaac.attach(model, damping=0.1, when="step")
    x = torch.randn(4, 9, dtype=torch.float64)
    model(x).sum().backward()
    model.zero_grad()
    with pytest.warns(RuntimeWarning, match=r"handle\.bind\(optimizer\)"):
        model(x).sum().backward()
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x).sum().backward()


def test_misuse_says_what_would_be_right() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    handle = isaac.attach(model, damping=0.1)
    with pytest.raises(RuntimeError, match="for when='step'"):
        handle.bind(optimizer)
    with pytest.raises(RuntimeError, match="for when='step'"):
        handle.step()
    handle.detach()
    for options, message in [
        ({"when": "later"}, "when must be one of 'backward', 'step'"),
        ({"decay": 0.5}, "for when='step'"),
        ({"when": "step", "decay": 1.0}, "decay must be at least 0 and below 1"),
        ({"when": "step", "power": 1.5}, "power must be at least 0 and at most 1"),
        ({"when": "step", "refresh": 0}, "refresh must be a whole number >= 1"),
        ({"when": "step", "output_damping": 0.1}, "ζ .* works with when='backward'"),
    ]:
        with pytest.raises(ValueError, match=message):
            isaac.attach(model, damping=0.1, **options)
    with pytest.raises(TypeError, match="power must be a number"):
        isaac.attach(model, damping=0.1, when="step", power="half")
    handle = isaac.attach(model, damping=0.1, when="step").bind(optimizer)
    with pytest.raises(ValueError, match="already bound"):
        handle.bind(optimizer)
    with pytest.raises(RuntimeError, match="is bound"):
        handle.step()
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer, got Sequential"):
        handle.bind(model)
    with pytest.raises(ValueError, match="format"):
        handle.load_state_dict({})


def test_what_cannot_wait_for_the_step_is_skipped_with_a_reason() -> None:
    model = nn.ModuleDict(
        {"bag": nn.EmbeddingBag(5, 3), "norm": nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), "fc": nn.Linear(3, 3)}
    )
    handle = isaac.attach(model, 1.0, when="step")
    assert set(handle.conditioned) == {"fc"}
    assert "own batch only" in handle.skipped["bag"]
    assert "computed from other parameters" in handle.skipped["norm"]
