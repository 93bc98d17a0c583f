"""Files of a data set from the network: checked in memory, and each on disk whole or not at all."""

import contextlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Set
from dataclasses import replace
from pathlib import Path, PurePosixPath

from isaac_lab.data.archives import opened
from isaac_lab.data.catalogue import FileSet, Parcel
from isaac_lab.data.files import DataError, check
from isaac_lab.data.places import paths
from isaac_lab.data.reading import stored

__all__ = ["addresses", "fetch", "right"]

#: Seconds without a byte after which the next mirror is asked.
PATIENCE = 15.0
CHUNK = 1 << 16


def right(files: FileSet, directory: Path, parcel: Parcel) -> set[str]:
    """The names of files of a parcel that would be read from this directory and are the right ones."""
    alone = [file for file in parcel.files if paths(directory, file)]
    # One group, because an archive is gone through from its beginning.
    rest = tuple(file for file in parcel.files if file not in alone)
    found = set()
    for group in (*((file,) for file in alone), rest):
        with contextlib.suppress(DataError):
            for file, source, content in stored(replace(files, files=group), directory):
                check(content, file, source)
                found.add(file.name)
    return found


def addresses(files: FileSet, parcel: Parcel, folders: Iterable[str] = ()) -> list[tuple[str, ...]]:
    """Where all the parts of a parcel are, for each mirror; or for each folder of one's own, which has them side by side."""
    own = [tuple(f"{folder.rstrip('/')}/{PurePosixPath(part).name}" for part in parcel.parts) for folder in folders]
    return own or [tuple(f"{mirror.rstrip('/')}/{part}" for part in parcel.parts) for mirror in files.mirrors]


def fetch(
    parcel: Parcel,
    directory: Path,
    mirrors: Iterable[tuple[str, ...]],
    *,
    keep: Set[str] = frozenset(),
    tick: Callable[[int, int | None], None],
) -> str:
    """Download a parcel from the first mirror that has it right; returns the address.

    Args:
        parcel: What to get.
        directory: Where to; made if it is not there. A file of the same name is replaced, once all new ones are checked.
        mirrors: The addresses of all its parts, for each mirror.
        keep: Names of files that stay as they are.
        tick: Called with the bytes so far and their number in all, if the server tells it.

    Raises:
        DataError: No mirror has it, with the reason at each.
        OSError: It cannot be written.
    """
    failures = []
    for mirror in mirrors:
        source = " with ".join(mirror)
        try:
            parts = [_download(address, limit=parcel.limit, tick=tick) for address in mirror]
            found = opened(parcel, parts, source)
            for file in parcel.files:
                name = source if parcel.form == "gzip" else f"{file.name} in {source}"
                check(found[file.name], file, name)
        except DataError as error:
            failures.append(str(error))
        else:
            if parcel.form == "gzip":
                _write(directory / parcel.name, parts[0])
            else:
                for name in found.keys() - keep:
                    _write(directory / name, found[name])
                    # It would be read first, and it is not the right one.
                    (directory / f"{name}.gz").unlink(missing_ok=True)
            return source
    raise DataError("; ".join(failures))


def _download(address: str, *, limit: int, tick: Callable[[int, int | None], None]) -> bytes:
    received = bytearray()
    try:
        request = urllib.request.Request(address, headers={"User-Agent": "isaac-newton"})
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            length = response.headers.get("Content-Length", "")
            total = int(length) if length.isdecimal() else None
            while chunk := response.read(CHUNK):
                received += chunk
                tick(len(received), total)
                if len(received) > limit:
                    raise DataError(f"{address} is too long: expected at most {limit:,} bytes")
    except urllib.error.HTTPError as error:
        error.close()
        raise DataError(f"{address}: the server answers {error.code} {error.reason}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        raise DataError(f"{address}: {text}") from None
    if total is not None and len(received) < total:
        raise DataError(f"{address} is cut off: {len(received):,} bytes received, expected {total:,}")
    return bytes(received)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
