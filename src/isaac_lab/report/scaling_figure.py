"""The overhead of ζ* over the size of a model, as a picture."""

from pathlib import Path
from typing import Any

from matplotlib.ticker import FuncFormatter, NullLocator

from isaac_lab.report.canvas import GREY, headline, save, sheet, wrapped
from isaac_lab.report.lines import HUES
from isaac_lab.report.scaling import AVERAGED, DEFAULTS, FEW, RARE, Plan
from isaac_lab.report.scaling import cell as one_cell
from isaac_lab.scaling import overhead

__all__ = ["draw"]


def draw(plan: Plan, path: Path) -> None:
    """Time and memory over the size of the model, as PNG and SVG."""
    gpus = plan.middle
    work, machine = plan.at(gpus), plan.machine
    lines = {
        "the defaults": (DEFAULTS, "black", "-", "o"),
        AVERAGED.words: (AVERAGED, "red", "-", "s"),
        FEW.words: (FEW, "orange", "--", "^"),
        RARE.words: (RARE, "blue", "-.", "D"),
    }
    title = "What ζ* would add to a training step of a GPT"
    subtitle = wrapped(
        f"A cost model, not a measurement: {gpus} × {machine.name}, FSDP2, {work.tokens:,} tokens per GPU. "
        "Hollow: does not fit into the GPU beside the plain step.",
        11.2,
    )
    figure = sheet(11.2, 5.9)
    free = headline(figure, title, subtitle)
    left, right = figure.subplots(1, 2)
    x = [shape.parameters for shape in plan.shapes]
    for label, (setting, hue, style, marker) in lines.items():
        costs = [overhead(shape, work, setting, machine) for shape in plan.shapes]
        for axes, values in ((left, [100 * cost.time for cost in costs]), (right, [cost.extra_bytes / 1e9 for cost in costs])):
            look: dict[str, Any] = {"color": HUES[hue], "linestyle": style, "marker": marker, "markersize": 6}
            axes.plot(x, values, linewidth=1.8, label=label, **look)
            for size, value, cost in zip(x, values, costs, strict=True):
                face = HUES[hue] if cost.fits else "white"
                axes.plot(size, value, marker=marker, color=HUES[hue], markerfacecolor=face, markersize=6, linestyle="none")
    reached = [found for shape in plan.shapes if (found := one_cell(shape, work, plan)).reached and found.cost is not None]
    sizes, costs = [one.shape.parameters for one in reached], [one.cost for one in reached if one.cost is not None]
    star: dict[str, Any] = {
        "color": HUES["green"],
        "marker": "*",
        "markersize": 11,
        "label": f"the first setting below {100 * plan.limit:g} %",
    }
    left.plot(sizes, [100 * cost.time for cost in costs], **star)
    right.plot(sizes, [cost.extra_bytes / 1e9 for cost in costs], **star)
    left.axhline(100 * plan.limit, color=GREY, linewidth=1, linestyle=":")
    left.annotate(f"{100 * plan.limit:g} %", (x[-1], 100 * plan.limit), color=GREY, va="bottom", ha="right")
    right.axhline(machine.memory / 1e9, color=GREY, linewidth=1, linestyle=":")
    right.annotate("all of the GPU's memory", (x[0], machine.memory / 1e9), color=GREY, va="bottom", ha="left")
    left.set_title("Time added, % of the plain step", loc="left", fontsize=12)
    right.set_title("Peak memory added, GB on each GPU", loc="left", fontsize=12)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(x, [shape.name for shape in plan.shapes])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.set_xlabel("Parameters", color=GREY)
        axes.grid(which="major", alpha=0.3)
        axes.tick_params(colors=GREY, which="both", labelsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*left.get_legend_handles_labels(), loc="lower center", ncols=2, frameon=False, fontsize=10, handlelength=3)
    figure.tight_layout(rect=(0, 0.16, 1, free), w_pad=3)
    save(figure, path)
