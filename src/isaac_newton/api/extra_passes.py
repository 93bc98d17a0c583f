"""The passes for ḡ that ζ needs before `loss.backward()`: they leave every `.grad` alone."""

from collections.abc import Iterable

import torch
from torch import Tensor

from isaac_newton.core.layer import ConditionedLayer
from isaac_newton.core.options import Run
from isaac_newton.math.likelihood import Likelihood

__all__ = ["collect_output_gradients"]


def collect_output_gradients(
    run: Run, sites: Iterable[ConditionedLayer], output: Tensor, likelihood: Likelihood, terms: int | Tensor
) -> None:
    """Let each layer record ḡ: of the loss Hessian's root, or of labels drawn anew."""
    weights = [p for site in sites for p in site.module.parameters() if p.requires_grad]
    if run.options.output_curvature == "exact":
        scale = terms**-0.5
        columns = likelihood.root(output.detach())
    else:
        scale = (terms * run.options.samples) ** -0.5
        columns = (likelihood.sample(output.detach()) for _ in range(run.options.samples))
    run.collecting = True
    try:
        for column in columns:
            torch.autograd.grad(output, weights, grad_outputs=column * scale, retain_graph=True, allow_unused=True)
    finally:
        run.collecting = False
