"""`isaac-newton data`: which data sets there are, how to get them, whether they are whole."""

import importlib.util
import os
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer
from rich.console import Console
from rich.status import Status

from isaac_lab.commands.training import say
from isaac_lab.data import download, files
from isaac_lab.data.files import GENERATED, GLUE, SETS, DataError, Parcel, contents
from isaac_lab.report.tables import Table, table

HELP = "The data: MNIST, CIFAR-10, GLUE and others; list, fetch, verify."
app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help=HELP)
#: Data sets that consist of files, and groups of them.
Choice: TypeAlias = Literal["mnist", "fashion-mnist", "cifar-10", "cola", "mrpc", "stsb", "diamonds", "glue", "all"]
Folder: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--data", help="Folder with the files, in mnist/, cifar-10/, glue/CoLA/ and so on; before ISAAC_DATA and the cache."
    ),
]


def names(choice: Choice) -> tuple[str, ...]:
    """The sets that are meant."""
    return {"glue": GLUE, "all": tuple(SETS)}.get(choice, (choice,))


@app.command(name="list")
def list_sets(data: Folder = None) -> None:
    """All data sets: their sizes, and where they are or how to get them."""
    looked_at = _places(data)
    inside = "scikit-learn" if importlib.util.find_spec("sklearn") else "pip install 'isaac-newton[lab]'"
    found = [(name, own.examples, own.example, _state(name, looked_at)) for name, own in SETS.items()]
    # The numbers stand here because importing them would import torch.
    found.append(("digits", (1440, 357), "8 × 8", inside))
    found += [(name, own.examples, own.example, "generated, for smoke runs") for name, own in GENERATED.items()]
    rows = [[name, *(f"{count:,}" for count in examples), example, where] for name, examples, example, where in found]
    console = Console()
    console.print(table(("Data set", "Training", "Test", "Example", "Where"), rows, ("Data set", "Where")).terminal())
    say(console, "Looked at, in this order:", *(f"  {place.origin}: {place.folder}" for place in looked_at))


@app.command()
def fetch(
    name: Annotated[Choice, typer.Argument(help="Which set.")] = "all",
    to: Annotated[
        Path | None, typer.Option(help="Folder for mnist/, cifar-10/, glue/ and so on; the cache, unless given.")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="URL",
            help="Address of a folder with the published files, itself or in mnist/, cola/ and so on.",
        ),
    ] = None,
) -> None:
    """Download the files and check them; those that are there and right stay as they are."""
    if source is not None and not source.startswith(("http://", "https://")):
        raise typer.BadParameter(f"must begin with http:// or https://, got {source!r}", param_hint="'--from'")
    folder = files.cache() if to is None else to.expanduser()
    console = Console()
    with console.status("") as status:
        for each in names(name):
            directory = folder / SETS[each].folder
            _check_writable(directory)
            own = () if source is None else (f"{source.rstrip('/')}/{each}", source)
            for parcel in SETS[each].parcels:
                say(console, f"{each}/{parcel.name}: {_fetch(each, parcel, directory, own, status)}")
    say(console, f"Data: {folder}" + ("" if to is None else f"\nUse it with --data {folder} or ISAAC_DATA={folder}"))


def _fetch(name: str, parcel: Parcel, directory: Path, own: tuple[str, ...], status: Status) -> str:
    """Get what one download brings, unless it is there; what was done, in words."""

    def tick(done: int, total: int | None) -> None:
        status.update(f"{name}/{parcel.name}: {done / 1e6:.1f}" + (f" of {total / 1e6:.1f} MB" if total else " MB"))

    why, code = "", 0
    try:
        address = download.fetch(parcel, directory, download.addresses(SETS[name], parcel, own), tick=tick)
    except DataError as error:
        why, code = f"fetch {name}/{parcel.name}: {error}", 1
    except OSError as error:
        why, code = f"write to {directory}: {error.strerror}", 2
    if why:
        status.stop()
        say(Console(stderr=True), f"Error: cannot {why}")
        raise typer.Exit(code)
    return f"fetched from {address}" if address else "already there"


@app.command()
def verify(
    name: Annotated[Choice, typer.Argument(help="Which set; if it is named, it must be there.")] = "all",
    data: Folder = None,
) -> None:
    """Compare the checksum of every file that is found; exit code 1 if one is corrupt or a set incomplete."""
    console = Console()
    # A folder that is named is the one in question, not what else would be looked at.
    looked_at = _places(data)[: 1 if data else None]
    good = True
    for each in names(name):
        found = [(place, directory) for place in looked_at if (directory := files.find(each, place))]
        if not found:
            good = good and name == "all"
            say(console, f"{each}: not found; isaac-newton data fetch {each} downloads it")
        for place, directory in found:
            say(console, f"{each} in {directory} ({place.origin})")
            shown, problems = _verify(each, directory)
            console.print(shown.terminal())
            if problems:
                good = False
                say(console, *problems, files.remedy(each, place))
    if not good:
        raise typer.Exit(1)


def _verify(name: str, directory: Path) -> tuple[Table, list[str]]:
    """A row for each file, and a sentence for each that is not as it should be."""
    rows: list[list[str]] = []
    problems: list[str] = []
    for file in SETS[name].files:
        path, state = files.path(directory, file), "OK"
        if path is None:
            rows.append([file.name, "", "**missing**"])
            problems.append(f"{directory / file.name} is missing, and so is {file.name}.gz")
            continue
        try:
            contents(path, file)
        except DataError as error:
            problems.append(str(error))
            state = "**wrong checksum**" if "checksum" in str(error) else "**corrupt**"
        rows.append([path.name, f"{path.stat().st_size:,}", state])
    return table(("File", "Bytes", "State"), rows, ("File", "State")), problems


def _places(data: Path | None) -> list[files.Place]:
    try:
        return files.places(data)
    except DataError as error:
        raise typer.BadParameter(str(error)) from None


def _state(name: str, looked_at: list[files.Place]) -> str:
    for place in looked_at:
        if directory := files.find(name, place):
            lacking = files.missing(name, directory)
            count = f"{len(lacking)} of {len(SETS[name].files)}"
            return f"incomplete, {count} missing: isaac-newton data fetch {name}" if lacking else place.origin
    return f"isaac-newton data fetch {name}"


def _check_writable(directory: Path) -> None:
    """Learn before the download, and without leaving anything behind, that it cannot be stored."""
    nearest = next(path for path in (directory, *directory.absolute().parents) if os.access(path, os.F_OK))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        message = f"cannot write to {str(directory)!r}; name a directory that you can write to"
        raise typer.BadParameter(message, param_hint="'--to'")
