"""What is compared: for each method the same step (zero_grad, forward, backward, SGD), but for the gradient that it uses."""

import copy
import importlib
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import isaac_newton as isaac
from isaac_lab.bench.formula import attach_formula
from isaac_lab.records import installed

__all__ = ["BASELINE", "METHODS", "SHAPE_METHODS", "Method", "Step", "kfac_backward", "missing"]

#: `step(x, y)` trains on one batch and returns the loss.
Step: TypeAlias = Callable[[Tensor, Tensor], Tensor]
#: `method(model, loss_fn, damping)` prepares a model and returns its step.
Method: TypeAlias = Callable[[nn.Module, nn.Module, float], Step]

#: What every ratio is relative to.
BASELINE = "gradient"

#: Small, so that thousands of steps on one batch leave the size of the activations about as it was.
LEARNING_RATE = 0.001


def gradient(model: nn.Module, loss_fn: nn.Module, damping: float) -> Step:
    """The plain gradient; `damping` is not used."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


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
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        output = model(x)
        loss: Tensor = loss_fn(output, y)
        handle.backward(loss, output, loss_fn)
        optimizer.step()
        return loss

    return step


def kfac(model: nn.Module, loss_fn: nn.Module, damping: float) -> Step:
    """K-FAC with the factors of the BackPACK library."""
    backward = kfac_backward(model, loss_fn, damping)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = backward(x, y)
        optimizer.step()
        return loss

    return step


def kfac_backward(model: nn.Module, loss_fn: nn.Module, damping: float) -> Step:
    """Forward and backward pass that leave λ² (B + λI)⁻¹ ∇ (A + λI)⁻¹ in `.grad`, λ² as in ζ, one sample per example."""
    # Optional, and without types of its own.
    backpack, extensions = importlib.import_module("backpack"), importlib.import_module("backpack.extensions")
    # The loss is shared with the other methods, whose steps BackPACK's hooks would slow down.
    model, loss_fn = backpack.extend(model), backpack.extend(copy.deepcopy(loss_fn))
    weights: list[Any] = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]

    def backward(x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = loss_fn(model(x), y)
        with warnings.catch_warnings(), backpack.backpack(extensions.KFAC(mc_samples=1)):
            # Torch warns where the network's input needs no gradient, as it should not.
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            loss.backward()
        for weight in weights:
            left, right = (_damped_inverse(factor, damping) for factor in weight.kfac)
            weight.grad = damping**2 * left @ weight.grad @ right
            del weight.kfac
        return loss

    return backward


def missing(method: str) -> str | None:
    """Why a method cannot run here, or None."""
    return "BackPACK is not installed" if method == "kfac" and not installed("backpack") else None


def _damped_inverse(factor: Tensor, damping: float) -> Tensor:
    return torch.inverse(factor + damping * torch.eye(len(factor), device=factor.device, dtype=factor.dtype))


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
