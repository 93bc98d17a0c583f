"""The networks that the laboratory trains."""

from collections import OrderedDict
from itertools import pairwise

from torch import nn

__all__ = ["relu_network"]


def relu_network(inputs: int, outputs: int, *, width: int = 400, depth: int = 5) -> nn.Sequential:
    """The paper's fully connected network: `depth` linear layers, named fc1, fc2, …, with ReLU between them.

    Args:
        inputs: Size of one input row.
        outputs: Size of one output row.
        width: Units of each hidden layer.
        depth: Number of linear layers.
    """
    for name, value in {"inputs": inputs, "outputs": outputs, "width": width, "depth": depth}.items():
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
    sizes = [inputs, *[width] * (depth - 1), outputs]
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, (fan_in, fan_out) in enumerate(pairwise(sizes), start=1):
        layers[f"fc{number}"] = nn.Linear(fan_in, fan_out)
        if number < depth:
            layers[f"relu{number}"] = nn.ReLU()
    return nn.Sequential(layers)
