"""The overhead of ζ* over the size of a model."""

from collections.abc import Mapping

from isaac_lab.charts import lines
from isaac_lab.charts.figure import Figure, Look, Method, look
from isaac_lab.charts.lines import Axis, Line, Panel
from isaac_lab.report.scaling import AVERAGED, EVERY_ROW, RARE, Plan
from isaac_lab.report.scaling import cell as one_cell
from isaac_lab.scaling.overhead import AUTOMATIC, Overhead, overhead
from isaac_lab.scaling.sizes import Shape

LOOKS = {EVERY_ROW: look("gradient"), AVERAGED: look("zeta_star"), AUTOMATIC: Look("orange", (6, 4)), RARE: Look("blue")}
SIZE = Axis("parameters", "Parameters", ".2~s", logarithmic=True)
TIME, MEMORY = Axis("time", "Time added, % of the plain step", ".3~r"), Axis("memory", "Peak memory added, GB per GPU", ".3~r")


def figure(plan: Plan) -> Figure:
    """Time and memory over the size of the model, for a few settings and for the first one below the limit."""
    work, machine, percent = plan.at(plan.middle), plan.machine, f"{100 * plan.limit:g} %"
    methods = [Method(setting.words, own) for setting, own in LOOKS.items()]
    drawn = [
        _line(setting.words, {shape: overhead(shape, work, setting, machine) for shape in plan.shapes}) for setting in LOOKS
    ]
    cells = {shape: one_cell(shape, work, plan) for shape in plan.shapes}
    if reached := {shape: cell.cost for shape, cell in cells.items() if cell.reached and cell.cost is not None}:
        methods.append(Method(f"the first setting below {percent}", Look("green", (2, 3)), ours=True))
        drawn.append(_line(methods[-1].label, reached))
    methods.append(Method(f"limits: {percent}, and all of the GPU's memory", Look("grey", (2, 3), 1.2)))
    limits: dict[str, list[float | None]] = {"parameters": [shape.parameters for shape in plan.shapes]}
    for name, limit in (("time", 100 * plan.limit), ("memory", machine.memory / 1e9)):
        limits[name] = [limit for _ in plan.shapes]
    drawn.append(Line(methods[-1].label, "limit", limits, over_seeds=True))
    alt = "What settings of ζ* add to the time and to the peak memory of a step, by size of the model."
    subtitle = (
        f"A cost model, not a measurement: {plan.middle} × {machine.name}, FSDP2, {work.tokens:,} tokens per GPU. "
        "×: does not fit into the GPU beside the plain step."
    )
    return lines.figure(
        "figure-overhead",
        [Panel("overhead", "", alt, drawn)],
        methods,
        [TIME, MEMORY],
        [SIZE],
        picture=(520, 400),
        views=[[{"Quantity": axis.title} for axis in (TIME, MEMORY)]],
        title="What ζ* would add to a training step of a GPT",
        subtitle=subtitle,
    )


def _line(label: str, found: Mapping[Shape, Overhead]) -> Line:
    columns: dict[str, list[float | None]] = {
        "parameters": [shape.parameters for shape in found],
        "time": [100 * cost.time for cost in found.values()],
        "memory": [cost.extra_bytes / 1e9 for cost in found.values()],
        "diverged": [None if cost.fits else 1 for cost in found.values()],
    }
    return Line(label, "model", columns, over_seeds=True, diverged=not all(cost.fits for cost in found.values()))
