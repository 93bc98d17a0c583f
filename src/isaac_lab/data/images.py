"""Colour images as bytes, behind one `load`: CIFAR-10 from files, and a small set that is generated."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from isaac_lab.data import places, toy_images
from isaac_lab.data.catalogue import GENERATED, SETS
from isaac_lab.data.files import DataError, md5

CIFAR_10, TOY = "cifar-10", "toy-images"
NAMES = (CIFAR_10, TOY)
CLASSES, SHAPE, BRIGHTEST = 10, (3, 32, 32), 255
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
    """One of `NAMES`, read as `places.read` does, or generated."""
    if name not in NAMES:
        raise DataError(f"there is no data set of colour images {name!r}; there are {', '.join(NAMES)}")
    known: tuple[Any, ...]
    if name == TOY:
        made = GENERATED[TOY]
        images, labels = toy_images.generate(sum(made.examples))
        std, mean = torch.std_mean(images[: made.examples[0]].double() / BRIGHTEST, dim=(0, 2, 3), correction=0)
        checksum = md5(images.numpy().tobytes() + labels.numpy().tobytes())
        known = tuple(mean.tolist()), tuple(std.tolist()), checksum
    else:
        made = SETS[CIFAR_10]
        # Copies, because a tensor could be written to and bytes cannot.
        files = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in places.read(CIFAR_10, folder)]
        rows = torch.cat(files).view(-1, 1 + math.prod(SHAPE))
        images, labels = rows[:, 1:].reshape(-1, *SHAPE), rows[:, 0].long()
        known = CIFAR_10_MEAN, CIFAR_10_STD, made.checksum
    at = made.examples[0]
    return Images(name, made.title, images[:at], labels[:at], images[at:], labels[at:], CLASSES, *known)
