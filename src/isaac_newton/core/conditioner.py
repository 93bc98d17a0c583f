"""From rows to what multiplies a gradient (`invert`), and the multiplication itself (`multiply`, `multiply_own`), over lists.

The precision policy is here: linear algebra in float32 or better, whatever autocast says. A factorization that fails falls back
to a larger damping, then to the plain gradient.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from isaac_newton import kernels
from isaac_newton.core.rows import Rows, cast, working_dtype
from isaac_newton.kernels import cpu
from isaac_newton.math import equations
from isaac_newton.math.damping import relative_damping
from isaac_newton.torch_private import has_values

__all__ = ["Conditioner", "invert", "multiply", "multiply_own"]

#: Up to this size Triton inverts; larger ones are torch's in float64.
MOST_SWEPT = 1024
#: Up to so many features, rows of the own form are multiplied by their inverse however few the outputs are.
_FEW_FEATURES = 512
_PRECISE = (torch.float32, torch.float64)


@dataclass(slots=True)
class Conditioner:
    """(I + rᵀr/(kλ))⁻¹ on the smaller of the two sides: P = (I + r rᵀ/(kλ))⁻¹ or Q, the matrix itself; without either: plain.

    In a difference (Woodbury), ∇ − ∇rᵀ P r, both P and P r, where that is `multiplied`, are divided by kλ.
    """

    rows: Rows
    inverse: Float[Tensor, "*groups small small"] | None = None
    multiplied: Float[Tensor, "*groups rows in"] | None = None
    damping: float | Tensor = math.inf
    failures: int | Tensor = 0
    #: Whether a gradient that was multiplied had too few digits for the difference.
    lost_digits: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether it changes nothing."""
        return self.inverse is None and self.multiplied is None


def invert(rows: Sequence[Rows], strength: float | Tensor, relative: bool, *, early: bool = False) -> list[Conditioner]:
    """Stages 2 and 3: the conditioner of each of these rows; λ is the strength, or that times their mean square.

    `early`: in a forward pass that is captured; then rows are multiplied where the gradient will not have to wait for them.
    """
    found: list[Conditioner | None] = [None] * len(rows)
    small: list[int] = []
    on_cpu: dict[tuple[int, bool], list[int]] = {}
    plain = isinstance(strength, float) and strength == math.inf
    for number, one in enumerate(rows):
        r = one.r
        if plain or 0 in r.shape:
            found[number] = Conditioner(one)
        elif r.dim() == 2 and kernels.can_group(r) and one.counted is None and min(r.shape) <= MOST_SWEPT:
            small.append(number)
        elif r.dim() == 2 and r.device.type == "cpu" and one.counted is None and not kernels.is_differentiable(r):
            on_cpu.setdefault((min(r.shape), one.in_difference), []).append(number)
        else:
            found[number] = _inverted_by_torch(one, strength, relative)
    if small:
        _invert_by_triton(rows, small, strength, relative, found, early)
    for (_, in_difference), numbers in on_cpu.items():
        _invert_on_cpu(rows, numbers, float(strength), relative, in_difference, found)
    return found  # type: ignore[return-value]


def _invert_by_triton(
    rows: Sequence[Rows],
    numbers: Sequence[int],
    strength: float | Tensor,
    relative: bool,
    found: list[Conditioner | None],
    early: bool,
) -> None:
    from isaac_newton.kernels import inverse_large, inverse_small

    for module in (inverse_small, inverse_large):
        mine = [n for n in numbers if (min(rows[n].r.shape) <= inverse_small.MOST) == (module is inverse_small)]
        xs = [rows[n].r.contiguous() for n in mine]
        kinds = [_kind(rows[n], early) for n in mine]
        for number, made in zip(mine, module.inverses(xs, strength, "mean" if relative else "", kinds), strict=True):
            found[number] = Conditioner(rows[number], made.inverse, made.multiplied, made.damping)


def _kind(rows: Rows, early: bool) -> int:
    """What the kernels shall compute: the inverse, or rows that are multiplied by it as well."""
    from isaac_newton.kernels.inverse_small import MULTIPLIED, SCALED

    count, features = rows.r.shape
    if rows.in_difference:
        return MULTIPLIED + SCALED
    if count >= features or early:
        return 0
    # Multiplied rows save a product in the backward pass, but take the memory of the rows instead of the outputs'.
    return MULTIPLIED if features <= max(rows.outputs, _FEW_FEATURES) else 0


def _invert_on_cpu(
    rows: Sequence[Rows],
    numbers: Sequence[int],
    strength: float,
    relative: bool,
    in_difference: bool,
    found: list[Conditioner | None],
) -> None:
    """Inverses of one size by one factorization."""
    xs, dampings, scales = [], [], []
    for number in numbers:
        r = cast(rows[number].r, working_dtype(rows[number].r.dtype))
        xs.append(r if r.shape[0] < r.shape[1] else r.mT)
        dampings.append(relative_damping(r.square().mean(), strength).item() if relative else strength)
        scales.append(1 / (r.shape[0] * dampings[-1]))
    results = cpu.inverses(xs, scales, in_difference)
    for number, damping, scale, (inverse, failures) in zip(numbers, dampings, scales, results, strict=True):
        if inverse is not None and in_difference:
            inverse = scale * inverse
        found[number] = Conditioner(rows[number], inverse, None, damping, failures)


def _inverted_by_torch(one: Rows, strength: float | Tensor, relative: bool) -> Conditioner:
    """Groups, what the kernels do not take, and what torch has to differentiate, batch or trace: in float64 where needed."""
    r = cast(one.r, working_dtype(one.r.dtype))
    count, features = r.shape[-2:]
    damping: float | Tensor = relative_damping(r.square().mean(), strength) if relative else strength
    if one.counted is not None and not relative:
        # Of rows that do not count, all of which are zero, there might as well be none.
        damping = damping * one.counted.to(r.dtype).mean().clamp_min(1 / count)
    x = r if count < features else r.mT
    failures: int | Tensor = 0
    inverse: Tensor | None
    if r.device.type == "cpu" and not kernels.is_differentiable(r):
        damping = float(damping)
        scale: float | Tensor = 1 / (count * damping)
        inverse, failures = cpu.inverse(x, scale, one.in_difference)  # type: ignore[arg-type]
    else:
        scale = 1 / (count * damping)
        wide = equations.inverse(equations.precise(x), scale)
        failed = equations.is_nan(wide)
        identity = torch.eye(x.shape[-2], dtype=wide.dtype, device=x.device)
        inverse = torch.where(failed, 0 * identity if one.in_difference else identity, wide)
        if has_values(x):
            failures = (failed.any() & x.isfinite().all()).long()
            # A GPU would wait for values that decide the precision.
            inverse = inverse if kernels.is_differentiable(r) else cast(inverse, r.dtype)
    inverse = scale * inverse if one.in_difference and inverse is not None else inverse
    return Conditioner(one, inverse, None, damping, failures)


def multiply(
    gradients: Sequence[Float[Tensor, "*groups out in"]], by: Sequence[Conditioner], *, in_place: bool = False
) -> list[Float[Tensor, "*groups out in"]]:
    """Stage 4: ∇ (I + rᵀr/(kλ))⁻¹ for each gradient; `in_place` allows to write to their memory."""
    results = list(gradients)
    together: list[int] = []
    for number, (gradient, one) in enumerate(zip(gradients, by, strict=True)):
        if one.multiplied is not None and _can_subtract(gradient, one.rows.r):
            together.append(number)
        elif not one.is_plain and gradient.numel():
            results[number] = _multiplied_by_torch(gradient, one, in_place)
    if together:
        from isaac_newton.kernels.subtract import subtract

        multiplied = [product for n in together if (product := by[n].multiplied) is not None]
        done = subtract([gradients[n] for n in together], [by[n].rows.r for n in together], multiplied, in_place=in_place)
        for number, result in zip(together, done, strict=True):
            results[number] = result
    return results


#: Of the kernel that subtracts.
_MOST_SUBTRACTED = 256


def _can_subtract(gradient: Tensor, r: Tensor) -> bool:
    if r.dtype is not torch.float32 or len(r) > _MOST_SUBTRACTED or not kernels.can_group(gradient):
        return False
    return 1 in gradient.stride() and gradient.numel() > 0


def _multiplied_by_torch(gradient: Tensor, by: Conditioner, in_place: bool) -> Tensor:
    r, inverse, multiplied = by.rows.r, by.inverse, by.multiplied
    if r.shape[-2] >= r.shape[-1]:
        assert inverse is not None
        product = cast(gradient, inverse.dtype) @ inverse
        # Those of a bucket are there together: the memory of the plain gradients serves the others.
        return gradient.copy_(product) if in_place and gradient.device.type == "cpu" else product
    # Woodbury. The difference is inherent: the gradient need not lie in the span of r. It can be much smaller than its parts,
    # so that these are not rounded, whatever torch may do to products (TF32).
    dtype = r.dtype if inverse is None else inverse.dtype
    r = cast(r, dtype)
    wider = dtype is torch.float64 and gradient.dtype is not dtype
    if wider and inverse is not None and gradient.device.type == "cpu" and not kernels.is_differentiable(gradient, r):
        strength, spanned = r.shape[-2] * float(by.damping), r.shape[-2] >= by.rows.total
        done, lost = cpu.subtract(gradient, r, inverse, strength, spanned=spanned, in_place=in_place)
        by.lost_digits |= lost
        return done
    in_place = in_place and gradient.dtype is dtype and gradient.is_contiguous()
    gradient = cast(gradient, dtype)
    with cpu.unrounded(r) if has_values(r) else cpu.NOTHING:
        seen = gradient @ r.mT
        if multiplied is not None:
            r = multiplied
        elif inverse is not None:
            seen = seen @ inverse
        if r.dim() == 3:
            return torch.baddbmm(gradient, seen, r, alpha=-1)
        return torch.addmm(gradient, seen, r, alpha=-1, out=gradient if in_place else None)


def multiply_own(g: Float[Tensor, "rows out"], by: Conditioner) -> Float[Tensor, "out in"]:
    """gᵀ P a, or gᵀ a Q: the form of a linear layer whose rows are those of its conditioner, without a difference."""
    a, inverse = by.rows.r, by.inverse
    a = cast(a, working_dtype(a.dtype))
    g = cast(g, a.dtype)
    if by.multiplied is not None:
        return torch.mm(g.mT, cast(by.multiplied, a.dtype))
    if inverse is None:
        return torch.mm(g.mT, a)
    (count, features), outputs = a.shape, g.shape[1]
    if inverse.dtype is not a.dtype:
        # The inverse needed float64. Conditioned rows can be rounded, since nothing cancels in them afterwards.
        wide = a.to(inverse.dtype)
        if count < features:
            return torch.mm(g.mT, torch.mm(inverse, wide).to(a.dtype))
        if features <= outputs:
            return torch.mm(g.mT, torch.mm(wide, inverse).to(a.dtype))
        return torch.mm(torch.mm(g.to(wide.dtype).mT, wide), inverse).to(a.dtype)
    if count >= features:
        return torch.mm(torch.mm(g.mT, a), inverse)
    if outputs <= features:
        return torch.mm(torch.mm(inverse, g).mT, a)
    return torch.mm(g.mT, torch.mm(inverse, a))
