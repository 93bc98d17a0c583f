"""Where the records of trials are: one file each, there as a whole or not at all, so that a kill loses a trial at most."""

import json
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from isaac_lab.records import plain
from isaac_lab.store import StoreError
from isaac_lab.trials.loop import FORMAT
from isaac_lab.trials.trial import Trial

__all__ = ["Store", "TrialStoreError"]


class TrialStoreError(StoreError):
    """A record that cannot be used; the message says which and why."""


class Store:
    """A folder of records.

    Args:
        folder: Made where it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, record: dict[str, Any]) -> None:
        """Write a record under its trial's key."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(Trial.from_mapping(record["trial"]))
        with tempfile.NamedTemporaryFile("w", dir=self.folder, suffix=".part", delete=False, encoding="utf-8") as file:
            json.dump(plain(record), file, allow_nan=False, ensure_ascii=False)
            file.write("\n")
        part = Path(file.name)
        part.chmod(0o644)
        part.replace(path)

    def get(self, trial: Trial) -> dict[str, Any] | None:
        """The record of a trial, or None."""
        path = self._path(trial)
        if not path.exists():
            return None
        try:
            record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            found = record["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise TrialStoreError(f"{path} is no record of a trial: {error}. Remove it to run that trial again") from None
        if found != FORMAT:
            raise TrialStoreError(f"{path} has format {found}, this version reads {FORMAT}; name another directory")
        if record.get("trial") != asdict(trial):
            raise TrialStoreError(f"{path} is the record of another trial than its name says; remove it")
        return record

    def missing(self, trials: Iterable[Trial]) -> list[Trial]:
        """Those without a record, each once."""
        return [trial for trial in dict.fromkeys(trials) if self.get(trial) is None]

    def _path(self, trial: Trial) -> Path:
        return self.folder / f"{trial.key}.json"
