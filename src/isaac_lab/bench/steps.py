"""What is compared: for each method the same step (zero_grad, forward, backward, SGD), but for the gradient that it uses."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

import isaac_newton as isaac
from isaac_lab.methods.kfac import Kfac
from isaac_lab.methods.optimizers import per_copy
from isaac_lab.noise import GivenNormal, GivenUniform
from isaac_lab.trial import Trial

#: `step(x, y)` trains on one batch and returns the loss.
Step: TypeAlias = Callable[[Tensor, Tensor], Tensor]
#: `method(model, loss_fn, damping)` prepares a model and returns its step.
Method: TypeAlias = Callable[[nn.Module, nn.Module, float], Step]

#: What every ratio is relative to.
BASELINE = "gradient"

#: Small, so that thousands of steps on one batch leave the size of the activations about as it was; of SGD, and of AdamW.
LEARNING_RATE, ADAMW_RATE = 0.001, 1e-5


def _descent(model: nn.Module, loss_fn: nn.Module, backward: Callable[[Tensor, Tensor], object]) -> Step:
    """SGD by the gradients that `backward(loss, output)` leaves."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        output = model(x)
        loss: Tensor = loss_fn(output, y)
        backward(loss, output)
        optimizer.step()
        return loss

    return step


def gradient(model: nn.Module, loss_fn: nn.Module, damping: float) -> Step:
    """The plain gradient; `damping` is not used."""
    return _descent(model, loss_fn, lambda loss, output: loss.backward())


def paper(model: nn.Module, loss_fn: nn.Module, damping: float) -> Step:
    """ζ* by the printed formula with an explicit inverse."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.__dict__["forward"] = partial(_Linear.apply, layer.weight, layer.bias, damping)
    return gradient(model, loss_fn, damping)


def zeta_star_as_printed(g: Float[Tensor, "rows out"], a: Float[Tensor, "rows in"], damping: float) -> Float[Tensor, "out in"]:
    r"""Theorem 3 term by term: $g^\top \bigl(I - \tfrac{1}{λ} X (\tfrac{1}{λ} X + I)^{-1}\bigr) a$ with $X = a a^\top / b$."""
    gram = a @ a.mT / a.shape[0]
    identity = torch.eye(a.shape[0], device=a.device, dtype=a.dtype)
    middle = identity - gram @ torch.inverse(gram / damping + identity) / damping
    return g.mT @ middle @ a


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, damping: float, input: Tensor) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.damping = damping
        return F.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        a, weight = ctx.saved_tensors
        _, needs_bias, _, needs_input = ctx.needs_input_grad
        grad_input = g @ weight if needs_input else None
        return zeta_star_as_printed(g, a, ctx.damping), g.sum(0) if needs_bias else None, None, grad_input


def attached(**options: Any) -> Method:
    """ζ* by this library, with these options of `isaac_newton.attach`."""

    def method(model: nn.Module, loss_fn: nn.Module, damping: float) -> Step:
        isaac.attach(model, damping=damping, **options)
        return gradient(model, loss_fn, damping)

    return method


def zeta(model: nn.Module, loss_fn: nn.Module, damping: float) -> Step:
    """ζ by this library, with one sampled label per example."""
    handle = isaac.attach(model, damping=damping, output_damping=damping, samples=1)
    return _descent(model, loss_fn, lambda loss, output: handle.backward(loss, output, loss_fn))


def kfac(model: nn.Module, loss_fn: nn.Module, damping: float) -> Step:
    """K-FAC with explicit factors and inverses, one sampled label per example."""
    conditioner = Kfac(model, None, Trial("mnist-mlp", "kfac", (("damping", damping),)))
    squares = isinstance(loss_fn, nn.MSELoss)

    def backward(loss: Tensor, output: Tensor) -> None:
        drawn = GivenNormal(torch.randn_like(output)) if squares else GivenUniform(torch.rand_like(output[:, 0]))
        conditioner.backward(loss, output, drawn)

    return _descent(model, loss_fn, backward)


def stacked(model: nn.Module, loss_fn: nn.Module, damping: float, *, inputs: bool, outputs: bool) -> Step:
    """All networks of a list at once, as an ensemble, with a damping of the inputs, of the outputs, or none."""
    given, drawn = damping if inputs else math.inf, damping if outputs else math.inf
    ensemble = isaac.Ensemble(list(model.children()), damping=given, output_damping=drawn)
    optimizer = per_copy("sgd", ensemble, LEARNING_RATE)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        output = ensemble(x)
        losses = ensemble.losses(loss_fn, output, y)
        ensemble.backward(losses, output, loss_fn)
        optimizer.step()
        return losses

    return step


def with_adamw(**options: Any) -> Method:
    """A step as in real training, attached with these options unless there are none."""

    def method(model: nn.Module, loss_fn: nn.Module, damping: float) -> Step:
        if options:
            isaac.attach(model, **{"damping": isaac.Relative(0.1), **options})
        on_gpu = next(model.parameters()).is_cuda
        optimizer = torch.optim.AdamW(model.parameters(), lr=ADAMW_RATE, fused=on_gpu)
        half = on_gpu and not isinstance(model, nn.Sequential)

        def step(x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast(x.device.type, torch.bfloat16, enabled=half):
                loss: Tensor = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss

        return step

    return method


#: The columns of the paper's Table 2; "paper" and "zeta_star" compute the same.
METHODS: Mapping[str, Method] = {
    BASELINE: gradient,
    "paper": paper,
    "zeta_star": attached(),
    "zeta": zeta,
    "kfac": kfac,
}

#: What is compared for each of the other shapes.
SHAPE_METHODS: Mapping[str, Mapping[str, Method]] = {
    "encoder": {
        BASELINE: gradient,
        "zeta_star reduce": attached(sharing="reduce"),
        "zeta_star expand": attached(sharing="expand"),
    },
    "resnet18": {
        BASELINE: gradient,
        "zeta_star last layer": attached(layers="fc"),
        "zeta_star reduce": attached(sharing="reduce"),
    },
}
#: What is compared for many networks at once.
GRID_METHODS: Mapping[str, Method] = {
    BASELINE: partial(stacked, inputs=False, outputs=False),
    "zeta_star": partial(stacked, inputs=True, outputs=False),
    "zeta": partial(stacked, inputs=True, outputs=True),
}
#: Options as a user would set them; λ is a tenth of the mean eigenvalue, but for what `attach(model)` does by itself.
MODEL_METHODS: Mapping[str, Method] = {
    BASELINE: with_adamw(),
    "auto": with_adamw(damping="auto"),
    "expand": with_adamw(sharing="expand"),
    "reduce": with_adamw(sharing="reduce"),
    "max_rows=64": with_adamw(max_rows=64),
    "max_rows=256": with_adamw(max_rows=256),
}
