"""What `torch.compile` and `torch.func` see of a conditioned layer: the rows are traced, the rest is asked for at run time."""

import functools
import math
import types
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from isaac_newton import compiled, rows
from isaac_newton.conditioners import (
    as_matrix,
    from_matrix,
    keep_rows,
    multiply_gradient,
    rows_conditioner,
    weight_gradient,
)
from isaac_newton.curvature import Place
from isaac_newton.inputs import Shared
from isaac_newton.layout import Layout, cast, working_dtype
from isaac_newton.settings import Settings
from isaac_newton.site import Site

__all__ = [
    "is_traced",
    "leave_graphs_of_torch_func",
    "refuse_steps_in_torch_func",
    "traced_gradients",
    "weight_gradient_at_run_time",
]


def is_traced() -> bool:
    """Whether torch.compile or torch.func is watching: tensors have no values to look at, and no identity."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def leave_graphs_of_torch_func() -> None:
    """For the compiler, weights in `torch.func.grad` need no gradient, and it would silently give the plain one.

    That of torch 2.15 knows that they do, and fails.
    """
    if torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        torch._dynamo.graph_break(
            msg="torch.func inside of torch.compile does not say which weights need gradients: compile without fullgraph, so "
            "that torch.func runs outside of the graph"
        )


def refuse_steps_in_torch_func(site: Site) -> None:
    """There is no step to wait for."""
    if site.settings.when == "step" and not torch.compiler.is_compiling():
        raise RuntimeError("when='step' conditions the .grad of parameters, and torch.func has none: use when='backward'")


def traced_gradients(ctx: Any, x: Tensor, grad_weight: Tensor, grad_bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """What `_Condition.backward` does, in compiled code: the rows are traced, what becomes of them is asked for at run time."""
    layout, site = ctx.layout, ctx.site
    r, mask, total = _traced_rows(x, layout, grad_weight, site)
    if ctx.joint:
        r = torch.cat([r, r.new_ones(*r.shape[:2], 1)], dim=-1)
    if layout.place is not None:
        place = (layout.place.parameter, layout.place.start, layout.place.stop, layout.place.transposed, layout.place.bias)
        return _gather_at_run_time(grad_weight, r, mask, total, site.number, *place), grad_bias
    gradient = as_matrix(grad_weight, grad_bias, ctx, r.shape[0], r.dtype)
    conditioned = _condition_at_run_time(gradient, r, mask, total, site.number)
    return from_matrix(conditioned, grad_weight, grad_bias, ctx)


def _traced_rows(x: Tensor, layout: Layout, gradient: Tensor, site: Site) -> tuple[Tensor, Tensor | None, int]:
    """As `Layout.rows`, without a look at a value: rows, and which of them count."""
    settings = site.settings
    x = cast(x, working_dtype(x.dtype))
    # By name: the compiler of torch 2.9 cannot call an object.
    view, positions = layout.arrange.view(x) if isinstance(layout.arrange, rows.Patches) else layout.arrange(x)
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
    return cast(multiply_gradient(gradient, rows_conditioner(r, total, found, Shared(), None), found), gradient.dtype)


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
    keep_rows(gradient, _counted(r, mask, found.settings), total, place, found)
    return gradient


@functools.partial(compiled.operator, like=lambda gradient, count, most, site: gradient.new_empty(most, dtype=torch.long))
def _draw_at_run_time(gradient: Tensor, count: int, most: int, site: int) -> Tensor:
    settings = compiled.site(site).settings
    settings.enter_backward()
    return rows.draw(count, most, settings.seed).to(gradient.device)


@functools.partial(
    compiled.operator,
    like=lambda g, a, joint, site: g.new_empty(g.shape[1], a.shape[1] + int(joint), dtype=working_dtype(a.dtype)),
)
def weight_gradient_at_run_time(g: Tensor, a: Tensor, joint: bool, site: int) -> Tensor:
    """`weight_gradient` as an operator."""
    found = compiled.site(site)
    found.settings.enter_backward()
    return weight_gradient(g, a, types.SimpleNamespace(site=found, given=Shared(), gbar=None), joint)
