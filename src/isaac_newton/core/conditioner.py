"""From rows to what multiplies a gradient (`invert`), and the multiplication itself (`multiply`, `multiply_own`), over lists.

The precision policy is here: linear algebra in float32 or better, whatever autocast says. A factorization that fails falls back
to a larger damping, then to the plain gradient.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from isaac_newton import kernels
from isaac_newton.core.rows import Rows, cast, working_dtype
from isaac_newton.kernels import GRAM, MOST_SUBTRACTED, MULTIPLIED, SCALED, Inverted, cpu
from isaac_newton.math import equations
from isaac_newton.math.damping import RelativeTo, relative_damping
from isaac_newton.torch_private import has_values

if TYPE_CHECKING:
    from isaac_newton.kernels.inverse_small import Small

__all__ = ["Conditioner", "invert", "is_usual", "multiply", "multiply_own", "share_beyond"]

#: Up to so many features, rows of the own form are multiplied by their inverse however few the outputs are.
_FEW_FEATURES = 512
_IDENTITY = Inverted()
_LEAST_DAMPING = 1e-30


@dataclass(slots=True)
class Conditioner:
    """(I + rᵀr/(kλ))⁻¹ on the smaller of the two sides: P = (I + r rᵀ/(kλ))⁻¹ or Q, the matrix itself; without either: plain.

    In a difference (Woodbury), ∇ − ∇rᵀ P r, both P and P r, where that is `multiplied`, are divided by kλ. With `keeps_norm`
    a gradient is as long afterwards as before; then r rᵀ is in `gram` where a kernel has formed it.
    """

    rows: Rows
    found: "Inverted | Small" = _IDENTITY
    failures: int | Tensor = 0
    keeps_norm: bool = False
    #: Whether a kernel can subtract with it, several gradients at a time.
    subtracts: bool = False
    #: Whether a gradient that was multiplied had too few digits for the difference.
    lost_digits: bool = False

    @property
    def inverse(self) -> Float[Tensor, "*groups small small"] | None:
        """P or Q."""
        return self.found.inverse

    @property
    def damping(self) -> float | Tensor:
        """λ."""
        return self.found.damping

    @property
    def is_plain(self) -> bool:
        """Whether it changes nothing."""
        return self.found.inverse is None and self.found.multiplied is None


def invert(
    rows: Sequence[Rows],
    strength: float | Tensor,
    relative: RelativeTo,
    *,
    early: bool = False,
    keep_norm: bool = False,
) -> list[Conditioner]:
    """Stages 2 and 3: the conditioner of each of these rows; λ is the strength, or that times an eigenvalue of theirs.

    `early`: in a forward pass that is captured; then rows are multiplied where the gradient will not have to wait for them.
    """
    plain = isinstance(strength, float) and strength == math.inf
    able = kernels.groupable([one.r for one in rows])
    members: dict[tuple[str, int], list[int]] = {}
    for number, (one, grouped) in enumerate(zip(rows, able, strict=True)):
        way = ("plain", 0) if plain else _way(one.r.shape, grouped, one.counted is None, one.in_difference)
        members.setdefault(way, []).append(number)
    found: dict[int, Conditioner] = {}
    for (who, _), numbers in members.items():
        some = [rows[number] for number in numbers]
        if who.startswith("inverse"):
            made = _invert_by_triton(who, some, strength, relative, early=early, keep_norm=keep_norm)
        else:
            made = _invert_by_libraries(who, some, strength, relative)
        for conditioner in made:
            conditioner.keeps_norm = keep_norm
        if len(members) == 1:
            return made
        found.update(zip(numbers, made, strict=True))
    return [found[number] for number in range(len(rows))]


@functools.lru_cache(maxsize=4096)
def _way(shape: tuple[int, ...], grouped: bool, all_count: bool, in_difference: bool) -> tuple[str, int]:
    """Who inverts rows of this shape, and which of them a CPU can do by one factorization."""
    if 0 in shape:
        return "plain", 0
    if len(shape) > 2 or not all_count:
        return "torch", 0
    if grouped and min(shape) <= kernels.MOST_INVERTED:
        return ("inverse_small" if min(shape) <= kernels.MOST_SMALL else "inverse_large"), 0
    return "library", 2 * min(shape) + in_difference


def _invert_by_triton(
    module: str, rows: Sequence[Rows], strength: float | Tensor, relative: RelativeTo, *, early: bool, keep_norm: bool
) -> list[Conditioner]:
    from isaac_newton.kernels import inverse_large, inverse_small

    inverses = (inverse_small if module == "inverse_small" else inverse_large).inverses
    kinds = [_kind(one.r.shape, one.in_difference, one.outputs, early, keep_norm) for one in rows]
    xs = [one.r.contiguous() for one in rows]
    found = inverses(xs, strength, relative, kinds)
    wide = torch.float32
    return [
        Conditioner(one, made, 0, keep_norm, kind & SCALED > 0 and r.dtype is wide and r.shape[0] <= MOST_SUBTRACTED)
        for one, r, made, kind in zip(rows, xs, found, kinds, strict=True)
    ]


@functools.lru_cache(maxsize=4096)
def _kind(shape: tuple[int, ...], in_difference: bool, outputs: int, early: bool, keep_norm: bool) -> int:
    """What the kernels shall compute: the inverse, or rows that are multiplied by it as well."""
    count, features = shape
    if in_difference:
        return MULTIPLIED + SCALED + (GRAM if keep_norm else 0)
    if count >= features or early or keep_norm:
        return GRAM if keep_norm and count < features else 0
    # Multiplied rows save a product in the backward pass, but take the memory of the rows instead of the outputs'.
    return MULTIPLIED if features <= max(outputs, _FEW_FEATURES) else 0


def _invert_by_libraries(way: str, rows: Sequence[Rows], strength: float | Tensor, relative: RelativeTo) -> list[Conditioner]:
    if way == "plain":
        return [Conditioner(one) for one in rows]
    if way == "torch" or rows[0].r.device.type != "cpu" or kernels.is_differentiable(*[one.r for one in rows]):
        return [_inverted_by_torch(one, strength, relative) for one in rows]
    return _invert_on_cpu(rows, float(strength), relative)


def _invert_on_cpu(rows: Sequence[Rows], strength: float, relative: RelativeTo) -> list[Conditioner]:
    """Inverses of one size by one factorization."""
    in_difference = rows[0].in_difference
    rs = [cast(one.r, working_dtype(one.r.dtype)) for one in rows]
    dampings = _dampings(rs, strength, relative) if relative else [strength] * len(rs)
    if relative and not all(map(is_usual, dampings)):
        rs = [r.to(torch.float64) for r in rs]
        dampings = _dampings(rs, strength, relative)
    xs, scales = [], []
    for r, damping in zip(rs, dampings, strict=True):
        xs.append(r if r.shape[0] < r.shape[1] else r.mT)
        scales.append(1 / (r.shape[0] * damping))
    # The largest eigenvalue of what is inverted is known where the damping is relative to it.
    results = cpu.inverses(xs, scales, in_difference, 1 / strength if relative == "largest" else math.inf)
    made = []
    for one, damping, scale, (inverse, failures) in zip(rows, dampings, scales, results, strict=True):
        inverse = scale * inverse if inverse is not None and in_difference else inverse
        made.append(Conditioner(one, Inverted(inverse, None, damping), failures))
    return made


def _dampings(rs: Sequence[Float[Tensor, "_ _"]], strength: float, relative: RelativeTo) -> list[float]:
    """λ of each of these rows, whose smaller sides are equal: what they are relative to is found for all at once."""
    if relative == "mean" or len({r.dtype for r in rs}) > 1:
        return [_damping(r, strength, relative).item() for r in rs]
    size = min(rs[0].shape)
    grams = torch.empty(len(rs), size, size, dtype=rs[0].dtype)
    with cpu.unrounded(rs[0]):
        for r, gram in zip(rs, grams, strict=True):
            torch.mm(*((r, r.mT) if r.shape[0] < r.shape[1] else (r.mT, r)), out=gram)
    counts = torch.tensor([r.shape[0] for r in rs], dtype=grams.dtype)
    found: list[float] = relative_damping(equations.largest_eigenvalue(grams) / counts, strength).tolist()
    return found


def _damping(r: Float[Tensor, "*groups rows in"], strength: float | Tensor, relative: RelativeTo) -> Float[Tensor, ""]:
    """λ of these rows: one for all groups."""
    if relative == "mean":
        return relative_damping(r.square().mean(), strength)
    with cpu.unrounded(r) if has_values(r) else cpu.NOTHING:
        gram = r @ r.mT if r.shape[-2] < r.shape[-1] else r.mT @ r
    return relative_damping(equations.largest_eigenvalue(gram).amax() / r.shape[-2], strength)


def is_usual(damping: float) -> bool:
    """Whether a relative λ is that of rows whose squares neither overflow nor vanish in float32."""
    return _LEAST_DAMPING < damping < 1 / _LEAST_DAMPING


def _inverted_by_torch(one: Rows, strength: float | Tensor, relative: RelativeTo) -> Conditioner:
    """Groups, what the kernels do not take, and what torch has to differentiate, batch or trace: in float64 where needed."""
    r = cast(one.r, working_dtype(one.r.dtype))
    count, features = r.shape[-2:]
    damping: float | Tensor = strength
    if relative:
        watched = kernels.is_differentiable(r)
        damping = _damping(equations.precise(r) if watched else r, strength, relative)
        if r.device.type == "cpu" and not watched and not is_usual(float(damping)):
            r = r.to(torch.float64)
            damping = _damping(r, strength, relative)
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
    return Conditioner(one, Inverted(inverse, None, damping), failures)


def multiply(
    gradients: Sequence[Float[Tensor, "*_ _ _"]], by: Sequence[Conditioner], *, in_place: bool = False
) -> list[Float[Tensor, "*_ _ _"]]:
    """Stage 4: ∇ (I + rᵀr/(kλ))⁻¹ for each gradient; `in_place` allows to write to their memory."""
    results = list(gradients)
    able = kernels.groupable(gradients)
    together: list[int] = []
    for number, (gradient, one) in enumerate(zip(gradients, by, strict=True)):
        if one.subtracts and able[number] and 1 in gradient.stride() and gradient.numel() > 0:
            together.append(number)
        elif not one.is_plain and gradient.numel():
            results[number] = _multiplied_by_torch(gradient, one, in_place)
    if together:
        done = _subtracted_by_triton([gradients[n] for n in together], [by[n] for n in together], in_place)
        for number, result in zip(together, done, strict=True):
            results[number] = result
    return results


def _subtracted_by_triton(gradients: Sequence[Tensor], by: Sequence[Conditioner], in_place: bool) -> list[Tensor]:
    from isaac_newton.kernels.subtract import subtract_at

    rs = [one.rows.r for one in by]
    addresses = list(zip(*[one.found.addresses for one in by], strict=True))
    rows = [r.data_ptr() for r in rs]
    kept = [one.keeps_norm for one in by]
    return subtract_at(gradients, [r.shape[0] for r in rs], [rows, *addresses], kept, in_place=in_place)


def _multiplied_by_torch(gradient: Tensor, by: Conditioner, in_place: bool) -> Tensor:
    r, inverse = by.rows.r, by.found.inverse
    if r.shape[-2] < r.shape[-1]:
        return _difference(gradient, by, in_place)
    assert inverse is not None
    product = cast(gradient, inverse.dtype) @ inverse
    product = _as_long_as(gradient, product) if by.keeps_norm else product
    # Those of a bucket are there together: the memory of the plain gradients serves the others.
    return gradient.copy_(product) if in_place and gradient.device.type == "cpu" else product


def _difference(gradient: Tensor, by: Conditioner, in_place: bool) -> Tensor:
    """Woodbury. The difference is inherent: the gradient need not lie in the span of r.

    It can be much smaller than its parts, so that these are not rounded, whatever torch may do to products (TF32).
    """
    inverse, multiplied = by.found.inverse, by.found.multiplied
    dtype = by.rows.r.dtype if inverse is None else inverse.dtype
    r = cast(by.rows.r, dtype)
    if dtype is torch.float64 and gradient.dtype is not dtype and _is_careful(gradient, r, by):
        return _carefully_subtracted(gradient, r, by, in_place)
    in_place = in_place and gradient.dtype is dtype and gradient.is_contiguous()
    gradient = cast(gradient, dtype)
    with cpu.unrounded(r) if has_values(r) else cpu.NOTHING:
        seen = gradient @ r.mT
        used = seen @ inverse if inverse is not None and (by.keeps_norm or multiplied is None) else seen
        if by.keeps_norm and inverse is not None:
            return _subtracted(gradient, used, r, cpu.ratio(gradient, seen, used, r @ r.mT), in_place)
        if multiplied is not None:
            used, r = seen, multiplied
        return _subtracted(gradient, used, r, None, in_place)


def _is_careful(gradient: Tensor, r: Tensor, by: Conditioner) -> bool:
    """Whether the values of a gradient may decide how it is subtracted from."""
    return by.found.inverse is not None and gradient.device.type == "cpu" and not kernels.is_differentiable(gradient, r)


def _carefully_subtracted(gradient: Tensor, r: Tensor, by: Conditioner, in_place: bool) -> Tensor:
    """The difference of a gradient that is not as precise as the rows."""
    inverse = by.found.inverse
    assert inverse is not None
    before = torch.linalg.vector_norm(gradient, dtype=r.dtype) if by.keeps_norm else None
    strength, spanned = r.shape[-2] * float(by.found.damping), r.shape[-2] >= by.rows.total
    done, lost = cpu.subtract(gradient, r, inverse, strength, spanned=spanned, in_place=in_place)
    by.lost_digits |= lost
    return done if before is None else done.mul_(equations.quotient(before, torch.linalg.vector_norm(done, dtype=r.dtype)))


def _subtracted(gradient: Tensor, used: Tensor, r: Tensor, ratio: Tensor | None, in_place: bool) -> Tensor:
    """∇ − U r, times a ratio where the norm is kept."""
    if r.dim() == 3:
        result = torch.baddbmm(gradient, used, r, alpha=-1)
        return result if ratio is None else ratio * result
    if ratio is not None and ratio.device.type == "cpu" and not kernels.is_differentiable(gradient, ratio):
        number = ratio.item()
        return torch.addmm(gradient, used, r, beta=number, alpha=-number, out=gradient if in_place else None)
    result = torch.addmm(gradient, used, r, alpha=-1, out=gradient if in_place else None)
    return result if ratio is None else ratio * result


def _as_long_as(plain: Tensor, conditioned: Tensor) -> Tensor:
    """The second with the norm of the first; as it is where one of them is 0 or not finite."""
    return conditioned * equations.quotient(*cpu.norms(plain, conditioned)).to(conditioned.dtype)


def multiply_own(
    g: Float[Tensor, "rows out"], by: Conditioner, norm_of: Float[Tensor, "rows out"] | None = None
) -> Float[Tensor, "out in"]:
    """gᵀ P a, or gᵀ a Q: the form of a linear layer whose rows are those of its conditioner, without a difference.

    Where the norm is kept, it is that of the plain gradient `norm_of`ᵀ a, with g unless given.
    """
    if not by.keeps_norm:
        return _own_product(g, by)
    inverse = by.found.inverse
    a = cast(by.rows.r, working_dtype(by.rows.r.dtype))
    g = cast(g, a.dtype)
    plain = g if norm_of is None else cast(norm_of, a.dtype)
    if inverse is None or inverse.dtype is not a.dtype or a.shape[0] >= min(a.shape[1], g.shape[1]):
        return _as_long_as(torch.mm(plain.mT, a), _own_product(g, by))
    # ‖gᵀa‖² = ⟨g gᵀ, a aᵀ⟩: with few rows no norm of a large matrix is needed. Where values may not be looked at, it is formed
    # of numbers around 1, whose squares neither overflow nor vanish; on a GPU those would be four more launches.
    can_look = a.device.type == "cpu" and not kernels.is_differentiable(g, a)
    with cpu.unrounded(a) if has_values(a) else cpu.NOTHING:
        gram = by.found.gram
        gram = torch.mm(a, a.mT) if gram is None else gram
        if can_look or a.is_cuda:
            used = torch.mm(inverse, g)
            before, after = _length(plain, gram), _length(used, gram)
            if can_look and not (cpu.is_safe(before) and cpu.is_safe(after)):
                return _as_long_as(torch.mm(plain.mT, a), _own_product(g, by))
            ratio = equations.quotient(before, after)
        else:
            # The compiler of dynamic sizes would take a number that stands elsewhere for one that changes.
            unit = torch.linalg.vector_norm(plain, math.inf).clamp_min(1e-38)
            used = torch.mm(inverse, g / unit)
            ratio = equations.quotient(_length(plain / unit, gram), _length(used, gram)) * unit
    return torch.mm((used * ratio).mT, a)


def _length(x: Float[Tensor, "rows out"], gram: Float[Tensor, "rows rows"]) -> Float[Tensor, ""]:
    """‖xᵀa‖ by a aᵀ."""
    return (torch.mm(x, x.mT) * gram).sum().clamp_min(0).sqrt()


def share_beyond(by: Conditioner, outputs: int) -> float:
    """What part of the multiply-adds of `multiply_own` the plain gradient does not need."""
    count, features = by.rows.r.shape
    beyond = count**2 * min(features, outputs) if count < features else features**2 * outputs
    return beyond / max(beyond + count * features * outputs, 1)  # an expert may have had no rows


def _own_product(g: Float[Tensor, "rows out"], by: Conditioner) -> Float[Tensor, "out in"]:
    """gᵀ P a, or gᵀ a Q, whichever way is the shortest."""
    inverse, multiplied = by.found.inverse, by.found.multiplied
    a = cast(by.rows.r, working_dtype(by.rows.r.dtype))
    g = cast(g, a.dtype)
    if multiplied is not None:
        return torch.mm(g.mT, cast(multiplied, a.dtype))
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
