"""Where the files of a data set are looked for: a folder that is given, then `ISAAC_DATA`, then the cache."""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from isaac_lab.data.catalogue import SETS, FileSet, owner
from isaac_lab.data.files import DataError, File, contents

__all__ = ["Place", "archive", "cache", "find", "missing", "paths", "places", "remedy", "where"]


@dataclass(frozen=True)
class Place:
    """A folder that may have data sets in sub-folders of their own, or one set in itself."""

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
    files = SETS[name]
    try:
        directories = [place.folder / folder for folder in files.folders]
        for directory in directories:
            found = [(path, file) for file in files.files for path in paths(directory, file)]
            # The files of MNIST and Fashion-MNIST have the same names. Labels tell in no time whose they are.
            smallest = min(found, key=lambda pair: pair[1].size, default=None)
            if smallest and (directory != place.folder or not _of_another_set(*smallest, name=name)):
                return directory
        # Last, because an archive takes longer to read than what was taken out of it.
        return next((directory for directory in directories if archive(files, directory)), None)
    except OSError as error:
        raise DataError(f"cannot look into {str(place.folder)!r}: {error.strerror}") from None


def paths(directory: Path, file: File) -> list[Path]:
    """The file in this directory, compressed or not; the first is the one that is read."""
    # Compressed first: that is how `fetch` puts it there, maybe because the other one is corrupt.
    return [path for path in (directory / f"{file.name}.gz", directory / file.name) if path.is_file()]


def archive(files: FileSet, directory: Path) -> Path | None:
    """The archive in this directory that stands for files which are not there themselves."""
    path = directory / files.archive if files.archive else None
    return path if path and path.is_file() else None


def missing(name: str, directory: Path) -> list[str]:
    """The names of files of the set that the directory lacks."""
    if archive(SETS[name], directory):
        return []
    return [file.name for file in SETS[name].files if not paths(directory, file)]


def where(name: str, folder: Path | None = None) -> tuple[Place, Path]:
    """The first place that has the set, and the directory with all its files.

    Raises:
        DataError: With the places and the way to get the files, where there is none or one lacks some of them.
    """
    looked_at = places(folder)
    for place in looked_at:
        if directory := find(name, place):
            if lacking := missing(name, directory):
                raise DataError(
                    f"{name} in {directory} is incomplete: no {', no '.join(lacking)}, nor as .gz. {remedy(name, place)}"
                )
            return place, directory
    files = SETS[name]
    names = ", ".join(file.name for file in files.files)
    folders = " or ".join(f"{folder}/" for folder in files.folders if folder != ".")
    raise DataError(
        f"{name} is not in {', nor in '.join(f'{place.origin} ({place.folder})' for place in looked_at)}. "
        f"`isaac-newton data fetch {name}` downloads it; or let --data or ISAAC_DATA name a folder that has, "
        f"{'itself or in' if '.' in files.folders else 'in'} {folders}, the files {names} (as they are or as .gz)"
        f"{f' or {files.archive}' if files.archive else ''}"
    )


def remedy(name: str, place: Place) -> str:
    """The command that mends a set: it fills the sub-folder of the place, which is looked at first."""
    target = "" if place.folder == cache() else f" --to {shlex.quote(str(place.folder))}"
    return f"`isaac-newton data fetch {name}{target}` downloads what is missing or corrupt"


def _of_another_set(path: Path, file: File, *, name: str) -> bool:
    try:
        return owner(contents(path, file)) not in (None, name)
    except DataError:
        # Corrupt, so nobody's: whoever reads it will say so.
        return False
