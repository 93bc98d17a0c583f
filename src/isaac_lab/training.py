"""The training loop: one network, or many stacked, from the first step to the last, with everything that a record needs.

Weights, order and noise are functions of seed and epoch (`noise`). So a run that was loaded goes on as the one that was saved
would have, also inside an epoch.
"""

import hashlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from isaac_lab import method
from isaac_lab.networks import Alone, Stacked
from isaac_lab.products import float32_products
from isaac_lab.record import Checkpoint, Record, rounded
from isaac_lab.records import StoreError
from isaac_lab.trial import Trial, TrialError
from isaac_lab.workload import Workload

#: A run with a larger training loss, or one that is no number, has diverged.
LARGEST_LOSS = 1e6


class StoppedError(Exception):
    """Time is up, or somebody asked for an end; what has ended is kept, and the rest goes on from checkpoints."""


@dataclass(frozen=True)
class Options:
    """How runs are trained; sent to other processes."""

    device: str = "cpu"
    #: Let a GPU multiply in TF32, also where the workload does not by itself. The inverses do not change.
    tensor_cores: bool = False
    seconds: float = 30.0  # so many lie between checkpoints
    until: float | None = None  # when to stop, by `time.time`; None for never
    about: Mapping[str, Any] = field(default_factory=dict)  # what records say of where they come from


def train(
    trials: Sequence[Trial],
    workload: Workload,
    options: Options,
    *,
    checkpoint: Checkpoint | None = None,
    tick: Callable[[int, float, list[dict[str, float] | None]], object] = lambda step, seconds, found: None,
) -> list[Record]:
    """Train one run, or several that an ensemble can train, from their checkpoint if there is one; returns their records.

    `tick` is called after each measurement with the step, the seconds spent in steps, and what was measured of each. When time
    is up, a checkpoint is kept and a StoppedError raised.
    """
    with float32_products(tensor_cores=workload.tensor_cores or options.tensor_cores):
        return _Loop(trials, workload, options, checkpoint).run(tick)


class _Loop:
    """A training on its way."""

    def __init__(self, trials: Sequence[Trial], workload: Workload, options: Options, checkpoint: Checkpoint | None) -> None:
        self._trials, self._first, self._workload = trials, trials[0], workload
        self._options, self._checkpoint = options, checkpoint
        saved = checkpoint.load() if checkpoint is not None else None
        self._training: Alone | Stacked = (Stacked if len(trials) > 1 else Alone)(trials, workload, options.device)
        self.done, self._seconds = 0, 0.0
        self._gone = [False] * len(trials)
        self._columns: list[dict[str, list[Any]]] = [{"step": []} for _ in trials]
        self._saved_at = time.monotonic()
        if saved is not None:
            self._go_on(saved)

    def run(self, tick: Callable[[int, float, list[dict[str, float] | None]], object]) -> list[Record]:
        """Train, measure, and say what came out."""
        steps = self._steps()
        for stop in self._first.measured():
            if stop < self.done or all(self._gone) or stop in self._known():
                continue
            try:
                self._advance(steps, stop)
            except (RuntimeError, ValueError) as error:
                self._lost(error)
                break
            tick(self.done, self._seconds, self._measure())
            if all(self._gone):
                break
            self._save_now_and_then()
        return self._records()

    def _known(self) -> set[float | None]:
        return set().union(*(own["step"] for own in self._columns))

    def _steps(self) -> Iterator[tuple[Tensor, ...]]:
        """Batches from where training stands, epoch after epoch; epochs count from 1."""
        epoch, skipped = divmod(self.done, self._workload.steps)
        for number in itertools.count(epoch + 1):
            batches = self._training.batches(number)
            yield from itertools.islice(batches, skipped if number == epoch + 1 else 0, None)

    def _advance(self, batches: Iterator[tuple[Tensor, ...]], stop: int) -> None:
        while self.done < stop:
            started, first = time.perf_counter(), self.done
            while self.done < stop and (self.done == first or not self._is_due()):
                self._training.set_rate(self._first.share(self.done))
                self._training.step(*next(batches))
                self.done += 1
            if self._options.device == "cuda":
                torch.cuda.synchronize()
            self._seconds += time.perf_counter() - started
            self._save_now_and_then()

    def _measure(self) -> list[dict[str, float] | None]:
        found = [None if gone else own for own, gone in zip(self._training.measure(), self._gone, strict=True)]
        for number, own in enumerate(found):
            if own is None:
                continue
            row: dict[str, Any] = {"step": self.done, **{name: rounded(value) for name, value in own.items()}}
            if frames := self._first.get("frames", ()):
                row["picture"] = self._workload.picture(self._training.model) if self.done in frames else None
            for name, value in row.items():
                self._columns[number].setdefault(name, []).append(value)
            # Written so that NaN is caught.
            if not own["train_loss"] <= LARGEST_LOSS:
                self._gone[number] = True
                self._training.freeze(number)
        return found

    def _lost(self, error: Exception) -> None:
        """A method of others that cannot factorize what it was led to, or will not draw from a distribution that is none."""
        if isinstance(error, TrialError) or len(self._trials) > 1:
            raise error
        if not isinstance(error, LinAlgError) and self._training.measure()[0]["train_loss"] <= LARGEST_LOSS:
            raise error
        self._gone[0] = True

    def _is_late(self) -> bool:
        return self._options.until is not None and time.time() >= self._options.until

    def _is_due(self) -> bool:
        return self._is_late() or time.monotonic() - self._saved_at >= self._options.seconds

    def _save_now_and_then(self) -> None:
        """A checkpoint where it is time for one; an end where it is time for that. After the last step the records follow."""
        if not self._is_due() or self._checkpoint is None or (self.done >= self._first.steps and self.done in self._known()):
            return
        state = {"done": self.done, "seconds": self._seconds, "gone": self._gone, "columns": self._columns}
        self._checkpoint.save(state | {"state": self._training.state()})
        self._saved_at = time.monotonic()
        if self._is_late():
            raise StoppedError

    def _go_on(self, saved: Mapping[str, Any]) -> None:
        try:
            self._training.load(saved["state"])
        except (KeyError, RuntimeError, ValueError) as error:
            raise StoreError(f"the checkpoint of {self._first.title} is of other networks: {error}; remove it") from None
        self.done, self._seconds = saved["done"], saved["seconds"]
        self._gone, self._columns = list(saved["gone"]), saved["columns"]
        for number, gone in enumerate(self._gone):
            if gone:
                self._training.freeze(number)

    def _records(self) -> list[Record]:
        workload = self._workload
        about = {
            **self._options.about,
            **{name: getattr(workload, name) for name in ("data", "checksum", "weights", "arithmetic")},
            "mode": "captured" if self._options.device == "cuda" and method.capturable(self._first) else "eager",
            "copies": len(self._trials),
        }
        now = datetime.now(UTC).isoformat(timespec="seconds")
        pace = rounded(self._seconds / self.done) if self.done else None
        ends = ["diverged" if gone else "finished" for gone in self._gone]
        digests = ["" if gone else _digest(self._training.weights(number)) for number, gone in enumerate(self._gone)]
        rows = zip(self._trials, ends, self._columns, digests, strict=True)
        return [Record(trial, end, curve, pace, about, now, digest) for trial, end, curve, digest in rows]


def _digest(weights: Sequence[Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for tensor in weights:
        digest.update(tensor.contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()
