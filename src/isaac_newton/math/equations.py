r"""The paper's equations as pure functions: tensors in, tensors out.

Notation, used throughout: a layer has $n$ inputs and $m$ outputs and sees $b$ rows.

| here             | paper              | shape       | meaning                                                     |
|------------------|--------------------|-------------|-------------------------------------------------------------|
| `a`              | $\mathbf{a}$       | $b × n$     | inputs of the layer                                         |
| `g`              | $\mathbf{g}$       | $b × m$     | gradient of the mean loss with respect to the outputs       |
| `gbar`           | $\bar{\mathbf{g}}$ | $rb × m$    | rows with $\bar g^\top \bar g / b ≈ E[\bar g^\top \bar g]$  |
| `damping`        | $λ_a$              |             | regularizes $a^\top a / b$                                  |
| `output_damping` | $λ_g$              |             | regularizes $\bar g^\top \bar g / b$                        |

The printed forms contain $I - X (I + X)^{-1}$, a difference that cancels when $X$ is large. It equals $(I + X)^{-1}$, which
is what is computed here: one Cholesky factorization, on the smaller of the two sides, because
$(I + c\,a a^\top)^{-1} a = a\,(I + c\,a^\top a)^{-1}$.

Everything runs in float64 inside and returns the dtype that came in. The smallest eigenvalue of $I + X$ is 1 and the largest
can be $10^9$; float32 would leave nothing of the small ones. What training calls is `kernels`, which stays in float32 while
that is safe. Nothing here looks at a value, so all of it works under `torch.func`, `torch.compile` and autograd.
"""

import math
import numbers

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from isaac_newton import torch_private

__all__ = ["condition_rows", "kfac", "zeta", "zeta_star"]


def condition_rows(a: Float[Tensor, "rows in"], damping: float | Tensor) -> Float[Tensor, "rows in"]:
    r"""The inputs as ζ* sees them: $(I + \tfrac{1}{bλ_a} a a^\top)^{-1} a$ (the right-hand factor of Theorem 3).

    Args:
        a: Inputs of the layer, one row per example.
        damping: $λ_a > 0$. `math.inf` gives `a` back.
    """
    check_damping(damping)
    _check_matrices(a=a)
    rows, features = a.shape
    if 0 in a.shape:
        return a
    x = precise(a)
    if rows < features:
        return (inverse(x, _scale(rows, damping)) @ x).to(a.dtype)
    return (x @ inverse(x.mT, _scale(rows, damping))).to(a.dtype)


def zeta_star(g: Float[Tensor, "rows out"], a: Float[Tensor, "rows in"], damping: float | Tensor) -> Float[Tensor, "out in"]:
    r"""Weight gradient of a linear layer, conditioned by the layer's inputs (Theorem 3).

    $ζ^* = g^\top (I + \tfrac{1}{bλ_a} a a^\top)^{-1} a$, solved on the smaller of the two sides.

    Args:
        g: Gradient of the loss with respect to the layer's output, one row per example.
        a: Inputs of the layer, one row per example.
        damping: $λ_a > 0$. Large values give the plain gradient $g^\top a$.
    """
    check_damping(damping)
    _check_matrices(g=g, a=a)
    return (precise(g).mT @ condition_rows(precise(a), damping)).to(torch.promote_types(g.dtype, a.dtype))


def zeta(
    g: Float[Tensor, "rows out"],
    gbar: Float[Tensor, "samples out"],
    a: Float[Tensor, "rows in"],
    output_damping: float | Tensor,
    damping: float | Tensor,
) -> Float[Tensor, "out in"]:
    r"""The two-parameter step of Theorem 1, of which K-FAC and ζ* are special cases.

    $ζ = (I + \tfrac{1}{bλ_g} \bar g^\top \bar g)^{-1}\, g^\top\, (I + \tfrac{1}{bλ_a} a a^\top)^{-1} a$.

    Args:
        g: Gradient of the mean loss with respect to the layer's output, one row per example.
        gbar: Per-example gradients, not divided by the batch size, any number of rows, scaled so that
            $\bar g^\top \bar g / b$ estimates the expectation; $b$ is the number of rows of `a`.
        a: Inputs of the layer, one row per example.
        output_damping: $λ_g > 0$. `math.inf` gives ζ*.
        damping: $λ_a > 0$.
    """
    check_damping(output_damping, "output_damping")
    _check_matrices(g=g, a=a, gbar=gbar)
    dtype = torch.promote_types(g.dtype, a.dtype)
    g, gbar = precise(g), precise(gbar)
    samples, outputs = gbar.shape
    if a.shape[0] and samples and outputs:
        scale = _scale(a.shape[0], output_damping)
        if samples < outputs:
            # Woodbury. Here the difference is inherent: g need not lie in the span of gbar.
            g = g - scale * (g @ gbar.mT) @ (inverse(gbar, scale) @ gbar)
        else:
            g = g @ inverse(gbar.mT, scale)
    return zeta_star(g, a, damping).to(dtype)


def kfac(
    g: Float[Tensor, "rows out"],
    gbar: Float[Tensor, "samples out"],
    a: Float[Tensor, "rows in"],
    damping: float | Tensor,
) -> Float[Tensor, "out in"]:
    r"""The K-FAC step with both factors formed explicitly (eq. tihonov-gn-method-step).

    $(\bar g^\top \bar g / b + λ I)^{-1}\; g^\top a\; (a^\top a / b + λ I)^{-1}$, which is
    $\tfrac{1}{λ^2} ζ$ at $λ_g = λ_a = λ$: a learning rate $η$ here is $η / λ^2$ there.

    Args:
        g: Gradient of the mean loss with respect to the layer's output, one row per example.
        gbar: As in `zeta`.
        a: Inputs of the layer, one row per example.
        damping: $λ > 0$, the same for both factors.
    """
    check_damping(damping)
    _check_matrices(g=g, a=a, gbar=gbar)
    dtype = torch.promote_types(g.dtype, a.dtype)
    g, gbar, a = precise(g), precise(gbar), precise(a)
    gradient = g.mT @ a
    if 0 in a.shape or g.shape[1] == 0:
        return gradient.to(dtype)
    left = _factor(gbar.mT @ gbar / a.shape[0], damping)
    right = _factor(a.mT @ a / a.shape[0], damping)
    return torch.cholesky_solve(torch.cholesky_solve(gradient, left).mT, right).mT.to(dtype)


def inverse(x: Float[Tensor, "*groups k l"], scale: float | Tensor) -> Float[Tensor, "*groups k k"]:
    r"""$(I + s\,x x^\top)^{-1}$ through one Cholesky factorization; NaN where `x` is not finite."""
    gram = scale * (x @ x.mT)
    return _inverse_of(_factor(gram, 1.0))


def root_conditioner(
    moment: Float[Tensor, "*groups n n"], damping: float | Tensor, power: float = 1.0
) -> Float[Tensor, "*groups n n"]:
    r"""$(I + S / λ_a)^{-p}$ for a second moment $S$ of rows: 1 is ISAAC, ½ whitens halfway, 0 is the identity.

    A gradient multiplied by it from the right is ζ* for $p = 1$ and $S = a^\top a / b$. NaN where `moment` is not finite and
    where it cannot be factorized.
    """
    gram = precise(moment) / damping
    if power == 1.0:
        return _inverse_of(_factor(gram, 1.0))
    finite = gram.isfinite().all(-1).all(-1)[..., None, None]
    # The eigensolver raises where the other one returns NaN.
    try:
        values, vectors = torch.linalg.eigh(torch.where(finite, gram, 0.0))
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return torch.full_like(gram, math.nan)
    scaled = vectors * (1 + values.clamp_min(0)).pow(-power)[..., None, :]
    return torch.where(finite, scaled @ vectors.mT, math.nan)


def is_nan(matrix: Float[Tensor, "*groups k k"]) -> Bool[Tensor, "*groups 1 1"]:
    """Which groups have no inverse: those where `inverse` returned NaN."""
    return ~matrix.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)


def largest_eigenvalue(gram: Float[Tensor, "*groups k k"]) -> Float[Tensor, "*groups"]:
    """An estimate as the kernels make it; 0 for a matrix of zeros.

    Eight products with a vector; the last one's length over that of the one before. It is never above the eigenvalue.
    """
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    matrix = gram / torch.where(trace > 0, trace, 1.0)[..., None, None]
    turns = torch.arange(gram.shape[-1], dtype=torch.float32, device=gram.device) * 0.618034
    # All are positive, as what most inputs have in common, and no two alike, so that rows that cancel do not cancel here.
    vector = (0.5 + turns - turns.floor()).to(gram.dtype).expand(gram.shape[:-1])[..., None]
    length = torch.ones_like(trace)[..., None, None]
    for _ in range(8):
        vector = matrix @ (vector / torch.where(length > 0, length, 1.0))
        length = torch.linalg.vector_norm(vector, dim=-2, keepdim=True)
    return trace * length[..., 0, 0]


def quotient(before: Float[Tensor, ""], after: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """The one over the other, or 1 where one of them is 0 or not finite."""
    found = before / torch.where(after > 0, after, math.inf)
    return torch.where((found > 0) & (found < math.inf), found, 1.0)


def spectrum(x: Float[Tensor, "*groups k l"]) -> Float[Tensor, "*groups small"]:
    r"""Eigenvalues of $x^\top x / k$ in ascending order, all that can differ from 0; NaN where `x` is not finite."""
    x = precise(x)
    gram = (x @ x.mT if x.shape[-2] < x.shape[-1] else x.mT @ x) / max(x.shape[-2], 1)
    finite = gram.isfinite().all(-1).all(-1)[..., None]
    # The eigensolver raises where there is nothing to solve.
    values = torch.linalg.eigvalsh(torch.where(finite[..., None], gram, 0.0)).clamp_min(0)
    return torch.where(finite, values, math.nan)


def _scale(rows: int, damping: float | Tensor) -> float | Tensor:
    """1/(bλ), in float64 also where λ is a tensor or one of NumPy's numbers."""
    return 1 / (rows * (precise(damping) if isinstance(damping, Tensor) else float(damping)))


def precise(x: Tensor) -> Tensor:
    """`x` in float64, or in float32 on devices without it."""
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)


def check_damping(value: object, name: str = "damping") -> None:
    """Refuse what is no damping. Tensors pass unread: looking at one would wait for the device."""
    if isinstance(value, Tensor):
        if value.dim() != 0:
            raise ValueError(f"{name} must be one number, got a tensor of shape {tuple(value.shape)}")
    elif isinstance(value, bool) or not isinstance(value, numbers.Real):  # NumPy's numbers are real numbers too
        raise TypeError(f"{name} must be a number > 0, got {value!r}")
    elif value != value or value <= 0:
        raise ValueError(f"{name} must be > 0, got {value}; use math.inf for the plain gradient")
    else:
        try:
            float(value)
        except OverflowError:
            raise ValueError(f"{name} must fit into a float, got {value}; use math.inf for the plain gradient") from None


def _check_matrices(**matrices: Tensor) -> None:
    """Refuse what is no matrix of floating-point numbers, and what does not belong together."""
    for name, matrix in matrices.items():
        if not isinstance(matrix, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(matrix).__name__}")
        if matrix.dim() != 2 or not matrix.is_floating_point():
            kind = f"{matrix.dtype} of shape {tuple(matrix.shape)}"
            raise ValueError(f"{name} must be a matrix of floating-point numbers with one row per example, got {kind}")
    if "g" in matrices and matrices["g"].shape[0] != matrices["a"].shape[0]:
        raise ValueError(f"g and a must have as many rows, got {matrices['g'].shape[0]} and {matrices['a'].shape[0]}")
    if "gbar" in matrices and matrices["gbar"].shape[1] != matrices["g"].shape[1]:
        raise ValueError(f"gbar and g must have as many columns, got {matrices['gbar'].shape[1]} and {matrices['g'].shape[1]}")


def _factor(gram: Float[Tensor, "*groups k k"], shift: float | Tensor) -> Float[Tensor, "*groups k k"]:
    """Cholesky factor of `gram + shift I`."""
    # The products in `gram` are rounded by about eps · trace, which can outweigh `shift` when rows repeat and make the
    # sum indefinite. Adding as much again is no worse than the rounding was, and the factorization cannot fail.
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    shift = shift + 4 * torch.finfo(gram.dtype).eps * trace
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    factor, info = torch.linalg.cholesky_ex(gram + shift[..., None, None] * identity)
    return torch.where((info == 0)[..., None, None], factor, math.nan)


def _inverse_of(factor: Float[Tensor, "*groups k k"]) -> Float[Tensor, "*groups k k"]:
    """The inverse of the matrix with this Cholesky factor."""
    if not torch_private.differentiates_forward():
        return torch.cholesky_inverse(factor)
    # Its forward-mode derivative is wrong in torch 2.13; that of two triangular solves is not.
    identity = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    return torch.cholesky_solve(identity.expand_as(factor), factor)
