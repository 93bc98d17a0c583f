"""Curves of training: a line for each method, a band from the lowest to the highest seed, a cross where a run diverged."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from isaac_lab.report.canvas import GREY, headline, save, sheet, wrapped

__all__ = ["HUES", "Curve", "Plot", "draw"]

#: The palette of Okabe and Ito, which colour-blind readers can tell apart.
HUES = {
    "black": "#000000",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "green": "#009E73",
    "yellow": "#C9B900",
    "blue": "#0072B2",
    "red": "#D55E00",
    "pink": "#CC79A7",
    "grey": "#888888",
}


@dataclass(frozen=True)
class Curve:
    """One method.

    Args:
        label: In the legend.
        hue: A key of `HUES`.
        style: A line style of matplotlib.
        x: Where it was measured.
        values: What was measured there, one row for each seed; a row is shorter where its run diverged.
        diverged: Whether any seed did.
        width: Of the line; curves that lie on each other are all seen if each is thinner than the one before.
    """

    label: str
    hue: str
    style: str
    x: tuple[float, ...]
    values: tuple[tuple[float, ...], ...]
    diverged: bool = False
    width: float = 1.9


@dataclass(frozen=True)
class Plot:
    """One pair of axes.

    Args:
        title: What is on the vertical axis.
        x_label: What is on the horizontal axis.
        curves: In the order of the legend.
        accuracy: The values are shares of 1, on a linear axis; otherwise losses, on a logarithmic one.
        seconds: The horizontal axis is time, and logarithmic.
    """

    title: str
    x_label: str
    curves: tuple[Curve, ...]
    accuracy: bool = False
    seconds: bool = False


def draw(rows: Sequence[Sequence[Plot]], *, title: str, subtitle: str, path: Path) -> None:
    """Write the plots, row by row, as PNG and SVG, with one legend for all of them."""
    subtitle = wrapped(subtitle, 5.6 * len(rows[0]))
    labels = [curve.label for curve in rows[0][0].curves]
    columns = min(4, len(labels))
    legend_height = 0.25 * math.ceil(len(labels) / columns) + 0.15
    height = 0.6 + 0.2 * len(subtitle.splitlines()) + 3.7 * len(rows) + legend_height
    figure = sheet(5.6 * len(rows[0]), height)
    free = headline(figure, title, subtitle)
    axes = figure.subplots(len(rows), len(rows[0]), squeeze=False)
    for row, own in zip(rows, axes, strict=True):
        for plot, panel in zip(row, own, strict=True):
            _plot(panel, plot)
    handles, names = axes[0][0].get_legend_handles_labels()
    if any(curve.diverged for row in rows for plot in row for curve in plot.curves):
        handles.append(Line2D([], [], color=GREY, marker="X", linestyle="none", markersize=8))
        names.append("diverged")
    figure.legend(handles, names, loc="lower center", ncols=columns, frameon=False, handlelength=3.4, fontsize=10.5)
    figure.tight_layout(rect=(0, legend_height / height, 1, free), w_pad=2.5, h_pad=1.5)
    save(figure, path)


def _plot(axes: Axes, plot: Plot) -> None:
    measured = not plot.seconds or any(math.isfinite(x) for curve in plot.curves for x in curve.x)
    for curve in plot.curves:
        _curve(axes, curve if measured else replace(curve, x=(), values=()))
    axes.set_title(plot.title, loc="left", fontsize=12)
    axes.set_xlabel(plot.x_label, color=GREY)
    if plot.accuracy:
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=1))
        _from_where_they_end(axes, plot)
    else:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(FuncFormatter(_if_few(axes.get_ylim)))
    if not measured:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=GREY)
    elif plot.seconds:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.xaxis.set_minor_formatter(FuncFormatter(_if_few(axes.get_xlim)))
    else:
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 4, 5, 10], integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.grid(which="major", alpha=0.3)
    axes.tick_params(colors=GREY, which="both", labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _curve(axes: Axes, curve: Curve) -> None:
    hue = HUES[curve.hue]
    values = _table(curve)
    # A curve that diverged at once still has its place in the legend.
    x = np.array(curve.x[: values.shape[1]])
    if len(values) > 1 and len(x):
        axes.fill_between(x, _rowwise(values, np.min), _rowwise(values, np.max), color=hue, alpha=0.13, linewidth=0)
    mean = _rowwise(values, np.mean)
    axes.plot(x, mean, color=hue, linestyle=curve.style, linewidth=curve.width, label=curve.label)
    finite = np.flatnonzero(np.isfinite(mean))
    if curve.diverged and len(finite):
        axes.plot(x[finite[-1]], mean[finite[-1]], color=hue, marker="X", markersize=9, markeredgecolor="white")


def _table(curve: Curve) -> NDArray[np.float64]:
    """A row for each seed; NaN after a run has ended."""
    length = max((len(row) for row in curve.values), default=0)
    padded = [[*row, *[math.nan] * (length - len(row))] for row in curve.values]
    return np.array(padded, dtype=np.float64).reshape(len(padded), length)


def _rowwise(values: NDArray[np.float64], function: Callable[..., NDArray[np.float64]]) -> NDArray[np.float64]:
    """Over seeds, where all of them are finite."""
    if not values.size:
        return np.empty(0)
    result = function(values, axis=0)
    return np.where(np.isfinite(values).all(axis=0), result, math.nan)


def _from_where_they_end(axes: Axes, plot: Plot) -> None:
    """The climb from chance level would press flat what matters: where the curves end."""
    ends = [row[-1] for curve in plot.curves for row in curve.values if row and math.isfinite(row[-1])]
    if ends:
        low, high = min(ends), max(ends)
        room = max(high - low, 0.002)
        axes.set_ylim(max(0.0, low - 2 * room), min(1.0, high + 0.5 * room))


def _if_few(limits: Callable[[], tuple[float, float]]) -> Callable[[float, int], str]:
    """Labels between the powers of ten, where few of these are in sight."""

    def label(value: float, _: int) -> str:
        low, high = limits()
        if math.log10(high / low) > 1.6:
            return ""
        digit = round(value / 10 ** math.floor(math.log10(value)))
        return f"{value:g}" if digit in (2, 3, 5, 7) else ""

    return label
