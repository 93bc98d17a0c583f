"""Super-resolution with the network of pytorch/examples: three times as many pixels on each side, on CIFAR-10."""

import math
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor, nn
from torch.nn import functional as F

from isaac_lab.data import images
from isaac_lab.workload import registered, seeded
from isaac_lab.workloads.examples import Examples

FACTOR = 3
#: Pixels of a target's side, the largest multiple of the factor in an image of 32.
SIDE = 30
#: Of red, green and blue in the brightness.
BRIGHTNESS = (0.299, 0.587, 0.114)
#: Images of 30 × 30 with as many pixels as four of 255 × 255.
BATCH = 289


def pairs(found: UInt8[Tensor, "images 3 32 32"]) -> tuple[Tensor, Tensor]:
    """Small and large brightness of the middle of each image."""
    edge = (found.shape[-1] - SIDE) // 2
    middle = found[:, :, edge : edge + SIDE, edge : edge + SIDE]
    # Part by part, because all images in float32 and three colours would fill a small memory.
    large = torch.cat([torch.einsum("ichw,c->ihw", part / 255, torch.tensor(BRIGHTNESS)) for part in middle.split(1000)])
    small = F.interpolate(large[:, None], scale_factor=1 / FACTOR, mode="bilinear", antialias=True)
    return small, large[:, None]


class SubPixel(nn.Sequential):
    """Convolutions on the small image; the last one has nine channels, which become the nine pixels of each place.

    Args:
        channels: Of the first two convolutions; the third has half as many.
    """

    def __init__(self, channels: int = 64) -> None:
        first, second = nn.Conv2d(1, channels, 5, padding=2), nn.Conv2d(channels, channels, 3, padding=1)
        third = nn.Conv2d(channels, channels // 2, 3, padding=1)
        last = nn.Conv2d(channels // 2, FACTOR**2, 3, padding=1)
        for layer in (first, second, third):
            nn.init.orthogonal_(layer.weight, nn.init.calculate_gain("relu"))
        nn.init.orthogonal_(last.weight)
        super().__init__(first, nn.ReLU(), second, nn.ReLU(), third, nn.ReLU(), last, nn.PixelShuffle(FACTOR))


@registered("super-resolution", "batch", "examples", "tested", "split")
class SuperResolution(Examples):
    """Squared error of a pixel; reported is the PSNR. See `examples.Examples` for the options."""

    quantity = "test_loss"
    metrics = MappingProxyType({"test_psnr": "PSNR"})
    last = "6"

    def __init__(self, small: bool, device: str, folder: Path | None, *, batch: int = 0, **options: Any) -> None:
        found = images.load("toy-images" if small else "cifar-10", folder)
        train, test = (pairs(part[:60] if small else part) for part in (found.train, found.test))
        super().__init__(train, test, device, batch=batch or (10 if small else BATCH), **options)
        self._channels = 8 if small else 64
        self.data, self.checksum, self.title = found.title, found.checksum, f"Super-resolution, {found.title}"

    def model(self, seed: int) -> nn.Module:
        """The network, with the script's orthogonal initial weights."""
        return seeded(lambda: SubPixel(self._channels), seed).to(self._device)

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Mean over images and pixels."""
        return F.mse_loss(model(batch[0]), batch[1])

    def sums(self, model: nn.Module, *tensors: Tensor) -> dict[str, Tensor]:
        """Mean squared error of each image."""
        return {"loss": (model(tensors[0]) - tensors[1]).square().flatten(1).mean(1).sum()}

    def named(self, train: dict[str, float], test: dict[str, float]) -> dict[str, float]:
        """In decibels, of all pixels together."""
        return {"test_psnr": -10 * math.log10(test["loss"]) if test["loss"] > 0 else math.nan}
