"""Every data set there is, as `sets.toml` lists them: its files, where they are looked for, and how bytes are checked.

A folder that is given comes first, then `ISAAC_DATA`, then the cache.

Nothing here imports torch, so that the commands that only look at files answer at once.
"""

import gzip
import hashlib
import importlib
import io
import os
import shlex
import tomllib
import zlib
from collections.abc import Iterator, Mapping
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


@dataclass(frozen=True)
class Place:
    """A folder that may have data sets, each in a sub-folder of its own: mnist, glue/CoLA."""

    origin: str
    folder: Path


def cache() -> Path:
    """The folder that `isaac-newton data fetch` fills."""
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification: a relative path is to be ignored.
    return (root if root.is_absolute() else Path("~/.cache").expanduser()) / "isaac-newton"


def places(folder: Path | None = None) -> list[Place]:
    """All places, the first to be looked at first. A folder that is named must be there: it may be a typing error."""
    named = [] if folder is None else [Place("the folder given", folder.expanduser())]
    if variable := os.environ.get("ISAAC_DATA"):
        named.append(Place("ISAAC_DATA", Path(variable).expanduser()))
    for place in named:
        # Unlike `is_dir`, this has no exception for a folder that this user may not look into.
        if not os.access(place.folder, os.X_OK) or not place.folder.is_dir():
            raise DataError(f"{place.origin} is not a directory that can be read: {str(place.folder)!r}")
    return [*named, Place("the cache", cache())]


def find(name: str, place: Place) -> Path | None:
    """The directory there that has files of the data set, all or some."""
    directory = place.folder / SETS[name].folder
    return directory if any(path(directory, file) for file in SETS[name].files) else None


def path(directory: Path, file: File) -> Path | None:
    """The file in this directory: compressed, which is how `fetch` puts it there, or as it is."""
    return next((path for path in (directory / f"{file.name}.gz", directory / file.name) if os.access(path, os.F_OK)), None)


def missing(name: str, directory: Path) -> list[str]:
    """The names of files of the set that the directory lacks."""
    return [file.name for file in SETS[name].files if not path(directory, file)]


def read(name: str, folder: Path | None = None) -> Iterator[bytes]:
    """The bytes of each file of a set, checked, from the first place that has it: the folder, `ISAAC_DATA`, the cache.

    Where a file is missing or not as it should be, a DataError has the place and the way to get it.
    """
    looked_at = places(folder)
    place, directory = next(((place, found) for place in looked_at if (found := find(name, place))), (None, None))
    if place is None or directory is None:
        raise DataError(
            f"{name} is not in {', nor in '.join(f'{place.origin} ({place.folder})' for place in looked_at)}. "
            f"`isaac-newton data fetch {name}` downloads it; or let --data or ISAAC_DATA name a folder that has, in "
            f"{SETS[name].folder}/, the files {', '.join(file.name for file in SETS[name].files)} (as they are or as .gz)"
        )
    if lacking := missing(name, directory):
        raise DataError(f"{name} in {directory} is incomplete: no {', no '.join(lacking)}, nor as .gz. {remedy(name, place)}")
    for file in SETS[name].files:
        try:
            yield contents(path(directory, file) or directory / file.name, file)
        except DataError as error:
            raise DataError(f"{error}. {remedy(name, place)}") from None


def remedy(name: str, place: Place) -> str:
    """The command that mends a set."""
    target = "" if place.folder == cache() else f" --to {shlex.quote(str(place.folder))}"
    return f"`isaac-newton data fetch {name}{target}` downloads what is missing or corrupt"
