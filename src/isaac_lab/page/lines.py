"""Curves of training as Vega-Lite: a line for each method or for each of its seeds, the nearest point named on hover."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from isaac_lab.page.parts import Chart, Choice, Control, Method
from isaac_lab.page.words import number

__all__ = ["ONE_SEED", "ROUND", "RUNS", "Axis", "Line", "Target", "apart", "axes", "chart", "mean", "quantities", "scales"]

#: Points of a line, at most: more cannot be told apart on a screen.
POINTS = 100
HEIGHT = 380
#: Of the ticks of a logarithmic axis: which have a name, and which a line across.
_DIGITS = "round(100 * datum.value / pow(10, floor(log(datum.value) / LN10 + 1e-9))) / 100"
ROUND, WHOLE = f"indexof([1, 1.5, 2, 3, 5], {_DIGITS}) >= 0", f"{_DIGITS} == 1"
ONE_SEED = "one seed"
DOTS = (2, 3)


@dataclass(frozen=True)
class Line:
    """A method's values, of one seed or over seeds.

    Args:
        method: The label of its `Method`.
        run: "seed 0", "mean of 3 seeds".
        columns: By name, numbers of equal length: where it was measured, and what; None where it is not finite.
        over_seeds: Whether it is the mean; then the columns "…_low" and "…_high" hold the range.
    """

    method: str
    run: str
    columns: Mapping[str, Sequence[float | None]]
    over_seeds: bool = False


@dataclass(frozen=True)
class Axis:
    """A column as an axis.

    Args:
        field: Its name in the data.
        title: Of the axis.
        format: How tooltips and ticks write it, in the language of d3.
        domain: What of it is shown; the data's own unless given.
        logarithmic: How it is divided; only of a horizontal axis.
        label: Of the control; the title unless given.
    """

    field: str
    title: str
    format: str = ",.4~r"
    domain: tuple[float, float] | None = None
    logarithmic: bool = False
    label: str = ""


@dataclass(frozen=True)
class Target:
    """A line across, and what it is."""

    value: float
    label: str
    by: str = ""


def mean(method: str, seeds: Sequence[Mapping[str, Sequence[float | None]]], at: str, values: Sequence[str]) -> Line | None:
    """Mean, lowest and highest over seeds, where all of them have finite values; None where that is nowhere.

    Args:
        method: The label.
        seeds: Columns of each seed.
        at: The column that says which points belong together.
        values: Columns with a range over seeds; of all others there is the mean alone.
    """
    tables = [
        {place: row for place, *row in zip(seed[at], *(seed[name] for name in seed), strict=True)} for seed in seeds if seed[at]
    ]
    if not tables or len(tables) < len(seeds):
        return None
    names = list(seeds[0])
    common = [place for place in tables[0] if all(_whole(table.get(place), names, values) for table in tables)]
    if not common:
        return None
    columns: dict[str, list[float | None]] = {}
    for column, name in enumerate(names):
        own = [_finite([table[place][column] for table in tables]) for place in common]
        columns[name] = [fmean(found) if found else None for found in own]
        if name in values:
            columns[f"{name}_low"] = [min(found) if found else None for found in own]
            columns[f"{name}_high"] = [max(found) if found else None for found in own]
    run = f"mean of {len(seeds)} seeds" if len(seeds) > 1 else ONE_SEED
    return Line(method, run, columns, over_seeds=True)


def _whole(row: Sequence[float | None] | None, names: Sequence[str], values: Sequence[str]) -> bool:
    # A quantity that a method does not have, such as an accuracy, is None throughout.
    return row is not None and any(row[names.index(name)] is not None for name in values)


def _finite(found: Sequence[float | None]) -> list[float]:
    """All of them, or none."""
    own = [value for value in found if value is not None]
    return own if len(own) == len(found) else []


def axes(choices: Iterable[Axis]) -> Control:
    """What is on the horizontal axis."""
    return Control(
        "Horizontal",
        tuple(
            Choice(
                axis.label or axis.title,
                {
                    "x": axis.field,
                    "x_title": axis.title,
                    "x_scale": "log" if axis.logarithmic else "linear",
                    # The untrained network is at 0, where a logarithmic axis has no place.
                    "x_rows": f"isValid(datum['{axis.field}'])"
                    + (f" && datum['{axis.field}'] > 0" if axis.logarithmic else ""),
                },
            )
            for axis in choices
        ),
    )


def quantities(choices: Iterable[Axis]) -> Control:
    """What is on the vertical axis."""
    return Control(
        "Quantity",
        tuple(
            Choice(
                axis.title,
                {
                    "y": axis.field,
                    "y_low": f"{axis.field}_low",
                    "y_high": f"{axis.field}_high",
                    "y_title": axis.title,
                    "y_rows": f"isValid(datum['{axis.field}'])",
                    "y_format": axis.format,
                }
                | ({"y_domain": list(axis.domain)} if axis.domain else {}),
            )
            for axis in choices
        ),
    )


def scales(*, logarithmic_first: bool) -> Control:
    """How the vertical axis is divided."""
    log = Choice("Log", {"scale": "log", "y_label": f"{ROUND} ? datum.label : ''", "y_grid": WHOLE})
    linear = Choice("Linear", {"scale": "linear", "zero": False, "y_grid": "true"})
    return Control("Vertical", (log, linear) if logarithmic_first else (linear, log))


#: With several seeds: what stands for a method.
RUNS = Control(
    "Lines",
    (Choice("Mean and range", {"rows": "datum.over_seeds"}), Choice("Every seed", {"rows": "!datum.over_seeds"})),
)


def apart(methods: Sequence[Method]) -> list[Method]:
    """The same methods, but yellow lines are dotted where an orange one has their dashes: some readers see one colour."""
    orange = {method.dash for method in methods if method.hue == "orange"}
    return [replace(m, dash=DOTS) if m.hue == "yellow" and m.dash in orange else m for m in methods]


def chart(
    id: str,
    title: str,
    description: str,
    lines: Sequence[Line],
    methods: Sequence[Method],
    fields: Sequence[Axis],
    *,
    target: Target | None = None,
) -> Chart:
    """The chart; what "$x", "$y", "$scale" and "$rows" are is left to the controls.

    Args:
        id: Of its element.
        title: Above it.
        description: What it shows, in words.
        lines: The data.
        methods: Their colours and dashes.
        fields: All columns, for tooltips.
        target: A line across.
    """
    names = [method.label for method in methods]
    columns = sorted({name for line in lines for name in line.columns})
    colour: dict[str, Any] = {"field": "method", "type": "nominal", "legend": None}
    colour["scale"] = {"domain": names, "range": [f"var(--hue-{method.hue})" for method in methods]}
    dash: dict[str, Any] = {"field": "method", "type": "nominal", "legend": None}
    dash["scale"] = {"domain": names, "range": [list(method.dash) or [1, 0] for method in methods]}
    width: dict[str, Any] = {"field": "method", "type": "ordinal", "legend": None}
    width["scale"] = {"type": "ordinal", "domain": names, "range": [method.width for method in methods]}
    scale = {"type": "$scale", "zero": "$zero", "domain": "$y_domain", "nice": False}
    # Without a format, Vega-Lite 6.4 looks for words in the cell around the nearest point, and not in the point.
    tooltip = [{"field": name, "title": name.capitalize(), "type": "nominal", "format": ""} for name in ("method", "run")]
    tooltip += [{"field": axis.field, "title": axis.title, "type": "quantitative", "format": axis.format} for axis in fields]
    grid = {"condition": {"test": "$y_grid", "value": 1}, "value": 0}
    axis = {"format": "$y_format", "labelExpr": "$y_label", "gridOpacity": grid, "labelOverlap": "greedy"}
    y = {"field": "$y", "type": "quantitative", "title": "$y_title", "scale": scale, "axis": axis}
    # By its fields, because Vega-Lite numbers the rows before they are flattened.
    near = {"type": "point", "on": "pointerover", "clear": "pointerout", "nearest": True, "fields": ["method", "run", "$x"]}
    band: list[dict[str, Any]] = [
        {
            "transform": [{"filter": "datum.over_seeds && isValid(datum.range)"}],
            "mark": {"type": "area", "opacity": 0.14, "clip": True, "tooltip": None},
            "encoding": {
                "y": y | {"field": "$y_low"},
                "y2": {"field": "$y_high"},
                "color": colour,
            },
        },
    ]
    layers: list[dict[str, Any]] = [
        *(band if any(_is_range(line) for line in lines) else ()),
        {
            "mark": {"type": "line", "clip": True, "tooltip": None, "strokeCap": "round"},
            "encoding": {"y": y, "color": colour, "strokeDash": dash, "strokeWidth": width, "detail": {"field": "run"}},
        },
        {
            "params": [{"name": "near", "select": near}],
            "mark": {"type": "circle", "size": 70, "clip": True},
            "encoding": {
                "y": y,
                "color": colour,
                "tooltip": tooltip,
                "opacity": {"condition": {"param": "near", "empty": False, "value": 1}, "value": 0},
            },
        },
    ]
    if target is not None:
        layers += _across(target, scale)
    spec = {
        "width": "container",
        "height": HEIGHT,
        "transform": [
            {"filter": {"field": "method", "oneOf": "$shown"}},
            {"filter": "$rows"},
            {"flatten": columns},
            {"filter": "$x_rows"},
            {"filter": "$y_rows"},
        ],
        "encoding": {
            "x": {
                "field": "$x",
                "type": "quantitative",
                "title": "$x_title",
                "scale": {"type": "$x_scale", "nice": False},
                "axis": {"grid": False, "labelFlush": True, "tickCount": 6},
            }
        },
        "layer": layers,
    }
    return Chart(id, title, description, spec, tuple(_row(line, columns) for line in lines))


def _across(target: Target, scale: Mapping[str, Any]) -> list[dict[str, Any]]:
    # Its own data: the methods that are shown do not matter to it.
    tooltip = {"content": "data"}
    at = {"datum": target.value, "type": "quantitative", "scale": scale}
    data = {"values": [{"Target": number(target.value, 4), "Set by": target.by}]}
    none = {"x": None}
    return [
        {
            "data": data,
            "mark": {"type": "rule", "color": "var(--ink)", "strokeDash": [2, 3], "strokeWidth": 1.2, "tooltip": tooltip},
            "encoding": none | {"y": at},
        },
        {
            "data": data,
            "mark": {
                "type": "text",
                "text": target.label,
                "align": "left",
                "baseline": "bottom",
                "dy": -4,
                "dx": 6,
                "color": "var(--muted)",
                "x": 0,
            },
            "encoding": none | {"y": at},
        },
    ]


def _row(line: Line, names: Sequence[str]) -> dict[str, Any]:
    length = max((len(column) for column in line.columns.values()), default=0)
    chosen = (
        sorted({round(place * (length - 1) / (POINTS - 1)) for place in range(POINTS)}) if length > POINTS else range(length)
    )
    # Vega-Lite fills a column that is too short, and stops at one that is not there.
    columns = {name: [_short(line.columns[name][place]) for place in chosen] if name in line.columns else [] for name in names}
    return {"method": line.method, "run": line.run, "over_seeds": line.over_seeds, "range": _is_range(line) or None} | columns


def _is_range(line: Line) -> bool:
    return line.run != ONE_SEED and any(name.endswith("_low") for name in line.columns)


def _short(value: float | None) -> float | None:
    """What a screen can show, and JSON can say."""
    if value is None or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.5g}")
