"""What ζ* would cost on large GPTs: tables and a picture from the model, and the checks of it from their record."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from isaac_lab.charts import lines
from isaac_lab.charts.figure import Figure, Look, Method, look
from isaac_lab.charts.lines import Axis, Line, Panel
from isaac_lab.report import WORDS
from isaac_lab.report.docs import Blocks, wrapped
from isaac_lab.report.parts import Source
from isaac_lab.report.tables import Table, table
from isaac_lab.scaling.compute import plain_seconds
from isaac_lab.scaling.overhead import AUTOMATIC, LIMIT, Overhead, best, overhead
from isaac_lab.scaling.sizes import Machine, Setting, Shape, Workload
from isaac_lab.scaling.storage import plain_memory

Record = dict[str, Any]

NOTES = WORDS["scaling"]
EVERY_ROW = Setting()
#: A running average, and half of the whitening.
AVERAGED = Setting(when="step", decay=0.9, refresh=20, power=0.5)
RARE = Setting(when="step", max_rows=256, refresh=100, tf32=True)
LOOKS = {EVERY_ROW: look("gradient"), AVERAGED: look("zeta_star"), AUTOMATIC: Look("orange", "6 4"), RARE: Look("blue")}
COMPARED = (AUTOMATIC, *(Setting(**own | {"exclude": tuple(own.get("exclude", ()))}) for own in NOTES["compared"]))
COSTS = ("Compute", "Communication", "Bytes sent", "GB", "Memory")
#: Of checks; the page says what each is.
KINDS = ("flops", "traffic", "memory", "communication", "time", "device")


@dataclass(frozen=True)
class Plan:
    """What the page is about."""

    machine: Machine
    shapes: tuple[Shape, ...]
    gpus: tuple[int, ...]
    work: Workload
    limit: float = LIMIT  # the share that should not be passed

    @property
    def middle(self) -> int:
        """The number of GPUs of the tables that are about one."""
        return self.gpus[min(1, len(self.gpus) - 1)]

    def at(self, gpus: int) -> Workload:
        """The workload on so many GPUs."""
        return dataclasses.replace(self.work, gpus=gpus)


@dataclass(frozen=True)
class Cell:
    """One model on a number of GPUs."""

    shape: Shape
    gpus: int
    seconds: float  # of a plain step
    bytes: float  # of a plain step on one GPU, at its peak
    automatic: Overhead  # what `attach(model)` adds
    setting: Setting | None  # the one that stays below the limit or else the fastest that fits, if any does
    reached: bool  # whether it stays below the limit in time and bytes sent
    cost: Overhead | None  # what it adds

    @property
    def said(self) -> str:
        """The setting in words; all of them are with TF32."""
        if self.setting is None:
            return "none fits" if self.automatic.plain_fits else "the plain step does not fit"
        words = dataclasses.replace(self.setting, tf32=False).words
        return words if self.reached else f"none; fastest: {words}"


def cells(plan: Plan) -> list[Cell]:
    """Every model on every number of GPUs."""
    return [cell(shape, plan.at(gpus), plan) for shape in plan.shapes for gpus in plan.gpus]


def cell(shape: Shape, work: Workload, plan: Plan) -> Cell:
    """One model with one workload."""
    automatic = overhead(shape, work, AUTOMATIC, plan.machine)
    reached, fastest = best(shape, work, plan.machine, limit=plan.limit) if automatic.plain_fits else (None, None)
    setting = reached or fastest
    cost = None if setting is None else overhead(shape, work, setting, plan.machine)
    plain = plain_seconds(shape, work, plan.machine), sum(plain_memory(shape, work))
    return Cell(shape, work.gpus, *plain, automatic, setting, reached is not None, cost)


def automatic(found: Sequence[Cell], limit: float) -> Table:
    """Plain steps, and what `attach(model)` adds."""
    body = []
    for one in found:
        seconds = f"{one.seconds:.1f} s" if one.seconds >= 1 else f"{1e3 * one.seconds:.0f} ms"
        costs = _costs(one.automatic, limit) if one.automatic.plain_fits else ["does not fit"]
        body.append([one.shape.name, str(one.gpus), seconds, f"{one.bytes / 1e9:.1f}", *costs])
    return table(["Model", "GPUs", "Plain step", "Plain GB", *COSTS], body, ("Model",))


def chosen(found: Sequence[Cell], limit: float) -> Table:
    """What the settings below the limit add."""
    setting = f"Below {100 * limit:g} %: setting"
    body = [[one.shape.name, str(one.gpus), one.said, *(_costs(one.cost, limit) if one.cost else [])] for one in found]
    return table(["Model", "GPUs", setting, *COSTS], body, ("Model", setting))


def _costs(cost: Overhead, limit: float) -> list[str]:
    """`COSTS`; what is not below the limit is strong."""
    each = [(share, _percent(share)) for share in (cost.compute, cost.exposed, cost.moved, cost.memory)]
    *shares, memory = [text if share < limit else f"**{text}**" for share, text in each]
    return [*shares, _gigabytes(cost), memory]


def blocks(plan: Plan, record: Record, command: str) -> Blocks:
    """From the model, and from the record that `tests/scaling/scaling_checks.py` wrote; `command` fills the page."""
    found, work = cells(plan), plan.work
    known = {"first": plan.gpus[0], "last": plan.gpus[-1], "machine": plan.machine.name, "limit": 100 * plan.limit}
    known |= {"tokens": work.tokens, "length": work.length}
    known["micro"] = "one micro-batch" if work.micro_batches == 1 else f"{work.micro_batches} micro-batches"
    return {
        "plan": lambda: wrapped(NOTES["about"].format(command=command, **known)),
        "summary": lambda: _summary(plan, found),
        "automatic": lambda: automatic(found, plan.limit).markdown(),
        "chosen": lambda: chosen(found, plan.limit).markdown(),
        "settings": lambda: _settings(plan),
        "tokens": lambda: _tokens(plan),
        "assumptions": lambda: _assumptions(plan),
        **{f"checks-{kind}": partial(_checks, record, kind) for kind in KINDS},
        "record": lambda: Source.of(["results/scaling/checks.json"], [record]).markdown,
    }


def _summary(plan: Plan, found: Sequence[Cell]) -> str:
    fitting = [cell for cell in found if cell.automatic.plain_fits]
    shares = [cell.automatic.time for cell in fitting], [cell.automatic.memory for cell in fitting]
    times, memory = (f"{_percent(min(own))} to {_percent(max(own))}" for own in shares)
    every = [1 + overhead(cell.shape, plan.at(cell.gpus), EVERY_ROW, plan.machine).time for cell in fitting]
    known = {"times": times, "memory": memory, "least": min(every), "most": max(every), "tokens": plan.work.tokens}
    known |= {"limit": 100 * plan.limit, "reached": sum(cell.reached for cell in fitting), "fitting": len(fitting)}
    return "\n".join(wrapped(line.format(**known), "- ", "  ") for line in NOTES["summary"])


def _settings(plan: Plan) -> str:
    """Two tables of settings by models, time and memory, and where the time goes."""
    work, columns = plan.at(plan.middle), ["Setting", *(shape.name for shape in plan.shapes)]
    time, memory = [], []
    for setting in COMPARED:
        costs = [overhead(shape, work, setting, plan.machine) for shape in plan.shapes]
        time.append([setting.words, *(_percent(cost.time) for cost in costs)])
        memory.append([setting.words, *(_gigabytes(cost) + ("" if cost.fits else " ✗") for cost in costs)])
    largest = max(plan.shapes, key=lambda shape: shape.parameters)
    terms = overhead(largest, work, AUTOMATIC, plan.machine).seconds
    share = 100 * terms["application"] / sum(terms.values())
    first, second = (table(columns, body, ("Setting",)).markdown() for body in (time, memory))
    words = wrapped(NOTES["application"].format(model=largest.name, share=share))
    return f"On {plan.middle} GPUs, {NOTES['time']}\n\n{first}\n{NOTES['memory']}\n\n{second}\n{words}\n"


def _tokens(plan: Plan) -> str:
    body = []
    for shape in plan.shapes:
        cells = [shape.name]
        for tokens in NOTES["tokens"]:
            said = "–"
            if tokens % plan.work.length == 0:
                one = cell(shape, dataclasses.replace(plan.at(plan.middle), tokens=tokens), plan)
                said = one.said + (f": {_percent(one.cost.time)}, {_gigabytes(one.cost)} GB" if one.cost else "")
            cells.append(said)
        body.append(cells)
    columns = ["Model", *(f"{tokens:,} tokens" for tokens in NOTES["tokens"])]
    return f"On {plan.middle} GPUs:\n\n{table(columns, body).markdown()}"


def _assumptions(plan: Plan) -> str:
    known = {one.name: one.metadata for one in dataclasses.fields(plan.machine) if one.metadata}
    values = {name: f"{getattr(plan.machine, name) / about['unit']:g}" for name, about in known.items()}
    body = [[f"`{name}`", about["meaning"], values[name], about["source"]] for name, about in known.items()]
    return table(["Option", "Meaning", "Value", "Source"], body, ("Option", "Meaning", "Source")).markdown()


def _checks(record: Record, kind: str) -> str:
    body = []
    for check in (check for check in record["checks"] if check["kind"] == kind):
        predicted, measured = check["predicted"], check["measured"]
        within = f" ({check['low']:.2f}–{check['high']:.2f})" if "low" in check else ""
        share = 0.0 if predicted == measured else predicted / measured - 1 if measured else math.nan
        error = (
            "–"
            if math.isnan(share)
            else "0"
            if abs(share) < 5e-7
            else "< 0.1 %"
            if abs(share) < 5e-4
            else f"{100 * share:+.1f} %"
        )
        amounts = [_amount(value, check["unit"]) for value in (predicted, measured)]
        body.append([check["what"], check["how"], amounts[0], amounts[1] + within, error])
    return table(["What", "How", "Predicted", "Measured", "Error"], body, ("What", "How")).markdown()


def _amount(value: float, unit: str) -> str:
    if unit == "share":
        return f"{value:.2f}"
    if unit not in ("FLOP", "B"):
        return f"{value:.3g} {unit}"
    factors = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    factor, prefix = next((own for own in factors if abs(value) >= own[0]), (1, ""))
    return f"{value / factor:.4g} {prefix}{unit}"


def _percent(share: float) -> str:
    value = 100 * share
    if value == 0:
        return "0 %"
    return f"{value:,.0f} %" if value >= 10 else f"{value:.2f} %" if value >= 0.005 else "< 0.01 %"


def _gigabytes(cost: Overhead) -> str:
    value = cost.extra_bytes / 1e9
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def figure(plan: Plan) -> Figure:
    """Time and memory over the size of the model, for a few settings and for the first one below the limit."""
    work, machine, percent = plan.at(plan.middle), plan.machine, f"{100 * plan.limit:g} %"
    drawn = [
        _line(Method(setting.words, own), {shape: overhead(shape, work, setting, machine) for shape in plan.shapes})
        for setting, own in LOOKS.items()
    ]
    cells = {shape: cell(shape, work, plan) for shape in plan.shapes}
    if reached := {shape: one.cost for shape, one in cells.items() if one.reached and one.cost is not None}:
        drawn.append(_line(Method(f"the first setting below {percent}", Look("green", "2 3")), reached))
    limit_of = Method(f"limits: {percent}, and all of the GPU's memory", Look("grey", "2 3", 1.2))
    limits: dict[str, list[float | None]] = {"parameters": [shape.parameters for shape in plan.shapes]}
    for name, limit in (("time", 100 * plan.limit), ("memory", machine.memory / 1e9)):
        limits[name] = [limit for _ in plan.shapes]
    drawn.append(Line(limit_of, "limit", limits))
    alt = "What settings of ζ* add to the time and to the peak memory of a step, by size of the model."
    up = [Axis("time", "Time added, % of the plain step", ".3~r"), Axis("memory", "Peak memory added, GB per GPU", ".3~r")]
    subtitle = f"A cost model, not a measurement: {plan.middle} × {machine.name}, FSDP2, {work.tokens:,} tokens per GPU. "
    return lines.figure(
        "figure-overhead",
        [Panel("overhead", "", alt, drawn)],
        up,
        [Axis("parameters", "Parameters", ".2~s", logarithmic=True)],
        picture=(520, 400),
        views=[[{"Quantity": axis.title} for axis in up]],
        title="What ζ* would add to a training step of a GPT",
        subtitle=f"{subtitle}×: does not fit into the GPU beside the plain step.",
    )


def _line(method: Method, found: Mapping[Shape, Overhead]) -> Line:
    columns: dict[str, list[float | None]] = {
        "parameters": [shape.parameters for shape in found],
        "time": [100 * cost.time for cost in found.values()],
        "memory": [cost.extra_bytes / 1e9 for cost in found.values()],
        "diverged": [None if cost.fits else 1 for cost in found.values()],
    }
    return Line(method, "model", columns, diverged=not all(cost.fits for cost in found.values()))
