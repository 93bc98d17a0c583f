"""What ζ* would cost on large GPTs: tables from the model, and the checks of it from their record."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from isaac_lab.report import WORDS
from isaac_lab.report.docs import wrapped
from isaac_lab.report.parts import Source
from isaac_lab.report.tables import Table, table
from isaac_lab.scaling.compute import plain_seconds
from isaac_lab.scaling.overhead import AUTOMATIC, LIMIT, Overhead, best, overhead
from isaac_lab.scaling.sizes import Machine, Setting, Shape, Workload
from isaac_lab.scaling.storage import plain_memory

Record = dict[str, Any]

EVERY_ROW = Setting()
#: A running average, and half of the whitening.
AVERAGED = Setting(when="step", decay=0.9, refresh=20, power=0.5)
RARE = Setting(when="step", max_rows=256, refresh=100, tf32=True)
COMPARED = (
    AUTOMATIC,
    *(Setting(**own | {"exclude": tuple(own.get("exclude", ()))}) for own in WORDS["scaling"]["compared"]),
)
TOKENS = WORDS["scaling"]["tokens"]
COSTS = ("Communication", "Bytes sent", "GB", "Memory")
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
    def fits(self) -> bool:
        """Whether the plain step does."""
        return self.automatic.plain_fits


def cells(plan: Plan) -> list[Cell]:
    """Every model on every number of GPUs."""
    return [cell(shape, plan.at(gpus), plan) for shape in plan.shapes for gpus in plan.gpus]


def cell(shape: Shape, work: Workload, plan: Plan) -> Cell:
    """One model with one workload."""
    automatic = overhead(shape, work, AUTOMATIC, plan.machine)
    fits = automatic.plain_fits
    reached, fastest = best(shape, work, plan.machine, limit=plan.limit) if fits else (None, None)
    setting = reached or fastest
    cost = None if setting is None else overhead(shape, work, setting, plan.machine)
    plain = plain_seconds(shape, work, plan.machine), sum(plain_memory(shape, work))
    return Cell(shape, work.gpus, *plain, automatic, setting, reached is not None, cost)


def automatic(found: Sequence[Cell], limit: float) -> Table:
    """Plain steps, and what `attach(model)` adds."""
    headings = ["Model", "GPUs", "Plain step", "Plain GB", "Compute", *COSTS]
    body = []
    for one in found:
        line = [one.shape.name, str(one.gpus), _seconds(one.seconds), f"{one.bytes / 1e9:.1f}"]
        body.append(line + (_costs(one.automatic, limit) if one.fits else ["does not fit", *[""] * len(COSTS)]))
    return table(headings, body, ("Model",))


def chosen(found: Sequence[Cell], limit: float) -> Table:
    """What the settings below the limit add."""
    headings = ["Model", "GPUs", f"Below {100 * limit:g} %: setting", "Compute", *COSTS]
    body = []
    for one in found:
        line = [one.shape.name, str(one.gpus)]
        if one.setting is None or one.cost is None:
            body.append([*line, "none fits" if one.fits else "the plain step does not fit", *[""] * (1 + len(COSTS))])
        else:
            words = _chosen(one.setting)
            body.append([*line, words if one.reached else f"none; fastest: {words}", *_costs(one.cost, limit)])
    return table(headings, body, ("Model", headings[2]))


def _costs(cost: Overhead, limit: float) -> list[str]:
    """Compute and `COSTS`."""
    shares = [_marked(share, limit) for share in (cost.compute, cost.exposed, cost.moved)]
    return [*shares, _gigabytes(cost), _marked(cost.memory, limit)]


def _chosen(setting: Setting) -> str:
    """A candidate in words; all of them are with TF32."""
    return dataclasses.replace(setting, tf32=False).words


def _marked(share: float, limit: float) -> str:
    return _percent(share) if share < limit else f"**{_percent(share)}**"


def blocks(plan: Plan, record: Record, command: str) -> dict[str, Callable[[], str]]:
    """What fills each block of the page.

    Args:
        plan: What it is about.
        record: What `tests/scaling/scaling_checks.py` wrote.
        command: The command that fills the page.
    """
    found = cells(plan)
    return {
        "plan": lambda: _about(plan, command),
        "summary": lambda: _summary(plan, found),
        "automatic": lambda: automatic(found, plan.limit).markdown(),
        "chosen": lambda: chosen(found, plan.limit).markdown(),
        "settings": lambda: _comparison(plan),
        "tokens": lambda: _tokens(plan),
        "assumptions": lambda: _assumptions(plan),
        **{f"checks-{kind}": partial(_checks, record, kind) for kind in KINDS},
        "record": lambda: Source.of(["results/scaling/checks.json"], [record]).markdown,
    }


def _about(plan: Plan, command: str) -> str:
    work = plan.work
    micro = "one micro-batch" if work.micro_batches == 1 else f"{work.micro_batches} micro-batches"
    return wrapped(
        f"On {plan.gpus[0]} to {plan.gpus[-1]} GPUs, each an {plan.machine.name}, which sees {work.tokens:,} tokens in "
        f"sequences of {work.length:,}, in {micro} per step. The limit is {100 * plan.limit:g} %. Tables are filled by "
        f"`{command}`; all of this can be set."
    )


def _summary(plan: Plan, found: Sequence[Cell]) -> str:
    fitting = [cell for cell in found if cell.fits]
    added = [cell.automatic for cell in fitting]
    every = [overhead(cell.shape, plan.at(cell.gpus), EVERY_ROW, plan.machine).time for cell in fitting]
    reached = [cell for cell in fitting if cell.reached]
    shares = [cost.time for cost in added], [cost.memory for cost in added]
    times, memory = (f"{_percent(min(own))} to {_percent(max(own))}" for own in shares)
    lines = [
        f"`attach(model)` adds {times} of a step's time, {memory} of its memory, and nothing to what is sent.",
        f"Every row (`damping=λ`, the paper's form) takes {1 + min(every):.0f} to {1 + max(every):.0f} times the plain step. "
        f"It is made for small batches. At {plan.work.tokens:,} rows Gram matrices and inverses are in float64.",
        f"Some setting adds less than {100 * plan.limit:g} % of the time in {len(reached)} of {len(fitting)} cells in which "
        "the plain step fits.",
    ]
    return "\n".join(wrapped(line, "- ", "  ") for line in lines)


def _both(settings: Sequence[Setting], plan: Plan) -> str:
    """Two tables of settings by models: time, and memory."""
    work, headings = plan.at(plan.middle), ["Setting", *(shape.name for shape in plan.shapes)]
    time, memory = [], []
    for setting in settings:
        costs = [overhead(shape, work, setting, plan.machine) for shape in plan.shapes]
        time.append([setting.words, *(_percent(cost.time) for cost in costs)])
        memory.append([setting.words, *(_gigabytes(cost) + ("" if cost.fits else " ✗") for cost in costs)])
    return (
        f"On {plan.middle} GPUs, time that is added:\n\n{table(headings, time, ('Setting',)).markdown()}\n"
        f"GB that are added at the peak of one GPU; ✗: does not fit.\n\n{table(headings, memory, ('Setting',)).markdown()}"
    )


def _comparison(plan: Plan) -> str:
    largest = max(plan.shapes, key=lambda shape: shape.parameters)
    terms = overhead(largest, plan.at(plan.middle), AUTOMATIC, plan.machine).seconds
    share = 100 * terms["application"] / sum(terms.values())
    words = (
        f"With `attach(model)` at {largest.name}, {share:.0f} % of the added time is the application: 4 · 64 operations "
        "for each weight, in float32 on tensor cores."
    )
    return f"{_both(COMPARED, plan)}\n{wrapped(words)}\n"


def _tokens(plan: Plan) -> str:
    body = [[shape.name, *(_at_tokens(shape, tokens, plan) for tokens in TOKENS)] for shape in plan.shapes]
    return f"On {plan.middle} GPUs:\n\n" + table(["Model", *(f"{tokens:,} tokens" for tokens in TOKENS)], body).markdown()


def _at_tokens(shape: Shape, tokens: int, plan: Plan) -> str:
    if tokens % plan.work.length:
        return "–"
    found = cell(shape, dataclasses.replace(plan.at(plan.middle), tokens=tokens), plan)
    if not found.fits:
        return "the plain step does not fit"
    if found.setting is None or found.cost is None:
        return "none fits"
    cost = f"{_chosen(found.setting)}: {_percent(found.cost.time)}, {_gigabytes(found.cost)} GB"
    return cost if found.reached else f"none; fastest: {cost}"


def _assumptions(plan: Plan) -> str:
    known = {one.name: one.metadata for one in dataclasses.fields(plan.machine) if one.metadata}
    values = {name: f"{getattr(plan.machine, name) / about['unit']:g}" for name, about in known.items()}
    body = [[f"`{name}`", about["meaning"], values[name], about["source"]] for name, about in known.items()]
    return table(["Option", "Meaning", "Value", "Source"], body, ("Option", "Meaning", "Source")).markdown()


def _checks(record: Record, kind: str) -> str:
    body = [
        [check["what"], check["how"], _amount(check["predicted"], check["unit"]), _measured(check), _error(check)]
        for check in record["checks"]
        if check["kind"] == kind
    ]
    return table(["What", "How", "Predicted", "Measured", "Error"], body, ("What", "How")).markdown()


def _measured(check: Mapping[str, Any]) -> str:
    text = _amount(check["measured"], check["unit"])
    return f"{text} ({check['low']:.2f}–{check['high']:.2f})" if "low" in check else text


def _error(check: Mapping[str, Any]) -> str:
    predicted, measured = check["predicted"], check["measured"]
    if predicted == measured:
        return "0"
    if not measured:
        return "–"
    share = predicted / measured - 1
    return "0" if abs(share) < 5e-7 else f"{100 * share:+.1f} %" if abs(share) >= 5e-4 else "< 0.1 %"


def _amount(value: float, unit: str) -> str:
    if unit in ("FLOP", "B"):
        for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
            if abs(value) >= factor:
                return f"{value / factor:.4g} {prefix}{unit}"
        return f"{value:.4g} {unit}"
    return f"{value:.3g} {unit}" if unit != "share" else f"{value:.2f}"


def _percent(share: float) -> str:
    value = 100 * share
    if value == 0:
        return "0 %"
    return f"{value:,.0f} %" if value >= 10 else f"{value:.2f} %" if value >= 0.005 else "< 0.01 %"


def _gigabytes(cost: Overhead) -> str:
    value = cost.extra_bytes / 1e9
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{1e3 * value:.0f} ms"
