"""What a figure is: charts of Vega-Lite, controls that say what they show, and methods with one look everywhere."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Spec: TypeAlias = Mapping[str, Any]
#: By the label of a control, the label of the choice that is made.
View: TypeAlias = Mapping[str, str]

#: The palette of Okabe and Ito, which colour-blind readers can tell apart; on white, and on the page `var(--hue-…)`.
HUES = {
    "black": "#000000",
    "orange": "#e69f00",
    "sky": "#56b4e9",
    "green": "#009e73",
    "yellow": "#c9b900",
    "blue": "#0072b2",
    "red": "#d55e00",
    "pink": "#cc79a7",
    "grey": "#888888",
}
DASHED, DOTTED, MIXED = (6, 4), (2, 3), (8, 3, 2, 3)


@dataclass(frozen=True)
class Look:
    """How the lines of a method look: a key of `HUES`, dashes as Vega-Lite writes them (none: solid), a width."""

    hue: str
    dash: tuple[int, ...] = ()
    width: float = 2


#: Of optimizers that are shown with ISAAC and without.
_PAIRS = {"sgd": "black", "momentum": "sky", "adam": "blue", "adamw": "blue", "muon": "red", "soap": "pink"}
_PAIRS |= {"nesterov": "sky", "nadamw": "green", "schedule-free": "black", "kron": "grey"}
#: One look for each method, in every figure. What conditions is solid, what it is compared with is broken.
LOOKS: Mapping[str, Look] = {
    "gradient": Look("black", DASHED),
    "zeta": Look("blue"),
    "zeta_star": Look("red"),
    "kfac": Look("yellow", DOTTED),
    "foof": Look("orange", DASHED),
    "formula": Look("orange", DOTTED),
    "adam+line": Look("orange"),
    "adamw+isaac running": Look("green"),
    "muon+isaac running": Look("orange"),
    **{name: Look(hue, MIXED if name == "soap" else DASHED) for name, hue in _PAIRS.items()},
    **{f"{name}+isaac": Look(hue) for name, hue in _PAIRS.items()},
}


def look(name: str, number: int = 0) -> Look:
    """The look of a method; one that nobody has heard of gets a hue by its number, in dots and dashes."""
    return LOOKS.get(name) or Look(tuple(HUES)[number % len(HUES)], MIXED)


@dataclass(frozen=True)
class Method:
    """A method in a figure: its name there, which is also its value in the data, and its look."""

    label: str
    look: Look
    ours: bool = False


def by_method(methods: Sequence[Method], values: Sequence[Any], type: str = "nominal") -> dict[str, Any]:
    """An encoding in which each method has its value; the legend is outside of the axes."""
    scale = {"type": "ordinal", "domain": [method.label for method in methods], "range": list(values)}
    return {"field": "method", "type": type, "scale": scale, "legend": None}


def colours(methods: Sequence[Method]) -> dict[str, Any]:
    """Each in its own, wherever it is drawn."""
    return by_method(methods, [f"var(--hue-{method.look.hue})" for method in methods])


@dataclass(frozen=True)
class Choice:
    """One way to see a figure: what stands in a specification for each "$name"."""

    label: str
    values: Spec


@dataclass(frozen=True)
class Control:
    """Choices of which one is made; the first one to begin with."""

    label: str
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Chart:
    """A pair of axes, with words for those who do not see it (`alt`), and with its size in a file, in pixels.

    In its specification of Vega-Lite "$name" stands for what a control says; colours are variables of the page's style.
    """

    id: str
    title: str
    alt: str
    spec: Spec
    values: tuple[Spec, ...]
    picture: tuple[int, int] = (440, 330)


@dataclass(frozen=True)
class Figure:
    """Charts side by side, with the same controls and methods.

    Args:
        id: Of its element on the page.
        charts: At least one.
        title: Of the picture; the page has headings of its own.
        subtitle: Below that: data, scale, seeds.
        controls: What a reader can choose.
        methods: Which can be shown or not; the legend of the picture.
        views: What the picture shows of the controls, row by row; the first choice of each that a view does not name.
        caption: Below it: how to read it.
    """

    id: str
    charts: tuple[Chart, ...]
    title: str = ""
    subtitle: str = ""
    controls: tuple[Control, ...] = ()
    methods: tuple[Method, ...] = ()
    views: tuple[tuple[View, ...], ...] = (({},),)
    caption: str = ""

    @property
    def alt(self) -> str:
        """What all charts show."""
        return " ".join(dict.fromkeys(chart.alt for chart in self.charts))

    def chosen(self, view: View | None = None) -> dict[str, Any]:
        """What stands for each "$name" in this view; all methods are shown.

        Raises:
            KeyError: The view names a control or a choice that there is not.
        """
        wanted = dict(view or {})
        found: dict[str, Any] = {"rows": "true", "shown": [method.label for method in self.methods]}
        for control in self.controls:
            label = wanted.pop(control.label, control.choices[0].label)
            found |= {choice.label: choice.values for choice in control.choices}[label]
        if wanted:
            raise KeyError(f"no control {', '.join(wanted)} in {self.id}")
        return found


def identifier(*words: str) -> str:
    """A name for an element, of letters, digits and hyphens."""
    return "-".join("".join(c if c.isalnum() and c.isascii() else "-" for c in word.lower()) for word in words)
