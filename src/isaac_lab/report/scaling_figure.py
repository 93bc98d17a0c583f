"""The overhead of ζ* over the size of a model."""

from isaac_lab.charts import lines
from isaac_lab.charts.figure import Figure, Look, Method, look
from isaac_lab.charts.lines import Axis, Line
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
    drawn = [
        _line(setting.words, [(shape, overhead(shape, work, setting, machine)) for shape in plan.shapes]) for setting in LOOKS
    ]
    methods = [Method(setting.words, own) for setting, own in LOOKS.items()]
    cells = [(shape, one_cell(shape, work, plan)) for shape in plan.shapes]
    reached = [(shape, cell.cost) for shape, cell in cells if cell.reached and cell.cost is not None]
    if reached:
        methods.append(Method(f"the first setting below {percent}", Look("green", (2, 3)), ours=True))
        drawn.append(_line(methods[-1].label, reached))
    methods.append(Method(f"limits: {percent}, and all of the GPU's memory", Look("grey", (2, 3), 1.2)))
    sizes: list[float | None] = [shape.parameters for shape in plan.shapes]
    limits: list[float | None] = [100 * plan.limit] * len(sizes)
    memory: list[float | None] = [machine.memory / 1e9] * len(sizes)
    drawn.append(Line(methods[-1].label, "limit", {"parameters": sizes, "time": limits, "memory": memory}, over_seeds=True))
    alt = "What settings of ζ* add to the time and to the peak memory of a step, by size of the model."
    chart = lines.chart("overhead", "", alt, drawn, methods, [SIZE, TIME, MEMORY], picture=(520, 400))
    controls = (lines.quantities([TIME, MEMORY]), lines.scales(logarithmic_first=True), lines.axes([SIZE]))
    subtitle = (
        f"A cost model, not a measurement: {plan.middle} × {machine.name}, FSDP2, {work.tokens:,} tokens per GPU. "
        "×: does not fit into the GPU beside the plain step."
    )
    views = tuple({"Quantity": axis.title} for axis in (TIME, MEMORY))
    title = "What ζ* would add to a training step of a GPT"
    return Figure("figure-overhead", (chart,), title, subtitle, controls, tuple(methods), (views,))


def _line(label: str, found: list[tuple[Shape, Overhead]]) -> Line:
    columns: dict[str, list[float | None]] = {
        "parameters": [shape.parameters for shape, _ in found],
        "time": [100 * cost.time for _, cost in found],
        "memory": [cost.extra_bytes / 1e9 for _, cost in found],
        "diverged": [None if cost.fits else 1 for _, cost in found],
    }
    return Line(label, "model", columns, over_seeds=True, diverged=not all(cost.fits for _, cost in found))
