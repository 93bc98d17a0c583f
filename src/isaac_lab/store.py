"""Records of training runs on disk: append-only lines of JSON that survive a kill at any moment.

A store is a directory. Runs that are trained together share one file, so that no two processes ever write to the same one:

- a header: format, version, scale, the fields that all runs have in common, and those in which each run differs;
- a line for each process that worked on it: where what follows comes from;
- a line for each epoch: of every run the training loss, test loss and test accuracy;
- a line that says that training has ended, with a digest of each run's final weights.

Beside it stands the checkpoint of unfinished runs. It is replaced by a rename, always before the epoch's line is written, and
carries that line too. So a line may be missing or torn, but never newer than what a resumed run can go on from: such lines are
cut, and the same epochs are trained again, to the same numbers.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import torch

from isaac_lab.config import Config, ConfigError

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # not on Windows; there nobody guards against two processes that train the same runs
    fcntl = None

__all__ = ["Epoch", "Log", "Point", "Record", "Store", "StoreError", "rounded"]

FORMAT, VERSION = "isaac-newton laboratory", 1
#: Marks a directory as a store.
MARKER = "store.json"
#: Ends the name of a file that is being written; after a kill it may stay behind.
PART = ".part"
CHECKPOINT = ".checkpoint"


class StoreError(Exception):
    """A directory that is no store, of another version, or that cannot be written."""


@dataclass(frozen=True)
class Point:
    """A run after an epoch; epoch 0 is the untrained network.

    Args:
        epoch: Passes over the training examples so far.
        step: Training steps so far.
        train_loss: Over at most 10,000 training examples, the same ones always; NaN if it is not finite.
        test_loss: Over all test examples; NaN if it is not finite.
        test_accuracy: Over all test examples; None where there are no classes.
        seconds: Spent in training steps so far, of all runs that were trained together.
    """

    epoch: int
    step: int
    train_loss: float
    test_loss: float
    test_accuracy: float | None
    seconds: float


@dataclass(frozen=True)
class Epoch:
    """All runs of a group after an epoch.

    Args:
        number: Of the epoch.
        step: Training steps so far.
        seconds: Spent in training steps so far.
        wall: Seconds spent with everything, evaluation and preparation included.
        points: Of each run, or None where it diverged before.
        diverged: Numbers of the runs that diverged in this epoch.
    """

    number: int
    step: int
    seconds: float
    wall: float
    points: tuple[Point | None, ...]
    diverged: tuple[int, ...] = ()


@dataclass(frozen=True)
class Record:
    """What is known of one run.

    Args:
        config: What was run.
        status: "finished", "diverged", or "unfinished".
        points: The curve.
        origin: Versions, hardware, commit and time of the process that began it; under "resumed" those that went on with it.
        executor: "local", "processes", "ensemble" or "ray".
        scale: What the run was a part of.
        copies: How many networks were trained at once; `seconds` and `wall` are of all of them.
        wall: Seconds from the start to the last point, evaluation and preparation included.
        weights: A digest of the final weights; None before the end.
    """

    config: Config
    status: str
    points: tuple[Point, ...]
    origin: dict[str, Any]
    executor: str
    scale: str
    copies: int = 1
    wall: float = 0.0
    weights: str | None = None


class Store:
    """A directory of records.

    Args:
        directory: One that is not there yet, is empty, or is a store. Nothing is written before the first run begins.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        self._read: dict[Path, tuple[tuple[int, int], _Group]] = {}
        if self.directory.exists() and not self.directory.is_dir():
            raise StoreError(f"{self.directory} is a file; records need a directory")
        marker = self.directory / MARKER
        if marker.exists():
            try:
                about = json.loads(marker.read_text(encoding="utf-8"))
            except (ValueError, OSError) as error:
                raise StoreError(f"cannot read {marker}: {error}") from None
            _check_version(about, marker)
        elif self.directory.exists() and any(path.suffix != PART for path in self.directory.iterdir()):
            raise StoreError(f"{self.directory} holds something else, and no records; choose a new directory")

    def records(self) -> list[Record]:
        """One for each run; where a run was made more than once, the one that came furthest."""
        best: dict[str, Record] = {}
        for group in self._groups():
            for record in group.records:
                known = best.get(record.config.key)
                if known is None or _progress(record) > _progress(known):
                    best[record.config.key] = record
        return list(best.values())

    def record(self, config: Config) -> Record | None:
        """Of this run, if there is one."""
        return next((record for record in self.records() if record.config.key == config.key), None)

    def finished(self, config: Config) -> bool:
        """Whether this run was trained to its end."""
        record = self.record(config)
        return record is not None and record.status == "finished"

    def unfinished(self, *, stacked: bool) -> list[tuple[Config, ...]]:
        """Groups of runs that can go on."""
        return [tuple(group.configs) for group in self._groups() if group.stacked == stacked and not group.ended]

    def tidy(self) -> None:
        """Remove checkpoints that a kill left behind after the end."""
        for group in self._groups():
            if group.ended:
                group.path.with_suffix(CHECKPOINT).unlink(missing_ok=True)

    def open(self, configs: Sequence[Config], *, stacked: bool, scale: str, executor: str, origin: Mapping[str, Any]) -> "Log":
        """Begin a group of runs, or go on with it."""
        name = hashlib.sha256(" ".join([str(stacked), *(config.key for config in configs)]).encode()).hexdigest()[:12]
        path = self.directory / f"{name}.jsonl"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if not (self.directory / MARKER).exists():
                about = json.dumps({"format": FORMAT, "version": VERSION}) + "\n"
                _replace(self.directory / MARKER, lambda file: file.write(about.encode()))
            return Log(path, configs, {"scale": scale, "stacked": stacked}, {"executor": executor, "origin": dict(origin)})
        except OSError as error:
            raise StoreError(f"cannot write to {self.directory}: {error.strerror or error}") from None

    def _groups(self) -> Iterator["_Group"]:
        for path in sorted(self.directory.glob("*.jsonl")):
            about = path.stat()
            signature = (about.st_mtime_ns, about.st_size)
            if self._read.get(path, (None,))[0] != signature:
                self._read[path] = (signature, _Group(path))
            group = self._read[path][1]
            if group.configs:
                yield group


class Log:
    """The file of one group of runs while they are trained; a context manager.

    Attributes:
        checkpoint: What `save` was last given, or None: where training goes on.
    """

    def __init__(self, path: Path, configs: Sequence[Config], about: Mapping[str, Any], process: Mapping[str, Any]) -> None:
        self._path, self._state = path, path.with_suffix(CHECKPOINT)
        self._file = path.open("ab")
        if fcntl is not None:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._file.close()
                raise StoreError(f"another process is training the runs of {path}") from None
        try:
            self.checkpoint = self._load()
            group = _Group(path)
            if group.ended:
                raise StoreError(f"the runs of {path} have ended")
            line = {"epoch": -1} if self.checkpoint is None else self.checkpoint["line"]
            self._file.truncate(group.end_of_epoch(line["epoch"]))
            if not group.configs:
                self._write({"format": FORMAT, "version": VERSION, **about, **_pack(configs)})
            elif self.checkpoint is not None and not any(known["epoch"] == line["epoch"] for known in group.epochs):
                self._write(line)
            self._write(process)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def save(self, state: Mapping[str, Any], epoch: Epoch) -> None:
        """Replace the checkpoint; `append` of the same epoch follows."""
        checkpoint = {"state": dict(state), "line": _line(epoch)}
        _replace(self._state, lambda file: torch.save(checkpoint, file))

    def append(self, epoch: Epoch) -> None:
        """Write an epoch's numbers."""
        self._write(_line(epoch))

    def end(self, weights: Sequence[str | None]) -> None:
        """Write that all runs have ended, with digests of the final weights, None for those that diverged."""
        self._write({"end": True, "weights": list(weights)})
        self._state.unlink(missing_ok=True)

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write((json.dumps(line, allow_nan=False, ensure_ascii=False) + "\n").encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def _load(self) -> dict[str, Any] | None:
        for part in self._state.parent.glob(f"{self._state.name}.*{PART}"):
            part.unlink(missing_ok=True)
        if not self._state.exists():
            return None
        try:
            checkpoint: dict[str, Any] = torch.load(self._state, map_location="cpu", weights_only=True)
            return checkpoint
        except Exception as error:
            raise StoreError(f"cannot read {self._state}: {error}; remove it to train from the start") from None


@dataclass
class _Group:
    """What a file says, up to the first line that is torn."""

    path: Path
    configs: list[Config] = field(default_factory=list)
    scale: str = ""
    stacked: bool = False
    processes: list[dict[str, Any]] = field(default_factory=list)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    weights: list[str | None] | None = None
    _ends: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        place = 0
        for raw in self.path.read_bytes().splitlines(keepends=True):
            try:
                line = json.loads(raw) if raw.endswith(b"\n") else None
            except ValueError:
                line = None
            if not isinstance(line, dict):
                break  # torn
            place += len(raw)
            self._take(line)
            # The header ends where epoch −1 would.
            if "epoch" in line or not self._ends:
                self._ends[line.get("epoch", -1)] = place

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to train."""
        return self.weights is not None

    def end_of_epoch(self, number: int) -> int:
        """The length of the file up to this epoch, or to the last one before it."""
        return max((end for epoch, end in self._ends.items() if epoch <= number), default=0)

    @functools.cached_property
    def records(self) -> list[Record]:
        """One for each run."""
        diverged = {number for line in self.epochs for number in line.get("diverged", ())}
        origin = dict(self.processes[0]["origin"]) if self.processes else {}
        if len(self.processes) > 1:
            origin["resumed"] = [process["origin"] for process in self.processes[1:]]
        return [
            Record(
                config,
                "diverged" if number in diverged else "finished" if self.ended else "unfinished",
                tuple(_point(line, line["points"][number]) for line in self.epochs if line["points"][number] is not None),
                origin,
                self.processes[-1]["executor"] if self.processes else "",
                self.scale,
                copies=len(self.configs),
                wall=self.epochs[-1]["wall"] if self.epochs else 0.0,
                weights=self.weights[number] if self.weights is not None else None,
            )
            for number, config in enumerate(self.configs)
        ]

    def _take(self, line: dict[str, Any]) -> None:
        try:
            if not self.configs:
                _check_version(line, self.path)
                self.configs = _unpack(line)
                self.scale, self.stacked = line["scale"], line["stacked"]
            elif "origin" in line:
                self.processes.append(line)
            elif "epoch" in line:
                self.epochs.append(line)
            elif "end" in line:
                self.weights = line["weights"]
        except (KeyError, TypeError, AttributeError, ConfigError) as error:
            raise StoreError(f"{self.path} is not a record that this version writes: {error}") from None


def rounded(value: float) -> float:
    """Six significant digits: what a record keeps."""
    return float(f"{value:.6g}")


def _progress(record: Record) -> tuple[bool, int]:
    return record.status != "unfinished", len(record.points)


def _check_version(about: Any, path: Path) -> None:
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise StoreError(f"{path} is no record of this laboratory; choose another directory")
    if about.get("version") != VERSION:
        raise StoreError(
            f"{path} has format version {about.get('version')}, and this version of isaac-newton reads {VERSION}; "
            "choose another directory, or the isaac-newton that wrote it"
        )


def _pack(configs: Sequence[Config]) -> dict[str, Any]:
    """What the runs have in common, and in what each differs."""
    every = [{name: _plain(value) for name, value in asdict(config).items()} for config in configs]
    common = {name: value for name, value in every[0].items() if all(other[name] == value for other in every)}
    return {"common": common, "runs": [{name: v for name, v in one.items() if name not in common} for one in every]}


def _unpack(line: Mapping[str, Any]) -> list[Config]:
    # Infinity is no JSON; a number that is a word can only be that.
    every = [{**line["common"], **own} for own in line["runs"]]
    return [Config.from_mapping({name: math.inf if v == "inf" else v for name, v in one.items()}) for one in every]


def _plain(value: Any) -> Any:
    return "inf" if value == math.inf else value


def _line(epoch: Epoch) -> dict[str, Any]:
    points = [None if p is None else [_number(p.train_loss), _number(p.test_loss), p.test_accuracy] for p in epoch.points]
    line: dict[str, Any] = {"epoch": epoch.number, "step": epoch.step, "seconds": epoch.seconds, "wall": epoch.wall}
    return line | {"points": points} | ({"diverged": list(epoch.diverged)} if epoch.diverged else {})


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _point(line: Mapping[str, Any], numbers: Sequence[float | None]) -> Point:
    train, test, accuracy = numbers
    train, test = (math.nan if loss is None else loss for loss in (train, test))
    return Point(line["epoch"], line["step"], train, test, accuracy, line["seconds"])


def _replace(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file so that whoever looks sees the old one or the whole new one."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}{PART}")
    with temporary.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    with contextlib.suppress(OSError):  # a directory cannot be opened on every system; then the rename is all there is
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
