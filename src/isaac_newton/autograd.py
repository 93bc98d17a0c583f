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
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from isaac_newton import compiled, equations, kernels, rows, saved
from isaac_newton.curvature import Curvature, Place
from isaac_newton.inputs import Shared
from isaac_newton.kernels import streams
from isaac_newton.settings import Settings
from isaac_newton.statistics import Statistics

__all__ = ["Arrange", "Site", "condition", "condition_output", "linear", "multiply_rows", "rows_conditioner"]

#: Brings a layer's input into the layout of `rows`: the view, and how many of its dimensions are positions.
Arrange: TypeAlias = Callable[[Tensor], tuple[Tensor, int]]


class Site:
    """One conditioned layer as the backward pass sees it: its name, the settings it shares, its own statistics."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self.settings = settings
        self.statistics = Statistics()
        #: Until a forward pass shows that it does not save its input as it is.
        self.leaves_backward_to_torch = True
        #: With `when="step"`: what each matrix of the layer has gathered.
        self.curvatures: dict[Place, Curvature] = {}
        self.number = compiled.number(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, number=compiled.number(self))

    def place(self, weight: Tensor, *, transposed: bool = False, bias: Tensor | None = None) -> Place:
        """Where the gradient of this weight will be found at the step. Only the attached layer knows its parameters."""
        raise TypeError("when='step' needs a layer that was attached with isaac_newton.attach")

    def is_empty(self, place: Place) -> bool:
        """Whether the parameter has no gradient yet: nothing was accumulated since the last step."""
        raise NotImplementedError

    def leaves(self, place: Place) -> None:
        """Called at the end of a backward pass that gathered for this place."""
        raise NotImplementedError

    def gathers(self, place: Place) -> bool:
        """Whether the next step will look at what the backward passes before it gather."""
        curvature, settings = self.curvatures.get(place), self.settings
        return settings.decay > 0 or curvature is None or curvature.conditioner is None or curvature.age >= settings.refresh

    def curvature(self, place: Place) -> Curvature:
        """That of one matrix, ready to gather in the current backward pass."""
        curvature = self.curvatures.setdefault(place, Curvature())
        if curvature.enter(torch._C._current_graph_task_id()):
            torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self.leaves, place))
            # A pass that starts from an empty gradient starts from nothing here too, so a batch whose step was skipped (an
            # overflow under a `GradScaler`) leaves no trace.
            if curvature.gathered and self.is_empty(place):
                curvature.clear()
                self.settings.warn_about_dropped()
        return curvature

    def fell_back(self, failures: int | Tensor = 1) -> None:
        """A factorization failed. On a GPU the number is not known yet: it is read with `Handle.statistics`."""
        if isinstance(failures, Tensor):
            self.statistics.count_on_device(failures)
        else:
            self.statistics.fallbacks += failures
            self.settings.warn_about_failure()

    def inspect(self, values: Callable[[], Tensor], damping: float | Tensor, plain: Tensor, conditioned: Tensor) -> None:
        """Record what conditioning did: the eigenvalues of the inputs' second moment, and the gradient before and after.

        Only where values are there to be looked at: not in captured steps and `torch.func`.
        """
        settings = self.settings
        traced = torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(plain)
        if not traced and settings.overlap is None:
            occasion = settings.steps if settings.when == "step" else settings.backward_passes
            self.statistics.inspect(occasion, values(), float(damping), plain, conditioned)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None, site: Site, arrange: Arrange = rows.sequence) -> Tensor:
    """`F.linear` with the weight gradient conditioned as `site` says; input and bias gradients stay torch's.

    Nothing is saved or computed beyond `F.linear` unless the weight needs a gradient.
    """
    if not (torch.is_grad_enabled() and weight.requires_grad):
        _leave_graphs_of_torch_func()
        return F.linear(input, weight, bias)
    if _is_traced():
        return _traced_linear(input, weight, bias, site, arrange)
    if site.settings.takes_every_row and site.settings.look is None:
        shared = site.settings.inputs.shared(input)
        if site.leaves_backward_to_torch and _can_leave_backward_to_torch(input, weight, bias, site):
            found = saved.linear(input, weight, bias, _Replacement(site, shared, weight.shape[0]))
            if found is not None:
                return found
            site.leaves_backward_to_torch = False
        conditioner = None
        if site.settings.overlap is not None:
            # Its inputs are all there is to wait for, so it starts before the layer's own product.
            site.settings.overlap.update([id(weight), id(bias)])
            with streams.beside(site, input):
                conditioner = _row_conditioner(_as_rows(input), site, shared, joint=_is_joint(bias, site))
        output: Tensor = _apply(_Linear, input, weight, bias, site, shared, conditioner)
        return output
    return F.linear(input, *condition(weight, bias, input, site, arrange=arrange))


def _traced_linear(input: Tensor, weight: Tensor, bias: Tensor | None, site: Site, arrange: Arrange) -> Tensor:
    """The same for torch.compile and torch.func."""
    if site.settings.needs_extra_pass and torch.compiler.is_compiling():
        from isaac_newton import uncompiled  # importing the compiler takes a second, and here it is there

        outside: Tensor = uncompiled.linear(input, weight, bias, site, arrange)
        return outside
    if site.settings.takes_every_row:
        output: Tensor = _apply_traced(_Linear, input, weight, bias, site, Shared(), None)
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
    if not (torch.is_grad_enabled() and weight.requires_grad):
        _leave_graphs_of_torch_func()
        return weight, bias
    joint = bias if bias is not None and bias.requires_grad and site.settings.bias == "joint" else None
    if site.settings.look is not None:
        r, _ = _Layout(arrange, transposed, site.settings.mask).rows(input.detach(), site.settings)
        site.settings.look(site, r if joint is None else torch.cat([r, r.new_ones(*r.shape[:2], 1)], dim=-1))
        return weight, bias
    traced = _is_traced()
    if traced:
        _refuse_steps_in_torch_func(site)
    shared = Shared() if traced else site.settings.inputs.shared(input)
    place = site.place(weight, transposed=transposed, bias=joint) if site.settings.when == "step" else None
    layout = _Layout(arrange, transposed, site.settings.mask, place)
    early = None
    if site.settings.overlap is not None and not traced:
        site.settings.overlap.update([id(weight), id(joint)])
        if site.settings.takes_few_rows:
            # They are all that the conditioner depends on, so it starts before the layer's own product.
            with streams.beside(site, input):
                early = _columns_conditioner(input, layout, site, shared, joint=joint is not None)
    arguments = (weight, joint, input, layout, site, shared, early)
    new_weight, new_bias = (_apply_traced if traced else _apply)(_Condition, *arguments)
    return new_weight, bias if joint is None else new_bias


def condition_output(
    output: Tensor, weight: Tensor, site: Site, transform: Callable[..., Tensor], *given: Tensor | None
) -> Tensor:
    """`output`, whose gradient goes through `transform` on its way back: for layers whose inputs have no gradient.

    It is called with the gradient, what is `given`, and the site; in compiled code it is an operator, with the site's number.
    """
    if not (torch.is_grad_enabled() and weight.requires_grad and output.requires_grad):
        _leave_graphs_of_torch_func()
        return output

    def hook(g: Tensor) -> Tensor:
        site.settings.enter_backward()
        with _full_precision(g):
            return transform(g, *given, site)

    if site.settings.look is not None:
        transform(output.detach(), *given, site)
        return output
    if torch.compiler.is_compiling():
        result: Tensor = _apply_traced(_Transform, output, transform, site.number, *given)
        return result
    if _is_traced():
        _refuse_steps_in_torch_func(site)
    output.register_hook(hook)
    return output


def multiply_rows(g: Float[Tensor, "rows out"], r: Float[Tensor, "rows in"], site: Site) -> Float[Tensor, "rows out"]:
    """(I + r rᵀ/(bλ))⁻¹ g, on the smaller of the two sides."""
    if site.settings.look is not None:
        site.settings.look(site, r[None])
        return g
    count, features = r.shape
    _saw(site, count, count, features, g.shape[1])
    damping, result = site.settings.input_damping(r), g
    if 0 not in r.shape and not (isinstance(damping, float) and damping == math.inf):
        scale = 1 / (count * damping)
        by_rows = count < features
        conditioner = _inverse(r if by_rows else r.mT, damping, count, site, instead=1.0 if by_rows else 0.0)
        if conditioner is not None:
            wide, r = _cast(g, conditioner.dtype), _cast(r, conditioner.dtype)
            result = conditioner @ wide if by_rows else wide - scale * r @ (conditioner @ (r.mT @ wide))
    if site.settings.inspecting:
        before, after = _cast(g, r.dtype), _cast(result, r.dtype)
        site.inspect(lambda: equations.spectrum(r), damping, before.mT @ r, after.mT @ r)
    return _cast(result, g.dtype)


def _is_traced() -> bool:
    """Whether torch.compile or torch.func is watching: tensors have no values to look at, and no identity."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def _leave_graphs_of_torch_func() -> None:
    """For the compiler, weights in `torch.func.grad` need no gradient; it would silently give the plain one."""
    if torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        torch._dynamo.graph_break(
            msg="torch.func inside of torch.compile does not say which weights need gradients: compile without fullgraph, so "
            "that torch.func runs outside of the graph"
        )


def _refuse_steps_in_torch_func(site: Site) -> None:
    if site.settings.when == "step" and not torch.compiler.is_compiling():
        raise RuntimeError("when='step' conditions the .grad of parameters, and torch.func has none: use when='backward'")


def _apply(function: type[torch.autograd.Function], *args: object) -> Any:
    """`function.apply(*args)`, without what only torch.func needs."""
    # Function.apply binds the arguments to the signature of `forward`, by inspection, at each call: longer than a product.
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def _apply_traced(function: type[torch.autograd.Function], *args: object) -> Any:
    return function.apply(*args)


def _saw(site: Site, *sizes: int, groups: int = 1, own_rows: bool = True) -> None:
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
        x = _cast(input, _working_dtype(input.dtype))
        if settings.sharing == "reduce" and self.mask is None and isinstance(self.arrange, rows.Patches):
            means, count = self.arrange.average(x)
            gathered = rows.gather(means, 0, max_rows=settings.max_rows, seed=settings.seed)
            return gathered, count * means.shape[1]
        view, positions = self.arrange(x)
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
    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, bias: Tensor | None, *rest: object) -> tuple[Tensor, Tensor | None]:
        return weight.view_as(weight), None if bias is None else bias.view_as(bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        weight, bias, x, ctx.layout, ctx.site, ctx.shared, ctx.early = inputs
        ctx.joint = bias is not None
        if ctx.site.settings.overlap is not None:
            ctx.parameters = [weight] if bias is None else [weight, bias]
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, grad_weight: Tensor, grad_bias: Tensor | None) -> Any:
        (x,), layout, site = ctx.saved_tensors, ctx.layout, ctx.site
        if torch.compiler.is_compiling():
            return *_traced_gradients(ctx, x, grad_weight, grad_bias), None, None, None, None, None
        overlap = site.settings.overlap
        site.settings.enter_backward()
        if layout.place is not None:
            with _full_precision(grad_weight):
                _gather(grad_weight, x, layout, site)
            gradients = grad_weight, grad_bias
        elif overlap is None:
            gradients = _condition_gradients(ctx, x, grad_weight, grad_bias)
        else:
            with streams.beside(site, *(tensor for tensor in (x, grad_weight, grad_bias) if tensor is not None)):
                gradients = _condition_gradients(ctx, x, grad_weight, grad_bias)
            if all(_is_stored_as_it_is(p, overlap) for p in ctx.parameters) and not ctx.joint:
                streams.join_after_backward(site)
            else:
                streams.join(site)
        return *gradients, None, None, None, None, None


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


class _Columns(NamedTuple):
    """What multiplies a gradient from the right: rows r, the inverse on their smaller side, and 1/(kλ)."""

    r: Float[Tensor, "groups rows in"]
    total: int
    inverse: Tensor | None
    scale: float | Tensor

    @property
    def damping(self) -> float | Tensor:
        """λ."""
        return math.inf if self.inverse is None else 1 / (self.r.shape[-2] * self.scale)

    def multiply(self, gradient: Float[Tensor, "groups out in"]) -> Float[Tensor, "groups out in"]:
        """∇ (I + rᵀr/(kλ))⁻¹."""
        if self.inverse is None or gradient.numel() == 0:
            return gradient
        gradient, r = _cast(gradient, self.inverse.dtype), _cast(self.r, self.inverse.dtype)
        if self.inverse.shape[-1] == gradient.shape[-1] and r.shape[-2] >= r.shape[-1]:
            return gradient @ self.inverse
        # Woodbury. The difference is inherent: the gradient need not lie in the span of r.
        return gradient - (self.scale * (gradient @ r.mT) @ self.inverse) @ r


def _columns_conditioner(x: Tensor, layout: _Layout, site: Site, shared: Shared, *, joint: bool) -> _Columns:
    """From a layer's input; layers that share it share the inverse."""
    r, total = layout.rows(x, site.settings)
    key = (layout.arrange, id(layout.mask), joint)
    if site.settings.ranks is not None:
        r = shared.get(("rows", key), functools.partial(site.settings.ranks.all_rows, r))
    if joint:
        r = torch.cat([r, r.new_ones(*r.shape[:2], 1)], dim=-1)
    return rows_conditioner(r, total, site, shared, key)


def rows_conditioner(r: Float[Tensor, "groups rows in"], total: int, site: Site, shared: Shared, key: object) -> _Columns:
    """(I + rᵀr/(kλ))⁻¹, on the smaller of the two sides, where there is anything to condition with."""
    count, features = r.shape[-2:]
    damping = site.settings.input_damping(r)
    if 0 in r.shape or (isinstance(damping, float) and damping == math.inf):
        return _Columns(r, total, None, 0.0)
    by_rows = count < features
    inverse = shared.get(key, lambda: _inverse(r if by_rows else r.mT, damping, count, site, instead=0.0 if by_rows else 1.0))
    return _Columns(r, total, inverse, 1 / (count * damping))


def _condition_gradients(ctx: Any, x: Tensor, grad_weight: Tensor, grad_bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The gradients of weight and joint bias, multiplied by the conditioner."""
    with _full_precision(grad_weight):
        columns = ctx.early
        if columns is None:
            columns = _columns_conditioner(x, ctx.layout, ctx.site, ctx.shared, joint=ctx.joint)
        gradient = _wide(grad_weight, grad_bias, ctx, columns.r)
        return _unwide(_multiply(gradient, columns, ctx.site), grad_weight, grad_bias, ctx)


def _wide(grad_weight: Tensor, grad_bias: Tensor | None, ctx: Any, r: Float[Tensor, "groups rows in"]) -> Tensor:
    """The gradient as a matrix (groups, outputs, features), with a column for a joint bias."""
    gradient: Tensor = ctx.layout.matrix(grad_weight, r.shape[0]).to(r.dtype)
    if not ctx.joint:
        return gradient
    # Without a gradient for the bias, its column is zero and does not disturb.
    column = gradient.new_zeros(gradient.shape[:2]) if grad_bias is None else grad_bias.reshape(gradient.shape[:2])
    return torch.cat([gradient, column[..., None].to(gradient.dtype)], dim=-1)


def _unwide(conditioned: Tensor, grad_weight: Tensor, grad_bias: Tensor | None, ctx: Any) -> tuple[Tensor, Tensor | None]:
    """The way back."""
    if not ctx.joint:
        return ctx.layout.unmatrix(conditioned, grad_weight), None
    new_bias = None if grad_bias is None else conditioned[..., -1].reshape(grad_bias.shape).to(grad_bias.dtype)
    return ctx.layout.unmatrix(conditioned[..., :-1], grad_weight), new_bias


def _multiply(gradient: Float[Tensor, "groups out in"], columns: _Columns, site: Site) -> Float[Tensor, "groups out in"]:
    groups, count, features = columns.r.shape
    _saw(site, columns.total, count, features, gradient.shape[-2], groups=groups, own_rows=False)
    conditioned = columns.multiply(gradient)
    if site.settings.inspecting:
        site.inspect(lambda: equations.spectrum(columns.r), columns.damping, gradient, conditioned)
    return conditioned


def _gather(gradient: Tensor, x: Tensor, layout: _Layout, site: Site) -> None:
    """Keep the rows for the step; the gradient stays as it is."""
    assert layout.place is not None
    r, total = layout.rows(x, site.settings)
    if layout.place.bias is not None:
        r = torch.cat([r, r.new_ones(*r.shape[:2], 1)], dim=-1)
    _keep(gradient, r, total, layout.place, site)


def _keep(gradient: Tensor, r: Float[Tensor, "groups rows in"], total: int, place: Place, site: Site) -> None:
    place = place._replace(groups=r.shape[0])
    outputs = gradient.numel() // max(place.groups * math.prod(r.shape[2:]), 1)
    _saw(site, total, r.shape[1], r.shape[2], outputs, groups=place.groups, own_rows=False)
    if site.gathers(place):
        site.curvature(place).add_rows(r, keep=site.settings.keeps_rows)


class _Linear(torch.autograd.Function):
    generate_vmap_rule = True

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


def _can_leave_backward_to_torch(input: Tensor, weight: Tensor, bias: Tensor | None, site: Site) -> bool:
    """Whether the input's rows are all that has to change, and where they are changed is not dearer than elsewhere."""
    settings = site.settings
    if settings.overlap is not None or settings.differentiable or settings.inspecting or settings.conditions_outputs:
        return False
    if _is_joint(bias, site):
        return False
    if torch.compiler.is_compiling() or not saved.can_replace(input, weight):
        return False
    outputs, features = weight.shape
    # On a CPU a product with fewer columns, those of g, is worth more than the host's time.
    rows = input.numel() // features
    return input.device.type != "cpu" or min(rows, features) * rows * (features - outputs) <= _CHEAP_PRODUCT


#: Multiply-adds that take a CPU about as long as a Python function in the backward pass.
_CHEAP_PRODUCT = 500_000


class _Replacement:
    """Conditions the rows that a backward pass asks for."""

    __slots__ = ("_outputs", "_shared", "_site")

    def __init__(self, site: Site, shared: Shared, outputs: int) -> None:
        self._site, self._shared, self._outputs = site, shared, outputs

    def __call__(self, a: Float[Tensor, "rows in"]) -> Float[Tensor, "rows in"]:
        """(I + a aᵀ/(bλ))⁻¹ a."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"layer {self._site.name!r}: this backward pass will be differentiated itself (create_graph=True), which the "
                "forward pass was not prepared for; set handle.differentiable = True before it"
            )
        site = self._site
        site.settings.enter_backward()
        a = _as_rows(a)
        _saw(site, a.shape[0], a.shape[0], a.shape[1], self._outputs)
        return self._shared.get("replacement", lambda: self._conditioned(a))

    def _conditioned(self, a: Float[Tensor, "rows in"]) -> Float[Tensor, "rows in"]:
        conditioner = _row_conditioner(a, self._site, self._shared, joint=False, wide=True)
        return a if conditioner is None else kernels.condition(conditioner, a)


def _gradients(
    ctx: Any, g: Tensor, a: Tensor, dtype: torch.dtype, needs_weight: bool, needs_bias: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of weight and bias, where they are needed."""
    grad_weight = grad_bias = None
    if needs_weight:
        joint = needs_bias and ctx.site.settings.bias == "joint"
        if torch.compiler.is_compiling():
            grad_weight = _cast(_weight_gradient_at_run_time(g, a, joint, ctx.site.number), dtype)
        else:
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
    plain = g
    if settings.conditions_outputs:
        recorded, ctx.gbar = ctx.gbar, []
        early = settings.overlap is not None and settings.needs_extra_pass
        g = _apply_to_outputs(g, ctx.output_conditioner if early else _output_conditioner(g, recorded, site))
    early = settings.overlap is not None
    conditioner = ctx.conditioner if early else _row_conditioner(a, site, ctx.shared, joint=joint, wide=True)
    gradient = kernels.product(g, conditioner, a)
    if settings.inspecting:
        damping = math.inf if conditioner is None else settings.input_damping(a)
        site.inspect(lambda: equations.spectrum(a), damping, kernels.product(plain, None, a), gradient)
    return gradient


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


def _output_conditioner(
    g: Float[Tensor, "rows out"], recorded: list[Float[Tensor, "rows out"]], site: Site
) -> tuple[Tensor, Tensor, float | Tensor] | None:
    """ḡ, its inverse (I + ḡ ḡᵀ/(bλ_g))⁻¹ or the one on the other side, and 1/(bλ_g); None if there is nothing to condition."""
    gbar, count = _output_factor(g, recorded, site), g.shape[0]
    samples, outputs = gbar.shape
    if 0 in (count, samples, outputs):
        return None
    damping = site.settings.current_output_damping(gbar, count)
    by_rows = samples < outputs
    conditioner = _inverse(gbar if by_rows else gbar.mT, damping, count, site, instead=0.0 if by_rows else 1.0)
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


def _inverse(x: Tensor, damping: float | Tensor, count: int, site: Site, *, instead: float = 1.0) -> Tensor | None:
    in_graph = site.settings.overlap is not None
    result, failures = kernels.inverse(x, damping, count, in_graph=in_graph, instead=instead)
    if isinstance(failures, Tensor) or failures:
        site.fell_back(failures)
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


def _traced_gradients(ctx: Any, x: Tensor, grad_weight: Tensor, grad_bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """What `_Condition.backward` does, in compiled code: the rows are traced, what becomes of them is asked for at run time."""
    layout, site = ctx.layout, ctx.site
    r, mask, total = _traced_rows(x, layout, grad_weight, site)
    if ctx.joint:
        r = torch.cat([r, r.new_ones(*r.shape[:2], 1)], dim=-1)
    if layout.place is not None:
        place = (layout.place.parameter, layout.place.start, layout.place.stop, layout.place.transposed, layout.place.bias)
        return _gather_at_run_time(grad_weight, r, mask, total, site.number, *place), grad_bias
    conditioned = _condition_at_run_time(_wide(grad_weight, grad_bias, ctx, r), r, mask, total, site.number)
    return _unwide(conditioned, grad_weight, grad_bias, ctx)


def _traced_rows(x: Tensor, layout: _Layout, gradient: Tensor, site: Site) -> tuple[Tensor, Tensor | None, int]:
    """As `_Layout.rows`, without a look at a value: rows, and which of them count."""
    settings = site.settings
    x = _cast(x, _working_dtype(x.dtype))
    view, positions = layout.arrange(x)
    places = view.shape[1 : 2 + positions]
    total = math.prod(places)
    mask = layout.mask if layout.mask is not None and layout.mask.shape == places else None
    if settings.sharing == "reduce" and positions:
        if mask is None and isinstance(layout.arrange, rows.Patches):
            view, _ = layout.arrange.average(x)
        else:
            view = rows.gather(view, positions, sharing="reduce", mask=mask)
        mask, positions, places = None, 0, view.shape[1:2]
    if settings.max_rows is not None and math.prod(places) > settings.max_rows and mask is None:
        drawn = _draw_at_run_time(gradient, math.prod(places), settings.max_rows, site.number)
        index: list[Tensor] = []
        for size in reversed(places):  # `torch.unravel_index` would fix the sizes
            index, drawn = [drawn % size, *index], drawn // size
        drawn_rows: tuple[slice | Tensor, ...] = (slice(None), *index)
        view, positions = view[drawn_rows], 0
    r = view.reshape(view.shape[0], -1, math.prod(view.shape[2 + positions :]))
    return r, None if mask is None else mask.reshape(-1), total


def _counted(r: Tensor, mask: Tensor | None, settings: Settings) -> Float[Tensor, "groups rows in"]:
    settings.enter_backward()
    return r if mask is None else rows.gather(r, 0, max_rows=settings.max_rows, mask=mask, seed=settings.seed)


@compiled.operator
def _condition_at_run_time(gradient: Tensor, r: Tensor, mask: Tensor | None, total: int, site: int) -> Tensor:
    found = compiled.site(site)
    r = _counted(r, mask, found.settings)
    if found.settings.ranks is not None:
        r = found.settings.ranks.all_rows(r)
    return _cast(_multiply(gradient, rows_conditioner(r, total, found, Shared(), None), found), gradient.dtype)


@compiled.operator
def _gather_at_run_time(
    gradient: Tensor,
    r: Tensor,
    mask: Tensor | None,
    total: int,
    site: int,
    parameter: str,
    start: int,
    stop: int,
    transposed: bool,
    bias: str | None,
) -> Tensor:
    found = compiled.site(site)
    place = Place(parameter, start, stop, transposed=transposed, bias=bias)
    _keep(gradient, _counted(r, mask, found.settings), total, place, found)
    return gradient


@functools.partial(compiled.operator, like=lambda gradient, count, most, site: gradient.new_empty(most, dtype=torch.long))
def _draw_at_run_time(gradient: Tensor, count: int, most: int, site: int) -> Tensor:
    settings = compiled.site(site).settings
    settings.enter_backward()
    return rows.draw(count, most, settings.seed).to(gradient.device)


@functools.partial(
    compiled.operator,
    like=lambda g, a, joint, site: g.new_empty(g.shape[1], a.shape[1] + int(joint), dtype=_working_dtype(a.dtype)),
)
def _weight_gradient_at_run_time(g: Tensor, a: Tensor, joint: bool, site: int) -> Tensor:
    found, shared = compiled.site(site), Shared()
    found.settings.enter_backward()
    # While a step is captured the conditioner is expected to be there.
    conditioner = _row_conditioner(a, found, shared, joint=joint) if found.settings.overlap is not None else None
    ctx = types.SimpleNamespace(site=found, shared=shared, conditioner=conditioner, gbar=[])
    return _weight_gradient(g, a, ctx, joint)
