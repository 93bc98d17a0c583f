"""Where ζ* (or ζ) takes the place of the weight gradient: in autograd, in one of two ways.

`linear` is `F.linear` with a backward pass of its own. It sees the output gradients, so it can put the small matrix between
them and the inputs, which is cheapest and most accurate when the rows of the input are the rows of the conditioner.

`condition` works for any layer: it hands out the weight under a new name, and when torch has formed the plain gradient of
that, multiplies it from the right by the conditioner, ζ* = ∇ (I + rᵀr/(kλ))⁻¹, for any rows r (patches, means, a random
subset).

The dtype policy is here too: linear algebra in float32 or better, whatever autocast says; results in the dtype of the weight.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from isaac_newton import kernels, rows
from isaac_newton.curvature import Curvature, Place
from isaac_newton.inputs import Shared
from isaac_newton.kernels import streams
from isaac_newton.settings import Settings
from isaac_newton.statistics import Statistics

__all__ = ["Arrange", "Site", "condition", "condition_columns", "condition_output", "linear", "multiply_rows"]

#: Brings a layer's input into the layout of `rows`: the view, and how many of its dimensions are positions.
Arrange: TypeAlias = Callable[[Tensor], tuple[Tensor, int]]


class Site:
    """One conditioned layer as the backward pass sees it: its name, the settings it shares, its own statistics."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self.settings = settings
        self.statistics = Statistics()
        #: With `when="step"`: what each matrix of the layer has gathered.
        self.curvatures: dict[Place, Curvature] = {}

    def place(self, weight: Tensor, *, transposed: bool = False, bias: Tensor | None = None) -> Place:
        """Where the gradient of this weight will be found at the step. Only the attached layer knows its parameters."""
        raise TypeError("when='step' needs a layer that was attached with isaac_newton.attach")

    def is_empty(self, place: Place) -> bool:
        """Whether the parameter has no gradient yet: nothing was accumulated since the last step."""
        raise NotImplementedError

    def gathers(self, place: Place) -> bool:
        """Whether the next step will look at what the backward passes before it gather."""
        curvature, settings = self.curvatures.get(place), self.settings
        return settings.decay > 0 or curvature is None or curvature.conditioner is None or curvature.age >= settings.refresh

    def curvature(self, place: Place) -> Curvature:
        """That of one matrix, ready to gather in the current backward pass."""
        curvature = self.curvatures.setdefault(place, Curvature())
        if curvature.enter(torch._C._current_graph_task_id(), empty=self.is_empty(place)):
            self.settings.warn_about_dropped()
        return curvature


def linear(input: Tensor, weight: Tensor, bias: Tensor | None, site: Site, arrange: Arrange = rows.sequence) -> Tensor:
    """`F.linear` with the weight gradient conditioned as `site` says; input and bias gradients stay torch's.

    Nothing is saved or computed beyond `F.linear` unless the weight needs a gradient.
    """
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return F.linear(input, weight, bias)
    if site.settings.takes_every_row:
        shared = site.settings.inputs.shared(input)
        conditioner = None
        if site.settings.overlap is not None:
            # Its inputs are all there is to wait for, so it starts before the layer's own product.
            site.settings.overlap.update([id(weight), id(bias)])
            with streams.beside(site, input):
                conditioner = _row_conditioner(_as_rows(input), site, shared, joint=_is_joint(bias, site))
        output: Tensor = _apply(_Linear, input, weight, bias, site, shared, conditioner)
        return output
    return F.linear(input, *condition(weight, bias, input, site, arrange=arrange))


def condition(
    weight: Tensor,
    bias: Tensor | None,
    input: Tensor,
    site: Site,
    *,
    arrange: Arrange = rows.sequence,
    transposed: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`weight` and `bias`, unchanged but for what a backward pass leaves in their `.grad`: the conditioned gradient.

    Args:
        weight: (outputs, *features), or with `transposed` (features, *outputs); with groups, the groups come first in
            dimension 0.
        bias: One number per output; returned as it is unless `bias="joint"`.
        input: What the layer received.
        site: The layer's site.
        arrange: Brings `input` into the layout of `isaac_newton.rows`; the default takes the last dimension for the features.
        transposed: Whether dimension 0 of the weight holds the features.
    """
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return weight, bias
    joint = bias if bias is not None and bias.requires_grad and site.settings.bias == "joint" else None
    shared = site.settings.inputs.shared(input)
    place = site.place(weight, transposed=transposed, bias=joint) if site.settings.when == "step" else None
    layout = _Layout(arrange, transposed, site.settings.mask, place)
    new_weight, new_bias = _apply(_Condition, weight, joint, input, layout, site, shared)
    return new_weight, bias if joint is None else new_bias


def condition_output(output: Tensor, weight: Tensor, site: Site, transform: Callable[[Tensor], Tensor]) -> Tensor:
    """`output`, whose gradient goes through `transform` on its way back: for layers whose inputs have no gradient."""
    if not (torch.is_grad_enabled() and weight.requires_grad and output.requires_grad):
        return output

    def hook(g: Tensor) -> Tensor:
        site.settings.enter_backward()
        with _full_precision(g):
            return transform(g)

    output.register_hook(hook)
    return output


def multiply_rows(g: Float[Tensor, "rows out"], r: Float[Tensor, "rows in"], site: Site) -> Float[Tensor, "rows out"]:
    """(I + r rᵀ/(bλ))⁻¹ g, on the smaller of the two sides."""
    count, features = r.shape
    _saw(site, count, count, features, g.shape[1])
    damping = site.settings.input_damping(r)
    if 0 in r.shape or (isinstance(damping, float) and damping == math.inf):
        return g
    scale = 1 / (count * damping)
    by_rows = count < features
    conditioner = _inverse(r if by_rows else r.mT, damping, count, site)
    if conditioner is None:
        return g
    wide, r = _cast(g, conditioner.dtype), _cast(r, conditioner.dtype)
    wide = conditioner @ wide if by_rows else wide - scale * r @ (conditioner @ (r.mT @ wide))
    return _cast(wide, g.dtype)


def _apply(function: type[torch.autograd.Function], *args: object) -> Any:
    """`function.apply(*args)`, without what only torch.func needs."""
    # Function.apply binds the arguments to the signature of `forward`, by inspection, at each call: longer than a product.
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def _saw(site: Site, *sizes: int, groups: int = 1, own_rows: bool = True) -> None:
    if not torch.compiler.is_compiling():
        site.statistics.saw(site.settings.backward_passes, *sizes, groups=groups, own_rows=own_rows)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    # Even a `to` that has nothing to do takes its time, and there are many.
    return x if x.dtype is dtype else x.to(dtype)


def _working_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype is torch.float64 else torch.float32


class _Layout:
    """How a layer's input becomes rows, and its gradient a matrix (groups, outputs, features)."""

    def __init__(self, arrange: Arrange, transposed: bool, mask: Tensor | None, place: Place | None = None) -> None:
        self.arrange = arrange
        self.transposed = transposed
        self.mask = mask
        self.place = place

    def rows(self, input: Tensor, settings: Settings) -> tuple[Float[Tensor, "groups rows features"], int]:
        """The rows of the conditioner, in float32 or better, and how many rows the layer multiplied."""
        view, positions = self.arrange(_cast(input, _working_dtype(input.dtype)))
        places = view.shape[1 : 2 + positions]
        mask = self.mask if self.mask is not None and self.mask.shape == places else None
        gathered = rows.gather(
            view, positions, sharing=settings.sharing, max_rows=settings.max_rows, mask=mask, seed=settings.seed
        )
        return gathered, math.prod(places)

    def matrix(self, gradient: Tensor, groups: int) -> Float[Tensor, "groups outputs features"]:
        """A gradient in the shape of the weight as one matrix per group."""
        matrix = gradient.reshape(groups, gradient.shape[0] // groups, -1)
        return matrix.mT if self.transposed else matrix

    def unmatrix(self, matrix: Float[Tensor, "groups outputs features"], like: Tensor) -> Tensor:
        """The way back."""
        return (matrix.mT if self.transposed else matrix).reshape(like.shape).to(like.dtype)


class _Condition(torch.autograd.Function):
    @staticmethod
    def forward(weight: Tensor, bias: Tensor | None, *rest: object) -> tuple[Tensor, Tensor | None]:
        return weight.view_as(weight), None if bias is None else bias.view_as(bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, bias, x, ctx.layout, ctx.site, ctx.shared = inputs
        ctx.joint = bias is not None
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, grad_weight: Tensor, grad_bias: Tensor | None) -> Any:
        (x,), layout, site = ctx.saved_tensors, ctx.layout, ctx.site
        settings = site.settings
        settings.enter_backward()
        with _full_precision(grad_weight):
            if layout.place is not None:
                _gather(grad_weight, x, layout, site)
                return grad_weight, grad_bias, None, None, None, None
            r, total = layout.rows(x, settings)
            ranks = settings.ranks
            key = (layout.arrange, id(layout.mask), ctx.joint)
            if ranks is not None:
                r = ctx.shared.get(("rows", key), functools.partial(ranks.all_rows, r))
            gradient = layout.matrix(grad_weight, r.shape[0]).to(r.dtype)
            if ctx.joint:
                # Without a gradient for the bias, its column is zero and does not disturb.
                column = gradient.new_zeros(gradient.shape[:2]) if grad_bias is None else grad_bias.reshape(gradient.shape[:2])
                gradient = torch.cat([gradient, column[..., None].to(gradient.dtype)], dim=-1)
                r = torch.cat([r, r.new_ones(*r.shape[:2], 1)], dim=-1)
            sizes = (total, r.shape[-2], r.shape[-1], gradient.shape[-2])
            _saw(site, *sizes, groups=r.shape[0], own_rows=False)
            conditioned = condition_columns(gradient, r, site, ctx.shared, key)
        if not ctx.joint:
            return layout.unmatrix(conditioned, grad_weight), None, None, None, None, None
        new_bias = None if grad_bias is None else conditioned[..., -1].reshape(grad_bias.shape).to(grad_bias.dtype)
        return layout.unmatrix(conditioned[..., :-1], grad_weight), new_bias, None, None, None, None


def _gather(gradient: Tensor, x: Tensor, layout: _Layout, site: Site) -> None:
    """Keep the rows for the step; the gradient stays as it is."""
    assert layout.place is not None
    r, total = layout.rows(x, site.settings)
    place = layout.place._replace(groups=r.shape[0])
    if place.bias is not None:
        r = torch.cat([r, r.new_ones(*r.shape[:2], 1)], dim=-1)
    outputs = gradient.numel() // max(place.groups * math.prod(r.shape[2:]), 1)
    _saw(site, total, r.shape[1], r.shape[2], outputs, groups=place.groups, own_rows=False)
    if site.gathers(place):
        site.curvature(place).add_rows(r, keep=site.settings.keeps_rows)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        input: Tensor, weight: Tensor, bias: Tensor | None, site: Site, shared: Shared, conditioner: Tensor | None
    ) -> Tensor:
        return F.linear(input, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        a, weight, bias, ctx.site, ctx.shared, ctx.conditioner = inputs
        ctx.save_for_backward(a, weight, bias)
        ctx.gbar = []

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (a, weight, bias), site = ctx.saved_tensors, ctx.site
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # Under autocast g is in the half type while a and weight are not: do as torch does, multiply in g's type.
        grad_input = _cast(g @ _cast(weight, g.dtype), a.dtype) if needs_input else None
        g, a, overlap = _as_rows(g), _as_rows(a), site.settings.overlap
        if site.settings.collecting:
            ctx.gbar.append(g)
            if overlap is not None:
                with streams.beside(site, g):
                    ctx.output_conditioner = _output_conditioner(g, ctx.gbar, site)
            return grad_input, None, None, None, None, None
        if overlap is None:
            return grad_input, *_gradients(ctx, g, a, weight.dtype, needs_weight, needs_bias), None, None, None
        with streams.beside(site, g, a):
            gradients = _gradients(ctx, g, a, weight.dtype, needs_weight, needs_bias)
        parameters = [weight] if bias is None else [weight, bias]
        if all(_is_stored_as_it_is(p, overlap) for p in parameters) and not _is_joint(bias, site):
            streams.join_after_backward(site)
        else:
            streams.join(site)
        return grad_input, *gradients, None, None, None


def _gradients(
    ctx: Any, g: Tensor, a: Tensor, dtype: torch.dtype, needs_weight: bool, needs_bias: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of weight and bias, where they are needed."""
    grad_weight = grad_bias = None
    if needs_weight:
        joint = needs_bias and ctx.site.settings.bias == "joint"
        with _full_precision(a):
            grad_weight = _cast(_weight_gradient(g, a, ctx, joint), dtype)
        if joint:
            return grad_weight[:, :-1], grad_weight[:, -1]
    if needs_bias:
        grad_bias = _cast(g.sum(0), dtype)
    return grad_weight, grad_bias


def _is_joint(bias: Tensor | None, site: Site) -> bool:
    return bias is not None and bias.requires_grad and site.settings.bias == "joint"


def _is_stored_as_it_is(parameter: Tensor, uses: Mapping[int, int]) -> bool:
    """Whether autograd will keep a new gradient of this parameter without a kernel that could run before it is there.

    It adds to a gradient that exists, sums those of several uses, and copies one whose layout is not the parameter's.
    """
    return parameter.is_leaf and parameter.grad is None and uses[id(parameter)] <= 1 and parameter.is_contiguous()


def _weight_gradient(
    g: Float[Tensor, "rows out"], a: Float[Tensor, "rows in"], ctx: Any, joint: bool
) -> Float[Tensor, "out wide"]:
    site, settings = ctx.site, ctx.site.settings
    settings.enter_backward()
    a = _conditioned_rows(a, joint)
    g = _cast(g, a.dtype)
    count, features = a.shape
    outputs = g.shape[1]
    _saw(site, count, count, features, outputs)
    if settings.conditions_outputs:
        recorded, ctx.gbar = ctx.gbar, []
        early = settings.overlap is not None and settings.needs_extra_pass
        g = _apply_to_outputs(g, ctx.output_conditioner if early else _output_conditioner(g, recorded, site))
    early = settings.overlap is not None
    conditioner = ctx.conditioner if early else _row_conditioner(a, site, ctx.shared, joint=joint, wide=True)
    return kernels.product(g, conditioner, a)


def _conditioned_rows(a: Float[Tensor, "rows in"], joint: bool) -> Float[Tensor, "rows wide"]:
    """The rows in float32 or better, with a column of ones for a joint bias."""
    # Factorizations have no half-precision kernels, and their inputs deserve better.
    a = _cast(a, _working_dtype(a.dtype))
    return torch.cat([a, a.new_ones(a.shape[0], 1)], dim=1) if joint else a


def _row_conditioner(
    a: Float[Tensor, "rows in"], site: Site, shared: Shared, *, joint: bool, wide: bool = False
) -> Tensor | None:
    """(I + a aᵀ/(bλ))⁻¹, or on the other side where that is smaller; None for the plain gradient. `wide`: `a` has its ones."""
    a = a if wide else _conditioned_rows(a, joint)
    count, features = a.shape
    damping = site.settings.input_damping(a)
    if count == 0 or features == 0 or (isinstance(damping, float) and damping == math.inf):
        return None
    return shared.get(joint, lambda: _inverse(a if count < features else a.mT, damping, count, site))


def condition_columns(
    gradient: Float[Tensor, "groups out in"], r: Float[Tensor, "groups rows in"], site: Site, shared: Shared, key: object
) -> Float[Tensor, "groups out in"]:
    """∇ (I + rᵀr/(kλ))⁻¹, on the smaller of the two sides."""
    count, features = r.shape[-2:]
    damping = site.settings.input_damping(r)
    if count == 0 or gradient.numel() == 0 or (isinstance(damping, float) and damping == math.inf):
        return gradient
    scale = 1 / (count * damping)
    by_rows = count < features
    conditioner = shared.get(key, lambda: _inverse(r if by_rows else r.mT, damping, count, site))
    if conditioner is None:
        return gradient
    gradient, r = _cast(gradient, conditioner.dtype), _cast(r, conditioner.dtype)
    if by_rows:
        # Woodbury. The difference is inherent: the gradient need not lie in the span of r.
        return gradient - (scale * (gradient @ r.mT) @ conditioner) @ r
    return gradient @ conditioner


def _output_conditioner(
    g: Float[Tensor, "rows out"], recorded: list[Float[Tensor, "rows out"]], site: Site
) -> tuple[Tensor, Tensor, float | Tensor] | None:
    """ḡ, its inverse (I + ḡ ḡᵀ/(bλ_g))⁻¹ or the one on the other side, and 1/(bλ_g); None if there is nothing to condition."""
    gbar, count = _output_factor(g, recorded, site), g.shape[0]
    samples, outputs = gbar.shape
    if 0 in (count, samples, outputs):
        return None
    damping = site.settings.current_output_damping(gbar, count)
    conditioner = _inverse(gbar if samples < outputs else gbar.mT, damping, count, site)
    return None if conditioner is None else (gbar, conditioner, 1 / (count * damping))


def _apply_to_outputs(g: Tensor, factor: tuple[Tensor, Tensor, float | Tensor] | None) -> Tensor:
    """G (I + ḡᵀḡ/(bλ_g))⁻¹."""
    if factor is None:
        return g
    gbar, conditioner, scale = factor
    wide, gbar = _cast(g, conditioner.dtype), _cast(gbar, conditioner.dtype)
    if gbar.shape[0] < gbar.shape[1]:
        wide = wide - (scale * (wide @ gbar.mT) @ conditioner) @ gbar
    else:
        wide = wide @ conditioner
    return _cast(wide, g.dtype)


def _inverse(x: Tensor, damping: float | Tensor, count: int, site: Site) -> Tensor | None:
    result, fallbacks = kernels.inverse(x, damping, count, in_graph=site.settings.overlap is not None)
    if fallbacks:
        site.statistics.fallbacks += fallbacks
    return result


def _output_factor(g: Tensor, recorded: list[Tensor], site: Site) -> Float[Tensor, "samples out"]:
    """ḡ with rows scaled so that ḡᵀḡ / b is the curvature with respect to this layer's outputs, b the layer's rows."""
    settings, count = site.settings, g.shape[0]
    g = _cast(g, _working_dtype(g.dtype))
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


def _as_rows(x: Tensor) -> Float[Tensor, "rows features"]:
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _full_precision(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """No autocast, should the backward pass run inside one."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return contextlib.nullcontext()
