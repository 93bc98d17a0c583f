"""Convolutions and transposed convolutions in one, two and three dimensions.

A convolution is linear in the patches its kernel sees. A transposed convolution multiplies each place of its input by the
kernel: there the places themselves are the rows, and the outputs of the linear map are the kernel's footprints.
"""

import functools
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isaac_newton.core.gradient import apply
from isaac_newton.core.layer import ConditionedLayer
from isaac_newton.core.operations import Convolution
from isaac_newton.core.rows import Arrange
from isaac_newton.layers.registry import register
from isaac_newton.math.patches import Patches, is_channels_last

__all__: list[str] = []


_kept = functools.lru_cache(maxsize=1024)(Patches)


def _patches(*how: Any) -> Patches:
    """Equal layers share one object, which is made once and not in each forward pass; the compiler cannot look it up."""
    return Patches(*how) if torch.compiler.is_compiling() else _kept(*how)


def _places(layer: Any) -> Patches:
    """The places of a convolution's output, or of a transposed one's input: what a kernel of one place would see."""
    ones = (1,) * len(layer.kernel_size)
    return _patches(ones, ones, (0,) * len(ones), ones, layer.groups)


@register(nn.Conv1d, outputs="empirical")
@register(nn.Conv2d, outputs="empirical")
@register(nn.Conv3d, outputs="empirical")
def _conv(layer: Any, site: ConditionedLayer, input: Tensor) -> Tensor:
    # In the order in which the gradient lies in memory, nothing has to be copied; at a step it is read in torch's own.
    inner = site.run.options.when == "backward" and is_channels_last(layer.weight)
    patches = _patches(layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups, layer.padding_mode, inner)
    zeros = layer.padding_mode == "zeros" and not isinstance(layer.padding, str) and input.dim() == layer.weight.dim()
    # In a captured step the gradients of a plain convolution are formed one by one.
    apart = zeros and site.run.capture is not None
    operation = Convolution(layer.stride, layer.padding, layer.dilation, layer.groups) if apart else layer._conv_forward
    return apply(operation, input, layer.weight, layer.bias, site, patches, outputs=_places(layer))


@register(nn.ConvTranspose1d, outputs="empirical")
@register(nn.ConvTranspose2d, outputs="empirical")
@register(nn.ConvTranspose3d, outputs="empirical")
def _conv_transpose(layer: Any, site: ConditionedLayer, input: Tensor, output_size: list[int] | None = None) -> Tensor:
    space = len(layer.kernel_size)
    output_padding = layer._output_padding(
        input, output_size, layer.stride, layer.padding, layer.kernel_size, space, layer.dilation
    )
    transpose = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[space - 1]

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # A place contributes to many outputs, each of which gets the bias once: no column of ones could stand for it, so
        # that the layer's own bias is added and not the one that may be joined to the weight.
        output: Tensor = transpose(
            x, weight, layer.bias, layer.stride, layer.padding, output_padding, layer.groups, layer.dilation
        )
        return output

    outputs: Arrange = _patches(layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups)
    if any(map(operator.ge, output_padding, layer.stride)):
        outputs = _Footprints(outputs, tuple(input.shape[-space:]))
    return apply(forward, input, layer.weight, None, site, _places(layer), transposed=True, outputs=outputs)


@dataclass(frozen=True)
class _Footprints:
    """What the places of a transposed convolution's input contribute to: behind the last one there is room for more."""

    arrange: Arrange
    places: tuple[int, ...]

    def __call__(self, x: Tensor) -> tuple[Tensor, int]:
        view, space = self.arrange(x)
        return view[:, :, *(slice(size) for size in self.places)], space
