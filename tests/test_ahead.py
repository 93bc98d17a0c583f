"""All inverses of a backward pass at once: the same gradients, whatever else is alive, and nothing is kept for longer."""

import gc
import math
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import isaac_newton as isaac
from isaac_newton.kernels import cpu
from reference import assert_close, zeta_star


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3)).double()


def expected(model: nn.Sequential, x: Tensor, y: Tensor, damping: float) -> list[Tensor]:
    """ζ* of every layer from its definition."""
    inputs, outputs = [], []
    for layer in model:
        if isinstance(layer, nn.Linear):
            inputs.append(x.detach())
            x = F.linear(x, layer.weight, layer.bias)
            outputs.append(x)
        else:
            x = layer(x)
    gradients = torch.autograd.grad(F.cross_entropy(x, y), outputs)
    return [zeta_star(g, a, damping) for g, a in zip(gradients, inputs, strict=True)]


def assert_conditioned(model: nn.Sequential, wanted: list[Tensor]) -> None:
    for layer, gradient in zip((model[0], model[2], model[4]), wanted, strict=True):
        torch.testing.assert_close(layer.weight.grad, gradient, rtol=1e-9, atol=1e-12)


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(5, 9, dtype=torch.float64), torch.randint(3, (5,))


def test_one_factorization_serves_all_layers_of_one_size(batch, monkeypatch) -> None:
    calls = []
    factorize = torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda matrix: calls.append(matrix.shape) or factorize(matrix))
    model = network()
    wanted = expected(model, *batch, 0.1)
    isaac.attach(model, damping=0.1)
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    assert calls == [(3, 5, 5)]
    assert_conditioned(model, wanted)


def test_graphs_that_are_alive_beside_do_not_matter(batch) -> None:
    model = network()
    wanted = expected(model, *batch, 0.1)
    handle = isaac.attach(model, damping=0.1)
    stray = model(torch.randn(7, 9, dtype=torch.float64))
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    assert_conditioned(model, wanted)
    # The other graph comes later, with another damping, though its inverses could have been there already.
    model.zero_grad()
    torch.manual_seed(2)
    other = torch.randn(7, 9, dtype=torch.float64), torch.randint(3, (7,))
    wanted = expected(model, *other, 0.7)
    kept = model(other[0])
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    model.zero_grad()
    handle.damping = 0.7
    F.cross_entropy(kept, other[1]).backward()
    assert_conditioned(model, wanted)
    assert stray.requires_grad


def test_passes_are_told_apart_by_torch_not_by_a_number_that_is_set(batch) -> None:
    model = network()
    handle = isaac.attach(model, damping=0.1)
    other = torch.randn(7, 9, dtype=torch.float64), torch.randint(3, (7,))
    wanted = expected(model, *other, 0.7)
    kept = model(other[0])
    F.cross_entropy(model(batch[0]), batch[1]).backward()  # inverts for the other graph too
    model.zero_grad()
    handle.backward_passes, handle.damping = 0, 0.7
    F.cross_entropy(kept, other[1]).backward()
    assert_conditioned(model, wanted)


def test_a_kept_graph_gives_the_same_again_and_follows_the_damping(batch) -> None:
    model = network()
    first, second = expected(model, *batch, 0.1), expected(model, *batch, 5.0)
    handle = isaac.attach(model, damping=0.1)
    loss = F.cross_entropy(model(batch[0]), batch[1])
    for damping, wanted in [(0.1, first), (0.1, first), (5.0, second)]:
        model.zero_grad()
        handle.damping = damping
        loss.backward(retain_graph=True)
        assert_conditioned(model, wanted)


def test_only_the_input_gradient_is_asked_for(batch) -> None:
    model = network()
    isaac.attach(model, damping=0.1)
    x = batch[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(x), batch[1]), x)
    plain = network()
    y = batch[0].clone().requires_grad_()
    (wanted,) = torch.autograd.grad(F.cross_entropy(plain(y), batch[1]), y)
    assert torch.equal(gradient, wanted)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_differentiated_backward_pass_sees_how_the_conditioner_depends_on_the_inputs(batch) -> None:
    model = network()
    isaac.attach(model, damping=0.1)

    def conditioned(first: Tensor) -> Tensor:
        hidden = torch.relu(F.linear(batch[0], first, model[0].bias))
        loss = F.cross_entropy(model[4](torch.relu(model[2](hidden))), batch[1])
        return torch.autograd.grad(loss, model[2].weight, create_graph=True)[0]

    weight = model[0].weight.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(conditioned, weight, fast_mode=True)


def test_nothing_is_kept_after_the_backward_pass_nor_for_forward_passes_alone(batch) -> None:
    model = network()
    handle = isaac.attach(model, damping=0.1)
    hidden: list[weakref.ref[Tensor]] = []
    model[1].register_forward_hook(lambda module, inputs, output: hidden.append(weakref.ref(output)))
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    gc.collect()
    assert hidden[0]() is None
    for _ in range(3000):
        model(batch[0])
    assert len(handle._run.waiting) <= 1024
    assert loss.requires_grad


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_keep_no_rows(batch, reentrant) -> None:
    model = network()
    wanted = expected(model, *batch, 0.1)
    handle = isaac.attach(model, damping=0.1)
    x = batch[0].clone().requires_grad_()
    loss = F.cross_entropy(checkpoint(model, x, use_reentrant=reentrant), batch[1])
    assert not handle._run.waiting
    loss.backward()
    assert_conditioned(model, wanted)


def test_float32_where_it_is_accurate_and_float64_for_the_others() -> None:
    torch.manual_seed(0)
    xs = [torch.randn(6, 20), 300 * torch.randn(6, 20), torch.randn(6, 7)]
    for (together, failures), x in zip(cpu.inverses(xs, [1.0, 1.0, 1.0]), xs, strict=True):
        alone, _ = cpu.inverse(x, 1.0)
        assert failures == 0
        assert together is not None
        assert together.dtype is alone.dtype
        torch.testing.assert_close(together, alone)


@pytest.mark.parametrize("damping", [math.inf, 10.0])
def test_a_conditioner_that_a_pass_found_for_others_is_not_used_by_the_next(damping: float) -> None:
    """Both losses come from one forward pass; a new damping in between holds for the second."""
    model = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)]).double()
    handle = isaac.attach(model, 0.1)
    x, g = torch.randn(2, 8, 5, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    first, second = model[0](x[0]), model[1](x[1])
    first.backward(g)
    handle.damping = damping
    second.backward(g)
    assert_close(model[0].weight.grad, zeta_star(g, x[0], 0.1))
    wanted = g.T @ x[1] if damping == math.inf else zeta_star(g, x[1], damping)
    assert_close(model[1].weight.grad, wanted)
