"""Grey images as rows of numbers, behind one `load`: MNIST and Fashion-MNIST from files, the digits of scikit-learn."""

import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from isaac_lab.data import places
from isaac_lab.data.catalogue import IDX, SETS
from isaac_lab.data.files import DataError, md5

__all__ = ["NAMES", "DataError", "Dataset", "decode", "load"]

DIGITS = "digits"
NAMES = (*IDX, DIGITS)
CLASSES = 10
BRIGHTEST = 255


@dataclass(frozen=True)
class Dataset:
    """Images with pixels in [0, 1] and their labels, to train on and to test on.

    Attributes:
        name: One of `NAMES`.
        classes: How many different labels there are.
        checksum: MD5 that stands for all the bytes the set was read from, so that a record can say what it is from.
    """

    name: str
    train_images: Float[Tensor, "train features"]
    train_labels: Int[Tensor, " train"]
    test_images: Float[Tensor, "test features"]
    test_labels: Int[Tensor, " test"]
    classes: int
    checksum: str


def load(name: str, folder: Path | None = None) -> Dataset:
    """Read a data set and check every byte of it.

    Args:
        name: One of `NAMES`.
        folder: Looked at first for the files, before `ISAAC_DATA` and the cache. The digits need none.

    Raises:
        DataError: There is no such set, or its files are missing or corrupt.
    """
    if name == DIGITS:
        return _digits()
    if name not in IDX:
        raise DataError(f"there is no data set {name!r}; there are {', '.join(NAMES)}")
    train, train_labels, test, test_labels = map(decode, places.read(name, folder))
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
    try:
        from isaac_lab.data import digits
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "sklearn":
            raise
        raise DataError("the digits come with scikit-learn, which is not installed: pip install 'isaac-newton[lab]'") from None
    data = digits.load()
    tensors = (data.train_images, data.train_labels, data.test_images, data.test_labels)
    checksum = md5(b"".join(tensor.numpy().tobytes() for tensor in tensors))
    return Dataset(DIGITS, *tensors, classes=digits.CLASSES, checksum=checksum)
