"""Where ζ* (or ζ) takes the place of the weight gradient: in autograd, in one of two ways.

`linear` is `F.linear` with a backward pass of its own. It sees the output gradients, so it can put the small matrix between
them and the inputs, which is cheapest and most accurate when the rows of the input are the rows of the conditioner, and it can
condition the output side (ζ).

`condition` works for any layer: it hands out the weight under a new name, and when torch has formed the plain gradient of
that, multiplies it from the right by the conditioner, ζ* = ∇ (I + rᵀr/(kλ))⁻¹, for any rows r (patches, means, a random
subset).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from isaac_newton import kernels, rows
from isaac_newton.ahead import Awaited, can_keep, can_wait
from isaac_newton.conditioners import (
    AwaitedColumns,
    Early,
    as_matrix,
    as_rows,
    columns_conditioner,
    early_conditioner,
    from_matrix,
    full_precision,
    gather_rows,
    is_joint,
    multiply_gradient,
    output_conditioner,
    weight_gradient,
)
from isaac_newton.inputs import Shared
from isaac_newton.kernels import streams
from isaac_newton.layout import Arrange, Layout, cast
from isaac_newton.site import Site
from isaac_newton.traced import (
    is_traced,
    leave_graphs_of_torch_func,
    refuse_steps_in_torch_func,
    traced_gradients,
    weight_gradient_at_run_time,
)

__all__ = ["condition", "condition_output", "linear"]


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
        return F.linear(input, *condition(weight, bias, input, site, arrange=arrange))
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
        output: Tensor = _apply_traced(function, input, weight, bias, site, Shared())
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
    if not isinstance(site, Site):
        raise TypeError(f"site must be what the adapter was called with, got {type(site).__name__}")
    for name, tensor in (("weight", weight), ("bias", bias), ("input", input)):
        if not isinstance(tensor, Tensor) and not (name == "bias" and tensor is None):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if weight.is_complex():
        raise TypeError(f"weight must be real, got {weight.dtype}: conditioners are made from real inputs")
    traced = is_traced()
    if traced:
        leave_graphs_of_torch_func()
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return weight, bias
    joint = bias if bias is not None and bias.requires_grad and site.settings.bias == "joint" else None
    if site.settings.look is not None:
        r, *_ = Layout(arrange, transposed, site.settings.mask).rows(input.detach(), site.settings)
        site.settings.look(site, r if joint is None else torch.cat([r, r.new_ones(*r.shape[:2], 1)], dim=-1))
        return weight, bias
    if traced:
        refuse_steps_in_torch_func(site)
    settings = site.settings
    overlap = None if traced else settings.overlap
    if overlap is not None:
        overlap.update([id(weight), id(joint)])
    place = site.place(weight, transposed=transposed, bias=joint) if settings.when == "step" else None
    layout = Layout(arrange, transposed, settings.mask, place, half=not traced and _is_half(weight))
    given: Shared | AwaitedColumns
    if not traced and settings.takes_few_rows and (overlap is not None or can_keep()):
        outputs = weight.numel() // max(weight.shape[0], 1) if transposed else weight.shape[0]
        given = AwaitedColumns(input, outputs, site, layout, joint is not None)
        if overlap is not None:
            with full_precision(input):
                given.start()
    else:
        given = Shared() if traced else settings.inputs.shared(input, branch=None if overlap is None else site)
    arguments = (weight, joint, input, layout, site, given)
    function = _Condition if torch.compiler.is_compiling() else _EagerCondition
    new_weight, new_bias = (_apply_traced if traced else _apply)(function, *arguments)
    return new_weight, bias if joint is None else new_bias


def _is_half(weight: Tensor) -> bool:
    """Whether the layer will multiply by this weight in half precision."""
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(weight.device.type):
        return weight.dtype is not torch.float64
    return weight.dtype in (torch.bfloat16, torch.float16)


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
        result: Tensor = _apply_traced(_Transform, output, transform, site.number, *given)
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


def _apply(function: type[torch.autograd.Function], *args: object) -> Any:
    """`function.apply(*args)`, without what only torch.func needs."""
    # Function.apply binds the arguments to the signature of `forward`, by inspection, at each call: longer than a product.
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def _apply_traced(function: type[torch.autograd.Function], *args: object) -> Any:
    return function.apply(*args)


class _Condition(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, bias: Tensor | None, *rest: object) -> tuple[Tensor, Tensor | None]:
        return weight.view_as(weight), None if bias is None else bias.view_as(bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        weight, bias, x, ctx.layout, ctx.site, ctx.given = inputs
        ctx.joint = bias is not None
        if ctx.site.settings.overlap is not None:
            ctx.parameters = [weight] if bias is None else [weight, bias]
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, grad_weight: Tensor, grad_bias: Tensor | None) -> Any:
        (x,), layout, site = ctx.saved_tensors, ctx.layout, ctx.site
        if torch.compiler.is_compiling():
            return *traced_gradients(ctx, x, grad_weight, grad_bias), None, None, None, None
        overlap = site.settings.overlap
        site.settings.enter_backward()
        if layout.place is not None:
            with full_precision(grad_weight):
                gather_rows(grad_weight, x, layout, site)
            gradients = grad_weight, grad_bias
        elif overlap is None:
            gradients = _condition_gradients(ctx, x, grad_weight, grad_bias)
        else:
            # Those that start together have one branch.
            branch = site.settings if isinstance(ctx.given, AwaitedColumns) else ctx.given.branch
            with streams.beside(branch, *(tensor for tensor in (x, grad_weight, grad_bias) if tensor is not None)):
                weight, bias = _condition_gradients(ctx, x, grad_weight, grad_bias)
                gradients = _laid_out(weight, ctx.parameters[0]), bias
            _join(branch, overlap, ctx.parameters, gradients, joint=ctx.joint)
        return *gradients, None, None, None, None


class _EagerCondition(_Condition):
    """With forward-mode differentiation, which the compiler does not take."""

    @staticmethod
    def jvp(ctx: Any, weight: Tensor | None, bias: Tensor | None, *rest: object) -> tuple[Tensor | None, Tensor | None]:
        return (None if weight is None else weight.view_as(weight)), (None if bias is None else bias.view_as(bias))


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


def _condition_gradients(ctx: Any, x: Tensor, grad_weight: Tensor, grad_bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The gradients of weight and joint bias, multiplied by the conditioner."""
    with full_precision(grad_weight):
        given = ctx.given
        if isinstance(given, Shared):
            columns = columns_conditioner(x, ctx.layout, ctx.site, given, joint=ctx.joint)
        elif torch.is_grad_enabled():
            columns = columns_conditioner(x, ctx.layout, ctx.site, Shared(), joint=ctx.joint)
        else:
            columns = given.conditioner()
            if ctx.site.settings.overlap is None:
                # A second pass through the same graph asks anew, so that what one pass used does not outlive it.
                ctx.given = Shared()
        gradient = as_matrix(grad_weight, grad_bias, ctx, columns.r)
        return from_matrix(multiply_gradient(gradient, columns, ctx.site), grad_weight, grad_bias, ctx)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, weight: Tensor, bias: Tensor | None, site: Site, given: object) -> Tensor:
        _remember(ctx, (a, weight, bias, site, given))
        return _product(a, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _backward_of_linear(ctx, g)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return _tangent_of_linear(ctx, *tangents[:3])


#: As `_apply`, found once.
_apply_linear: Callable[..., Tensor] = super(torch.autograd.Function, _Linear).apply


class _TracedLinear(torch.autograd.Function):
    """The same in the form that torch.func asks for, which takes longer to call."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        return _product(*inputs[:3])

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


def _product(a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`, but not a view, as torch returns for other than matrices: a Function's views may not be changed in place."""
    output = F.linear(a, weight, bias)
    if a.dim() == 2 or bias is None:
        return output
    whole: Tensor = torch.ops.aten._unsafe_view(output, output.shape)
    return whole


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
        gradients = _gradients(ctx, g, a, weight.dtype, needs_weight, needs_bias)
    _join(ctx.given.shared.branch, settings.overlap, ctx.parameters, gradients, joint=needs_bias and settings.bias == "joint")
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


def _laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient with the parameter's strides, so that autograd need not copy it."""
    return gradient if gradient.stride() == parameter.stride() else torch.empty_like(parameter).copy_(gradient)


def _join(
    branch: object,
    uses: Mapping[int, int],
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    *,
    joint: bool,
) -> None:
    """Wait for a layer's branch: at the end of the backward pass where nothing needs its gradients before, else now."""
    if not joint and all(_is_first_read_by_the_optimizer(parameter, uses) for parameter in parameters):
        streams.join_after_backward(branch, zip(parameters, gradients, strict=False))
    else:
        streams.join(branch)


def _is_first_read_by_the_optimizer(parameter: Tensor, uses: Mapping[int, int]) -> bool:
    """Whether a new gradient of this parameter becomes its `.grad` as it is, before anything looks at it.

    Autograd adds to a gradient that exists, sums those of several uses, and copies one whose layout is not the parameter's;
    hooks may do anything.
    """
    dense = parameter.is_contiguous() or rows.has_channels_innermost(parameter)
    hooked = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    alone = uses[id(parameter)] <= 1 and not hooked and not torch.is_grad_enabled()
    return parameter.is_leaf and parameter.grad is None and alone and dense
