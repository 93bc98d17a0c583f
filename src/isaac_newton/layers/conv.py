"""Convolutions and transposed convolutions in one, two and three dimensions.

A convolution is linear in the patches its kernel sees. A transposed convolution multiplies each place of its input by the
kernel: there the places themselves are the rows, and the outputs of the linear map are the kernel's footprints.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isaac_newton import rows
from isaac_newton.layers.registry import register
from isaac_newton.operations import Convolution
from isaac_newton.site import Site
from isaac_newton.weights import condition, conditioned

__all__: list[str] = []


@register(nn.Conv1d)
@register(nn.Conv2d)
@register(nn.Conv3d)
def _conv(layer: Any, site: Site, input: Tensor) -> Tensor:
    # In the order in which the gradient lies in memory, nothing has to be copied; at a step it is read in torch's own.
    inner = site.settings.when == "backward" and rows.has_channels_innermost(layer.weight)
    patches = rows.Patches(
        layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups, layer.padding_mode, inner
    )
    zeros = layer.padding_mode == "zeros" and not isinstance(layer.padding, str) and input.dim() == layer.weight.dim()
    operation = Convolution(layer.stride, layer.padding, layer.dilation, layer.groups) if zeros else None
    return conditioned(layer._conv_forward, operation, input, layer.weight, layer.bias, site, patches)


@register(nn.ConvTranspose1d)
@register(nn.ConvTranspose2d)
@register(nn.ConvTranspose3d)
def _conv_transpose(layer: Any, site: Site, input: Tensor, output_size: list[int] | None = None) -> Tensor:
    space = len(layer.kernel_size)

    def places(x: Tensor) -> tuple[Tensor, int]:
        x = _batched(x, layer).unflatten(1, (layer.groups, layer.in_channels // layer.groups))
        return x.movedim(1, 0).movedim(2, -1), space

    # A place contributes to many outputs, each of which gets the bias once: no column of ones could stand for it.
    weight, _ = condition(layer.weight, None, input, site, arrange=places, transposed=True)
    output_padding = layer._output_padding(
        input, output_size, layer.stride, layer.padding, layer.kernel_size, space, layer.dilation
    )
    transpose = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[space - 1]
    output: Tensor = transpose(
        input, weight, layer.bias, layer.stride, layer.padding, output_padding, layer.groups, layer.dilation
    )
    return output


def _batched(x: Tensor, layer: Any) -> Tensor:
    return x if x.dim() == len(layer.kernel_size) + 2 else torch.unsqueeze(x, 0)
