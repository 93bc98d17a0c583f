"""ζ in the backward pass: `handle.backward` for each loss, reduction and source of ḡ."""

import copy
import functools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import isaac_newton as isaac
from isaac_newton.api.handle import collect_output_gradients
from isaac_newton.math.likelihood import BinaryCrossEntropy, CrossEntropy, SquaredError
from reference import assert_close
from test_linear_gradients import mlp, record

Loss = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "cross-entropy, mean": nn.CrossEntropyLoss(),
    "cross-entropy, sum": nn.CrossEntropyLoss(reduction="sum"),
    "cross-entropy function": F.cross_entropy,
    "cross-entropy partial": functools.partial(F.cross_entropy, reduction="sum"),
    "squared error, mean": nn.MSELoss(),
    "squared error, sum": nn.MSELoss(reduction="sum"),
    "squared error function": F.mse_loss,
    "binary, mean": nn.BCEWithLogitsLoss(),
    "binary, sum": functools.partial(F.binary_cross_entropy_with_logits, reduction="sum"),
}


def targets(name: str, rows: int) -> Tensor:
    if name.startswith("cross"):
        return torch.randint(4, (rows,))
    return torch.rand(rows, 4, dtype=torch.float64)


def per_term(name: str, loss_fn: Loss, target: Tensor) -> list[Callable[[Tensor], Tensor]]:
    """The loss of each sample by itself, such that the loss is their mean or sum."""
    return [lambda row, n=n: loss_fn(row[None], target[n : n + 1]) for n in range(len(target))]


def curvature(model: nn.Module, x: Tensor, terms: list[Callable[[Tensor], Tensor]]) -> dict[str, Tensor]:
    """1/N Σ Jᵀ H J with respect to the outputs of each linear layer: Jacobian and Hessian sample by sample, entry by entry."""
    outputs: dict[str, Tensor] = {}
    hooks = [
        layer.register_forward_hook(lambda _, args, output, name=name: outputs.__setitem__(name, output))
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    total: dict[str, Tensor] = {}
    for n, term in enumerate(terms):
        f = model(x[n : n + 1])[0]
        hessian = torch.autograd.functional.hessian(term, f.detach())
        for name, z in outputs.items():
            jacobian = torch.stack([torch.autograd.grad(f[c], z, retain_graph=True)[0].reshape(-1) for c in range(len(f))])
            total[name] = total.get(name, torch.zeros(())) + jacobian.T @ hessian @ jacobian / len(terms)
    for hook in hooks:
        hook.remove()
    return total


def expected_zeta(gradient: Tensor, left: Tensor, a: Tensor, output_damping: float, damping: float) -> Tensor:
    left = left + output_damping * torch.eye(len(left), dtype=torch.float64)
    right = a.T @ a / len(a) + damping * torch.eye(a.shape[1], dtype=torch.float64)
    return output_damping * damping * torch.linalg.inv(left) @ gradient @ torch.linalg.inv(right)


def check_against_explicit_factors(loss_fn: Loss, x: Tensor, target: Tensor, terms: list[Callable[[Tensor], Tensor]]) -> None:
    """ζ with exact curvature equals the formula with Gauss–Newton factors computed entry by entry."""
    model = mlp()
    plain = copy.deepcopy(model)
    factors = curvature(plain, x, terms)
    inputs = {layer: a for layer, (_, a) in record(plain, x).items()}
    plain.zero_grad()
    loss_fn(plain(x), target).backward()
    handle = isaac.attach(model, damping=0.2, output_damping=0.05, output_curvature="exact")
    output = model(x)
    handle.backward(loss_fn(output, target), output, loss_fn)
    for layer, a in inputs.items():
        gradient = plain.get_submodule(layer).weight.grad
        assert isinstance(gradient, Tensor)
        assert_close(model.get_submodule(layer).weight.grad, expected_zeta(gradient, factors[layer], a, 0.05, 0.2))
        assert_close(model.get_submodule(layer).bias.grad, plain.get_submodule(layer).bias.grad, 1e-12)


@pytest.mark.parametrize("rows", [3, 20])
@pytest.mark.parametrize("name", LOSSES)
def test_exact_curvature_gives_zeta_of_the_explicit_gauss_newton_factors(name: str, rows: int) -> None:
    loss_fn, x, target = LOSSES[name], torch.randn(rows, 7, dtype=torch.float64), targets(name, rows)
    check_against_explicit_factors(loss_fn, x, target, per_term(name, loss_fn, target))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("through_handle", [True, False])
def test_empirical_curvature_is_the_fisher_of_the_true_labels(reduction: str, through_handle: bool) -> None:
    x, target = torch.randn(9, 7, dtype=torch.float64), torch.randint(4, (9,))
    model = mlp()
    plain = copy.deepcopy(model)
    loss_fn = nn.CrossEntropyLoss(reduction=reduction)
    handle = isaac.attach(model, damping=0.2, output_damping=0.05, output_curvature="empirical")
    output = model(x)
    loss = loss_fn(output, target)
    if not through_handle:
        if reduction == "sum":
            loss = loss / 9  # without the handle a mean is assumed
        loss.backward()
    else:
        handle.backward(loss, output, loss_fn)
    scale = 9 if reduction == "sum" and through_handle else 1
    for name in ("0", "2", "4"):
        # Per-sample gradients, one sample at a time.
        left = torch.zeros(len(plain.get_submodule(name).bias), len(plain.get_submodule(name).bias), dtype=torch.float64)
        for n in range(9):
            plain.zero_grad()
            F.cross_entropy(plain(x[n : n + 1]), target[n : n + 1]).backward()
            g = plain.get_submodule(name).bias.grad
            assert isinstance(g, Tensor)
            left += torch.outer(g, g) / 9
        a = record(plain, x)[name][1]
        plain.zero_grad()
        F.cross_entropy(plain(x), target).backward()
        gradient = plain.get_submodule(name).weight.grad
        assert isinstance(gradient, Tensor)
        assert_close(model.get_submodule(name).weight.grad, scale * expected_zeta(gradient, left, a, 0.05, 0.2))


@pytest.mark.parametrize("likelihood", [CrossEntropy(), SquaredError(), SquaredError("sum"), BinaryCrossEntropy()])
def test_the_monte_carlo_estimate_converges_to_the_exact_curvature(
    likelihood: CrossEntropy | SquaredError | BinaryCrossEntropy,
) -> None:
    output = torch.randn(2, 5, dtype=torch.float64)
    exact = sum(torch.einsum("ni,nj->nij", column, column) for column in likelihood.root(output))
    errors = []
    for samples in (100, 10_000):
        drawn = torch.stack([likelihood.sample(output) for _ in range(samples)])
        estimate = torch.einsum("sni,snj->nij", drawn, drawn) / samples
        errors.append((torch.linalg.norm(estimate - exact) / torch.linalg.norm(torch.as_tensor(exact))).item())
    assert errors[1] < 0.05
    assert errors[1] < errors[0] / 3  # the error falls like 1 / √samples: ten-fold here


@pytest.mark.parametrize("name", ["cross-entropy, mean", "squared error, mean", "binary, mean"])
def test_zeta_with_many_samples_comes_close_to_zeta_with_the_exact_curvature(name: str) -> None:
    x, target = torch.randn(6, 7, dtype=torch.float64), targets(name, 6)
    exact, few, many = mlp(), mlp(), mlp()
    few.load_state_dict(exact.state_dict())
    many.load_state_dict(exact.state_dict())
    for model, curvature_, samples in ((exact, "exact", 1), (few, "sampled", 1), (many, "sampled", 400)):
        handle = isaac.attach(
            model,
            damping=0.2,
            output_damping=0.05,
            output_curvature=curvature_,
            samples=samples,
        )
        output = model(x)
        handle.backward(LOSSES[name](output, target), output, LOSSES[name])
    for layer in (0, 2, 4):
        weight = exact[layer].weight.grad
        assert (many[layer].weight.grad - weight).norm() < 0.05 * weight.norm()
        assert (many[layer].weight.grad - weight).norm() < 0.5 * (few[layer].weight.grad - weight).norm()


def test_sampling_follows_torchs_seed() -> None:
    model = mlp()
    handle = isaac.attach(model, output_damping=0.1)
    x, target = torch.randn(6, 7, dtype=torch.float64), torch.randint(4, (6,))

    def gradient(seed: int) -> Tensor:
        torch.manual_seed(seed)
        model.zero_grad()
        output = model(x)
        handle.backward(F.cross_entropy(output, target), output, F.cross_entropy)
        assert isinstance(model[0].weight.grad, Tensor)
        return model[0].weight.grad.clone()

    assert torch.equal(gradient(1), gradient(1))
    assert not torch.equal(gradient(1), gradient(2))


def test_kfac_by_name_is_zeta_with_equal_dampings() -> None:
    x, target = torch.randn(6, 7, dtype=torch.float64), torch.randint(4, (6,))
    named, equal = mlp(), mlp()
    equal.load_state_dict(named.state_dict())
    results = []
    for model, output_damping in ((named, "kfac"), (equal, 0.3)):
        handle = isaac.attach(model, 0.3, output_damping=output_damping, output_curvature="exact")
        output = model(x)
        handle.backward(F.cross_entropy(output, target), output, F.cross_entropy)
        results.append(model[0].weight.grad)
        if output_damping == "kfac":
            handle.damping = 0.7
            assert handle.output_damping == "kfac"
    assert torch.equal(results[0], results[1])


def test_the_extra_pass_forms_no_weight_gradient_and_leaves_grad_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 4)).double()
    handle = isaac.attach(model, output_damping=0.1, samples=3)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    x, target = torch.randn(6, 7, dtype=torch.float64), torch.randint(4, (6,))
    output = model(x)
    formed = 0

    def counting(*args: object) -> None:
        nonlocal formed
        formed += 1

    monkeypatch.setattr("isaac_newton.core.gradient.multiply_own", counting)
    collect_output_gradients(handle._run, handle._sites.values(), output, CrossEntropy(), 6)
    assert formed == 0
    assert all(bool((p.grad == 7).all()) for p in model.parameters() if p.grad is not None)
    monkeypatch.undo()
    handle.backward(F.cross_entropy(output, target), output, F.cross_entropy)
    assert not any(bool((p.grad == 7).all()) for p in model.parameters() if p.grad is not None)


def test_a_scaled_loss_gives_a_scaled_zeta() -> None:
    x, target = torch.randn(6, 7, dtype=torch.float64), torch.randint(4, (6,))
    model = mlp()
    handle = isaac.attach(model, output_damping=0.1, output_curvature="exact")
    results = []
    for scale in (1.0, 1024.0):
        model.zero_grad()
        output = model(x)
        handle.backward(scale * F.cross_entropy(output, target), output, F.cross_entropy)
        results.append(model[0].weight.grad)
    assert_close(results[1], 1024 * results[0], 1e-12)


def test_ignored_targets_do_not_count() -> None:
    x, target = torch.randn(8, 7, dtype=torch.float64), torch.randint(4, (8,))
    target[[1, 4]] = -100
    kept = target != -100
    whole, part = mlp(), mlp()
    part.load_state_dict(whole.state_dict())
    factors = []
    for model, inputs, labels in ((whole, x, target), (part, x[kept], target[kept])):
        # A huge λ_a leaves the output side alone to look at; the input side counts rows, ignored or not.
        handle = isaac.attach(model, 1e12, output_damping=0.1, output_curvature="exact")
        output = model(inputs)
        handle.backward(F.cross_entropy(output, labels), output, F.cross_entropy)
        factors.append(model[4].weight.grad)
    assert_close(factors[0], factors[1])


def test_sequence_outputs_treat_every_position_as_a_term() -> None:
    """A position-wise model on (batch, length) equals the same model on all positions in one batch."""
    x, target = torch.randn(3, 5, 7, dtype=torch.float64), torch.randint(4, (3, 5))
    sequence, flat = mlp(), mlp()
    flat.load_state_dict(sequence.state_dict())
    first = isaac.attach(sequence, 0.2, output_damping=0.1, output_curvature="exact")
    second = isaac.attach(flat, 0.2, output_damping=0.1, output_curvature="exact")
    output = sequence(x).movedim(-1, 1)
    first.backward(F.cross_entropy(output, target), output, F.cross_entropy)
    output = flat(x.reshape(15, 7))
    second.backward(F.cross_entropy(output, target.reshape(15)), output, F.cross_entropy)
    for layer in (0, 2, 4):
        assert_close(sequence[layer].weight.grad, flat[layer].weight.grad)


def test_a_loss_of_ones_own_needs_four_things() -> None:
    class PoissonLoss:
        """−log p for counts with rate exp(f): Hessian diag(exp f)."""

        reduction = "mean"

        def __call__(self, output: Tensor, counts: Tensor) -> Tensor:
            return (output.exp() - counts * output).sum(1).mean()

        def terms(self, output: Tensor) -> int:
            return len(output)

        def sample(self, output: Tensor) -> Tensor:
            return output.exp() - torch.poisson(output.exp())

        def root(self, output: Tensor) -> Iterator[Tensor]:
            for k in range(output.shape[1]):
                column = torch.zeros_like(output)
                column[:, k] = (output[:, k] / 2).exp()
                yield column

    loss_fn, x, counts = PoissonLoss(), torch.randn(5, 7, dtype=torch.float64), torch.randint(3, (5, 4)).double()
    assert isinstance(loss_fn, isaac.Likelihood)
    check_against_explicit_factors(loss_fn, x, counts, per_term("own", loss_fn, counts))


def test_an_empty_batch_gives_zero_gradients() -> None:
    model = mlp()
    handle = isaac.attach(model, output_damping=0.1)
    output = model(torch.randn(0, 7, dtype=torch.float64))
    handle.backward(output.sum(), output, nn.MSELoss())
    assert model[0].weight.grad is not None
    assert not model[0].weight.grad.any()


def test_a_relative_output_damping_follows_the_size_of_gbar() -> None:
    x, target = torch.randn(6, 7, dtype=torch.float64), torch.rand(6, 4, dtype=torch.float64)
    model = nn.Linear(7, 4, dtype=torch.float64)
    handle = isaac.attach(model, 0.2, output_damping=isaac.Relative(0.5), output_curvature="exact")
    output = model(x)
    handle.backward(F.mse_loss(output, target), output, F.mse_loss)
    # ḡᵀḡ / b is 2/4 I here, so its mean eigenvalue is 0.5.
    gradient = (2 / 24 * (output - target)).detach().T @ x
    assert_close(model.weight.grad, expected_zeta(gradient, 0.5 * torch.eye(4, dtype=torch.float64), x, 0.5 * 0.5, 0.2))


def test_training_with_zeta_goes_down() -> None:
    torch.manual_seed(3)
    model = mlp()
    handle = isaac.attach(model, damping=0.3, output_damping=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, target = torch.randn(32, 7, dtype=torch.float64), torch.randint(4, (32,))
    losses = []
    for _ in range(60):
        output = model(x)
        loss = F.cross_entropy(output, target)
        optimizer.zero_grad()
        handle.backward(loss, output, F.cross_entropy)
        optimizer.step()
        losses.append(loss.item())
    assert math.isfinite(losses[-1])
    assert losses[-1] < 0.7 * losses[0]
