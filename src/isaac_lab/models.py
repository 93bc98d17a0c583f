"""The networks that the laboratory trains."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

#: Layer sizes of the paper's auto-encoder, which is that of Botev et al. (2017).
AUTOENCODER = (784, 1000, 500, 30, 500, 1000, 784)


def relu_layers(sizes: Sequence[int]) -> nn.Sequential:
    """The paper's fully connected networks: linear layers from each size to the next, fc1, fc2, …, with ReLU between them."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, (fan_in, fan_out) in enumerate(pairwise(sizes), start=1):
        layers[f"fc{number}"] = nn.Linear(fan_in, fan_out)
        if number < len(sizes) - 1:
            layers[f"relu{number}"] = nn.ReLU()
    return nn.Sequential(layers)


class EncoderClassifier(nn.Module):
    """The shape of BERT, which has 12 layers: token embedding, transformer encoder, and a classifier on the first position."""

    def __init__(
        self, *, layers: int = 2, width: int = 768, heads: int = 12, vocabulary: int = 30522, classes: int = 2
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, activation="gelu", batch_first=True) for _ in range(layers)
        )
        self.classifier = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, classes) of tokens (batch, length)."""
        x: Tensor = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.classifier(x[:, 0])
        return logits


class ResNet18(nn.Module):
    """ResNet-18 for images of 32 × 32: a 3 × 3 stem and no pooling before the first of four stages; each doubles the width."""

    def __init__(self, *, classes: int = 10, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        channels = [width, width, 2 * width, 4 * width, 8 * width]
        blocks: list[nn.Module] = []
        for before, after in pairwise(channels):
            blocks += [_Block(before, after, stride=1 if before == after else 2), _Block(after, after, stride=1)]
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(channels[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (batch, classes) of images (batch, 3, height, width)."""
        logits: Tensor = self.fc(self.blocks(self.stem(images)).mean((2, 3)))
        return logits


class _Block(nn.Module):
    """Two 3 × 3 convolutions beside a shortcut."""

    def __init__(self, before: int, after: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        residual: Tensor = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(residual + self.shortcut(x))
