"""Curves of training: a line for each method or for each of its seeds, the nearest point named where there is a pointer."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple

from isaac_lab.charts.figure import Chart, Control, Figure, Method, View, by_method, colours, filters, layer

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
CROSS = "M-1,-1L1,1M-1,1L1,-1"

#: By name, numbers of equal length: where it was measured, and what; None where it is not finite.
Columns = Mapping[str, Sequence[float | None]]


@dataclass(frozen=True)
class Line:
    """A method's values, of one seed or over seeds; over several the columns "…_low" and "…_high" hold the range."""

    method: Method
    run: str  # "seed 0", "mean of 3 seeds"
    columns: Columns
    over_seeds: bool = True
    #: Whether it ends because training did: a cross. A column "diverged" says at which points else there is one.
    diverged: bool = False


@dataclass(frozen=True)
class Axis:
    """A column as an axis."""

    field: str
    title: str
    format: str = ",.4~r"  # of tooltips and ticks, in the language of d3
    domain: tuple[float, float] | None = None  # the data's own unless given
    logarithmic: bool = False  # only of a horizontal axis
    label: str = ""  # of the control; the title unless given

    @property
    def name(self) -> str:
        """Of its choice in a control."""
        return self.label or self.title

    @property
    def within(self) -> str:
        """In the language of Vega: whether a point is in the domain."""
        value = f"datum['{self.field}']"
        return "true" if self.domain is None else f"{value} >= {self.domain[0]:g} && {value} <= {self.domain[1]:g}"


@dataclass(frozen=True)
class Target:
    """A line across, and what it is."""

    value: float
    label: str
    by: str = ""


class Panel(NamedTuple):
    """One chart of a figure: its id, its title, what it shows in words, and its lines."""

    id: str
    title: str
    alt: str
    lines: Sequence[Line]


def mean(method: Method, seeds: Sequence[Columns], at: str, values: Sequence[str]) -> Line:
    """Mean, lowest and highest over seeds, where all of them have finite values, which may be nowhere.

    The column `at` says which points belong together; `values` have a range over seeds, all others the mean alone.
    """
    rows = [[dict(zip(seed, row, strict=True)) for row in zip(*seed.values(), strict=True)] for seed in seeds]
    tables = [{row[at]: row for row in own} for own in rows]
    # A quantity that a method does not have, such as an accuracy, is None throughout.
    common = [
        place
        for place in (tables[0] if tables else ())
        if all(any(table.get(place, {}).get(name) is not None for name in values) for table in tables)
    ]
    columns: dict[str, list[float | None]] = {}
    for name in seeds[0] if seeds else ():
        own = [[table[place][name] for table in tables] for place in common]
        for end, statistic in (("", fmean), ("_low", min), ("_high", max))[: 3 if name in values and len(seeds) > 1 else 1]:
            columns[name + end] = [None if None in found else statistic(found) for found in own]
    return Line(method, f"mean of {len(seeds)} seeds" if len(seeds) > 1 else "one seed", columns)


def seeds(
    method: Method, runs: Mapping[str, Columns], at: str, values: Sequence[str], lost: Collection[str] = ()
) -> list[Line]:
    """The mean over seeds and, where there are several, each of them, by name; of these `lost` diverged.

    Seeds that have no place in common have no mean, and are shown in place of it.
    """
    each = [Line(method, run, own, over_seeds=False, diverged=run in lost) for run, own in runs.items()]
    over = [replace(mean(method, list(runs.values()), at, values), diverged=bool(lost))]
    if each and not over[0].columns[at]:
        over = [replace(line, over_seeds=True) for line in each]
    return [*over, *(each if len(each) > 1 else ())]


def _horizontal(axis: Axis) -> dict[str, Any]:
    """What stands for each "$name" with this horizontal axis."""
    value = f"datum['{axis.field}']"
    values: dict[str, Any] = {"x": axis.field, "x_title": axis.title, "x_scale": "log" if axis.logarithmic else "linear"}
    rows = f"isValid({value})"
    if axis.logarithmic:
        # The untrained network is at 0, where a logarithmic axis has no place.
        rows += f" && {value} > 0"
        values["x_label"] = f"{ROUND} ? replace(format(datum.value, '{axis.format}'), 'G', 'B') : ''"
    elif axis.format.endswith("d"):
        values["x_step"] = 1
    if axis.domain:
        rows += f" && {axis.within}"
        values["x_domain"] = list(axis.domain)
    return values | {"x_rows": rows}


def _vertical(axis: Axis) -> dict[str, Any]:
    """What stands for each "$name" with this vertical axis."""
    low, high = f"{axis.field}_low", f"{axis.field}_high"
    values: dict[str, Any] = {"y": axis.field, "y_low": low, "y_high": high, "y_title": axis.title, "y_format": axis.format}
    values |= {"y_rows": f"isValid(datum['{axis.field}'])", "y_band": f"datum.over_seeds && isValid(datum['{low}'])"}
    return values | {"y_dots": axis.within} | ({"y_domain": list(axis.domain)} if axis.domain else {})


#: How the vertical axis is divided.
SCALES: dict[str, Mapping[str, Any]] = {
    "Log": {"scale": "log", "y_label": f"{_SHORT} || {ROUND} ? datum.label : ''", "y_grid": WHOLE},
    "Linear": {"scale": "linear", "zero": False, "y_grid": "true"},
}
#: With several seeds: what stands for a method.
RUNS = Control("Lines", {"Mean and range": {"rows": "datum.over_seeds"}, "Every seed": {"rows": "!datum.over_seeds"}})


def figure(
    id: str,
    panels: Sequence[Panel],
    up: Sequence[Axis],
    across: Sequence[Axis],
    *,
    logarithmic: bool = True,
    target: Target | None = None,
    picture: tuple[int, int] = PICTURE,
    bars: bool = False,
    views: Sequence[Sequence[View]] = (({},),),
    **words: str,
) -> Figure:
    """Charts of curves with all their controls.

    Args:
        id: Of the figure's element.
        panels: The charts.
        up: Choices of the vertical axis.
        across: Choices of the horizontal axis.
        logarithmic: Whether the vertical axis is, unless a reader wants it otherwise.
        target: A line across.
        picture: Pixels of a chart in a file.
        bars: Whether the range is a bar at each point, not a band.
        views: What the picture shows.
        words: Title, subtitle and caption.
    """
    methods = tuple(dict.fromkeys(line.method for panel in panels for line in panel.lines))
    fields = list({axis.field: axis for axis in (*across, *up)}.values())
    scales = SCALES if logarithmic else dict(reversed(SCALES.items()))
    controls = [Control("Quantity", {axis.title: _vertical(axis) for axis in up}), Control("Vertical", scales)]
    controls.append(Control("Horizontal", {axis.name: _horizontal(axis) for axis in across}))
    charts = []
    for id_, title, alt, lines in panels:
        columns = sorted({name for line in lines for name in line.columns} | {"diverged"})
        rows = tuple(_row(line, columns) for line in lines)
        charts.append(Chart(id_, title, alt, _spec(lines, columns, methods, fields, target, bars), rows, picture))
        if RUNS not in controls and not all(line.over_seeds for line in lines):
            controls.append(RUNS)
    return Figure(id, tuple(charts), controls=tuple(controls), methods=methods, views=tuple(map(tuple, views)), **words)


def _spec(
    lines: Sequence[Line],
    columns: Sequence[str],
    methods: Sequence[Method],
    fields: Sequence[Axis],
    target: Target | None,
    bars: bool,
) -> dict[str, Any]:
    """What "$x", "$y", "$scale" and "$rows" are is left to the controls. Tooltips have all `fields`."""
    scale = {"type": "$scale", "zero": "$zero", "domain": "$y_domain", "nice": False}
    grid = {"condition": {"test": "$y_grid", "value": 1}, "value": 0}
    axis = {"format": "$y_format", "labelExpr": "$y_label", "gridOpacity": grid, "labelOverlap": "greedy"}
    y = {"field": "$y", "type": "quantitative", "title": "$y_title", "scale": scale, "axis": axis}
    x_axis: dict[str, Any] = {"grid": False, "labelFlush": True, "tickCount": 6, "labelExpr": "$x_label"}
    x_axis |= {"labelOverlap": "greedy", "tickMinStep": "$x_step"}
    x_scale = {"type": "$x_scale", "nice": False, "domain": "$x_domain"}
    x = {"field": "$x", "type": "quantitative", "title": "$x_title", "scale": x_scale, "axis": x_axis}
    looks, own = [method.look for method in methods], {"y": y, "color": colours(methods)}
    strokes = own | {
        "strokeDash": by_method(methods, [list(map(int, look.dash.split())) or [1, 0] for look in looks]),
        "strokeWidth": by_method(methods, [look.width for look in looks], "ordinal"),
        "detail": {"field": "run"},
    }
    # Without a format, Vega-Lite 6.4 looks for words in the cell around the nearest point, and not in the point.
    tooltip = [{"field": name, "title": name.capitalize(), "type": "nominal", "format": ""} for name in ("method", "run")]
    tooltip += [{"field": axis.field, "title": axis.title, "type": "quantitative", "format": axis.format} for axis in fields]
    # By its fields, because Vega-Lite numbers the rows before they are flattened.
    near = {"type": "point", "on": "pointerover", "clear": "pointerout", "nearest": True, "fields": ["method", "run", "$x"]}
    pointed = {"condition": {"param": "near", "empty": False, "value": 1}, "value": 0}
    range_ = own | {"y": y | {"field": "$y_low"}, "y2": {"field": "$y_high"}}
    band = {"type": "rule" if bars else "area", "opacity": 0.6 if bars else 0.14, "clip": True, "tooltip": None}
    mark = {"type": "circle", "size": 40, "opacity": 1, "tooltip": None}
    cross = {"type": "point", "shape": CROSS, "size": 60, "strokeWidth": 2, "opacity": 1, "tooltip": None}
    # From the back to the front.
    layers = [layer(band, range_, "$y_band")] if any(name.endswith("_low") for name in columns) else []
    layers.append(layer({"type": "line", "clip": True, "tooltip": None, "strokeCap": "round"}, strokes))
    if all(len(next(iter(line.columns.values()), ())) <= FEW for line in lines):
        layers.append(layer(mark, own, "$y_dots"))
    if any(line.diverged for line in lines):
        layers.append(layer(cross, own, "isValid(datum.diverged)"))
    nearest = layer({"type": "circle", "size": 70, "clip": True}, own | {"tooltip": tooltip, "opacity": pointed})
    layers.append(nearest | {"params": [{"name": "near", "select": near}]})
    chosen = [*filters({"field": "method", "oneOf": "$shown"}, "$rows"), {"flatten": columns}, *filters("$x_rows", "$y_rows")]
    layers += _across(target, scale) if target else ()
    return {"width": "container", "height": HEIGHT, "transform": chosen, "encoding": {"x": x}, "layer": layers}


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
    """Of data: a line, thinned to what a screen can show, in numbers that JSON can say."""
    length = max((len(column) for column in line.columns.values()), default=0)
    places = (
        sorted({round(place * (length - 1) / (POINTS - 1)) for place in range(POINTS)}) if length > POINTS else range(length)
    )
    # Vega-Lite fills a column that is too short, and stops at one that is not there.
    columns = {name: [_short(line.columns[name][place]) for place in places] if name in line.columns else [] for name in names}
    if line.diverged and places and "diverged" not in line.columns:
        columns["diverged"] = [*[None] * (len(places) - 1), 1]
    return {"method": line.method.label, "run": line.run, "over_seeds": line.over_seeds} | columns


def _short(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.5g}")
