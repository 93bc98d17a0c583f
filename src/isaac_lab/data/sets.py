"""Grey images as rows of numbers, behind one `load`: MNIST and Fashion-MNIST from files, the digits of scikit-learn."""

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from isaac_lab.data import idx, places
from isaac_lab.data.catalogue import IDX, SETS
from isaac_lab.data.files import DataError, File, IdxFile, check, md5
from isaac_lab.data.reading import stored

__all__ = ["NAMES", "DataError", "Dataset", "load"]

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
    place, directory = places.where(name, folder)
    try:
        train_images, train_labels, test_images, test_labels = (_decode(*each) for each in stored(SETS[name], directory))
    except DataError as error:
        raise DataError(f"{error}. {places.remedy(name, place)}") from None
    return Dataset(
        name=name,
        train_images=_images(train_images),
        train_labels=train_labels.long(),
        test_images=_images(test_images),
        test_labels=test_labels.long(),
        classes=CLASSES,
        checksum=SETS[name].checksum,
    )


def _decode(file: File, source: str, content: bytes) -> UInt8[Tensor, "..."]:
    # Decoded before the checksum is compared, because "wrong length" says more than two numbers of 32 digits.
    values = idx.decode(content, source)
    if isinstance(file, IdxFile) and tuple(values.shape) != file.shape:
        found, expected = (" × ".join(map(str, shape)) for shape in (values.shape, file.shape))
        raise DataError(f"{source} holds {found} values, expected {expected}")
    check(content, file, source)
    return values


def _images(values: UInt8[Tensor, "images height width"]) -> Float[Tensor, "images features"]:
    return values.flatten(1).to(torch.float32).div_(BRIGHTEST)


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
