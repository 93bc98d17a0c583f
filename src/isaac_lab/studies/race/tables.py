"""The standings as tables for people: in the terminal, and in table.md with the rules below."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["caption", "headings", "markdown", "ordered", "rows", "rules", "short_headings", "stacked"]

Record = Mapping[str, Any]

#: The letters of the paper for what is tuned.
LETTERS = {"learning_rate": "η", "second_rate": "η₂", "damping": "λ"}


def ordered(summary: Record) -> list[Record]:
    """Who is at the target first in seconds comes first; then who never is, by the loss at the end; then who did not run."""

    def key(method: Record) -> tuple[int, float]:
        if not method["n"]:
            return 3, 0.0
        seconds, steps = method["seconds_to_target"], method["steps_to_target"]
        if None not in steps["values"]:
            return 0, steps["mean"] if seconds["mean"] is None else seconds["mean"]
        final = method["final"]["mean"]
        return (1, final) if final is not None else (2, 0.0)

    return sorted(summary["methods"], key=key)


def headings(summary: Record) -> list[str]:
    """Of the columns of `rows`."""
    quantity = f"{summary['quantity_title']} at {summary['steps']:,} steps"
    metrics = summary["metric_titles"].values()
    return ["Method", "Settings", quantity, *metrics, "Steps to target", "Seconds to target", "ms per step", "n"]


def rows(summary: Record) -> list[tuple[Record, list[str]]]:
    """A row of cells for each method, and the method, the lowest at the end first; one that did not run has its reason."""

    def end(method: Record) -> tuple[bool, float]:
        mean = method["final"]["mean"] if method["n"] else None
        return not method["n"], math.inf if mean is None else mean

    return [(method, _cells(method, summary)) for method in sorted(summary["methods"], key=end)]


def _cells(method: Record, summary: Record) -> list[str]:
    if not method["n"]:
        return [method["label"], f"not run: {method['reason']}", *["–"] * (len(headings(summary)) - 2)]
    cells = [method["label"], _settings(method)]
    cells += [_joined(*_spread(found, style)) for found, style in _measured(method, summary)]
    cells += [_joined(*found) for found in _to_target(method)]
    each = method["seconds_per_step"]
    cells.append("–" if each is None else f"{1e3 * each:.3g} ({method['mode']})")
    diverged = f", {method['diverged']} diverged" if method["diverged"] else ""
    return [*cells, f"{method['n']}{diverged}"]


def short_headings(summary: Record) -> list[str]:
    """Of the columns of `stacked`."""
    names = ["Method", "Steps\nto it", "Seconds\nto it", "× AdamW\nsteps", "× AdamW\nseconds"]
    others = [summary["quantity_title"], *summary["metric_titles"].values()]
    return [*names, *(title.replace(" ", "\n", 1).replace("accuracy", "acc.") for title in others), "ms per\nstep"]


def stacked(summary: Record) -> list[tuple[Record, list[str]]]:
    """The same in fewer columns, for a terminal: below each number how far the seeds differ. Those that ran alone."""
    found = []
    for method in ordered(summary):
        if not method["n"]:
            continue
        diverged = f"\n{method['diverged']} of {method['n']} diverged" if method["diverged"] else ""
        cells = [f"{method['label']}\n{_settings(method)}{diverged}"]
        cells += ["\n".join(found) for found in _to_target(method)]
        for key in ("steps", "seconds"):
            ratio = method["speed_up"][key]
            bound = "≥" if ratio and ratio["at_least"] else ""
            cells.append(f"{bound}{ratio['ratio']:.2f}\n{ratio['low']:.1f}–{ratio['high']:.1f}" if ratio else "–")
        cells += ["\n".join(_spread(*pair)) for pair in _measured(method, summary)]
        each = method["seconds_per_step"]
        eager = "\neager" if method["mode"] != summary["mode"] else ""
        found.append((method, [*cells, "–" if each is None else f"{1e3 * each:.3g}{eager}"]))
    return found


def _measured(method: Record, summary: Record) -> list[tuple[Record, str]]:
    """The quantity and the metrics at the end, each with the form of its numbers."""
    metrics = [(method["metrics"][name], ".1%" if "accuracy" in name else ".3g") for name in summary["metric_titles"]]
    return [(method["final"], ".3g"), *metrics]


def _settings(method: Record) -> str:
    words = [f"{LETTERS[name]} {value:.2g}" for name, value in method["settings"].items()]
    return " ".join(words) + (" (edge)" if method["edge"] else "")


def _spread(found: Record, style: str) -> tuple[str, str]:
    """Mean, and ± deviation."""
    if found["mean"] is None:
        return "–", ""
    return format(found["mean"], style), "" if found["std"] is None else f"± {found['std']:{_coarse(style)}}"


def _coarse(style: str) -> str:
    return ".1g" if style == ".3g" else style


def _to_target(method: Record) -> list[tuple[str, str]]:
    """Steps and seconds, each with its spread. Nobody knows the seconds of steps that have not been timed."""
    steps = _reached(method["steps_to_target"], ",.0f")
    timed = method["seconds_per_step"] is not None
    return [steps, _reached(method["seconds_to_target"], ".3g") if timed else ("–", "")]


def _reached(found: Record, style: str) -> tuple[str, str]:
    there = [value for value in found["values"] if value is not None]
    if not there:
        return "–" if found["values"] == [] else "never", ""
    if len(there) == len(found["values"]):
        return _spread(found, style)
    # So many of the seeds reached it.
    return format(found["mean"], style), f"({len(there)} of {len(found['values'])})"


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def caption(summary: Record) -> str:
    """The rules of the race, with every range that was searched."""
    return " ".join(rules(summary))


def rules(summary: Record) -> list[str]:
    """The same, one rule each."""
    ranges: dict[str, list[str]] = {}
    for method in summary["methods"]:
        if not method["tuning"]:
            continue
        text = ", ".join(f"{LETTERS[name]} {low:g} to {high:g}" for name, (low, high) in method["ranges"].items())
        ranges.setdefault(text, []).append(method["label"])
    decay = summary["weight_decay"]
    target = "none" if summary["target"] is None else f"{summary['target']:.4g}"
    relative = "relative to the layers' inputs" if summary["relative_damping"] else "absolute"
    return [
        f"Target: {summary['quantity_title'].lower()} {target} ({summary['target_by']}).",
        f"The same network ({summary['arithmetic']}), batches of {summary['batch']}, initial weights and schedule "
        f"({summary['schedule']}) for all.",
        f"{summary['trials_per_method']} tuning trials for each method, with seed 0 over the whole budget. The mean of the "
        "last three measurements decides.",
        "Trials are evenly spaced in the logarithm where the learning rate alone is tuned. Where there are two numbers they "
        "are points of a Halton sequence: fewer values of each.",
        f"Then seeds 1 to {summary['seeds']}: mean ± standard deviation.",
        f"Steps to the target: on straight lines between {summary['measurements']} measurements. Seconds: steps × the "
        "median time of a step, with all methods taking turns. Captured: as one CUDA graph.",
        "Edge: the lowest or highest learning rate that was tried.",
        f"Weight decay: {decay['decoupled']:g} for AdamW, Muon and SOAP, {decay['added']:g} for others.",
        *(
            ["ISAAC conditions with the average position or patch of each example (`reduce`)."]
            if summary["conditioning"] == "reduce"
            else []
        ),
        f"λ of ISAAC is {relative}; where it is tuned with Muon, η₂ of AdamW beside it moves with η.",
        *(f"Searched by {', '.join(labels)}: {text}." for text, labels in ranges.items()),
    ]


def markdown(summary: Record) -> str:
    """table.md: the table, and the rules below it."""
    names = headings(summary)
    lines = [
        f"# {summary['title']}, scale {summary['scale']}",
        "",
        _line(names),
        _line(["---", "---", *["--:"] * (len(names) - 2)]),
    ]
    for method, cells in rows(summary):
        bold = [f"**{cells[0]}**", *cells[1:]] if method["ours"] else cells
        lines.append(_line(bold))
    origin = f"`{summary['command']}`,\n{summary['time']}, commit {summary['commit']}"
    said = [f"- {textwrap.fill(rule, 116, subsequent_indent='  ')}" for rule in rules(summary)]
    return "\n".join([*lines, "", *said, "", origin, ""])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
