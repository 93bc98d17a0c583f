"""What races, Table 1 and Figure 6 say of themselves, for the page: from their records, checked."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isaac_lab.records import StoreError
from isaac_lab.report.parts import Source

#: The largest first.
SCALES = ("paper", "standard", "full", "quick", "smoke")


@dataclass(frozen=True)
class Summary:
    """What one folder of records says, and what the page calls it."""

    name: str
    scale: str
    data: dict[str, Any]

    @property
    def warning(self) -> str:
        """What stands above a smoke test."""
        said = "**Smoke test: it shows that the code runs, and nothing of the methods.** "
        return said if self.scale == "smoke" else ""

    @property
    def source(self) -> Source:
        """Where its numbers come from."""
        return Source.of([self.name], [self.data])


def find(folder: Path, name: str, summary: Callable[[Path, str], dict[str, Any]]) -> list[Summary]:
    """All scales of a folder, the largest first; smoke tests only where there is nothing else.

    Args:
        folder: With a folder for each scale.
        name: What the page calls it.
        summary: What its records say, given the folder of a scale and the scale; empty for nothing.
    """
    there = [scale for scale in SCALES if (folder / scale / "trials.jsonl").is_file()]
    chosen = [scale for scale in there if scale != "smoke"] or there
    every = [Summary(f"{name}/{scale}", scale, summary(folder / scale, scale)) for scale in chosen]
    return [found for found in every if found.data]


@contextmanager
def checked(summary: Summary) -> Iterator[None]:
    """What is missing in a summary is named, with the folder."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise StoreError(f"{summary.name} has no records that this version reads: {type(error).__name__} {error}") from None
