"""Figure 6 and Table 1: what their records say, as curves, dots and tables."""

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

Record = Mapping[str, Any]

#: With fewer epochs there is no end to enlarge.
FEWEST = 6
#: By the name of a way to condition. The gradient and ζ* look as everywhere.
LOOKS = {name: Look(**own) for name, own in WORDS["styles"]["larger"].items()}


def courses(summary: Record) -> Figure:
    """Accuracy over epochs, a chart for each panel: mean and standard deviation over seeds, and the end of it enlarged."""
    curves = [curve for panel in summary["panels"] for curve in panel["curves"]]
    panels = []
    for panel in summary["panels"]:
        drawn = []
        for curve in panel["curves"]:
            ends = list(zip(curve["mean"], curve["std"] or [0.0] * len(curve["mean"]), strict=True))
            columns = {"epoch": curve["epochs"], "value": curve["mean"]}
            columns |= {"value_low": [mean - std for mean, std in ends], "value_high": [mean + std for mean, std in ends]}
            method = Method(curve["label"], LOOKS.get(curve["name"]) or look(curve["name"]))
            drawn.append(Line(method, f"mean of {curve['n']} seeds", columns))
        alt = f"Curves of {len(drawn)} methods over epochs, {panel['title']}. The last values are in the table below."
        panels.append(Panel(f"fig6-{identifier(panel['name'])}", f"({panel['name']}) {panel['title']}", alt, drawn))
    epochs = max(len(curve["epochs"]) for curve in curves)
    across = [Axis("epoch", "Epochs", ",d")]
    if epochs >= FEWEST:
        across.append(Axis("epoch", "Epochs", ",d", (1 + 2 * epochs // 3, epochs), label="The last third"))
    seeds = sorted({curve["n"] for curve in curves})
    note = f"Mean over {' or '.join(map(str, seeds))} seed{'' if seeds == [1] else 's'}"
    note += "." if seeds == [1] else "; bands: one standard deviation on either side."
    return lines.figure(
        "figure-fig6",
        panels,
        [Axis("value", summary["quantity_title"], ".4~%")],
        across,
        logarithmic=False,
        picture=(420, 300),
        views=[[{"Horizontal": axis.name}] for axis in across],
        title=summary["title"],
        subtitle=f"{summary['data']} · scale “{summary['scale']}”\n{note}",
        caption=note,
    )


def scores(summary: Record) -> Figure:
    """A chart for each score: a dot for the mean, a bar of one standard deviation to either side, small dots for seeds."""
    rows = [row for row in summary["rows"] if row["method"]]
    methods = tuple(Method(row["label"], LOOKS.get(row["method"]) or look(row["method"])) for row in rows)
    charts = []
    for place, column in enumerate(summary["columns"]):
        found = []
        for row in rows:
            cell = row["cells"][place]
            if cell and cell["mean"] is not None:
                mean, deviation = 100 * cell["mean"], 100 * (cell["std"] or 0.0)
                own = {"value": mean, "low": mean - deviation, "high": mean + deviation}
                own |= {"seeds": [100 * value for value in cell["values"]], "words": f"{mean:.2f} ± {deviation:.2f} %"}
                found.append({"model": column, "method": row["label"]} | own)
        alt = f"{column}: " + "; ".join(f"{dot['method']} {dot['words']}" for dot in found) + "."
        charts.append(dots.chart(f"tab1-score-{place}", column, alt, found, methods, unit=" %", width=310))
    counts = sorted({cell["n"] for row in rows for cell in row["cells"] if cell})
    runs = " to ".join(dict.fromkeys(str(count) for count in counts[:1] + counts[-1:]))
    about = "Scores on dev in percent, more is better. Settings chosen for each method from grids that differ in size. "
    about += f"Mean ± standard deviation over {runs} seeds; small dots: single seeds." if counts else "Not run yet."
    return Figure("figure-tab1", tuple(charts), summary["title"], about, methods=methods)


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
    times = {mode: record["methods"] for mode, record in found["times"].items()}
    columns = ["Method", *(column.replace(" (", "\n(") for column in found["columns"]), *(f"Step,\n{mode}" for mode in times)]
    rows: list[list[str]] = []
    for model, group in groupby(found["rows"], key=lambda row: str(row["model"])):
        rows.append([model])
        for row in group:
            cells = [f"  {row['label'].partition(',')[0]}"]
            for cell in row["cells"]:
                shown = "–" if cell is None else "diverged"
                if cell and cell["mean"] is not None:
                    shown = f"{100 * cell['mean']:.2f}" + (f" ± {100 * cell['std']:.2f}" if cell["std"] is not None else "")
                    shown += f" ({cell['diverged']} diverged)" if cell.get("diverged") else ""
                cells.append(shown)
            steps = (own.get(row["method"]) for own in times.values())
            rows.append([*cells, *(f"{entry['ratio']['median']:.2f} ×" if entry else "–" for entry in steps)])
    return table(columns, rows)


def settings(summary: Record) -> Table:
    """Every score with the settings that were chosen for it."""
    rows = []
    for row in summary["rows"]:
        known = [(cell, f" (n {cell['n']}, {cell['settings']})") if cell and cell["n"] else None for cell in row["cells"]]
        cells = (tables.spread(own[0], "#.3g", "#.2g") + own[1] if own else "–" for own in known)
        rows.append(Row((row["label"], *cells), row["ours"]))
    note = "Mean ± standard deviation over n seeds, with the settings that were chosen."
    return table(("Method", *summary["columns"]), rows, ("Method",), summary["title"], note)
