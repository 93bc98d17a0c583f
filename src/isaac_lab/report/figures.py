"""Figures of what was trained as trials, from their summaries: Figure 6 (courses of accuracy) and Table 1 (scores)."""

from collections.abc import Mapping
from typing import Any

from isaac_lab.charts import dots, lines
from isaac_lab.charts.figure import Chart, Figure, Look, Method, identifier, look
from isaac_lab.charts.lines import Axis, Line

__all__ = ["courses", "scores"]

Record = Mapping[str, Any]

#: With fewer epochs there is no end to enlarge.
FEWEST = 6
#: By the name of a way to condition. The gradient and ζ* look as everywhere.
LOOKS: Mapping[str, Look] = {
    "none": look("gradient"),
    "gradient": look("gradient"),
    "last": look("zeta_star"),
    "expand": look("zeta_star"),
    "reduce": Look("green"),
    "max_rows": Look("orange", (6, 4)),
}


def courses(summary: Record, id: str = "fig6") -> Figure:
    """Accuracy over epochs, a chart for each panel: mean and standard deviation over seeds, and the end of it enlarged."""
    curves = [curve for panel in summary["panels"] for curve in panel["curves"]]
    names = {curve["label"]: curve.get("name", "") for curve in curves}
    methods = [
        Method(label, LOOKS.get(name) or look(name, place), ours=name not in ("none", "gradient"))
        for place, (label, name) in enumerate(names.items())
    ]
    percent = all(value <= 1 for curve in curves for value in curve["mean"])
    value = Axis("value", summary.get("quantity_title") or "Accuracy", ".4~%" if percent else ".4~g")
    epochs = max(len(curve["epochs"]) for curve in curves)
    across = [Axis("epoch", "Epochs", ",d")]
    if epochs >= FEWEST:
        across.append(Axis("epoch", "Epochs", ",d", (1 + 2 * epochs // 3, epochs), label="The last third"))
    charts = tuple(_course(panel, id, methods, [across[0], value]) for panel in summary["panels"])
    controls = (lines.scales(logarithmic_first=False), lines.axes(across), lines.quantities([value]))
    seeds = sorted({curve.get("n", 1) for curve in curves})
    note = f"Mean over {' or '.join(map(str, seeds))} seed{'' if seeds == [1] else 's'}"
    note += "." if seeds == [1] else "; bands: one standard deviation on either side."
    about = " · ".join(str(part) for part in (summary.get("data"), f"scale “{summary['scale']}”") if part)
    views = tuple(({"Horizontal": axis.label or axis.title},) for axis in across)
    return Figure(f"figure-{id}", charts, summary["title"], f"{about}\n{note}", controls, tuple(methods), views, note)


def _course(panel: Record, id: str, methods: list[Method], fields: list[Axis]) -> Chart:
    drawn = []
    for curve in panel["curves"]:
        deviations = curve.get("std") or [0.0] * len(curve["mean"])
        columns = {
            "epoch": curve["epochs"],
            "value": curve["mean"],
            "value_low": [mean - (std or 0.0) for mean, std in zip(curve["mean"], deviations, strict=True)],
            "value_high": [mean + (std or 0.0) for mean, std in zip(curve["mean"], deviations, strict=True)],
        }
        drawn.append(Line(curve["label"], f"mean of {curve.get('n', '?')} seeds", columns, over_seeds=True))
    title = f"({panel['name']}) {panel['title']}"
    alt = f"Curves of {len(drawn)} methods over epochs, {panel['title']}. The last values are in the table below."
    return lines.chart(f"{id}-{identifier(panel['name'])}", title, alt, drawn, methods, fields, picture=(420, 300))


def scores(summary: Record, id: str = "tab1") -> Figure:
    """A chart for each score: a dot for the mean, a bar of one standard deviation to either side, small dots for seeds."""
    rows = [row for row in summary["rows"] if row.get("method")]
    methods = tuple(Method(row["label"], LOOKS.get(row["method"]) or look(row["method"])) for row in rows)
    charts = []
    for place, column in enumerate(summary["columns"]):
        found = []
        for row in rows:
            cell = row["cells"][place]
            if cell and cell["mean"] is not None:
                mean, deviation = 100 * cell["mean"], 100 * (cell["std"] or 0.0)
                seeds = [100 * value for value in cell.get("values") or ()]
                own = {"value": mean, "low": mean - deviation, "high": mean + deviation, "seeds": seeds}
                found.append({"model": column, "method": row["label"], "words": f"{mean:.2f} ± {deviation:.2f} %"} | own)
        alt = f"{column}: " + "; ".join(f"{dot['method']} {dot['words']}" for dot in found) + "."
        name = f"{id}-score-{place}"
        charts.append(dots.chart(name, column, alt, found, methods, unit=" %", width=310))
    counts = sorted({cell["n"] for row in rows for cell in row["cells"] if cell})
    runs = " to ".join(dict.fromkeys(str(count) for count in counts[:1] + counts[-1:]))
    about = "Scores on dev in percent, more is better. Settings chosen for each method from grids of equal size. "
    about += f"Mean ± standard deviation over {runs} seeds; small dots: single seeds." if counts else "Not run yet."
    return Figure(f"figure-{id}", tuple(charts), summary["title"], about, methods=methods)
