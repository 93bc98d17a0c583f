"""The operators of compiled code: what a trace would keep as it was on the day that it was made.

λ and the draw change from pass to pass, and a pass has to be counted. Small operators do that; they read no tensor, so that one
graph calls each once, however many layers ask. Another one inverts: it may choose a precision, and the compiler would make many
kernels of it. Where more depends on values, and with ranks and `when="step"`, one operator for each layer runs what eager code
runs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isaac_newton.core.conditioner import invert, is_usual, multiply, multiply_own
from isaac_newton.core.layer import ConditionedLayer, layer_of, live_layers
from isaac_newton.core.moments import WeightSlice
from isaac_newton.core.options import LIVE, Run
from isaac_newton.core.outputs import condition_outputs
from isaac_newton.core.rows import Layout, Rows, cast, gather, sequence, working_dtype
from isaac_newton.core.use import Use, conditioners
from isaac_newton.kernels.permutation import draw_seed, permuted
from isaac_newton.math.damping import number
from isaac_newton.torch_private import current_pass, has_values

__all__ = ["condition", "draw", "gather_rows", "inverse", "operator", "own", "own_gradient", "passing", "strength"]

#: Of λ to the largest eigenvalue, on a CPU: a difference of float32 numbers may be wrong by a thousandth where it is smaller.
_LEAST_RATIO = 1e-4
# A replayed CUDA graph would not ask again: the compiler keeps these operators out of them.
_ASKS = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()


def operator(
    function: Callable[..., Tensor], like: Callable[..., Tensor] | None = None, tags: tuple[torch.Tag, ...] = _ASKS
) -> Callable[..., Tensor]:
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
        tags=tags,
    )
    made.register_fake(like or _like_the_first)
    return made


def _like_the_first(first: Tensor, *rest: object) -> Tensor:
    return torch.empty_like(first, memory_format=torch.contiguous_format)


def _run_of(number: int) -> Run:
    return next(run for run in LIVE if run.number == number)


def _compiled_layers(run: Run) -> list[ConditionedLayer]:
    return [layer for layer in live_layers() if layer.run is run and layer.compiled]


def _passing(run: int, use: int, total: int, count: int, device: torch.device) -> Tensor:
    """A one for gradients to be multiplied by. So it belongs to the backward pass, counts it, and fills the statistics.

    `use` stands for the uses of this code whose sizes are always the same, or where it is not negative, are these.
    """
    found = _run_of(run)
    found.enter_pass()
    now = found.backward_passes
    if found.noted.get(use) != now:
        found.noted[use] = now
        for layer in _compiled_layers(found):
            for number, sizes in layer.compiled:
                if number == use:
                    own_total, own_count, features, outputs, groups, own = sizes
                    all_rows, some = (own_total, own_count) if number < 0 else (total, count)
                    shape = (some, features) if groups == 1 else (groups, some, features)
                    layer.statistics.note_sizes(now, all_rows, shape, outputs, own)
    return torch.ones((), device=device)


passing = operator(_passing, lambda run, use, total, count, device: torch.empty((), device=device))


def _is_ahead(run: Run) -> bool:
    """Whether the backward pass is still to come: to save memory, the compiler may compute rows in the forward pass."""
    if current_pass() < 0:
        return True
    run.enter_pass()
    return False


def _strength(run: int, device: torch.device) -> Tensor:
    """λ, or ρ, of the backward pass that runs or is to come."""
    found = _run_of(run)
    ahead = _is_ahead(found)
    now, _ = number(found.damping, found.backward_passes) if ahead else found.damping_now()
    return torch.tensor(float(now), dtype=torch.float64).to(device, non_blocking=True)


strength = operator(_strength, lambda run, device: torch.empty((), dtype=torch.float64, device=device))


def _draw(run: int, total: int, most: int, device: torch.device) -> Tensor:
    """The positions of so many rows, as eager code draws them in that pass."""
    found = _run_of(run)
    seed = draw_seed(found.backward_passes + 1) if _is_ahead(found) else int(found.seed)
    # What an operator returns is its own. On a CPU, or the host would wait for a GPU to look at the numbers.
    return permuted(total, most, seed, 0, "cpu").clone().to(device, non_blocking=True)


draw = operator(_draw, lambda run, total, most, device: torch.empty(most, dtype=torch.long, device=device))


def _inverse(r: Tensor, strength: Tensor, relative: str, in_difference: bool, run: int) -> Tensor:
    """That of `invert`, in the type of the rows; for all layers that have these rows."""
    now = float(strength) if strength.device.type == "cpu" else strength
    (made,) = invert([Rows(r, len(r), in_difference=in_difference)], now, relative)  # type: ignore[arg-type]
    if isinstance(made.failures, Tensor) or made.failures:
        for layer in _layers_with(r, run):
            layer.fell_back(made.failures)
    too_few = isinstance(now, float) and (now < _LEAST_RATIO or (relative and not is_usual(float(made.damping))))
    if in_difference and too_few and r.dtype is torch.float32:
        for layer in _layers_with(r, run):
            layer.lost_digits()
    if made.inverse is not None:
        return cast(made.inverse, r.dtype)
    identity = torch.eye(min(r.shape[-2:]), dtype=r.dtype, device=r.device).expand(*r.shape[:-2], -1, -1)
    return torch.zeros_like(identity) if in_difference else identity


def _layers_with(r: Tensor, run: int) -> list[ConditionedLayer]:
    """Those for which the compiler saw as many rows and features; any number of rows where that is dynamic."""
    count, features = r.shape[-2:]

    def has(number: int, sizes: tuple[int, ...]) -> bool:
        return sizes[2] == features and (sizes[1] == count or number >= 0)

    return [layer for layer in _compiled_layers(_run_of(run)) if any(has(*use) for use in layer.compiled)]


def _square(r: Tensor, *rest: object) -> Tensor:
    side = min(r.shape[-2:])
    return r.new_empty(*r.shape[:-2], side, side)


# A CUDA graph may hold it: λ is read where it lies.
inverse = operator(_inverse, _square, tags=())


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


def _condition(gradient: Tensor, r: Tensor, mask: Tensor | None, total: int, layer: int) -> Tensor:
    found = layer_of(layer)
    rows = _counted(r, mask, total, gradient, found)
    (made,) = invert([rows], *found.run.damping_now(), keep_norm=found.run.options.keep_norm)
    found.fell_back(made.failures)
    matrix = gradient if rows.r.dim() == 3 else gradient[0]
    (done,) = multiply([matrix], [made])
    found.saw(made, gradient.shape[-2], matrix, done, own=False)
    return cast(done.reshape(gradient.shape), gradient.dtype)


condition = operator(_condition)


def _gather(
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


gather_rows = operator(_gather)


def own_gradient(g: Tensor, a: Tensor, joint: bool, layer: ConditionedLayer) -> Tensor:
    """ζ* or ζ of a linear layer in its own form."""
    layer.run.enter_pass()
    use = Use(layer, Layout(sequence, joint=joint), a, None, True, g.shape[1])
    (made,) = conditioners([use])
    plain = g
    if layer.run.conditions_outputs:
        g = condition_outputs(use, g)
    conditioned = multiply_own(g, made, plain)
    if has_values(g):
        layer.saw(made, use.outputs, lambda: multiply_own(plain, type(made)(made.rows)), conditioned, own=True)
    return conditioned


def _own(g: Tensor, a: Tensor, joint: bool, layer: int) -> Tensor:
    return own_gradient(g, a, joint, layer_of(layer))


own = operator(
    _own,
    lambda g, a, joint, layer: g.new_empty(g.shape[1], a.shape[1] + int(joint), dtype=working_dtype(a.dtype)),
)
