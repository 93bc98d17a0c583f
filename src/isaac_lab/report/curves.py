"""Learning curves: training loss and test accuracy by epoch, with the spread over seeds."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from isaac_lab.demo import Method, Run, Summary, families, summarize

__all__ = ["draw", "headline"]

#: One hue per optimizer, from the palette of Okabe and Ito, which colour-blind readers can tell apart.
HUES = {"SGD": "#0072B2", "Adam": "#D55E00"}
GREY = "#555555"


def draw(runs: Sequence[Run], *, path: Path) -> None:
    """Write the picture of these runs as PNG: loss on a logarithmic axis, accuracy beside it, solid lines with ISAAC."""
    figure = Figure(figsize=(10, 5.2), dpi=150)
    # Agg draws into memory and needs no display; pyplot would look for one.
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for method in dict.fromkeys(run.method for run in runs):
        own = [run.measurements for run in runs if run.method == method]
        _curve(left, method, np.array([[m.train_loss for m in measurements] for measurements in own]))
        _curve(right, method, np.array([[m.test_accuracy for m in measurements] for measurements in own]))
    left.set_yscale("log")
    right.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    # The climb from chance level would press flat what matters: where the curves end.
    right.set_ylim(min(run.measurements[-1].test_accuracy for run in runs) - 0.1, 1.0)
    _finish(left, "Training loss (logarithmic scale)", epochs=len(runs[0].measurements) - 1)
    _finish(right, "Test accuracy", epochs=len(runs[0].measurements) - 1)
    seeds = len({run.seed for run in runs})
    figure.text(0.02, 0.985, headline(summarize(runs)), fontsize=16, fontweight="bold", va="top")
    figure.text(0.02, 0.915, _subtitle(seeds), fontsize=10.5, color=GREY, va="top")
    figure.legend(*left.get_legend_handles_labels(), loc="lower center", ncols=4, frameon=False, handlelength=3.4, fontsize=11)
    figure.tight_layout(rect=(0, 0.07, 1, 0.88), w_pad=3)
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


def _subtitle(seeds: int) -> str:
    setting = "5-layer ReLU network on 8 × 8 digits, every method tuned"
    return f"{setting}; one seed" if seeds == 1 else f"{setting}; mean of {seeds} seeds, bands from lowest to highest seed"


def _curve(axes: Axes, method: Method, values: NDArray[np.float64]) -> None:
    """One method; `values` has a row per seed and a column per epoch."""
    epochs, hue = np.arange(values.shape[1]), HUES[method.optimizer]
    # The range rather than mean ± standard deviation, whose lower end can fall below 0, where a logarithmic axis has no place.
    axes.fill_between(epochs, values.min(0), values.max(0), color=hue, alpha=0.15, linewidth=0)
    axes.plot(epochs, values.mean(0), color=hue, linestyle="-" if method.conditioned else "--", linewidth=2, label=method.name)


def _finish(axes: Axes, title: str, *, epochs: int) -> None:
    axes.set_title(title, loc="left", fontsize=12)
    axes.set_xlabel("Epoch", color=GREY)
    axes.set_xlim(0, epochs)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10], integer=True))
    axes.grid(axis="y", alpha=0.3)
    axes.tick_params(colors=GREY, which="both")
    axes.spines[["top", "right"]].set_visible(False)
