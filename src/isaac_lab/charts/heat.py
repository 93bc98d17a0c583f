"""A grid of dampings: λ_g to the right with ζ* as the last column, λ_a downwards, the plain gradient in the corner.

A row of data is a cell: its dampings "a" and "g" (both infinite: the gradient), "loss" and "accuracy" (NaN where training
diverged), and the learning "rate" of its sector.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from isaac_lab.charts.figure import Chart, Control, layer
from isaac_lab.words import damping, number

Cell = Mapping[str, Any]

NAMES = {"zeta": "ζ", "zeta_star": "ζ*", "gradient": "∇"}
HEIGHT, PICTURE = 340, (390, 440)
#: Between the sectors, and above them for their names, in widths of a cell.
GAP, TOP = 0.3, 0.8
#: Losses below this and errors below this have the colour of it: a thousandth of a percent is all the same.
SMALLEST_LOSS, SMALLEST_ERROR = 1e-8, 1e-4
#: Colours of viridis above this share of the scale are too bright for white numbers.
BRIGHT = 0.55
#: Between two names in a legend, as a share of its length.
APART = 0.14
ACCURACIES = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.985, 0.99, 0.995, 0.999)
#: Dampings whose cells have room for two decimals.
FEW = 8
#: Decades from the darkest to the brightest colour, at least: smaller differences should not fill the whole scale.
SMALLEST_SPAN = 0.2
TOOLTIP = {"method": "Method", "λ_a": "λ_a", "λ_g": "λ_g", "loss": "Training loss", "accuracy": "Test accuracy"}
TOOLTIP |= {"rate": "Learning rate", "status": "Status"}
#: By quantity, its title, and how a legend writes what colours are linear in.
QUANTITIES = {
    "loss": ("Training loss", "format(pow(10, -datum.value), '.2~g')"),
    "accuracy": ("Test accuracy", "format(1 - pow(10, -datum.value), '.3~%')"),
}


def group(cell: Cell) -> str:
    """The sector of a cell: a key of `NAMES`."""
    return "gradient" if cell["a"] == math.inf else "zeta_star" if cell["g"] == math.inf else "zeta"


def colour(value: float, quantity: str) -> float:
    """What the colour is linear in; larger is better."""
    return -math.log10(max(value, SMALLEST_LOSS) if quantity == "loss" else max(1 - value, SMALLEST_ERROR))


def control(cells: Sequence[Cell]) -> Control:
    """Loss or accuracy; all maps of a figure have the same colours."""
    choices = {}
    for quantity, (title, label) in QUANTITIES.items():
        found = [colour(cell[quantity], quantity) for cell in _finite(cells, quantity)]
        if quantity == "loss" or found:
            low, high, shown = _legend(found or [0.0], quantity)
            field = f"{quantity}_colour"
            choices[title] = {
                "colour": field,
                "domain": [low, high],
                "text": f"{quantity}_text",
                "legend": title,
                "legend_label": label,
                "legend_values": shown,
                "finite": f"isValid(datum.{field})",
                "diverged": f"!isValid(datum.{field})",
                "bright": f"datum.{field} > {low + BRIGHT * (high - low)}",
                "best": f"datum.{quantity}_best",
            }
    return Control("Colour", choices)


def _finite(cells: Sequence[Cell], quantity: str, name: str = "") -> list[Cell]:
    """Those that did not diverge, of a sector where it is named."""
    return [cell for cell in cells if math.isfinite(cell[quantity]) and group(cell) == (name or group(cell))]


def _legend(values: Sequence[float], quantity: str) -> tuple[float, float, list[float]]:
    """The ends of the colours, and which are named: round losses or accuracies, as far apart as their names are long."""
    room = max(0.0, SMALLEST_SPAN - (max(values) - min(values))) / 2
    low, high = min(values) - room, max(values) + room
    digits = (1, 2, 5) if high - low > 1 else (1, 1.5, 2, 3, 5, 7)
    rounds = [digit * 10.0**decade for decade in range(-9, 4) for digit in digits] if quantity == "loss" else ACCURACIES
    shown: list[float] = []
    for value in sorted(colour(value, quantity) for value in rounds):
        if low <= value <= high and (not shown or value - shown[-1] >= APART * (high - low)):
            shown.append(round(value, 6))
    return low, high, shown


def chart(id: str, title: str, cells: Sequence[Cell]) -> Chart:
    """The map; the control says of what."""
    dampings = sorted({cell["a"] for cell in cells if cell["a"] != math.inf})
    places = {damping: float(place) for place, damping in enumerate(dampings)} | {math.inf: len(dampings) + GAP}
    last, size = places[math.inf], len(dampings) + GAP + 1
    x, y = _axis(places, size, "log₁₀ λ_g", 0.0), _axis(places, size, "log₁₀ λ_a", -TOP)
    y["scale"]["reverse"] = True
    tooltip = [{"field": name, "title": words} for name, words in TOOLTIP.items()]
    position = {"x": x | {"field": "x"}, "x2": {"field": "x2"}, "y": y | {"field": "y"}, "y2": {"field": "y2"}}
    middle = {"x": x | {"field": "xm"}, "y": y | {"field": "ym"}}
    written = {
        "type": "text",
        "fontSize": {"expr": f"min(11, width / {size} / {3.5 if len(dampings) <= FEW else 2.9})"},
        "opacity": {"expr": f"width / {size} < 24 ? 0 : 1"},
        "tooltip": None,
    }
    rect = {"type": "rect", "stroke": "var(--paper)", "strokeWidth": 1}
    frame = {"type": "rect", "fill": None, "stroke": "var(--hue-red)", "strokeWidth": 2.5, "tooltip": None}
    ink = {"condition": {"test": "$bright", "value": "#222"}, "value": "#fff"}
    legend: dict[str, Any] = {"title": "$legend", "labelExpr": "$legend_label", "values": "$legend_values"}
    legend |= {"titleFontWeight": "normal", "orient": "bottom", "direction": "horizontal", "gradientThickness": 8}
    legend |= {"gradientLength": {"expr": "max(100, width - 40)"}}
    scale = {"scheme": "viridis", "domain": "$domain", "nice": False}
    colours = {"color": {"field": "$colour", "type": "quantitative", "scale": scale, "legend": legend}, "tooltip": tooltip}
    sectors = [("ζ", len(dampings) / 2, -0.35), ("ζ*", last + 0.5, -0.35), ("∇", last - 0.28, last + 0.5)]
    names = {"values": [{"xm": across, "ym": down, "name": name} for name, across, down in sectors]}
    layers = [
        layer(rect, position | colours, "$finite"),
        layer(rect | {"fill": "var(--void)"}, position | {"tooltip": tooltip}, "$diverged"),
        layer(frame, position, "$best"),
        layer(written, middle | {"text": {"field": "$text"}, "color": ink}, "$finite"),
        layer(written | {"opacity": 1, "text": "×", "color": "var(--muted)"}, middle, "$diverged"),
        layer({"type": "text", "fontSize": 13, "tooltip": None}, middle | {"text": {"field": "name"}}) | {"data": names},
    ]
    spec = {"width": "container", "height": HEIGHT, "layer": layers}
    return Chart(id, title, _alt(title.split("\n")[0], cells), spec, tuple(_rows(cells, places)), PICTURE)


def _axis(places: Mapping[float, float], size: float, title: str, start: float) -> dict[str, Any]:
    middles = [place + 0.5 for place in places.values()]
    names = ["∞" if value == math.inf else f"{round(math.log10(value))}".replace("-", "−") for value in places]
    axis = {"values": middles, "labelExpr": f"{names}[indexof({middles}, datum.value)]", "grid": False, "ticks": False}
    # Vega leaves out values beyond the number of ticks that it finds right.
    axis |= {"domain": False, "labelAngle": 0, "labelOverlap": False, "tickCount": len(middles)}
    scale = {"domain": [start, size], "nice": False, "zero": False}
    return {"type": "quantitative", "title": title, "scale": scale, "axis": axis}


def _rows(cells: Sequence[Cell], places: Mapping[float, float]) -> list[dict[str, Any]]:
    decimals = 2 if len(places) <= FEW + 1 else 1
    rows = []
    for cell in cells:
        x, y, loss, accuracy = places[cell["g"]], places[cell["a"]], cell["loss"], cell["accuracy"]
        row = {"x": x, "x2": x + 1, "xm": x + 0.5, "y": y, "y2": y + 1, "ym": y + 0.5, "method": NAMES[group(cell)]}
        row |= {"λ_a": damping(cell["a"]), "λ_g": damping(cell["g"]), "loss": number(loss), "accuracy": "–"}
        row |= {"rate": "–" if cell["rate"] is None else f"{cell['rate']:g}"}
        row |= {"status": "diverged", "loss_text": "", "accuracy_text": ""}
        if math.isfinite(loss):
            # Adding 0 makes a rounded −0 a 0; a loss of 0 has a logarithm too.
            logarithm = round(math.log10(max(loss, 1e-300)), decimals) + 0
            row |= {"status": "finished", "loss_text": f"{logarithm:.{decimals}f}".replace("-", "−")}
        if math.isfinite(accuracy):
            row |= {"accuracy": f"{100 * accuracy:.2f} %", "accuracy_text": f"{100 * accuracy:.1f}"}
        for name in QUANTITIES:
            row[f"{name}_colour"] = round(colour(cell[name], name), 4) if math.isfinite(cell[name]) else None
            rivals = _finite(cells, name, group(cell))
            best = max(rivals, key=lambda own: colour(own[name], name), default=None)
            row[f"{name}_best"] = group(cell) != "gradient" and cell is best
        rows.append(row)
    return rows


def _alt(title: str, cells: Sequence[Cell]) -> str:
    parts = []
    for name, words in NAMES.items():
        if own := _finite(cells, "loss", name):
            cell = min(own, key=lambda cell: cell["loss"])
            at = "" if name == "gradient" else f" at λ_a {damping(cell['a'])}, λ_g {damping(cell['g'])}"
            parts.append(f"{words} {number(cell['loss'])}{at}")
    diverged = len(cells) - len(_finite(cells, "loss"))
    return (
        f"Heat map of {len(cells)} cells, {title}. Lowest training loss: {'; '.join(parts) or 'none'}. "
        f"Diverged: {diverged}. The numbers are in the table below."
    )
