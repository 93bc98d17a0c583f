"""float32 reaches 1e-4 wherever the problem allows it, in the pure functions and in what training calls."""

import dataclasses
import math
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import isaac_newton as isaac
from isaac_newton import equations
from isaac_newton.core import conditioner
from isaac_newton.core.rows import Rows
from isaac_newton.kernels import cpu
from reference import assert_close, relative_error

DAMPINGS = [10.0**exponent for exponent in range(-6, 7)]
SCALES = [1e-3, 1.0, 1e3]
SHAPES = [(1, 1), (1, 2048), (512, 1), (2, 300), (60, 784), (60, 61), (64, 64), (200, 64), (512, 513), (512, 100)]


def inputs(rows: int, features: int, scale: float, kind: str) -> Tensor:
    a = torch.randn(rows, features)
    if kind == "rectified":
        a = a.relu()
    if kind == "repeated":
        a[rows // 2 :] = a[: rows - rows // 2].clone()
    if kind == "zeros":
        a[::2] = 0
    return a * scale


def in_training(g: Tensor, a: Tensor, damping: float) -> tuple[Tensor, int]:
    """What an attached layer leaves in `.grad`, and how often it fell back."""
    layer = nn.Linear(a.shape[1], g.shape[1], bias=False, dtype=a.dtype)
    handle = isaac.attach(layer, damping)
    layer(a).backward(g)
    assert layer.weight.grad is not None
    return layer.weight.grad, handle.statistics[""].fallbacks


def exactly(g: Tensor, a: Tensor, damping: float) -> Tensor:
    """ζ* of these float32 values without the cancellation that limits any float64 formula on repeated rows.

    Rows that are equal act like one row with the sum of their gradients and its norm scaled by √count: no longer singular.
    """
    rows = a.shape[0]
    unique, index, counts = torch.unique(a.double(), dim=0, return_inverse=True, return_counts=True)
    kept = unique.abs().sum(1) > 0
    root = counts.double().sqrt()[:, None]
    g_sum = torch.zeros(len(unique), g.shape[1], dtype=torch.float64).index_add_(0, index, g.double()) / root
    return equations.zeta_star(g_sum[kept], (unique * root)[kept], damping * rows / max(int(kept.sum()), 1))


@pytest.mark.parametrize("kind", ["normal", "rectified", "repeated", "zeros"])
@pytest.mark.parametrize(("rows", "features"), SHAPES)
def test_float32_zeta_star_reaches_1e_4(rows: int, features: int, kind: str) -> None:
    """Over λ from 1e-6 to 1e6 and inputs scaled by 1e-3 to 1e3.

    Where rows repeat or vanish, the matrix on one side is singular but for the damping, and κ ≤ 1 + tr(a aᵀ)/(bλ) bounds
    what float64 inside can do: the error is at most 16 · 2⁻⁵² κ, so 1e-4 is kept up to κ = 2.8e10. Beyond, at λ = 1e-6 and
    inputs of size 1000 (κ up to 2e15), it is lost. No float64 formula does better: a change of the inputs by one unit in
    the last place does as much.
    """
    g = torch.randn(rows, 7) / rows
    for scale in SCALES:
        a = inputs(rows, features, scale, kind)
        for damping in DAMPINGS:
            condition = 1 + a.double().square().sum().item() / (rows * damping)
            limit = max(1e-4, 16 * 2**-52 * condition) if kind in ("repeated", "zeros") else 1e-4
            expected = exactly(g, a, damping)
            assert_close(equations.zeta_star(g, a, damping), expected, limit)
            actual, fallbacks = in_training(g, a, damping)
            assert_close(actual, expected, limit)
            assert fallbacks == 0


def test_repeated_rows_reach_1e_4_up_to_a_condition_of_1e11() -> None:
    a, g = inputs(60, 300, 1.0, "repeated"), torch.randn(60, 7)
    for damping in (1.0, 1e-3, 1e-6, 1e-8):
        condition = a.square().sum().item() / (60 * damping)
        assert condition < 1e11
        assert_close(equations.zeta_star(g, a, damping), exactly(g, a, damping), 1e-4)


@settings(max_examples=200)
@given(
    st.integers(1, 512),
    st.integers(1, 2048),
    st.floats(-6, 6),
    st.floats(-3, 3),
    st.sampled_from(["normal", "rectified"]),
    st.integers(0, 2**31),
)
def test_float32_reaches_1e_4_for_drawn_shapes(
    rows: int, features: int, log_damping: float, log_scale: float, kind: str, seed: int
) -> None:
    torch.manual_seed(seed)
    a, g = inputs(rows, features, 10**log_scale, kind), torch.randn(rows, 3) / rows
    assert_close(equations.zeta_star(g, a, 10**log_damping), exactly(g, a, 10**log_damping), 1e-4)
    assert_close(in_training(g, a, 10**log_damping)[0], exactly(g, a, 10**log_damping), 1e-4)


@pytest.mark.parametrize("kind", ["normal", "repeated", "rectified"])
def test_the_trace_bounds_the_error_of_plain_float32(kind: str) -> None:
    """The rule by which `dense` chooses float32: error ≤ 2 · trace · 2⁻²⁴, which keeps 1e-4 up to a trace of 512."""
    worst = 0.0
    for rows in (2, 8, 60, 256):
        for features in (1, 8, 60, 250, 2048):
            for trace in (100.0, 300.0, 1000.0):
                a, g = inputs(rows, features, 1.0, kind), torch.randn(rows, 5)
                scale = trace / a.square().sum().item()
                by_rows = rows < features
                x = a if by_rows else a.T
                factor = torch.linalg.cholesky(torch.eye(len(x)) + scale * (x @ x.T))
                small = torch.cholesky_inverse(factor)
                actual = (small @ g).T @ a if by_rows else (g.T @ a) @ small
                error = relative_error(actual, equations.zeta_star(g.double(), a.double(), 1 / (rows * scale)))
                worst = max(worst, error / (trace * 2**-24))
    assert worst <= 2
    assert 2 * cpu.FLOAT32_TRACE * 2**-24 <= 1e-4


@pytest.mark.parametrize("options", [{"max_rows": 7}, {"sharing": "reduce"}, {"when": "step"}], ids=str)
def test_a_gradient_along_what_is_damped_most_reaches_1e_4(options: dict[str, Any]) -> None:
    """Fewer rows than features, all alike: the conditioned gradient is a difference, much smaller than its parts."""
    for trace in (10, 30, 100, 200, 500):
        direction = torch.rand(14)
        a = torch.rand(7, 1) * direction
        a = a[:, None] if "sharing" in options else a
        damping = a.square().sum().item() / len(a) / trace
        layer = nn.Linear(14, 40, bias=False)
        handle = isaac.attach(layer, damping, **options)
        g = torch.rand(*a.shape[:-1], 40)
        layer(a).backward(g)
        if "when" in options:
            handle.step()
        expected = equations.zeta_star(g.reshape(7, 40).double(), a.reshape(7, 14).double(), damping)
        assert_close(layer.weight.grad, expected, 1e-4)


@pytest.mark.parametrize("when", ["backward", "step"])
@pytest.mark.parametrize(("samples", "channels", "trace"), [(36, 6, 20), (10, 6, 90), (900, 6, 3), (200, 20, 500), (5, 12, 90)])
def test_long_sums_reach_1e_4(samples: int, channels: int, trace: float, when: Literal["backward", "step"]) -> None:
    """A convolution has many more rows than features, and each product that float32 adds to thousands is rounded.

    Where rows repeat, as those of a padded image do, always in the same direction.
    """
    for seed in range(8 if samples < 100 else 2):
        torch.manual_seed(seed)
        x = ((torch.randn(samples, channels, 8, 9) + 1) * torch.rand(channels)[:, None, None] ** 2).relu()
        x[..., :7] = torch.rand(channels)[:, None, None]
        a = x.movedim(1, -1).reshape(-1, channels)
        damping = a.square().sum().item() / len(a) / trace
        layer, plain = (nn.Conv2d(channels, 3, 1, bias=False) for _ in range(2))
        g = torch.randn(samples, 3, 8, 9) / len(a)
        handle = isaac.attach(layer, damping, when=when)
        for each in (layer, plain):
            each(x).backward(g)
        if when == "step":
            handle.step()
        assert layer.weight.grad is not None
        assert plain.weight.grad is not None
        conditioner = equations.root_conditioner(a.double().T @ a.double() / len(a), damping)
        assert_close(layer.weight.grad.flatten(1), plain.weight.grad.flatten(1).double() @ conditioner, 1e-4)


@pytest.mark.parametrize(("samples", "outputs"), [(20, 50), (50, 20), (1, 8), (60, 60)])
def test_float32_zeta_in_training_agrees_with_the_equations(samples: int, outputs: int) -> None:
    g, gbar, a = torch.randn(20, outputs), torch.randn(samples, outputs), torch.randn(20, 33)
    for output_damping in (1e-3, 0.1, 10.0):
        for damping in (1e-4, 0.1, 10.0):
            layer = nn.Linear(33, outputs, bias=False)
            handle = isaac.attach(layer, damping, output_damping=output_damping)
            output = layer(a)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("isaac_newton.core.outputs.output_rows", lambda *args: gbar)
                handle.backward((output * g).sum(), output, nn.MSELoss())
            expected = equations.zeta(g.double(), gbar.double(), a.double(), output_damping, damping)
            assert_close(layer.weight.grad, expected, 1e-4)
            assert handle.statistics[""].fallbacks == 0


def test_a_failed_factorization_falls_back_to_a_larger_damping(monkeypatch: pytest.MonkeyPatch) -> None:
    g, a = torch.randn(6, 3), torch.randn(6, 9)
    factorize, failures = torch.linalg.cholesky_ex, iter([True])

    def failing_once(matrix: Tensor) -> tuple[Tensor, Tensor]:
        factor, info = factorize(matrix)
        return factor, torch.ones_like(info) if next(failures, False) else info

    monkeypatch.setattr(torch.linalg, "cholesky_ex", failing_once)
    with pytest.warns(RuntimeWarning, match="larger damping"):
        actual, fallbacks = in_training(g, a, 0.1)
    assert fallbacks == 1
    assert_close(actual, equations.zeta_star(g, a, 0.1), 1e-4)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rows", [4, 40])
def test_non_finite_inputs_give_what_torch_gives(poison: float, rows: int) -> None:
    g, a = torch.randn(rows, 3), torch.randn(rows, 9)
    a[2, 5] = poison
    actual, fallbacks = in_training(g, a, 0.1)
    torch.testing.assert_close(actual, g.T @ a, equal_nan=True)
    assert fallbacks == 0


def test_inputs_whose_squares_overflow_float32_are_still_conditioned() -> None:
    g, a = torch.randn(4, 3), torch.randn(4, 9) * 1e25
    assert_close(in_training(g, a, 1.0)[0], equations.zeta_star(g.double(), a.double(), 1.0), 1e-4)


@pytest.mark.parametrize("fails", [False, True])
def test_inverse_and_difference_are_formed_without_rounding_and_the_setting_comes_back(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends: Any = torch.backends
    seen = []
    addmm = torch.addmm

    def recording(*args: Any, **options: Any) -> Tensor:
        seen.append(backends.mkldnn.matmul.fp32_precision)
        if fails:
            raise RuntimeError("no memory")
        return addmm(*args, **options)

    layer = nn.Conv2d(4, 3, 3)
    isaac.attach(layer, 0.1, sharing="reduce")
    loss = layer(torch.randn(5, 4, 6, 6)).square().mean()
    before = torch.get_float32_matmul_precision()
    monkeypatch.setattr(torch, "addmm", recording)
    try:
        torch.set_float32_matmul_precision("medium")
        if fails:
            with pytest.raises(RuntimeError, match="no memory"):
                loss.backward()
        else:
            loss.backward()
        assert seen == ["ieee"] * (1 if fails else 2)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("shape", [(1, 30, 70), (3, 20, 41)])
def test_a_difference_is_the_same_with_rows_that_were_multiplied_before(shape: tuple[int, int, int]) -> None:
    """In a captured step P r is there when the gradient comes."""
    torch.manual_seed(0)
    r, gradient = torch.randn(shape, dtype=torch.float64), torch.randn(shape[0], 9, shape[2], dtype=torch.float64)
    r, gradient = (r[0], gradient[0]) if shape[0] == 1 else (r, gradient)
    (made,) = conditioner.invert([Rows(r, shape[1], in_difference=True)], 0.2, "")
    multiplied = dataclasses.replace(made, found=made.found._replace(multiplied=made.inverse @ r))
    exact = gradient @ torch.linalg.inv(torch.eye(shape[2], dtype=torch.float64) + r.mT @ r / (shape[1] * 0.2))
    for by in (made, multiplied):
        assert_close(conditioner.multiply([gradient], [by])[0], exact, 1e-12)


@pytest.mark.parametrize("shape", [(1, 8, 300), (2, 5, 40), (1, 30, 1000)])
@pytest.mark.parametrize("at_once", [1, 4_000, 262_144])
def test_a_gradient_is_widened_piece_by_piece(
    shape: tuple[int, int, int], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_AT_ONCE", at_once)
    torch.manual_seed(0)
    r, gradient = torch.randn(shape) + 3, torch.randn(shape[0], 17, shape[2])
    within = gradient @ r.mT @ r
    gradient = within + 0.01 * within.std() * torch.randn_like(within)  # most of it goes
    r, gradient = (r[0], gradient[0]) if shape[0] == 1 else (r, gradient)
    (made,) = conditioner.invert([Rows(r, shape[1], in_difference=True)], 1e-3, "")
    inverse = made.inverse
    assert inverse is not None
    assert inverse.dtype is torch.float64, "float32 would not do here"
    wide = r.double()
    exact = gradient.double() - gradient.double() @ wide.mT @ inverse @ wide
    for own in (gradient, gradient.mT.contiguous().mT):
        (result,) = conditioner.multiply([own], [made])
        assert result.dtype is torch.float32
        # No digit is lost before the last rounding.
        assert_close(result, exact, 1e-7)
    with_graph = gradient.clone().requires_grad_()
    conditioner.multiply([with_graph], [made])[0].sum().backward()
    assert_close(with_graph.grad, torch.ones_like(exact) - torch.ones_like(exact) @ wide.mT @ inverse @ wide, 1e-6)
