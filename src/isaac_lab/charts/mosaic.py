"""Pictures in rows and columns, with a word below each. A row of data has "row", "column", "url" and "words"."""

from collections.abc import Mapping, Sequence
from typing import Any

from isaac_lab.charts.figure import Chart, layer

#: Pixels: of a picture, between two, below one for its words, left of a row and above all for their names.
SIDE, GAP, WORDS, LEFT, TOP = 144, 6, 18, 118, 24


def chart(id: str, alt: str, rows: Sequence[Mapping[str, str]]) -> Chart:
    """The chart, in the order of rows and columns; "url" holds a picture, or ""."""
    down, across = (list(dict.fromkeys(row[name] for row in rows)) for name in ("row", "column"))
    names: dict[str, Any] = {"title": None, "type": "nominal"}
    plain = {"ticks": False, "domain": False, "grid": False, "labelFontSize": 12, "labelColor": "var(--ink)"}
    left = plain | {"minExtent": LEFT, "maxExtent": LEFT, "labelLimit": LEFT, "labelExpr": "split(datum.label, ', ')"}
    top = plain | {"orient": "top", "labelAngle": 0, "minExtent": TOP, "maxExtent": TOP, "labelLimit": SIDE}
    bands = {"paddingInner": 0, "paddingOuter": 0}
    x = names | {"field": "column", "sort": across, "axis": top, "scale": bands}
    y = names | {"field": "row", "sort": down, "axis": left, "scale": bands}
    size = {"width": SIDE, "height": SIDE}
    layers = [
        layer({"type": "image", "yOffset": -WORDS / 2, **size}, {"url": {"field": "url"}}, "datum.url != ''"),
        layer({"type": "text", "dy": SIDE / 2 + 1, "fontSize": 11}, {"text": {"field": "words"}}),
    ]
    width, height = LEFT + (SIDE + GAP) * len(across), TOP + (SIDE + WORDS + GAP) * len(down)
    spec = {"width": "container", "height": height, "encoding": {"x": x, "y": y}, "layer": layers}
    return Chart(id, "", alt, spec, tuple(rows), (width, height))
