"""Where a run's numbers come from (hardware, versions, time, commit), and how files are written: whole or not at all."""

import contextlib
import importlib.util
import json
import math
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


class StoreError(Exception):
    """Records that cannot be read, gone on with, or written; the message says which and what to do."""


def origin(*, threads: int, packages: Iterable[str] = ("torch",), device: str = "cpu") -> dict[str, Any]:
    """What ran, on what (with "cuda" also the GPU), in how many threads, when; nothing that names the machine or its user.

    Of packages that matter the versions are recorded; None where one is not installed.
    """
    import isaac_newton  # and torch, which takes seconds: those who only write files need it not

    versions: dict[str, str | None] = {"python": platform.python_version(), "isaac-newton": isaac_newton.__version__}
    versions |= {package: _version(package) for package in packages}
    machine: dict[str, Any] = {
        "system": platform.system(),
        "architecture": platform.machine(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": threads,
    }
    if device == "cuda":
        import torch

        machine["gpu"] = torch.cuda.get_device_name()
        versions["cuda"] = torch.version.cuda
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"time": now, "commit": _commit(), "versions": versions, "machine": machine}


def write(path: Path, record: dict[str, Any]) -> None:
    """Write a record as JSON."""
    write_whole(path, json.dumps(plain(record), indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def write_whole(path: Path, content: bytes | str) -> None:
    """Write a file so that whoever looks sees the old one or the whole new one, also after a kill or on a full disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=f"{path.name}.", suffix=".part", delete=False) as file:
        part = Path(file.name)
        try:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        except BaseException as error:
            part.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(path)
            raise
    part.chmod(0o644)
    part.replace(path)
    with contextlib.suppress(OSError):  # a directory cannot be opened on every system; then the rename is all there is
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def read(directory: Path) -> dict[str, dict[str, Any]]:
    """All records of a directory by file name, oldest first."""
    found = {path.name: read_json(path) for path in sorted(directory.glob("*.json"))}
    return dict(sorted(found.items(), key=lambda item: str(item[1].get("time", ""))))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file; one that is damaged is named."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(known, dict):
            raise ValueError(f"{path.name} is not a record")
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot read {path}: {error}. Restore the file") from None
    return known


def installed(module: str) -> bool:
    """Whether an optional module can be imported."""
    return importlib.util.find_spec(module) is not None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str | None:
    """The name of the processor's model, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _commit() -> str | None:
    """ISAAC_COMMIT, if it is set (for copies of a checkout); else that of the checkout, with "+" where files differ from it."""
    if named := os.environ.get("ISAAC_COMMIT"):
        return named
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "--", "..") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def plain(value: Any) -> Any:
    """With None for NaN and infinity, which a diverged run ends with and JSON has no words for."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
