"""The picture of a race: the loss over steps and over seconds; what has ISAAC is solid, what it is compared with broken."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from isaac_lab.charts import lines
from isaac_lab.charts.figure import Figure, Method, look
from isaac_lab.charts.lines import Axis, Line, Target
from isaac_lab.studies.race.tables import ordered
from isaac_lab.words import number

__all__ = ["figure"]

Record = Mapping[str, Any]

#: Times the largest loss of an untrained network: what lies above has diverged, and would press the rest flat.
CEILING = 1.5
#: Of the lines of ours, and of the others.
WIDTHS = {True: 2.6, False: 1.6}


def figure(summary: Record, name: str = "race") -> Figure:
    """The figure of a race; `name` is that of its chart on the page."""
    starts = [curve["loss"][0] for method in summary["methods"] for curve in method.get("curves") or () if curve["loss"]]
    ceiling = CEILING * max((loss for loss in starts if loss is not None), default=math.inf)
    methods: list[Method] = []
    drawn: list[Line] = []
    for method in ordered(summary):
        if method.get("curves"):
            ours = bool(method.get("ours"))
            own = look(_known_as(method["name"]), len(methods))
            methods.append(Method(method["label"], replace(own, width=WIDTHS[ours]), ours))
            drawn += _lines(method["label"], method["curves"], ceiling)
    title, value = summary["quantity_title"], summary.get("target")
    quantity = Axis("loss", title, ".4~g")
    fields = [Axis("step", "Steps", ",d"), Axis("seconds", "Seconds", ",.3~r")]
    target = Target(value, f"target {number(value, 3)}", summary["target_by"]) if value else None
    logarithmic = Axis("seconds", "Seconds", label="Seconds (log)", logarithmic=True)
    controls = (
        lines.axes([*fields, logarithmic]),
        lines.scales(logarithmic_first=True),
        lines.RUNS,
        lines.quantities([quantity]),
    )
    alt = (
        f"{title} of {len(methods)} methods over training, {summary['title']}. Solid lines have ISAAC. "
        f"{_ending(summary)} The numbers are in the table below."
    )
    chart = lines.chart(name, "", alt, drawn, methods, [*fields, quantity], target=target, picture=(500, 400))
    timed = any(value for line in drawn for value in line.columns["seconds"])
    views = ({"Horizontal": "Steps"}, *([{"Horizontal": logarithmic.label}] if timed else []))
    caption = "Solid: with ISAAC. Broken, same colour: the same optimizer without it."
    return Figure(f"figure-{name}", (chart,), summary["title"], _subtitle(summary), controls, tuple(methods), (views,), caption)


def _known_as(name: str) -> str:
    """The name of its look."""
    base = name.removeprefix("isaac-").removesuffix("-running")
    ours = f"{base}+isaac" if name.startswith("isaac-") else base
    return f"{ours} running" if name.endswith("-running") else ours


def _lines(label: str, curves: Sequence[Record], ceiling: float) -> list[Line]:
    """The mean over seeds, and each of them."""
    seeds = [_columns(curve, ceiling) for curve in curves]
    over = lines.mean(label, seeds, "step", ("loss",))
    each = [Line(label, f"seed {curve['seed']}", own) for curve, own in zip(curves, seeds, strict=True)]
    # Seeds that have no step in common have no mean, and are shown in place of it.
    return [*([over] if over else [replace(line, over_seeds=True) for line in each]), *each]


def _columns(curve: Record, ceiling: float) -> dict[str, list[float | None]]:
    kept = [
        (step, seconds, loss)
        for step, seconds, loss in zip(curve["steps"], curve["seconds"], curve["loss"], strict=True)
        if loss is not None and loss <= ceiling
    ]
    return {"step": [row[0] for row in kept], "seconds": [row[1] for row in kept], "loss": [row[2] for row in kept]}


def _ending(summary: Record) -> str:
    finals = [(method["final"]["mean"], method["label"]) for method in summary["methods"] if method.get("final")]
    ends = [(mean, label) for mean, label in finals if mean is not None]
    return f"Lowest at the budget: {min(ends)[1]}, {number(min(ends)[0])}." if ends else ""


def _subtitle(summary: Record) -> str:
    ran = [method for method in summary["methods"] if method["n"]]
    smoke = "A smoke test: it shows that the code runs, and nothing of the methods. " if summary["scale"] == "smoke" else ""
    left = [method["label"] for method in summary["methods"] if not method["n"]]
    missing = f" Not run: {', '.join(left)}." if left else ""
    how = "each in one CUDA graph where it can be" if summary["mode"] == "captured" else "eager"
    return (
        f"{smoke}Mean of {summary['seeds']} seeds; bands from the lowest to the highest. {len(ran)} methods, "
        f"{summary['trials_per_method']} tuning trials each. Seconds of training steps, {how}. In the legend: who reaches the "
        f"target first comes first.{missing}"
    )
