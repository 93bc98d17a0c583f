"""How long conditioning takes on a CPU: its share of the time from the end of one backward pass to the end of the next."""

from statistics import median
from time import perf_counter

__all__ = ["Clock"]


_SAMPLES = 5


class Clock:
    """Runs in few passes only, since asking takes time too: look at `running` first. On a GPU the host would not know."""

    def __init__(self) -> None:
        self.running = False
        self._shares: list[float] = []
        self._began = self._spent = 0.0

    @property
    def share(self) -> float | None:
        """The median of the last passes in which it ran; None before the first."""
        return median(self._shares[-_SAMPLES:]) if self._shares else None

    def begin(self) -> None:
        """When a backward pass has ended."""
        self.running, self._began, self._spent = True, perf_counter(), 0.0

    def end(self) -> None:
        """When the next one has."""
        self.running = False
        self._shares.append(min(self._spent / (perf_counter() - self._began), 1.0))

    def now(self) -> float:
        """The time."""
        return perf_counter()

    def add(self, started: float, share: float = 1.0) -> float:
        """So much of the time since then was spent on conditioning; returns what time it is."""
        now = perf_counter()
        self._spent += share * (now - started)
        return now
