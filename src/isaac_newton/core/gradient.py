"""Where ζ* or ζ takes the place of a weight's gradient: two autograd Functions, and `apply`, where every adapter ends.

`_Weights` hands weights out under other names and conditions what comes back, before autograd shows it to anybody. `_Layer` is
a layer whose backward pass is ours: a linear layer all of whose rows feed its conditioner, ζ, and captured steps.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.compiler import is_compiling

from isaac_newton import torch_private
from isaac_newton.core import traced
from isaac_newton.core.beginning import begin, begin_all
from isaac_newton.core.bucket import Bucket
from isaac_newton.core.checks import check_tensors
from isaac_newton.core.conditioner import Conditioner, multiply_own, share_beyond
from isaac_newton.core.layer import ConditionedLayer
from isaac_newton.core.operations import LINEAR, Forward, Operation, autocast_type, copies, half_type
from isaac_newton.core.ordinary import ordinary_call
from isaac_newton.core.outputs import condition_outputs, keep_output_rows, output_conditioner
from isaac_newton.core.rows import PLAIN, Arrange, as_rows, cast, layout_of, rows, sequence
from isaac_newton.core.use import Alone, Use, has_own_form, made_for, multiplied
from isaac_newton.kernels import streams
from isaac_newton.torch_private import full_precision, is_transformed, may_be_watched, node_of

__all__ = ["apply", "condition", "hand_out"]


class _Conditions(Protocol):
    size: int

    def condition(
        self, gradients: Sequence[Tensor | None], saved: Tensor | None, wanted: Sequence[bool]
    ) -> Sequence[Tensor | None]: ...


class _Context(Protocol):
    """What autograd hands to a Function, and what the two below keep there between their passes."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    next_functions: tuple[tuple[Node | None, int], ...]
    conditions: _Conditions
    has_saved: bool
    operation: Operation
    use: Use
    bias: Tensor | None
    dtypes: tuple[torch.dtype, torch.dtype]
    parameter: Tensor

    def save_for_backward(self, *tensors: Tensor) -> None: ...
    def save_for_forward(self, *tensors: Tensor) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...


def apply(
    operation: Forward,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layer: ConditionedLayer,
    arrange: Arrange = sequence,
    *,
    transposed: bool = False,
    outputs: Arrange = sequence,
) -> Tensor:
    """`operation(x, weight, bias)`, bit for bit; the gradient of the weight will be conditioned.

    Where the layer computes an `Operation`, its gradients can be had one by one. `arrange` and `outputs` say how the input and
    the gradient of the output become rows, `transposed` whether dimension 0 of the weight holds the features.
    """
    if is_compiling() or is_transformed():  # `is_traced`, a call less for each layer
        return traced.apply(operation, x, weight, bias, layer, arrange, transposed, outputs)
    if not (torch.is_grad_enabled() and weight.requires_grad):
        layer.met_frozen()
        return operation(x, weight, bias)
    run, place = layer.run, layer.bucket
    use = _use_of(operation, x, weight, bias, layer, arrange, transposed, outputs)
    if run.row_observer is not None:
        observe(use)
        return operation(x, weight, bias)
    if use.own or (run.capture is not None and _is_split(operation, use)):
        _note(use, weight, bias, torch_private.saves_elsewhere())
        output: Tensor = torch_private.call(_Layer, x, weight, bias, operation, use)
        return output
    if place is not None and _shares_a_node(place, use, weight):
        if arrange is sequence and layer.ordinary is None:
            layer.ordinary = ordinary_call(layer, place, operation, use.layout, hand_out)
        half = autocast_type(weight)
        x = use.in_type(x, half) if half is not None and x.dtype is torch.float32 else x
        output = operation(x, *place[0].take(use, place[1], bias, half, hand_out))
        node = node_of(output)
        if node is not None:
            node.metadata[Use] = use  # the graph of the call owns the use
    else:
        output = operation(x, *_alone(use, weight, bias))
    return _shown(output, use) if run.conditions_outputs else output


def _shown(output: Tensor, use: Use) -> Tensor:
    """For ζ the gradient that comes back to the output is shown to the use."""
    node = torch_private.node_of(output)
    if node is not None:
        node.register_prehook(lambda gradients: keep_output_rows(use, gradients[0]))
    return output


def condition(
    weight: Tensor,
    bias: Tensor | None,
    input: Tensor,
    site: ConditionedLayer,
    *,
    arrange: Arrange = sequence,
    transposed: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`weight` and `bias`, unchanged but for what a backward pass leaves in their `.grad`: the conditioned gradient.

    Args:
        weight: (outputs, *features), or with `transposed` (features, *outputs); with groups, the groups come first in
            dimension 0.
        bias: One number per output; returned as it is unless `bias="joint"`.
        input: What the layer received.
        site: The layer's site.
        arrange: Brings `input` into the shape (groups, samples, *positions, *features), and says how many dimensions are
            positions; the default takes the last dimension for the features.
        transposed: Whether dimension 0 of the weight holds the features.
    """
    if not isinstance(site, ConditionedLayer):
        raise TypeError(f"site must be what the adapter was called with, got {type(site).__name__}")
    check_tensors(weight, bias, input)
    site.check_features(weight, input, arrange is sequence, transposed)
    if traced.is_traced():
        return traced.condition(weight, bias, input, site, arrange, transposed, site.run.mask)
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return weight, bias
    use = _use_of(None, input, weight, bias, site, arrange, transposed)
    if site.run.row_observer is not None:
        observe(use)
        return weight, bias
    return _alone(use, weight, bias)


def hand_out(
    conditions: _Conditions, saved: Tensor | None, *weights: Tensor, copied: torch.dtype | None = None
) -> Sequence[Tensor]:
    """The weights under other names, or copies of theirs in a type: what comes back goes through `conditions`."""
    names: Sequence[Tensor] = torch_private.call(_Weights, conditions, saved, copied, *weights)
    return names


def observe(use: Use) -> None:
    """Show the rows of a use to whoever asked for them."""
    with torch.no_grad():
        r = rows([use])[0].r.detach()
    assert use.layer.run.row_observer is not None
    use.layer.run.row_observer(use.layer, r if r.dim() == 3 else r[None])


def is_joint(bias: Tensor | None, layer: ConditionedLayer) -> bool:
    """Whether the bias is conditioned with the weight."""
    return layer.run.options.bias == "joint" and bias is not None and bias.requires_grad


def _use_of(
    operation: Forward | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layer: ConditionedLayer,
    arrange: Arrange,
    transposed: bool,
    outputs_as: Arrange = sequence,
) -> Use:
    """One call of a layer."""
    run, options, shape = layer.run, layer.run.options, weight.shape
    own = operation is LINEAR and has_own_form(x, layer, arrange)
    if not transposed and arrange is sequence and options.is_of_each_pass and options.bias == "plain":
        return Use(layer, PLAIN, x, run.mask, own, shape[0])
    joint = options.bias == "joint" and is_joint(bias, layer)
    outputs = weight.numel() // max(shape[0], 1) if transposed else shape[0]
    where = layer.slice(weight, transposed=transposed, bias=bias if joint else None) if options.when == "step" else None
    return Use(layer, layout_of(arrange, transposed, joint, outputs_as), x, run.mask, own, outputs, where)


def _is_split(operation: Forward, use: Use) -> bool:
    """Whether the weight's gradient is formed beside the chain of input gradients, in a captured step."""
    if use.layout.joint or not isinstance(operation, Operation):
        return False
    options = use.layer.run.options
    return options.few_rows and options.is_of_each_pass


def _shares_a_node(place: tuple[Bucket, int], use: Use, weight: Tensor) -> bool:
    """Whether a weight may be in a bucket with others; if not, it has a node of its own."""
    run = use.layer.run
    return (
        place[0].weights[place[1]] is weight  # not parametrized, not FSDP2's, not swapped
        and (run.options.few_rows or _has_few_rows(use))
        and not (use.layout.joint or run.alone)
        and run.options.ranks is None  # collectives need one order on all ranks
        and run.capture is None
        and not may_be_watched(use.layer.module)
    )


def _has_few_rows(use: Use) -> bool:
    """Whether the rows of many uses may be there at once: they are few, or the inputs themselves."""
    if use.own or use.layer.run.options.few_rows:
        return True
    return use.layout.arrange is sequence and use.mask is None and not use.layout.joint


def _note(use: Use, weight: Tensor, bias: Tensor | None, elsewhere: bool) -> None:
    """A use waits for its conditioner; in a captured step it begins now, beside the main chain."""
    run = use.layer.run
    if run.capture is not None:
        run.capture.uses.update([id(weight), id(bias)])
        with full_precision(use.input), torch.no_grad():
            begin(use)
    elif elsewhere:
        use.kept = None  # autograd saves it, as whoever hooks it wants
    elif use.own or (use.slice is None and (run.options.ranks is not None or _has_few_rows(use))):
        use.wait()


def _alone(use: Use, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A node for this weight, and the bias where that is conditioned jointly."""
    joint, elsewhere = use.layout.joint, torch_private.saves_elsewhere()
    x = use.input
    _note(use, weight, bias if joint else None, elsewhere)
    tensors = (weight, bias) if joint else (weight,)
    names = hand_out(Alone(use), x if elsewhere else None, *tensors)
    if use.slice is None and use.layer.run.options.ranks is not None:
        use.own_node(names[0])
    return names[0], names[1] if joint else bias


class _Weights(torch.autograd.Function):
    """Weights under other names: what comes back is conditioned before autograd shows it to anybody."""

    @staticmethod
    def forward(
        ctx: _Context, conditions: _Conditions, saved: Tensor | None, copied: torch.dtype | None, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.conditions, ctx.has_saved = conditions, saved is not None
        ctx.set_materialize_grads(False)
        if saved is not None:
            ctx.save_for_backward(saved)
        # Of what is returned as it came autograd makes views, which takes longer.
        return tuple([weight.detach() for weight in weights] if copied is None else copies(weights, copied))

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        first, size = int(ctx.has_saved), ctx.conditions.size
        wanted = torch_private.will_compute_each([node for node, _ in ctx.next_functions[first : first + size]])
        saved = ctx.saved_tensors[0] if ctx.has_saved else None
        return None, None, None, *ctx.conditions.condition(gradients, saved, wanted)

    @staticmethod
    def jvp(ctx: _Context, conditions: None, saved: None, copied: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if tangent is None else tangent.view_as(tangent) for tangent in tangents)


class _Layer(torch.autograd.Function):
    """A layer whose backward pass is ours."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, weight: Tensor, bias: Tensor | None, operation: Operation, use: Use) -> Tensor:
        ctx.operation, ctx.use, ctx.bias, ctx.dtypes = operation, use, bias, (x.dtype, weight.dtype)
        if use.layer.run.capture is not None:
            ctx.parameter = weight
            half = half_type(weight)
            if half is not None:
                # As autocast has it, and then for the backward pass too: there it would be one more kernel in the chain.
                x, weight = (x if use.own else cast(x, half)), cast(weight, half)
                bias = bias if bias is None else cast(bias, half)
        ctx.save_for_backward(x, weight)
        if torch_private.differentiates_forward():
            ctx.save_for_forward(x, weight)
        output = operation(x, weight, bias)
        # What a Function returns as a view may not be changed in place, and torch returns one for other than matrices.
        return output if torch_private.base(output) is None else torch_private.no_view(output)

    @staticmethod
    def backward(ctx: _Context, g: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), use, operation = ctx.saved_tensors, ctx.use, ctx.operation
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        run = use.layer.run
        grad_input = grad_weight = grad_bias = None
        if run.capture is not None and not run.collecting:
            gradients = _beside(ctx, g, x, weight, needs_bias)
            if needs_input:
                with full_precision(g):
                    grad_input = cast(operation.input_gradient(g, x, weight), ctx.dtypes[0])
            return grad_input, *gradients, None, None
        if needs_input:
            name = _conditioned_again(ctx, x, weight) if needs_weight and torch.is_grad_enabled() else weight
            grad_input = cast(operation.input_gradient(g, x, name), ctx.dtypes[0])
        if run.collecting:
            _collect(use, as_rows(g))
            return grad_input, None, None, None, None
        if needs_weight and torch_private.will_compute(ctx.next_functions[1][0]):
            grad_weight, grad_bias = _own_gradients(use, as_rows(g), x, ctx.dtypes[1], needs_bias and use.layout.joint)
        if not torch_private.keeps_graph():
            use.kept = None
        if needs_bias and grad_bias is None:
            grad_bias = cast(operation.bias_gradient(g), ctx.dtypes[1])
        return grad_input, grad_weight, grad_bias, None, None

    @staticmethod
    def jvp(ctx: _Context, *tangents: Tensor | None) -> Tensor:
        x, weight = ctx.saved_tensors
        return traced.tangent_of_linear(x, weight, *tangents[:3])


def _conditioned_again(ctx: _Context, x: Tensor, weight: Tensor) -> Tensor:
    """The weight for an input gradient that will be differentiated: what comes back of it is conditioned too.

    So the whole gradient of a weight is multiplied by its conditioner, that of a gradient penalty included.
    """
    first = ctx.use
    if first.layer.run.conditions_outputs or not weight.requires_grad:
        return weight
    use = Use(first.layer, first.layout, x, first.mask, False, first.outputs, first.slice)
    tensors = (weight, ctx.bias) if use.layout.joint else (weight,)
    return hand_out(Alone(use), None, *tensors)[0]


def _own_gradients(use: Use, g: Tensor, x: Tensor, dtype: torch.dtype, joint: bool) -> tuple[Tensor, Tensor | None]:
    """ζ* or ζ of a linear layer, and the gradient of its bias where that is conditioned jointly."""
    use.kept = x
    if use.layout.joint and not joint:
        use.layout = dataclasses.replace(use.layout, joint=False)
    run = use.layer.run
    started = run.clock.now() if run.clock.running else 0.0
    with full_precision(x):
        plain = g
        if run.conditions_outputs:
            run.enter_pass()
            g = condition_outputs(use, g)
        (made,) = made_for([use])
        if started:
            started = run.clock.add(started)
        conditioned = multiply_own(g, made, plain)
        if started:
            run.clock.add(started, share_beyond(made, g.shape[1]))

        def plainly() -> Tensor:
            return multiply_own(plain, Conditioner(made.rows))

        use.layer.saw(made, use.outputs, plainly, conditioned, own=use.own)
        conditioned = cast(conditioned, dtype)
    return (conditioned[:, :-1], conditioned[:, -1]) if joint else (conditioned, None)


def _collect(use: Use, g: Tensor) -> None:
    """An extra pass for ζ: its output gradients are ḡ."""
    use.gbar = [*(use.gbar or ()), g]
    if use.layer.run.capture is not None:
        with streams.beside(use.branch, g):
            use.output = output_conditioner(use, g)


def _beside(ctx: _Context, g: Tensor, x: Tensor, weight: Tensor, needs_bias: bool) -> tuple[Tensor | None, Tensor | None]:
    """In a captured step: the gradients of weight and bias on a branch beside the chain of input gradients."""
    use, parameter, bias = ctx.use, ctx.parameter, ctx.bias
    run, joint = use.layer.run, needs_bias and use.layout.joint
    if use.made is None:
        begin_all(use)
    run.enter_pass()
    with streams.beside(use.branch, x, g), full_precision(g):
        if use.own:
            grad_weight, grad_bias = _own_gradients(use, as_rows(g), x, parameter.dtype, joint)
        else:
            plain = cast(ctx.operation.weight_gradient(g, x, weight), parameter.dtype)
            if run.conditions_outputs:
                keep_output_rows(use, g)
            grad_weight, grad_bias = multiplied(use, plain, None, in_place=True)
        grad_weight = streams.laid_out(grad_weight, parameter)
        if bias is not None and needs_bias and grad_bias is None:
            grad_bias = cast(ctx.operation.bias_gradient(g), bias.dtype)
    parameters = [parameter] if bias is None or not needs_bias else [parameter, bias]
    assert run.capture is not None
    streams.join_gradients(use.branch, run.capture.uses, parameters, (grad_weight, grad_bias), joint=joint)
    return grad_weight, grad_bias
