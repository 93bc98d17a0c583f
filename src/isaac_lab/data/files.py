"""A file of a data set: its name, size and checksum, and how its bytes are read and checked.

Nothing here imports torch, so that the commands that only look at files answer at once.
"""

import gzip
import hashlib
import io
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

__all__ = ["DataError", "File", "IdxFile", "check", "contents", "idx_file", "md5", "unpack"]


class DataError(Exception):
    """Data that is missing or not what it should be; the message names it and says what to do."""


@dataclass(frozen=True)
class File:
    """A file, as it is or compressed with the ending `.gz`.

    Attributes:
        name: Without `.gz`.
        size: Bytes when decompressed.
        md5: Of the decompressed bytes. They are what counts: compressed again, the same data is another file.
    """

    name: str
    size: int
    md5: str


@dataclass(frozen=True)
class IdxFile(File):
    """A file of unsigned bytes in the idx format, with the shape of the array in it."""

    shape: tuple[int, ...]


def idx_file(name: str, shape: tuple[int, ...], md5: str) -> IdxFile:
    """The shape says the size: a header, then the array."""
    return IdxFile(name, 4 + 4 * len(shape) + math.prod(shape), md5, shape)


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
    found = md5(content)
    if found != file.md5:
        length = f"more than {file.size:,}" if len(content) > file.size else f"{len(content):,}"
        raise DataError(
            f"{source} has a wrong checksum: {length} bytes with MD5 {found}, "
            f"expected {file.size:,} bytes with MD5 {file.md5} (when decompressed)"
        )


def md5(content: bytes) -> str:
    """A name for these bytes; nobody is kept out by it."""
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
