"""Grey images as rows of numbers, behind one `load`: MNIST and Fashion-MNIST from files, the digits of scikit-learn."""

import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from isaac_lab.data.files import IDX, SETS, md5, of_sklearn, read
from isaac_lab.data.files import DataError as DataError

DIGITS = "digits"
NAMES = (*IDX, DIGITS)
CLASSES, BRIGHTEST = 10, 255
#: Digits that are trained on: 24 full batches of 60, so that every step of an epoch sees equally many. Their inks are 0 to 16.
TRAINING_DIGITS, DARKEST = 1440, 16


@dataclass(frozen=True)
class Dataset:
    """Images with pixels in [0, 1] and their labels, to train on and to test on."""

    name: str
    train_images: Float[Tensor, "train features"]
    train_labels: Int[Tensor, " train"]
    test_images: Float[Tensor, "test features"]
    test_labels: Int[Tensor, " test"]
    classes: int
    checksum: str


def load(name: str, folder: Path | None = None) -> Dataset:
    """One of `NAMES`, read as `files.read` does; the digits need no files."""
    if name == DIGITS:
        return _digits()
    if name not in IDX:
        raise DataError(f"there is no data set {name!r}; there are {', '.join(NAMES)}")
    train, train_labels, test, test_labels = map(decode, read(name, folder))
    images = (values.flatten(1).to(torch.float32).div_(BRIGHTEST) for values in (train, test))
    return Dataset(
        name, next(images), train_labels.long(), next(images), test_labels.long(), classes=CLASSES, checksum=SETS[name].checksum
    )


def decode(content: bytes) -> UInt8[Tensor, "..."]:
    """The array in the bytes of an idx file: a magic number that ends with the rank, the sizes (big-endian), the values."""
    rank = content[3]
    # A copy, because a tensor could be written to and bytes cannot.
    values = torch.frombuffer(bytearray(content), dtype=torch.uint8)[4 + 4 * rank :]
    return values.reshape(struct.unpack_from(f">{rank}I", content, 4))


def _digits() -> Dataset:
    """1440 images to train on and 357 to test on, each class in proportion; the same split every time."""
    datasets, selection = (of_sklearn(name, "the digits come with") for name in ("datasets", "model_selection"))
    images, labels = datasets.load_digits(return_X_y=True)
    split = selection.train_test_split(images / DARKEST, labels, train_size=TRAINING_DIGITS, stratify=labels, random_state=0)
    train, test = (torch.as_tensor(part, dtype=torch.float32) for part in split[:2])
    train_labels, test_labels = map(torch.as_tensor, split[2:])
    tensors = (train, train_labels, test, test_labels)
    checksum = md5(b"".join(tensor.numpy().tobytes() for tensor in tensors))
    return Dataset(DIGITS, *tensors, classes=CLASSES, checksum=checksum)
