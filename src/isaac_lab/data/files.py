"""The files of MNIST and Fashion-MNIST: names, shapes, checksums, and how their bytes are read and checked.

Nothing here imports torch, so that the commands that only look at files answer at once.
"""

import gzip
import hashlib
import io
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

__all__ = ["SETS", "DataError", "File", "FileSet", "check", "contents", "owner", "unpack"]


class DataError(Exception):
    """Data that is missing or not what it should be; the message names it and says what to do."""


@dataclass(frozen=True)
class File:
    """A file of unsigned bytes in the idx format, as it is or compressed with the ending `.gz`.

    Attributes:
        name: Without `.gz`.
        shape: Of the array in it.
        md5: Of the decompressed bytes. They are what counts: compressed again, the same data is another file.
    """

    name: str
    shape: tuple[int, ...]
    md5: str

    @property
    def size(self) -> int:
        """Bytes when decompressed: the header and the array."""
        return 4 + 4 * len(self.shape) + math.prod(self.shape)


@dataclass(frozen=True)
class FileSet:
    """The four files of a data set, and the addresses of folders that have them."""

    train_images: File
    train_labels: File
    test_images: File
    test_labels: File
    mirrors: tuple[str, ...]

    @property
    def files(self) -> tuple[File, ...]:
        """All four."""
        return (self.train_images, self.train_labels, self.test_images, self.test_labels)


def _like_mnist(
    train_images: str, train_labels: str, test_images: str, test_labels: str, *, mirrors: tuple[str, ...]
) -> FileSet:
    """Both sets have the same names and shapes; checksums in the order of the names."""
    return FileSet(
        File("train-images-idx3-ubyte", (60_000, 28, 28), train_images),
        File("train-labels-idx1-ubyte", (60_000,), train_labels),
        File("t10k-images-idx3-ubyte", (10_000, 28, 28), test_images),
        File("t10k-labels-idx1-ubyte", (10_000,), test_labels),
        mirrors,
    )


#: Taken from the compressed files whose published checksums begin, in this order,
#: f68b3c2d, d53e105e, 9fb629c4, ec29112d (MNIST) and 8d4fb7e6, 25c81989, bef4ecab, bb300cfd (Fashion-MNIST).
SETS: Mapping[str, FileSet] = MappingProxyType(
    {
        "mnist": _like_mnist(
            "6bbc9ace898e44ae57da46a324031adb",
            "a25bea736e30d166cdddb491f175f624",
            "2646ac647ad5339dbf082846283269ea",
            "27ae3e4e09519cfbb04c329615203637",
            mirrors=(
                "https://ossci-datasets.s3.amazonaws.com/mnist",
                "https://storage.googleapis.com/cvdf-datasets/mnist",
            ),
        ),
        "fashion-mnist": _like_mnist(
            "f4a8712d7a061bf5bd6d2ca38dc4d50a",
            "9018921c3c673c538a1fc5bad174d6f9",
            "8181f5470baa50b63fa0f6fddb340f0a",
            "15d484375f8d13e6eb1aabb0c3f46965",
            mirrors=(
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
                "https://storage.googleapis.com/tensorflow/tf-keras-datasets",
            ),
        ),
    }
)


def contents(path: Path, file: File) -> bytes:
    """The decompressed bytes of a file on disk, not yet checked."""
    try:
        with path.open("rb") as stream:
            return _unpack(stream, file, str(path)) if path.suffix == ".gz" else stream.read(file.size + 1)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def unpack(packed: bytes, file: File, source: str) -> bytes:
    """The same for compressed bytes in memory, which came from `source`."""
    return _unpack(io.BytesIO(packed), file, source)


def check(content: bytes, file: File, source: str | Path) -> None:
    """Refuse bytes that are not those of the file."""
    found = _md5(content)
    if found != file.md5:
        length = f"more than {file.size:,}" if len(content) > file.size else f"{len(content):,}"
        raise DataError(
            f"{source} has a wrong checksum: {length} bytes with MD5 {found}, "
            f"expected {file.size:,} bytes with MD5 {file.md5} (when decompressed)"
        )


def owner(content: bytes) -> str | None:
    """The data set that has a file with these bytes."""
    found = _md5(content)
    return next((name for name, files in SETS.items() if found in [file.md5 for file in files.files]), None)


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _unpack(stream: BinaryIO, file: File, source: str) -> bytes:
    try:
        with gzip.GzipFile(fileobj=stream) as unpacked:
            # One byte more than there should be tells a file that is too long, however long it would become.
            return unpacked.read(file.size + 1)
    except EOFError:
        raise DataError(f"{source} is cut off: expected a whole gzip file, but its end is missing") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{source} is corrupt: expected a gzip file, but: {error}") from None
