"""What `torch.compile` and `torch.func` see of a conditioned layer.

Rows, conditioners and products are traced, and so are torch's own operations in torch.func. λ and the drawn positions come in
through operators (`run_time`). Layers that received one tensor ask for the same things, which the compiler notices: they share
rows, Gram matrix and inverse without a word from us. Where values decide, an operator does the rest.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from isaac_newton import kernels, torch_private
from isaac_newton.core import run_time
from isaac_newton.core.conditioner import Conditioner, multiply, multiply_own
from isaac_newton.core.layer import ConditionedLayer, layer_of
from isaac_newton.core.operations import LINEAR
from isaac_newton.core.rows import Arrange, Layout, Rows, as_rows, average, cast, chosen, sequence, working_dtype
from isaac_newton.core.use import Alone, Use, conditioners, has_own_form
from isaac_newton.kernels import Inverted
from isaac_newton.math.patches import Patches

__all__ = ["apply", "condition", "hand_out", "is_traced", "tangent_of_linear"]


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
    joint = bias if bias is not None and torch_private.wants_gradient(bias) and options.bias == "joint" else None
    layout = Layout(arrange, transposed, joint is not None)
    where = layer.slice(weight, transposed=transposed, bias=joint)
    outputs = weight.numel() // max(weight.shape[0], 1) if transposed else weight.shape[0]
    function = _Condition if torch.compiler.is_compiling() else _FunctionalCondition
    x = _as_multiplied(x) if options.few_rows and joint is None and torch_private.is_autocast_on() else x
    names = _applied(function, weight, joint, x, mask, layer, layout, where, outputs)
    return names[0], bias if joint is None else names[1]


def _as_multiplied(x: Tensor) -> Tensor:
    """The input in the type in which the layer will multiply it: that one is kept for the backward pass anyway."""
    kind = x.device.type
    return cast(x, torch.get_autocast_dtype(kind)) if x.dtype is torch.float32 and torch.is_autocast_enabled(kind) else x


def _applied(function: type[torch.autograd.Function], *args: object) -> Any:
    return function.apply(*args)


def _conditions(weight: Tensor) -> bool:
    _leave_graphs_of_torch_func()
    return torch.is_grad_enabled() and torch_private.wants_gradient(weight)


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
            use = Use(layer, layout, x, mask, False, ctx.outputs, ctx.where)
            if not torch_private.is_transformed():
                # The compiler has given up in the middle: the rest is eager code.
                eager = Alone(use).condition([grad_weight, grad_bias], None, [True, grad_bias is not None])
                return *eager, *[None] * 6
            layer.run.enter_pass()
            made = conditioners([use])[0]
            matrix = layout.matrix(grad_weight, grad_bias, made.rows.groups)
            (done,) = multiply([matrix], [made])
            return *layout.parts(done, grad_weight, grad_bias), *[None] * 6
        with torch_private.full_precision(x):
            found = _traced_rows(x, mask, layout, layer)
            if _is_seen_through(layer, found):
                made, one = _traced_conditioner(found, layer, ctx.outputs, own=False)
                (done,) = multiply([layout.matrix(grad_weight, grad_bias, made.rows.groups)], [made])
                done = done * one
                return *layout.parts(done, grad_weight, grad_bias), *[None] * 6
        r, mask, total = found
        if ctx.where is not None:
            where = ctx.where
            place = (where.parameter, where.start, where.stop, where.transposed, where.bias)
            return run_time.gather_rows(grad_weight, r, mask, total, layer.number, *place), grad_bias, *[None] * 6
        matrix = cast(layout.matrix(grad_weight, grad_bias, len(r)), r.dtype)
        done = run_time.condition(matrix if len(r) > 1 else matrix[None], r, mask, total, layer.number)
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
        if not torch.compiler.is_compiling():
            layer_of(ctx.number).run.enter_pass()
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
    if not torch.compiler.is_compiling():
        return run_time.own_gradient(g, a, joint, layer)
    r = cast(a, working_dtype(a.dtype))[None]
    found = _Found(_with_ones(r) if joint else r, None, len(a))
    if not _is_seen_through(layer, found):
        return run_time.own(g, a, joint, layer.number)
    with torch_private.full_precision(a):
        made, one = _traced_conditioner(found, layer, g.shape[1], own=True)
        return multiply_own(g * one.to(g.dtype), made)


class _Found(NamedTuple):
    """Rows, which of them count, and how many the layer multiplied."""

    r: Float[Tensor, "groups rows in"]
    mask: Tensor | None
    total: int


def _is_seen_through(layer: ConditionedLayer, found: _Found) -> bool:
    """Whether no value decides what is computed: then the compiler sees all of it.

    On a CPU a difference of float32 numbers may be left with too few digits, unless λ follows the largest eigenvalue.
    """
    run, options = layer.run, layer.run.options
    if not options.few_rows or options.when == "step" or options.ranks is not None or found.mask is not None:
        return False
    if run.conditions_outputs or run.inspecting or run.relative is None:
        return False
    return found.r.dtype is torch.float64 or run.relative == "largest" or _is_inverted_by_triton(found.r)


def _is_inverted_by_triton(r: Tensor) -> bool:
    if not (kernels.HAS_TRITON and r.is_cuda):
        return False
    return r.dtype is torch.float32 and len(r) == 1 and min(r.shape[1:]) <= kernels.MOST_INVERTED


def _traced_conditioner(found: _Found, layer: ConditionedLayer, outputs: int, *, own: bool) -> tuple[Conditioner, Tensor]:
    """As `conditioners`, and a one that counts the pass (see `run_time.passing`)."""
    from isaac_newton.core import uncompiled

    run = layer.run
    groups, count, features = found.r.shape
    use = uncompiled.note(found.r, layer.token, found.total, count, features, outputs, groups, own)
    # What is always the same needs no operator for each size.
    sizes = (found.total, count) if use >= 0 else (0, 0)
    one = run_time.passing(run.number, use, *sizes, found.r.device)
    strength = run_time.strength(run.number, found.r.device)
    r = found.r[0] if groups == 1 else found.r
    rows = Rows(r, found.total, None, not own and count < features, outputs)
    # Triton reads λ as rows are.
    now = strength.to(torch.float32) if _is_inverted_by_triton(found.r) else strength
    inverse = run_time.inverse(r, now, run.relative or "", rows.in_difference, run.number)
    return Conditioner(rows, Inverted(inverse), keeps_norm=run.options.keep_norm), one


def _traced_rows(x: Tensor, mask: Tensor | None, layout: Layout, layer: ConditionedLayer) -> _Found:
    """As `rows`, without a look at a value."""
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
        drawn = run_time.draw(layer.run.number, math.prod(places), options.max_rows, x.device)
        # From the rows as the layer multiplied them, which are kept for the backward pass anyway.
        found = as_rows(x)[None, drawn] if layout.arrange is sequence else chosen(view, places, drawn)
        view, positions = found, 0
    r = view.reshape(view.shape[0], -1, math.prod(view.shape[2 + positions :]))
    return _Found(_with_ones(r) if layout.joint else r, None if mask is None else mask.reshape(-1), total)


def _with_ones(r: Float[Tensor, "groups rows in"]) -> Float[Tensor, "groups rows more"]:
    """With a last column for a joint bias."""
    return torch.cat([r, r.new_ones(*r.shape[:2], 1)], dim=-1)
