"""What compiled code leaves to eager code: ζ with extra passes. A file of its own, because it imports the compiler."""

import torch

from isaac_newton.core import gradient

__all__ = ["apply"]

apply = torch.compiler.disable(
    gradient.apply,
    reason="ζ with output_curvature='sampled' or 'exact' sends several passes through the graph of a layer, and compiled code "
    "has none: compile without fullgraph, or use output_curvature='empirical' or ζ* (output_damping=math.inf)",
)
