"""What the notebooks draw with: the laboratory's charts in one call, shown by Jupyter as SVG."""

import base64
import io
from collections.abc import Mapping, Sequence

from PIL import Image
from torch import Tensor

from isaac_lab.charts import lines, mosaic
from isaac_lab.charts.draw import svg
from isaac_lab.charts.figure import DASHED, HUES, Figure, Look, Method
from isaac_lab.charts.lines import Axis, Panel, Target

__all__ = ["Axis", "Picture", "Target", "curves", "images"]


class Picture:
    """A figure that a notebook shows."""

    def __init__(self, figure: Figure) -> None:
        self.figure = figure

    def __repr__(self) -> str:
        return f"Picture({self.figure.title!r})"

    def _repr_svg_(self) -> str:
        return svg(self.figure)


def curves(
    title: str,
    runs: Mapping[str, Sequence[Sequence[float]]],
    at: Sequence[float],
    x: Axis,
    y: Axis,
    *,
    target: Target | None = None,
    logarithmic: bool = True,
) -> Picture:
    """A line for each label: the mean of its seeds, with a band from the lowest to the highest; "plain" is dashed."""
    hues = (hue for hue in ("red", "blue", "orange", "green", "pink", "sky") if hue in HUES)
    drawn = []
    for label, seeds in runs.items():
        method = Method(label, Look("black", DASHED) if label == "plain" else Look(next(hues)))
        columns = [{x.field: list(at), y.field: list(seed)} for seed in seeds]
        drawn.append(lines.mean(method, columns, x.field, (y.field,)))
    size, panel = (560, 320), Panel("chart", "", title, drawn)
    return Picture(lines.figure("figure", [panel], [y], [x], logarithmic=logarithmic, target=target, picture=size, title=title))


def images(title: str, rows: Mapping[str, Mapping[str, tuple[Tensor, str]]]) -> Picture:
    """Images from 0 to 1 in rows and columns, each (height, width) or (height, width, 3), with words below."""
    cells = [
        {"row": row, "column": column, "url": _url(image), "words": words}
        for row, own in rows.items()
        for column, (image, words) in own.items()
    ]
    return Picture(Figure("figure", (mosaic.chart("chart", title, cells),), title))


def _url(image: Tensor) -> str:
    pixels = (255 * image.clamp(0, 1)).round().byte().numpy()
    out = io.BytesIO()
    Image.fromarray(pixels).resize((96, 96), Image.Resampling.NEAREST).save(out, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode()}"
