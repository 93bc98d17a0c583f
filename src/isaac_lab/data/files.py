"""Every data set there is, as `sets.toml` lists them: its files, sizes and checksums, and how bytes are read and checked.

Nothing here imports torch, so that the commands that only look at files answer at once.
"""

import gzip
import hashlib
import importlib
import io
import tomllib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal


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


@dataclass(frozen=True)
class Parcel:
    """What one download brings. A compressed file is stored as it comes, the files in all else one by one."""

    form: Literal["gzip", "plain", "tar", "zip", "mrpc"]
    parts: tuple[str, ...]
    files: tuple[File, ...]

    @property
    def name(self) -> str:
        """For people."""
        return PurePosixPath(self.parts[0]).name

    @property
    def limit(self) -> int:
        """Bytes that no part exceeds: archives hold other files too, and compression may add a little."""
        return sum(file.size for file in self.files) + (1 << 10 if self.form == "gzip" else 1 << 20)


@dataclass(frozen=True)
class FileSet:
    """A data set; `sets.toml` says what is what. One that is generated has no files."""

    title: str
    examples: tuple[int, int]
    example: str
    folder: str = ""
    parcels: tuple[Parcel, ...] = ()
    mirrors: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[File, ...]:
        """All of them."""
        return tuple(file for parcel in self.parcels for file in parcel.files)

    @property
    def checksum(self) -> str:
        """MD5 that stands for all the bytes of the set."""
        return md5(b"".join(file.md5.encode() for file in self.files))


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


def of_sklearn(module: str, what: str) -> Any:
    """A module of scikit-learn, with which `what` comes."""
    try:
        return importlib.import_module(f"sklearn.{module}")
    except ModuleNotFoundError:
        raise DataError(f"{what} scikit-learn, which is not installed: pip install 'isaac-newton[lab]'") from None


def _read(values: dict[str, Any]) -> FileSet:
    parcels = tuple(
        Parcel(own["form"], tuple(own["parts"]), tuple(File(*file) for file in own["files"]))
        for own in values.pop("parcels", [])
    )
    examples, mirrors = tuple(values.pop("examples")), tuple(values.pop("mirrors", ()))
    return FileSet(examples=examples, parcels=parcels, mirrors=mirrors, **values)


_ALL = {name: _read(own) for name, own in tomllib.loads(Path(__file__).with_name("sets.toml").read_text("utf-8")).items()}
SETS: Mapping[str, FileSet] = {name: own for name, own in _ALL.items() if own.parcels}
GENERATED: Mapping[str, FileSet] = {name: own for name, own in _ALL.items() if not own.parcels}
#: Sets of grey images, which `sets.load` reads.
IDX = ("mnist", "fashion-mnist")
#: Tasks on sentences, which `text.load` reads.
GLUE = ("cola", "mrpc", "stsb")
