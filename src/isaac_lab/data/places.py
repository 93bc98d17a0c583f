"""Where the files of a data set are looked for: a folder that is given, then `ISAAC_DATA`, then the cache."""

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from isaac_lab.data.files import SETS, DataError, File, contents


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
