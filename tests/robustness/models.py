"""Small random models of every layer type, each with a function that draws a batch of a size."""

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["MODELS"]


class _SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return output


Made = tuple[nn.Module, Callable[[int], Tensor]]


def _mlp(draw: random.Random) -> Made:
    sizes = [draw.randint(1, 40) for _ in range(draw.randint(2, 4))]
    layers: list[nn.Module] = []
    for number in range(len(sizes) - 1):
        layers += [nn.Linear(sizes[number], sizes[number + 1], bias=draw.random() < 0.8), nn.ReLU()]
    return nn.Sequential(*layers[:-1]), lambda size: torch.randn(size, sizes[0])


def _sequence(draw: random.Random) -> Made:
    model, batch = _mlp(draw)
    return model, lambda size: torch.stack([batch(size) for _ in range(3)], dim=1)


def _conv1(draw: random.Random) -> Made:
    groups, kernel = draw.choice([1, 1, 2]), draw.randint(1, 3)
    channels = groups * draw.randint(1, 4)
    layer = nn.Conv1d(channels, groups * draw.randint(1, 4), kernel, draw.randint(1, 2), draw.randint(0, 2), groups=groups)
    return layer, lambda size: torch.randn(size, channels, 7)


def _conv2(draw: random.Random) -> Made:
    groups = draw.choice([1, 1, 2])
    channels, middle = groups * draw.randint(1, 3), 2 * draw.randint(1, 4)
    first = nn.Conv2d(channels, middle, draw.randint(1, 3), draw.randint(1, 2), draw.randint(0, 2), groups=groups)
    model = nn.Sequential(first, nn.ReLU(), nn.Conv2d(middle, 3, 1, bias=False))
    return model, lambda size: torch.randn(size, channels, 5, 6)


def _transposed(draw: random.Random) -> Made:
    groups = draw.choice([1, 1, 2])
    channels = groups * draw.randint(1, 5)
    layer = nn.ConvTranspose1d(channels, groups * draw.randint(1, 3), draw.randint(1, 3), draw.randint(1, 2), groups=groups)
    return layer, lambda size: torch.randn(size, channels, 6)


def _embedding(draw: random.Random) -> Made:
    tokens = draw.randint(2, 30)
    return nn.Embedding(tokens, draw.randint(1, 6)), lambda size: torch.randint(tokens, (size, 5))


def _bag(draw: random.Random) -> Made:
    tokens = draw.randint(2, 30)
    return nn.EmbeddingBag(tokens, draw.randint(1, 6), mode="mean"), lambda size: torch.randint(tokens, (size, 4))


def _attention(draw: random.Random) -> Made:
    heads = draw.choice([1, 2])
    width = heads * draw.randint(1, 6)
    return _SelfAttention(width, heads), lambda size: torch.randn(size, 5, width)


MODELS: dict[str, Callable[[random.Random], Made]] = {
    "mlp": _mlp,
    "sequence": _sequence,
    "conv1": _conv1,
    "conv2": _conv2,
    "transposed": _transposed,
    "embedding": _embedding,
    "bag": _bag,
    "attention": _attention,
}
