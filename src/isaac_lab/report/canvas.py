"""A sheet to draw on that needs no display, and how it becomes a file: PNG and SVG, the same bytes for the same numbers."""

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from isaac_lab.records import write_whole

__all__ = ["GREY", "INCH", "headline", "save", "sheet", "wrapped"]

GREY = "#555555"
#: Points.
INCH = 72
#: Of subtitles, in points; a character is about half as wide.
SUBTITLE = 10


def sheet(width: float, height: float) -> Figure:
    """An empty figure of so many inches."""
    figure = Figure(figsize=(width, height), dpi=150)
    # Agg draws into memory and needs no display; pyplot would look for one.
    FigureCanvasAgg(figure)
    return figure


def wrapped(subtitle: str, width: float) -> str:
    """The lines of a subtitle, none of them longer than so many inches."""
    characters = int((width - 0.2) * INCH / (0.56 * SUBTITLE))
    return "\n".join(line for part in subtitle.splitlines() for line in textwrap.wrap(part, characters))


def headline(figure: Figure, title: str, subtitle: str) -> float:
    """Write both at the top left; returns how much of the height below them is free."""
    height = figure.get_figheight()
    figure.text(0.012, 1 - 0.10 / height, title, fontsize=15, fontweight="bold", va="top")
    figure.text(0.012, 1 - 0.42 / height, subtitle, fontsize=SUBTITLE, color=GREY, va="top", linespacing=1.35)
    return 1 - (0.55 + 0.2 * len(subtitle.splitlines())) / height


def save(figure: Figure, path: Path, suffixes: Sequence[str] = ("png", "svg")) -> None:
    """Write `path` with these suffixes, each file whole or not at all."""
    for suffix in suffixes:
        file = io.BytesIO()
        # No date, and no random names inside.
        with mpl.rc_context({"svg.hashsalt": "isaac-newton"}):
            figure.savefig(file, format=suffix, metadata={"Date": None} if suffix == "svg" else None)
        write_whole(path.with_suffix(f".{suffix}"), file.getvalue())
