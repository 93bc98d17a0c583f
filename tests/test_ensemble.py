"""An ensemble is as many separate runs: the same weights, copy by copy, after training."""

import math

import pytest
import torch
from torch import Tensor, nn

import isaac_newton as isaac
from isaac_lab.methods.optimizers import per_copy
from reference import assert_close, relative_error

DAMPINGS = [math.inf, 1.0, 0.01]
STEPS = 50
RATES = {"sgd": [0.3, 0.1, 0.05], "momentum": [0.3, 0.1, 0.05], "adam": [0.01, 0.003, 0.02]}


def network(seed: int, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 4)).to(dtype)


def batches(seed: int, rows: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(seed)
    return [
        (torch.rand(rows, 12, generator=random, dtype=torch.float64).to(dtype), torch.randint(4, (rows,), generator=random))
        for _ in range(STEPS)
    ]


def alone(model: nn.Sequential, data: list[tuple[Tensor, Tensor]], damping: float, optimizer: torch.optim.Optimizer) -> None:
    if damping != math.inf:
        isaac.attach(model, damping)
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    if damping != math.inf:
        isaac.detach(model)


def single_run(number: int, rows: int, kind: str, dtype: torch.dtype) -> Tensor:
    """What training one copy by itself changes in its weights."""
    model = network(number, dtype)
    start = flat(model)
    if kind == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=RATES[kind][number])
    else:
        momentum = 0.9 if kind == "momentum" else 0.0
        optimizer = torch.optim.SGD(model.parameters(), lr=RATES[kind][number], momentum=momentum)
    alone(model, batches(number, rows, dtype), DAMPINGS[number], optimizer)
    return flat(model) - start


def together(rows: int, kind: str, dtype: torch.dtype) -> list[Tensor]:
    """What training the copies at once changes in their weights."""
    models = [network(number, dtype) for number in range(3)]
    data = [batches(number, rows, dtype) for number in range(3)]
    stacked = isaac.Ensemble(models, damping=DAMPINGS)
    optimizer = per_copy(kind, stacked, RATES[kind])
    for step in range(STEPS):
        x, y = (torch.stack(tensors) for tensors in zip(*(own[step] for own in data), strict=True))
        optimizer.zero_grad()
        stacked.losses(nn.functional.cross_entropy, stacked(x), y).sum().backward()
        optimizer.step()
    return [flat(after) - flat(before) for after, before in zip(stacked.separate(), models, strict=True)]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("rows", [8, 30])
@pytest.mark.parametrize("kind", RATES)
def test_every_copy_equals_a_separate_run_with_its_seed_data_damping_and_rate(rows: int, kind: str) -> None:
    for number, change in enumerate(together(rows, kind, torch.float64)):
        assert_close(change, single_run(number, rows, kind, torch.float64))


@pytest.mark.parametrize("rows", [8, 30])
@pytest.mark.parametrize("kind", RATES)
def test_in_float32_a_copy_is_as_close_to_the_exact_run_as_a_separate_run_is(rows: int, kind: str) -> None:
    """Fifty steps amplify rounding, in Adam most of all: what a separate float32 run differs by is the measure."""
    for number, change in enumerate(together(rows, kind, torch.float32)):
        exact = single_run(number, rows, kind, torch.float64)
        separate = relative_error(single_run(number, rows, kind, torch.float32), exact)
        assert_close(change, exact, max(10 * separate, 1e-5))


def test_one_batch_serves_all_copies() -> None:
    models = [network(seed, torch.float64) for seed in range(2)]
    stacked = isaac.Ensemble(models, damping=0.1)
    x, y = batches(0, 8, torch.float64)[0]
    losses = stacked.losses(nn.functional.cross_entropy, stacked(x), y)
    for model, loss in zip(models, losses, strict=True):
        assert_close(loss, nn.functional.cross_entropy(model(x), y))


@pytest.mark.parametrize("rows", [8, 30])
@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(), nn.MSELoss()])
def test_zeta_of_every_copy_equals_zeta_of_a_separate_model(
    rows: int, loss_fn: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same labels drawn; a copy with λ_g = ∞ has ζ*, one with both infinite the gradient."""
    dampings, output_dampings = [0.1, 0.1, math.inf, 0.5], [0.05, math.inf, math.inf, 2.0]
    models = [network(seed, torch.float64) for seed in range(4)]
    x = torch.rand(rows, 12, dtype=torch.float64)
    y = torch.randint(4, (rows,)) if isinstance(loss_fn, nn.CrossEntropyLoss) else torch.rand(rows, 4, dtype=torch.float64)
    drawn = torch.randn(4, rows, 4, dtype=torch.float64)
    stacked = isaac.Ensemble(models, damping=dampings, output_damping=output_dampings)
    kind = "isaac_newton.math.likelihood." + ("CrossEntropy" if isinstance(loss_fn, nn.CrossEntropyLoss) else "SquaredError")
    monkeypatch.setattr(f"{kind}.sample", lambda self, output: drawn.flatten(0, 1))
    output = stacked(x)
    stacked.backward(stacked.losses(loss_fn, output, y), output, loss_fn)
    for number, model in enumerate(models):
        if output_dampings[number] != math.inf:
            handle = isaac.attach(model, dampings[number], output_damping=output_dampings[number])
            monkeypatch.setattr(f"{kind}.sample", lambda self, output, number=number: drawn[number])
            output = model(x)
            handle.backward(loss_fn(output, y), output, loss_fn)
        else:
            if dampings[number] != math.inf:
                isaac.attach(model, dampings[number])
            loss_fn(model(x), y).backward()
        for layer, single in ((stacked.model[i], model[i]) for i in (0, 2, 4)):
            assert_close(layer.weight.grad[number], single.weight.grad)
            assert_close(layer.bias.grad[number, 0], single.bias.grad)


@pytest.mark.parametrize("rows", [8, 30])
@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(), nn.MSELoss(), nn.CrossEntropyLoss(reduction="sum")])
def test_the_empirical_fisher_of_every_copy_equals_that_of_a_separate_model(rows: int, loss_fn: nn.Module) -> None:
    dampings, output_dampings = [0.1, 0.1, math.inf, math.inf, 0.5], [0.05, math.inf, math.inf, 0.01, 2.0]
    models = [network(seed, torch.float64) for seed in range(5)]
    x = torch.rand(rows, 12, dtype=torch.float64)
    y = torch.randint(4, (rows,)) if isinstance(loss_fn, nn.CrossEntropyLoss) else torch.rand(rows, 4, dtype=torch.float64)
    stacked = isaac.Ensemble(models, damping=dampings, output_damping=output_dampings, output_curvature="empirical")
    output = stacked(x)
    stacked.backward(stacked.losses(loss_fn, output, y), output, loss_fn)
    for number, model in enumerate(models):
        if output_dampings[number] != math.inf:
            handle = isaac.attach(model, dampings[number], output_damping=output_dampings[number], output_curvature="empirical")
            output = model(x)
            handle.backward(loss_fn(output, y), output, loss_fn)
        else:
            if dampings[number] != math.inf:
                isaac.attach(model, dampings[number])
            loss_fn(model(x), y).backward()
        for layer, single in ((stacked.model[i], model[i]) for i in (0, 2, 4)):
            assert_close(layer.weight.grad[number], single.weight.grad)
            assert_close(layer.bias.grad[number, 0], single.bias.grad)


def test_the_empirical_fisher_takes_no_extra_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    stacked = isaac.Ensemble([network(0, torch.float64)], damping=0.1, output_damping=0.1, output_curvature="empirical")
    x, y = batches(0, 8, torch.float64)[0]
    output = stacked(x)
    losses = stacked.losses(nn.functional.cross_entropy, output, y)
    monkeypatch.setattr(torch.autograd, "grad", lambda *args, **kwargs: pytest.fail("an extra pass"))
    stacked.backward(losses, output, nn.functional.cross_entropy)
    assert all(parameter.grad is not None for parameter in stacked.parameters())


@pytest.mark.parametrize("rows", [8, 30])
@pytest.mark.parametrize("curvature", ["sampled", "empirical"])
def test_a_copy_that_is_not_finite_takes_nothing_from_the_others(rows: int, curvature: str) -> None:
    x, y = batches(0, rows, torch.float32)[0]
    gradients = []
    for broken in (False, True):
        models = [network(seed, torch.float32) for seed in range(2)]
        if broken:
            nn.init.constant_(models[1][0].weight, math.nan)
        stacked = isaac.Ensemble(models, damping=0.1, output_damping=0.1, output_curvature=curvature)
        output = stacked(x)
        torch.manual_seed(0)
        stacked.backward(stacked.losses(nn.functional.cross_entropy, output, y), output, nn.CrossEntropyLoss())
        gradients.append([parameter.grad for parameter in stacked.parameters()])
    for whole, beside in zip(*gradients, strict=True):
        assert torch.equal(whole[0], beside[0])
        assert not beside[1].isfinite().all()


def test_what_cannot_be_stacked_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one model"):
        isaac.Ensemble([])
    with pytest.raises(TypeError, match=r"'0' is Conv1d: an ensemble can only stack nn.Linear"):
        isaac.Ensemble([nn.Sequential(nn.Conv1d(2, 2, 1))])
    with pytest.raises(ValueError, match=r"damping must be one number or one for each of the 2 copies, got 3"):
        isaac.Ensemble([nn.Linear(2, 2)] * 2, damping=[1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match=r"output_curvature must be 'sampled' or 'empirical', got 'exact'"):
        isaac.Ensemble([nn.Linear(2, 2)], output_curvature="exact")
    with pytest.raises(ValueError, match=r"lr must be > 0, one number or one for each of the 1 copies, got -1"):
        per_copy("sgd", isaac.Ensemble([nn.Linear(2, 2)]), lr=-1)
    with pytest.raises(ValueError, match=r"x must be \(batch, features\) or \(1, batch, features\)"):
        isaac.Ensemble([nn.Linear(2, 2)])(torch.ones(2, 3, 2))
