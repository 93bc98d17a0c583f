"""The scaling curves as a picture: measured ratios with their quartiles, and the ratio of the multiply-adds."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

__all__ = ["draw"]

#: From the palette of Okabe and Ito, which colour-blind readers can tell apart.
MEASURED, COUNTED, GREY = "#0072B2", "#D55E00", "#555555"
TITLES = {"batch": "By batch size, at width {}", "width": "By width, at batch size {}"}


def draw(record: dict[str, Any], path: Path) -> None:
    """Write `path` with the suffixes .png and .svg."""
    figure = Figure(figsize=(10, 4.4), dpi=150)
    # Agg draws into memory and needs no display; pyplot would look for one.
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2)
    for panel, curve in zip(axes, TITLES, strict=True):
        _panel(panel, curve, [case for case in record["cases"] if case["curve"] == curve])
    axes[0].set_ylabel("Time of a ζ* step / plain step", color=GREY)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=2, frameon=False)
    machine = record["machine"]
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} thread{'' if machine['threads'] == 1 else 's'}"
    figure.suptitle(f"What ζ* costs, three linear layers, {where} ({record['mode']})", x=0.02, ha="left", fontweight="bold")
    figure.tight_layout(rect=(0, 0.07, 1, 1), w_pad=3)
    figure.savefig(path.with_suffix(".png"))
    # The same record gives the same file: no date, and no random names inside.
    with mpl.rc_context({"svg.hashsalt": "isaac-newton"}):
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})


def _panel(axes: Axes, curve: str, cases: list[dict[str, Any]]) -> None:
    by_size = {case[curve]: method for case in cases for method in case["methods"] if method["name"] == "zeta_star"}
    sizes = [size for size, method in by_size.items() if "ratio" in method]
    cases = [case for case in cases if case[curve] in sizes]
    if not cases:
        axes.set_axis_off()
        return
    ratios = [by_size[size]["ratio"] for size in sizes]
    below = [ratio["median"] - ratio["low"] for ratio in ratios]
    above = [ratio["high"] - ratio["median"] for ratio in ratios]
    medians = [ratio["median"] for ratio in ratios]
    axes.errorbar(sizes, medians, yerr=[below, above], color=MEASURED, marker="o", capsize=3, label="measured, with quartiles")
    axes.plot(sizes, [case["theory"] for case in cases], color=COUNTED, linestyle="--", marker="s", label="multiply-adds")
    axes.axhline(1, color=GREY, linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    other = cases[0]["width" if curve == "batch" else "batch"]
    axes.set_title(TITLES[curve].format(other), loc="left", fontsize=12)
    axes.set_xlabel("Batch size" if curve == "batch" else "Width", color=GREY)
    axes.grid(axis="y", alpha=0.3)
    axes.tick_params(colors=GREY, which="both")
    axes.spines[["top", "right"]].set_visible(False)
