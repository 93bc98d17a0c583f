"""The passes for ḡ that ζ needs before `loss.backward()`: they leave every `.grad` alone."""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from isaac_newton.core.layer import ConditionedLayer
from isaac_newton.core.options import Run
from isaac_newton.math.likelihood import Likelihood

__all__ = ["check_output", "collect_output_gradients"]


def collect_output_gradients(
    run: Run, sites: Iterable[ConditionedLayer], output: Tensor, likelihood: Likelihood, terms: int | Tensor
) -> None:
    """Let each layer record ḡ: of the loss Hessian's root, or of labels drawn anew."""
    weights = [p for site in sites for p in site.module.parameters() if p.requires_grad]
    with _collecting(run):
        if run.options.output_curvature == "exact":
            scale = terms**-0.5
            columns = likelihood.root(output.detach())
        else:
            scale = (terms * run.options.samples) ** -0.5
            columns = (likelihood.sample(output.detach()) for _ in range(run.options.samples))
        for column in columns:
            torch.autograd.grad(output, weights, grad_outputs=column * scale, retain_graph=True, allow_unused=True)


@contextlib.contextmanager
def _collecting(run: Run) -> Iterator[None]:
    run.collecting = True
    try:
        yield
    finally:
        run.collecting = False


def check_output(output: object) -> None:
    """Refuse what no pass can begin at."""
    if not isinstance(output, Tensor):
        raise TypeError(f"output must be the tensor the loss was computed from, got {type(output).__name__}")
    if not output.requires_grad:
        raise ValueError(
            "output has no graph to backpropagate through: compute it with gradients enabled, and do not detach it"
        )
