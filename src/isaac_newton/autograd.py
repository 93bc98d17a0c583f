"""Where ζ* (or ζ) takes the place of the weight gradient of a linear layer, and where output gradients are conditioned.

`linear` is `F.linear` with a backward pass of its own. It sees the output gradients, so it can put the small matrix between
them and the inputs, which is cheapest and most accurate when the rows of the input are the rows of the conditioner, and it can
condition the output side (ζ). For other rows, as for other layers, there is `weights.condition`. `condition_output` is for
layers whose inputs have no gradient.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from isaac_newton import kernels, rows
from isaac_newton.ahead import Awaited, can_wait
from isaac_newton.conditioners import (
    Early,
    as_rows,
    early_conditioner,
    full_precision,
    is_joint,
    output_conditioner,
    weight_gradient,
)
from isaac_newton.inputs import Shared
from isaac_newton.kernels import streams
from isaac_newton.layout import Arrange, cast
from isaac_newton.operations import LINEAR
from isaac_newton.site import Site
from isaac_newton.traced import (
    is_traced,
    leave_graphs_of_torch_func,
    refuse_steps_in_torch_func,
    weight_gradient_at_run_time,
)
from isaac_newton.weights import apply_traced, condition, conditioned, half_type, join

__all__ = ["condition_output", "linear"]


def linear(input: Tensor, weight: Tensor, bias: Tensor | None, site: Site, arrange: Arrange = rows.sequence) -> Tensor:
    """`F.linear` with the weight gradient conditioned as `site` says; input and bias gradients stay torch's.

    Nothing is saved or computed beyond `F.linear` unless the weight needs a gradient.
    """
    traced = is_traced()
    if traced:
        leave_graphs_of_torch_func()
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return F.linear(input, weight, bias)
    if traced:
        return _traced_linear(input, weight, bias, site, arrange)
    if input.is_nested or input.layout is not torch.strided:
        kind = "nested" if input.is_nested else "sparse"
        raise TypeError(
            f"layer {site.name!r} received a {kind} tensor, and conditioners are made of dense rows: give it a dense one, or "
            "leave the layer out with layers="
        )
    settings = site.settings
    if not settings.takes_every_row or settings.look is not None:
        return conditioned(F.linear, LINEAR, input, weight, bias, site, arrange)
    given: Shared | Awaited | Early
    if settings.overlap is not None:
        # Its inputs are all there is to wait for, so it starts before the layer's own product.
        settings.overlap.update([id(weight), id(bias)])
        shared = settings.inputs.shared(input, branch=site)
        with streams.beside(shared.branch, input), full_precision(input):
            given = early_conditioner(input, weight.shape[0], site, shared, joint=is_joint(bias, site))
    elif can_wait(input) and not is_joint(bias, site):
        given = Awaited(input, weight.shape[0], site)
    else:
        given = settings.inputs.shared(input)
    return _apply_linear(input, weight, bias, site, given)


def _traced_linear(input: Tensor, weight: Tensor, bias: Tensor | None, site: Site, arrange: Arrange) -> Tensor:
    """The same for torch.compile and torch.func."""
    if site.settings.needs_extra_pass and torch.compiler.is_compiling():
        from isaac_newton import uncompiled  # importing the compiler takes a second, and here it is there

        outside: Tensor = uncompiled.linear(input, weight, bias, site, arrange)
        return outside
    if site.settings.takes_every_row:
        function = _TracedLinear if torch.compiler.is_compiling() else _FunctionalLinear
        output: Tensor = apply_traced(function, input, weight, bias, site, Shared())
        return output
    return F.linear(input, *condition(weight, bias, input, site, arrange=arrange))


def condition_output(
    output: Tensor,
    weight: Tensor,
    site: Site,
    transform: Callable[..., Tensor],
    *given: Tensor | None,
    ahead: Callable[..., Callable[[Tensor], Tensor]] | None = None,
) -> Tensor:
    """`output`, whose gradient goes through `transform` on its way back: for layers whose inputs have no gradient.

    It is called with the gradient, what is `given`, and the site; in compiled code it is an operator, with the site's number.
    In a step that is captured `ahead` is called before, with what is given and the site, and returns the transform.
    """
    traced = is_traced()
    if traced:
        leave_graphs_of_torch_func()
    if not (torch.is_grad_enabled() and weight.requires_grad and output.requires_grad):
        return output

    settings = site.settings
    if settings.look is not None:
        transform(output.detach(), *given, site)
        return output
    if torch.compiler.is_compiling():
        result: Tensor = apply_traced(_Transform, output, transform, site.number, *given)
        return result
    late = None
    if traced:
        refuse_steps_in_torch_func(site)
    elif ahead is not None and settings.overlap is not None and settings.when == "backward":
        # What is given is all that it depends on, so that it need not be waited for.
        with streams.beside(site, *(tensor for tensor in given if tensor is not None)):
            late = ahead(*given, site)

    def hook(g: Tensor) -> Tensor:
        settings.enter_backward()
        with full_precision(g):
            if late is None:
                return transform(g, *given, site)
            streams.join(site)
            return late(g)

    output.register_hook(hook)
    return output


class _Transform(torch.autograd.Function):
    @staticmethod
    def forward(output: Tensor, *rest: object) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.transform, ctx.number, *given = inputs
        ctx.count = len(given)
        ctx.save_for_backward(*given)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return ctx.transform(g, *ctx.saved_tensors, ctx.number), None, None, *[None] * ctx.count


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, weight: Tensor, bias: Tensor | None, site: Site, given: object) -> Tensor:
        _remember(ctx, (a, weight, bias, site, given))
        half = None if site.settings.overlap is None else half_type(weight)
        if half is not None and half is not weight.dtype:
            # As autocast has it, and then for the backward pass too: there it would be one more kernel in the chain.
            weight = weight.to(half)
            ctx.save_for_backward(a, weight)
        return LINEAR(a, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _backward_of_linear(ctx, g)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return _tangent_of_linear(ctx, *tangents[:3])


#: As `apply`, found once.
_apply_linear: Callable[..., Tensor] = super(torch.autograd.Function, _Linear).apply


class _TracedLinear(torch.autograd.Function):
    """The same in the form that torch.func asks for, which takes longer to call."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        return LINEAR(*inputs[:3])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _remember(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _backward_of_linear(ctx, g)


class _FunctionalLinear(_TracedLinear):
    """With forward-mode differentiation, which the compiler does not take."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return _tangent_of_linear(ctx, *tangents[:3])


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None, Site, object]) -> None:
    """What `_backward_of_linear` needs: input, weight, bias, site, and what is known of the conditioner."""
    a, weight, bias, ctx.site, ctx.given = inputs
    ctx.gbar = None
    if ctx.site.settings.overlap is not None:
        ctx.parameters = [weight] if bias is None else [weight, bias]
    ctx.save_for_backward(a, weight)
    if not torch.compiler.is_compiling() and forward_ad._current_level >= 0:
        # At every call it would take its time.
        ctx.save_for_forward(a, weight)


def _tangent_of_linear(
    ctx: Any, a_tangent: Tensor | None, weight_tangent: Tensor | None, bias_tangent: Tensor | None
) -> Tensor:
    """Forward-mode differentiation, which conditioning has no part in."""
    a, weight = ctx.saved_tensors
    result = a.new_zeros(()) if bias_tangent is None else bias_tangent
    for left, right in ((a_tangent, weight), (a, weight_tangent)):
        if left is not None and right is not None:
            result = F.linear(left, right) + result
    return result


def _backward_of_linear(ctx: Any, g: Tensor) -> Any:
    (a, weight), site = ctx.saved_tensors, ctx.site
    if _is_usual(ctx.given, g, a, weight):
        return _usual_backward(ctx, g, a, weight)
    settings, (needs_input, needs_weight, needs_bias, *_) = site.settings, ctx.needs_input_grad
    # Under autocast g is in the half type while a and weight are not: do as torch does, multiply in g's type.
    grad_input = cast(g @ cast(weight, g.dtype), a.dtype) if needs_input else None
    g, a = as_rows(g), as_rows(a)
    if settings.collecting:
        ctx.gbar = [*(ctx.gbar or ()), g]
        if settings.overlap is not None:
            with streams.beside(ctx.given.shared.branch, g):
                ctx.output_conditioner = output_conditioner(g, ctx.gbar, site)
        return grad_input, None, None, None, None
    if settings.overlap is None:
        return grad_input, *_gradients(ctx, g, a, weight.dtype, needs_weight, needs_bias), None, None
    with streams.beside(ctx.given.shared.branch, g, a):
        gradients = _gradients(ctx, g, a, ctx.parameters[0].dtype, needs_weight, needs_bias)
    join(ctx.given.shared.branch, settings.overlap, ctx.parameters, gradients, joint=needs_bias and settings.bias == "joint")
    return grad_input, *gradients, None, None


def _is_usual(given: object, g: Tensor, a: Tensor, weight: Tensor) -> bool:
    """Whether this is ζ* of rows in one dtype, in a pass that nobody differentiates or looks at."""
    return (
        type(given) is Awaited
        and given.site.settings.only_trains
        and a.dim() == 2
        and g.dtype is a.dtype
        and weight.dtype is a.dtype
        and not torch.is_grad_enabled()
        and not torch._C._is_any_autocast_enabled()
    )


def _usual_backward(ctx: Any, g: Tensor, a: Tensor, weight: Tensor) -> Any:
    """What is below, where nothing has to be asked: small networks spend as long on questions as on products."""
    needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    grad_input = torch.mm(g, weight) if needs_input else None
    grad_weight = None
    if needs_weight:
        # A second pass through the same graph asks anew, so that what one pass used does not outlive it.
        given, ctx.given = ctx.given, None
        settings = given.site.settings
        settings.enter_backward()
        found = given.conditioner()
        rows, features = a.shape
        given.site.statistics.saw(settings.backward_passes, rows, rows, features, g.shape[1])
        grad_weight = kernels.product(g, found.inverse, a if found.rows is None else found.rows)
    return grad_input, grad_weight, g.sum(0) if needs_bias else None, None, None


def _gradients(
    ctx: Any, g: Tensor, a: Tensor, dtype: torch.dtype, needs_weight: bool, needs_bias: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of weight and bias, where they are needed."""
    grad_weight = grad_bias = None
    if needs_weight:
        joint = needs_bias and ctx.site.settings.bias == "joint"
        if torch.compiler.is_compiling():
            grad_weight = cast(weight_gradient_at_run_time(g, a, joint, ctx.site.number), dtype)
        else:
            with full_precision(a):
                grad_weight = cast(weight_gradient(g, a, ctx, joint), dtype)
        if joint:
            return grad_weight[:, :-1], grad_weight[:, -1]
    if needs_bias:
        grad_bias = cast(g.sum(0), dtype)
    return grad_weight, grad_bias
