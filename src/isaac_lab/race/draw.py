"""The picture of a race: the loss over steps and over seconds, ours in strong colours, rivals in paler ones, broken."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from isaac_lab.race.tables import ordered
from isaac_lab.report.canvas import GREY, headline, save, sheet, wrapped
from isaac_lab.report.lines import HUES

__all__ = ["draw"]

Record = Mapping[str, Any]

#: Of ours, and paler of the optimizer alone.
BASES = {"sgd": "orange", "momentum": "pink", "adamw": "blue", "muon": "red"}
#: Of the running forms, beside those of one batch.
RUNNING = {"adamw": "green", "muon": "black"}
#: Line styles of the other rivals, which are grey.
STYLES = {
    "soap": (0, (5, 1.5)),
    "shampoo": (0, (1.2, 1.2)),
    "singd": (0, (5, 1.5, 1.2, 1.5)),
    "kfac": (0, (5, 1.5, 1.2, 1.5, 1.2, 1.5)),
    "formula": (0, (2.5, 1.5)),
}
#: Levels of grey: as far apart as five can be and still be seen.
LEVELS = {"soap": 0.15, "shampoo": 0.35, "singd": 0.5, "kfac": 0.62, "formula": 0.45}
#: How much of a hue is left in a rival's.
PALE = 0.55
#: Times the loss of the untrained network: nothing above is drawn.
CEILING = 1.15
WIDTH, HEIGHT, LEGEND = 11.6, 4.6, 2.9


def draw(summary: Record, path: Path, suffixes: Sequence[str] = ("png", "svg")) -> None:
    """Write `path` with these suffixes."""
    subtitle = wrapped(_subtitle(summary), WIDTH)
    height = HEIGHT + 0.2 * len(subtitle.splitlines())
    figure = sheet(WIDTH, height)
    free = headline(figure, summary["title"], subtitle)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, key in zip(panels, ("steps", "seconds"), strict=True):
        _panel(axes, summary, key)
    panels[0].set_ylabel(summary["quantity_title"], color=GREY)
    handles, labels = panels[0].get_legend_handles_labels()
    if labels:
        place = (0.998, 0.48 * free + 0.02)
        style: dict[str, Any] = {"frameon": False, "fontsize": 9, "handlelength": 3.2}
        figure.legend(handles, labels, loc="center right", bbox_to_anchor=place, **style)
    figure.tight_layout(rect=(0, 0, 1 - LEGEND / WIDTH, free), w_pad=1.5)
    save(figure, path, suffixes)


def _subtitle(summary: Record) -> str:
    ran = [method for method in summary["methods"] if method["n"]]
    smoke = "A smoke test: it shows that the code runs, and nothing of the methods. " if summary["scale"] == "smoke" else ""
    left = [method["label"] for method in summary["methods"] if not method["n"]]
    missing = f" Not run: {', '.join(left)}." if left else ""
    how = "each in one CUDA graph where it can be" if summary["mode"] == "captured" else "eager"
    return (
        f"{smoke}Mean of {summary['seeds']} seeds; bands of ours from the lowest to the highest. {len(ran)} methods, "
        f"{summary['trials_per_method']} tuning trials each. Seconds of training steps, {how}. In the legend: who reaches the "
        f"target first comes first.{missing}"
    )


def _panel(axes: Axes, summary: Record, key: str) -> None:
    start = max((curve["loss"][0] or 0.0 for method in summary["methods"] for curve in method["curves"]), default=1.0)
    lowest = math.inf
    for method in ordered(summary):
        x, columns = _columns(method, key, CEILING * start)
        if not x:
            continue
        means = [math.fsum(column) / len(column) for column in columns]
        lowest = min(lowest, *means)
        axes.plot(x, means, label=method["label"], zorder=3 if method["ours"] else 2, **_look(method))
        if method["ours"] and len(columns[0]) > 1:
            low, high = [min(column) for column in columns], [max(column) for column in columns]
            axes.fill_between(x, low, high, color=_look(method)["color"], alpha=0.12, linewidth=0)
    axes.set_yscale("log")
    if math.isfinite(lowest):
        room = max(1.01, (start / lowest) ** 0.06)
        axes.set_ylim(lowest / room, start * room)
        if start / lowest < 30:
            axes.yaxis.set_minor_locator(LogLocator(subs=(1.5, 2, 2.5, 3, 4, 6) if start / lowest < 5 else (2, 3, 4, 6)))
            axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        else:
            axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if key == "seconds":
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        axes.set_xlim(0, summary["steps"])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    if summary["target"] is not None:
        axes.axhline(summary["target"], color="black", linewidth=0.9, linestyle=(0, (1, 2)), zorder=1)
        axes.annotate(
            f"target {summary['target']:.3g}: tuned AdamW" if key == "steps" else f"target {summary['target']:.3g}",
            (0.015, summary["target"]),
            xycoords=axes.get_yaxis_transform(),
            xytext=(0, -11),
            textcoords="offset points",
            fontsize=8.5,
            color="black",
        )
    axes.set_xlabel("Training steps" if key == "steps" else "Seconds of training", color=GREY)
    axes.grid(which="major", alpha=0.3)
    axes.tick_params(colors=GREY, which="both", labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _columns(method: Record, key: str, ceiling: float) -> tuple[list[float], list[list[float]]]:
    """Where all seeds have a loss worth drawing: the place, and the losses there; seconds begin after the first step."""
    curves = method["curves"]
    x: list[float] = []
    columns: list[list[float]] = []
    for number in range(min((len(curve["steps"]) for curve in curves), default=0)):
        place = curves[0][key][number]
        losses = [curve["loss"][number] for curve in curves]
        if place is None or (key == "seconds" and place == 0) or any(loss is None or loss > ceiling for loss in losses):
            continue
        x.append(place)
        columns.append(losses)
    return x, columns


def _look(method: Record) -> dict[str, Any]:
    name = method["name"].removeprefix("isaac-")
    base = name.removesuffix("-running")
    if method["ours"]:
        hue = RUNNING[base] if name.endswith("-running") else BASES[base]
        return {"color": HUES[hue], "linewidth": 2.1, "linestyle": "solid"}
    if name in BASES:
        pale = tuple(1 - PALE * (1 - part) for part in to_rgb(HUES[BASES[name]]))
        return {"color": pale, "linewidth": 1.5, "linestyle": (0, (6, 1.2))}
    return {"color": str(LEVELS.get(name, 0.5)), "linewidth": 1.2, "linestyle": STYLES.get(name, "dotted")}
