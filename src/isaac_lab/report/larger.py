"""Table 1 (fine-tuning) and Figure 6 (ResNet-18): pictures and tables of what their records say together."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from isaac_lab.charts import dots, lines
from isaac_lab.charts.figure import Figure, Look, Method, identifier, look
from isaac_lab.charts.lines import Axis, Line, Panel
from isaac_lab.report import WORDS, tables
from isaac_lab.report.tables import Row, Table, table
from isaac_lab.studies.paper import fig6
from isaac_lab.studies.paper.folder import View
from isaac_lab.words import spread

Record = Mapping[str, Any]

#: With fewer epochs there is no end to enlarge.
FEWEST = 6
#: By the name of a way to condition. The gradient and ζ* look as everywhere.
LOOKS = {name: Look.of(**own) for name, own in WORDS["styles"]["larger"].items()}


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
    seeds = sorted({curve.get("n", 1) for curve in curves})
    note = f"Mean over {' or '.join(map(str, seeds))} seed{'' if seeds == [1] else 's'}"
    note += "." if seeds == [1] else "; bands: one standard deviation on either side."
    about = " · ".join(str(part) for part in (summary.get("data"), f"scale “{summary['scale']}”") if part)
    return lines.figure(
        f"figure-{id}",
        [_panel(panel, id) for panel in summary["panels"]],
        methods,
        [value],
        across,
        logarithmic=False,
        picture=(420, 300),
        views=[[{"Horizontal": axis.name}] for axis in across],
        title=summary["title"],
        subtitle=f"{about}\n{note}",
        caption=note,
    )


def _panel(panel: Record, id: str) -> Panel:
    drawn = []
    for curve in panel["curves"]:
        ends = list(zip(curve["mean"], curve.get("std") or [0.0] * len(curve["mean"]), strict=True))
        columns = {"epoch": curve["epochs"], "value": curve["mean"]}
        columns |= {"value_low": [mean - std for mean, std in ends], "value_high": [mean + std for mean, std in ends]}
        drawn.append(Line(curve["label"], f"mean of {curve.get('n', '?')} seeds", columns, over_seeds=True))
    alt = f"Curves of {len(drawn)} methods over epochs, {panel['title']}. The last values are in the table below."
    return Panel(f"{id}-{identifier(panel['name'])}", f"({panel['name']}) {panel['title']}", alt, drawn)


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
        charts.append(dots.chart(f"{id}-score-{place}", column, alt, found, methods, unit=" %", width=310))
    counts = sorted({cell["n"] for row in rows for cell in row["cells"] if cell})
    runs = " to ".join(dict.fromkeys(str(count) for count in counts[:1] + counts[-1:]))
    about = "Scores on dev in percent, more is better. Settings chosen for each method from grids that differ in size. "
    about += f"Mean ± standard deviation over {runs} seeds; small dots: single seeds." if counts else "Not run yet."
    return Figure(f"figure-{id}", tuple(charts), summary["title"], about, methods=methods)


def accuracies(view: View) -> Table:
    """The final test accuracy of each method in each setting, and the time of a step over that of ∇."""
    ratios = {
        mode: {name: f"{own['ratio']['median']:.3f}" for name, own in record["methods"].items()}
        for mode, record in view.times.items()
    }
    rows = []
    for (setting, name), cell in fig6.cells(view).items():
        found = fig6.shown_cell(cell)
        if found is None or cell.best is None:
            continue
        lost = f", {found['diverged']} diverged" if found["diverged"] else ""
        damping = f"{cell.best.damping:g}" if cell.best.get("damping") else "–"
        accuracy = f"{tables.spread(found, '.2%')} ({found['n']}{lost})"
        step = [own.get(name, "–") for own in ratios.values()]
        rows.append([f"({setting}) {fig6.METHODS[name].label}", f"{cell.best.learning_rate:g}", damping, accuracy, *step])
    return table(["Method", "η", "λ", "Test accuracy (n)", *(f"Step × ∇,\n{mode}" for mode in ratios)], rows)


def fine_tuned(found: Record) -> Table:
    """The paper's table, in percent, with the time of a step over that of the gradient."""
    modes = list(found["times"])
    columns = ["Method", *(column.replace(" (", "\n(") for column in found["columns"]), *(f"Step,\n{mode}" for mode in modes)]
    rows: list[list[str]] = []
    for model, group in groupby(found["rows"], key=lambda row: str(row["model"])):
        rows.append([model, *[""] * (len(columns) - 1)])
        for row in group:
            label = f"  {row['label'].partition(',')[0]}"
            rows.append([label, *map(_shown, row["cells"]), *(_ratio(found, mode, row["method"]) for mode in modes)])
    return table(columns, rows)


def _shown(cell: Record | None) -> str:
    if cell is None or cell["mean"] is None:
        return "–" if cell is None else "diverged"
    deviation = f" ± {100 * cell['std']:.2f}" if cell["std"] is not None else ""
    diverged = f" ({cell['diverged']} diverged)" if cell.get("diverged") else ""
    return f"{100 * cell['mean']:.2f}{deviation}{diverged}"


def _ratio(found: Record, mode: str, method: str | None) -> str:
    entry = found["times"][mode]["methods"].get(method)
    return f"{entry['ratio']['median']:.2f} ×" if entry else "–"


def settings(summary: Record) -> Table:
    """Every score with the settings that were chosen for it."""
    columns = ("Method", *summary["columns"])
    rows = [Row((row["label"], *map(_cell, row["cells"])), bool(row.get("ours"))) for row in summary["rows"]]
    note = "Mean ± standard deviation over n seeds, with the settings that were chosen."
    return table(columns, rows, ("Method",), summary["title"], note)


def _cell(cell: Record | None) -> str:
    more = [f"n {cell['n']}", cell.get("settings")] if cell and cell.get("n") else []
    return spread(cell) + (f" ({', '.join(filter(None, more))})" if more else "")
