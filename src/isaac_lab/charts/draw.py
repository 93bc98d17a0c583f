"""A figure as a file: each chart drawn by vl-convert, set beside the others under a title and above a legend.

The same figure gives the same bytes: no date, and names inside of it are counted anew in each picture.
"""

import json
import re
import sys
import textwrap
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from isaac_lab.charts.figure import HUES, Chart, Figure, Method
from isaac_lab.records import write_whole

#: DejaVu Sans is shipped and registered: without it ∇, ζ and ₁₀ are drawn in whatever the machine has.
FONT = "DejaVu Sans, Verdana, sans-serif"
COLOURS = {"paper": "#ffffff", "ink": "#1c1e21", "muted": "#5d6168", "line": "#e2dfd9", "void": "#e9e6e1"}
COLOURS |= {f"hue-{name}": value for name, value in HUES.items()}
MUTED, INK, RULE = COLOURS["muted"], COLOURS["ink"], COLOURS["line"]
#: Of Vega-Lite: how what no chart says of itself looks.
AXIS: dict[str, Any] = {"labelColor": MUTED, "titleColor": MUTED, "domainColor": RULE, "tickColor": RULE, "gridColor": RULE}
AXIS |= {"labelFontSize": 11, "titleFontSize": 11.5, "titleFontWeight": "normal", "labelPadding": 4, "titlePadding": 7}
LEGEND = {"labelColor": MUTED, "titleColor": MUTED, "labelFontSize": 10.5, "titleFontSize": 11}
CONFIG = {"font": FONT, "aria": False, "view": {"stroke": None}, "axis": AXIS, "legend": LEGEND}
CONFIG |= {"text": {"color": INK, "fontSize": 11}}
#: Pixels: around everything, between charts, of a line of the title, of a line of text, and of a row of the legend.
MARGIN, GAP, TITLE, LINE, ITEM = 16, 22, 24, 17, 22
#: Of letters, as a share of the font's size, more than most need: of the title, of the legend, of all others.
BOLD, NAME, LETTER = 0.66, 0.64, 0.6
#: Of a PNG, over the size in pixels.
SCALE = 1.5
#: Of a row of charts, at most.
WIDEST = 1700


class DrawError(RuntimeError):
    """What draws is not installed; the message says what to do."""


def draw(figure: Figure, path: Path) -> None:
    """Write the figure as SVG or PNG, by the suffix of the path; whole or not at all.

    Raises:
        DrawError: vl-convert is not installed.
    """
    text = svg(figure)
    write_whole(path, text if path.suffix == ".svg" else _engine().svg_to_png(text, scale=SCALE))


def pictures(figure: Figure, path: Path, *, suffixes: Sequence[str] = (".svg", ".png")) -> None:
    """Write `path` with these suffixes; where nothing is there to draw with, say so: what was trained is kept without them."""
    try:
        for suffix in suffixes:
            draw(figure, path.with_suffix(suffix))
    except DrawError as error:
        print(f"{path.name} is drawn later: {error}", file=sys.stderr)


def svg(figure: Figure) -> str:
    """The figure as SVG: all of its views."""
    rows: list[list[tuple[str, tuple[int, int]]]] = []
    for views in figure.views:
        drawn = [_panel(chart, figure.chosen(view)) for view in views for chart in figure.charts]
        many = max(1, WIDEST // (drawn[0][1][0] + GAP))
        rows += [drawn[start : start + many] for start in range(0, len(drawn), many)]
    width = max(sum(size[0] for _, size in row) + GAP * (len(row) - 1) for row in rows) + 2 * MARGIN
    top, parts = _headings(figure, width)
    for row in rows:
        left = MARGIN
        for inner, size in row:
            parts.append(f'<g transform="translate({left},{top})">{inner}</g>')
            left += size[0] + GAP
        top += max(size[1] for _, size in row) + GAP
    legend, top = _legend(figure.methods, width, top - GAP // 2)
    alt = " ".join(dict.fromkeys(chart.alt for chart in figure.charts))
    about = f"<title>{escape(figure.title or figure.id)}</title><desc>{escape(alt)}</desc>"
    shape = f'width="{width}" height="{top}" viewBox="0 0 {width} {top}"'
    ground = f'<rect width="{width}" height="{top}" fill="#ffffff"/>'
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    text = "".join([about, ground, *parts, *legend])
    return _numbered(f'<svg {names} {shape} font-family="{FONT}" role="img">{text}</svg>\n')


def filled(spec: Any, values: dict[str, Any]) -> Any:
    """A specification with what the controls say in place of each "$name", nothing where they say nothing; as page.js does."""
    text = re.sub(r'"\$(\w+)"', lambda found: json.dumps(values.get(found[1], "$")), json.dumps(spec))
    return json.loads(text, object_hook=lambda own: {key: value for key, value in own.items() if value != "$"})


def _panel(chart: Chart, values: dict[str, Any]) -> tuple[str, tuple[int, int]]:
    """The inside of a chart's SVG, and its size."""
    spec = filled(chart.spec, values)
    # What answers to a pointer is nothing in a picture, and most of its bytes.
    spec["layer"] = [layer for layer in spec["layer"] if "params" not in layer]
    width, height = chart.picture
    if chart.title:
        lines = [line for part in chart.title.split("\n") for line in textwrap.wrap(part, int(width / (LETTER * 12)))]
        look = {"anchor": "start", "frame": "group", "fontSize": 12, "fontWeight": "normal", "color": INK}
        spec["title"] = {"text": lines, **look}
        height += LINE * (len(lines) - 1)
    spec |= {"width": width, "height": height, "autosize": {"type": "fit", "contains": "padding"}, "padding": 2}
    spec |= {"data": {"values": list(chart.values)}, "config": CONFIG, "background": None}
    text = json.dumps(spec, ensure_ascii=False, allow_nan=False)
    text = re.sub(r"var\(--([\w-]+)\)", lambda found: COLOURS[found[1]], text)
    drawn = _engine().vegalite_to_svg(text)
    inner = drawn[drawn.index(">") + 1 : drawn.rindex("</svg>")]
    # A hundredth of a pixel is nothing either; what is written between the tags stays.
    fine = re.compile(r"\d+\.\d{3,}(?![\de])(?=[^<>]*>)")
    return fine.sub(lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), inner), (width, height)


def _headings(figure: Figure, width: int) -> tuple[int, list[str]]:
    """The height of title and subtitle, and their elements."""
    top, parts, room = MARGIN, [], width - 2 * MARGIN
    for line in textwrap.wrap(figure.title, int(room / (BOLD * 16))):
        parts.append(_text(MARGIN, top + 17, line, f'font-size="16" font-weight="bold" fill="{INK}"'))
        top += TITLE
    for line in (line for part in figure.subtitle.splitlines() for line in textwrap.wrap(part, int(room / (LETTER * 11)))):
        parts.append(_text(MARGIN, top + 12, line, f'font-size="11" fill="{MUTED}"'))
        top += LINE
    return top + (10 if parts else 0), parts


def _legend(methods: Sequence[Method], width: int, top: int) -> tuple[list[str], int]:
    """A line and a name for each method, and where they end."""
    parts, left = [], MARGIN
    for method in methods:
        room = 34 + int(len(method.label) * NAME * 12) + 20
        if left + room > width and left > MARGIN:
            left, top = MARGIN, top + ITEM
        look = method.look
        stroke = f'stroke="{HUES[look.hue]}" stroke-width="{min(look.width, 4):g}"'
        dash = f' stroke-dasharray="{look.dash}"' if look.dash else ""
        parts.append(f'<line x1="{left}" y1="{top + 10}" x2="{left + 28}" y2="{top + 10}" {stroke}{dash}/>')
        parts.append(_text(left + 35, top + 14, method.label, f'font-size="12" fill="{INK}"'))
        left += room
    return parts, top + (ITEM + MARGIN if parts else MARGIN)


def _text(x: int, y: int, words: str, style: str) -> str:
    return f'<text x="{x}" y="{y}" {style}>{escape(words)}</text>'


def _numbered(text: str) -> str:
    """With the names inside counted from 1 in the order in which they come: Vega counts on through all of a process."""
    names = dict.fromkeys(re.findall(r"(?:\burl\(#|\bid=\"|\bhref=\"#)([\w-]+)", text))
    numbers = {name: f"{re.sub(r'[0-9]+$', '', name)}{number}" for number, name in enumerate(names, 1)}
    return re.sub(r"(\burl\(#|\bid=\"|\bhref=\"#)([\w-]+)", lambda found: found[1] + numbers[found[2]], text)


@cache
def _engine() -> Any:
    try:
        import vl_convert
    except ModuleNotFoundError:
        raise DrawError("pictures need vl-convert-python; install it with: pip install 'isaac-newton[lab]'") from None
    with as_file(files("isaac_lab.charts") / "fonts") as folder:
        vl_convert.register_font_directory(str(folder))
    return vl_convert
