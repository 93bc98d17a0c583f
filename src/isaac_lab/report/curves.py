"""Learning curves of the demo: training loss and test accuracy by epoch, with the spread over seeds."""

from collections.abc import Sequence

from isaac_lab.charts import lines
from isaac_lab.charts.figure import Figure, Method, look
from isaac_lab.charts.lines import Axis, Line
from isaac_lab.demo import Run, Summary, families, summarize

__all__ = ["figure", "headline"]


def figure(runs: Sequence[Run]) -> Figure:
    """Loss on a logarithmic axis, accuracy beside it; solid lines with ISAAC."""
    methods, drawn = [], []
    for method in dict.fromkeys(run.method for run in runs):
        own = [run.measurements for run in runs if run.method == method]
        name = method.optimizer.lower() + ("+isaac" if method.conditioned else "")
        methods.append(Method(method.name, look(name), ours=method.conditioned))
        columns = [
            {name: [getattr(m, name) for m in measurements] for name in ("epoch", "train_loss", "test_accuracy")}
            for measurements in own
        ]
        over = lines.mean(method.name, columns, "epoch", ("train_loss", "test_accuracy"))
        drawn += [over] if over else [Line(method.name, "seed 0", columns[0], over_seeds=True)]
    # The climb from chance level would press flat what matters: where the curves end.
    lowest = max(0.0, min(run.measurements[-1].test_accuracy for run in runs) - 0.1)
    loss, accuracy = Axis("train_loss", "Training loss", ".3~g"), Axis("test_accuracy", "Test accuracy", ".0%", (lowest, 1.0))
    epochs = Axis("epoch", "Epoch", ",d")
    controls = (lines.quantities([loss, accuracy]), lines.scales(logarithmic_first=True), lines.axes([epochs]))
    chart = lines.chart("demo", "", headline(summarize(runs)), drawn, methods, [epochs, loss, accuracy], picture=(480, 340))
    views = ({"Quantity": loss.title}, {"Quantity": accuracy.title, "Vertical": "Linear"})
    subtitle = _subtitle(len({run.seed for run in runs}))
    return Figure("figure-demo", (chart,), headline(summarize(runs)), subtitle, controls, tuple(methods), (views,))


def headline(summaries: Sequence[Summary]) -> str:
    """What the picture shows, in one line, whichever way it went."""
    lowered: dict[bool, list[str]] = {True: [], False: []}
    for plain, isaac in families(summaries):
        lowered[isaac.train_loss < plain.train_loss].append(plain.method.name)
    if not lowered[True]:
        return f"ISAAC does not lower the training loss of {' or '.join(lowered[False])}"
    exceptions = f", not of {' or '.join(lowered[False])}" if lowered[False] else ""
    return f"In this run ISAAC lowers the mean training loss of {' and '.join(lowered[True])}{exceptions}"


def _subtitle(seeds: int) -> str:
    setting = "5-layer ReLU network on 8 × 8 digits, every method tuned"
    return f"{setting}; one seed" if seeds == 1 else f"{setting}; mean of {seeds} seeds, bands from lowest to highest seed"
