"""Every data set there is, as `sets.toml` lists them: the files of those that consist of files, the sizes of all.

Nothing here imports torch, so that the commands that only look at files answer at once.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, Literal

from isaac_lab.data.files import File, md5


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


def _read(values: dict[str, Any]) -> FileSet:
    parcels = tuple(
        Parcel(own["form"], tuple(own["parts"]), tuple(File(*file) for file in own["files"]))
        for own in values.pop("parcels", [])
    )
    examples, mirrors = tuple(values.pop("examples")), tuple(values.pop("mirrors", ()))
    return FileSet(examples=examples, parcels=parcels, mirrors=mirrors, **values)


_ALL = {name: _read(own) for name, own in tomllib.loads(Path(__file__).with_name("sets.toml").read_text("utf-8")).items()}
SETS: Mapping[str, FileSet] = MappingProxyType({name: own for name, own in _ALL.items() if own.parcels})
GENERATED: Mapping[str, FileSet] = MappingProxyType({name: own for name, own in _ALL.items() if not own.parcels})
#: Sets of grey images, which `sets.load` reads.
IDX = ("mnist", "fashion-mnist")
#: Tasks on sentences, which `text.load` reads.
GLUE = ("cola", "mrpc", "stsb")
