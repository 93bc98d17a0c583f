"""`handle.statistics`: failed factorizations are survived, counted and warned about once; insight comes on request."""

import copy
import math
import pickle
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import isaac_newton as isaac
import reference
from isaac_newton.core.conditioner import invert
from isaac_newton.core.rows import Rows
from isaac_newton.core.statistics import Statistics
from reference import assert_close
from test_linear_gradients import gradients, mlp
from test_step import Mixed

INSIGHT = ("effective_rank", "largest_curvature", "damping", "angle")


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Call it with how many of the next factorizations shall fail."""
    factorize = torch.linalg.cholesky_ex
    left = [0.0]

    def failing(matrix: Tensor) -> tuple[Tensor, Tensor]:
        factor, info = factorize(matrix)
        left[0] -= 1
        return factor, torch.ones_like(info) if left[0] >= 0 else info

    monkeypatch.setattr(torch.linalg, "cholesky_ex", failing)
    return lambda times: left.__setitem__(0, times)


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "few rows": (lambda: nn.Linear(9, 4), lambda: torch.randn(5, 9)),
    "many rows": (lambda: nn.Linear(9, 4), lambda: torch.randn(30, 9)),
    "convolution": (lambda: nn.Conv1d(4, 6, 3, groups=2), lambda: torch.randn(5, 4, 8)),
    "convolution of one place": (lambda: nn.Conv1d(4, 6, 3, groups=2), lambda: torch.randn(2, 4, 3)),
    "few bags": (lambda: nn.EmbeddingBag(20, 3), lambda: torch.randint(20, (2, 5))),
    "many bags": (lambda: nn.EmbeddingBag(5, 3), lambda: torch.randint(5, (20, 3))),
}


def plain_gradient(layer: nn.Module, x: Tensor) -> Tensor:
    plain = copy.deepcopy(layer)
    plain(x).square().sum().backward()
    assert isinstance(plain.weight, Tensor)
    assert plain.weight.grad is not None
    return plain.weight.grad


@pytest.mark.parametrize("options", [{}, {"when": "step"}, {"when": "step", "decay": 0.5}, {"sharing": "reduce"}], ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_whose_factorizations_all_fail_keeps_its_plain_gradient(
    kind: str, options: dict[str, object], fail: Callable[[float], None]
) -> None:
    layer, x = LAYERS[kind][0](), LAYERS[kind][1]()
    if isinstance(layer, nn.EmbeddingBag) and "when" in options:
        pytest.skip("embedding bags do not wait for the step")
    expected = plain_gradient(layer, x)
    handle = isaac.attach(layer, 0.1, **options)  # type: ignore[arg-type]
    fail(math.inf)
    loss = layer(x).square().sum()
    if "when" in options:
        loss.backward()
    with pytest.warns(RuntimeWarning, match="larger damping, or the gradient left plain"):
        handle.step() if "when" in options else loss.backward()
    assert isinstance(layer.weight, Tensor)
    assert_close(layer.weight.grad, expected, 1e-6)
    assert handle.statistics[""].fallbacks == 1
    fail(0)
    layer.zero_grad()
    layer(x).square().sum().backward()
    if "when" in options:
        handle.step()
    assert handle.statistics[""].fallbacks == 1
    assert layer.weight.grad is not None
    assert layer.weight.grad.norm() < 0.99 * expected.norm()


@pytest.mark.parametrize("failures", [1, 2])
def test_a_failed_factorization_is_repeated_with_more_damping(failures: int, fail: Callable[[float], None]) -> None:
    layer, x = nn.Linear(9, 4, bias=False), 30 * torch.randn(5, 9)
    expected = plain_gradient(layer, x)
    handle = isaac.attach(layer, 0.1)
    layer(x).square().sum().backward()
    assert layer.weight.grad is not None
    conditioned = layer.weight.grad.norm()
    layer.zero_grad()
    fail(failures)
    with pytest.warns(RuntimeWarning, match="factorization failed"):
        layer(x).square().sum().backward()
    assert handle.statistics[""].fallbacks == 1
    # More damping than asked for, less than infinity.
    assert conditioned < layer.weight.grad.norm() < expected.norm()


def test_only_the_groups_that_fail_are_damped_more(monkeypatch: pytest.MonkeyPatch) -> None:
    factorize = torch.linalg.cholesky_ex

    def failing(matrix: Tensor) -> tuple[Tensor, Tensor]:
        factor, info = factorize(matrix)
        info = info.clone()
        info[1] = 1
        return factor, info

    x = torch.randn(3, 4, 7)
    (expected,) = invert([Rows(x, 4)], 0.1, "")
    monkeypatch.setattr(torch.linalg, "cholesky_ex", failing)
    for in_difference in (True, False):
        (made,) = invert([Rows(x, 4, in_difference=in_difference)], 0.1, "")
        assert made.failures == 1
        actual, wanted = made.inverse, expected.inverse
        assert actual is not None
        assert wanted is not None
        scale = 1 / (4 * 0.1) if in_difference else 1
        assert_close(actual[0], scale * wanted[0], 1e-5)
        assert_close(actual[2], scale * wanted[2], 1e-5)
        assert torch.equal(actual[1], torch.eye(4, dtype=actual.dtype) * (not in_difference))


def test_a_failing_conditioner_of_the_outputs_leaves_zeta_star(fail: Callable[[float], None]) -> None:
    for rows in (3, 20):
        layer, x, y = nn.Linear(9, 5, bias=False), torch.randn(rows, 9), torch.randn(rows, 5)
        handle = isaac.attach(layer, 0.1, output_damping=0.1, output_curvature="empirical")
        loss = F.mse_loss(layer(x), y)
        (g,) = torch.autograd.grad(F.mse_loss(output := layer(x), y), output)
        # One attempt in float32, three in float64, for λ_g; then that for λ_a succeeds.
        fail(4)
        with pytest.warns(RuntimeWarning, match="factorization failed"):
            handle.backward(loss, layer(x), nn.MSELoss())
        assert_close(layer.weight.grad, reference.zeta_star(g, x, 0.1), 1e-4)


def test_failures_are_warned_about_once_for_all_layers_and_steps(fail: Callable[[float], None]) -> None:
    model = mlp(torch.float32)
    handle = isaac.attach(model, 0.1)
    fail(math.inf)
    with pytest.warns(RuntimeWarning, match="factorization failed"):
        gradients(model, torch.randn(6, 7))
    for _ in range(2):
        gradients(model, torch.randn(6, 7))  # a second warning would be an error
    assert {name: seen.fallbacks for name, seen in handle.statistics.items()} == {"0": 3, "2": 3, "4": 3}
    twin = mlp(torch.float32)
    isaac.attach(twin, 0.1)
    with pytest.warns(RuntimeWarning, match="factorization failed"):
        gradients(twin, torch.randn(6, 7))


def test_an_eigensolver_that_does_not_converge_is_a_failure_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(matrix: Tensor) -> None:
        raise torch.linalg.LinAlgError("the algorithm failed to converge")

    layer, x = nn.Linear(9, 4, bias=False), torch.randn(30, 9)
    expected = plain_gradient(layer, x)
    handle = isaac.attach(layer, 0.1, when="step", power=0.5)
    layer(x).square().sum().backward()
    monkeypatch.setattr(torch.linalg, "eigh", failing)
    with pytest.warns(RuntimeWarning, match="factorization failed"):
        handle.step()
    assert_close(layer.weight.grad, expected, 1e-6)
    assert handle.statistics[""].fallbacks == 1


def test_what_a_device_counts_is_read_with_the_statistics() -> None:
    """As on a GPU, where nobody waits for the number."""
    model = mlp()
    handle = isaac.attach(model)
    for _ in range(2):
        model[0].forward.fell_back(torch.tensor(1))
    with pytest.warns(RuntimeWarning, match="factorization failed"):
        assert handle.statistics["0"].fallbacks == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert handle.statistics["0"].fallbacks == 2
        print(handle)


def insight(handle: isaac.Handle) -> Iterator[tuple[str, float | None]]:
    for name, seen in handle.statistics.items():
        yield from ((f"{name}.{field}", getattr(seen, field)) for field in INSIGHT)


def assert_insight(seen: Statistics, a: Tensor, plain: Tensor, conditioned: Tensor, damping: float) -> None:
    values = torch.linalg.eigvalsh(a.double().T @ a.double() / len(a)).clamp_min(0)
    cosine = F.cosine_similarity(plain.reshape(-1).double(), conditioned.reshape(-1).double(), dim=0)
    assert seen.damping == pytest.approx(damping)
    assert seen.largest_curvature == pytest.approx(values.max().item())
    assert seen.effective_rank == pytest.approx((values / (values + damping)).sum().item())
    assert seen.angle == pytest.approx(math.degrees(math.acos(cosine)), abs=1e-4)


@pytest.mark.parametrize("damping", [0.2, isaac.Relative(0.5), lambda step: 0.1], ids=["number", "relative", "schedule"])
@pytest.mark.parametrize("rows", [4, 30])
@pytest.mark.parametrize("when", ["backward", "step"])
def test_an_inspection_shows_rank_curvature_damping_and_angle(when: str, rows: int, damping: object) -> None:
    layer, x, g = nn.Linear(9, 4, bias=False).double(), torch.randn(rows, 9).double(), torch.randn(rows, 4).double()
    handle = isaac.attach(layer, damping, when=when)  # type: ignore[arg-type]
    assert all(value is None for _, value in insight(handle))
    with handle.inspecting() as statistics:
        layer(x).backward(g)
        if when == "step":
            handle.step()
    number = 0.2 if damping == 0.2 else 0.5 * x.square().mean().item() if isinstance(damping, isaac.Relative) else 0.1
    assert_insight(statistics[""], x, g.T @ x, reference.zeta_star(g, x, number), number)


@pytest.mark.parametrize("options", [{"decay": 0.5}, {"power": 0.5}, {"refresh": 2}])
def test_an_inspection_shows_what_the_step_used(options: dict[str, float]) -> None:
    layer, x, g = nn.Linear(9, 4, bias=False).double(), torch.randn(30, 9).double(), torch.randn(30, 4).double()
    handle = isaac.attach(layer, 0.2, when="step", **options)  # type: ignore[arg-type]
    for _ in range(2):
        layer.zero_grad()
        layer(x).backward(g)
        assert layer.weight.grad is not None
        plain = layer.weight.grad.clone()
        with handle.inspecting():
            handle.step()
        assert_insight(handle.statistics[""], x, plain, layer.weight.grad, 0.2)


@pytest.mark.parametrize(
    "options", [{}, {"when": "step"}, {"bias": "joint"}, {"sharing": "reduce"}, {"max_rows": 5}, {"damping": math.inf}], ids=str
)
def test_every_layer_type_can_be_inspected_and_the_gradient_does_not_change(options: dict[str, object]) -> None:
    x = torch.randint(11, (8, 6))
    torch.manual_seed(0)
    models = [Mixed().double()]
    models += [copy.deepcopy(models[0])]
    results = []
    for model, inspected in zip(models, (True, False), strict=True):
        handle = isaac.attach(model, **{"damping": 0.3, **options})  # type: ignore[arg-type]
        with handle.inspecting() if inspected else torch.enable_grad():
            model(x).square().mean().backward()
            if "when" in options:
                handle.step()
        results.append([p.grad for p in model.parameters()])
        if inspected and options.get("damping") != math.inf:
            for name, value in insight(handle):
                assert value is not None, name
                assert math.isfinite(value), name
                assert value < 90 or not name.endswith("angle"), name
    for ours, theirs in zip(*results, strict=True):
        assert ours is not None
        assert theirs is not None
        assert_close(ours, theirs, 1e-12)


def test_zeta_and_bags_and_groups_can_be_inspected() -> None:
    layer = nn.Linear(6, 4)
    handle = isaac.attach(layer, 0.1, output_damping=0.1, output_curvature="empirical")
    with handle.inspecting():
        handle.backward(F.mse_loss(output := layer(torch.randn(5, 6)), torch.randn(5, 4)), output, nn.MSELoss())
    assert all(value is not None for _, value in insight(handle))
    bag = nn.EmbeddingBag(7, 3)
    handle = isaac.attach(bag, 0.1)
    with handle.inspecting():
        bag(torch.randint(7, (4, 5))).square().sum().backward()
    assert all(value is not None for _, value in insight(handle))


def test_the_report_has_the_columns_of_an_inspection_only_after_one() -> None:
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(30)), nn.LayerNorm(6))
    handle = isaac.attach(model, 0.25)
    x = torch.randn(5, 6)
    model(x).sum().backward()
    assert "effective rank" not in str(handle)
    with handle.inspecting():
        model(x).sum().backward()
    lines = str(handle).splitlines()
    assert all(heading in lines[0] for heading in ("effective rank", "curvature", "λ", "angle to ∇"))
    assert "0.25" in lines[1]
    assert "{0–29} ×30" in lines[1]  # equal layers share a line, with a range of what differs
    assert "°" in lines[1]
    model(x).sum().backward()
    assert "effective rank" in str(handle)  # it stays until the next one


def test_a_forward_pass_outside_of_the_block_is_noticed() -> None:
    layer = nn.Linear(6, 4)
    handle = isaac.attach(layer, 0.1)
    loss = layer(torch.randn(3, 6)).sum()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with handle.inspecting():
            loss.backward()
    recorded = handle.statistics[""].effective_rank is not None
    assert recorded or "needs the forward pass in its block" in str(caught[0].message)


def test_a_handle_that_was_inspected_copies_and_pickles() -> None:
    layer = nn.Linear(6, 4)
    handle = isaac.attach(layer, 0.1)
    with handle.inspecting():
        layer(torch.randn(3, 6)).sum().backward()
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        twin(torch.randn(3, 6)).sum().backward()
        assert not twin.forward.run.inspecting


def test_costs_of_several_uses_add_up_and_sizes_are_kept_once() -> None:
    layer = nn.Linear(9, 9)
    handle = isaac.attach(layer, damping=1.0)
    found = handle.statistics[""]
    costs = []
    for uses in (1, 3):
        x = torch.randn(5, 9)
        for _ in range(uses):
            x = layer(x)
        x.sum().backward()
        costs.append((found.own_multiplications, found.extra_multiplications, found.extra_bytes))
    assert costs[0] == (3 * 5 * 9 * 9, 5**2 * 9 + 5**3 // 2 + 5**2 * 9, 4 * 5**2)
    assert costs[1] == tuple(3 * cost for cost in costs[0])
    for _ in range(20):
        handle.backward_passes = 0
        layer(torch.randn(5, 9)).sum().backward()
    assert len(found._uses) == 1


def test_zero_gradients_have_no_angle() -> None:
    layer = nn.Linear(6, 4)
    handle = isaac.attach(layer, 0.1)
    with handle.inspecting():
        layer(torch.zeros(3, 6)).sum().backward()
    seen = handle.statistics[""]
    assert (seen.effective_rank, seen.largest_curvature, seen.angle) == (0.0, 0.0, None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{}, {"when": "step"}, {"when": "step", "decay": 0.5}, {"max_rows": 1050}], ids=str)
@pytest.mark.parametrize(("rows", "features"), [(1100, 1300), (1300, 1100)])
def test_on_a_gpu_the_device_replaces_and_counts(
    rows: int, features: int, options: dict[str, object], fail: Callable[[float], None]
) -> None:
    layer, x = nn.Linear(features, 40).cuda(), torch.randn(rows, features).cuda()
    expected = plain_gradient(layer, x)
    handle = isaac.attach(layer, 0.1, **options)  # type: ignore[arg-type]
    fail(math.inf)
    layer(x).square().sum().backward()
    if "when" in options:
        handle.step()
    with pytest.warns(RuntimeWarning, match="factorization failed"):
        assert handle.statistics[""].fallbacks == 1
    assert layer.weight.grad is not None
    assert_close(layer.weight.grad.cpu(), expected.cpu(), 1e-5)
    fail(0)
    layer.zero_grad()
    with handle.inspecting():
        layer(x).square().sum().backward()
        if "when" in options:
            handle.step()
    assert handle.statistics[""].fallbacks == 1
    assert all(value is not None for _, value in insight(handle))
    x[3, 4] = math.nan  # no failure of ours
    layer(x).sum().backward()
    assert handle.statistics[""].fallbacks == 1
