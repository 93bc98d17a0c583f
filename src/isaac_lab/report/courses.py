"""Test accuracy over epochs, a panel for each setting: mean and standard deviation over seeds, and the end of it enlarged."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from isaac_lab.report.canvas import GREY, headline, save, sheet, wrapped
from isaac_lab.report.lines import HUES

__all__ = ["Course", "draw"]

#: With fewer epochs there is no end to enlarge.
FEWEST = 6
#: Inches of a panel.
WIDTH, HEIGHT = 4.4, 2.9
LEGEND = 0.4


@dataclass(frozen=True)
class Course:
    """A method.

    Args:
        label: In the legend.
        hue: A key of `lines.HUES`.
        style: A line style of matplotlib.
        rows: Accuracy after each epoch, a row for each seed; none where it was not trained.
    """

    label: str
    hue: str
    style: str
    rows: Sequence[Sequence[float]]


def draw(panels: Mapping[str, Sequence[Course]], *, title: str, subtitle: str, path: Path) -> None:
    """Write the panels side by side as PNG and SVG: all epochs above, on one scale, and the last third below.

    Args:
        panels: By title; all with the same methods in the same order.
        title: Of the figure.
        subtitle: Below it; any number of lines.
        path: Without suffix.
    """
    epochs = max(len(row) for courses in panels.values() for course in courses for row in course.rows)
    parts = [1, 1 + 2 * epochs // 3] if epochs >= FEWEST else [1]
    subtitle = wrapped(subtitle, WIDTH * len(panels))
    height = 0.6 + 0.2 * len(subtitle.splitlines()) + HEIGHT * len(parts) + LEGEND
    figure = sheet(WIDTH * len(panels), height)
    free = headline(figure, title, subtitle)
    axes = figure.subplots(len(parts), len(panels), squeeze=False)
    for column, (name, courses) in enumerate(panels.items()):
        for first, own in zip(parts, axes[:, column], strict=True):
            for course in courses:
                _course(own, course, first)
            _finish(own, name if first == 1 else f"Epochs {first} to {epochs}")
            if not any(course.rows for course in courses):
                own.set(xticks=[], yticks=[])
                own.text(0.5, 0.5, "not run", color=GREY, ha="center", va="center", transform=own.transAxes)
        axes[-1, column].set_xlabel("Epochs", color=GREY)
    _share_scale([own for own in axes[0] if own.has_data() and len(own.get_yticks())])
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False, handlelength=3.4, fontsize=10.5)
    figure.tight_layout(rect=(0, LEGEND / height, 1, free), w_pad=2.0, h_pad=1.2)
    save(figure, path)


def _course(axes: Axes, course: Course, first: int) -> None:
    """From the first of these epochs on; without runs, a place in the legend."""
    values = np.array([list(row)[first - 1 :] for row in course.rows], dtype=np.float64)
    hue = HUES[course.hue]
    if not values.size:
        axes.plot([], [], color=hue, linestyle=course.style, linewidth=1.7, label=course.label)
        return
    x, mean = np.arange(first, first + values.shape[1]), values.mean(0)
    if len(values) > 1:
        deviation = values.std(0, ddof=1)
        axes.fill_between(x, mean - deviation, mean + deviation, color=hue, alpha=0.15, linewidth=0)
    marker = "o" if len(x) < FEWEST else ""
    axes.plot(x, mean, color=hue, linestyle=course.style, linewidth=1.7, marker=marker, markersize=4, label=course.label)


def _share_scale(row: Sequence[Axes]) -> None:
    """The same vertical range for all, so that panels can be compared."""
    limits = [axes.get_ylim() for axes in row]
    for axes in row:
        axes.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))


def _finish(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 4, 5, 10], integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
    # As many decimals as the range needs.
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=None))
    axes.grid(which="major", alpha=0.3)
    axes.tick_params(colors=GREY, which="both", labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
