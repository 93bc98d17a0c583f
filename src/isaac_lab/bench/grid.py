"""The grid: all 182 networks of one panel of the paper's Figure 1, trained at once."""

import math
from functools import partial

import torch
from torch import Tensor, nn

from isaac_lab.bench.problems import BATCH, Problem, classes
from isaac_lab.bench.steps import BASELINE, LEARNING_RATE, Method, Step
from isaac_lab.methods.optimizers import StackedSGD
from isaac_lab.models import relu_layers
from isaac_newton import Ensemble

#: 13 values of λ_a times 13 of λ_g and ∞.
COPIES = 182
SIZES = (784, 400, 400, 400, 400, 10)


def grid_problem(copies: int = COPIES) -> Problem:
    """So many networks with 400 neurons per layer; all see the same batch."""

    def build() -> nn.Module:
        return nn.ModuleList([relu_layers(SIZES) for _ in range(copies)])

    title = f"{copies} networks 5 layers × 400 at once"
    return classes(f"grid{copies}", title, BATCH, build, lambda: torch.rand(BATCH, SIZES[0]), SIZES[-1])


def _stacked(model: nn.Module, loss_fn: nn.Module, damping: float, *, inputs: bool, outputs: bool) -> Step:
    ensemble = Ensemble(
        list(model.children()),
        damping=damping if inputs else math.inf,
        output_damping=damping if outputs else math.inf,
    )
    optimizer = StackedSGD(ensemble, [LEARNING_RATE] * ensemble.copies)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        output = ensemble(x)
        losses = ensemble.losses(loss_fn, output, y)
        ensemble.backward(losses, output, loss_fn)
        optimizer.step()
        return losses

    return step


GRID_METHODS: dict[str, Method] = {
    BASELINE: partial(_stacked, inputs=False, outputs=False),
    "zeta_star": partial(_stacked, inputs=True, outputs=False),
    "zeta": partial(_stacked, inputs=True, outputs=True),
}
