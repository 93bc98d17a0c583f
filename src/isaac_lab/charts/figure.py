"""What a figure is: charts of Vega-Lite, controls that say what they show, and methods with one look everywhere."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, TypeAlias

Spec: TypeAlias = Mapping[str, Any]
#: By the label of a control, the label of the choice that is made.
View: TypeAlias = Mapping[str, str]

_KNOWN = tomllib.loads((files(__package__) / "looks.toml").read_text(encoding="utf-8"))
HUES: Mapping[str, str] = _KNOWN["hues"]
DASHED, MIXED = "6 4", "8 3 2 3"


@dataclass(frozen=True)
class Look:
    """How the lines of a method look: a key of `HUES`, dashes as SVG writes them (none: solid), a width."""

    hue: str
    dash: str = ""
    width: float = 2


LOOKS: Mapping[str, Look] = {
    **{name: Look(**own) for name, own in _KNOWN["looks"].items()},
    **{name: Look(hue, DASHED) for name, hue in _KNOWN["pairs"].items()},
    **{f"{name}+isaac": Look(hue) for name, hue in _KNOWN["pairs"].items()},
}


def look(name: str, number: int = 0) -> Look:
    """The look of a method; one that nobody has heard of gets a hue by its number, in dots and dashes."""
    return LOOKS.get(name) or Look(tuple(HUES)[number % len(HUES)], MIXED)


@dataclass(frozen=True)
class Method:
    """A method in a figure: its name there, which is also its value in the data, and its look."""

    label: str
    look: Look


def by_method(methods: Sequence[Method], values: Sequence[Any], type: str = "nominal") -> dict[str, Any]:
    """An encoding in which each method has its value; the legend is outside of the axes."""
    scale = {"type": "ordinal", "domain": [method.label for method in methods], "range": list(values)}
    return {"field": "method", "type": type, "scale": scale, "legend": None}


def colours(methods: Sequence[Method]) -> dict[str, Any]:
    """Each in its own, wherever it is drawn."""
    return by_method(methods, [f"var(--hue-{method.look.hue})" for method in methods])


@dataclass(frozen=True)
class Control:
    """Choices of which one is made, the first one to begin with: by label, what stands in a specification for each "$name"."""

    label: str
    choices: Mapping[str, Spec]


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
    """Charts side by side, with the same controls and methods."""

    id: str
    charts: tuple[Chart, ...]
    title: str = ""  # of the picture; the page has headings of its own
    subtitle: str = ""  # data, scale, seeds
    controls: tuple[Control, ...] = ()
    methods: tuple[Method, ...] = ()  # that can be shown or not; the legend of the picture
    #: What the picture shows of the controls, row by row; the first choice of each that a view does not name.
    views: tuple[tuple[View, ...], ...] = (({},),)
    caption: str = ""  # below it: how to read it

    def chosen(self, view: View | None = None) -> dict[str, Any]:
        """What stands for each "$name" in this view; all methods are shown.

        Raises:
            KeyError: The view names a control or a choice that there is not.
        """
        wanted = dict(view or {})
        found: dict[str, Any] = {"rows": "true", "shown": [method.label for method in self.methods]}
        for control in self.controls:
            found |= control.choices[wanted.pop(control.label, next(iter(control.choices)))]
        if wanted:
            raise KeyError(f"no control {', '.join(wanted)} in {self.id}")
        return found


def layer(mark: Spec, encoding: Spec, *tests: Any) -> dict[str, Any]:
    """A layer of a chart: a mark for each row that passes the tests."""
    return {"transform": filters(*tests), "mark": mark, "encoding": encoding}


def filters(*tests: Any) -> list[dict[str, Any]]:
    """What lets through the rows that pass all tests."""
    return [{"filter": test} for test in tests]


def identifier(*words: str) -> str:
    """A name for an element, of letters, digits and hyphens."""
    return "-".join("".join(c if c.isalnum() and c.isascii() else "-" for c in word.lower()) for word in words)
