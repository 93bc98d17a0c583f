"""What compiled code leaves to eager code: ζ but for one form, and layers of hidden states; what is said while it is compiled.

A file of its own, because it imports the compiler.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isaac_newton import torch_private
from isaac_newton.core import gradient
from isaac_newton.core.layer import layer_of

__all__ = ["apply", "note", "recurrent"]


def note(r: Tensor, layer: str, total: int, count: int, features: int, outputs: int, groups: int, own: bool) -> int:
    """Keep the sizes of a use, while the compiler watches: statistics then need no operator for each layer.

    Returns a number that stands for them, negative where they are always the same.
    """
    torch_private.while_compiling(_note)
    return _noted(layer)


def _last(layer: str) -> int:
    return layer_of(int(layer)).compiled[-1][0]


_noted: Callable[[str], int] = torch.compiler.assume_constant_result(_last)


def _note(context: Any) -> None:
    names = ("r", "layer", "own", "total", "count", "features", "outputs", "groups")
    r, layer, own, *sizes = [context.get_local(name, stacklevel=1) for name in names]
    # One trace has one mode, and a layer may be called several times in it.
    compilation = r.as_fake().fake_mode
    total, count = sizes[:2]
    dynamic = None if total.is_python_constant() and count.is_python_constant() else (_expression(total), _expression(count))
    layer_of(int(layer.as_python_constant())).note_compiled(
        compilation, dynamic, (*map(_value, sizes), own.as_python_constant())
    )


def _expression(variable: Any) -> str:
    return str(variable.as_python_constant() if variable.is_python_constant() else variable.as_fake())


def _value(variable: Any) -> int:
    known: int = variable.as_python_constant() if variable.is_python_constant() else torch_private.hint(variable.as_fake())
    return known


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
