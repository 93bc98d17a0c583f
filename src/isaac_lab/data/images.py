"""Colour images as bytes, behind one `load`: CIFAR-10 from files, and a small set that is generated."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from isaac_lab.data import places, toy_images
from isaac_lab.data.catalogue import GENERATED, SETS
from isaac_lab.data.files import DataError, md5

CIFAR_10 = "cifar-10"
TOY = "toy-images"
NAMES = (CIFAR_10, TOY)
CLASSES = 10
SHAPE = (3, 32, 32)
BRIGHTEST = 255

#: Of the 50,000 training images; a test computes them.
CIFAR_10_MEAN = (0.49140, 0.48216, 0.44653)
CIFAR_10_STD = (0.24703, 0.24349, 0.26159)


@dataclass(frozen=True)
class Images:
    """Colour images as bytes, to train on and to test on; they are scaled and normalized where they are used.

    Attributes:
        name: One of `NAMES`.
        title: For people; it says when the images are generated.
        classes: How many different labels there are.
        mean: Of the training pixels divided by 255, for each channel.
        std: Their standard deviation, for each channel.
        checksum: MD5 that stands for all the bytes, so that a record can say what it is from.
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
    """Read a data set and check every byte of it, or generate it.

    Args:
        name: One of `NAMES`.
        folder: Looked at first for the files, before `ISAAC_DATA` and the cache. What is generated needs none.

    Raises:
        DataError: There is no such set, or its files are missing or corrupt.
    """
    if name == TOY:
        return _toy()
    if name != CIFAR_10:
        raise DataError(f"there is no data set of colour images {name!r}; there are {', '.join(NAMES)}")
    return _cifar10(folder)


def _cifar10(folder: Path | None) -> Images:
    files = SETS[CIFAR_10]
    images = torch.empty(sum(files.examples), *SHAPE, dtype=torch.uint8)
    labels = torch.empty(sum(files.examples), dtype=torch.int64)
    start = 0
    for content in places.read(CIFAR_10, folder):
        # A copy, because a tensor could be written to and bytes cannot.
        rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(-1, 1 + images[0].numel())
        here = slice(start, start + len(rows))
        labels[here], images[here] = rows[:, 0], rows[:, 1:].reshape(-1, *SHAPE)
        start = here.stop
    return _split(CIFAR_10, files.title, files.examples[0], images, labels, CIFAR_10_MEAN, CIFAR_10_STD, files.checksum)


def _toy() -> Images:
    images, labels = toy_images.generate(sum(GENERATED[TOY].examples))
    training = GENERATED[TOY].examples[0]
    std, mean = torch.std_mean(images[:training].double() / BRIGHTEST, dim=(0, 2, 3), correction=0)
    checksum = md5(images.numpy().tobytes() + labels.numpy().tobytes())
    return _split(TOY, f"{TOY} (generated)", training, images, labels, tuple(mean.tolist()), tuple(std.tolist()), checksum)


def _split(name: str, title: str, training: int, images: Tensor, labels: Tensor, *rest: Any) -> Images:
    """The first images are for training, the others for the test."""
    train, test = (images[:training], labels[:training]), (images[training:], labels[training:])
    return Images(name, title, *train, *test, CLASSES, *rest)
