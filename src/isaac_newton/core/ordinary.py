"""The ordinary call of a linear layer in eager code: what never changes is looked up once, and only the rest is asked.

It is a short way to the same node of a bucket that `gradient.apply` goes to. Where anything is special it gives no answer.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from isaac_newton.core.bucket import Bucket, OpenNode
from isaac_newton.core.layer import ConditionedLayer
from isaac_newton.core.operations import Forward, autocast_type
from isaac_newton.core.rows import Layout
from isaac_newton.core.use import Use
from isaac_newton.torch_private import is_autocast_on, is_quiet, node_of, parts_of

__all__ = ["ordinary_call"]

#: The layer's output, or None where the call is special.
Call: TypeAlias = Callable[[Tensor], Tensor | None]


def ordinary_call(
    layer: ConditionedLayer, place: tuple[Bucket, int], operation: Forward, layout: Layout, open_node: OpenNode
) -> Call | None:
    """That of a layer whose rows are drawn or averaged, and whose gradients wait for nobody else; None for others."""
    run, options, (bucket, number) = layer.run, layer.run.options, place
    draws, averages = options.max_rows is not None, options.sharing == "reduce"
    if run.conditions_outputs or not (draws or averages) or (averages and layer.is_time_first):
        return None
    if not options.is_of_each_pass or options.bias != "plain":
        return None
    weight = bucket.weights[number]
    parameters, hooks, early_hooks = parts_of(layer.module)
    features, outputs = weight.shape if layout.transposed else weight.shape[::-1]
    most = (options.max_rows or 0) * features
    lane = "drawn" if draws and not averages else None

    def call(x: Tensor) -> Tensor | None:
        if (
            run.mask is not None
            or run.is_plain
            or run.memory is not None
            or run.row_observer is not None
            or run.capture is not None
            or run.alone
            or parameters.get("weight") is not weight
            or "bias" not in parameters  # computed, as by a parametrization
            or not (weight.requires_grad and is_quiet())
            or hooks
            or early_hooks
            or type(x) is not Tensor
            or x.is_nested
            or x.layout is not torch.strided
            or (x.dim() <= 2 if averages else x.numel() <= most)
        ):
            return None
        use, half = Use(layer, layout, x, None, False, outputs), autocast_type(weight) if is_autocast_on() else None
        use.lane = lane if x.is_contiguous() else None
        if half is not None and x.dtype is torch.float32:
            x = use.in_type(x, half)
        output = operation(x, *bucket.take(use, number, parameters["bias"], half, open_node))
        node = node_of(output)
        if node is not None:
            node.metadata[Use] = use  # the graph of the call owns the use
        return output

    return call
