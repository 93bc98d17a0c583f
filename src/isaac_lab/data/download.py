"""Files of a data set from the network: checked in memory, and each on disk whole or not at all."""

import contextlib
import gzip
import http.client
import io
import tarfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath

from isaac_lab.data.files import DataError, FileSet, Parcel, check, contents, path, unpack
from isaac_lab.records import write_whole

#: Seconds without a byte after which the next mirror is asked.
PATIENCE = 15.0
CHUNK = 1 << 16


def addresses(files: FileSet, parcel: Parcel, folders: Iterable[str] = ()) -> list[tuple[str, ...]]:
    """Where all the parts of a parcel are, for each mirror; or for each folder of one's own, which has them side by side."""
    own = [tuple(f"{folder.rstrip('/')}/{PurePosixPath(part).name}" for part in parcel.parts) for folder in folders]
    return own or [tuple(f"{mirror.rstrip('/')}/{part}" for part in parcel.parts) for mirror in files.mirrors]


def fetch(
    parcel: Parcel, directory: Path, mirrors: Iterable[tuple[str, ...]], *, tick: Callable[[int, int | None], None]
) -> str | None:
    """Download a parcel from the first mirror that has it right; returns the address, or None if all of it is there.

    Files that are right stay; others are replaced, once all are checked. Where no mirror has it, a DataError has the reason at
    each. `mirrors` has for each the addresses of all parts; `tick` is called with the bytes so far and their number in all, if
    the server tells it.
    """
    wanted = list(parcel.files)
    for file in parcel.files:
        with contextlib.suppress(DataError):
            if there := path(directory, file):
                contents(there, file)
                wanted.remove(file)
    if not wanted:
        return None
    failures = []
    for mirror in mirrors:
        source = " with ".join(mirror)
        try:
            parts = [_download(address, limit=parcel.limit, tick=tick) for address in mirror]
            found = _opened(parcel, parts, source)
        except DataError as error:
            failures.append(str(error))
            continue
        for file in wanted:
            if parcel.form == "gzip":
                write_whole(directory / parcel.name, parts[0])
            else:
                write_whole(directory / file.name, found[file.name])
                # It would be read first, and it is not the right one.
                (directory / f"{file.name}.gz").unlink(missing_ok=True)
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


def _opened(parcel: Parcel, parts: Sequence[bytes], source: str) -> dict[str, bytes]:
    """The bytes of each file in a download, by name, checked; errors name `source`."""
    first = parcel.files[0]
    match parcel.form:
        case "gzip":
            return {first.name: check(unpack(parts[0], first, source), first, source)}
        case "plain":
            return {first.name: check(parts[0], first, source)}
        case "mrpc":
            found = _mrpc(parts[0], parts[1], source)
        case _:
            found = _archive(parcel, parts[0], source)
    if lacking := [file.name for file in parcel.files if file.name not in found]:
        raise DataError(f"{source} is incomplete: expected in it {', '.join(lacking)}")
    return {file.name: check(found[file.name], file, f"{file.name} in {source}") for file in parcel.files}


def _archive(parcel: Parcel, packed: bytes, source: str) -> dict[str, bytes]:
    # One byte more than there should be tells a file that is too long, however long it would become.
    sizes = {file.name: file.size + 1 for file in parcel.files}
    kind = "tar.gz" if parcel.form == "tar" else parcel.form
    try:
        if parcel.form == "tar":
            with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as archive:
                members = ((PurePosixPath(member.name).name, archive.extractfile(member)) for member in archive)
                return {name: content.read(sizes[name]) for name, content in members if name in sizes and content}
        with zipfile.ZipFile(io.BytesIO(packed)) as archived:
            entries = ((PurePosixPath(entry.filename).name, entry) for entry in archived.infolist())
            return {name: archived.open(entry).read(sizes[name]) for name, entry in entries if name in sizes}
    # An encrypted member is a RuntimeError, a method of compression that Python lacks a NotImplementedError.
    except (gzip.BadGzipFile, zlib.error, tarfile.TarError, zipfile.BadZipFile, EOFError, RuntimeError) as error:
        raise DataError(f"{source} is corrupt: expected a {kind} archive, but: {error}") from None


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
        split["dev.tsv" if tuple(row.split("\t")[1:3]) in ids else "train.tsv"].append(row)
    return {name: ("\n".join(lines) + "\n").encode() for name, lines in split.items()}
