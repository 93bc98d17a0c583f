"""The study of learning rates for people: its table, its picture, the block of its page."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

from isaac_lab import times
from isaac_lab.charts import lines
from isaac_lab.charts.figure import DASHED, Figure, Look, Method
from isaac_lab.charts.lines import Axis, Line, Panel
from isaac_lab.record import Store
from isaac_lab.records import StoreError
from isaac_lab.report import WORDS, parts, tables
from isaac_lab.report.docs import Blocks
from isaac_lab.report.tables import Table
from isaac_lab.stats import LEVEL, contrast, holm, sample
from isaac_lab.studies.rates import OPTIMIZERS, SCALES, Cell, cells

#: By arm of the study.
METHODS = {"plain": Method("plain", Look("black", DASHED)), "line": Method("with the line", Look("red"))}


@dataclass(frozen=True)
class Shown:
    """What the records say at a scale."""

    scale: str
    cells: Sequence[Cell]  # those that have been run whole
    p: dict[tuple[str, float], float]  # by optimizer and rate; none where a run diverged or there is one seed only
    steps: dict[str, str]  # by optimizer, what a step with the line takes relative to plain, where that was measured


def read(store: Store, scale: str) -> Shown:
    """The records."""
    found = cells(store, scale)
    if not found:
        raise StoreError(f"there is no run of these rules in {store.folder}; leave out --draw-only")
    p: dict[tuple[str, float], float] = {}
    for name in OPTIMIZERS:
        own = {str(c.rate): c for c in found if c.optimizer == name and _whole(c)}
        adjusted = holm({rate: contrast(cell.line, cell.plain).p for rate, cell in own.items()})
        p |= {(name, own[rate].rate): value for rate, value in adjusted.items()}
    timed = {"a GPU" if on == "cuda" else "one CPU core": times.seconds(record) for on, record in store.times().items()}
    steps = {
        name: ", ".join(f"{own[f'{name}+line'] / own[name]:.2f} × on {device}" for device, own in timed.items())
        for name in (OPTIMIZERS if timed else ())
    }
    return Shown(scale, found, p, steps)


def _whole(cell: Cell) -> bool:
    return min(len(cell.plain), len(cell.line)) > 1 and all(map(math.isfinite, (*cell.plain, *cell.line)))


def _gain(cell: Cell) -> float:
    return fmean(cell.line) - fmean(cell.plain)


def write(store: Store, scale: str) -> Shown:
    """Table and picture beside the records."""
    found = read(store, scale)
    parts.leave(store.folder, f"Learning rates, scale {scale}", figure(found), _shown(found))
    return found


def table(found: Shown) -> Table:
    """A row for each optimizer and rate."""
    rows = []
    for cell in found.cells:
        cells = [OPTIMIZERS[cell.optimizer]["title"], f"{cell.rate:g}"]
        for values in (cell.plain, cell.line):
            own = sample([100 * value for value in values])
            lost = f", {len(values) - own['n']} diverged" if own["n"] < len(values) else ""
            cells.append(tables.spread(own, ".1f") + lost if own["n"] else "diverged")
        p = found.p.get((cell.optimizer, cell.rate))
        gain = f"{100 * _gain(cell):+.1f}".replace("-", "−") if _whole(cell) else "–"
        rows.append((*cells, gain, "–" if p is None else f"{p:.2g}"))
    columns = ("Optimizer", "Rate", "Plain", "With the line", "Gain", "p")
    note = WORDS["rates"]["table"].format(seeds=SCALES[found.scale]["seeds"])
    return tables.table(columns, rows, ("Optimizer",), "Test accuracy by learning rate", note)


def summed_up(found: Shown) -> str:
    """At how many rates the line is better, how the best of each compare, and what a step takes."""
    gains = [_gain(cell) for cell in found.cells if found.p.get((cell.optimizer, cell.rate), 1.0) < LEVEL]
    better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
    said = [f"With the line accuracy is higher at {better} of {len(found.cells)} rates, lower at {worse} (p < {LEVEL:g})."]
    for name, own in OPTIMIZERS.items():
        mine = [cell for cell in found.cells if cell.optimizer == name and _whole(cell)]
        if mine:
            plain, line = (max((getattr(cell, arm) for cell in mine), key=fmean) for arm in ("plain", "line"))
            best = f"{100 * fmean(plain):.1f} % plain, {100 * fmean(line):.1f} % with the line"
            said.append(f"{own['title']}, best rate of each: {best} ({contrast(line, plain).words}).")
    said += [f"A step with the line takes {words} ({OPTIMIZERS[name]['title']})." for name, words in found.steps.items()]
    return " ".join(said)


def figure(found: Shown) -> Figure:
    """A chart for each optimizer; bars are standard deviations over seeds."""
    panels = []
    for name, optimizer in OPTIMIZERS.items():
        cells, drawn = [cell for cell in found.cells if cell.optimizer == name], []
        for arm, method in METHODS.items():
            rows = []
            for cell in cells:
                own = sample(getattr(cell, arm))
                ends = (own["mean"] + sign * (own["std"] or 0.0) if own["n"] else None for sign in (0, -1, 1))
                rows.append((cell.rate, *ends))
            columns = dict(zip(("rate", "accuracy", "accuracy_low", "accuracy_high"), zip(*rows, strict=True), strict=False))
            drawn.append(Line(method, f"mean of {SCALES[found.scale]['seeds']} seeds", columns))
        panels += [Panel(f"rates-{name}", optimizer["title"], summed_up(found), drawn)] if cells else []
    return lines.figure(
        f"figure-rates-{found.scale}",
        panels,
        [Axis("accuracy", "Test accuracy", ".0%")],
        [Axis("rate", "Learning rate", ".3~g", logarithmic=True)],
        logarithmic=False,
        bars=True,
        title="Test accuracy over five learning rates",
        subtitle=WORDS["rates"]["picture"].format(scale=found.scale, seeds=SCALES[found.scale]["seeds"]),
    )


def blocks(out: Path, pictures: Path) -> Blocks:
    """What fills the blocks of a page, those of a scale that has records: rates-quick, rates-standard."""

    def block(scale: str) -> str:
        found = read(Store(out / scale), scale)
        return parts.markdown([parts.Figure(figure(found), f"rates-{scale}"), *_shown(found)], pictures)

    return {f"rates-{scale}": partial(block, scale) for scale in ("quick", "standard")}


def _shown(found: Shown) -> list[parts.Block]:
    return [summed_up(found), table(found), table(found).note]
