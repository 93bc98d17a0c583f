"""Scores of several methods as dots with intervals, one panel for each score: the figure of Table 1."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from isaac_lab.report.canvas import GREY, headline, save, sheet, wrapped
from isaac_lab.report.lines import HUES

__all__ = ["draw"]


def draw(found: Mapping[str, Any], hues: Mapping[str, str], path: Path) -> None:
    """One panel for each score: a dot for the mean, a bar of one standard deviation to either side, small dots for seeds.

    Args:
        found: A summary of Table 1.
        hues: By method, a key of `lines.HUES`.
        path: Of the picture, without its ending.
    """
    width, rows = 13.5, [row for row in found["rows"] if row["method"]]
    counts = sorted({cell["n"] for row in rows for cell in row["cells"] if cell})
    runs = " to ".join(dict.fromkeys(str(count) for count in counts[:1] + counts[-1:]))
    about = "Scores on dev in percent, more is better. Settings chosen for each method from grids of equal size. "
    about += f"Mean ± standard deviation over {runs} seeds; small dots: single seeds." if counts else "Not run yet."
    subtitle = wrapped(about, width)
    height = 2.9 + 0.2 * len(subtitle.splitlines())
    figure = sheet(width, height)
    free = headline(figure, found["title"], subtitle)
    panels = figure.subplots(1, len(found["columns"]), sharey=True)
    for number, (axes, column) in enumerate(zip(panels, found["columns"], strict=True)):
        _panel(axes, column, [row["cells"][number] for row in rows], [hues[row["method"]] for row in rows])
    panels[0].set_yticks(range(len(rows)), [row["label"] for row in rows], fontsize=11)
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    figure.tight_layout(rect=(0, 0, 1, free), w_pad=1.5)
    save(figure, path)


def _panel(axes: Axes, title: str, cells: Sequence[Mapping[str, Any] | None], hues: Sequence[str]) -> None:
    for place, (cell, hue) in enumerate(zip(cells, hues, strict=True)):
        if cell is None or cell["mean"] is None:
            continue
        mean, spread = 100 * cell["mean"], 100 * (cell["std"] or 0.0)
        axes.errorbar(mean, place, xerr=spread, fmt="o", color=HUES[hue], markersize=7, linewidth=2, capsize=4)
        axes.plot([100 * value for value in cell["values"]], [place + 0.24] * cell["n"], ".", color=HUES[hue], alpha=0.5)
    axes.set_title(title, loc="left", fontsize=11.5)
    if not any(cells):
        axes.text(0.5, 0.5, "not run", transform=axes.transAxes, ha="center", color=GREY)
        axes.set_xticks([])
    axes.grid(axis="x", alpha=0.3)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", colors=GREY, labelsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
