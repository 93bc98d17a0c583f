"""The paper's grids as heat maps: λ_g to the right with ζ* as the last column, λ_a downwards, the gradient in the corner."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from isaac_lab.report.canvas import GREY, INCH, headline, save, sheet, wrapped

__all__ = ["Heat", "colour_value", "draw", "place"]

#: Between the sectors, in widths of a cell.
GAP = 0.3
#: Inches: a map, what stands around it, and a colour bar.
MAP, LEFT, RIGHT, TOP, BOTTOM, BAR = 3.9, 0.62, 0.18, 0.95, 0.62, 1.0
#: Losses below this and errors below this have the colour of it: a thousandth of a percent is all the same.
SMALLEST_LOSS, SMALLEST_ERROR = 1e-8, 1e-4
#: Decades from the darkest to the brightest colour, at least.
SMALLEST_SPAN = 0.2


@dataclass(frozen=True)
class Heat:
    """One heat map.

    Args:
        name: "a", "b", … as in the paper.
        title: The setting.
        rates: The learning rate of each sector, as a line.
        dampings: λ_a from top to bottom, and λ_g from left to right.
        values: By (λ_a, λ_g); NaN where training diverged, nothing where it was not run. λ_g = ∞ is ζ*, both ∞ the gradient.
        quantity: The colours' meaning: "loss" (logarithmic) or "accuracy" (logarithm of the error). Bright is good.
    """

    name: str
    title: str
    rates: str
    dampings: tuple[float, ...]
    values: Mapping[tuple[float, float], float]
    quantity: Literal["loss", "accuracy"]


def place(heat: Heat, inputs: float, outputs: float) -> tuple[float, float]:
    """The top left corner of a cell, in cells from the top left; `inputs` is λ_a, `outputs` λ_g."""
    return _along(heat, outputs), _along(heat, inputs)


def _along(heat: Heat, damping: float) -> float:
    return len(heat.dampings) + GAP if damping == math.inf else float(heat.dampings.index(damping))


def colour_value(value: float, quantity: str) -> float:
    """What the colour is linear in; larger is better."""
    if quantity == "loss":
        return -math.log10(max(value, SMALLEST_LOSS))
    return -math.log10(max(1 - value, SMALLEST_ERROR))


def draw(rows: Sequence[Sequence[Heat]], *, title: str, subtitle: str, path: Path, shared: bool = True) -> None:
    """Write the maps, row by row, as PNG and SVG.

    Args:
        rows: Each row shows one quantity.
        title: What the figure is.
        subtitle: Data, scale and setting.
        path: The file; its suffix becomes .png and .svg.
        shared: Whether the maps of a row have the same colours, with one bar for all.
    """
    columns = max(len(row) for row in rows)
    slot = LEFT + MAP + RIGHT + (0 if shared else BAR)
    # A single map is narrower than its title.
    width = max(6.6, columns * slot + (BAR if shared else 0))
    subtitle = wrapped(subtitle, width)
    height = 0.55 + 0.2 * len(subtitle.splitlines()) + len(rows) * (TOP + MAP + BOTTOM)
    figure = sheet(width, height)
    headline(figure, title, subtitle)
    for number, row in enumerate(rows):
        bottom = (len(rows) - 1 - number) * (TOP + MAP + BOTTOM) + BOTTOM
        limits = _limits(row)
        for column, heat in enumerate(row):
            axes = _box(figure, column * slot + LEFT, bottom, MAP, MAP)
            norm = Normalize(*(limits if shared else _limits([heat])))
            _map(axes, heat, norm)
            if not shared:
                _bar(figure, _box(figure, column * slot + LEFT + MAP + 0.12, bottom, 0.16, MAP), norm, heat.quantity)
        if shared:
            _bar(figure, _box(figure, len(row) * slot, bottom, 0.16, MAP), Normalize(*limits), row[0].quantity)
    save(figure, path)


def _box(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Axes at a place given in inches."""
    whole_width, whole_height = figure.get_size_inches()
    return figure.add_axes((left / whole_width, bottom / whole_height, width / whole_width, height / whole_height))


def _limits(heats: Sequence[Heat]) -> tuple[float, float]:
    values = [colour_value(v, heat.quantity) for heat in heats for v in heat.values.values() if math.isfinite(v)] or [0.0]
    low, high = min(values), max(values)
    # Differences that nobody would call one should not fill the whole scale.
    room = max(0.0, SMALLEST_SPAN - (high - low)) / 2
    return low - room, high + room


def _colours() -> Colormap:
    return mpl.colormaps["viridis"]


def _map(axes: Axes, heat: Heat, norm: Normalize) -> None:
    cells = len(heat.dampings) + GAP + 1
    decimals = _decimals(heat)
    # The number in a cell has three or four characters and a minus, each about 0.6 of the font's size.
    size = min(9.5, MAP / cells * INCH / (2.0 + 0.9 * decimals))
    for (inputs, outputs), value in heat.values.items():
        x, y = place(heat, inputs, outputs)
        if not math.isfinite(value):
            axes.add_patch(Rectangle((x, y), 1, 1, facecolor="#E4E4E4", edgecolor="#9A9A9A", hatch="//////", linewidth=0))
            continue
        colour = _colours()(norm(colour_value(value, heat.quantity)))
        axes.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="white", linewidth=0.5))
        text = _text(value, heat.quantity, decimals)
        axes.text(x + 0.5, y + 0.53, text, ha="center", va="center", fontsize=size, color=_ink(colour))
    _mark_best(axes, heat)
    _frame(axes, heat, cells)


def _decimals(heat: Heat) -> int:
    """Two where the losses lie close together."""
    low, high = _limits([heat])
    return 2 if heat.quantity == "loss" and high - low < 2 else 1


def _text(value: float, quantity: str, decimals: int) -> str:
    number = 100 * value if quantity == "accuracy" else math.log10(max(value, SMALLEST_LOSS))
    # Adding 0 makes a rounded −0 a 0.
    return f"{round(number, decimals) + 0:.{decimals}f}".replace("-", "−")


def _ink(colour: tuple[float, float, float, float]) -> str:
    red, green, blue = to_rgb(colour)
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.55 else "#222222"


def _mark_best(axes: Axes, heat: Heat) -> None:
    """A frame around the best cell of ζ and that of ζ*."""
    for star in (False, True):
        own = {
            cell: colour_value(value, heat.quantity)
            for cell, value in heat.values.items()
            if math.isfinite(value) and (cell[1] == math.inf) is star and cell[0] != math.inf
        }
        if own:
            x, y = place(heat, *max(own, key=lambda cell: own[cell]))
            axes.add_patch(Rectangle((x + 0.06, y + 0.06), 0.88, 0.88, fill=False, edgecolor="#D55E00", linewidth=1.8))


def _frame(axes: Axes, heat: Heat, cells: float) -> None:
    axes.set_xlim(0, cells)
    axes.set_ylim(cells, 0)
    positions = [_along(heat, damping) + 0.5 for damping in (*heat.dampings, math.inf)]
    labels = [f"{round(math.log10(damping))}".replace("-", "−") for damping in heat.dampings]
    axes.set_xticks(positions, [*labels, "∞"])
    axes.set_yticks(positions, [*labels, "∞"])
    axes.set_xlabel(r"$\log_{10}\,\lambda_g$", color=GREY, labelpad=2)
    axes.set_ylabel(r"$\log_{10}\,\lambda_a$", color=GREY, labelpad=2)
    axes.tick_params(length=0, colors=GREY, labelsize=9)
    axes.spines[:].set_visible(False)
    last = len(heat.dampings) + GAP
    for x, y, sector in ((len(heat.dampings) / 2, -0.12, "ζ"), (last + 0.5, -0.12, "ζ*")):
        axes.text(x, y, sector, ha="center", va="bottom", fontsize=11)
    axes.text(last - 0.12, last + 0.53, "∇", ha="right", va="center", fontsize=11)
    inch = cells / MAP
    axes.text(0, -0.57 * inch, f"({heat.name})", fontsize=12, fontweight="bold", va="bottom")
    axes.text(0.32 * inch, -0.57 * inch, heat.title, fontsize=12, va="bottom")
    axes.text(0, -0.33 * inch, heat.rates, fontsize=9, color=GREY, va="bottom")


def _bar(figure: Figure, axes: Axes, norm: Normalize, quantity: str) -> None:
    bar = figure.colorbar(ScalarMappable(norm, _colours()), cax=axes)
    low, high = norm.vmin or 0.0, norm.vmax or 0.0
    if quantity == "loss":
        exact = [10.0**exponent for exponent in range(math.ceil(-high), math.floor(-low) + 1)]
        fine = [m * 10.0**e for e in range(math.floor(-high), math.ceil(-low) + 1) for m in (1, 1.5, 2, 3, 5, 7)]
        values = exact if len(exact) > 2 else fine
        name, labels = "Training loss", {value: f"{value:g}" for value in values}
    else:
        values = [0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.985, 0.99, 0.995, 0.999]
        name, labels = "Test accuracy", {value: f"{100 * value:g} %" for value in values}
    ticks = {colour_value(value, quantity): label for value, label in labels.items()}
    shown = _apart({tick: label for tick, label in ticks.items() if low <= tick <= high}, 0.05 * (high - low))
    bar.set_ticks(list(shown), labels=list(shown.values()))
    bar.minorticks_off()
    bar.ax.tick_params(colors=GREY, labelsize=9, length=2)
    bar.ax.set_title(name, fontsize=9, color=GREY, loc="left", pad=6)
    bar.outline.set_visible(False)


def _apart(ticks: dict[float, str], distance: float) -> dict[float, str]:
    """Without the labels that would stand on another one."""
    shown: dict[float, str] = {}
    for tick in sorted(ticks, reverse=True):
        if not shown or min(shown) - tick >= distance:
            shown[tick] = ticks[tick]
    return shown
