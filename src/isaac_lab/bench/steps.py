"""What is compared: for each method the same step (zero_grad, forward, backward, SGD), but for the gradient that it uses."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import isaac_newton as isaac
from isaac_lab.bench.formula import attach_formula
from isaac_lab.methods.kfac import Kfac
from isaac_lab.methods.optimizers import StackedSGD
from isaac_lab.noise import GivenNormal, GivenUniform
from isaac_lab.trial import Trial

#: `step(x, y)` trains on one batch and returns the loss.
Step: TypeAlias = Callable[[Tensor, Tensor], Tensor]
#: `method(model, loss_fn, damping)` prepares a model and returns its step.
Method: TypeAlias = Callable[[nn.Module, nn.Module, float], Step]

#: What every ratio is relative to.
BASELINE = "gradient"

#: Small, so that thousands of steps on one batch leave the size of the activations about as it was.
LEARNING_RATE = 0.001


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
    attach_formula(model, damping)
    return gradient(model, loss_fn, damping)


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
    optimizer = StackedSGD(ensemble, [LEARNING_RATE] * ensemble.copies)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        output = ensemble(x)
        losses = ensemble.losses(loss_fn, output, y)
        ensemble.backward(losses, output, loss_fn)
        optimizer.step()
        return losses

    return step


#: The columns of the paper's Table 2; "paper" and "zeta_star" compute the same.
METHODS: Mapping[str, Method] = MappingProxyType(
    {BASELINE: gradient, "paper": paper, "zeta_star": attached(), "zeta": zeta, "kfac": kfac}
)

#: What is compared for each of the other shapes.
SHAPE_METHODS: Mapping[str, Mapping[str, Method]] = MappingProxyType(
    {
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
)
#: What is compared for many networks at once.
GRID_METHODS: Mapping[str, Method] = MappingProxyType(
    {
        BASELINE: partial(stacked, inputs=False, outputs=False),
        "zeta_star": partial(stacked, inputs=True, outputs=False),
        "zeta": partial(stacked, inputs=True, outputs=True),
    }
)
