"""Figures to compare with, from published.toml: the paper's Table 2, the bars of this project, and where records stand."""

import contextlib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal, NamedTuple

from isaac_lab.bench.steps import BASELINE

Record = dict[str, Any]
_KNOWN: Mapping[str, Any] = tomllib.loads((files(__package__) / "published.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Published:
    """A cell of the paper's Table 2: milliseconds per step, and the peak memory."""

    gpu: float
    megabytes: float
    cpu: float | None = None


@dataclass(frozen=True)
class Bar:
    """A bar to reach: an upper bound for each case of a benchmark."""

    title: str
    kind: str
    mode: str
    method: str
    quantity: Literal["ratio", "memory", "ms"]
    limits: Mapping[str, float]
    gpu: str = ""


#: By method and model.
PAPER: Mapping[str, Mapping[str, Published]] = {
    method: {model: Published(**cell) for model, cell in column.items()} for method, column in _KNOWN["paper"].items()
}
BARS = tuple(Bar(**own) for own in _KNOWN["bars"])
#: λ at which the bars are set.
DAMPING = 1.0


def paper_ratio(model: str, method: str, device: str) -> float | None:
    """What the paper's Table 2 says of a method's time over the plain gradient's; None where it says nothing."""
    # Our "paper" is ζ* by the paper's own formula.
    column = PAPER.get("zeta_star" if method == "paper" else method)
    if column is None or model not in column:
        return None
    own, plain = column[model], PAPER["gradient"][model]
    if device == "cpu":
        return None if own.cpu is None or plain.cpu is None else own.cpu / plain.cpu
    return own.gpu / plain.gpu


class Standing(NamedTuple):
    """A bar in one of its cases: its limit, what the newest record has (None for nothing), and the name of that record."""

    bar: Bar
    case: str
    limit: float
    value: float | None
    record: str


def standings(records: Mapping[str, Record]) -> list[Standing]:
    """Of all bars, from records by name, oldest first."""
    return [Standing(bar, case, limit, *_measured(bar, case, records)) for bar in BARS for case, limit in bar.limits.items()]


def _measured(bar: Bar, case_name: str, records: Mapping[str, Record]) -> tuple[float | None, str]:
    for name, record in reversed(list(records.items())):
        fits = (record.get("kind"), record.get("mode")) == (bar.kind, bar.mode) and bar.gpu in record["machine"].get("gpu", "")
        # The damping decides in which precision an inverse is computed; the bars are set for one.
        if not fits or record["settings"]["damping"] != DAMPING:
            continue
        for case in record["cases"]:
            entries = {method["name"]: method for method in case["methods"] if case["name"] == case_name}
            # What was left out has no figures.
            with contextlib.suppress(KeyError):
                return _QUANTITIES[bar.quantity](entries[bar.method], entries[BASELINE]), name
    return None, ""


#: Of a method and of the plain step.
_QUANTITIES: Mapping[str, Callable[[Record, Record], float]] = {
    "ratio": lambda own, plain: float(own["ratio"]["median"]),
    "ms": lambda own, plain: 1e3 * float(own["seconds_per_step"]["median"]),
    "memory": lambda own, plain: 100 * (own["peak_bytes"] / plain["peak_bytes"] - 1),
}
