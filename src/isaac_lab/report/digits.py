"""What the demo on digits shows: a table, a sentence for each optimizer, and its learning curves."""

from collections.abc import Sequence

from isaac_lab.charts import lines
from isaac_lab.charts.figure import Figure, Method, look
from isaac_lab.charts.lines import Axis, Line
from isaac_lab.report.tables import Row, Table
from isaac_lab.studies.digits import Summary, families

CAPTION = (
    "Mean ± standard deviation over seeds, after the last epoch. Epochs to best plain: the first epoch at which the mean "
    "training loss is at or below the lowest that the same optimizer has without ISAAC. Seconds: training steps only, median.\n"
)


def table(summaries: Sequence[Summary]) -> Table:
    """A row for each method."""
    headings = ("Method", "Training\nloss", "Test\naccuracy", "Epochs to\nbest plain", "Seconds\nper epoch")
    rows = []
    for own in summaries:
        cells = [_spread(own.train_loss, own.train_loss_spread, "#.2g")]
        cells += [_spread(own.test_accuracy, own.test_accuracy_spread, ".1%")]
        cells += ["never" if own.epochs_to_plain is None else str(own.epochs_to_plain), f"{own.seconds_per_epoch:.3f}"]
        rows.append(Row((own.method.name, *cells), own.method.conditioned))
    return Table("", headings, tuple(rows), note=CAPTION)


def _spread(mean: float, spread: float | None, style: str) -> str:
    return format(mean, style) if spread is None else f"{mean:{style}} ± {spread:{style}}"


def what_one_sees(summaries: Sequence[Summary]) -> list[str]:
    """For each optimizer, what ISAAC changed, whichever way it went."""
    return [_comparison(plain, ours) for plain, ours in families(summaries)]


def _comparison(plain: Summary, ours: Summary) -> str:
    name = plain.method.name
    pairs = zip(plain.records, ours.records, strict=True)
    better = sum(own.final("train_loss") < other.final("train_loss") for other, own in pairs)
    before, after = f"{plain.train_loss:#.2g}", f"{ours.train_loss:#.2g}"
    if ours.train_loss < plain.train_loss:
        loss = f"ISAAC lowers the training loss from {before} to {after}"
    else:
        loss = f"ISAAC does not lower the training loss: {after} with it, {before} without"
    pace = f"It never gets to the best of plain {name}"
    if ours.epochs_to_plain is not None and plain.epochs_to_plain is not None:
        pace = f"It gets to the best of plain {name} after {_pace(ours)} instead of {_pace(plain)}"
    accuracy = f"Test accuracy: {ours.test_accuracy:.1%} with it, {plain.test_accuracy:.1%} without."
    return f"{name}: {loss} (lower at {better} of {len(ours.records)} seeds). {pace}. {accuracy}"


def _pace(summary: Summary) -> str:
    epochs = summary.epochs_to_plain or 0
    return f"{epochs} epoch{'' if epochs == 1 else 's'} ({epochs * summary.seconds_per_epoch:.1f} s)"


def figure(summaries: Sequence[Summary]) -> Figure:
    """Loss on a logarithmic axis, accuracy beside it; solid lines with ISAAC."""
    methods, drawn = [], []
    for summary in summaries:
        methods.append(Method(summary.method.name, look(summary.method.method), ours=summary.method.conditioned))
        columns: list[dict[str, list[float | None]]] = [
            {
                "epoch": list(range(len(record.curve["step"]))),
                **{name: list(record.curve[name]) for name in ("train_loss", "test_accuracy")},
            }
            for record in summary.records
        ]
        over = lines.mean(summary.method.name, columns, "epoch", ("train_loss", "test_accuracy"))
        drawn += [over] if over else [Line(summary.method.name, "seed 0", columns[0], over_seeds=True)]
    # The climb from chance level would press flat what matters: where the curves end.
    ends = [own.final("test_accuracy") for summary in summaries for own in summary.records if own.finished]
    lowest = max(0.0, min(ends, default=0.1) - 0.1)
    loss, accuracy = Axis("train_loss", "Training loss", ".3~g"), Axis("test_accuracy", "Test accuracy", ".0%", (lowest, 1.0))
    epochs = Axis("epoch", "Epoch", ",d")
    controls = (lines.quantities([loss, accuracy]), lines.scales(logarithmic_first=True), lines.axes([epochs]))
    title = headline(summaries)
    chart = lines.chart("demo", "", title, drawn, methods, [epochs, loss, accuracy], picture=(480, 340))
    views = ({"Quantity": loss.title}, {"Quantity": accuracy.title, "Vertical": "Linear"})
    seeds = len(summaries[0].records)
    over_seeds = "one seed" if seeds == 1 else f"mean of {seeds} seeds, bands from lowest to highest seed"
    setting = f"5-layer ReLU network on 8 × 8 digits, every method tuned; {over_seeds}"
    return Figure("figure-demo", (chart,), title, setting, controls, tuple(methods), (views,))


def headline(summaries: Sequence[Summary]) -> str:
    """What the picture shows, in one line, whichever way it went."""
    lowered: dict[bool, list[str]] = {True: [], False: []}
    for plain, ours in families(summaries):
        lowered[ours.train_loss < plain.train_loss].append(plain.method.name)
    if not lowered[True]:
        return f"ISAAC does not lower the training loss of {' or '.join(lowered[False])}"
    exceptions = f", not of {' or '.join(lowered[False])}" if lowered[False] else ""
    return f"In this run ISAAC lowers the mean training loss of {' and '.join(lowered[True])}{exceptions}"
