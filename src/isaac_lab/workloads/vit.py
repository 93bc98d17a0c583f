"""A small vision transformer on CIFAR-10, with the images of the ResNet."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isaac_lab.workload import registered, seeded
from isaac_lab.workloads.resnet import ResNet


class VisionTransformer(nn.Module):
    """ViT-tiny: patches of 4 × 4, width 192, 12 layers, 3 heads; a token for the class.

    Args:
        classes: Number of classes.
        width: Features of a patch.
        layers: Blocks.
        heads: Of the attention.
        patch: Pixels of a patch's side.
        side: Pixels of an image's side.
    """

    def __init__(
        self, classes: int = 10, *, width: int = 192, layers: int = 12, heads: int = 3, patch: int = 4, side: int = 32
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 1 + (side // patch) ** 2, width))
        blocks = (
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.blocks, self.norm, self.head = nn.Sequential(*blocks), nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (batch, classes) of images (batch, 3, height, width)."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.first.expand(len(images), -1, -1), patches], 1) + self.places
        logits: Tensor = self.head(self.norm(self.blocks(tokens)[:, 0]))
        return logits


@registered("cifar-vit", "batch", "examples", "tested", "split")
class ViT(ResNet):
    """The data of the ResNet with another network; see there for the arguments."""

    last = "head"

    def __init__(self, small: bool, device: str, folder: Path | None, **options: Any) -> None:
        super().__init__(small, device, folder, channels_last=False, **options)
        self.title = f"ViT-tiny{', 2 layers of width 32' if small else ''}, {self.data}"

    def model(self, seed: int) -> nn.Module:
        """The transformer."""
        shape = {"width": 32, "layers": 2, "heads": 2, "patch": 8} if self._small else {}
        return seeded(lambda: VisionTransformer(self._classes, **shape), seed).to(self._device)
