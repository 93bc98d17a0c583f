"""`damping="auto"`, `keep_norm` and `Relative(to="largest")`: what `attach(model)` chooses by itself, against dense float64."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isaac_newton as isaac
from isaac_newton.kernels.permutation import permuted
from isaac_newton.math import equations
from reference import assert_close, relative_error


def plain_gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    own = copy.deepcopy(model)
    own(x).square().mean().backward()
    return {name: parameter.grad for name, parameter in own.named_parameters() if parameter.grad is not None}


def gradients(model: nn.Module, x: Tensor, *args: Any, **options: Any) -> dict[str, Tensor]:
    own = copy.deepcopy(model)
    handle = isaac.attach(own, *args, **options)
    own(x).square().mean().backward()
    if options.get("when") == "step":
        handle.step()
    return {name: parameter.grad for name, parameter in own.named_parameters() if parameter.grad is not None}


def conditioned(gradient: Tensor, rows: Tensor, ratio: float) -> Tensor:
    """ζ* with λ a ratio of the largest eigenvalue and the norm of the gradient, by an explicit inverse."""
    moment = rows.mT @ rows / len(rows)
    damping = ratio * torch.linalg.eigvalsh(moment)[-1]
    found = gradient @ torch.linalg.inv(torch.eye(len(moment), dtype=moment.dtype) + moment / damping)
    return found * gradient.norm() / found.norm()


def uneven(*shape: int) -> Tensor:
    """Inputs whose largest eigenvalue stands out, so that a few products find it to the last digit."""
    return torch.randn(*shape, dtype=torch.float64) * 0.1 + torch.linspace(0.5, 2, shape[-1], dtype=torch.float64)


@pytest.mark.parametrize("shape", [(10, 30), (40, 30), (6, 5, 30), (3, 2, 4, 30)], ids=str)
@pytest.mark.parametrize("outputs", [7, 90])
def test_auto_is_a_tenth_of_the_largest_eigenvalue_with_the_norm_kept(shape: tuple[int, ...], outputs: int) -> None:
    layer, x = nn.Linear(30, outputs).double(), uneven(*shape)
    plain = plain_gradients(layer, x)
    found = gradients(layer, x)
    assert_close(found["weight"], conditioned(plain["weight"], x.reshape(-1, 30), 0.1), 1e-9)
    assert_close(found["bias"], plain["bias"])


def test_auto_draws_64_rows_anew_in_each_pass() -> None:
    layer, x = nn.Linear(80, 20).double(), uneven(300, 80)
    plain = plain_gradients(layer, x)["weight"]
    isaac.attach(layer)
    for number in (1, 2):
        layer.zero_grad()
        layer(x).square().mean().backward()
        seed = (torch.initial_seed() + 0x9E3779B97F4A7C15 * number) % 2**63
        drawn = x[permuted(300, 64, seed, 0, x.device)]
        assert_close(layer.weight.grad, conditioned(plain, drawn, 0.1), 1e-9)


def test_auto_keeps_the_norm_of_every_weight() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=4), nn.Flatten(), nn.Linear(128, 5)).double()
    x = torch.rand(20, 3, 8, 8, dtype=torch.float64)
    plain, found = plain_gradients(model, x), gradients(model, x)
    for name, gradient in plain.items():
        assert relative_error(found[name].norm(), gradient.norm()) < 1e-9
        assert torch.equal(found[name], gradient) == ("bias" in name)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sharing": "reduce"},
        {"max_rows": 5},
        {"bias": "joint"},
        {"output_damping": 0.2, "output_curvature": "empirical"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "damping", [1e-3, 0.3, 100.0, isaac.Relative(0.1), isaac.Relative(0.1, to="largest"), math.inf], ids=str
)
def test_keep_norm_changes_the_length_and_nothing_else(damping: Any, options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 4)).double()
    x = torch.randn(9, 3, 12, dtype=torch.float64) + 0.5
    plain = plain_gradients(model, x)
    free, kept = (gradients(model, x, damping, keep_norm=keep, **options) for keep in (False, True))

    def whole(of: dict[str, Tensor], layer: str) -> Tensor:
        names = ("weight", "bias") if options.get("bias") == "joint" else ("weight",)
        return torch.cat([of[f"{layer}.{name}"].flatten() for name in names])

    for layer in ("0", "2"):
        before, after = whole(free, layer), whole(kept, layer)
        assert_close(after, before * whole(plain, layer).norm() / before.norm(), 1e-9)


STEPS: list[dict[str, Any]] = [
    {"damping": "auto"},
    {"damping": 0.3, "keep_norm": True},
    {"damping": isaac.Relative(0.2, to="largest"), "keep_norm": True, "decay": 0.5},
    {"damping": 0.3, "keep_norm": True, "bias": "joint", "power": 0.5},
]


@pytest.mark.parametrize("options", STEPS, ids=str)
def test_a_step_keeps_the_norm_too(options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Conv2d(2, 6, 3, groups=2), nn.Flatten(), nn.Linear(96, 4)).double()
    x = torch.rand(9, 2, 6, 6, dtype=torch.float64)
    plain = plain_gradients(model, x)
    found = gradients(model, x, options["damping"], when="step", **{k: v for k, v in options.items() if k != "damping"})
    joint = options.get("bias") == "joint"
    for layer in ("0", "2"):
        names = [f"{layer}.weight", f"{layer}.bias"] if joint else [f"{layer}.weight"]
        before, after = (torch.cat([of[name].flatten() for name in names]) for of in (plain, found))
        assert relative_error(after.norm(), before.norm()) < 1e-9
        assert relative_error(after, before) > 1e-3


def test_a_step_of_the_automatic_form_equals_the_definition() -> None:
    layer, x = nn.Linear(30, 7).double(), uneven(20, 30)
    plain = plain_gradients(layer, x)["weight"]
    assert_close(gradients(layer, x, when="step")["weight"], conditioned(plain, x, 0.1), 1e-9)


def test_keep_norm_in_float32_where_float64_is_needed_inside() -> None:
    layer = nn.Linear(784, 50)
    x = torch.rand(64, 784) * 255
    plain = plain_gradients(copy.deepcopy(layer).double(), x.double())["weight"]
    for options in ({"damping": 1.0}, {"damping": 1.0, "max_rows": 63}, {}):
        found = gradients(layer, x, keep_norm=True, **options)["weight"]
        assert relative_error(found.norm(), plain.norm()) < 1e-4


def test_gradients_of_zeros_stay_zeros() -> None:
    for options in ({}, {"max_rows": 2}, {"sharing": "reduce"}):
        for inputs in (torch.zeros(4, 3, 6), torch.rand(4, 3, 6)):
            layer = nn.Linear(6, 3)
            isaac.attach(layer, **options)
            (layer(inputs) * 0).sum().backward()
            assert layer.weight.grad is not None
            assert not layer.weight.grad.any()


def test_what_is_not_finite_stays_that() -> None:
    layer, x = nn.Linear(6, 3), torch.rand(4, 6)
    x[1, 2] = math.inf
    isaac.attach(layer)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    assert not layer.weight.grad.isfinite().all()


@pytest.mark.parametrize("keep", [False, True])
def test_gradients_of_gradients_go_through_the_damping(keep: bool) -> None:
    layer = nn.Linear(5, 4).double()
    isaac.attach(layer, isaac.Relative(0.3, to="largest"), keep_norm=keep)

    def function(x: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(layer(x).square().mean(), layer.weight, create_graph=True)
        return gradient

    assert torch.autograd.gradcheck(function, torch.rand(3, 5, dtype=torch.float64, requires_grad=True) + 0.5)


@pytest.mark.parametrize("sparse", [False, True])
def test_embeddings_are_plain_unless_they_are_asked_for(sparse: bool) -> None:
    model = nn.Sequential(nn.Embedding(30, 6, sparse=sparse), nn.Flatten(), nn.Linear(24, 5)).double()
    tokens = torch.randint(30, (8, 4)).clamp_min(5)
    handle = isaac.attach(copy.deepcopy(model))
    assert "leaves embeddings plain" in handle.skipped["0"]
    plain = plain_gradients(model, tokens)["0.weight"].to_dense()
    found = gradients(model, tokens, layers="0")["0.weight"].to_dense()
    counts = torch.bincount(tokens.flatten(), minlength=30)
    divided = plain / (1 + counts / (0.1 * counts.max()))[:, None]
    assert_close(found, divided * plain.norm() / divided.norm(), 1e-9)


def test_a_largest_eigenvalue_is_never_overestimated() -> None:
    for rows in (torch.randn(20, 40), torch.rand(20, 40), torch.eye(20), torch.zeros(20, 20)):
        gram = rows.double() @ rows.double().mT
        exact = torch.linalg.eigvalsh(gram)[-1].item()
        assert equations.largest_eigenvalue(gram).item() <= exact * (1 + 1e-12)
        assert equations.largest_eigenvalue(gram).item() >= 0.8 * exact


def test_a_damping_is_the_paper_to_the_digit() -> None:
    layer, x = nn.Linear(30, 7), torch.rand(10, 30)
    assert torch.equal(gradients(layer, x, 0.3)["weight"], gradients(layer, x, 0.3, keep_norm=False)["weight"])
    handle = isaac.attach(layer, 0.3)
    assert not handle._run.options.keep_norm
    assert handle._run.options.max_rows is None


def test_the_damping_may_change_and_lasts_in_a_state() -> None:
    layer = nn.Linear(6, 3)
    handle = isaac.attach(layer)
    assert handle.damping == isaac.Relative(0.1, to="largest")
    state = handle.state_dict()
    handle.damping = 0.5
    handle.load_state_dict(state)
    assert handle.damping == isaac.Relative(0.1, to="largest")
    handle.damping = 2.0
    handle.damping = "auto"
    assert handle.damping == isaac.Relative(0.1, to="largest")


@pytest.mark.parametrize("options", [{}, {"damping": 0.1}, {"damping": 0.1, "max_rows": 3}], ids=str)
def test_the_plain_gradient_is_there_for_who_needs_it(options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x = torch.rand(9, 6, dtype=torch.float64)
    plain, wanted = plain_gradients(model, x), gradients(model, x, **options)
    handle = isaac.attach(model, **options)
    with handle.plain():
        model(x).square().mean().backward()
    assert all(torch.equal(p.grad, plain[name]) for name, p in model.named_parameters() if p.grad is not None)
    model.zero_grad()
    model(x).square().mean().backward()
    assert all(
        relative_error(p.grad, plain[n]) > 1e-3 for n, p in model.named_parameters() if p.grad is not None and p.dim() > 1
    )
    if "max_rows" not in options:
        assert_close(model[0].weight.grad, wanted["0.weight"], 1e-9)


def test_what_is_wrong_is_named() -> None:
    layer = nn.Linear(6, 3)
    with pytest.raises(ValueError, match="to must be one of 'mean', 'largest', got 'smallest'"):
        isaac.Relative(0.1, to="smallest")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="keep_norm must be True or False, got 'yes'"):
        isaac.attach(layer, keep_norm="yes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'automatic'"):
        isaac.attach(layer, "automatic")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the compiler warns about itself
def test_compiled_code_does_the_same() -> None:
    model = nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 4)).double()
    x = uneven(9, 20, 12)
    expected = gradients(model, x)
    isaac.attach(model)
    torch.compile(model, backend="aot_eager", fullgraph=True)(x).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, expected[name], 1e-9)
