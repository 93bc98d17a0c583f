"""Archives and other downloads that hold several files: their bytes, in one pass over what was downloaded."""

import gzip
import io
import tarfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from isaac_lab.data.catalogue import Parcel
from isaac_lab.data.files import DataError, File, unpack

__all__ = ["archived", "opened"]

BUFFER = 1 << 20


def opened(parcel: Parcel, parts: Sequence[bytes], source: str) -> Mapping[str, bytes]:
    """The bytes of each file in a download, by name, not yet checked; errors name `source`."""
    if parcel.form == "gzip":
        return {file.name: unpack(parts[0], file, source) for file in parcel.files}
    if parcel.form == "tar":
        found = _tar(io.BytesIO(parts[0]), parcel.files, source)
    elif parcel.form == "zip":
        found = _zip(parts[0], parcel.files, source)
    else:
        corpus, held_out = parts
        found = _mrpc(corpus, held_out, source)
    return found


def archived(path: Path, files: Sequence[File]) -> Mapping[str, bytes]:
    """The bytes of the files in a tar.gz archive on disk, not yet checked."""
    try:
        with path.open("rb") as stream:
            return _tar(stream, files, str(path))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def _tar(stream: BinaryIO, files: Sequence[File], source: str) -> dict[str, bytes]:
    wanted = {file.name: file for file in files}
    found = {}
    try:
        # As a stream, because going back would decompress from the beginning.
        with gzip.GzipFile(fileobj=stream) as unpacked, tarfile.open(fileobj=unpacked, mode="r|", bufsize=BUFFER) as archive:
            for member in archive:
                file = wanted.get(PurePosixPath(member.name).name)
                if file and (content := archive.extractfile(member)):
                    # One byte more than there should be tells a file that is too long, however long it would become.
                    found[file.name] = content.read(file.size + 1)
    except EOFError:
        raise DataError(f"{source} is cut off: expected a whole archive, but its end is missing") from None
    except (gzip.BadGzipFile, zlib.error, tarfile.TarError) as error:
        raise DataError(f"{source} is corrupt: expected a tar.gz archive, but: {error}") from None
    return _all_of(found, files, source)


def _zip(packed: bytes, files: Sequence[File], source: str) -> dict[str, bytes]:
    wanted = {file.name: file for file in files}
    found = {}
    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            for member in archive.infolist():
                if file := wanted.get(PurePosixPath(member.filename).name):
                    with archive.open(member) as content:
                        found[file.name] = content.read(file.size + 1)
    # An encrypted member is a RuntimeError, a method of compression that Python lacks a NotImplementedError.
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise DataError(f"{source} is corrupt: expected a zip archive, but: {error}") from None
    return _all_of(found, files, source)


def _mrpc(corpus: bytes, held_out: bytes, source: str) -> dict[str, bytes]:
    """GLUE splits the training part of Microsoft's corpus by a list of pairs of sentence numbers.

    The header goes to both files as it is, with its byte order mark; the rows are separated by single line feeds.
    """
    try:
        ids = {tuple(line.split()) for line in held_out.decode().splitlines()}
        header, *rows = (line.strip() for line in corpus.decode().split("\n"))
    except UnicodeDecodeError as error:
        raise DataError(f"{source} is corrupt: expected UTF-8, but: {error}") from None
    split = {"train.tsv": [header], "dev.tsv": [header]}
    for row in filter(None, rows):
        columns = row.split("\t")
        if len(columns) != 5:
            raise DataError(f"{source} is corrupt: expected 5 columns in each row, but found {len(columns)}")
        split["dev.tsv" if tuple(columns[1:3]) in ids else "train.tsv"].append(row)
    return {name: ("\n".join(lines) + "\n").encode() for name, lines in split.items()}


def _all_of(found: dict[str, bytes], files: Sequence[File], source: str) -> dict[str, bytes]:
    if lacking := [file.name for file in files if file.name not in found]:
        raise DataError(f"{source} is incomplete: expected in it {', '.join(lacking)}")
    return found
