"""Colour images as bytes, behind one `load`: CIFAR-10 from files, and a small set that is generated."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from isaac_lab.data.files import GENERATED, SETS, DataError, md5, read

CIFAR_10, TOY = "cifar-10", "toy-images"
NAMES = (CIFAR_10, TOY)
CLASSES, SHAPE, BRIGHTEST = 10, (3, 32, 32), 255
#: Cycles over the width of an image, of the coarse and of the fine patterns, and by which share a single image may deviate.
CYCLES, JITTER = (3.0, 6.0), 0.15
#: Of the wave, as a share of the range of brightness; and the standard deviation of the noise over it.
CONTRAST, NOISE = (0.15, 0.45), 0.12
#: Of the 50,000 training images; a test computes them.
CIFAR_10_MEAN = (0.49140, 0.48216, 0.44653)
CIFAR_10_STD = (0.24703, 0.24349, 0.26159)


@dataclass(frozen=True)
class Images:
    """Colour images as bytes, to train on and to test on; they are scaled and normalized where they are used.

    Mean and standard deviation are of the training pixels divided by 255, for each channel.
    """

    name: str
    title: str
    train: UInt8[Tensor, "train 3 32 32"]
    train_labels: Int[Tensor, " train"]
    test: UInt8[Tensor, "test 3 32 32"]
    test_labels: Int[Tensor, " test"]
    classes: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    checksum: str


def load(name: str, folder: Path | None = None) -> Images:
    """One of `NAMES`, read as `files.read` does, or generated."""
    if name not in NAMES:
        raise DataError(f"there is no data set of colour images {name!r}; there are {', '.join(NAMES)}")
    known: tuple[Any, ...]
    if name == TOY:
        made = GENERATED[TOY]
        images, labels = generate(sum(made.examples))
        std, mean = torch.std_mean(images[: made.examples[0]].double() / BRIGHTEST, dim=(0, 2, 3), correction=0)
        checksum = md5(images.numpy().tobytes() + labels.numpy().tobytes())
        known = tuple(mean.tolist()), tuple(std.tolist()), checksum
    else:
        made = SETS[CIFAR_10]
        # Copies, because a tensor could be written to and bytes cannot.
        files = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in read(CIFAR_10, folder)]
        rows = torch.cat(files).view(-1, 1 + math.prod(SHAPE))
        images, labels = rows[:, 1:].reshape(-1, *SHAPE), rows[:, 0].long()
        known = CIFAR_10_MEAN, CIFAR_10_STD, made.checksum
    at = made.examples[0]
    return Images(name, made.title, images[:at], labels[:at], images[at:], labels[at:], CLASSES, *known)


def generate(count: int, *, seed: int = 0) -> tuple[UInt8[Tensor, "images 3 32 32"], Int[Tensor, " images"]]:
    """Images of ten textures and their labels in random order, each class equally often (to within one).

    Five patterns (horizontal, vertical and diagonal stripes, checks, rings), each coarse and fine. Mirrored or shifted they
    stay what they are, so the usual augmentation does not change a class. Phase, place, colours and contrast are drawn for each
    image, and noise lies over all, so no single pixel tells the class.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Float[Tensor, "..."]:
        return torch.rand(count, *shape, generator=generator) * (high - low) + low

    labels = (torch.arange(count) % CLASSES)[torch.randperm(count, generator=generator)]
    cycles = torch.tensor(CYCLES)[labels // 5] * uniform(low=1 - JITTER, high=1 + JITTER)
    frequency = (2 * math.pi / SHAPE[1] * cycles)[:, None, None]
    across, down = (uniform(1, 1, low=-math.pi, high=math.pi) for _ in range(2))
    middle_x, middle_y = (uniform(1, 1, low=-SHAPE[1] / 4, high=SHAPE[1] / 4) for _ in range(2))
    slope = torch.where(uniform(1, 1) < 0.5, -1.0, 1.0)
    pixels = torch.arange(SHAPE[1]) - (SHAPE[1] - 1) / 2
    x, y = pixels[None, None, :], pixels[None, :, None]
    stripes_x, stripes_y = torch.sin(frequency * x + across), torch.sin(frequency * y + down)
    patterns = (
        stripes_y.expand(count, SHAPE[1], SHAPE[1]),
        stripes_x.expand(count, SHAPE[1], SHAPE[1]),
        torch.sin(frequency * (x + slope * y) / math.sqrt(2) + across),
        stripes_x * stripes_y,
        torch.sin(frequency * torch.hypot(x - middle_x, y - middle_y) + across),
    )
    wave = torch.stack(patterns)[labels % 5, torch.arange(count)]
    # Each channel has its own share of the wave, of either sign, over its own ground.
    share = uniform(3, 1, 1, low=-1, high=1)
    share = share / share.abs().amax(1, keepdim=True) * uniform(1, 1, 1, low=CONTRAST[0], high=CONTRAST[1])
    ground = uniform(3, 1, 1, low=0.3, high=0.7)
    noise = NOISE * torch.randn(count, 3, SHAPE[1], SHAPE[1], generator=generator)
    images = ground + share * wave[:, None] + noise
    return (images.clamp(0, 1) * 255).round().to(torch.uint8), labels
