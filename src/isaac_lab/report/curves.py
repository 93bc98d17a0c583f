"""Learning curves: training loss and test accuracy by epoch, with the spread over seeds."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from isaac_lab.demo import Run, Summary, families, summarize
from isaac_lab.methods import Method

__all__ = ["draw", "headline"]

#: One hue per optimizer, from the palette of Okabe and Ito, which colour-blind readers can tell apart.
HUES = {"SGD": "#0072B2", "Adam": "#D55E00"}
GREY = "#555555"


def draw(runs: Sequence[Run], *, path: Path) -> None:
    """Write the picture of these runs as PNG: loss on a logarithmic axis, accuracy beside it, solid lines with ISAAC."""
    figure = Figure(figsize=(10, 5), dpi=150, layout="constrained")
    # Agg draws into memory and needs no display; pyplot would look for one.
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for method in dict.fromkeys(run.method for run in runs):
        own = [run.measurements for run in runs if run.method == method]
        _curve(left, method, np.array([[m.train_loss for m in measurements] for measurements in own]))
        _curve(right, method, np.array([[m.test_accuracy for m in measurements] for measurements in own]))
    left.set_yscale("log")
    right.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    right.set_ylim(bottom=_where_curves_part(runs))
    _finish(left, "Training loss (logarithmic scale)")
    _finish(right, "Test accuracy")
    figure.suptitle(headline(summarize(runs)), fontsize=15, fontweight="bold", x=0.012, ha="left")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, handlelength=3.2, fontsize=11)
    figure.savefig(path, format="png")


def headline(summaries: Sequence[Summary]) -> str:
    """What the picture shows, in one line, whichever way it went."""
    lowered: dict[bool, list[str]] = {True: [], False: []}
    for plain, isaac in families(summaries):
        lowered[isaac.train_loss < plain.train_loss].append(plain.method.name)
    if not lowered[True]:
        return f"ISAAC does not lower the training loss of {' or '.join(lowered[False])}"
    exceptions = f", not of {' or '.join(lowered[False])}" if lowered[False] else ""
    return f"ISAAC lowers the training loss of {' and '.join(lowered[True])}{exceptions}"


def _curve(axes: Axes, method: Method, values: NDArray[np.float64]) -> None:
    """One method; `values` has a row per seed and a column per epoch."""
    epochs, hue = np.arange(values.shape[1]), HUES[method.optimizer]
    # The range rather than mean ± standard deviation, whose lower end can fall below 0, where a logarithmic axis has no place.
    axes.fill_between(epochs, values.min(0), values.max(0), color=hue, alpha=0.15, linewidth=0)
    axes.plot(epochs, values.mean(0), color=hue, linestyle="-" if method.conditioned else "--", linewidth=2, label=method.name)


def _finish(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, color=GREY)
    axes.set_xlabel("Epoch", color=GREY)
    axes.set_xlim(left=0)
    axes.margins(x=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", alpha=0.3)
    axes.tick_params(colors=GREY, which="both")
    axes.spines[["top", "right"]].set_visible(False)


def _where_curves_part(runs: Sequence[Run]) -> float:
    """Where the axis of accuracies begins: above the climb from chance level, which would press the rest flat."""
    settled = len(runs[0].measurements) // 4
    return min(m.test_accuracy for run in runs for m in run.measurements if m.epoch >= settled)
