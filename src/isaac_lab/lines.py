"""Lines of JSON that no kill, full disk or flipped bit can falsify: each has a checksum, and is whole or not there."""

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from isaac_lab.records import StoreError, plain, write_whole

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # not on Windows; there nobody guards against two processes in one folder
    fcntl = None

_CHECK = re.compile(rb', "check": "([0-9a-f]{8})"\}$')
_END = b"\n"
_REMEDY = "Restore the file, or remove that line to run it again; all other lines can be read"


def encode(value: Mapping[str, Any]) -> bytes:
    """A line with its checksum; None stands for NaN and infinity, which JSON has no words for."""
    body = json.dumps(plain(dict(value)), ensure_ascii=False, allow_nan=False).encode()
    return body[:-1] + b', "check": "' + _checksum(body) + b'"}\n'


def read(path: Path, *, format: str, torn: bool = False) -> list[tuple[int, dict[str, Any]]]:
    """All lines with their numbers, without the header, which says the format; a file that is not there has none.

    A StoreError names every line that is damaged. A last line without an end, which a kill may leave behind, is one of them
    unless `torn` says that it is left out.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from None
    found: list[tuple[int, dict[str, Any]]] = []
    damage: list[str] = []
    for number, line in enumerate(raw.split(b"\n")[:-1], 1):
        try:
            value = _decode(line)
            if value.get("format", format) != format:
                raise ValueError(f"the format is {value['format']!r}, this version reads {format!r}")
            found += [(number, value)] if "format" not in value else []
        except ValueError as error:
            damage.append(f"{path}, line {number}: {error}")
    if raw.rpartition(b"\n")[2] and not torn:
        damage.append(f"{path}, line {raw.count(_END) + 1}: it is cut off")
    if not raw:
        damage.append(f"{path}, line 1: the file is empty")
    elif not damage and b'"format"' not in raw.partition(b"\n")[0]:
        damage.append(f"{path}, line 1: it does not say the format {format!r}")
    if damage:
        raise StoreError("\n".join([*damage, _REMEDY]))
    return found


def _decode(line: bytes) -> dict[str, Any]:
    """What a line says; the error says what is wrong with it."""
    check = _CHECK.search(line)
    if check is None:
        raise ValueError("it has no checksum; it is cut off, or another program wrote it")
    body = line[: check.start()] + b"}"
    if _checksum(body) != check[1]:
        raise ValueError("it does not match its checksum; a byte of it was changed")
    try:
        value = json.loads(body, parse_constant=_no_number)
    except ValueError as error:
        raise ValueError(f"it is no JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError("it is no record")
    return value


def mend(path: Path) -> str:
    """Cut off a last line without an end; returns what was done, "" for nothing. Only under the lock."""
    raw = path.read_bytes() if path.exists() else b""
    whole = raw.rfind(b"\n") + 1
    if whole == len(raw):
        return ""
    if not whole:
        raise StoreError(f"{path}, line 1: it is cut off. Restore the file, or remove it to run everything again")
    with path.open("r+b") as file:
        file.truncate(whole)
        os.fsync(file.fileno())
    return f"{path}, line {raw.count(_END) + 1} was cut off by a kill: it is removed, and its run is trained again"


def append(path: Path, values: Sequence[Mapping[str, Any]], *, format: str) -> None:
    """Add lines, all of them or none; they are on the disk when this returns."""
    added = b"".join(map(encode, values))
    try:
        if not path.exists():
            write_whole(path, encode({"format": format}) + added)
            return
        before = path.stat().st_size
        with path.open("ab", buffering=0) as file:
            try:
                if file.write(added) != len(added):
                    raise OSError(28, "No space left on device")
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(before)
                raise
    except OSError as error:
        raise StoreError(f"cannot write to {path}: {error.strerror or error}. What was there before is kept") from None


@contextlib.contextmanager
def locked(folder: Path, command: str) -> Iterator[None]:
    """Be the only one who writes to a folder; who else is there is named."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("a+", encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot write to {folder}: {error.strerror or error}") from None
    with file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                who = file.read().strip() or "another process"
                raise StoreError(f"{folder} is in use by {who}; wait for it, or name another --out") from None
        file.truncate(0)
        file.write(f"process {os.getpid()}, {command or 'isaac-newton'}, since {time.strftime('%H:%M:%S')}\n")
        file.flush()
        yield


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=4).hexdigest().encode()


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number")
