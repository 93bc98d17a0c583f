"""A file of a data set from the network: checked in memory, and on disk whole or not at all."""

import contextlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path

from isaac_lab.data.files import DataError, File, check, contents, unpack
from isaac_lab.data.places import paths

__all__ = ["fetch", "is_there"]

#: Seconds without a byte after which the next mirror is asked.
PATIENCE = 15.0
CHUNK = 1 << 16
#: Bytes that compression may add to what it cannot compress; what is longer yet is another file.
OVERHEAD = 1024


def is_there(directory: Path, file: File) -> bool:
    """Whether the file that would be read from this directory is the right one."""
    for path in paths(directory, file)[:1]:
        with contextlib.suppress(DataError):
            check(contents(path, file), file, path)
            return True
    return False


def fetch(file: File, directory: Path, mirrors: Iterable[str], *, tick: Callable[[int, int | None], None]) -> str:
    """Download a file from the first mirror that has it right; returns the address.

    Args:
        file: What to get; it is stored compressed.
        directory: Where to; made if it is not there. A file of the same name is replaced, once the new one is checked.
        mirrors: Addresses of folders with the compressed files.
        tick: Called with the bytes so far and their number in all, if the server tells it.

    Raises:
        DataError: No mirror has it, with the reason at each.
        OSError: It cannot be written.
    """
    failures = []
    for mirror in mirrors:
        address = f"{mirror.rstrip('/')}/{file.name}.gz"
        try:
            packed = _download(address, limit=file.size + OVERHEAD, tick=tick)
            check(unpack(packed, file, address), file, address)
        except DataError as error:
            failures.append(str(error))
        else:
            _write(directory / f"{file.name}.gz", packed)
            return address
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
