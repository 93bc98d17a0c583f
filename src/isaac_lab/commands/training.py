"""What all commands that train have in common: where, how long, how they end, and what an error says."""

import contextlib
import enum
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from rich.console import Console

# torch takes seconds to import and `--help` should not: the functions import it.
if TYPE_CHECKING:
    from isaac_lab.executors import Call
    from isaac_lab.record import Store
    from isaac_lab.study import Arm
    from isaac_lab.trial import Trial

__all__ = [
    "STOPPED",
    "Data",
    "DeviceChoice",
    "DeviceOption",
    "Minutes",
    "ScaleChoice",
    "Workers",
    "at_least_one",
    "check_writable",
    "chosen_device",
    "deadline",
    "goes_on",
    "named_errors",
    "perform",
    "place",
    "shown_later",
]

#: Exit codes: time was up; Ctrl-C; SIGTERM.
STOPPED, INTERRUPTED, TERMINATED = 3, 130, 143


class DeviceChoice(enum.StrEnum):
    """Where it trains."""

    CPU = "cpu"
    CUDA = "cuda"


class ScaleChoice(enum.StrEnum):
    """How much is run."""

    SMOKE = "smoke"
    QUICK = "quick"
    STANDARD = "standard"


DeviceOption: TypeAlias = Annotated[
    DeviceChoice | None, typer.Option("--device", help="Unless given: cuda if there is one.", show_default=False)
]
Workers: TypeAlias = Annotated[int, typer.Option(min=1, help="Processes that train at once; times are measured after them.")]
Data: TypeAlias = Annotated[Path | None, typer.Option(help="Folder with the data sets.", show_default=False)]
Minutes: TypeAlias = Annotated[
    float | None,
    typer.Option(help=f"Stop at a checkpoint after so many minutes, with exit code {STOPPED}.", show_default=False),
]


class _TerminatedError(BaseException):
    """SIGTERM."""


def at_least_one(value: int | None) -> int | None:
    """Refuse what is given and not positive."""
    if value is not None and value < 1:
        raise typer.BadParameter(f"must be at least 1, got {value}")
    return value


def deadline(minutes: float | None) -> float | None:
    """When to stop, by `time.time`."""
    if minutes is None:
        return None
    if not minutes > 0:
        raise typer.BadParameter(f"must be > 0, got {minutes:g}", param_hint="'--minutes'")
    return time.time() + 60 * minutes


def chosen_device(device: DeviceChoice | None, *, needed: bool) -> str:
    """The one that was asked for, else a GPU if there is one; an error where it is needed and not there."""
    import torch

    there = torch.cuda.is_available()
    if needed and device is DeviceChoice.CUDA and not there:
        raise typer.BadParameter("this machine has no CUDA device that torch can use; use cpu", param_hint="'--device'")
    return device.value if device else "cuda" if there else "cpu"


def place(given: Path | None, name: str = "") -> Path:
    """Where records are read: the folder that was named, else that of the checkout, else where commands write to."""
    committed = Path("results") / name
    return given or (committed if committed.is_dir() else Path("out") / name)


def check_writable(directory: Path, *, option: str = "--out") -> None:
    """Learn before the training, not after it, that its results cannot be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        message = f"cannot write to {str(directory)!r}: {error.strerror}. Name a directory that you can write to."
        raise typer.BadParameter(message, param_hint=f"'{option}'") from None


@contextlib.contextmanager
def goes_on(console: Console) -> Iterator[None]:
    """Ctrl-C, SIGTERM and the end of the time say that the same command goes on."""
    from isaac_lab.training import StoppedError

    def terminate(number: int, frame: FrameType | None) -> None:
        raise _TerminatedError

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except (KeyboardInterrupt, _TerminatedError, StoppedError) as error:
        why, code = {
            KeyboardInterrupt: ("Stopped", INTERRUPTED),
            _TerminatedError: ("Terminated", TERMINATED),
            StoppedError: ("Time is up", STOPPED),
        }[type(error)]
        text = f"{why}. Runs that have ended are kept, others go on from their last checkpoint: give the same command again."
        console.print(f"\n{text}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(code) from None
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def named_errors(out: str = "--out") -> Iterator[None]:
    """Errors that a user can do something about, with the option that it is about."""
    from isaac_lab.data.files import DataError
    from isaac_lab.executors import ExecutorError
    from isaac_lab.records import StoreError
    from isaac_lab.trial import TrialError
    from isaac_lab.workloads.encoders import EncoderError

    try:
        yield
    except TrialError as error:
        raise typer.BadParameter(str(error), param_hint="'--set'") from None
    except EncoderError as error:
        raise typer.BadParameter(str(error), param_hint="'--model'") from None
    except DataError as error:
        raise typer.BadParameter(str(error), param_hint="'--data'") from None
    except ExecutorError as error:
        raise typer.BadParameter(str(error), param_hint="'--executor' / '--device' / '--workers'") from None
    except StoreError as error:
        raise typer.BadParameter(str(error), param_hint=f"'{out}'") from None
    except OSError as error:
        what = f"cannot read or write {error.filename}: " if error.filename else ""
        raise typer.BadParameter(f"{what}{error.strerror or error}. What has ended is kept", param_hint=f"'{out}'") from None


def perform(
    arms: "Sequence[Arm]",
    store: "Store",
    call: "Call",
    console: Console,
    about: Mapping[str, Any],
    timed: "Mapping[str, Trial]",
    turn: float = 0.1,
) -> None:
    """Train what is due of a study, with progress; then the time of a step on this device, unless it is known.

    Args:
        arms: The study.
        store: For its records.
        call: How.
        console: For progress.
        about: What the store is told of the study; its "id" is its name.
        timed: By name, whose steps are timed; the first is what ratios are relative to.
        turn: Seconds of a turn.
    """
    from isaac_lab import times
    from isaac_lab.progress import display
    from isaac_lab.studies.calls import Means, calling, trainer
    from isaac_lab.study import settle

    # Matrices this small gain nothing from more threads than one, and the result does not depend on their number.
    one = times.threads(int(call.device == "cpu"))
    with named_errors(), goes_on(console), one, display(console) as shown, store.writing(call.command) as mended:
        for said in mended:
            shown.say(said)
        call.check()
        means = Means(replace(call, progress=shown), display=shown)
        with calling(store, means, about) as trained:
            settle(arms, store, trainer(store, means, trained, str(about["id"])))
        if timed and call.device not in store.times():
            shown.say("the time of a step, methods taking turns")
            found = times.measure(timed, device=call.device, rounds=5, turn=turn, folder=call.folder)
            store.add_times(call.device, found)


@contextlib.contextmanager
def shown_later(console: Console) -> Iterator[None]:
    """Where a package for tables is missing, say so: what was trained is kept, and the same command shows it elsewhere."""
    try:
        yield
    except ModuleNotFoundError as error:
        console.print(f"Shown later: {error}. Records are kept; give the same command where it is installed.", markup=False)
