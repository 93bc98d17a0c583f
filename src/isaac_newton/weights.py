"""Where any layer's weight gradient is multiplied by a conditioner, whatever its rows are (patches, means, a random subset).

`condition` hands out the weight under a new name, and when torch has formed the plain gradient of that, multiplies it from the
right: ζ* = ∇ (I + rᵀr/(kλ))⁻¹. In a step that is captured `conditioned` takes the layer's own backward pass apart, so that the
gradient of the weight is formed and multiplied beside the chain of input gradients.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isaac_newton import rows
from isaac_newton.ahead import can_keep
from isaac_newton.conditioners import (
    AwaitedColumns,
    as_matrix,
    columns_conditioner,
    from_matrix,
    full_precision,
    gather_rows,
    is_joint,
    multiply_gradient,
)
from isaac_newton.inputs import Shared
from isaac_newton.kernels import streams
from isaac_newton.layout import Arrange, Layout, cast
from isaac_newton.operations import Operation
from isaac_newton.site import Site
from isaac_newton.traced import is_traced, leave_graphs_of_torch_func, refuse_steps_in_torch_func, traced_gradients

__all__ = ["apply", "apply_traced", "condition", "conditioned", "half_type", "join"]


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
    layout = Layout(arrange, transposed, settings.mask, place)
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
    new_weight, new_bias = (apply_traced if traced else apply)(function, *arguments)
    return new_weight, bias if joint is None else new_bias


def conditioned(
    forward: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    operation: Operation | None,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    site: Site,
    arrange: Arrange,
) -> Tensor:
    """`forward(input, weight, bias)` with the weight's gradient conditioned.

    Args:
        forward: The layer.
        operation: The same with its gradients, where somebody has written them down.
        input: What the layer received.
        weight: (outputs, *features).
        bias: One number per output.
        site: The layer's site.
        arrange: As for `condition`.
    """
    settings = site.settings
    apart = operation is not None and settings.overlap is not None and settings.takes_few_rows and settings.look is None
    if not apart or is_traced() or is_joint(bias, site) or not (torch.is_grad_enabled() and weight.requires_grad):
        return forward(input, *condition(weight, bias, input, site, arrange=arrange))
    assert settings.overlap is not None
    settings.overlap.update([id(weight), id(bias)])
    layout = Layout(arrange, transposed=False, mask=settings.mask)
    given = AwaitedColumns(input, weight.shape[0], site, layout, False)
    with full_precision(input):
        given.start()
    output: Tensor = apply(_Apart, input, weight, bias, operation, layout, site, given)
    return output


def half_type(weight: Tensor) -> torch.dtype | None:
    """The type in which the layer will multiply by this weight if that has half precision, else None."""
    kind, dtype = weight.device.type, weight.dtype
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(kind) and dtype is not torch.float64:
        return torch.get_autocast_dtype(kind)
    return dtype if dtype in (torch.bfloat16, torch.float16) else None


def apply(function: type[torch.autograd.Function], *args: object) -> Any:
    """`function.apply(*args)`, without what only torch.func needs."""
    # Function.apply binds the arguments to the signature of `forward`, by inspection, at each call: longer than a product.
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def apply_traced(function: type[torch.autograd.Function], *args: object) -> Any:
    """`function.apply(*args)`."""
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
            gradients = _condition_gradients(ctx, x, grad_weight, grad_bias, grad_weight)
        else:
            # Those that start together have one branch.
            branch = site.settings if isinstance(ctx.given, AwaitedColumns) else ctx.given.branch
            with streams.beside(branch, *(tensor for tensor in (x, grad_weight, grad_bias) if tensor is not None)):
                weight, bias = _condition_gradients(ctx, x, grad_weight, grad_bias, grad_weight)
                gradients = _laid_out(weight, ctx.parameters[0]), bias
            join(branch, overlap, ctx.parameters, gradients, joint=ctx.joint)
        return *gradients, None, None, None, None


class _EagerCondition(_Condition):
    """With forward-mode differentiation, which the compiler does not take."""

    @staticmethod
    def jvp(ctx: Any, weight: Tensor | None, bias: Tensor | None, *rest: object) -> tuple[Tensor | None, Tensor | None]:
        return (None if weight is None else weight.view_as(weight)), (None if bias is None else bias.view_as(bias))


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        operation: Operation,
        layout: Layout,
        site: Site,
        given: AwaitedColumns,
    ) -> Tensor:
        ctx.operation, ctx.layout, ctx.site, ctx.given, ctx.joint = operation, layout, site, given, False
        ctx.parameters, ctx.input_dtype = [weight, bias], input.dtype
        # What autocast would do, and keep for the backward pass.
        dtype = half_type(weight) or weight.dtype
        x, w = cast(input, dtype), cast(weight, dtype)
        ctx.save_for_backward(x, w)
        return operation(x, w, None if bias is None else cast(bias, dtype))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x, w), settings, (weight, bias) = ctx.saved_tensors, ctx.site.settings, ctx.parameters
        needs_input, _, needs_bias, *_ = ctx.needs_input_grad
        settings.enter_backward()
        overlap = settings.overlap
        with contextlib.nullcontext() if overlap is None else streams.beside(settings, x, g):
            with full_precision(g):
                plain = ctx.operation.weight_gradient(g, x, w)
                grad_bias = cast(ctx.operation.bias_gradient(g), bias.dtype) if needs_bias else None
            grad_weight = _laid_out(_condition_gradients(ctx, x, plain, None, weight)[0], weight)
        if overlap is not None:
            join(settings, overlap, [weight, bias] if needs_bias else [weight], (grad_weight, grad_bias), joint=False)
        with full_precision(g):
            grad_input = cast(ctx.operation.input_gradient(g, x, w), ctx.input_dtype) if needs_input else None
        return grad_input, grad_weight, grad_bias, None, None, None, None


def _condition_gradients(
    ctx: Any, x: Tensor, grad_weight: Tensor, grad_bias: Tensor | None, like: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The gradients of weight and joint bias, multiplied by the conditioner; that of the weight in the type of `like`."""
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
        gradient = as_matrix(grad_weight, grad_bias, ctx, len(columns.r), columns.takes(grad_weight.dtype))
        return from_matrix(multiply_gradient(gradient, columns, ctx.site), like, grad_bias, ctx)


def _laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient with the parameter's strides, so that autograd need not copy it."""
    return gradient if gradient.stride() == parameter.stride() else torch.empty_like(parameter).copy_(gradient)


def join(
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
