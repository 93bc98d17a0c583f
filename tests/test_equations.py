"""The equations agree with the authors' values and with the paper's theorems."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import reference
from isaac_newton import equations
from reference import TOLERANCE, assert_close, relative_error

GOLDEN = np.load(Path(__file__).parent / "data" / "official_linear.npz")
CASES = sorted({key.split("/")[0] for key in GOLDEN})

sizes = st.integers(1, 24)
dampings = st.floats(-6, 6).map(lambda exponent: 10.0**exponent)
dtypes = st.sampled_from([torch.float64, torch.float32])


@st.composite
def layers(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """g, ḡ and a of a layer: any shapes, more or fewer rows than features, repeated and zero rows now and then."""
    rows, samples, inputs, outputs = draw(sizes), draw(sizes), draw(sizes), draw(sizes)
    dtype = draw(dtypes)
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    a = torch.randn(rows, inputs, generator=random, dtype=dtype)
    if draw(st.booleans()):
        a = a[torch.randint(rows, (rows,), generator=random)]
    if draw(st.booleans()):
        a[0] = 0
    g = torch.randn(rows, outputs, generator=random, dtype=dtype) / rows
    gbar = torch.randn(samples, outputs, generator=random, dtype=dtype)
    return g, gbar, a


def golden(case: str, dtype: torch.dtype) -> dict[str, Tensor]:
    values = {key.split("/")[1]: GOLDEN[key] for key in GOLDEN if key.startswith(case + "/")}
    return {name: torch.from_numpy(value).to(dtype) for name, value in values.items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_authors_code(case: str, dtype: torch.dtype) -> None:
    value, exact, damping = golden(case, dtype), golden(case, torch.float64), float(case.split("@")[1])
    star = equations.zeta_star(value["g"], value["a"], damping)
    assert_close(star, exact["grad_weight"], TOLERANCE[dtype])
    assert_close(value["g"].T @ equations.condition_rows(value["a"], damping), exact["grad_weight"], TOLERANCE[dtype])
    full = equations.zeta(value["g"], value["gbar"], value["a"], 3 * damping, damping)
    assert_close(full, exact["zeta"], TOLERANCE[dtype])
    assert star.dtype == full.dtype == dtype


@given(layers(), dampings, dampings)
def test_theorem_1_zeta_is_the_dense_kronecker_formula(
    layer: tuple[Tensor, Tensor, Tensor], output_damping: float, damping: float
) -> None:
    g, gbar, a = layer
    expected = reference.zeta(g, gbar, a, output_damping, damping)
    actual = equations.zeta(g.double(), gbar.double(), a.double(), output_damping, damping)
    # The reference inverts one matrix of condition κ(left) · κ(right); that product, not ours, limits the agreement.
    condition = (1 + gbar.square().sum() / output_damping) * (1 + a.square().sum() / damping)
    assert_close(actual, expected, max(1e-9, 1e-15 * condition.item()))
    assert_close(equations.zeta(g, gbar, a, output_damping, damping), actual, TOLERANCE[g.dtype])


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**31))
def test_theorem_1_small_dampings_give_the_kfac_gauss_newton_step(inputs: int, outputs: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    rows = 8 * max(inputs, outputs)
    a, g, gbar = (torch.randn(rows, size, generator=random, dtype=torch.float64) for size in (inputs, outputs, outputs))
    tiny = 1e-10
    step = torch.linalg.inv(gbar.T @ gbar / rows) @ (g.T @ a) @ torch.linalg.inv(a.T @ a / rows)
    assert_close(equations.zeta(g, gbar, a, tiny, tiny) / tiny**2, step, 1e-6)
    assert_close(equations.kfac(g, gbar, a, tiny), step, 1e-6)


@given(layers())
def test_theorem_1_large_dampings_give_the_gradient(layer: tuple[Tensor, Tensor, Tensor]) -> None:
    g, gbar, a = (x.double() for x in layer)
    assert_close(equations.zeta(g, gbar, a, 1e13, 1e13), g.T @ a)
    assert_close(equations.zeta(g, gbar, a, math.inf, math.inf), g.T @ a)


@given(layers(), dampings)
def test_zeta_with_equal_dampings_is_kfac(layer: tuple[Tensor, Tensor, Tensor], damping: float) -> None:
    g, gbar, a = (x.double() for x in layer)
    condition = (1 + gbar.square().sum() / damping) * (1 + a.square().sum() / damping)
    expected = equations.zeta(g, gbar, a, damping, damping) / damping**2
    assert_close(equations.kfac(g, gbar, a, damping), expected, max(1e-9, 1e-15 * condition.item()))


@given(layers(), dampings, dampings)
def test_theorem_2_the_step_never_points_uphill(
    layer: tuple[Tensor, Tensor, Tensor], output_damping: float, damping: float
) -> None:
    g, gbar, a = layer
    gradient = (g.T @ a).double()
    for step in (
        equations.zeta(g, gbar, a, output_damping, damping),
        equations.zeta_star(g, a, damping),
        equations.kfac(g, gbar, a, damping),
    ):
        slack = 8 * torch.finfo(g.dtype).eps * (gradient.norm() * step.double().norm()).item()
        assert (gradient * step.double()).sum().item() >= -slack


@given(layers(), dampings)
def test_theorem_3_large_output_damping_gives_zeta_star(layer: tuple[Tensor, Tensor, Tensor], damping: float) -> None:
    g, gbar, a = (x.double() for x in layer)
    star = equations.zeta_star(g, a, damping)
    assert_close(equations.zeta(g, gbar, a, 1e13, damping), star)
    assert torch.equal(equations.zeta(g, gbar, a, math.inf, damping), star)


@given(layers(), dampings)
def test_zeta_star_is_the_definition(layer: tuple[Tensor, Tensor, Tensor], damping: float) -> None:
    g, _, a = layer
    expected = reference.zeta_star(g, a, damping)
    condition = 1 + a.square().sum().item() / damping
    assert_close(equations.zeta_star(g.double(), a.double(), damping), expected, max(1e-9, 1e-15 * condition))
    assert_close(g.double().T @ equations.condition_rows(a.double(), damping), expected, max(1e-9, 1e-15 * condition))


@given(sizes, st.integers(1, 5), st.integers(1, 5), dampings, st.integers(0, 2**31), st.booleans())
def test_theorem_4_zeta_star_is_the_gauss_newton_step_of_the_last_layer(
    rows: int, inputs: int, outputs: int, damping: float, seed: int, deep: bool
) -> None:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=random, dtype=torch.float64)
    y = torch.randn(rows, outputs, generator=random, dtype=torch.float64)
    hidden = torch.randn(inputs, inputs, generator=random, dtype=torch.float64)
    a = torch.tanh(x @ hidden) if deep else x
    weight = torch.randn(outputs, inputs, generator=random, dtype=torch.float64)

    def network(flat: Tensor) -> Tensor:
        return a @ flat.reshape(outputs, inputs).T

    def loss(prediction: Tensor) -> Tensor:
        return 0.5 * (prediction - y).square().sum(1).mean()

    jacobian = torch.autograd.functional.jacobian(network, weight.reshape(-1)).reshape(rows * outputs, -1)
    hessian = torch.autograd.functional.hessian(loss, network(weight.reshape(-1))).reshape(rows * outputs, -1)
    ggn = jacobian.T @ hessian @ jacobian
    gradient = torch.autograd.functional.jacobian(lambda flat: loss(network(flat)), weight.reshape(-1))
    step = damping * torch.linalg.solve(ggn + damping * torch.eye(len(ggn), dtype=torch.float64), gradient)
    g = torch.autograd.functional.jacobian(loss, network(weight.reshape(-1)))
    condition = 1 + a.square().sum().item() / damping
    assert_close(equations.zeta_star(g, a, damping).reshape(-1), step, max(1e-9, 1e-15 * condition))


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(0, 3, 2), (4, 0, 2), (4, 3, 0), (0, 0, 0)])
def test_empty_tensors_give_the_empty_or_zero_gradient(rows: int, inputs: int, outputs: int) -> None:
    g, a, gbar = torch.ones(rows, outputs), torch.ones(rows, inputs), torch.ones(rows, outputs)
    assert equations.condition_rows(a, 1.0).shape == a.shape
    for result in (equations.zeta_star(g, a, 1.0), equations.zeta(g, gbar, a, 1.0, 1.0), equations.kfac(g, gbar, a, 1.0)):
        assert result.shape == (outputs, inputs)
        assert not result.any()


def test_no_samples_leave_the_output_side_alone() -> None:
    g, a = torch.randn(4, 3), torch.randn(4, 5)
    assert torch.equal(equations.zeta(g, torch.empty(0, 3), a, 0.1, 0.1), equations.zeta_star(g, a, 0.1))


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (1, 4), (4, 4)])
def test_is_differentiable(shape: tuple[int, int]) -> None:
    a = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    g, gbar = (torch.randn(shape[0], 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda a: equations.condition_rows(a, 0.3), (a,))
    assert torch.autograd.gradcheck(lambda g, a: equations.zeta_star(g, a, 0.3), (g, a))
    assert torch.autograd.gradcheck(lambda g, gbar, a: equations.zeta(g, gbar, a, 0.5, 0.3), (g, gbar, a))
    assert torch.autograd.gradcheck(lambda g, gbar, a: equations.kfac(g, gbar, a, 0.3), (g, gbar, a))


@pytest.mark.parametrize("shape", [(5, 9), (9, 5)])
def test_vmap_over_dampings_equals_a_loop(shape: tuple[int, int]) -> None:
    a, g, gbar = torch.randn(shape), torch.randn(shape[0], 4), torch.randn(7, 4)
    dampings = torch.logspace(-3, 3, 5)
    star = torch.vmap(lambda damping: equations.zeta_star(g, a, damping))(dampings)
    full = torch.vmap(lambda damping: equations.zeta(g, gbar, a, 2 * damping, damping))(dampings)
    for i, damping in enumerate(dampings.tolist()):
        assert_close(star[i], equations.zeta_star(g, a, damping), 1e-6)
        assert_close(full[i], equations.zeta(g, gbar, a, 2 * damping, damping), 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_computed_precisely_and_come_back_as_they_came(dtype: torch.dtype) -> None:
    g, a = torch.randn(6, 3).to(dtype), torch.randn(6, 9).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = equations.zeta_star(g, a, 0.1)
    assert actual.dtype == dtype
    assert relative_error(actual, reference.zeta_star(g, a, 0.1)) <= TOLERANCE[dtype]


def test_what_is_not_finite_stays_visible() -> None:
    a = torch.randn(4, 6)
    a[1, 2] = math.inf
    assert not equations.zeta_star(torch.randn(4, 3), a, 1.0).isfinite().all()
