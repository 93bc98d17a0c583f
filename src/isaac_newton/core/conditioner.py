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
from isaac_newton.math.damping import RelativeTo, relative_damping
from isaac_newton.torch_private import has_values

__all__ = ["MOST_SWEPT", "Conditioner", "invert", "multiply", "multiply_own"]

#: Up to this size Triton inverts; larger ones are torch's in float64.
MOST_SWEPT = 1024
#: Up to so many features, rows of the own form are multiplied by their inverse however few the outputs are.
_FEW_FEATURES = 512
_PRECISE = (torch.float32, torch.float64)


@dataclass(slots=True)
class Conditioner:
    """(I + rᵀr/(kλ))⁻¹ on the smaller of the two sides: P = (I + r rᵀ/(kλ))⁻¹ or Q, the matrix itself; without either: plain.

    In a difference (Woodbury), ∇ − ∇rᵀ P r, both P and P r, where that is `multiplied`, are divided by kλ. With `keeps_norm`
    a gradient is as long afterwards as before; then r rᵀ is in `gram` where a kernel has formed it.
    """

    rows: Rows
    inverse: Float[Tensor, "*groups small small"] | None = None
    multiplied: Float[Tensor, "*groups rows in"] | None = None
    damping: float | Tensor = math.inf
    failures: int | Tensor = 0
    keeps_norm: bool = False
    gram: Float[Tensor, "rows rows"] | None = None
    #: Whether a gradient that was multiplied had too few digits for the difference.
    lost_digits: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether it changes nothing."""
        return self.inverse is None and self.multiplied is None


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
    found: list[Conditioner | None] = [None] * len(rows)
    small: list[int] = []
    on_cpu: dict[tuple[int, bool], list[int]] = {}
    plain = isinstance(strength, float) and strength == math.inf
    able = kernels.groupable([one.r for one in rows])
    for number, one in enumerate(rows):
        r = one.r
        if plain or 0 in r.shape:
            found[number] = Conditioner(one)
        elif able[number] and r.dim() == 2 and one.counted is None and min(r.shape) <= MOST_SWEPT:
            small.append(number)
        elif r.dim() == 2 and r.device.type == "cpu" and one.counted is None and not kernels.is_differentiable(r):
            on_cpu.setdefault((min(r.shape), one.in_difference), []).append(number)
        else:
            found[number] = _inverted_by_torch(one, strength, relative)
    if small:
        _invert_by_triton(rows, small, strength, relative, found, early=early, keep_norm=keep_norm)
    for (_, in_difference), numbers in on_cpu.items():
        _invert_on_cpu(rows, numbers, float(strength), relative, in_difference, found)
    conditioners = [one for one in found if one is not None]
    for conditioner in conditioners:
        conditioner.keeps_norm = keep_norm
    return conditioners


def _invert_by_triton(
    rows: Sequence[Rows],
    numbers: Sequence[int],
    strength: float | Tensor,
    relative: RelativeTo,
    found: list[Conditioner | None],
    *,
    early: bool,
    keep_norm: bool,
) -> None:
    from isaac_newton.kernels import inverse_large, inverse_small

    for module in (inverse_small, inverse_large):
        mine = [n for n in numbers if (min(rows[n].r.shape) <= inverse_small.MOST) == (module is inverse_small)]
        xs = [rows[n].r.contiguous() for n in mine]
        kinds = [_kind(rows[n], early, keep_norm) for n in mine]
        for number, made in zip(mine, module.inverses(xs, strength, relative, kinds), strict=True):
            found[number] = Conditioner(rows[number], made.inverse, made.multiplied, made.damping, gram=made.gram)


def _kind(rows: Rows, early: bool, keep_norm: bool) -> int:
    """What the kernels shall compute: the inverse, or rows that are multiplied by it as well."""
    from isaac_newton.kernels.inverse_small import GRAM, MULTIPLIED, SCALED

    count, features = rows.r.shape
    if rows.in_difference:
        return MULTIPLIED + SCALED + (GRAM if keep_norm else 0)
    if count >= features or early or keep_norm:
        return GRAM if keep_norm and count < features else 0
    # Multiplied rows save a product in the backward pass, but take the memory of the rows instead of the outputs'.
    return MULTIPLIED if features <= max(rows.outputs, _FEW_FEATURES) else 0


def _invert_on_cpu(
    rows: Sequence[Rows],
    numbers: Sequence[int],
    strength: float,
    relative: RelativeTo,
    in_difference: bool,
    found: list[Conditioner | None],
) -> None:
    """Inverses of one size by one factorization."""
    found_rows = [cast(rows[number].r, working_dtype(rows[number].r.dtype)) for number in numbers]
    xs = [r if r.shape[0] < r.shape[1] else r.mT for r in found_rows]
    dampings = _dampings(found_rows, strength, relative) if relative else [strength] * len(numbers)
    scales = [1 / (r.shape[0] * damping) for r, damping in zip(found_rows, dampings, strict=True)]
    # The largest eigenvalue of what is inverted is known where the damping is relative to it.
    results = cpu.inverses(xs, scales, in_difference, 1 / strength if relative == "largest" else math.inf)
    for number, damping, scale, (inverse, failures) in zip(numbers, dampings, scales, results, strict=True):
        if inverse is not None and in_difference:
            inverse = scale * inverse
        found[number] = Conditioner(rows[number], inverse, None, damping, failures)


def _dampings(rs: Sequence[Float[Tensor, "_ _"]], strength: float, relative: RelativeTo) -> list[float]:
    """λ of each of these rows, whose smaller sides are equal: what they are relative to is found for all at once."""
    if relative == "mean" or len({r.dtype for r in rs}) > 1:
        return [_damping(r, strength, relative).item() for r in rs]
    size = min(rs[0].shape)
    grams = torch.empty(len(rs), size, size, dtype=rs[0].dtype)
    with cpu.unrounded(rs[0]):
        for r, gram in zip(rs, grams, strict=True):
            torch.mm(*((r, r.mT) if len(r) < r.shape[1] else (r.mT, r)), out=gram)
    counts = torch.tensor([len(r) for r in rs], dtype=grams.dtype)
    found: list[float] = relative_damping(equations.largest_eigenvalue(grams) / counts, strength).tolist()
    return found


def _damping(r: Float[Tensor, "*groups rows in"], strength: float | Tensor, relative: RelativeTo) -> Float[Tensor, ""]:
    """λ of these rows: one for all groups."""
    if relative == "mean":
        return relative_damping(r.square().mean(), strength)
    with cpu.unrounded(r) if has_values(r) else cpu.NOTHING:
        gram = r @ r.mT if r.shape[-2] < r.shape[-1] else r.mT @ r
    return relative_damping(equations.largest_eigenvalue(gram).amax() / r.shape[-2], strength)


def _inverted_by_torch(one: Rows, strength: float | Tensor, relative: RelativeTo) -> Conditioner:
    """Groups, what the kernels do not take, and what torch has to differentiate, batch or trace: in float64 where needed."""
    r = cast(one.r, working_dtype(one.r.dtype))
    count, features = r.shape[-2:]
    damping: float | Tensor = _damping(r, strength, relative) if relative else strength
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
    gradients: Sequence[Float[Tensor, "*_ _ _"]], by: Sequence[Conditioner], *, in_place: bool = False
) -> list[Float[Tensor, "*_ _ _"]]:
    """Stage 4: ∇ (I + rᵀr/(kλ))⁻¹ for each gradient; `in_place` allows to write to their memory."""
    results = list(gradients)
    together: list[int] = []
    able = kernels.groupable(gradients)
    for number, (gradient, one) in enumerate(zip(gradients, by, strict=True)):
        if one.multiplied is not None and able[number] and _can_subtract(gradient, one.rows.r):
            together.append(number)
        elif not one.is_plain and gradient.numel():
            results[number] = _multiplied_by_torch(gradient, one, in_place)
    if together:
        from isaac_newton.kernels.subtract import subtract

        multiplied = [product for n in together if (product := by[n].multiplied) is not None]
        kept = [_kept(by[n]) for n in together]
        rows = [by[n].rows.r for n in together]
        done = subtract([gradients[n] for n in together], rows, multiplied, in_place=in_place, keep_norm=kept)
        for number, result in zip(together, done, strict=True):
            results[number] = result
    return results


#: Of the kernel that subtracts.
_MOST_SUBTRACTED = 256


def _can_subtract(gradient: Tensor, r: Tensor) -> bool:
    few = r.dtype is torch.float32 and r.shape[0] <= _MOST_SUBTRACTED
    return few and 1 in gradient.stride() and gradient.numel() > 0


def _kept(by: Conditioner) -> tuple[Tensor, Tensor] | None:
    """What the kernel that subtracts needs to keep the norm."""
    if not by.keeps_norm:
        return None
    assert by.inverse is not None
    assert by.gram is not None
    return by.inverse, by.gram


def _multiplied_by_torch(gradient: Tensor, by: Conditioner, in_place: bool) -> Tensor:
    r, inverse, multiplied = by.rows.r, by.inverse, by.multiplied
    if r.shape[-2] >= r.shape[-1]:
        assert inverse is not None
        product = cast(gradient, inverse.dtype) @ inverse
        product = _as_long_as(gradient, product) if by.keeps_norm else product
        # Those of a bucket are there together: the memory of the plain gradients serves the others.
        return gradient.copy_(product) if in_place and gradient.device.type == "cpu" else product
    # Woodbury. The difference is inherent: the gradient need not lie in the span of r. It can be much smaller than its parts,
    # so that these are not rounded, whatever torch may do to products (TF32).
    dtype = r.dtype if inverse is None else inverse.dtype
    r = cast(r, dtype)
    wider = dtype is torch.float64 and gradient.dtype is not dtype
    if wider and inverse is not None and gradient.device.type == "cpu" and not kernels.is_differentiable(gradient, r):
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


def _carefully_subtracted(gradient: Tensor, r: Tensor, by: Conditioner, in_place: bool) -> Tensor:
    """The difference of a gradient that is not as precise as the rows."""
    assert by.inverse is not None
    before = torch.linalg.vector_norm(gradient, dtype=r.dtype) if by.keeps_norm else None
    strength, spanned = r.shape[-2] * float(by.damping), r.shape[-2] >= by.rows.total
    done, lost = cpu.subtract(gradient, r, by.inverse, strength, spanned=spanned, in_place=in_place)
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
    before, after = (torch.linalg.vector_norm(x, dtype=conditioned.dtype) for x in (plain, conditioned))
    return conditioned * equations.quotient(before, after)


def multiply_own(
    g: Float[Tensor, "rows out"], by: Conditioner, norm_of: Float[Tensor, "rows out"] | None = None
) -> Float[Tensor, "out in"]:
    """gᵀ P a, or gᵀ a Q: the form of a linear layer whose rows are those of its conditioner, without a difference.

    Where the norm is kept, it is that of the plain gradient `norm_of`ᵀ a, with g unless given.
    """
    if not by.keeps_norm:
        return _own_product(g, by)
    a = cast(by.rows.r, working_dtype(by.rows.r.dtype))
    g = cast(g, a.dtype)
    plain = g if norm_of is None else cast(norm_of, a.dtype)
    if by.inverse is None or by.inverse.dtype is not a.dtype or len(a) >= min(a.shape[1], g.shape[1]):
        return _as_long_as(torch.mm(plain.mT, a), _own_product(g, by))
    # ‖gᵀa‖² = ⟨g gᵀ, a aᵀ⟩: with few rows no norm of a large matrix is needed.
    with cpu.unrounded(a) if has_values(a) else cpu.NOTHING:
        gram = torch.mm(a, a.mT) if by.gram is None else by.gram
        used = torch.mm(by.inverse, g)
        before, after = ((torch.mm(x, x.mT) * gram).sum().clamp_min(0).sqrt() for x in (plain, used))
    return torch.mm((used * equations.quotient(before, after)).mT, a)


def _own_product(g: Float[Tensor, "rows out"], by: Conditioner) -> Float[Tensor, "out in"]:
    """gᵀ P a, or gᵀ a Q, whichever way is the shortest."""
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
