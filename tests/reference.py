"""Slow and obvious float64 versions of everything the library computes, and the tolerances of the comparisons."""

import torch
from torch import Tensor

#: Largest relative error allowed between the library and the reference, by the dtype the library works in.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖; the plain norm of the difference where the expected value is zero."""
    actual, expected = actual.detach().double(), expected.detach().double()
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    scale = expected.norm().item()
    difference = (actual - expected).norm().item()
    return difference / scale if scale else difference


def assert_close(actual: Tensor | None, expected: Tensor, tolerance: float = TOLERANCE[torch.float64]) -> None:
    assert actual is not None, "there is no gradient"
    error = relative_error(actual, expected)
    assert error <= tolerance, f"relative error {error:.2e}, allowed {tolerance:.0e}"


def zeta_star(g: Tensor, a: Tensor, damping: float) -> Tensor:
    """λ gᵀa (aᵀa/b + λI)⁻¹: the definition with an identity for the output factor, by a dense inverse."""
    g, a = g.double(), a.double()
    factor = a.T @ a / a.shape[0] + damping * torch.eye(a.shape[1], dtype=torch.float64)
    return damping * (g.T @ a) @ torch.linalg.inv(factor)


def zeta(g: Tensor, gbar: Tensor, a: Tensor, output_damping: float, damping: float) -> Tensor:
    """Eq. def:zeta with the Kronecker product written out and inverted as one matrix."""
    g, gbar, a = g.double(), gbar.double(), a.double()
    rows = a.shape[0]
    left = gbar.T @ gbar / rows + output_damping * torch.eye(gbar.shape[1], dtype=torch.float64)
    right = a.T @ a / rows + damping * torch.eye(a.shape[1], dtype=torch.float64)
    gradient = g.T @ a
    step = torch.linalg.solve(torch.kron(left, right), gradient.reshape(-1))
    return (output_damping * damping * step).reshape(gradient.shape)


def output_factor(columns: list[Tensor], terms: int) -> Tensor:
    """Curvature with respect to a layer's outputs, summed sample by sample: 1/N Σ ḡᵀḡ, one column at a time."""
    total = torch.zeros(columns[0].shape[-1], columns[0].shape[-1], dtype=torch.float64)
    for column in columns:
        for row in column.double().reshape(-1, column.shape[-1]):
            total += torch.outer(row, row)
    return total / terms
