"""Implementations nobody here wrote give the same numbers: curvlinops for ζ*, BackPACK's factors for ζ and K-FAC."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import isaac_newton as isaac
from isaac_newton.core.outputs import output_rows
from isaac_newton.core.use import Use
from reference import assert_close
from test_linear_gradients import mlp

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what they warn about on import is theirs
    backpack = pytest.importorskip("backpack")
    curvlinops = pytest.importorskip("curvlinops")
    from backpack.extensions import KFAC, KFLR

LOSSES = [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum"), nn.MSELoss(), nn.MSELoss(reduction="sum")]


def target_of(loss_fn: nn.Module, rows: int) -> Tensor:
    return torch.randint(4, (rows,)) if isinstance(loss_fn, nn.CrossEntropyLoss) else torch.rand(rows, 4, dtype=torch.float64)


def backpack_factors(
    model: nn.Sequential, x: Tensor, target: Tensor, loss_fn: nn.Module, extension: object
) -> list[list[Tensor]]:
    """[output factor, input factor] of each weight, as BackPACK computes them on a copy of the model."""
    extended, loss = backpack.extend(copy.deepcopy(model)), backpack.extend(copy.deepcopy(loss_fn))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with backpack.backpack(extension):
            loss(extended(x), target).backward()
    name = "kflr" if isinstance(extension, KFLR) else "kfac"
    return [getattr(extended[layer].weight, name) for layer in (0, 2, 4)]


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(5, 9, 3), (20, 6, 4), (1, 3, 2)])
@pytest.mark.parametrize("damping", [0.01, 1.0, 100.0])
def test_curvlinops_forward_only_is_zeta_star(rows: int, inputs: int, outputs: int, damping: float) -> None:
    model = nn.Linear(inputs, outputs, bias=False, dtype=torch.float64)
    x, y = torch.randn(rows, inputs, dtype=torch.float64), torch.randn(rows, outputs, dtype=torch.float64)
    loss_fn = nn.MSELoss()
    loss_fn(model(x), y).backward()
    assert model.weight.grad is not None
    factors = curvlinops.KFACLinearOperator(
        model,
        loss_fn,
        list(model.parameters()),
        [(x, y)],
        fisher_type=curvlinops.FisherType.FORWARD_ONLY,
        check_deterministic=False,
    )
    inverse = curvlinops.KFACInverseLinearOperator(factors, damping=(damping, damping))
    (step,) = inverse @ [model.weight.grad]
    oracle = step * damping * (1 + damping)
    model.zero_grad()
    isaac.attach(model, damping=damping)
    loss_fn(model(x), y).backward()
    assert_close(model.weight.grad, oracle)


@pytest.mark.parametrize("loss_fn", LOSSES, ids=lambda loss_fn: f"{type(loss_fn).__name__}-{loss_fn.reduction}")
@pytest.mark.parametrize("rows", [6, 30])
def test_backpacks_kflr_factors_give_zeta_with_exact_curvature(loss_fn: nn.Module, rows: int) -> None:
    model = mlp()
    x, target = torch.randn(rows, 7, dtype=torch.float64), target_of(loss_fn, rows)
    factors = backpack_factors(model, x, target, loss_fn, KFLR())
    plain = copy.deepcopy(model)
    loss_fn(plain(x), target).backward()
    handle = isaac.attach(model, damping=0.2, output_damping=0.05, output_curvature="exact")
    output = model(x)
    handle.backward(loss_fn(output, target), output, loss_fn)
    for layer, (left, right) in zip((0, 2, 4), factors, strict=True):
        if loss_fn.reduction == "sum":
            left = left / rows  # BackPACK's factor belongs to the summed loss, ours to the expectation
        left = left + 0.05 * torch.eye(len(left), dtype=torch.float64)
        right = right + 0.2 * torch.eye(len(right), dtype=torch.float64)
        gradient = plain[layer].weight.grad
        expected = 0.05 * 0.2 * torch.linalg.inv(left) @ gradient @ torch.linalg.inv(right)
        assert_close(model[layer].weight.grad, expected)


@pytest.mark.parametrize("loss_fn", LOSSES, ids=lambda loss_fn: f"{type(loss_fn).__name__}-{loss_fn.reduction}")
def test_backpacks_monte_carlo_kfac_and_ours_agree_within_the_sampling_error(loss_fn: nn.Module) -> None:
    rows, samples = 8, 3000
    model = mlp()
    x, target = torch.randn(rows, 7, dtype=torch.float64), target_of(loss_fn, rows)
    drawn = backpack_factors(model, x, target, loss_fn, KFAC(mc_samples=samples))
    exact = backpack_factors(model, x, target, loss_fn, KFLR())
    ours = sampled_factors(model, x, target, loss_fn, samples)
    for (theirs, _), (limit, _), factor in zip(drawn, exact, ours, strict=True):
        scale = rows if loss_fn.reduction == "sum" else 1
        assert (theirs - limit).norm() < 0.1 * limit.norm()
        assert (factor * scale - limit).norm() < 0.1 * limit.norm()


def sampled_factors(
    model: nn.Sequential, x: Tensor, target: Tensor, loss_fn: Callable[..., Tensor], samples: int
) -> list[Tensor]:
    """ḡᵀḡ / b of each layer as it is used in `handle.backward`."""
    model = copy.deepcopy(model)
    handle = isaac.attach(model, output_damping=1.0, samples=samples)
    seen: list[Tensor] = []

    def spying(use: Use, g: Tensor) -> Tensor:
        gbar = output_rows(use, g)
        seen.append(gbar.T @ gbar / len(g))
        return gbar

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("isaac_newton.core.outputs.output_rows", spying)
        output = model(x)
        handle.backward(loss_fn(output, target), output, loss_fn)
    return seen[::-1]  # backward starts at the last layer


def test_backpacks_factors_give_our_kfac_step() -> None:
    rows = 12
    model = nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 4)).double()
    x, target = torch.randn(rows, 7, dtype=torch.float64), torch.randint(4, (rows,))
    loss_fn = nn.CrossEntropyLoss()
    factors = backpack_factors(model, x, target, loss_fn, KFLR())
    plain = copy.deepcopy(model)
    loss_fn(plain(x), target).backward()
    handle = isaac.attach(model, damping=0.1, output_damping="kfac", output_curvature="exact")
    output = model(x)
    handle.backward(loss_fn(output, target), output, loss_fn)
    for layer, (left, right) in zip((0, 2, 4), factors, strict=True):
        step = (
            torch.linalg.inv(left + 0.1 * torch.eye(len(left), dtype=torch.float64))
            @ plain[layer].weight.grad
            @ torch.linalg.inv(right + 0.1 * torch.eye(len(right), dtype=torch.float64))
        )
        # K-FAC with learning rate η is ζ with η / λ².
        assert_close(model[layer].weight.grad / 0.1**2, step)
