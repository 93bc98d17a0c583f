"""What `torch.compile` and `torch.func` see of a conditioned layer.

Rows are traced. A trace would keep the damping, the draw and the precision of the day it was made, so compiled code has one
operator for the rest. It runs what eager code runs, on a list of one: today's damping and schedules, fallbacks, statistics,
ranks. It breaks no graph. Operators take numbers and tensors only, so a layer is named by its number. In torch.func the same
stages run on torch's own operations.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from isaac_newton import torch_private
from isaac_newton.core.conditioner import invert, multiply, multiply_own
from isaac_newton.core.layer import ConditionedLayer, layer_of
from isaac_newton.core.moments import WeightSlice
from isaac_newton.core.operations import LINEAR
from isaac_newton.core.outputs import condition_outputs
from isaac_newton.core.rows import Arrange, Layout, Rows, as_rows, average, cast, chosen, gather, sequence, working_dtype
from isaac_newton.core.use import Use, conditioners, has_own_form
from isaac_newton.kernels.permutation import permuted
from isaac_newton.math.patches import Patches

__all__ = ["apply", "condition", "hand_out", "is_traced", "operator", "tangent_of_linear"]

# A replayed CUDA graph would not ask again: the compiler keeps these operators out of them.
_TAGS = [torch.Tag.cudagraph_unsafe] if hasattr(torch.Tag, "cudagraph_unsafe") else []


def is_traced() -> bool:
    """Whether torch.compile or torch.func is watching: tensors have no values to look at, and no identity."""
    return torch.compiler.is_compiling() or torch_private.is_transformed()


def apply(
    operation: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layer: ConditionedLayer,
    arrange: Arrange,
    transposed: bool,
    outputs: Arrange,
) -> Tensor:
    """As `gradient.apply`."""
    run = layer.run
    own = operation is LINEAR and has_own_form(x, layer, arrange)
    if run.conditions_outputs and not (own and not run.needs_extra_pass) and _conditions(weight):
        if torch.compiler.is_compiling():
            from isaac_newton.core import uncompiled  # importing the compiler takes a second, and here it is there

            how = {"transposed": transposed, "outputs": outputs}
            outside: Tensor = uncompiled.apply(operation, x, weight, bias, layer, arrange, **how)
            return outside
        if not own:
            raise RuntimeError(
                f"layer {layer.name!r}: in torch.func no gradient of an output reaches the weight, and ζ needs it: attach with "
                "max_rows=None and linear layers only, or use ζ* (output_damping=math.inf)"
            )
    if own and _conditions(weight):
        function = _TracedLinear if torch.compiler.is_compiling() else _FunctionalLinear
        output: Tensor = _applied(function, x, weight, bias, layer)
        return output
    return operation(x, *condition(weight, bias, x, layer, arrange, transposed, run.mask))


def condition(
    weight: Tensor,
    bias: Tensor | None,
    x: Tensor,
    layer: ConditionedLayer,
    arrange: Arrange,
    transposed: bool,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """As `gradient.condition`."""
    if not _conditions(weight):
        return weight, bias
    options = layer.run.options
    if options.when == "step" and not torch.compiler.is_compiling():
        raise RuntimeError("when='step' conditions the .grad of parameters, and torch.func has none: use when='backward'")
    joint = bias if bias is not None and bias.requires_grad and options.bias == "joint" else None
    layout = Layout(arrange, transposed, joint is not None)
    where = layer.slice(weight, transposed=transposed, bias=joint)
    outputs = weight.numel() // max(weight.shape[0], 1) if transposed else weight.shape[0]
    function = _Condition if torch.compiler.is_compiling() else _FunctionalCondition
    names = _applied(function, weight, joint, x, mask, layer, layout, where, outputs)
    return names[0], bias if joint is None else names[1]


def _applied(function: type[torch.autograd.Function], *args: object) -> Any:
    return function.apply(*args)


def _conditions(weight: Tensor) -> bool:
    _leave_graphs_of_torch_func()
    return torch.is_grad_enabled() and weight.requires_grad


def _leave_graphs_of_torch_func() -> None:
    """For the compiler, weights in `torch.func.grad` need no gradient, and it would silently give the plain one.

    That of torch 2.15 knows that they do, and fails.
    """
    if torch.compiler.is_compiling() and torch_private.is_transformed():
        torch_private.break_graph(
            "torch.func inside of torch.compile does not say which weights need gradients: compile without fullgraph, so "
            "that torch.func runs outside of the graph"
        )


class _Condition(torch.autograd.Function):
    """The weight, and a joint bias, under other names."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, bias: Tensor | None, *rest: object) -> tuple[Tensor, Tensor | None]:
        return weight.view_as(weight), None if bias is None else bias.view_as(bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, _, x, mask, ctx.layer, ctx.layout, ctx.where, ctx.outputs = inputs
        ctx.save_for_backward(x, mask)

    @staticmethod
    def backward(ctx: Any, grad_weight: Tensor, grad_bias: Tensor | None) -> Any:
        (x, mask), layer, layout = ctx.saved_tensors, ctx.layer, ctx.layout
        if not torch.compiler.is_compiling():
            use = Use(layer, layout, x, mask, False, ctx.outputs)
            made = conditioners([use])[0]
            matrix = layout.matrix(grad_weight, grad_bias, made.rows.groups)
            (done,) = multiply([matrix], [made])
            return *layout.parts(done, grad_weight, grad_bias), *[None] * 6
        r, mask, total = _traced_rows(x, mask, layout, grad_weight, layer)
        if ctx.where is not None:
            where = ctx.where
            place = (where.parameter, where.start, where.stop, where.transposed, where.bias)
            return _gather_at_run_time(grad_weight, r, mask, total, layer.number, *place), grad_bias, *[None] * 6
        matrix = cast(layout.matrix(grad_weight, grad_bias, len(r)), r.dtype)
        done = _condition_at_run_time(matrix if len(r) > 1 else matrix[None], r, mask, total, layer.number)
        return *layout.parts(done if len(r) > 1 else done[0], grad_weight, grad_bias), *[None] * 6


class _FunctionalCondition(_Condition):
    """With forward-mode differentiation, which the compiler does not take."""

    @staticmethod
    def jvp(ctx: Any, weight: Tensor | None, bias: Tensor | None, *rest: object) -> tuple[Tensor | None, Tensor | None]:
        return (None if weight is None else weight.view_as(weight)), (None if bias is None else bias.view_as(bias))


def hand_out(weight: Tensor, transform: Callable[..., Tensor], number: int, *given: Tensor | None) -> Tensor:
    """The weight under another name: what comes back goes through `transform`, with what is given and the layer's number."""
    if not _conditions(weight):
        return weight
    name: Tensor = _applied(_Transformed, weight, transform, number, *given)
    return name


class _Transformed(torch.autograd.Function):
    """The weight of an embedding under another name."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, *rest: object) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.transform, ctx.number, *given = inputs
        ctx.count = len(given)
        ctx.save_for_backward(*given)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return ctx.transform(g, *ctx.saved_tensors, ctx.number), None, None, *[None] * ctx.count


class _TracedLinear(torch.autograd.Function):
    """A linear layer in its own form."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, layer: ConditionedLayer) -> Tensor:
        output = LINEAR(x, weight, bias)
        # What a Function returns as a view may not be changed in place, and torch returns one for other than matrices.
        return output if x.dim() == 2 or bias is None else torch_private.no_view(output)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, bias, ctx.layer = inputs
        ctx.joint = bias is not None and ctx.layer.run.options.bias == "joint"
        ctx.save_for_backward(x, weight)
        if not torch.compiler.is_compiling():
            ctx.save_for_forward(x, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x, weight), (needs_input, needs_weight, needs_bias, _) = ctx.saved_tensors, ctx.needs_input_grad
        grad_weight = grad_bias = None
        grad_input = cast(LINEAR.input_gradient(g, x, weight), x.dtype) if needs_input else None
        g, a, joint = as_rows(g), as_rows(x), ctx.joint and needs_bias
        if needs_weight:
            if torch.compiler.is_compiling():
                grad_weight = _own_at_run_time(g, a, joint, ctx.layer.number)
            else:
                grad_weight = _own(g, a, joint, ctx.layer)
            grad_weight = cast(grad_weight, weight.dtype)
            if joint:
                return grad_input, grad_weight[:, :-1], grad_weight[:, -1], None
        if needs_bias:
            grad_bias = cast(g.sum(0), weight.dtype)
        return grad_input, grad_weight, grad_bias, None


class _FunctionalLinear(_TracedLinear):
    """With forward-mode differentiation, which the compiler does not take."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return tangent_of_linear(*ctx.saved_tensors, *tangents[:3])


def tangent_of_linear(
    x: Tensor, weight: Tensor, x_tangent: Tensor | None, weight_tangent: Tensor | None, bias_tangent: Tensor | None
) -> Tensor:
    """Forward-mode differentiation, which conditioning has no part in."""
    result = x.new_zeros(()) if bias_tangent is None else bias_tangent
    for left, right in ((x_tangent, weight), (x, weight_tangent)):
        if left is not None and right is not None:
            result = F.linear(left, right) + result
    return result


def _own(g: Tensor, a: Tensor, joint: bool, layer: ConditionedLayer) -> Tensor:
    use = Use(layer, Layout(sequence, joint=joint), a, None, True, g.shape[1])
    (made,) = conditioners([use])
    plain = g
    if layer.run.conditions_outputs:
        g = condition_outputs(use, g)
    conditioned = multiply_own(g, made, plain)
    if torch_private.has_values(g):
        layer.saw(made, use.outputs, lambda: multiply_own(plain, type(made)(made.rows)), conditioned, own=True)
    return conditioned


def operator(function: Callable[..., Tensor], like: Callable[..., Tensor] | None = None) -> Callable[..., Tensor]:
    """Make a function an operator. It returns a tensor like its first, unless `like` gives an empty one that it is like."""

    def run(*args: Any) -> Tensor:
        result = function(*args).contiguous()
        # What an operator returns must not share memory with what it was given.
        given = {value.untyped_storage().data_ptr() for value in args if isinstance(value, Tensor)}
        return result.clone() if result.untyped_storage().data_ptr() in given else result

    made = torch.library.custom_op(
        f"isaac_newton::{function.__name__.strip('_')}",
        run,
        mutates_args=(),
        schema=torch.library.infer_schema(function, mutates_args=()),
        tags=_TAGS,
    )
    made.register_fake(like or _like_the_first)
    return made


def _like_the_first(first: Tensor, *rest: object) -> Tensor:
    return torch.empty_like(first, memory_format=torch.contiguous_format)


def _traced_rows(
    x: Tensor, mask: Tensor | None, layout: Layout, gradient: Tensor, layer: ConditionedLayer
) -> tuple[Float[Tensor, "groups rows in"], Tensor | None, int]:
    """As `rows`, without a look at a value: rows, which of them count, and how many the layer multiplied."""
    options = layer.run.options
    x = cast(x, working_dtype(x.dtype))
    # By name: the compiler of torch 2.9 cannot call an object.
    view, positions = layout.arrange.view(x) if isinstance(layout.arrange, Patches) else layout.arrange(x)
    places = view.shape[1 : 2 + positions]
    total = math.prod(places)
    mask = mask if mask is not None and mask.shape == places else None
    if options.sharing == "reduce" and positions:
        if mask is None and isinstance(layout.arrange, Patches):
            view, _ = layout.arrange.average(x)
        else:
            view = average(view, positions, mask)
        mask, positions, places = None, 0, view.shape[1:2]
    if options.max_rows is not None and math.prod(places) > options.max_rows and mask is None:
        drawn = _draw_at_run_time(gradient, math.prod(places), options.max_rows, layer.number)
        view, positions = chosen(view, places, drawn), 0
    r = view.reshape(view.shape[0], -1, math.prod(view.shape[2 + positions :]))
    if layout.joint:
        r = torch.cat([r, r.new_ones(*r.shape[:2], 1)], dim=-1)
    return r, None if mask is None else mask.reshape(-1), total


def _counted(r: Tensor, mask: Tensor | None, total: int, gradient: Tensor, layer: ConditionedLayer) -> Rows:
    """The rows that count, of all ranks where they condition together."""
    run = layer.run
    run.enter_pass()
    options = run.options
    r = r if mask is None else gather(r, 0, options.max_rows, mask, run.seed)
    if options.ranks is not None and options.when == "backward":
        r = options.ranks.exchange({(layer.name, 0): r})[layer.name, 0]
    few = r.shape[-2] < r.shape[-1]
    return Rows(r[0] if len(r) == 1 else r, total, in_difference=few, outputs=gradient.shape[-2])


@operator
def _condition_at_run_time(gradient: Tensor, r: Tensor, mask: Tensor | None, total: int, layer: int) -> Tensor:
    found = layer_of(layer)
    rows = _counted(r, mask, total, gradient, found)
    (made,) = invert([rows], *found.run.damping_now(), keep_norm=found.run.options.keep_norm)
    found.fell_back(made.failures)
    matrix = gradient if rows.r.dim() == 3 else gradient[0]
    (done,) = multiply([matrix], [made])
    found.saw(made, gradient.shape[-2], matrix, done, own=False)
    return cast(done.reshape(gradient.shape), gradient.dtype)


@operator
def _gather_at_run_time(
    gradient: Tensor,
    r: Tensor,
    mask: Tensor | None,
    total: int,
    layer: int,
    parameter: str,
    start: int,
    stop: int,
    transposed: bool,
    bias: str | None,
) -> Tensor:
    found = layer_of(layer)
    where = WeightSlice(parameter, start, stop, transposed=transposed, bias=bias)
    found.gather(where, _counted(r, mask, total, gradient, found), gradient)
    return gradient


def _draw_at_run_time(gradient: Tensor, count: int, most: int, layer: int) -> Tensor:
    run = layer_of(layer).run
    run.enter_pass()
    # What an operator returns is its own.
    return permuted(count, most, int(run.seed), 0, gradient.device).clone()


_draw_at_run_time = operator(_draw_at_run_time, lambda gradient, count, most, layer: gradient.new_empty(most, dtype=torch.long))


def _own_at_run_time(g: Tensor, a: Tensor, joint: bool, layer: int) -> Tensor:
    layer_of(layer).run.enter_pass()
    return _own(g, a, joint, layer_of(layer))


_own_at_run_time = operator(
    _own_at_run_time,
    lambda g, a, joint, layer: g.new_empty(g.shape[1], a.shape[1] + int(joint), dtype=working_dtype(a.dtype)),
)
