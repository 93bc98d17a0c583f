"""From a layer's rows to what conditions its gradient.

The dtype policy is here: linear algebra in float32 or better, whatever autocast says; results in the dtype of the weight.
"""

import contextlib
import math
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from isaac_newton import equations, kernels
from isaac_newton.ahead import Awaited, Task
from isaac_newton.curvature import Place
from isaac_newton.inputs import Shared
from isaac_newton.layout import Layout, cast, working_dtype
from isaac_newton.settings import Settings
from isaac_newton.site import Site

__all__ = [
    "AwaitedColumns",
    "Early",
    "as_matrix",
    "as_rows",
    "columns_conditioner",
    "early_conditioner",
    "from_matrix",
    "full_precision",
    "gather_rows",
    "is_joint",
    "keep_rows",
    "multiply_gradient",
    "multiply_rows",
    "output_conditioner",
    "row_conditioner",
    "rows_conditioner",
    "saw",
    "weight_gradient",
]

_NOTHING = contextlib.nullcontext()

#: Of wider layers the step did not get shorter by multiplying rows early: products keep the device busy anyway.
_MOST_OUTPUTS = 1024


def multiply_rows(g: Float[Tensor, "rows out"], r: Float[Tensor, "rows in"], site: Site) -> Float[Tensor, "rows out"]:
    """(I + r rᵀ/(bλ))⁻¹ g, on the smaller of the two sides."""
    if site.settings.look is not None:
        site.settings.look(site, r[None])
        return g
    count, features = r.shape
    saw(site, count, count, features, g.shape[1])
    damping, result = site.settings.input_damping(r), g
    if 0 not in r.shape and not (isinstance(damping, float) and damping == math.inf):
        by_rows = count < features
        conditioner = _inverse(r if by_rows else r.mT, damping, count, site, in_difference=not by_rows)
        if conditioner is not None:
            wide, r = cast(g, conditioner.dtype), cast(r, conditioner.dtype)
            if by_rows:
                result = conditioner @ wide
            else:
                result = kernels.subtract(wide.mT, r.mT, conditioner).mT
    if site.settings.inspecting:
        before, after = cast(g, r.dtype), cast(result, r.dtype)
        site.inspect(lambda: equations.spectrum(r), damping, before.mT @ r, after.mT @ r)
    return cast(result, g.dtype)


def saw(site: Site, *sizes: int, groups: int = 1, own_rows: bool = True) -> None:
    """Note the sizes of what is multiplied."""
    site.statistics.saw(site.settings.backward_passes, *sizes, groups=groups, own_rows=own_rows)


class _Columns(NamedTuple):
    """What multiplies a gradient from the right: rows r, λ, and the inverse P on their smaller side, `in_difference` of rows.

    P r, `multiplied`, may be there beside P or in its place, or both r and P r are `prepared`. Without any the gradient stays
    plain where λ is infinite; else the kernel that multiplies forms the inverse.
    """

    r: Float[Tensor, "groups rows in"]
    total: int
    damping: float | Tensor
    inverse: Tensor | None
    multiplied: Float[Tensor, "groups rows in"] | None = None
    prepared: Tensor | None = None

    def takes(self, dtype: torch.dtype) -> torch.dtype:
        """In which type `multiply` wants a gradient of this one."""
        return self.r.dtype if self.prepared is None else dtype

    def multiply(self, gradient: Float[Tensor, "groups out in"]) -> Float[Tensor, "groups out in"]:
        """∇ (I + rᵀr/(kλ))⁻¹."""
        if (isinstance(self.damping, float) and self.damping == math.inf) or gradient.numel() == 0:
            return gradient
        if self.prepared is not None:
            return kernels.difference(gradient, self.prepared)
        count, inverse = self.r.shape[-2], self.inverse
        if inverse is None and self.multiplied is None:
            if not (torch.is_grad_enabled() and gradient.requires_grad):
                return kernels.multiply(cast(gradient, self.r.dtype), self.r, self.damping)
            scale = 1 / (count * self.damping)
            inverse = scale * equations.inverse(equations.precise(self.r), scale)
        dtype = self.r.dtype if inverse is None else inverse.dtype
        r = cast(self.r, dtype)
        if count < r.shape[-1]:
            # Woodbury. The difference is inherent: the gradient need not lie in the span of r.
            return kernels.subtract(gradient, r, inverse, self.multiplied)
        assert inverse is not None
        gradient = cast(gradient, dtype)
        # Of one matrix: torch takes up to three times as long for a batch of one.
        return (gradient[0] @ inverse[0])[None] if len(r) == 1 else gradient @ inverse


class AwaitedColumns(Awaited):
    """What a layer received whose rows are few, whatever the number of positions.

    Args:
        input: What the layer received.
        outputs: Into how many features it turns a row.
        site: The layer's site.
        layout: How the one becomes the other.
        joint: Whether the bias is conditioned with the weight.
    """

    __slots__ = ("_joint", "_layout")

    def __init__(self, input: Tensor, outputs: int, site: Site, layout: Layout, joint: bool) -> None:
        super().__init__(input, outputs, site)
        self._layout, self._joint = layout, joint

    @property
    def same(self) -> Hashable:
        """What another one has if its conditioner is this one's."""
        return id(self.input), self._layout.arrange, id(self._layout.mask), self._joint

    def task(self, strength: float, relative: bool) -> Any:
        """A `Task`, or what is found without one."""
        x, settings = self.input.detach(), self.site.settings
        captured = settings.overlap is not None
        with full_precision(x):
            r, total, counted = self._layout.rows(x, settings, drop=_may_look(x, settings))
            r = _with_ones(r, counted) if self._joint else r
            damping = settings.input_damping(r, counted)
        if 0 in r.shape or (isinstance(damping, float) and damping == math.inf):
            return _Columns(r, total, math.inf, None)
        by_rows, alone = r.shape[-2] < r.shape[-1], len(r) == 1
        if by_rows and not captured and kernels.can_multiply(r):
            return _Columns(r, total, damping, None)

        def finish(conditioner: kernels.Conditioner) -> _Columns:
            inverse, multiplied = (x if x is None or not alone else x[None] for x in conditioner)
            if inverse is None and multiplied is None:
                return _Columns(r, total, math.inf, None)
            prepared = None
            if captured and by_rows and inverse is not None:
                # All that can be done before the gradient is there is done beside other work.
                if kernels.can_prepare(r):
                    prepared = kernels.prepare(inverse, r)
                else:
                    multiplied = kernels.multiplied(inverse, r)
            return _Columns(r, total, damping, inverse, multiplied, prepared)

        return Task(kernels.Job(r[0] if alone else r, damping, self.outputs, of_gradient=True), finish)


def _with_ones(r: Float[Tensor, "groups rows in"], counted: Bool[Tensor, " rows"] | None) -> Float[Tensor, "groups rows wide"]:
    """With a last column for a joint bias: ones, where rows count."""
    ones = r.new_ones(*r.shape[:2], 1)
    return torch.cat([r, ones if counted is None else ones * counted[:, None]], dim=-1)


def columns_conditioner(x: Tensor, layout: Layout, site: Site, shared: Shared, *, joint: bool) -> _Columns:
    """From a layer's input; layers that share it share the inverse, and the rows where these are few."""
    settings, key = site.settings, (layout.arrange, id(layout.mask), joint)

    def find() -> tuple[Tensor, int, Tensor | None]:
        r, total, counted = layout.rows(x, settings, drop=_may_look(x, settings))
        return (r if settings.ranks is None else settings.ranks.all_rows(r)), total, counted

    # To keep many until the pass ends, in float32, would take more memory than what the layers themselves keep.
    r, total, counted = shared.get(("rows", key), find) if settings.takes_few_rows or settings.ranks is not None else find()
    r = _with_ones(r, counted) if joint else r
    return rows_conditioner(r, total, site, shared, key, counted)


def _may_look(x: Tensor, settings: Settings) -> bool:
    """Whether the shape of what is computed may follow from values: a GPU would wait for them, and a graph cannot."""
    return not x.is_cuda or settings.inspecting or settings.ranks is not None


def rows_conditioner(
    r: Float[Tensor, "groups rows in"],
    total: int,
    site: Site,
    shared: Shared,
    key: object,
    counted: Bool[Tensor, " rows"] | None = None,
) -> _Columns:
    """(I + rᵀr/(kλ))⁻¹, on the smaller of the two sides, where there is anything to condition with.

    Rows that are not `counted`, if that is given, are zeros.
    """
    count, features = r.shape[-2:]
    damping = site.settings.input_damping(r, counted)
    if 0 in r.shape or (isinstance(damping, float) and damping == math.inf):
        return _Columns(r, total, math.inf, None)
    by_rows = count < features
    if by_rows and kernels.can_multiply(r):
        return _Columns(r, total, damping, None)
    inverse = shared.get(key, lambda: _inverse(r if by_rows else r.mT, damping, count, site, in_difference=by_rows))
    return _Columns(r, total, math.inf if inverse is None else damping, inverse)


def as_matrix(grad_weight: Tensor, grad_bias: Tensor | None, ctx: Any, groups: int, dtype: torch.dtype) -> Tensor:
    """The gradient as a matrix (groups, outputs, features), with a column for a joint bias."""
    gradient: Tensor = cast(ctx.layout.matrix(grad_weight, groups), dtype)
    if not ctx.joint:
        return gradient
    # Without a gradient for the bias, its column is zero and does not disturb.
    column = gradient.new_zeros(gradient.shape[:2]) if grad_bias is None else grad_bias.reshape(gradient.shape[:2])
    return torch.cat([gradient, column[..., None].to(gradient.dtype)], dim=-1)


def from_matrix(conditioned: Tensor, weight: Tensor, grad_bias: Tensor | None, ctx: Any) -> tuple[Tensor, Tensor | None]:
    """The way back, to the shape and the type of this weight or its gradient."""
    if not ctx.joint:
        return ctx.layout.unmatrix(conditioned, weight), None
    new_bias = None if grad_bias is None else conditioned[..., -1].reshape(grad_bias.shape).to(grad_bias.dtype)
    return ctx.layout.unmatrix(conditioned[..., :-1], weight), new_bias


def multiply_gradient(
    gradient: Float[Tensor, "groups out in"], columns: _Columns, site: Site
) -> Float[Tensor, "groups out in"]:
    """∇ (I + rᵀr/(kλ))⁻¹, with a look at what that does where somebody inspects."""
    groups, count, features = columns.r.shape
    saw(site, columns.total, count, features, gradient.shape[-2], groups=groups, own_rows=False)
    conditioned = columns.multiply(gradient)
    if site.settings.inspecting:
        site.inspect(lambda: equations.spectrum(columns.r), columns.damping, gradient, conditioned)
    return conditioned


def gather_rows(gradient: Tensor, x: Tensor, layout: Layout, site: Site) -> None:
    """Keep the rows for the step; the gradient stays as it is."""
    assert layout.place is not None
    r, total, _ = layout.rows(x, site.settings)
    if layout.place.bias is not None:
        r = torch.cat([r, r.new_ones(*r.shape[:2], 1)], dim=-1)
    keep_rows(gradient, r, total, layout.place, site)


def keep_rows(gradient: Tensor, r: Float[Tensor, "groups rows in"], total: int, place: Place, site: Site) -> None:
    """Gather rows for the step, unless the next step will not look at them."""
    place = place._replace(groups=r.shape[0])
    outputs = gradient.numel() // max(place.groups * math.prod(r.shape[2:]), 1)
    saw(site, total, r.shape[1], r.shape[2], outputs, groups=place.groups, own_rows=False)
    if site.gathers(place):
        site.curvature(place).add_rows(r, keep=site.settings.keeps_rows)


def is_joint(bias: Tensor | None, site: Site) -> bool:
    """Whether the bias is conditioned with the weight."""
    return site.settings.bias == "joint" and bias is not None and bias.requires_grad


def weight_gradient(
    g: Float[Tensor, "rows out"], a: Float[Tensor, "rows in"], ctx: Any, joint: bool
) -> Float[Tensor, "out wide"]:
    """ζ* or ζ of a linear layer from its rows and output gradients, with a last column for a joint bias."""
    site, settings = ctx.site, ctx.site.settings
    settings.enter_backward()
    a = _conditioned_rows(a, joint)
    g = cast(g, a.dtype)
    count, features = a.shape
    site.statistics.saw(settings.backward_passes, count, count, features, g.shape[1])
    plain = g
    if settings.conditions_outputs:
        recorded, ctx.gbar = ctx.gbar or [], None
        early = settings.overlap is not None and settings.needs_extra_pass
        g = _apply_to_outputs(g, ctx.output_conditioner if early else output_conditioner(g, recorded, site))
    given = ctx.given
    if isinstance(given, Awaited) and not torch.is_grad_enabled():
        # A second pass through the same graph asks anew, so that what one pass used does not outlive it.
        given, ctx.given = given.conditioner(), Shared()
    if isinstance(given, Early):
        given = given.conditioner
    if not isinstance(given, kernels.Conditioner):
        shared = given if isinstance(given, Shared) else Shared()
        given = kernels.Conditioner(row_conditioner(a, site, shared, joint=joint, wide=True))
    gradient = kernels.product(g, given.inverse, a if given.rows is None else given.rows)
    if settings.inspecting:
        is_plain = given.inverse is None and given.rows is None
        damping = math.inf if is_plain else settings.input_damping(a)
        site.inspect(lambda: equations.spectrum(a), damping, kernels.product(plain, None, a), gradient)
    return gradient


def _conditioned_rows(a: Float[Tensor, "rows in"], joint: bool) -> Float[Tensor, "rows wide"]:
    """The rows in float32 or better, with a column of ones for a joint bias."""
    # Factorizations have no half-precision kernels, and their inputs deserve better.
    a = cast(a, working_dtype(a.dtype))
    return torch.cat([a, a.new_ones(a.shape[0], 1)], dim=1) if joint else a


def row_conditioner(
    a: Float[Tensor, "rows in"], site: Site, shared: Shared, *, joint: bool, wide: bool = False
) -> Tensor | None:
    """(I + a aᵀ/(bλ))⁻¹, or on the other side where that is smaller; None for the plain gradient. `wide`: `a` has its ones."""
    a = a if wide else _conditioned_rows(a, joint)
    count, features = a.shape
    damping = site.settings.input_damping(a)
    if count == 0 or features == 0 or (isinstance(damping, float) and damping == math.inf):
        return None
    return shared.get(joint, lambda: _inverse(a if count < features else a.mT, damping, count, site))


class Early(NamedTuple):
    """A conditioner that was computed in the forward pass, and what its layer shares with others: the branch, above all."""

    conditioner: kernels.Conditioner
    shared: Shared


def early_conditioner(input: Tensor, outputs: int, site: Site, shared: Shared, *, joint: bool) -> Early:
    """`row_conditioner` in the forward pass."""
    a = as_rows(input.detach())
    inverse = row_conditioner(a, site, shared, joint=joint)
    if inverse is None or joint or input.requires_grad or outputs > _MOST_OUTPUTS or site.settings.conditions_outputs:
        return Early(kernels.Conditioner(inverse), shared)
    # The backward pass ends at this layer: what can be multiplied now need not be waited for then.
    a = cast(a, inverse.dtype)
    rows = torch.mm(inverse, a) if a.shape[0] < a.shape[1] else torch.mm(a, inverse)
    return Early(kernels.Conditioner(None, rows), shared)


def output_conditioner(
    g: Float[Tensor, "rows out"], recorded: list[Float[Tensor, "rows out"]], site: Site
) -> tuple[Tensor, Tensor] | None:
    """ḡ and its inverse, (I + ḡ ḡᵀ/(bλ_g))⁻¹/(bλ_g) or (I + ḡᵀḡ/(bλ_g))⁻¹; None if there is nothing to condition."""
    gbar, count = _output_factor(g, recorded, site), g.shape[0]
    samples, outputs = gbar.shape
    if 0 in (count, samples, outputs):
        return None
    damping = site.settings.current_output_damping(gbar, count)
    by_rows = samples < outputs
    conditioner = _inverse(gbar if by_rows else gbar.mT, damping, count, site, in_difference=by_rows)
    return None if conditioner is None else (gbar, conditioner)


def _apply_to_outputs(g: Tensor, factor: tuple[Tensor, Tensor] | None) -> Tensor:
    """G (I + ḡᵀḡ/(bλ_g))⁻¹."""
    if factor is None:
        return g
    gbar, conditioner = factor
    wide, gbar = cast(g, conditioner.dtype), cast(gbar, conditioner.dtype)
    if gbar.shape[0] < gbar.shape[1]:
        wide = kernels.subtract(wide, gbar, conditioner)
    else:
        wide = wide @ conditioner
    return cast(wide, g.dtype)


def _inverse(x: Tensor, damping: float | Tensor, count: int, site: Site, *, in_difference: bool = False) -> Tensor | None:
    in_graph, alone = site.settings.overlap is not None, x.dim() == 3 and len(x) == 1
    result, failures = kernels.inverse(x[0] if alone else x, damping, count, in_graph=in_graph, in_difference=in_difference)
    if isinstance(failures, Tensor) or failures:
        site.fell_back(failures)
    return result[None] if alone and result is not None else result


def _output_factor(g: Tensor, recorded: list[Tensor], site: Site) -> Float[Tensor, "samples out"]:
    """ḡ with rows scaled so that ḡᵀḡ / b is the curvature with respect to this layer's outputs, b the layer's rows."""
    settings, count = site.settings, g.shape[0]
    g = cast(g, working_dtype(g.dtype))
    if settings.output_curvature == "empirical":
        scale = math.sqrt(count) if settings.empirical_scale is None else settings.empirical_scale
        return g * (scale * math.sqrt(count))
    if not recorded:
        raise RuntimeError(
            f"layer {site.name!r} has no ḡ: with output_curvature={settings.output_curvature!r} call "
            "handle.backward(loss, output, loss_fn) in place of loss.backward(), and give it the output that depends on this "
            "layer; or use output_curvature='empirical'"
        )
    return torch.cat(recorded).to(g.dtype) * math.sqrt(count)


def as_rows(x: Tensor) -> Float[Tensor, "rows features"]:
    """All leading dimensions as one."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def full_precision(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """No autocast, should the backward pass run inside one."""
    return torch.autocast(x.device.type, enabled=False) if torch._C._is_any_autocast_enabled() else _NOTHING
