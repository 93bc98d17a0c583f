"""ζ with ḡ = g, from drawn rows of inputs and output gradients, on every layer that a gradient of an output reaches."""

import copy
import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import isaac_newton as isaac
from isaac_newton.kernels.permutation import draw_seed, permuted
from isaac_newton.math.equations import largest_eigenvalue
from reference import assert_close

LEFT, RIGHT = 0.05, 0.2
EMPIRICAL: dict[str, Any] = {"output_damping": LEFT, "output_curvature": "empirical"}


def drawn(rows: Tensor, most: int | None) -> Tensor:
    """Those of the first backward pass, from (rows, features)."""
    if most is None or len(rows) <= most:
        return rows
    return rows[permuted(len(rows), most, draw_seed(1), 0, "cpu")]


def zeta(gradient: Tensor, g: Tensor, a: Tensor, most: int | None, scale: float | None = None) -> Tensor:
    """(I + ḡᵀḡ/(kλ_g))⁻¹ ∇ (I + aᵀa/(kλ))⁻¹ of drawn rows, by dense inverses; of a loss that is a mean over all rows."""
    gbar = g * (len(g) if scale is None else scale * math.sqrt(len(g)))
    sides = []
    for r, damping in ((drawn(gbar, most), LEFT), (drawn(a, most), RIGHT)):
        factor = r.T @ r / len(r) + damping * torch.eye(r.shape[1], dtype=torch.float64)
        sides.append(damping * torch.linalg.inv(factor))
    return sides[0] @ gradient @ sides[1]


def output_gradient(layer: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
    output = layer(x).detach().requires_grad_()
    (g,) = torch.autograd.grad(loss(output), output)
    return g


def loss_of(output: Tensor) -> Tensor:
    return output.sin().square().sum() / 7


def both(layer: nn.Module, x: Tensor, **options: Any) -> tuple[nn.Module, nn.Module, isaac.Handle]:
    """The attached layer and a plain one, after a backward pass."""
    plain = copy.deepcopy(layer)
    handle = isaac.attach(layer, RIGHT, **(EMPIRICAL | options))
    outputs = []
    for each in (layer, plain):
        outputs.append(each(x))
        loss_of(outputs[-1]).backward()
    assert torch.equal(*outputs)
    return layer, plain, handle


@pytest.mark.parametrize("most", [5, 1000, None])
@pytest.mark.parametrize("shape", [(40,), (6, 7), (3, 4, 5)])
@pytest.mark.parametrize("sizes", [(4, 3), (9, 12)])
def test_linear_layers(sizes: tuple[int, int], shape: tuple[int, ...], most: int | None) -> None:
    x = torch.randn(*shape, sizes[0], dtype=torch.float64)
    layer, plain, _ = both(nn.Linear(*sizes, dtype=torch.float64), x, max_rows=most)
    g = output_gradient(plain, x, loss_of).reshape(-1, sizes[1])
    assert_close(layer.weight.grad, zeta(plain.weight.grad, g, x.reshape(-1, sizes[0]), most))
    assert_close(layer.bias.grad, plain.bias.grad, 1e-12)


@pytest.mark.parametrize("most", [5, 1000, None])
def test_a_joint_bias(most: int | None) -> None:
    x = torch.randn(30, 4, dtype=torch.float64)
    layer, plain, _ = both(nn.Linear(4, 3, dtype=torch.float64), x, max_rows=most, bias="joint")
    g = output_gradient(plain, x, loss_of)
    gradient, a = torch.cat([plain.weight.grad, plain.bias.grad[:, None]], 1), torch.cat([x, torch.ones(30, 1).double()], 1)
    expected = zeta(gradient, g, a, most)
    assert_close(layer.weight.grad, expected[:, :-1])
    assert_close(layer.bias.grad, expected[:, -1])


CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "one dimension": (lambda: nn.Conv1d(4, 6, 3), (3, 4, 9)),
    "stride, padding, dilation": (lambda: nn.Conv2d(3, 4, 3, stride=2, padding=2, dilation=2), (2, 3, 9, 8)),
    "groups": (lambda: nn.Conv2d(4, 6, (3, 2), groups=2, padding=1), (2, 4, 5, 5)),
    "circular": (lambda: nn.Conv1d(4, 6, 3, padding="same", padding_mode="circular"), (3, 4, 9)),
    "three dimensions": (lambda: nn.Conv3d(2, 5, 2), (2, 2, 4, 3, 4)),
    "one sample": (lambda: nn.Conv2d(3, 4, 3), (3, 6, 6)),
    "channels last": (lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), (2, 3, 6, 6)),
}


def patches(layer: Any, x: Tensor) -> Tensor:
    """(groups, samples, places, features): what each output place is a product of, tap by tap."""
    space = len(layer.kernel_size)
    x = x if x.dim() == space + 2 else x[None]
    channels = x.shape[1]
    # The convolution with a kernel that picks one number.
    picked = []
    pick = copy.deepcopy(layer)
    for channel in range(channels // layer.groups):
        for tap in torch.cartesian_prod(*(torch.arange(size) for size in layer.kernel_size)).reshape(-1, space).tolist():
            weight = torch.zeros(layer.groups, channels // layer.groups, *layer.kernel_size, dtype=torch.float64)
            weight[(slice(None), channel, *tap)] = 1
            pick.weight, pick.bias, pick.out_channels = nn.Parameter(weight), None, layer.groups
            picked.append(pick(x).flatten(2).movedim(1, 0))
    return torch.stack(picked, -1).detach()


@pytest.mark.parametrize("most", [5, 1000, None])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str, most: int | None) -> None:
    make, shape = CONVOLUTIONS[name]
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    layer, plain, _ = both(make().double(), x, max_rows=most)
    groups, g = layer.groups, output_gradient(plain, x, loss_of)
    a = patches(plain, x)
    g = (g if g.dim() == x.dim() == len(layer.kernel_size) + 2 else g[None]).flatten(2)
    g = g.unflatten(1, (groups, -1)).permute(1, 0, 3, 2)
    gradient = plain.weight.grad.reshape(groups, len(layer.weight) // groups, -1)
    expected = [zeta(gradient[n], g[n].flatten(0, 1), a[n].flatten(0, 1), most) for n in range(groups)]
    assert_close(layer.weight.grad, torch.cat(expected).reshape(layer.weight.shape))
    assert_close(layer.bias.grad, plain.bias.grad, 1e-12)


TRANSPOSED: dict[str, Callable[[], nn.Module]] = {
    "one dimension": lambda: nn.ConvTranspose1d(4, 6, 3),
    "stride, padding": lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1),
    "groups": lambda: nn.ConvTranspose1d(4, 6, 2, groups=2, stride=2),
    "room behind": lambda: nn.ConvTranspose1d(4, 6, 3, dilation=3, padding=1, output_padding=2),
}


@pytest.mark.parametrize("most", [5, None])
@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed_convolutions(name: str, most: int | None) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4, 7, dtype=torch.float64)
    layer, plain, _ = both(TRANSPOSED[name]().double(), x, max_rows=most)
    g, groups = output_gradient(plain, x, loss_of), layer.groups
    (kernel,), (stride,), (padding,), (dilation,) = layer.kernel_size, layer.stride, layer.padding, layer.dilation
    # What each place of the input contributes to, tap by tap; outside of the output there is nothing.
    footprints = torch.zeros(3, 7, 6, kernel, dtype=torch.float64)
    for place in range(7):
        for tap in range(kernel):
            at = place * stride + tap * dilation - padding
            if 0 <= at < g.shape[2]:
                footprints[:, place, :, tap] = g[:, :, at]
    expected = []
    for n in range(groups):
        rows = footprints.unflatten(2, (groups, -1))[:, :, n].flatten(2).flatten(0, 1)
        a = x.unflatten(1, (groups, -1))[:, n].mT.flatten(0, 1)
        gradient = plain.weight.grad.unflatten(0, (groups, -1))[n].flatten(1).T
        torch.testing.assert_close(rows.T @ a, gradient)
        expected.append(zeta(gradient, rows, a, most).T.reshape(4 // groups, 6 // groups, kernel))
    assert_close(layer.weight.grad, torch.cat(expected))


@pytest.mark.parametrize("most", [5, None])
@pytest.mark.parametrize("batch_first", [False, True])
def test_attention(batch_first: bool, most: int | None) -> None:
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(8, 2, dtype=torch.float64, batch_first=batch_first)
    layer = copy.deepcopy(plain)
    isaac.attach(layer, RIGHT, max_rows=most, **EMPIRICAL)
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    for each in (layer, plain):
        y = x if batch_first else x.transpose(0, 1)
        output = each(y, y, y, need_weights=False)[0]
        loss_of(output if batch_first else output.transpose(0, 1)).backward()
    # The formula, with the products of all four projections known.
    weights, biases = plain.in_proj_weight.detach().chunk(3), plain.in_proj_bias.detach().chunk(3)
    products = [(x @ w.T + b).requires_grad_() for w, b in zip(weights, biases, strict=True)]
    q, k, v = (t.reshape(3, 5, 2, 4).transpose(1, 2) for t in products)
    heads = (torch.softmax(q @ k.mT / 2, -1) @ v).transpose(1, 2).reshape(3, 5, 8)
    last = heads @ plain.out_proj.weight.detach().T + plain.out_proj.bias.detach()
    gradients = torch.autograd.grad(loss_of(last), [*products, last])
    # Of one tensor torch forms queries, keys and values by one product: that is the layer.
    pairs = [(torch.cat(gradients[:3], -1), x, layer.in_proj_weight), (gradients[3], heads.detach(), layer.out_proj.weight)]
    for g, a, weight in pairs:
        # Inputs in the order of the samples, output gradients in that of the product, which torch forms step by step.
        every, steps = g.reshape(15, -1), g.transpose(0, 1).reshape(15, -1)
        assert_close(weight.grad, zeta(every.T @ a.reshape(15, 8), steps, a.reshape(15, 8), most))


def test_dampings_relative_to_the_largest_eigenvalue_and_kept_norms() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 6, 6, dtype=torch.float64)
    plain = nn.Conv2d(3, 5, 3, dtype=torch.float64)
    layer = copy.deepcopy(plain)
    left, right = isaac.Relative(1, to="largest"), isaac.Relative(0.1, to="largest")
    options = {"output_damping": left, "output_curvature": "empirical", "max_rows": 16, "keep_norm": True}
    isaac.attach(layer, right, **options)
    for each in (layer, plain):
        loss_of(each(x)).backward()
    g = output_gradient(plain, x, loss_of).flatten(2).mT.flatten(0, 1)
    sides = []
    for r, ratio in ((drawn(g, 16), 1.0), (drawn(patches(plain, x)[0].flatten(0, 1), 16), 0.1)):
        gram = r @ r.T if r.shape[0] < r.shape[1] else r.T @ r
        damping = ratio * largest_eigenvalue(gram) / len(r)
        sides.append(torch.linalg.inv(r.T @ r / (len(r) * damping) + torch.eye(r.shape[1], dtype=torch.float64)))
    gradient = plain.weight.grad.flatten(1)
    expected = sides[0] @ gradient @ sides[1]
    assert_close(layer.weight.grad.flatten(1), expected * gradient.norm() / expected.norm())


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.ReLU(inplace=True), nn.Conv2d(6, 5, 3), nn.ReLU(inplace=True),
        nn.Flatten(2), nn.Linear(4, 7), nn.ReLU(inplace=True), nn.Linear(7, 3), nn.Flatten(), nn.Linear(15, 4),
    ).double()  # fmt: skip


AUTOMATIC: dict[str, Any] = {"output_damping": isaac.Relative(1, to="largest"), "output_curvature": "empirical"}


@pytest.mark.parametrize("how", ["through the handle", "by itself"])
def test_in_a_network_each_layer_by_its_own_rows(how: str) -> None:
    """Outputs are changed in place, buckets hold several layers; each layer is held against dense inverses."""
    model, x = network(), torch.randn(9, 2, 6, 6, dtype=torch.float64)
    plain, target = copy.deepcopy(model), torch.randint(4, (9,))
    handle = isaac.attach(model, RIGHT, max_rows=5, **EMPIRICAL)
    outputs: dict[str, Tensor] = {}
    inputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            inputs[name] = args[0].detach().clone()
            output.register_hook(lambda g: outputs.__setitem__(name, g.clone()))

        return hook

    for name, module in plain.named_modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False  # so that hooks on outputs see their own gradients
        if isinstance(module, nn.Linear | nn.Conv2d):
            module.register_forward_hook(keep(name))
    F.cross_entropy(plain(x), target).backward()
    output = model(x)
    loss = 8 * F.cross_entropy(output, target)
    if how == "by itself":
        loss.backward()
    else:
        handle.backward(loss, output, F.cross_entropy)
    assert len(outputs) == 5
    for name, g in outputs.items():
        module, a = plain.get_submodule(name), inputs[name]
        if isinstance(module, nn.Conv2d):
            g, a = g.flatten(2).mT, patches(module, a)[0]
        g, a = g.reshape(-1, g.shape[-1]), a.reshape(-1, a.shape[-1])
        if how == "by itself":
            expected = zeta(8 * module.weight.grad.flatten(1), 8 * g, a, 5)
        else:
            expected = 8 * zeta(module.weight.grad.flatten(1), g, a, 5, math.sqrt(9))
        assert_close(model.get_submodule(name).weight.grad.flatten(1), expected)


def test_what_changes_a_gradient_on_its_way_changes_both_sides() -> None:
    x = torch.randn(30, 4, dtype=torch.float64)
    layer = nn.Linear(4, 3, dtype=torch.float64)
    plain = copy.deepcopy(layer)
    isaac.attach(layer, RIGHT, max_rows=5, **EMPIRICAL)
    output = layer(x)
    output.register_hook(lambda g: 3 * g)
    loss_of(output).backward()
    g = 3 * output_gradient(plain, x, loss_of)
    assert_close(layer.weight.grad, zeta(g.T @ x, g, x, 5))


def test_a_layer_used_twice_is_conditioned_use_by_use() -> None:
    layer = nn.Linear(4, 4, dtype=torch.float64)
    plain, x = copy.deepcopy(layer), torch.randn(30, 4, dtype=torch.float64)
    isaac.attach(layer, RIGHT, max_rows=5, **EMPIRICAL)
    loss_of(layer(layer(x).tanh())).backward()
    first = plain(x).detach().requires_grad_()
    hidden = first.tanh()
    second = (hidden @ plain.weight.detach().T + plain.bias.detach()).requires_grad_()
    g_first, g_second = torch.autograd.grad(loss_of(second), [first, second])
    expected = zeta(g_first.T @ x, g_first, x, 5) + zeta(g_second.T @ hidden.detach(), g_second, hidden.detach(), 5)
    assert_close(layer.weight.grad, expected)


@pytest.mark.parametrize("form", ["float32", "bfloat16", "autocast"])
def test_half_precision_comes_close_to_float64(form: str) -> None:
    exact, x = network(), torch.randn(9, 2, 6, 6)
    model = copy.deepcopy(exact).to(torch.bfloat16 if form == "bfloat16" else torch.float32)
    for each in (exact, model):
        isaac.attach(each, isaac.Relative(0.1, to="largest"), max_rows=8, keep_norm=True, **AUTOMATIC)
    exact(x.double()).square().sum().backward()
    with torch.autocast("cpu", torch.bfloat16, enabled=form == "autocast"):
        output = model(x.to(torch.bfloat16) if form == "bfloat16" else x)
    output.float().square().sum().backward()
    for name, p in model.named_parameters():
        assert p.grad.dtype == p.dtype
        assert_close(p.grad, exact.get_parameter(name).grad, 1e-4 if form == "float32" else 0.2)


def test_the_automatic_form_on_both_sides_trains_a_transformer_and_keeps_norms() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True).double()
    plain = copy.deepcopy(model)
    handle = isaac.attach(model, **AUTOMATIC)
    x = torch.randn(8, 20, 16, dtype=torch.float64)
    for each in (model, plain):
        each(x).square().sin().sum().backward()
    assert "self_attn" in handle.conditioned
    assert {statistics.rows for statistics in handle.statistics.values()} == {64}
    for name, p in plain.named_parameters():
        if p.dim() > 1:
            mine = model.get_parameter(name).grad
            assert_close(mine.norm(), p.grad.norm())
            assert (mine - p.grad).norm() > 1e-3 * p.grad.norm()


def test_other_paths_to_the_weight_give_the_same() -> None:
    """Checkpointing, kept graphs, backward hooks on modules and parametrized weights take a node for each weight."""
    x = torch.randn(9, 2, 6, 6, dtype=torch.float64)

    def run(prepare: Callable[[nn.Module], Callable[[Tensor], Tensor]]) -> list[Tensor]:
        model = network()
        isaac.attach(model, RIGHT, max_rows=5, **EMPIRICAL)
        loss_of(prepare(model)(x)).backward()
        return [p.grad for p in model.parameters()]

    def hooked(model: nn.Module) -> nn.Module:
        model[0].register_full_backward_hook(lambda *args: None)
        return model

    expected = run(lambda model: model)
    ways: list[Callable[[nn.Module], Callable[[Tensor], Tensor]]] = [
        lambda model: lambda x: checkpoint(model, x, use_reentrant=False),
        lambda model: lambda x: checkpoint(model, x.requires_grad_(), use_reentrant=True),
    ]
    for way in ways:
        for mine, wanted in zip(run(way), expected, strict=True):
            assert_close(mine, wanted, 1e-12)


def test_a_kept_graph_gives_the_same_again_and_inputs_alone_count_no_pass() -> None:
    model, x = network(), torch.randn(9, 2, 6, 6, dtype=torch.float64).requires_grad_()
    handle = isaac.attach(model, RIGHT, max_rows=500, **EMPIRICAL)
    loss = loss_of(model(x))
    torch.autograd.grad(loss, x, retain_graph=True)
    assert handle.backward_passes == 0
    grads = []
    for _ in range(2):
        model.zero_grad()
        loss.backward(retain_graph=True)
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *grads))


def test_each_pass_draws_anew_and_the_seed_repeats_it() -> None:
    x, runs = torch.randn(9, 2, 6, 6, dtype=torch.float64), []
    for _ in range(2):
        torch.manual_seed(3)
        model = network()
        isaac.attach(model, RIGHT, max_rows=5, **EMPIRICAL)
        seen = []
        for _ in range(2):
            model.zero_grad()
            loss_of(model(x)).backward()
            seen.append(model[0].weight.grad.clone())
        runs.append(seen)
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])
    assert not torch.equal(runs[0][0], runs[0][1])


def test_gradients_of_gradients_are_refused_where_no_output_gradient_is() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    isaac.attach(model, RIGHT, max_rows=5, **EMPIRICAL)
    x = torch.randn(30, 4, dtype=torch.float64).requires_grad_()
    output = model(x)
    (g,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="gradient's gradient"):
        g.square().sum().backward()


def test_torch_func_is_refused_with_the_way_out() -> None:
    model, x = network(), torch.randn(9, 2, 6, 6, dtype=torch.float64)
    isaac.attach(model, RIGHT, max_rows=5, **EMPIRICAL)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    with pytest.raises(RuntimeError, match="max_rows=None and linear layers only"):
        grad(lambda p: functional_call(model, p, (x,)).sum())(parameters)


def test_dropped_graphs_are_freed() -> None:
    model = network()
    isaac.attach(model, RIGHT, max_rows=5, **EMPIRICAL)
    gc.disable()
    try:
        for how in ({}, {"create_graph": True}, None):
            x = torch.randn(9, 2, 6, 6, dtype=torch.float64).requires_grad_()
            kept = x * 1
            loss = loss_of(model(kept))
            if how is not None:
                torch.autograd.grad(loss, [kept, model[0].weight], **how)
            reference = weakref.ref(kept)
            del kept, loss
            assert reference() is None
    finally:
        gc.enable()


def test_what_draws_cannot_do_is_said() -> None:
    for options, message in (
        ({"max_rows": 4, "output_damping": 1.0}, "output_curvature='empirical'"),
        ({"sharing": "reduce", **EMPIRICAL}, "sharing='expand'"),
        ({"when": "step", **EMPIRICAL}, "when='backward'"),
    ):
        with pytest.raises(ValueError, match=message):
            isaac.attach(network(), RIGHT, **options)
    handle = isaac.attach(network(), RIGHT, output_damping=1.0)
    assert "output_curvature='empirical'" in handle.skipped["0"]
