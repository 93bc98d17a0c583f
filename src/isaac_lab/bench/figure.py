"""The scaling curves of a benchmark: measured ratios with their quartiles, and the ratio of the multiply-adds."""

from typing import Any

from isaac_lab.charts import lines
from isaac_lab.charts.figure import Chart, Figure, Look, Method, look
from isaac_lab.charts.lines import Axis, Line

__all__ = ["figure"]

METHODS = (Method("measured, with quartiles", look("zeta_star"), ours=True), Method("multiply-adds", Look("grey", (6, 4))))
TITLES = {"batch": "By batch size, at width {}", "width": "By width, at batch size {}"}
RATIO = Axis("ratio", "Time of a ζ* step over that of a plain one", ".3~g")


def figure(record: dict[str, Any]) -> Figure:
    """A chart by batch size and one by width."""
    charts = []
    for curve in TITLES:
        cases = [case for case in record["cases"] if case["curve"] == curve and "ratio" in _star(case)]
        charts += [_chart(curve, cases)] if cases else []
    machine = record["machine"]
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} thread{'' if machine['threads'] == 1 else 's'}"
    title = f"What ζ* costs, three linear layers, {where} ({record['mode']})"
    size = lines.axes([Axis("size", "Batch size or width", ",d", logarithmic=True)])
    controls = (size, lines.scales(logarithmic_first=False), lines.quantities([RATIO]))
    return Figure("figure-scaling", tuple(charts), title, "1 is the plain step.", controls, METHODS)


def _star(case: dict[str, Any]) -> dict[str, Any]:
    return next((method for method in case["methods"] if method["name"] == "zeta_star"), {})


def _chart(curve: str, cases: list[dict[str, Any]]) -> Chart:
    sizes, ratios = [case[curve] for case in cases], [_star(case)["ratio"] for case in cases]
    measured = {"size": sizes, "ratio": [ratio["median"] for ratio in ratios]}
    measured |= {f"ratio_{end}": [ratio[end] for ratio in ratios] for end in ("low", "high")}
    drawn = [
        Line(METHODS[0].label, "median", measured, over_seeds=True),
        Line(METHODS[1].label, "counted", {"size": sizes, "ratio": [case["theory"] for case in cases]}, over_seeds=True),
    ]
    title = TITLES[curve].format(cases[0]["width" if curve == "batch" else "batch"])
    alt = f"{title}: ratios of {min(measured['ratio']):.2f} to {max(measured['ratio']):.2f}."
    return lines.chart(f"scaling-{curve}", title, alt, drawn, METHODS, [Axis("size", "Size", ",d"), RATIO])
