"""What compiled code leaves to eager code: ζ with extra passes. A file of its own, because it imports the compiler."""

import torch

from isaac_newton import autograd

__all__ = ["linear"]

linear = torch.compiler.disable(
    autograd.linear,
    reason="ζ with output_curvature='sampled' or 'exact' sends several passes through the graph of a layer, and compiled code "
    "has none: compile without fullgraph, or use output_curvature='empirical' or ζ* (output_damping=math.inf)",
)
