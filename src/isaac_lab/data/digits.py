"""Handwritten digits: the 1797 images of 8 × 8 pixels that come with scikit-learn, so nothing is downloaded."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

__all__ = ["CLASSES", "PIXELS", "Digits", "load"]

PIXELS = 64
CLASSES = 10

#: 24 full batches of 60, so that every step of an epoch sees equally many images.
TRAINING_IMAGES = 1440
#: Inks are whole numbers from 0 to this.
DARKEST = 16


@dataclass(frozen=True)
class Digits:
    """Images with pixels in [0, 1] and their labels, split once and for all."""

    train_images: Float[Tensor, "train pixels"]
    train_labels: Int[Tensor, " train"]
    test_images: Float[Tensor, "test pixels"]
    test_labels: Int[Tensor, " test"]


def load() -> Digits:
    """1440 images to train on and 357 to test on, each class in proportion; the same split every time."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / DARKEST, labels, train_size=TRAINING_IMAGES, stratify=labels, random_state=0)
    train_images, test_images, train_labels, test_labels = split
    return Digits(
        train_images=torch.as_tensor(train_images, dtype=torch.float32),
        train_labels=torch.as_tensor(train_labels),
        test_images=torch.as_tensor(test_images, dtype=torch.float32),
        test_labels=torch.as_tensor(test_labels),
    )
