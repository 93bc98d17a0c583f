"""After `attach` the forward pass and all gradients but the weights' are torch's, and the weights' are ζ*."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import isaac_newton as isaac
import reference
from reference import TOLERANCE, assert_close
from test_equations import CASES, golden


def mlp(dtype: torch.dtype = torch.float64, inplace: bool = False) -> nn.Sequential:
    return nn.Sequential(nn.Linear(7, 12), nn.ReLU(inplace), nn.Linear(12, 9), nn.ReLU(inplace), nn.Linear(9, 4)).to(dtype)


def gradients(model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor] = torch.Tensor.sum) -> dict[str, Tensor]:
    model.zero_grad()
    loss(model(x).square() / max(len(x), 1)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def record(model: nn.Module, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Inputs and output gradients of every linear layer of an unattached model, for the loss of `gradients`."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    hooks = []
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):

            def forward(_: nn.Module, args: tuple[Tensor], output: Tensor, name: str = name) -> None:
                a = args[0].detach().clone()
                output.register_hook(lambda g: seen.__setitem__(name, (g.clone(), a)))

            hooks.append(layer.register_forward_hook(forward))
    gradients(model, x)
    for hook in hooks:
        hook.remove()
    return seen


def rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["attached", "drop-in", "drop-in la="])
def test_layers_agree_with_the_authors_code(case: str, dtype: torch.dtype, kind: str) -> None:
    value, exact, damping = golden(case, dtype), golden(case, torch.float64), float(case.split("@")[1])
    outputs, inputs = value["weight"].shape
    layer: nn.Linear
    if kind == "attached":
        layer = nn.Linear(inputs, outputs)
        isaac.attach(layer, damping=damping)
    else:
        layer = isaac.Linear(inputs, outputs, damping) if kind == "drop-in" else isaac.Linear(inputs, outputs, la=damping)
    layer.to(dtype).load_state_dict({"weight": value["weight"], "bias": value["bias"]})
    a = value["a"].requires_grad_()
    output = layer(a)
    output.retain_grad()
    nn.functional.mse_loss(output, value["y"]).backward()
    assert_close(output.grad, exact["g"], TOLERANCE[dtype])
    assert_close(layer.weight.grad, exact["grad_weight"], TOLERANCE[dtype])
    assert_close(layer.bias.grad, exact["grad_bias"].reshape(-1), TOLERANCE[dtype])
    assert_close(a.grad, exact["grad_a"], TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("inplace", [False, True])
def test_forward_input_and_bias_gradients_are_torchs_and_weights_are_conditioned(dtype: torch.dtype, inplace: bool) -> None:
    plain = mlp(dtype, inplace)
    model = copy.deepcopy(plain)
    x = torch.randn(6, 7, dtype=dtype)
    x_plain, x_model = x.clone().requires_grad_(), x.clone().requires_grad_()
    seen = record(plain, x)
    isaac.attach(model, damping=0.1)
    assert torch.equal(model(x), plain(x))
    expected, actual = gradients(plain, x_plain), gradients(model, x_model)
    assert x_plain.grad is not None
    assert_close(x_model.grad, x_plain.grad, 1e-6 if dtype == torch.float32 else 1e-14)
    for name, grad in actual.items():
        if name.endswith("bias"):
            assert_close(grad, expected[name], 1e-6 if dtype == torch.float32 else 1e-14)
        else:
            g, a = seen[name.removesuffix(".weight")]
            assert_close(grad, reference.zeta_star(g, a, 0.1), TOLERANCE[dtype])


@given(
    st.lists(st.integers(0, 5), min_size=0, max_size=3),
    st.integers(1, 12),
    st.integers(1, 12),
    st.booleans(),
    st.floats(-4, 4),
)
def test_every_position_of_an_input_of_any_rank_is_a_row(
    shape: list[int], inputs: int, outputs: int, bias: bool, exponent: float
) -> None:
    layer = nn.Linear(inputs, outputs, bias=bias, dtype=torch.float64)
    isaac.attach(layer, damping=10**exponent)
    x = torch.randn(*shape, inputs, dtype=torch.float64, requires_grad=True)
    g = torch.randn(*shape, outputs, dtype=torch.float64)
    y = layer(x)
    assert y.shape == (*shape, outputs)
    y.backward(g)
    if math.prod(shape):
        assert_close(layer.weight.grad, reference.zeta_star(rows(g), rows(x.detach()), 10**exponent))
    else:
        assert layer.weight.grad is not None
        assert not layer.weight.grad.any()
    assert_close(x.grad, g @ layer.weight)
    if bias:
        assert_close(layer.bias.grad, rows(g).sum(0))


def test_gradcheck_holds_for_the_inputs() -> None:
    model = mlp()
    isaac.attach(model, damping=0.1)
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(model, (x,))
    assert torch.autograd.gradgradcheck(model, (x,))


def test_a_gradient_penalty_trains() -> None:
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    model = copy.deepcopy(plain)
    isaac.attach(model, damping=0.3)
    x = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)

    def penalty(net: nn.Module) -> Tensor:
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    assert_close(penalty(model), penalty(plain), 1e-14)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    first = penalty(model).item()
    for _ in range(60):
        optimizer.zero_grad()
        penalty(model).backward()
        optimizer.step()
    assert penalty(model).item() < 0.2 * first


def test_double_backward_through_the_input_is_exact_where_the_weight_is_frozen_or_the_penalty_is_alone() -> None:
    """d/dx ‖dy/dx‖² has no weight gradient in it: it must equal torch's."""
    plain = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    model = copy.deepcopy(plain)
    isaac.attach(model, damping=0.1)
    results = []
    for net in (plain, model):
        x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3).requires_grad_()
        (slope,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(slope.square().sum(), x)[0])
    assert_close(results[1], results[0], 1e-13)


def test_a_frozen_weight_leaves_the_live_bias_plain() -> None:
    plain = mlp()
    plain[2].weight.requires_grad_(False)
    model = copy.deepcopy(plain)
    isaac.attach(model, damping=0.1)
    x = torch.randn(6, 7, dtype=torch.float64)
    expected, actual = gradients(plain, x), gradients(model, x)
    assert "2.weight" not in actual
    assert_close(actual["2.bias"], expected["2.bias"], 1e-14)
    assert not torch.allclose(actual["0.weight"], expected["0.weight"])


@pytest.mark.parametrize("bias", [True, False])
def test_a_frozen_or_missing_bias_changes_nothing_for_the_weight(bias: bool) -> None:
    layer = nn.Linear(7, 4, bias=bias, dtype=torch.float64)
    if bias:
        layer.bias.requires_grad_(False)
    isaac.attach(layer, damping=0.1)
    x, g = torch.randn(5, 7, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    layer(x).backward(g)
    assert_close(layer.weight.grad, reference.zeta_star(g, x, 0.1))
    assert not bias or layer.bias.grad is None


def test_a_layer_used_twice_adds_the_conditioned_gradients_of_its_uses() -> None:
    layer = nn.Linear(6, 6, dtype=torch.float64)
    isaac.attach(layer, damping=0.1)
    x = torch.randn(4, 6, dtype=torch.float64)
    first = layer(x)
    hidden = torch.tanh(first)
    second = layer(hidden)
    first.retain_grad()
    second.retain_grad()
    second.square().sum().backward()
    assert first.grad is not None
    assert second.grad is not None
    expected = reference.zeta_star(first.grad, x, 0.1) + reference.zeta_star(second.grad, hidden.detach(), 0.1)
    assert_close(layer.weight.grad, expected)


def test_tied_weights_add_the_conditioned_gradients_of_their_layers() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    model[2].weight = model[0].weight
    plain = copy.deepcopy(model)
    x = torch.randn(4, 6, dtype=torch.float64)
    seen = record(plain, x)
    isaac.attach(model, damping=0.1)
    actual = gradients(model, x)
    expected = reference.zeta_star(*seen["0"], 0.1) + reference.zeta_star(*seen["2"], 0.1)
    assert_close(actual["0.weight"], expected)


def test_a_joint_bias_is_the_column_of_ones() -> None:
    layer = nn.Linear(5, 3, dtype=torch.float64)
    isaac.attach(layer, damping=0.2, bias="joint")
    x, g = torch.randn(8, 5, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    layer(x).backward(g)
    expected = reference.zeta_star(g, torch.cat([x, torch.ones(8, 1, dtype=torch.float64)], dim=1), 0.2)
    assert_close(layer.weight.grad, expected[:, :5])
    assert_close(layer.bias.grad, expected[:, 5])


def test_an_infinite_damping_is_the_plain_gradient() -> None:
    plain = mlp()
    model = copy.deepcopy(plain)
    isaac.attach(model, damping=math.inf)
    x = torch.randn(6, 7, dtype=torch.float64)
    for name, grad in gradients(model, x).items():
        assert_close(grad, gradients(plain, x)[name], 1e-14)


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_without_gradients_nothing_is_conditioned_or_saved(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = mlp()
    model = copy.deepcopy(plain)
    isaac.attach(model, damping=0.1)
    x = torch.randn(6, 7, dtype=torch.float64)

    def forbidden(*args: object) -> None:
        raise AssertionError("conditioned where no gradient is computed")

    monkeypatch.setattr("isaac_newton.torch_private.call", forbidden)
    with getattr(torch, mode)():
        assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize("amp", [torch.bfloat16, torch.float16])
def test_autocast_gives_the_conditioned_gradient_in_the_weights_type(amp: torch.dtype) -> None:
    layer = nn.Linear(9, 5)
    isaac.attach(layer, damping=0.1)
    x = torch.randn(4, 9, requires_grad=True)
    with torch.autocast("cpu", dtype=amp):
        y = layer(x)
        y.float().square().sum().backward()
    assert y.dtype == amp
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
    g = (2 * y.float()).detach().to(amp)
    assert_close(layer.weight.grad, reference.zeta_star(g, x.detach(), 0.1), TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_in_half_precision_gets_the_conditioned_gradient_in_its_type(dtype: torch.dtype) -> None:
    layer = nn.Linear(9, 5).to(dtype)
    isaac.attach(layer, damping=0.1)
    x, g = torch.randn(6, 9).to(dtype), torch.randn(6, 5).to(dtype)
    layer(x).backward(g)
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == dtype
    assert_close(layer.weight.grad, reference.zeta_star(g, x, 0.1), TOLERANCE[dtype])


def test_a_non_finite_batch_gives_a_non_finite_gradient() -> None:
    model = mlp(torch.float32)
    isaac.attach(model, damping=0.1)
    x = torch.randn(6, 7)
    x[0, 0] = math.nan
    assert not gradients(model, x)["0.weight"].isfinite().all()
    assert gradients(model, torch.randn(6, 7))["0.weight"].isfinite().all()


@pytest.mark.parametrize("how", ["eager", "torch.func"])
@pytest.mark.parametrize("options", [{}, {"sharing": "reduce"}], ids=str)
@pytest.mark.parametrize("shape", [(7,), (4, 7), (4, 3, 7), (2, 2, 3, 7)], ids=str)
def test_what_a_layer_returns_may_be_changed_in_place(shape: tuple[int, ...], options: dict[str, Any], how: str) -> None:
    """Of other inputs than matrices torch returns a view of the product, and the views of a Function may not be."""
    torch.manual_seed(0)
    layer, x = nn.Linear(7, 5).double(), torch.randn(shape, dtype=torch.float64)
    isaac.attach(layer, 0.3, **options)

    def loss(call: Callable[[Tensor], Tensor], inplace: bool) -> Tensor:
        return F.relu(call(x), inplace=inplace).square().mean()

    def gradient(inplace: bool) -> Tensor:
        if how == "torch.func":
            parameters = {name: value.detach() for name, value in layer.named_parameters()}
            found = torch.func.grad(lambda own: loss(lambda x: torch.func.functional_call(layer, own, (x,)), inplace))(
                parameters
            )
            return found["weight"]
        return torch.autograd.grad(loss(layer, inplace), [layer.weight])[0]

    assert_close(gradient(inplace=True), gradient(inplace=False))
    assert gradient(inplace=True).norm() > 0


FORWARD = {
    "linear": (lambda: nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3, bias=False)), (4, 7)),
    "sequence": (lambda: nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)), (4, 2, 7)),
    "convolution": (lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(18, 2)), (4, 2, 7)),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own rules for forward mode
@pytest.mark.parametrize("options", [{}, {"sharing": "reduce"}, {"bias": "joint"}], ids=str)
@pytest.mark.parametrize("name", FORWARD)
def test_forward_mode_differentiation_is_torchs(name: str, options: dict[str, Any]) -> None:
    """It asks for no gradient of a weight, and so conditioning has no part in it."""
    make, shape = FORWARD[name]
    torch.manual_seed(0)
    plain = make().double()
    model, x, tangent = copy.deepcopy(plain), torch.randn(shape).double(), torch.randn(shape).double()
    isaac.attach(model, 0.3, **options)

    def derivatives(network: nn.Module) -> list[Tensor]:
        parameters = {key: value.detach() for key, value in network.named_parameters()}
        moved = {key: torch.full_like(value, 0.1) for key, value in parameters.items()}

        def call(own: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(network, own, (x,))

        _, both = torch.func.jvp(call, (parameters, x), (moved, tangent))
        with torch.autograd.forward_ad.dual_level():
            output = network(torch.autograd.forward_ad.make_dual(x, tangent))
            of_input = torch.autograd.forward_ad.unpack_dual(output).tangent
        second = torch.func.hessian(lambda x: network(x).square().sum())(x)
        return [both, of_input, torch.func.jacfwd(network)(x), second]

    for found, expected in zip(derivatives(model), derivatives(plain), strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize("options", [{}, {"sharing": "reduce"}], ids=str)
@pytest.mark.parametrize("kind", ["sparse", "nested"])
def test_inputs_without_rows_are_refused_where_they_enter(kind: str, options: dict[str, Any]) -> None:
    rows = torch.randn(3, 7), torch.randn(2, 7)
    x = rows[0].relu().to_sparse() if kind == "sparse" else torch.nested.nested_tensor(list(rows), layout=torch.jagged)
    model = nn.Sequential(nn.Linear(7, 5))
    handle = isaac.attach(model, 0.3, **options)
    with pytest.raises(TypeError, match=f"layer '0' received a {kind} tensor"):
        model(x)
    with torch.no_grad():
        model(x)
    handle.detach()
    assert model(x).requires_grad
