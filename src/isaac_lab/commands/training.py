"""What all commands that train have in common: their options, how they go from records to pages, and how they end."""

import contextlib
import importlib
import os
import shlex
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer
from rich.console import Console

# torch takes seconds to import and `--help` should not: the functions import it.
if TYPE_CHECKING:
    from isaac_lab.studies.calls import Means

#: What fills which block of a page.
Blocks: TypeAlias = Mapping[str, Callable[[], str]]
#: Exit codes: time was up; Ctrl-C; SIGTERM.
STOPPED, INTERRUPTED, TERMINATED = 3, 130, 143

#: How much is run.
Scale: TypeAlias = Literal["smoke", "quick", "standard"]
Device: TypeAlias = Literal["cpu", "cuda"]
DeviceOption: TypeAlias = Annotated[Device | None, typer.Option("--device", help="Unless given: cuda if there is one.")]
Workers: TypeAlias = Annotated[int, typer.Option(min=1, help="Processes that train at once; times are measured after them.")]
Data: TypeAlias = Annotated[Path | None, typer.Option(help="Folder with the data sets.")]
Model: TypeAlias = Annotated[str, typer.Option(help="Folder or hub name of a pre-trained encoder; or ISAAC_ENCODER.")]
Minutes: TypeAlias = Annotated[
    float | None, typer.Option(help=f"Stop at a checkpoint after so many minutes, with exit code {STOPPED}.")
]
DrawOnly: TypeAlias = Annotated[
    bool, typer.Option("--draw-only", help="Tables and pictures again from the records in OUT; train nothing.")
]
Fill: TypeAlias = Annotated[
    list[Path] | None, typer.Option("--fill", help="Then put the results into this page, where it has marks for them.")
]


def out_option(what: str, name: str) -> Any:
    """The option --out of a command that writes to out/NAME."""
    return typer.Option(help=f"{what}. Unless given: out/{name}; to draw only, results/{name}.")


class _TerminatedError(BaseException):
    """SIGTERM."""


def at_least_one(value: int | None) -> int | None:
    """Refuse what is given and not positive."""
    if value is not None and value < 1:
        raise typer.BadParameter(f"must be at least 1, got {value}")
    return value


def listed(text: str) -> tuple[str, ...]:
    """Names with commas between."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def among(text: str, known: Sequence[str], what: str, option: str, shown: Callable[[str], str] = str) -> tuple[str, ...]:
    """The names in a comma-separated list, in the order of `known`; all of them for an empty list."""
    names = listed(text)
    if unknown := [shown(name) for name in names if name not in known]:
        said = f"unknown {what} {', '.join(unknown)}; known: {', '.join(known)}"
        raise typer.BadParameter(said, param_hint=f"'{option}'")
    return tuple(name for name in known if name in names or not names)


def deadline(minutes: float | None) -> float | None:
    """When to stop, by `time.time`."""
    if minutes is None:
        return None
    if not minutes > 0:
        raise typer.BadParameter(f"must be > 0, got {minutes:g}", param_hint="'--minutes'")
    return time.time() + 60 * minutes


def chosen_device(device: Device | None, *, needed: bool) -> str:
    """The one that was asked for, else a GPU if there is one; an error where it is needed and not there."""
    import torch

    there = torch.cuda.is_available()
    if needed and device == "cuda" and not there:
        raise typer.BadParameter("this machine has no CUDA device that torch can use; use cpu", param_hint="'--device'")
    return device or ("cuda" if there else "cpu")


def use_encoder(model: str) -> str:
    """Say which encoder is trained, where the processes that train look for it too; its name, without its place."""
    from isaac_lab.workloads import glue

    if model:
        os.environ[glue.ENCODER] = model
    return Path(model).name


def command_line(words: Sequence[str], options: Mapping[str, object]) -> str:
    """How to call this again; of the options those that say something. True stands for a flag, a tuple for several times."""
    found = ["isaac-newton", *words]
    for name, given in options.items():
        for value in given if isinstance(given, tuple) else (given,):
            if value:
                found += [name] if value is True else [name, str(value)]
    return shlex.join(found)


def means(
    words: Sequence[str], options: Mapping[str, object], device: str, data: Path | None, workers: int, minutes: float | None
) -> "Means":
    """How to train: in this process or, where there are more workers than one, in theirs; and the command that says so."""
    from isaac_lab.executors import Call
    from isaac_lab.studies.calls import Means

    how, command = "processes" if workers > 1 else "local", command_line(words, options)
    return Means(Call(how, device, data, workers, until=deadline(minutes), command=command))


def place(given: Path | None, name: str = "", *, only_read: bool = True) -> Path:
    """The folder that was named, else that in out/; where records are only read first that of the checkout, in results/."""
    committed = Path("results") / name
    return given or (committed if only_read and committed.is_dir() else Path("out") / name)


def check_writable(directory: Path, *, option: str = "--out") -> None:
    """Learn before the training, not after it, that its results cannot be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        message = f"cannot write to {str(directory)!r}: {error.strerror}. Name a directory that you can write to."
        raise typer.BadParameter(message, param_hint=f"'{option}'") from None


def say(console: Console, *lines: str, prose: bool = False) -> None:
    """Lines as they are; prose is broken between words, names of files are not broken at all."""
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=not prose)


def say_files(console: Console, folder: Path, **names: str) -> None:
    """Where everything is, by what it is."""
    say(console, *(f"{what}: {folder / name}" for what, name in names.items()))


def report(name: str) -> Any:
    """What shows records of this kind: a module that takes long to import, and may need what is not installed."""
    return importlib.import_module(f"isaac_lab.report.{name}")


@contextlib.contextmanager
def goes_on(console: Console) -> Iterator[None]:
    """Ctrl-C, SIGTERM and the end of the time say that the same command goes on."""
    from isaac_lab.training import StoppedError

    def terminate(number: int, frame: FrameType | None) -> None:
        raise _TerminatedError

    before = signal.signal(signal.SIGTERM, terminate)
    ends: dict[type[BaseException], tuple[str, int]] = {
        KeyboardInterrupt: ("Stopped", INTERRUPTED),
        _TerminatedError: ("Terminated", TERMINATED),
        StoppedError: ("Time is up", STOPPED),
    }
    try:
        yield
    except tuple(ends) as error:
        why, code = ends[type(error)]
        end = "Runs that have ended are kept, others go on from their last checkpoint: give the same command again."
        say(console, f"\n{why}. {end}")
        raise typer.Exit(code) from None
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def named_errors(
    out: str = "--out", *, page: str = "--fill", more: Mapping[type[Exception], str] | None = None
) -> Iterator[None]:
    """Errors that a user can do something about, with the option that each is about.

    `out` names the folder of the records, `page` the pages; `more` has the options of a command's own errors.
    """
    from isaac_lab.data.files import DataError
    from isaac_lab.executors import ExecutorError
    from isaac_lab.records import StoreError
    from isaac_lab.report.docs import DocsError
    from isaac_lab.trial import TrialError
    from isaac_lab.workloads.encoders import EncoderError

    # The first that fits: an encoder that is missing is missing data too.
    options: dict[type[Exception], str] = {
        **(more or {}),
        TrialError: "--set",
        EncoderError: "--model",
        DataError: "--data",
        ExecutorError: "--executor' / '--device' / '--workers",
        StoreError: out,
        DocsError: page,
    }
    try:
        yield
    except tuple(options) as error:
        option = next(option for kind, option in options.items() if isinstance(error, kind))
        raise typer.BadParameter(str(error), param_hint=f"'{option}'") from None
    except OSError as error:
        what = f"cannot read or write {error.filename}: " if error.filename else ""
        raise typer.BadParameter(f"{what}{error.strerror or error}. What has ended is kept", param_hint=f"'{out}'") from None


@dataclass(frozen=True)
class Work:
    """What differs between commands that train."""

    train: "Callable[[Means], object]"  # trains what is due
    show: Callable[[], None]  # prints what the records say, and where they lie
    blocks: Callable[[Path], Blocks] = field(default=lambda pictures: {})  # of pages, given where their pictures go
    errors: Mapping[type[Exception], str] = field(default_factory=dict)  # by error of its own, the option it is about


def perform(
    work: Work,
    means: "Means",
    console: Console,
    out: Path,
    *,
    draw_only: bool = False,
    pages: Sequence[Path] | None = None,
) -> None:
    """Train what is due, with progress; then show what the records say, and put it into these pages."""
    from isaac_lab.progress import display
    from isaac_lab.report import docs

    started = time.perf_counter()
    with named_errors(more=work.errors), goes_on(console):
        for page in pages or ():
            docs.check(page, work.blocks(page.parent / "figures"))
        if not draw_only:
            check_writable(out)
            means.call.check()
            with display(console) as shown:
                work.train(replace(means, call=replace(means.call, progress=shown), display=shown))
        try:
            work.show()
        except ModuleNotFoundError as error:
            say(console, f"Shown later: {error}. Records are kept; give the same command where it is installed.")
            return
        for page in pages or ():
            docs.fill(page, work.blocks(page.parent / "figures"))
    say(console, f"Done in {time.perf_counter() - started:.0f} s.")
