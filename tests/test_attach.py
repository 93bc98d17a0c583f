"""`attach` selects layers, reports them, follows the damping, and leaves the model as it found it."""

import copy
import io
import math
import pickle
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from torch import nn

import isaac_newton as isaac
import reference
from isaac_newton.api.attach import Layers
from reference import assert_close
from test_linear_gradients import gradients, mlp, record


class Named(nn.Module):
    """A model with names worth selecting by, and with layers that cannot be conditioned."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6))
        self.gru = nn.GRU(6, 6, batch_first=True)
        self.head = nn.Linear(6, 2)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.gru(self.encoder(x))[0]) * self.scale
        return output


@pytest.mark.parametrize(
    ("layers", "exclude", "expected"),
    [
        (None, (), {"encoder.0", "encoder.2", "gru", "head"}),
        ("encoder.*", (), {"encoder.0", "encoder.2"}),
        (["head", "*.0"], (), {"encoder.0", "head"}),
        (None, "head", {"encoder.0", "encoder.2", "gru"}),
        (None, ["head", "encoder.2"], {"encoder.0", "gru"}),
        ("encoder.*", "*.2", {"encoder.0"}),
        (lambda name, module: isinstance(module, nn.Linear) and module.out_features == 2, (), {"head"}),
        ((pattern for pattern in ["encoder.0"]), (), {"encoder.0"}),
    ],
)
def test_layers_are_selected_by_pattern_predicate_and_exclusion(
    layers: Layers | None, exclude: str | Iterable[str], expected: set[str]
) -> None:
    model = Named()
    handle = isaac.attach(model, layers=layers, exclude=exclude)
    assert set(handle.conditioned) == expected
    assert all(handle.conditioned[name] is model.get_submodule(name) for name in expected)
    with_parameters = {name for name, m in model.named_modules() if list(m.parameters(recurse=False))}
    assert set(handle.skipped) == with_parameters - expected


def test_nothing_is_skipped_without_a_reason() -> None:
    class OwnForward(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    class OwnInit(nn.Linear):
        pass

    model = Named()
    model.head = nn.Sequential(OwnForward(6, 6), OwnInit(6, 6), isaac.Linear(6, 6), nn.Bilinear(6, 6, 6), nn.Linear(6, 2))
    handle = isaac.attach(model, exclude="head.4")
    assert "forward of its own" in handle.skipped["head.0"]
    assert "head.1" in handle.conditioned
    assert "head.2" in handle.skipped
    assert "gru" in handle.conditioned
    assert "normalization" in handle.skipped["encoder.1"]
    assert "two inputs" in handle.skipped["head.3"]
    assert "exclude='head.4'" in handle.skipped["head.4"]
    assert "Named" in handle.skipped[""]


def test_the_report_shows_every_layer_and_the_share_covered() -> None:
    handle = isaac.attach(Named(), damping=0.3, layers="encoder.*")
    report = str(handle)
    for name in ("encoder.0", "encoder.1", "gru", "head", "GRU", "6×6", "not selected by layers='encoder.*'", "damping=0.3"):
        assert name in report
    share = 100 * 72 / sum(p.numel() for p in Named().parameters())
    assert f"2 layers conditioned, {share:.1f} % of" in report


def test_parameters_keys_and_types_stay_and_detaching_restores_everything() -> None:
    model = Named()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    parameters, keys = list(model.parameters()), list(model.state_dict())
    handle = isaac.attach(model)
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    assert list(model.state_dict()) == keys
    assert type(model.head) is nn.Linear
    handle.detach()
    after = {name: dict(vars(module)) for name, module in model.named_modules()}
    assert before == after
    isaac.attach(model)
    isaac.detach(model)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_handles_on_different_layers_live_side_by_side() -> None:
    model = mlp()
    x = torch.randn(6, 7, dtype=torch.float64)
    seen = record(copy.deepcopy(model), x)
    first, second = isaac.attach(model, 0.1, layers="0"), isaac.attach(model, 10.0, layers="4")
    grads = gradients(model, x)
    assert_close(grads["0.weight"], reference.zeta_star(*seen["0"], 0.1))
    assert_close(grads["2.weight"], seen["2"][0].T @ seen["2"][1])
    assert_close(grads["4.weight"], reference.zeta_star(*seen["4"], 10.0))
    first.detach()
    assert_close(gradients(model, x)["0.weight"], seen["0"][0].T @ seen["0"][1])
    assert_close(gradients(model, x)["4.weight"], grads["4.weight"])
    second.detach()


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_stay_attached_and_independent(way: str) -> None:
    model = mlp()
    handle = isaac.attach(model, damping=isaac.Relative(0.5))
    x = torch.randn(6, 7, dtype=torch.float64)
    expected = gradients(model, x)
    if way == "deepcopy":
        twin = copy.deepcopy(model)
    elif way == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    handle.damping = 100.0
    assert not torch.allclose(gradients(model, x)["0.weight"], expected["0.weight"])
    for name, grad in gradients(twin, x).items():
        assert torch.equal(grad, expected[name])
    isaac.detach(twin)
    assert "0" in handle.conditioned
    plain = copy.deepcopy(twin)
    for name, grad in gradients(twin, x).items():
        assert torch.equal(grad, gradients(plain, x)[name])
    assert all("forward" not in vars(module) for module in twin.modules())


def test_state_dicts_move_between_attached_and_plain_models() -> None:
    plain, attached = mlp(), mlp()
    isaac.attach(attached)
    attached.load_state_dict(plain.state_dict())
    mlp().load_state_dict(attached.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), attached.parameters(), strict=True))


def test_the_damping_may_change_while_training() -> None:
    layer = nn.Linear(5, 3, dtype=torch.float64)
    handle = isaac.attach(layer, damping=1.0)
    x, g = torch.randn(8, 5, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    for damping in (1.0, 0.01, 30, np.float32(0.5), torch.tensor(2.0)):
        handle.damping = damping
        layer.zero_grad()
        layer(x).backward(g)
        assert handle.damping == damping
        assert_close(layer.weight.grad, reference.zeta_star(g, x, float(damping)))


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_a_relative_damping_follows_the_size_of_the_rows(scale: float) -> None:
    layer = nn.Linear(5, 3, dtype=torch.float64)
    isaac.attach(layer, damping=isaac.Relative(0.3))
    x, g = torch.randn(8, 5, dtype=torch.float64) * scale, torch.randn(8, 3, dtype=torch.float64)
    layer(x).backward(g)
    damping = 0.3 * x.square().sum(1).mean().item() / 5
    assert_close(layer.weight.grad, reference.zeta_star(g, x, damping))


def test_a_relative_damping_of_zero_inputs_gives_the_plain_zero_gradient() -> None:
    layer = nn.Linear(5, 3)
    isaac.attach(layer, damping=isaac.Relative(0.3))
    layer(torch.zeros(4, 5)).sum().backward()
    assert layer.weight.grad is not None
    assert not layer.weight.grad.any()


def test_a_schedule_is_called_with_the_number_of_backward_passes_so_far() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3)).double()
    calls = []

    def schedule(step: int) -> float | isaac.Relative:
        calls.append(step)
        return isaac.Relative(0.5) if step == 2 else 10.0**-step

    handle = isaac.attach(model, damping=schedule)
    x, g = torch.randn(8, 5, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    for step in range(4):
        model.zero_grad()
        model(x)  # a stray forward pass does not count
        hidden = model[0](x).detach()
        model(x).backward(g)
        damping = 0.5 * hidden.square().mean().item() if step == 2 else 10.0**-step
        assert_close(model[1].weight.grad, reference.zeta_star(g, hidden, damping))
    assert list(dict.fromkeys(calls)) == [0, 1, 2, 3]  # how often in a pass is nobody's business
    handle.backward_passes = 7
    model(x).backward(g)
    assert calls[-1] == 7


def test_the_drop_in_layer_is_a_linear_layer_with_a_damping() -> None:
    layer = isaac.Linear(5, 3, la=0.5, bias=False, dtype=torch.float64)
    assert isinstance(layer, nn.Linear)
    assert list(layer.state_dict()) == ["weight"]
    assert "damping=0.5" in repr(layer)
    assert isaac.Linear(2, 2).damping == 1.0
    x, g = torch.randn(8, 5, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    for damping in (0.5, 0.05):
        layer.damping = damping
        twin = pickle.loads(pickle.dumps(copy.deepcopy(layer)))
        twin(x).backward(g)
        assert_close(twin.weight.grad, reference.zeta_star(g, x, damping))
    layer.eval()  # grad mode decides
    layer(x).backward(g)
    assert_close(layer.weight.grad, reference.zeta_star(g, x, 0.05))


def test_statistics_count_fallbacks_per_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp(torch.float32)
    handle = isaac.attach(model, damping=1.0)
    factorize = torch.linalg.cholesky_ex
    failures = iter([True, True])  # once for all layers together, once for the first of them alone

    def failing_once(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        factor, info = factorize(matrix)
        return factor, torch.ones_like(info) if next(failures, False) else info

    monkeypatch.setattr(torch.linalg, "cholesky_ex", failing_once)
    with pytest.warns(RuntimeWarning, match="larger damping"):
        gradients(model, torch.randn(6, 7))
    # They are computed in the order of the forward pass, so that the first one fails alone.
    assert {name: s.fallbacks for name, s in handle.statistics.items()} == {"0": 1, "2": 0, "4": 0}


def test_any_optimizer_follows() -> None:
    x, y = torch.randn(32, 7, dtype=torch.float64), torch.randn(32, 4, dtype=torch.float64)
    for optimizer_type, options in [
        (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
        (torch.optim.AdamW, {"lr": 0.01}),
        (torch.optim.RMSprop, {"lr": 0.003}),
        (torch.optim.Muon, {"lr": 0.02}),
    ]:
        model = mlp()
        if optimizer_type is torch.optim.Muon:  # for matrices only
            for layer in (0, 2, 4):
                model[layer].bias = None
        isaac.attach(model, damping=0.1)
        optimizer = optimizer_type(model.parameters(), **options)
        losses = []
        for _ in range(40):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert math.isfinite(losses[-1])
        assert losses[-1] < 0.8 * losses[0]


def test_clipping_and_a_gradient_scaler_work_on_the_conditioned_gradient() -> None:
    x, y = torch.randn(16, 7), torch.randn(16, 4)
    start = mlp(torch.float32).state_dict()
    results = []
    for scaled in (False, True):
        model = mlp(torch.float32)
        model.load_state_dict(start)
        isaac.attach(model, damping=0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=1024.0)
        for poison in (0.0, math.inf, 0.0):
            optimizer.zero_grad()
            scaler.scale(nn.functional.mse_loss(model(x + poison), y)).backward()
            if not scaled and poison:
                continue  # what the scaler does by itself
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        results.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        if scaled:
            assert scaler.get_scale() == 512.0  # halved once, by the batch that overflowed
    assert results[0].isfinite().all()
    assert_close(results[1], results[0], 1e-5)
