"""The paper's Table 2 as bars: what a step of each method costs over the plain one, with the paper's figure as a mark."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from isaac_lab.bench.published import PAPER, paper_ratio
from isaac_lab.bench.steps import BASELINE
from isaac_lab.report.canvas import GREY, headline, save, sheet
from isaac_lab.report.lines import HUES

__all__ = ["METHODS", "draw", "published", "relative"]

Record = dict[str, Any]

#: Name and hue; the plain gradient is 1 by definition.
METHODS = {
    "paper": ("ζ* as printed", HUES["orange"]),
    "zeta_star": ("ζ*", HUES["red"]),
    "zeta": ("ζ", HUES["blue"]),
    "kfac": ("K-FAC", HUES["yellow"]),
}
MODELS = {"autoencoder": "auto-\nencoder"}
WIDTH = 0.2
TICKS = (0.5, 1, 2, 5, 10, 20, 50, 100)
FINE_TICKS = (0.5, 0.8, 1, 1.2, 1.5, 2, 3, 4, 5)


def draw(records: Sequence[Record], *, title: str, path: Path) -> None:
    """One panel for each record with times, and one for each with peak memory."""
    panels = [(record, quantity) for quantity in ("time", "memory") for record in records if _has(record, quantity)]
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    height = 1.2 + 3.1 * lines
    figure = sheet(max(5.0 * columns, 7), height)
    free = headline(figure, title, "1 is the plain gradient step in the same round (median, quartiles). ◆: the paper's figure.")
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for panel, (record, quantity) in zip(axes, panels, strict=False):
        _panel(panel, record, quantity)
    for panel in axes[len(panels) :]:
        panel.set_axis_off()
    handles: list[Any] = [Patch(color=hue, label=name) for name, hue in METHODS.values()]
    handles.append(Line2D([], [], marker="D", color="black", linestyle="none", markersize=5, label="paper"))
    figure.legend(handles=handles, loc="lower center", ncols=5, frameon=False)
    figure.tight_layout(rect=(0, 0.35 / height, 1, free), w_pad=2, h_pad=1.5)
    save(figure, path)


def _has(record: Record, quantity: str) -> bool:
    key = "ratio" if quantity == "time" else "peak_bytes"
    return any(key in method for case in record["cases"] for method in case["methods"])


def _panel(axes: Axes, record: Record, quantity: str) -> None:
    names = [case["name"] for case in record["cases"]]
    for place, case in enumerate(record["cases"]):
        for number, (method, (_, hue)) in enumerate(METHODS.items()):
            x = place + (number - (len(METHODS) - 1) / 2) * WIDTH
            middle, low, high = relative(case, method, quantity)
            if middle is not None:
                axes.bar(x, middle - 1, WIDTH * 0.92, bottom=1, color=hue)
                axes.errorbar(x, middle, yerr=[[middle - low], [high - middle]], color="#333333", linewidth=1)
            printed = published(record, case["name"], method, quantity)
            if printed is not None:
                axes.plot(x, printed, marker="D", color="black", markersize=4, markeredgecolor="white", markeredgewidth=0.6)
    machine = record["machine"]
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} thread{'' if machine['threads'] == 1 else 's'}"
    how = record["mode"].replace("cuda-", "").replace("-", " ") if "gpu" in machine else "CPU"
    what = "Time of a step" if quantity == "time" else "Peak memory"
    axes.set_title(f"{what}, {how}", loc="left", fontsize=11.5)
    axes.set_xlabel(where, color=GREY, fontsize=9)
    axes.axhline(1, color=GREY, linewidth=0.8)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(FixedLocator(FINE_TICKS if axes.get_ylim()[1] < 6 else TICKS))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} ×"))
    axes.set_xticks(range(len(names)), [MODELS.get(name, f"5 × {name}") for name in names])
    axes.grid(axis="y", alpha=0.3)
    axes.tick_params(colors=GREY, which="both", labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def relative(case: Record, name: str, quantity: str) -> tuple[float | None, float, float]:
    """A method's time or peak memory over the plain gradient's: median and quartiles, or three times the same number."""
    method: Record = next((method for method in case["methods"] if method["name"] == name), {})
    if quantity == "time":
        ratio = method.get("ratio")
        return (ratio["median"], ratio["low"], ratio["high"]) if ratio else (None, 0.0, 0.0)
    plain: Record = next((method for method in case["methods"] if method["name"] == BASELINE), {})
    if "peak_bytes" not in method or "peak_bytes" not in plain:
        return None, 0.0, 0.0
    ratio = method["peak_bytes"] / plain["peak_bytes"]
    return ratio, ratio, ratio


def published(record: Record, model: str, method: str, quantity: str) -> float | None:
    """The same in the paper."""
    if quantity == "time":
        return paper_ratio(model, method, record["mode"].split("-")[0])
    own = PAPER["zeta_star" if method == "paper" else method].get(model)
    return own.megabytes / PAPER[BASELINE][model].megabytes if own and model in PAPER[BASELINE] else None
