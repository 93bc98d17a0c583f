"""The bytes of a data set from the directory that has it."""

from collections.abc import Iterator
from pathlib import Path

from isaac_lab.data import places
from isaac_lab.data.archives import archived
from isaac_lab.data.catalogue import FileSet
from isaac_lab.data.files import File, contents

__all__ = ["stored"]


def stored(files: FileSet, directory: Path) -> Iterator[tuple[File, str, bytes]]:
    """Each file with where it is and its bytes, not yet checked, one after the other.

    What is not there itself comes from the archive, if the set has one there.

    Raises:
        DataError: A file cannot be read, or is neither there nor in the archive.
    """
    alone = {file.name: found[0] for file in files.files if (found := places.paths(directory, file))}
    rest = [file for file in files.files if file.name not in alone]
    archive = places.archive(files, directory)
    unpacked = archived(archive, rest) if archive and rest else {}
    for file in files.files:
        if file.name in unpacked:
            yield file, f"{file.name} in {archive}", unpacked[file.name]
        else:
            path = alone.get(file.name, directory / file.name)
            yield file, str(path), contents(path, file)
