"""How training tells where it is: what an executor reports, and one display, bars on a terminal and lines elsewhere."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as RichProgress

from isaac_lab.record import Record
from isaac_lab.trial import Trial


@dataclass(frozen=True)
class Update:
    """Where runs that are trained together stand."""

    trials: tuple[Trial, ...]  # the runs
    step: int = 0  # training steps done
    found: str = ""  # what was measured last: the lowest training loss of them, the highest accuracy
    per_second: float | None = None  # steps in a second, evaluation left out; None before the first
    ended: tuple[Record, ...] = ()  # their records, where training has ended

    @property
    def title(self) -> str:
        """For people."""
        first, count = self.trials[0], len(self.trials)
        return first.title if count == 1 else f"{first.workload} {first.method}: {count} networks at once"

    @property
    def end(self) -> str:
        """The last measurement of a run; of several that were trained together, how many diverged."""
        if len(self.ended) > 1:
            return f"{sum(not record.finished for record in self.ended)} of {len(self.ended)} diverged"
        (record,) = self.ended
        if not record.finished:
            return record.status
        last = {name: value for name, value in record.points[-1].items() if name != "step"} if record.points else {}
        known = {name: value for name, value in last.items() if isinstance(value, int | float)}
        return ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in known.items())


#: Takes note of an update.
Progress = Callable[[Update], object]


def nobody(update: Update) -> None:
    """Takes no note."""


def measured(found: Sequence[dict[str, float] | None]) -> str:
    """What was measured, in a few words."""
    there = [own for own in found if own is not None]
    losses = [own["train_loss"] for own in there if math.isfinite(own["train_loss"])]
    scores = [own["test_accuracy"] for own in there if "test_accuracy" in own]
    text = f"loss {min(losses):.3g}" if losses else "diverged"
    return text + (f", accuracy {max(scores):.1%}" if scores else "")


class Display:
    """Draws updates."""

    def __init__(self, console: Console, bars: RichProgress | None) -> None:
        self._console, self._bars = console, bars
        self._tasks: dict[tuple[Trial, ...], TaskID] = {}
        self._all: TaskID | None = None
        self._done, self._total, self._began = 0, 0, time.monotonic()

    def say(self, what: str) -> None:
        """A line."""
        self._console.print(what, markup=False, highlight=False)

    def begin(self, what: str, total: int) -> None:
        """So many runs follow."""
        self._done, self._total, self._began = 0, total, time.monotonic()
        self.say(f"{what}: {total} run{'' if total == 1 else 's'} to go")
        if self._bars is not None:
            if self._all is not None:
                self._bars.remove_task(self._all)
            self._all = self._bars.add_task("all", total=total, text="")

    def __call__(self, update: Update) -> None:
        """Draw."""
        self._done += len(update.ended)
        if self._bars is not None:
            self._draw(update, self._bars)
        if update.ended:
            self.say(f"  {self._done} of {self._total}: {update.title}: {update.end}{self._left()}")

    def _draw(self, update: Update, bars: RichProgress) -> None:
        if update.trials not in self._tasks:
            self._tasks[update.trials] = bars.add_task(update.title, total=update.trials[0].steps, text="")
        rate = f"  {update.per_second:,.0f} steps/s" if update.per_second else ""
        bars.update(self._tasks[update.trials], completed=update.step, text=update.found + rate)
        if update.ended:
            bars.remove_task(self._tasks.pop(update.trials))
            if self._all is not None:
                bars.update(self._all, completed=self._done, text=self._left())

    def _left(self) -> str:
        if not self._done or self._done >= self._total:
            return ""
        minutes, seconds = divmod(round((time.monotonic() - self._began) / self._done * (self._total - self._done)), 60)
        return f"; about {minutes}:{seconds:02} left"


@contextmanager
def display(console: Console) -> Iterator[Display]:
    """Show progress while the block runs."""
    if not console.is_terminal or console.is_dumb_terminal:
        yield Display(console, None)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"))
    with RichProgress(*columns, console=console, transient=True) as bars:
        yield Display(console, bars)
