"""Figures to compare with, from published.toml: the paper's Table 2, and the bars that this project set itself."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

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
