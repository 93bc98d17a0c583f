"""What the demo shows: the photograph growing sharp, curves, a table, and a sentence for each method."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from isaac_lab import times
from isaac_lab.charts import lines, mosaic
from isaac_lab.charts.draw import pictures
from isaac_lab.charts.figure import Figure, Method, look
from isaac_lab.charts.lines import Axis, Panel
from isaac_lab.record import Store
from isaac_lab.report import WORDS, parts, tables
from isaac_lab.report.docs import Blocks
from isaac_lab.report.tables import Row, Table
from isaac_lab.stats import contrast, sample
from isaac_lab.studies import demo as studies
from isaac_lab.studies.demo import FRAMES, Summary, summarize
from isaac_lab.workload import load


@dataclass(frozen=True)
class Shown:
    """What the records say, on a device: "cpu" or "cuda"."""

    summaries: Sequence[Summary]
    device: str

    @property
    def seeds(self) -> str:
        """In words."""
        count = len(self.summaries[0].records)
        return "one seed" if count == 1 else f"{count} seeds"


def write(shown: Shown, out: Path, folder: Path | None) -> None:
    """Pictures beside the records."""
    pictures(photographs(shown, folder), out / "pictures", suffixes=[".png"])
    pictures(curves(shown), out / "curves", suffixes=[".png"])


def read(store: Store, methods: Sequence[studies.Method], seeds: int, device: str) -> Shown:
    """The records, with the times of steps on this device."""
    return Shown(summarize(store, methods, seeds, times.seconds(store.times()[device])), device)


def table(shown: Shown) -> Table:
    """A row for each method."""
    columns = ["Method", "Learning\nrate", "PSNR after\n100 steps", "PSNR\nat the end", "p", "Steps to\nAdam's end"]
    rows, plain = [], shown.summaries[0]
    goal = fmean(plain.finals)
    for own in shown.summaries:
        rates = [f"{rate:.3g}" for name, rate in own.method.chosen.items() if name.endswith("rate")]
        # By measured step, the PSNR of each seed.
        found = list(zip(own.records[0].curve["step"], *(record.column("psnr") for record in own.records), strict=False))
        after = next((values for step, *values in found if step == 100), [math.nan])
        cells = [" / ".join(rates), *(_mean(values) for values in (after, own.finals))]
        cells += ["–" if own is plain or len(own.records) < 2 else f"{contrast(own.finals, plain.finals).p:.2g}"]
        steps = next((int(step or 0) for step, *values in found if fmean(values) >= goal), None)
        cells += ["never", "–"] if steps is None else [str(steps), f"{steps * own.seconds:.1f}"]
        rows.append(Row((own.method.name, *cells, f"{1e3 * own.seconds:.1f}"), "+" in own.method.method))
    note = WORDS["demo"]["table"].format(seeds=shown.seeds, device=shown.device)
    return tables.table([*columns, "Seconds", "ms"], rows, ("Method",), note=note)


def _mean(values: Sequence[float]) -> str:
    return tables.spread(sample(values), ".2f") if all(map(math.isfinite, values)) else "diverged"


def what_one_sees(shown: Shown) -> list[str]:
    """Of each method, what the seeds show against Adam, whichever way it went."""
    plain, *others = shown.summaries
    found = []
    for own in others:
        ends = f"{own.method.name} ends at {fmean(own.finals):.1f} dB, Adam at {fmean(plain.finals):.1f}"
        words = "one seed shows nothing; --seeds 8 does" if len(own.records) < 2 else contrast(own.finals, plain.finals).words
        found.append(f"{ends} ({shown.seeds}: {words}).")
    return found


def photographs(shown: Shown, folder: Path | None = None) -> Figure:
    """A row for each method, a column for each step, and the photograph itself."""
    original = load(studies.METHODS[0].trial(0), device="cpu", folder=folder).original
    cells: list[tuple[str, str, object, str]] = []
    for own in shown.summaries:
        record = own.records[0]
        for step in FRAMES:
            place = record.curve["step"].index(step) if step in record.curve["step"] else -1
            seen = record.curve["picture"][place] if record.finished else None
            cells.append(
                (own.method.name, f"{step} steps", seen, f"{record.column('psnr')[place]:.1f} dB" if seen else "diverged")
            )
        if own is shown.summaries[0]:  # in each row it would make the picture's file larger by a sixth
            cells.append((own.method.name, "the photograph", original, ""))
    rows = [
        {"row": row, "column": column, "url": f"data:image/jpeg;base64,{seen}" if seen else "", "words": words}
        for row, column, seen, words in cells
    ]
    alt = f"The photograph as fitted after {', '.join(map(str, FRAMES))} steps. " + " ".join(what_one_sees(shown))
    chart = mosaic.chart("photograph", alt, rows)
    return Figure("figure-photograph", (chart,), "A photograph growing sharp", WORDS["demo"]["photographs"])


def curves(shown: Shown) -> Figure:
    """PSNR over steps, and over seconds."""
    drawn = []
    for own in shown.summaries:
        method = Method(own.method.name, look(own.method.method))
        columns = [
            {
                "step": record.curve["step"],
                "seconds": [(step or 0.0) * own.seconds for step in record.curve["step"]],
                "psnr": record.curve["psnr"],
            }
            for record in own.records
            if record.finished
        ]
        drawn.append(lines.mean(method, columns, "step", ("psnr",)))
    device = {"cpu": "CPU core", "cuda": "GPU"}[shown.device]
    ways = [Axis("step", "Steps", ",d"), Axis("seconds", f"Seconds of training on one {device}", ".2~f")]
    bands = "" if shown.seeds == "one seed" else ", bands from the lowest to the highest"
    return lines.figure(
        "figure-psnr",
        [Panel("psnr", "", " ".join(what_one_sees(shown)), drawn)],
        [Axis("psnr", "PSNR (dB)", ".1f")],
        ways,
        logarithmic=False,
        picture=(480, 340),
        views=[[{"Horizontal": way.title} for way in ways]],
        title="PSNR over steps and over seconds",
        subtitle=f"A neural field on a photograph, every method tuned on another one; {shown.seeds}{bands}",
    )


def blocks(known: Callable[[], Shown], folder: Path) -> Blocks:
    """What fills the block of a page."""

    def block() -> str:
        shown = known()
        figures = parts.Figure(photographs(shown), "photograph"), parts.Figure(curves(shown), "psnr")
        return parts.markdown([*figures, table(shown), table(shown).note], folder)

    return {"demo": block}
