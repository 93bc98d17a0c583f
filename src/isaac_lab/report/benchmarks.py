"""Benchmark records as tables: rows for the terminal, and the Markdown page, in which every figure names its record."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from isaac_lab.bench import figure
from isaac_lab.bench.published import PAPER, paper_ratio
from isaac_lab.bench.standing import standings
from isaac_lab.bench.steps import BASELINE
from isaac_lab.charts.draw import draw
from isaac_lab.report.tables import table

__all__ = ["CAPTION", "LEFT", "blocks", "markdown", "rows"]

Record = dict[str, Any]

NAMES = {
    "gradient": "gradient",
    "paper": "ζ* as printed",
    "zeta_star": "ζ*",
    "zeta": "ζ",
    "kfac": "K-FAC, BackPACK",
    "zeta_star reduce": "ζ*, reduce",
    "zeta_star expand": "ζ*, expand",
    "zeta_star last layer": "ζ*, last layer only",
}
KINDS = ("table2", "scaling", "shapes", "models", "grid")
MODES = {"cuda-eager": "CUDA, eager", "cuda-captured": "CUDA, the whole step as one graph"}

#: Columns of words; all others hold numbers.
LEFT = ("Model", "Method", "Size", "What", "Verdict", "Record")

CAPTION = (
    "A step is zero_grad, forward, backward and the optimizer's; its time is the median over the rounds. × gradient: the time "
    "over that of the plain gradient in the same round, median (quartiles). MB: a million bytes."
)


def blocks(records: Mapping[str, Record], figures: Path) -> dict[str, Callable[[], str]]:
    """What fills each block of the page: the bars, and every record of each benchmark.

    Args:
        records: By file name, oldest first.
        figures: Directory for the pictures, beside the page.
    """
    return {"bars": lambda: _bars(records)} | {kind: partial(_records, kind, records, figures) for kind in KINDS}


def _records(kind: str, records: Mapping[str, Record], figures: Path) -> str:
    parts = []
    for name, record in records.items():
        if record.get("kind") == kind:
            parts.append(f"### {_mode(record)}\n")
            if kind == "scaling":
                picture = figures / f"bench-{Path(name).stem}.svg"
                draw(figure.figure(record), picture)
                parts.append(f"![Cost of ζ* by batch size and width]({figures.name}/{picture.name})\n")
            parts.append(markdown(name, record))
    return "\n".join(parts) or "Not measured yet."


def markdown(name: str, record: Record) -> str:
    """One record as a table, with the name of its file, its command and where it ran."""
    headings, body = rows(record)
    text = _table(headings, body)
    if record.get("left_out"):
        text += f"\nLeft out, because a point would take longer than its budget: {'; '.join(record['left_out'])}.\n"
    return f"{text}\n{_source(name, record)}\n"


def rows(record: Record, *, compact: bool = False) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of one record; `compact` for a terminal of 80 columns, without quartiles of times."""
    cases = record["cases"]
    if record["kind"] == "scaling":
        return ["Size", "gradient, ms", "ζ*, ms", "× gradient", "Multiply-adds"], [_point(case, compact) for case in cases]
    headings = ["Model", "Method", "ms/step", "× gradient"]
    published = record["kind"] == "table2"
    with_memory = any("peak_bytes" in method for case in cases for method in case["methods"])
    headings += ["Paper"] if published else []
    headings += ["Peak MB", "Above", "Paper MB"] if with_memory else []
    body = []
    for case in cases:
        for method in case["methods"]:
            cells = [case["title"], NAMES.get(method["name"], method["name"]), *_times(method, compact=compact)]
            if published:
                cells.append(_ratio(paper_ratio(case["name"], method["name"], record["mode"].split("-")[0])))
            cells += _memory(case, method) if with_memory else []
            body.append(cells)
    return headings, body


def _point(case: Record, compact: bool) -> list[str]:
    """A point of the scaling curves in one row."""
    plain, ours = (_method(case, name) or {"skipped": "–"} for name in (BASELINE, "zeta_star"))
    times, ratio = _times(ours, compact=compact)
    return [case["title"], _times(plain, compact=compact)[0], times, ratio, f"{case['theory']:.3f}"]


def _times(method: Record, *, compact: bool) -> list[str]:
    if "skipped" in method:
        return [method["skipped"], ""]
    low, median, high = (_milliseconds(method["seconds_per_step"][key]) for key in ("low", "median", "high"))
    ratio = method["ratio"]
    digits = (1 if ratio["median"] >= 10 else 2) if compact else 3
    times_gradient = f"{ratio['median']:.{digits}f} ({ratio['low']:.{digits}f}–{ratio['high']:.{digits}f})"
    if method["name"] == BASELINE:
        times_gradient = "1"
    return [median if compact else f"{median} ({low}–{high})", times_gradient]


def _milliseconds(seconds: float) -> str:
    """Three significant digits, never in the exponential form."""
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def _memory(case: Record, method: Record) -> list[str]:
    published = PAPER.get("zeta_star" if method["name"] == "paper" else method["name"], {}).get(case["name"])
    paper = f"{published.megabytes:.1f}" if published else ""
    if "peak_bytes" not in method:
        return ["", "", paper]
    above = _above(case, method)
    return [f"{method['peak_bytes'] / 1e6:.2f}", "" if above is None else f"{above:+.{2 if above < 100 else 0}f} %", paper]


def _above(case: Record, method: Record) -> float | None:
    """Percent of peak memory above the plain gradient's."""
    plain = _method(case, BASELINE)
    if plain is None or "peak_bytes" not in plain or "peak_bytes" not in method:
        return None
    return float(100 * (method["peak_bytes"] / plain["peak_bytes"] - 1))


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _bars(records: Mapping[str, Record]) -> str:
    """Every bar, what was measured, and whether it is reached; from the newest record that has the figure."""
    body: list[list[str]] = []
    for bar, case, limit, value, name in standings(records):
        unit = {"ratio": "", "memory": " %", "ms": " ms"}[bar.quantity]
        row = [bar.title, case, f"≤ {limit:g}{unit}"]
        if value is None:
            body.append([*row, "–", "not measured", ""])
            continue
        verdict = "reached" if value <= limit else f"**missed by {value - limit:.3f}{unit}**"
        body.append([*row, f"{value:.3f}{unit}", verdict, f"`{name}`"])
    return _table(["What", "Model", "Bar", "Measured", "Verdict", "Record"], body)


def _method(case: Record, name: str) -> Record | None:
    return next((method for method in case["methods"] if method["name"] == name), None)


def _mode(record: Record) -> str:
    machine = record["machine"]
    where = machine.get("gpu") or machine["cpu"] or machine["architecture"]
    threads = machine["threads"]
    how = MODES.get(record["mode"], f"CPU, {threads} thread{'' if threads == 1 else 's'}")
    return f"{how} ({where})"


def _source(name: str, record: Record) -> str:
    machine, versions = record["machine"], record["versions"]
    hardware = ", ".join(str(part) for part in (machine.get("gpu"), machine["cpu"], f"{machine['cores']} cores") if part)
    software = ", ".join(f"{package} {version}" for package, version in versions.items() if version)
    return (
        f"Record: `{name}`, {record['time'][:10]}, commit {record['commit'] or 'unknown'}. Command: `{record['command']}`. "
        f"λ = {record['settings']['damping']:g}, rounds: {record['settings']['rounds']}. {hardware}; {software}."
    )


def _table(headings: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    return table(headings, body, LEFT).markdown()
