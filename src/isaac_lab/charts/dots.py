"""Dots with intervals: a row for each model, in it a dot for each method, and where there are any the paper's and a limit.

A row of data has "model", "method", "value", "low" and "high" (None where it was not measured), and may have "paper", "limit"
and "seeds", a list of single values.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from isaac_lab.charts.figure import Chart, Method, colours
from isaac_lab.charts.lines import ROUND

Dot = Mapping[str, Any]

#: Heights: of a method in a chart, between models, and of what stands around them.
METHOD, BETWEEN, AROUND = 14, 8, 34
WIDTH = 400
TOOLTIP = {"method": "Method", "model": "Model", "words": "Ours", "paper_words": "The paper", "limit_words": "Bar"}


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
    """The chart.

    Args:
        id: Of its element.
        title: Above it.
        alt: What it shows, in words.
        rows: The data.
        methods: Their colours, in the order of the dots.
        ratio: Whether the values are ratios: a logarithmic axis with a line at 1.
        wide: Whether the axis is as good as logarithmic far from 0, on both sides.
        unit: After each number on the axis.
        width: In a picture, in pixels.
    """
    models = list(dict.fromkeys(row["model"] for row in rows))
    names = [method.label for method in methods]
    several = len(models) > 1
    scale: dict[str, Any] = {"type": "log", "nice": False, "padding": 14} if ratio else {"zero": False, "padding": 14}
    scale |= {"type": "symlog", "constant": 1} if wide else {}
    label = f"{ROUND} ? format(datum.value, '~r') + ' ×' : ''" if ratio else f"format(datum.value, '~r') + '{unit}'"
    x = {"type": "quantitative", "title": None, "scale": scale}
    x["axis"] = {"labelExpr": label, "labelOverlap": "greedy", "grid": not ratio, "tickCount": 6}
    place: dict[str, Any] = {"type": "nominal", "title": None}
    place["axis"] = {"ticks": False, "domain": False, "labelPadding": 6, "grid": several, "tickBand": "extent"}
    place["axis"]["labelLimit"] = 200
    if several:
        offset = {"field": "method", "type": "nominal", "sort": names, "scale": {"domain": names, "paddingInner": 0.2}}
        shared: dict[str, Any] = {"y": place | {"field": "model", "sort": models}, "yOffset": offset}
    else:
        shared = {"y": place | {"field": "method", "sort": names}}
    shared["color"] = colours(methods)
    shared["tooltip"] = [{"field": field, "title": words} for field, words in TOOLTIP.items() if any(field in r for r in rows)]
    height = (METHOD * len(names) + BETWEEN) * len(models) if several else 30 * len(names)
    spec = {
        "width": "container",
        "height": height + AROUND,
        "transform": [{"filter": {"field": "method", "oneOf": "$shown"}}],
        "layer": _layers(rows, x, shared, ratio),
    }
    return Chart(id, title, alt, spec, tuple(rows), (width, height + AROUND + 26))


def _layers(rows: Sequence[Dot], x: dict[str, Any], shared: dict[str, Any], ratio: bool) -> list[dict[str, Any]]:
    """From the back to the front: the line at 1, intervals, the paper's, limits, single seeds, dots."""
    at_one = {"data": {"values": [{}]}, "mark": {"type": "rule", "color": "var(--muted)"}, "encoding": {"x": x | {"datum": 1}}}
    interval = {
        "transform": [{"filter": "isValid(datum.value)"}],
        "mark": {"type": "rule", "strokeWidth": 2},
        "encoding": shared | {"x": x | {"field": "low"}, "x2": {"field": "high"}},
    }
    layers = [*([at_one] if ratio else ()), interval]
    marks: dict[str, dict[str, Any]] = {
        "paper": {"type": "point", "shape": "diamond", "size": 60, "strokeWidth": 1.6, "filled": False},
        "limit": {"type": "tick", "thickness": 1.5, "size": 14, "color": "var(--ink)"},
        "seeds": {"type": "circle", "size": 14, "opacity": 0.55, "yOffset": 9},
        "value": {"type": "circle", "size": 75, "opacity": 1},
    }
    for field, mark in marks.items():
        if all(row.get(field) is None for row in rows):
            continue
        own = {key: value for key, value in shared.items() if (key, field) != ("color", "limit")}
        transform: list[dict[str, Any]] = [{"flatten": ["seeds"]}] if field == "seeds" else []
        transform.append({"filter": f"isValid(datum.{field})"})
        layers.append({"transform": transform, "mark": mark, "encoding": own | {"x": x | {"field": field}}})
    return layers
