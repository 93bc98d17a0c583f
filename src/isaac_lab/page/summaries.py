"""Summaries that other commands leave in a folder for each scale, SCALE/summary.json: found, read and checked."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isaac_lab.page.parts import Source
from isaac_lab.store import StoreError

__all__ = ["Summary", "checked", "find"]

#: The largest first.
SCALES = ("paper", "full", "quick", "smoke")


@dataclass(frozen=True)
class Summary:
    """One file: what it says, and what the page calls it."""

    name: str
    scale: str
    data: dict[str, Any]

    @property
    def source(self) -> Source:
        """Where its numbers come from."""
        return Source.of([self.name], [self.data])


def find(folder: Path, kind: str, name: Callable[[Path], str]) -> list[Summary]:
    """All of a folder, the largest scale first; smoke tests only where there is nothing else.

    Args:
        folder: With a folder for each scale.
        kind: That the files must say they are.
        name: What the page calls a file.
    """
    found = []
    for path in sorted(folder.glob("*/summary.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StoreError(f"cannot read {path}: {error}") from None
        if not isinstance(data, dict) or data.get("kind") != kind:
            raise StoreError(f'{path} is not a summary of kind "{kind}"')
        found.append(Summary(name(path), str(data.get("scale") or path.parent.name), data))
    found.sort(key=lambda summary: SCALES.index(summary.scale) if summary.scale in SCALES else len(SCALES))
    return [summary for summary in found if summary.scale != "smoke"] or found


@contextmanager
def checked(summary: Summary) -> Iterator[None]:
    """What is missing in a summary is named, with the file."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise StoreError(f"{summary.name} is not a summary that this version reads: {type(error).__name__} {error}") from None
