"""The output side of ζ: what conditions g, from the output gradients ḡ that extra passes recorded, or from g itself."""

import math

import torch
from torch import Tensor

from isaac_newton.core.conditioner import Conditioner, invert, multiply
from isaac_newton.core.rows import Rows, cast, working_dtype
from isaac_newton.core.use import Use

__all__ = ["condition_outputs", "output_conditioner", "output_rows"]


def condition_outputs(use: Use, g: Tensor) -> Tensor:
    """G (I + ḡᵀḡ/(bλ_g))⁻¹."""
    made = use.output if use.output is not None else output_conditioner(use, g)
    use.gbar = use.output = None
    (wide,) = multiply([cast(g, working_dtype(g.dtype))], [made])
    return cast(wide, working_dtype(g.dtype))


def output_conditioner(use: Use, g: Tensor) -> Conditioner:
    """(I + ḡᵀḡ/(bλ_g))⁻¹ on the smaller of its two sides."""
    count, run = g.shape[0], use.layer.run
    gbar = output_rows(use, g)
    # A conditioner divides by how many rows it has, and the curvature is per row of the layer.
    gbar = gbar * math.sqrt(len(gbar) / max(count, 1))
    strength, relative = run.output_damping_now()
    (made,) = invert([Rows(gbar, count, in_difference=len(gbar) < gbar.shape[1])], strength, relative)
    if isinstance(made.failures, Tensor) or made.failures:
        use.layer.fell_back(made.failures)
    return made


def output_rows(use: Use, g: Tensor) -> Tensor:
    """ḡ with rows scaled so that ḡᵀḡ / b is the curvature with respect to this layer's outputs, b the layer's rows."""
    run, count = use.layer.run, g.shape[0]
    g = cast(g, working_dtype(g.dtype))
    if run.options.output_curvature == "empirical":
        scale = math.sqrt(count) if run.empirical_scale is None else run.empirical_scale
        return g * (scale * math.sqrt(count))
    if not use.gbar:
        raise RuntimeError(
            f"layer {use.layer.name!r} has no ḡ: with output_curvature={run.options.output_curvature!r} call "
            "handle.backward(loss, output, loss_fn) in place of loss.backward(), and give it the output that depends on this "
            "layer; or use output_curvature='empirical'"
        )
    return torch.cat(use.gbar).to(g.dtype) * math.sqrt(count)
