"""What compiled code leaves to eager code: ζ but for one form, and layers of hidden states.

A file of its own, because it imports the compiler.
"""

from collections.abc import Callable
from typing import Any

import torch

from isaac_newton.core import gradient

__all__ = ["apply", "recurrent"]

apply = torch.compiler.disable(
    gradient.apply,
    reason="ζ with output_curvature='sampled' or 'exact' sends several passes through the graph of a layer; with max_rows or "
    "in convolutions it looks at the gradient of the output; compiled code has neither: compile without fullgraph, or use "
    "output_curvature='empirical' with max_rows=None in linear layers, or ζ* (output_damping=math.inf)",
)


def _called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


recurrent = torch.compiler.disable(
    _called,
    reason="the rows of a recurrent layer are its hidden states, which compiled code cannot hand from node to node: compile "
    "without fullgraph, or write the loop with nn.LSTMCell, nn.GRUCell or nn.RNNCell",
)
