"""A grid of dampings as Vega-Lite: λ_g to the right with ζ* as the last column, λ_a downwards, the gradient in the corner."""

import math
from collections.abc import Sequence
from typing import Any

from isaac_lab.experiments.grids import NAMES, accuracies, losses
from isaac_lab.experiments.recipe import Outcome
from isaac_lab.page.parts import Chart, Choice, Control, Row, Table
from isaac_lab.page.words import number, percent
from isaac_lab.report.grids import Heat, colour_value, place

__all__ = ["chart", "control", "table"]

HEIGHT = 340
#: Colours of viridis above this share of the scale are too bright for white numbers.
BRIGHT = 0.55
#: Between two names in a legend, as a share of its length.
APART = 0.14
ACCURACIES = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.985, 0.99, 0.995, 0.999)
#: Dampings whose cells have room for two decimals.
FEW = 8
#: A loss of 0 has a logarithm too.
SMALLEST = 1e-300
#: Decades from the darkest to the brightest colour, at least.
SMALLEST_SPAN = 0.2


def control(outcomes: Sequence[Outcome]) -> Control:
    """Loss or accuracy; all maps of a figure have the same colours."""
    choices = [
        Choice(
            "Training loss",
            {
                "colour": "loss_colour",
                "text": "loss_text",
                "legend": "Training loss",
                "legend_label": "format(pow(10, -datum.value), '.2~g')",
            }
            | _colours(outcomes, "loss"),
        )
    ]
    if any(math.isfinite(value) for outcome in outcomes for value in accuracies(outcome).values()):
        choices.append(
            Choice(
                "Test accuracy",
                {
                    "colour": "accuracy_colour",
                    "text": "accuracy_text",
                    "legend": "Test accuracy",
                    "legend_label": "format(1 - pow(10, -datum.value), '.3~%')",
                }
                | _colours(outcomes, "accuracy"),
            )
        )
    return Control("Colour", tuple(choices))


def _colours(outcomes: Sequence[Outcome], quantity: str) -> dict[str, Any]:
    found = [value for outcome in outcomes for value in (losses if quantity == "loss" else accuracies)(outcome).values()]
    values = [colour_value(value, quantity) for value in found if math.isfinite(value)] or [0.0]
    # Differences that nobody would call one should not fill the whole scale.
    room = max(0.0, SMALLEST_SPAN - (max(values) - min(values))) / 2
    low, high = min(values) - room, max(values) + room
    field = f"datum.{quantity}_colour"
    return {
        "domain": [low, high],
        "legend_values": _legend(low, high, quantity),
        "finite": f"isValid({field})",
        "diverged": f"!isValid({field})",
        "bright": f"{field} > {low + BRIGHT * (high - low)}",
        "best": f"datum.{quantity}_best",
    }


def _legend(low: float, high: float, quantity: str) -> list[float]:
    """Round losses or accuracies, as far apart as their names are long."""
    digits = (1, 2, 5) if high - low > 1 else (1, 1.5, 2, 3, 5, 7)
    rounds = [digit * 10.0**decade for decade in range(-9, 4) for digit in digits] if quantity == "loss" else ACCURACIES
    shown: list[float] = []
    for value in sorted(colour_value(value, quantity) for value in rounds):
        if low <= value <= high and (not shown or value - shown[-1] >= APART * (high - low)):
            shown.append(round(value, 6))
    return shown


def chart(id: str, outcome: Outcome) -> Chart:
    """The map of a panel; the control says of what."""
    dampings = _dampings(outcome)
    heat = Heat(outcome.panel.name, outcome.panel.title, "", dampings, losses(outcome), "loss")
    places = [place(heat, damping, damping)[0] + 0.5 for damping in (*dampings, math.inf)]
    size = len(dampings) + 1.3
    axis = {
        "values": places,
        "labelExpr": f"{[_decade(damping) for damping in (*dampings, math.inf)]}[indexof({places}, datum.value)]",
        "grid": False,
        "ticks": False,
        "domain": False,
        "labelAngle": 0,
        "labelOverlap": False,
        # Vega leaves out values beyond the number of ticks that it finds right.
        "tickCount": len(places),
    }
    scale = {"domain": [0, size], "nice": False, "zero": False}
    position = {
        "x": {"field": "x", "type": "quantitative", "title": "log₁₀ λ_g", "scale": scale, "axis": axis},
        "x2": {"field": "x2"},
        "y": {"field": "y", "type": "quantitative", "title": "log₁₀ λ_a", "scale": scale | {"reverse": True}, "axis": axis},
        "y2": {"field": "y2"},
        "tooltip": [
            {"field": name, "title": title}
            for name, title in (
                ("method", "Method"),
                ("a", "λ_a"),
                ("g", "λ_g"),
                ("loss", "Training loss"),
                ("accuracy", "Test accuracy"),
                ("rate", "Learning rate"),
                ("status", "Status"),
            )
        ],
    }
    colour = {
        "field": "$colour",
        "type": "quantitative",
        "scale": {"scheme": "viridis", "domain": "$domain", "nice": False},
        "legend": {
            "title": "$legend",
            "labelExpr": "$legend_label",
            "orient": "bottom",
            "direction": "horizontal",
            "gradientLength": {"expr": "max(100, width - 40)"},
            "gradientThickness": 8,
            "values": "$legend_values",
            "titleFontWeight": "normal",
        },
    }
    number_in_cell = {
        "type": "text",
        "fontSize": {"expr": f"min(11, width / {size} / {3.5 if len(dampings) <= FEW else 2.9})"},
        "opacity": {"expr": f"width / {size} < 24 ? 0 : 1"},
        "tooltip": None,
    }
    middle = {
        "x": {"field": "xm", "type": "quantitative", "scale": scale},
        "y": {"field": "ym", "type": "quantitative", "scale": scale | {"reverse": True}},
    }
    layers: list[dict[str, Any]] = [
        {
            "transform": [{"filter": "$finite"}],
            "mark": {"type": "rect", "stroke": "var(--paper)", "strokeWidth": 1},
            "encoding": position | {"color": colour},
        },
        {
            "transform": [{"filter": "$diverged"}],
            "mark": {"type": "rect", "stroke": "var(--paper)", "strokeWidth": 1, "fill": "var(--void)"},
            "encoding": position,
        },
        {
            "transform": [{"filter": "$best"}],
            "mark": {"type": "rect", "fill": None, "stroke": "var(--hue-red)", "strokeWidth": 2.5, "tooltip": None},
            "encoding": {channel: position[channel] for channel in ("x", "x2", "y", "y2")},
        },
        {
            "transform": [{"filter": "$finite"}],
            "mark": number_in_cell,
            "encoding": middle
            | {"text": {"field": "$text"}, "color": {"condition": {"test": "$bright", "value": "#222"}, "value": "#fff"}},
        },
        {
            "transform": [{"filter": "$diverged"}],
            "mark": number_in_cell | {"opacity": 1, "text": "×", "color": "var(--muted)"},
            "encoding": middle,
        },
    ]
    spec = {"width": "container", "height": HEIGHT, "layer": layers}
    rates = ", ".join(
        f"{NAMES[name]} {'all diverged' if rate is None else format(rate, 'g')}" for name, rate in outcome.rates.items()
    )
    title = f"({outcome.panel.name}) {outcome.panel.title} · learning rates: {rates}"
    return Chart(id, title, _description(outcome), spec, tuple(_cells(outcome, heat)))


def _cells(outcome: Outcome, heat: Heat) -> list[dict[str, Any]]:
    correct = accuracies(outcome)
    best = {*_best(losses(outcome), "loss"), *_best(correct, "accuracy")}
    decimals = 2 if len(heat.dampings) <= FEW else 1
    cells = []
    for (inputs, outputs), loss in heat.values.items():
        group = _group(inputs, outputs)
        x, y = place(heat, inputs, outputs)
        accuracy, rate = correct[inputs, outputs], outcome.rates[group]
        cells.append(
            {
                "x": x,
                "x2": x + 1,
                "xm": x + 0.5,
                "y": y,
                "y2": y + 1,
                "ym": y + 0.5,
                "method": NAMES[group],
                "a": _damping(inputs),
                "g": _damping(outputs),
                "loss": number(loss),
                "accuracy": percent(accuracy),
                "rate": "–" if rate is None else f"{rate:g}",
                "status": "finished" if math.isfinite(loss) else "diverged",
                "loss_colour": round(colour_value(loss, "loss"), 4) if math.isfinite(loss) else None,
                "accuracy_colour": round(colour_value(accuracy, "accuracy"), 4) if math.isfinite(accuracy) else None,
                "loss_text": _logarithm(loss, decimals),
                "accuracy_text": f"{100 * accuracy:.1f}" if math.isfinite(accuracy) else "",
                "loss_best": ("loss", inputs, outputs) in best,
                "accuracy_best": ("accuracy", inputs, outputs) in best,
            }
        )
    return cells


def _logarithm(loss: float, decimals: int) -> str:
    if not math.isfinite(loss):
        return ""
    # Adding 0 makes a rounded −0 a 0.
    return f"{round(math.log10(max(loss, SMALLEST)), decimals) + 0:.{decimals}f}".replace("-", "−")


def _best(values: dict[tuple[float, float], float], quantity: str) -> list[tuple[str, float, float]]:
    """The best cell of ζ and that of ζ*."""
    found = []
    for group in ("zeta", "zeta_star"):
        own = {cell: v for cell, v in values.items() if _group(*cell) == group and math.isfinite(v)}
        if own:
            cell = max(own, key=lambda cell: colour_value(own[cell], quantity))
            found.append((quantity, *cell))
    return found


def _group(inputs: float, outputs: float) -> str:
    return "gradient" if inputs == math.inf else "zeta_star" if outputs == math.inf else "zeta"


def _description(outcome: Outcome) -> str:
    values = losses(outcome)
    parts = []
    for group in ("zeta", "zeta_star", "gradient"):
        own = {cell: v for cell, v in values.items() if _group(*cell) == group and math.isfinite(v)}
        if own:
            cell = min(own, key=lambda cell: own[cell])
            at = "" if group == "gradient" else f" at λ_a {_damping(cell[0])}, λ_g {_damping(cell[1])}"
            parts.append(f"{NAMES[group]} {number(own[cell])}{at}")
    diverged = sum(not math.isfinite(value) for value in values.values())
    return (
        f"Heat map of {len(values)} cells, {outcome.panel.title}. Lowest training loss: {'; '.join(parts) or 'none'}. "
        f"Diverged: {diverged}. The numbers are in the table below."
    )


def table(outcome: Outcome) -> Table:
    """Loss and accuracy of every cell."""
    values, correct = losses(outcome), accuracies(outcome)
    outputs = [*_dampings(outcome), math.inf]

    def cell(inputs: float, output: float) -> str:
        if (inputs, output) not in values:
            return ""
        loss, accuracy = values[inputs, output], correct[inputs, output]
        if not math.isfinite(loss):
            return "diverged"
        return number(loss) + (f" ({percent(accuracy, 1)})" if math.isfinite(accuracy) else "")

    rows = tuple(Row((f"λ_a {_damping(inputs)}", *(cell(inputs, output) for output in outputs))) for inputs in outputs)
    caption = f"({outcome.panel.name}) {outcome.panel.title}: training loss (test accuracy)"
    return Table(caption, ("", *(f"λ_g {_damping(output)}" for output in outputs)), rows)


def _dampings(outcome: Outcome) -> tuple[float, ...]:
    return tuple(sorted({cell.damping for cell in outcome.panel.cells if cell.damping != math.inf}))


def _damping(value: float) -> str:
    return "∞" if value == math.inf else f"{value:g}"


def _decade(value: float) -> str:
    return "∞" if value == math.inf else f"{round(math.log10(value))}".replace("-", "−")
