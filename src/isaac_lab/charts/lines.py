"""Curves of training: a line for each method or for each of its seeds, the nearest point named where there is a pointer."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from isaac_lab.charts.figure import Chart, Choice, Control, Method, by_method, colours

#: Points of a line, at most: more cannot be told apart on a screen.
POINTS = 100
#: A line of so few has its points marked.
FEW = 12
#: Pixels: on the page, and in a picture.
HEIGHT, PICTURE = 380, (440, 330)
#: Of the ticks of a logarithmic axis: which have a name, and which a line across.
_DIGITS = "round(100 * datum.value / pow(10, floor(log(datum.value) / LN10 + 1e-9))) / 100"
ROUND, WHOLE = f"indexof([1, 1.5, 2, 3, 5], {_DIGITS}) >= 0", f"{_DIGITS} == 1"
#: Where the axis is so short that one round number or none would be on it, each of its ticks has a name.
_SHORT = "domain('y')[1] < 3 * domain('y')[0]"
ONE_SEED = "one seed"
CROSS = "M-1,-1L1,1M-1,1L1,-1"


@dataclass(frozen=True)
class Line:
    """A method's values, of one seed or over seeds.

    Args:
        method: The label of its `Method`.
        run: "seed 0", "mean of 3 seeds".
        columns: By name, numbers of equal length: where it was measured, and what; None where it is not finite.
        over_seeds: Whether it is the mean; then the columns "…_low" and "…_high" hold the range.
        diverged: Whether it ends because training did: a cross. A column "diverged" says at which points else there is one.
    """

    method: str
    run: str
    columns: Mapping[str, Sequence[float | None]]
    over_seeds: bool = False
    diverged: bool = False


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
    found = []
    for axis in choices:
        # The untrained network is at 0, where a logarithmic axis has no place.
        positive = f" && datum['{axis.field}'] > 0" if axis.logarithmic else ""
        values: dict[str, Any] = {"x": axis.field, "x_title": axis.title, "x_scale": "log" if axis.logarithmic else "linear"}
        values |= {"x_rows": f"isValid(datum['{axis.field}']){positive}"}
        values |= (
            {"x_label": f"{ROUND} ? replace(format(datum.value, '{axis.format}'), 'G', 'B') : ''"} if axis.logarithmic else {}
        )
        values |= {"x_step": 1} if axis.format.endswith("d") and not axis.logarithmic else {}
        if axis.domain:
            low, high = axis.domain
            values |= {
                "x_rows": values["x_rows"] + f" && datum['{axis.field}'] >= {low:g} && datum['{axis.field}'] <= {high:g}"
            }
            values |= {"x_domain": [low, high]}
        found.append(Choice(axis.label or axis.title, values))
    return Control("Horizontal", tuple(found))


def quantities(choices: Iterable[Axis]) -> Control:
    """What is on the vertical axis."""
    found = []
    for axis in choices:
        values: dict[str, Any] = {"y": axis.field, "y_low": f"{axis.field}_low", "y_high": f"{axis.field}_high"}
        values |= {"y_title": axis.title, "y_rows": f"isValid(datum['{axis.field}'])", "y_format": axis.format}
        low, high = axis.domain or (-math.inf, math.inf)
        if axis.domain:
            field = f"datum['{axis.field}']"
            values |= {"y_domain": [low, high], "y_dots": f"{field} >= {low:g} && {field} <= {high:g}"}
        found.append(Choice(axis.title, {"y_dots": "true"} | values))
    return Control("Quantity", tuple(found))


def scales(*, logarithmic_first: bool) -> Control:
    """How the vertical axis is divided."""
    log = Choice("Log", {"scale": "log", "y_label": f"{_SHORT} || {ROUND} ? datum.label : ''", "y_grid": WHOLE})
    linear = Choice("Linear", {"scale": "linear", "zero": False, "y_grid": "true"})
    return Control("Vertical", (log, linear) if logarithmic_first else (linear, log))


#: With several seeds: what stands for a method.
RUNS = Control(
    "Lines",
    (Choice("Mean and range", {"rows": "datum.over_seeds"}), Choice("Every seed", {"rows": "!datum.over_seeds"})),
)


def chart(
    id: str,
    title: str,
    alt: str,
    lines: Sequence[Line],
    methods: Sequence[Method],
    fields: Sequence[Axis],
    *,
    target: Target | None = None,
    picture: tuple[int, int] = PICTURE,
    bars: bool = False,
) -> Chart:
    """The chart; what "$x", "$y", "$scale" and "$rows" are is left to the controls.

    Args:
        id: Of its element.
        title: Above it.
        alt: What it shows, in words.
        lines: The data.
        methods: Their colours and dashes.
        fields: All columns, for tooltips.
        target: A line across.
        picture: Pixels in a file.
        bars: Whether the range is a bar at each point, not a band.
    """
    columns = sorted({name for line in lines for name in line.columns} | {"diverged"})
    scale = {"type": "$scale", "zero": "$zero", "domain": "$y_domain", "nice": False}
    grid = {"condition": {"test": "$y_grid", "value": 1}, "value": 0}
    axis = {"format": "$y_format", "labelExpr": "$y_label", "gridOpacity": grid, "labelOverlap": "greedy"}
    y = {"field": "$y", "type": "quantitative", "title": "$y_title", "scale": scale, "axis": axis}
    shown = [{"field": "method", "oneOf": "$shown"}, "$rows"]
    x_axis: dict[str, Any] = {"grid": False, "labelFlush": True, "tickCount": 6, "labelExpr": "$x_label"}
    x_axis |= {"labelOverlap": "greedy", "tickMinStep": "$x_step"}
    x_scale = {"type": "$x_scale", "nice": False, "domain": "$x_domain"}
    spec = {
        "width": "container",
        "height": HEIGHT,
        "transform": [
            *({"filter": test} for test in shown),
            {"flatten": columns},
            *({"filter": test} for test in ("$x_rows", "$y_rows")),
        ],
        "encoding": {
            "x": {"field": "$x", "type": "quantitative", "title": "$x_title", "scale": x_scale, "axis": x_axis},
        },
        "layer": [*_layers(lines, methods, fields, y, bars), *(_across(target, scale) if target else ())],
    }
    return Chart(id, title, alt, spec, tuple(_row(line, columns) for line in lines), picture)


def _layers(
    lines: Sequence[Line], methods: Sequence[Method], fields: Sequence[Axis], y: dict[str, Any], bars: bool
) -> list[dict[str, Any]]:
    """From the back to the front: bands, lines, points, crosses, and the nearest point."""
    looks, colour = [method.look for method in methods], colours(methods)
    dash = by_method(methods, [list(own.dash) or [1, 0] for own in looks])
    width = by_method(methods, [own.width for own in looks], "ordinal")
    # Without a format, Vega-Lite 6.4 looks for words in the cell around the nearest point, and not in the point.
    tooltip = [{"field": name, "title": name.capitalize(), "type": "nominal", "format": ""} for name in ("method", "run")]
    tooltip += [{"field": axis.field, "title": axis.title, "type": "quantitative", "format": axis.format} for axis in fields]
    # By its fields, because Vega-Lite numbers the rows before they are flattened.
    near = {"type": "point", "on": "pointerover", "clear": "pointerout", "nearest": True, "fields": ["method", "run", "$x"]}
    band = {
        "transform": [{"filter": "datum.over_seeds && isValid(datum.range)"}],
        "mark": {"type": "rule" if bars else "area", "opacity": 0.6 if bars else 0.14, "clip": True, "tooltip": None},
        "encoding": {"y": y | {"field": "$y_low"}, "y2": {"field": "$y_high"}, "color": colour},
    }
    line = {
        "mark": {"type": "line", "clip": True, "tooltip": None, "strokeCap": "round"},
        "encoding": {"y": y, "color": colour, "strokeDash": dash, "strokeWidth": width, "detail": {"field": "run"}},
    }
    dots = {
        "transform": [{"filter": "$y_dots"}],
        "mark": {"type": "circle", "size": 40, "opacity": 1, "tooltip": None},
        "encoding": {"y": y, "color": colour},
    }
    cross = {
        "transform": [{"filter": "isValid(datum.diverged)"}],
        "mark": {"type": "point", "shape": CROSS, "size": 60, "strokeWidth": 2, "opacity": 1, "tooltip": None},
        "encoding": {"y": y, "color": colour},
    }
    nearest = {
        "params": [{"name": "near", "select": near}],
        "mark": {"type": "circle", "size": 70, "clip": True},
        "encoding": {
            "y": y,
            "color": colour,
            "tooltip": tooltip,
            "opacity": {"condition": {"param": "near", "empty": False, "value": 1}, "value": 0},
        },
    }
    few = all(len(next(iter(line.columns.values()), ())) <= FEW for line in lines)
    return [
        *([band] if any(_is_range(line) for line in lines) else ()),
        line,
        *([dots] if few else ()),
        *([cross] if any(line.diverged for line in lines) else ()),
        nearest,
    ]


def _across(target: Target, scale: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A line, and its name above it; around the letters is room, so that curves do not run through them."""
    # Its own data: the methods that are shown do not matter to it.
    data = {"values": [{"Target": f"{target.value:.4g}", "Set by": target.by}]}
    encoding = {"x": None, "y": {"datum": target.value, "type": "quantitative", "scale": scale}}
    rule = {"type": "rule", "color": "var(--ink)", "strokeDash": [2, 3], "strokeWidth": 1.2, "tooltip": {"content": "data"}}
    text = {"type": "text", "text": target.label, "align": "left", "baseline": "bottom", "dy": -4, "dx": 6, "x": 0}
    room = {"stroke": "var(--paper)", "strokeWidth": 5, "strokeJoin": "round", "color": "var(--paper)"}
    marks = (rule, text | room, text | {"color": "var(--ink)"})
    return [{"data": data, "mark": mark, "encoding": encoding} for mark in marks]


def _row(line: Line, names: Sequence[str]) -> dict[str, Any]:
    length = max((len(column) for column in line.columns.values()), default=0)
    chosen: Sequence[int] = range(length)
    if length > POINTS:
        chosen = sorted({round(place * (length - 1) / (POINTS - 1)) for place in range(POINTS)})
    # Vega-Lite fills a column that is too short, and stops at one that is not there.
    columns = {name: [_short(line.columns[name][place]) for place in chosen] if name in line.columns else [] for name in names}
    if line.diverged and chosen and "diverged" not in line.columns:
        columns["diverged"] = [*[None] * (len(chosen) - 1), 1]
    return {"method": line.method, "run": line.run, "over_seeds": line.over_seeds, "range": _is_range(line) or None} | columns


def _is_range(line: Line) -> bool:
    return line.run != ONE_SEED and any(name.endswith("_low") for name in line.columns)


def _short(value: float | None) -> float | None:
    """What a screen can show, and JSON can say."""
    if value is None or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.5g}")
