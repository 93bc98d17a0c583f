"""A record of Table 2 as Vega-Lite: a dot for each method and model, beside the paper's figure and the bar."""

from typing import Any

from isaac_lab.bench.published import BARS
from isaac_lab.page.lines import ROUND
from isaac_lab.page.parts import Chart, Method, identifier
from isaac_lab.report.bars import METHODS, published, relative
from isaac_lab.report.lines import HUES

__all__ = ["MODES", "chart", "methods", "points", "title"]

Record = dict[str, Any]

MODES = {"cuda-captured": "GPU, the whole step as one CUDA graph", "cuda-eager": "GPU, eager", "cpu-1thread": "CPU, one thread"}
MODELS = {"autoencoder": "auto-encoder"}
#: Heights: of a model in a chart, and of what stands around them.
MODEL, AROUND = 62, 30


def methods() -> tuple[Method, ...]:
    """In their order, with the hues of the other figures."""
    return tuple(Method(label, _hue(hue)) for label, hue in METHODS.values())


def _hue(value: str) -> str:
    return next(name for name, own in HUES.items() if own == value)


def title(record: Record) -> str:
    """How and where a record was measured."""
    machine = record["machine"]
    how = MODES.get(record["mode"], f"CPU, {machine['threads']} threads")
    return f"{how} ({machine.get('gpu') or machine['cpu']})"


def chart(name: str, record: Record, quantity: str) -> Chart:
    """A record as a chart; `quantity` is "time" or "memory"."""
    found = points(record, quantity)
    models = list(dict.fromkeys(point["model"] for point in found))
    names = [label for label, _ in METHODS.values()]
    y = {
        "field": "model",
        "type": "nominal",
        "title": None,
        "sort": models,
        "axis": {"ticks": False, "domain": False, "labelPadding": 6, "grid": True, "tickBand": "extent"},
    }
    offset = {"field": "method", "type": "nominal", "sort": names, "scale": {"domain": names, "paddingInner": 0.2}}
    colour: dict[str, Any] = {"field": "method", "type": "nominal", "legend": None}
    colour["scale"] = {"domain": names, "range": [f"var(--hue-{_hue(hue)})" for _, hue in METHODS.values()]}
    x: dict[str, Any] = {"type": "quantitative", "title": None, "scale": {"type": "log", "nice": False, "padding": 14}}
    x["axis"] = {"labelExpr": f"{ROUND} ? format(datum.value, '~r') + ' ×' : ''", "labelOverlap": "greedy", "grid": False}
    tooltip = [
        {"field": field, "title": title}
        for field, title in (
            ("method", "Method"),
            ("model", "Model"),
            ("words", "Ours"),
            ("paper_words", "The paper"),
            ("limit_words", "Bar"),
        )
    ]
    shared = {"y": y, "yOffset": offset, "color": colour, "tooltip": tooltip}
    limits = any(point["limit"] is not None for point in found)
    layers = [
        {"data": {"values": [{}]}, "mark": {"type": "rule", "color": "var(--muted)"}, "encoding": {"x": x | {"datum": 1}}},
        {
            "transform": [{"filter": "isValid(datum.ratio)"}],
            "mark": {"type": "rule", "strokeWidth": 2},
            "encoding": shared | {"x": x | {"field": "low"}, "x2": {"field": "high"}},
        },
        {
            "transform": [{"filter": "isValid(datum.paper)"}],
            "mark": {"type": "point", "shape": "diamond", "size": 60, "strokeWidth": 1.6, "filled": False},
            "encoding": shared | {"x": x | {"field": "paper"}},
        },
        {
            "transform": [{"filter": "isValid(datum.limit)"}],
            "mark": {"type": "tick", "thickness": 1.5, "size": 14, "color": "var(--ink)"},
            "encoding": {"y": y, "yOffset": offset, "tooltip": tooltip, "x": x | {"field": "limit"}},
        },
        {
            "transform": [{"filter": "isValid(datum.ratio)"}],
            "mark": {"type": "circle", "size": 75, "opacity": 1},
            "encoding": shared | {"x": x | {"field": "ratio"}},
        },
    ]
    if not limits:
        layers = [layer for layer in layers if layer["mark"]["type"] != "tick"]  # type: ignore[index]
    spec = {
        "width": "container",
        "height": MODEL * len(models) + AROUND,
        "transform": [{"filter": {"field": "method", "oneOf": "$shown"}}],
        "layer": layers,
    }
    what = "time" if quantity == "time" else "peak memory"
    star = [f"{point['model']} {point['words']}" for point in found if point["method"] == "ζ*" and point["ratio"]]
    description = (
        f"{title(record)}: {what} of a step over the plain gradient step. ζ*: {'; '.join(star)}. "
        "All numbers are in the tables below."
    )
    return Chart(identifier("cost", quantity, name.removesuffix(".json")), title(record), description, spec, tuple(found))


def points(record: Record, quantity: str) -> list[dict[str, Any]]:
    """Of every model and method: ours, the paper's and the bar, over the plain gradient step; none without any of ours."""
    found = []
    for case in record["cases"]:
        for name, (label, _) in METHODS.items():
            middle, low, high = relative(case, name, quantity)
            paper = published(record, case["name"], name, quantity)
            limit = _limit(record, case["name"], name, quantity)
            if middle is None and (paper is None or quantity == "memory"):
                continue
            own = (
                "not measured" if middle is None else f"{middle:.3f} ×" + (f" ({low:.3f} to {high:.3f})" if low != high else "")
            )
            found.append(
                {
                    "model": MODELS.get(case["name"], f"5 × {case['name']}"),
                    "method": label,
                    "ratio": middle,
                    "low": None if middle is None else low,
                    "high": None if middle is None else high,
                    "paper": paper,
                    "limit": limit,
                    "words": own,
                    "paper_words": "–" if paper is None else f"{paper:.2f} ×",
                    "limit_words": "–" if limit is None else f"at most {limit:g} ×",
                }
            )
    return found if any(point["ratio"] is not None for point in found) else []


def _limit(record: Record, model: str, method: str, quantity: str) -> float | None:
    for bar in BARS:
        if (bar.kind, bar.mode, bar.method) == ("table2", record["mode"], method) and model in bar.limits:
            if (bar.quantity, quantity) == ("ratio", "time"):
                return bar.limits[model]
            if (bar.quantity, quantity) == ("memory", "memory"):
                return 1 + bar.limits[model] / 100
    return None
