"""Where ζ* (or ζ) takes the place of the weight gradient: in autograd, in one of two ways.

`linear` is `F.linear` with a backward pass of its own. It sees the output gradients, so it can put the small matrix between
them and the inputs, which is cheapest and most accurate when the rows of the input are the rows of the conditioner.

`condition` works for any layer: it hands out the weight under a new name, and when torch has formed the plain gradient of
that, multiplies it from the right by the conditioner, ζ* = ∇ (I + rᵀr/(kλ))⁻¹, for any rows r (patches, means, a random
subset).

The dtype policy is here too: linear algebra in float32 or better, whatever autocast says; results in the dtype of the weight.
"""

import contextlib
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from isaac_newton import kernels, rows
from isaac_newton.inputs import Shared
from isaac_newton.settings import Settings
from isaac_newton.statistics import Statistics

__all__ = ["Arrange", "Site", "condition", "condition_output", "linear", "multiply_rows"]

#: Brings a layer's input into the layout of `rows`: the view, and how many of its dimensions are positions.
Arrange: TypeAlias = Callable[[Tensor], tuple[Tensor, int]]


class Site:
    """One conditioned layer as the backward pass sees it: its name, the settings it shares, its own statistics."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self.settings = settings
        self.statistics = Statistics()


def linear(input: Tensor, weight: Tensor, bias: Tensor | None, site: Site, arrange: Arrange = rows.sequence) -> Tensor:
    """`F.linear` with the weight gradient conditioned as `site` says; input and bias gradients stay torch's.

    Nothing is saved or computed beyond `F.linear` unless the weight needs a gradient.
    """
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return F.linear(input, weight, bias)
    if site.settings.takes_every_row:
        output: Tensor = _apply(_Linear, input, weight, bias, site, site.settings.inputs.shared(input))
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
    layout = _Layout(arrange, transposed, site.settings.mask)
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
    site.statistics.saw(site.settings.backward_passes, count, count, features, g.shape[1])
    damping = site.settings.input_damping(r)
    if 0 in r.shape or (isinstance(damping, float) and damping == math.inf):
        return g
    scale = 1 / (count * damping)
    by_rows = count < features
    conditioner = _inverse(r if by_rows else r.mT, scale, site)
    if conditioner is None:
        return g
    wide, r = _cast(g, conditioner.dtype), _cast(r, conditioner.dtype)
    wide = conditioner @ wide if by_rows else wide - scale * r @ (conditioner @ (r.mT @ wide))
    return _cast(wide, g.dtype)


def _apply(function: type[torch.autograd.Function], *args: object) -> Any:
    """`function.apply(*args)`, at a third of the time."""
    # Function.apply binds the arguments to the signature of `forward`, by inspection, at each call. Only torch.func needs that.
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    # A no-op `to` costs more than a microsecond, and there are many.
    return x if x.dtype is dtype else x.to(dtype)


def _working_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype is torch.float64 else torch.float32


class _Layout:
    """How a layer's input becomes rows, and its gradient a matrix (groups, outputs, features)."""

    def __init__(self, arrange: Arrange, transposed: bool, mask: Tensor | None) -> None:
        self.arrange = arrange
        self.transposed = transposed
        self.mask = mask

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
            r, total = layout.rows(x, settings)
            gradient = layout.matrix(grad_weight, r.shape[0]).to(r.dtype)
            if ctx.joint:
                # Without a gradient for the bias, its column is zero and does not disturb.
                column = gradient.new_zeros(gradient.shape[:2]) if grad_bias is None else grad_bias.reshape(gradient.shape[:2])
                gradient = torch.cat([gradient, column[..., None].to(gradient.dtype)], dim=-1)
                r = torch.cat([r, r.new_ones(*r.shape[:2], 1)], dim=-1)
            sizes = (total, r.shape[-2], r.shape[-1], gradient.shape[-2])
            site.statistics.saw(settings.backward_passes, *sizes, groups=r.shape[0], own_rows=False)
            conditioned = _condition_columns(gradient, r, site, ctx.shared, (layout.arrange, id(layout.mask), ctx.joint))
        if not ctx.joint:
            return layout.unmatrix(conditioned, grad_weight), None, None, None, None, None
        new_bias = None if grad_bias is None else conditioned[..., -1].reshape(grad_bias.shape).to(grad_bias.dtype)
        return layout.unmatrix(conditioned[..., :-1], grad_weight), new_bias, None, None, None, None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None, site: Site, shared: Shared) -> Tensor:
        return F.linear(input, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        a, weight, _, ctx.site, ctx.shared = inputs
        ctx.save_for_backward(a, weight)
        ctx.gbar = []

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (a, weight), site = ctx.saved_tensors, ctx.site
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # Under autocast g is in the half type while a and weight are not: do as torch does, multiply in g's type.
        grad_input = _cast(g @ _cast(weight, g.dtype), a.dtype) if needs_input else None
        g = _as_rows(g)
        if site.settings.collecting:
            ctx.gbar.append(g)
            return grad_input, None, None, None, None
        grad_weight = grad_bias = None
        if needs_weight:
            a = _as_rows(a)
            joint = needs_bias and site.settings.bias == "joint"
            if joint:
                a = torch.cat([a, a.new_ones(a.shape[0], 1)], dim=1)
            with _full_precision(a):
                grad_weight = _cast(_weight_gradient(g, a, ctx.gbar, site, ctx.shared, joint), weight.dtype)
            ctx.gbar = []
            if joint:
                return grad_input, grad_weight[:, :-1], grad_weight[:, -1], None, None
        if needs_bias:
            grad_bias = _cast(g.sum(0), weight.dtype)
        return grad_input, grad_weight, grad_bias, None, None


def _weight_gradient(
    g: Float[Tensor, "rows out"],
    a: Float[Tensor, "rows in"],
    recorded: list[Float[Tensor, "rows out"]],
    site: Site,
    shared: Shared,
    joint: bool,
) -> Float[Tensor, "out in"]:
    settings = site.settings
    settings.enter_backward()
    # Factorizations have no half-precision kernels, and their inputs deserve better.
    a = _cast(a, _working_dtype(a.dtype))
    g = _cast(g, a.dtype)
    count, features = a.shape
    site.statistics.saw(settings.backward_passes, count, count, features, g.shape[1])
    if settings.conditions_outputs:
        gbar = _output_factor(g, recorded, site)
        damping, output_damping = settings.dampings(a, gbar)
        g = _condition_outputs(g, gbar, output_damping, count, site)
    else:
        damping = settings.input_damping(a)
    if count == 0 or features == 0 or (isinstance(damping, float) and damping == math.inf):
        return g.mT @ a
    by_rows = count < features
    conditioner = shared.get(joint, lambda: _inverse(a if by_rows else a.mT, 1 / (count * damping), site))
    if conditioner is None:
        return g.mT @ a
    g, a = _cast(g, conditioner.dtype), _cast(a, conditioner.dtype)
    if not by_rows:
        return (g.mT @ a) @ conditioner
    if g.shape[1] <= features:
        return (conditioner @ g).mT @ a
    return g.mT @ (conditioner @ a)


def _condition_columns(
    gradient: Float[Tensor, "groups out in"], r: Float[Tensor, "groups rows in"], site: Site, shared: Shared, key: object
) -> Float[Tensor, "groups out in"]:
    """∇ (I + rᵀr/(kλ))⁻¹, on the smaller of the two sides."""
    count, features = r.shape[-2:]
    damping = site.settings.input_damping(r)
    if count == 0 or gradient.numel() == 0 or (isinstance(damping, float) and damping == math.inf):
        return gradient
    scale = 1 / (count * damping)
    by_rows = count < features
    conditioner = shared.get(key, lambda: _inverse(r if by_rows else r.mT, scale, site))
    if conditioner is None:
        return gradient
    gradient, r = _cast(gradient, conditioner.dtype), _cast(r, conditioner.dtype)
    if by_rows:
        # Woodbury. The difference is inherent: the gradient need not lie in the span of r.
        return gradient - (scale * (gradient @ r.mT) @ conditioner) @ r
    return gradient @ conditioner


def _condition_outputs(g: Tensor, gbar: Tensor, output_damping: float | Tensor, count: int, site: Site) -> Tensor:
    """G (I + ḡᵀḡ/(bλ_g))⁻¹, on the smaller of the two sides."""
    samples, outputs = gbar.shape
    if 0 in (count, samples, outputs):
        return g
    scale = 1 / (count * output_damping)
    by_samples = samples < outputs
    conditioner = _inverse(gbar if by_samples else gbar.mT, scale, site)
    if conditioner is None:
        return g
    wide, gbar = _cast(g, conditioner.dtype), _cast(gbar, conditioner.dtype)
    wide = wide - (scale * (wide @ gbar.mT) @ conditioner) @ gbar if by_samples else wide @ conditioner
    return _cast(wide, g.dtype)


def _inverse(x: Tensor, scale: float | Tensor, site: Site) -> Tensor | None:
    result, fallbacks = kernels.inverse(x, scale)
    site.statistics.fallbacks += fallbacks
    return result


def _output_factor(g: Tensor, recorded: list[Tensor], site: Site) -> Float[Tensor, "samples out"]:
    """ḡ with rows scaled so that ḡᵀḡ / b is the curvature with respect to this layer's outputs, b the layer's rows."""
    settings, count = site.settings, g.shape[0]
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
