"""A file of a data set: its name, size and checksum, and how its bytes are read and checked; without torch."""

import gzip
import hashlib
import io
import zlib
from dataclasses import dataclass
from pathlib import Path


class DataError(Exception):
    """Data that is missing or not what it should be; the message names it and says what to do."""


@dataclass(frozen=True)
class File:
    """A file, as it is or compressed with the ending `.gz`, which its name has not.

    Size and checksum are of the decompressed bytes. They are what counts: compressed again, the same data is another file.
    """

    name: str
    size: int
    md5: str


def contents(path: Path, file: File) -> bytes:
    """The decompressed bytes of a file on disk, checked."""
    try:
        stored = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    return check(unpack(stored, file, str(path)) if path.suffix == ".gz" else stored, file, str(path))


def unpack(packed: bytes, file: File, source: str) -> bytes:
    """The decompressed bytes, not yet checked; errors name `source`."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(packed)) as unpacked:
            # One byte more than there should be tells a file that is too long, however long it would become.
            return unpacked.read(file.size + 1)
    except EOFError:
        raise DataError(f"{source} is cut off: expected a whole gzip file, but its end is missing") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{source} is corrupt: expected a gzip file, but: {error}") from None


def check(content: bytes, file: File, source: str) -> bytes:
    """The same bytes, if they are those of the file."""
    found = md5(content)
    if found != file.md5:
        length = f"more than {file.size:,}" if len(content) > file.size else f"{len(content):,}"
        raise DataError(
            f"{source} has a wrong checksum: {length} bytes with MD5 {found}, "
            f"expected {file.size:,} bytes with MD5 {file.md5} (when decompressed)"
        )
    return content


def md5(content: bytes) -> str:
    """A name for these bytes; nobody is kept out by it."""
    return hashlib.md5(content, usedforsecurity=False).hexdigest()
