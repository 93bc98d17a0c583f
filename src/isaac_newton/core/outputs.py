"""The output side of ζ: what conditions g, from the output gradients ḡ that extra passes recorded, or from g itself."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from isaac_newton import torch_private
from isaac_newton.core.conditioner import Conditioner, invert, multiply
from isaac_newton.core.options import Run
from isaac_newton.core.rows import Rows, cast, layout_of, rows, sequence, working_dtype

if TYPE_CHECKING:
    from isaac_newton.core.use import Use

__all__ = ["condition_left", "condition_outputs", "keep_output_rows", "output_conditioner", "output_rows"]


def condition_outputs(use: "Use", g: Tensor) -> Tensor:
    """G (I + ḡᵀḡ/(bλ_g))⁻¹."""
    made = use.output if use.output is not None else output_conditioner(use, g)
    use.gbar = use.output = None
    (wide,) = multiply([cast(g, working_dtype(g.dtype))], [made])
    return cast(wide, working_dtype(g.dtype))


def output_conditioner(use: "Use", g: Tensor) -> Conditioner:
    """(I + ḡᵀḡ/(bλ_g))⁻¹ on the smaller of its two sides."""
    count, run = g.shape[0], use.layer.run
    gbar = output_rows(use, g)
    # A conditioner divides by how many rows it has, and the curvature is per row of the layer.
    gbar = gbar * math.sqrt(len(gbar) / max(count, 1))
    strength, relative = run.output_damping_now()
    (made,) = invert([Rows(gbar, count, in_difference=len(gbar) < gbar.shape[1])], strength, relative)
    use.layer.fell_back(made.failures)
    return made


def output_rows(use: "Use", g: Tensor) -> Tensor:
    """ḡ with rows scaled so that ḡᵀḡ / b is the curvature with respect to this layer's outputs, b the layer's rows."""
    run, count = use.layer.run, g.shape[0]
    g = cast(g, working_dtype(g.dtype))
    if run.options.output_curvature == "empirical":
        return g * _empirical_scale(run, count)
    if not use.gbar:
        raise RuntimeError(
            f"layer {use.layer.name!r} has no ḡ: with output_curvature={run.options.output_curvature!r} call "
            "handle.backward(loss, output, loss_fn) in place of loss.backward(), and give it the output that depends on this "
            "layer; or use output_curvature='empirical'"
        )
    return torch.cat(use.gbar).to(g.dtype) * math.sqrt(count)


def _empirical_scale(run: Run, count: int) -> float | Tensor:
    """What turns g into ḡ, in a layer of so many rows."""
    return (math.sqrt(count) if run.empirical_scale is None else run.empirical_scale) * math.sqrt(count)


def keep_output_rows(use: "Use", g: Tensor | None) -> None:
    """The gradient of a layer's output is there: keep the rows of it that will condition the weight's from the left."""
    if g is None:
        return
    run = use.layer.run
    g = g.contiguous() if g.is_cuda and use.layout.outputs is sequence else g  # as the kernel that draws wants it
    # Drawn as those of the inputs are, and now: a bucket would hold all of g until it runs.
    output = type(use)(use.layer, layout_of(use.layout.outputs), g, use.mask, False, use.outputs)
    with torch_private.full_precision(g):
        (found,) = rows([output])
        r = cast(found.r, working_dtype(found.r.dtype)) * _empirical_scale(run, found.total)
    use.left = Rows(r, found.total, in_difference=r.shape[-2] < r.shape[-1])
    use.left_in = torch_private.current_pass()
    if torch.is_grad_enabled():
        # With its graph it would keep that of the layer, which owns it.
        torch_private.after_backward(lambda: setattr(use, "left", None))


def condition_left(uses: Sequence["Use"], matrices: Sequence[Tensor], *, in_place: bool) -> list[Tensor]:
    """(I + ḡᵀḡ/(kλ_g))⁻¹ ∇ for each gradient, a matrix or one for each group; `in_place` allows to write to their memory."""
    left = []
    for use in uses:
        if use.left is None or use.left_in != torch_private.current_pass():
            raise RuntimeError(
                f"layer {use.layer.name!r}: ζ conditions by the gradient of a layer's output, and this backward pass reaches "
                "the weight without one, as that of a gradient's gradient may; use ζ* (output_damping=math.inf)"
            )
        left.append(use.left)
        use.left = None
    options, (strength, relative) = uses[0].layer.run.options, uses[0].layer.run.output_damping_now()
    made = invert(left, strength, relative, keep_norm=options.keep_norm)
    for use, one in zip(uses, made, strict=True):
        use.layer.fell_back(one.failures)
    return [done.mT for done in multiply([matrix.mT for matrix in matrices], made, in_place=in_place)]
