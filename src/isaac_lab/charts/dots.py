"""Dots with intervals: a row for each model, in it a dot for each method, and where there are any the paper's and a limit.

A row of data has "model", "method", "value", "low" and "high" (None where it was not measured), and may have "paper", "limit"
and "seeds", a list of single values.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from isaac_lab.charts.figure import Chart, Method, colours, filters, layer
from isaac_lab.charts.lines import ROUND

Dot = Mapping[str, Any]

#: Heights: of a method in a chart, between models, and of what stands around them.
METHOD, BETWEEN, AROUND = 14, 8, 34
WIDTH = 400
TOOLTIP = {"method": "Method", "model": "Model", "words": "Ours", "paper_words": "The paper", "limit_words": "Bar"}
#: By the column that they show.
MARKS: Mapping[str, dict[str, Any]] = {
    "paper": {"type": "point", "shape": "diamond", "size": 60, "strokeWidth": 1.6, "filled": False},
    "limit": {"type": "tick", "thickness": 1.5, "size": 14, "color": "var(--ink)"},
    "seeds": {"type": "circle", "size": 14, "opacity": 0.55, "yOffset": 9},
    "value": {"type": "circle", "size": 75, "opacity": 1},
}


def chart(
    id: str,
    title: str,
    alt: str,
    rows: Sequence[Dot],
    methods: Sequence[Method],
    *,
    ratio: bool = False,
    wide: bool = False,
    unit: str = "",
    width: int = WIDTH,
) -> Chart:
    """The chart, dots in the order of their methods.

    Ratios have a logarithmic axis with a line at 1; a wide axis is as good as logarithmic far from 0, on both sides.
    """
    models, names = list(dict.fromkeys(row["model"] for row in rows)), [method.label for method in methods]
    several = len(models) > 1
    scale: dict[str, Any] = {"padding": 14} | ({"type": "log", "nice": False} if ratio else {"zero": False})
    scale |= {"type": "symlog", "constant": 1} if wide else {}
    label = f"{ROUND} ? format(datum.value, '~r') + ' ×' : ''" if ratio else f"format(datum.value, '~r') + '{unit}'"
    axis = {"labelExpr": label, "labelOverlap": "greedy", "grid": not ratio, "tickCount": 6}
    x = {"type": "quantitative", "title": None, "scale": scale, "axis": axis}
    left = {"ticks": False, "domain": False, "labelPadding": 6, "grid": several, "tickBand": "extent", "labelLimit": 200}
    y = {"type": "nominal", "title": None, "axis": left, "field": "method", "sort": names}
    shared: dict[str, Any] = {"y": y, "color": colours(methods)}
    if several:
        offset = {"field": "method", "type": "nominal", "sort": names, "scale": {"domain": names, "paddingInner": 0.2}}
        shared |= {"y": y | {"field": "model", "sort": models}, "yOffset": offset}
    shared["tooltip"] = [{"field": field, "title": words} for field, words in TOOLTIP.items() if any(field in r for r in rows)]
    height = (METHOD * len(names) + BETWEEN) * len(models) if several else 30 * len(names)
    # From the back to the front.
    at_one = layer({"type": "rule", "color": "var(--muted)"}, {"x": x | {"datum": 1}}) | {"data": {"values": [{}]}}
    ends = shared | {"x": x | {"field": "low"}, "x2": {"field": "high"}}
    layers = [*([at_one] if ratio else ()), layer({"type": "rule", "strokeWidth": 2}, ends, "isValid(datum.value)")]
    for field, mark in MARKS.items():
        if any(row.get(field) is not None for row in rows):
            own = {key: value for key, value in shared.items() if key not in mark}
            drawn = layer(mark, own | {"x": x | {"field": field}}, f"isValid(datum.{field})")
            drawn["transform"] = [*([{"flatten": ["seeds"]}] if field == "seeds" else ()), *drawn["transform"]]
            layers.append(drawn)
    seen = filters({"field": "method", "oneOf": "$shown"})
    spec = {"width": "container", "height": height + AROUND, "transform": seen, "layer": layers}
    return Chart(id, title, alt, spec, tuple(rows), (width, height + AROUND + 26))
