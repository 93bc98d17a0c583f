"""How training tells where it is: what an executor reports, and bars in a terminal that show it."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as RichProgress

from isaac_lab.config import Config
from isaac_lab.store import Epoch

__all__ = ["Bars", "Progress", "Reporter", "Update", "bars"]


@dataclass(frozen=True)
class Update:
    """Where runs that are trained together stand after an epoch.

    Args:
        name: Of the group, the same in all of its updates.
        title: For people to read.
        epoch: Epochs done.
        epochs: Epochs in all.
        train_loss: The lowest of the group's; NaN if all diverged.
        test_accuracy: The highest of the group's; None where there are no classes.
        steps_per_second: Training steps of the last epoch per second, evaluation left out; None before the first.
        remaining: Seconds to go, evaluation included; None before the first epoch has ended.
        ended: Whether this was the last epoch.
    """

    name: str
    title: str
    epoch: int
    epochs: int
    train_loss: float
    test_accuracy: float | None
    steps_per_second: float | None
    remaining: float | None
    ended: bool


class Progress(Protocol):
    """Whatever wants to know: called in the process that started the executor, after each epoch of each group."""

    def __call__(self, update: Update, /) -> None:
        """Take note."""
        ...


class Reporter:
    """Turns the epochs of runs that are trained together into updates."""

    def __init__(self, configs: Sequence[Config], progress: Progress) -> None:
        self._configs, self._progress = configs, progress
        self._name, self._title = f"{configs[0].key}x{len(configs)}", _title(configs)
        self._before: Epoch | None = None
        self._left = len(configs)

    def __call__(self, epoch: Epoch) -> None:
        """Report."""
        total, before, rate, remaining = self._configs[0].epochs, self._before, None, None
        if before is not None and epoch.seconds > before.seconds:
            rate = (epoch.step - before.step) / (epoch.seconds - before.seconds)
            remaining = (epoch.wall - before.wall) * (total - epoch.number)
        self._before = epoch
        self._left -= len(epoch.diverged)
        points = [point for point in epoch.points if point is not None]
        self._progress(
            Update(
                name=self._name,
                title=self._title,
                epoch=epoch.number,
                epochs=total,
                train_loss=min((p.train_loss for p in points if not math.isnan(p.train_loss)), default=math.nan),
                test_accuracy=max((p.test_accuracy for p in points if p.test_accuracy is not None), default=None),
                steps_per_second=rate,
                remaining=remaining,
                ended=epoch.number == total or self._left == 0,
            )
        )


class Bars:
    """A bar for all runs, and one for each group that is being trained, with loss, accuracy, steps per second and ETA."""

    def __init__(self, display: RichProgress, total: int | None = None) -> None:
        self._display, self._tasks = display, dict[str, TaskID]()
        self._all = display.add_task("all", total=total, text="") if total is not None and total > 1 else None

    def __call__(self, update: Update) -> None:
        """Draw."""
        if update.name not in self._tasks:
            self._tasks[update.name] = self._display.add_task(update.title, total=update.epochs, text="")
        task = self._tasks[update.name]
        self._display.update(task, completed=update.epoch, text=_text(update))
        if update.ended:
            self._display.remove_task(task)
            if self._all is not None:
                self._display.advance(self._all)


@contextmanager
def bars(console: Console | None = None, *, total: int | None = None) -> Iterator[Bars]:
    """Show bars while the block runs. `total`: how many groups there will be."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"))
    with RichProgress(*columns, console=console, transient=True) as display:
        yield Bars(display, total)


def _title(configs: Sequence[Config]) -> str:
    config = configs[0]
    name = f"{config.data} {'-'.join(map(str, config.hidden))}"
    if len(configs) > 1:
        return f"{name}: {len(configs)} networks"
    dampings = "" if config.sector == "gradient" else f" λ_a {config.damping:g} λ_g {config.output_damping:g}"
    return f"{name}: {config.optimizer} {config.learning_rate:g}{dampings}"


def _text(update: Update) -> str:
    parts = ["diverged" if math.isnan(update.train_loss) else f"loss {update.train_loss:.3g}"]
    if update.test_accuracy is not None:
        parts.append(f"accuracy {update.test_accuracy:.1%}")
    if update.steps_per_second is not None:
        parts.append(f"{update.steps_per_second:,.0f} steps/s")
    if update.remaining is not None:
        minutes, seconds = divmod(round(update.remaining), 60)
        parts.append(f"{minutes}:{seconds:02} left")
    return "  ".join(parts)
