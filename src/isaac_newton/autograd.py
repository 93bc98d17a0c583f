"""The autograd Function that puts ζ* (or ζ) where the weight gradient of a linear map goes."""

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from isaac_newton import equations
from isaac_newton.kernels import dense
from isaac_newton.settings import Settings, Statistics

__all__ = ["Site", "linear"]


class Site:
    """One conditioned layer as the backward pass sees it: its name, the settings it shares, its own statistics."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self.settings = settings
        self.statistics = Statistics()


def linear(input: Tensor, weight: Tensor, bias: Tensor | None, site: Site) -> Tensor:
    """`F.linear` with the weight gradient conditioned as `site` says; input and bias gradients stay torch's.

    Every position of an N-D input is a row. Nothing is saved or computed beyond `F.linear` unless the weight needs a gradient.
    """
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return F.linear(input, weight, bias)
    output: Tensor = _Linear.apply(input, weight, bias, site)  # type: ignore[no-untyped-call]
    return output


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None, site: Site) -> Tensor:
        return F.linear(input, weight, bias)

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(*inputs[:2])
        ctx.site = inputs[3]
        ctx.gbar = []

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        a, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        # Under autocast g is in the half type while a and weight are not: do as torch does, multiply in g's type.
        grad_input = (g @ weight.to(g.dtype)).to(a.dtype) if needs_input else None
        if ctx.site.settings.collecting:
            ctx.gbar.append(_as_rows(g))
            return grad_input, None, None, None
        g, a = _as_rows(g), _as_rows(a)
        grad_weight = grad_bias = None
        if needs_weight:
            joint = needs_bias and ctx.site.settings.bias == "joint"
            if joint:
                a = torch.cat([a, a.new_ones(a.shape[0], 1)], dim=1)
            conditioned = _weight_gradient(g, a, ctx.gbar, ctx.site).to(weight.dtype)
            ctx.gbar = []
            if joint:
                return grad_input, conditioned[:, :-1], conditioned[:, -1], None
            grad_weight = conditioned
        if needs_bias:
            grad_bias = g.sum(0).to(weight.dtype)
        return grad_input, grad_weight, grad_bias, None


def _as_rows(x: Tensor) -> Float[Tensor, "rows features"]:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _weight_gradient(
    g: Float[Tensor, "rows out"],
    a: Float[Tensor, "rows in"],
    recorded: list[Float[Tensor, "rows out"]],
    site: Site,
) -> Float[Tensor, "out in"]:
    settings = site.settings
    settings.enter_backward()
    # Factorizations have no half-precision kernels, and their inputs deserve better.
    a = a.to(torch.promote_types(a.dtype, torch.float32))
    g = g.to(a.dtype)
    gbar = _output_factor(g, recorded, site) if settings.conditions_outputs else None
    damping, output_damping = settings.dampings(a, gbar)
    if torch.compiler.is_compiling() or a.device.type != "cpu" or torch._C._functorch.is_functorch_wrapped_tensor(a):
        if gbar is None:
            return equations.zeta_star(g, a, damping)
        return equations.zeta(g, gbar, a, output_damping, damping)
    with torch.autocast("cpu", enabled=False):
        if gbar is None:
            conditioned, fallbacks = dense.zeta_star(g, a, float(damping))
        else:
            conditioned, fallbacks = dense.zeta(g, gbar, a, float(output_damping), float(damping))
    site.statistics.fallbacks += fallbacks
    return conditioned


def _output_factor(g: Tensor, recorded: list[Tensor], site: Site) -> Float[Tensor, "samples out"]:
    """ḡ with rows scaled so that ḡᵀḡ / b is the curvature with respect to this layer's outputs, b the layer's rows."""
    settings, rows = site.settings, g.shape[0]
    if settings.output_curvature == "empirical":
        scale = math.sqrt(rows) if settings.empirical_scale is None else settings.empirical_scale
        return g * (scale * math.sqrt(rows))
    if not recorded:
        raise RuntimeError(
            f"layer {site.name!r} has no ḡ: with output_curvature={settings.output_curvature!r} call "
            "handle.backward(loss, output, loss_fn) in place of loss.backward(), and give it the output that depends on this "
            "layer; or use output_curvature='empirical'"
        )
    return torch.cat(recorded).to(g.dtype) * math.sqrt(rows)
