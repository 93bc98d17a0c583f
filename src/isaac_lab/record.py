"""What is known of a run that ended, and where it is kept: one line of one file for each study and scale."""

import hashlib
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from isaac_lab import lines
from isaac_lab.records import StoreError, read_json, write_whole
from isaac_lab.trial import Trial, TrialError

FORMAT = "isaac-newton trials 1"
TIMES = "isaac-newton times 1"
#: What is known of a network when it is measured: the step, losses, scores; None for what is no number.
Point = Mapping[str, Any]


@dataclass(frozen=True)
class Record:
    """A run that ended."""

    trial: Trial
    status: str  # "finished" or "diverged"
    curve: Mapping[str, Sequence[float | None]]  # by quantity a column, "step" the first; None where a number is not finite
    seconds_per_step: float | None = None  # of the training steps, of all networks that were trained together
    #: Commit, versions, machine, data, arithmetic, mode, executor: what many runs have in common.
    about: Mapping[str, Any] = field(default_factory=dict, hash=False)
    time: str = ""  # when it ended
    digest: str = ""  # of the final weights; "" where nobody took it

    @cached_property
    def points(self) -> list[dict[str, Any]]:
        """The curve, measurement by measurement."""
        return [dict(zip(self.curve, row, strict=True)) for row in zip(*self.curve.values(), strict=True)]

    @property
    def finished(self) -> bool:
        """Whether it was trained to its end."""
        return self.status == "finished"

    def column(self, name: str) -> list[float]:
        """A quantity over the measurements; NaN where it is no number or was not measured."""
        return [math.nan if value is None else float(value) for value in self.curve.get(name, [None] * len(self.curve["step"]))]

    def final(self, name: str) -> float:
        """A quantity at the end; infinite where the run diverged or it is no number."""
        values = self.column(name)
        return values[-1] if self.finished and values and math.isfinite(values[-1]) else math.inf

    def as_json(self) -> dict[str, Any]:
        """A line without what many runs have in common."""
        line: dict[str, Any] = {"trial": self.trial.as_json(), "status": self.status}
        line["curve"] = {name: list(column) for name, column in self.curve.items()}
        line |= {"seconds_per_step": self.seconds_per_step, "time": self.time}
        return line | ({"digest": self.digest} if self.digest else {})

    @classmethod
    def from_json(cls, value: Mapping[str, Any], about: Mapping[str, Any]) -> "Record":
        """What `as_json` gave; a TrialError says what is wrong with it."""
        for name in ("trial", "curve"):
            if not isinstance(value.get(name), dict):
                raise TrialError(f"it has no {name}")
        if value.get("status") not in ("finished", "diverged"):
            raise TrialError(f"status must be finished or diverged, got {value.get('status')!r}")
        curve = value["curve"]
        if "step" not in curve or len({len(column) for column in curve.values()}) != 1:
            raise TrialError("its curve must have a column of steps, and columns of one length")
        if value["status"] == "finished" and not curve["step"]:
            raise TrialError("it is finished, and was never measured")
        ends = value.get("seconds_per_step"), about, value.get("time", ""), value.get("digest", "")
        return cls(Trial.from_json(value["trial"]), value["status"], curve, *ends)


class Store:
    """The runs of a study at a scale: `trials.jsonl`, and beside it `times.jsonl`, `about.json` and checkpoints.

    One process writes at a time, and only within `writing`. Nothing is written before the first run has ended.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.path = self.folder / "trials.jsonl"
        self._times, self._about = self.folder / "times.jsonl", self.folder / "about.json"
        self._seen: tuple[int, int] | None = None
        self._records: dict[str, Record] = {}
        self._abouts: dict[str, Mapping[str, Any]] = {}
        self._writes = False

    @contextmanager
    def writing(self, command: str = "") -> Iterator[list[str]]:
        """Be the one who writes; yields what was mended of what a kill left behind, for people to read."""
        with lines.locked(self.folder, command):
            self._writes = True
            try:
                yield [said for path in (self.path, self._times) if (said := lines.mend(path))]
            finally:
                self._writes = False

    def get(self, trial: Trial) -> Record | None:
        """The record of a run, or None."""
        self._read()
        return self._records.get(trial.key)

    def records(self) -> list[Record]:
        """All, in the order of the file."""
        self._read()
        return list(self._records.values())

    def missing(self, trials: Iterable[Trial]) -> list[Trial]:
        """Those without a record, each once."""
        self._read()
        return [trial for trial in dict.fromkeys(trials) if trial.key not in self._records]

    def add(self, *records: Record) -> None:
        """Keep these; one that is there already is left as it is."""
        if not self._writes:
            raise RuntimeError("records are added within `writing` only")
        self._read()
        new: list[dict[str, Any]] = []
        for record in records:
            if record.trial.key in self._records:
                continue
            name = _name(record.about)
            if name not in self._abouts:
                self._abouts[name] = record.about
                new.append({"about": name, **record.about})
            self._records[record.trial.key] = record
            new.append({**record.as_json(), "by": name})
        try:
            if new:
                lines.append(self.path, new, format=FORMAT)
        except StoreError:
            self._seen = None
            raise
        self._seen = _signature(self.path)

    def checkpoint(self, trials: Sequence[Trial]) -> "Checkpoint":
        """Where runs that are trained together are kept until they end."""
        name = _name({"keys": [trial.key for trial in trials]})
        return Checkpoint(self.folder / "checkpoints" / f"{name}.checkpoint", trials)

    def begun(self) -> list[list[Trial]]:
        """Groups of runs that were begun together, and can go on."""
        found = sorted((self.folder / "checkpoints").glob("*.trials"))
        whole = [read_json(path)["trials"] for path in found if path.with_suffix(".checkpoint").exists()]
        return [[Trial.from_json(one) for one in trials] for trials in whole]

    @property
    def about(self) -> dict[str, Any]:
        """What about.json says: settings, seeds, the calls that trained; empty where there is none."""
        return read_json(self._about) if self._about.exists() else {}

    def note(self, about: Mapping[str, Any]) -> None:
        """Write about.json."""
        write_whole(self._about, json.dumps(dict(about), indent=1, ensure_ascii=False, allow_nan=False) + "\n")

    def times(self) -> dict[str, dict[str, Any]]:
        """Records of the times of steps, by name; of several with one name the last."""
        return {value.pop("times"): value for _, value in lines.read(self._times, format=TIMES, torn=self._writes)}

    def add_times(self, name: str, record: Mapping[str, Any]) -> None:
        """Keep the times of steps."""
        lines.append(self._times, [{"times": name, **record}], format=TIMES)

    def _read(self) -> None:
        """What is in the file, unless that is known already."""
        signature = _signature(self.path)
        if signature == self._seen:
            return
        abouts: dict[str, Mapping[str, Any]] = {}
        found: dict[str, tuple[int, Record]] = {}
        damage = []
        for number, value in lines.read(self.path, format=FORMAT, torn=self._writes):
            try:
                if "about" in value:
                    abouts[str(value.pop("about"))] = value
                    continue
                if value.get("by") not in abouts:
                    raise TrialError(f"nothing before it says where it comes from ({value.get('by')!r})")
                record = Record.from_json(value, abouts[value["by"]])
                first, known = found.setdefault(record.trial.key, (number, record))
                if known.curve != record.curve:
                    raise TrialError(f"it is another result of the run of line {first}; remove one of them")
            except (TrialError, TypeError, AttributeError) as error:
                damage.append(f"{self.path}, line {number}: it is no record that this version writes: {error}")
        if damage:
            raise StoreError("\n".join(damage))
        self._abouts, self._records = abouts, {key: record for key, (_, record) in found.items()}
        self._seen = signature


class Checkpoint:
    """The state of runs that have not ended; there as a whole or not at all, and never in git.

    Beside its file stands one that says which runs it is of.
    """

    def __init__(self, path: Path, trials: Sequence[Trial]) -> None:
        self._path, self._trials = path, trials

    def load(self) -> dict[str, Any] | None:
        """What was saved last, or None."""
        if not self._path.exists():
            return None
        import torch

        try:
            state: dict[str, Any] = torch.load(self._path, map_location="cpu", weights_only=False)
            if not {"done", "state", "columns"} <= state.keys():
                raise ValueError("it is of another version")
        except Exception as error:
            raise StoreError(f"cannot read {self._path}: {error}; remove it to train that run from the start") from None
        return state

    def save(self, state: Mapping[str, Any]) -> None:
        """Replace what was saved."""
        import torch

        # In memory first: torch's own writer ends the process on a full disk.
        file = io.BytesIO()
        torch.save(dict(state), file)
        try:
            about = {"trials": [trial.as_json() for trial in self._trials]}
            write_whole(self._path.with_suffix(".trials"), json.dumps(about))
            write_whole(self._path, file.getvalue())
        except OSError as error:
            reason = error.strerror or error
            raise StoreError(f"cannot write a checkpoint to {self._path.parent}: {reason}. What has ended is kept") from None

    def remove(self) -> None:
        """The runs have ended."""
        for suffix in (".checkpoint", ".trials"):
            self._path.with_suffix(suffix).unlink(missing_ok=True)


def rounded(value: float | None) -> float | None:
    """Six significant digits: what a record keeps; None for what is no number."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _name(about: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(dict(about), sort_keys=True).encode()).hexdigest()[:8]


def _signature(path: Path) -> tuple[int, int] | None:
    return (path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else None
