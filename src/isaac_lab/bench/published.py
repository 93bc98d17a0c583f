"""Figures to compare with: the paper's Table 2, and the bars that this project set itself."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True)
class Published:
    """A cell of the paper's Table 2: seconds for 1,000 steps, so milliseconds per step, and the peak memory."""

    cpu: float | None
    gpu: float
    megabytes: float


_MODELS = ("100", "400", "1600", "6400", "autoencoder")


def _column(*cells: tuple[float | None, float, float]) -> dict[str, Published]:
    return {model: Published(*cell) for model, cell in zip(_MODELS, cells, strict=True)}


#: By method and model. CPU not named in the paper, GPU an A6000, batch 60.
PAPER: Mapping[str, Mapping[str, Published]] = MappingProxyType(
    {
        "gradient": _column(
            (2.05, 1.79, 1.0), (23.74, 1.84, 4.8), (187.87, 1.93, 51.0), (3439.59, 8.22, 691.0), (78.61, 2.20, 16.2)
        ),
        "kfac": _column(
            (62.78, 17.63, 11.5),
            (218.48, 32.00, 22.4),
            (6985.48, 156.48, 212.2),
            (None, 1320.81, 3155.3),
            (1207.58, 74.09, 70.7),
        ),
        "zeta": _column(
            (8.65, 11.76, 1.6), (38.67, 12.62, 7.7), (665.80, 12.53, 85.8), (9673.0, 31.87, 1197.8), (193.25, 14.19, 33.8)
        ),
        "zeta_star": _column(
            (3.34, 4.07, 1.0), (13.62, 4.19, 4.9), (291.01, 4.49, 51.4), (3451.61, 10.24, 692.5), (87.39, 4.93, 16.5)
        ),
    }
)


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


@dataclass(frozen=True)
class Bar:
    """A bar to reach: an upper bound for each case of a benchmark.

    Args:
        title: What is bounded.
        kind: The benchmark.
        mode: How it is executed.
        method: Of which method.
        quantity: "ratio": time over the plain gradient's. "memory": percent of peak memory above the plain gradient's.
            "ms": milliseconds per step.
        limits: By case.
        gpu: The GPU's name must contain this, where the bar is about one GPU.
    """

    title: str
    kind: str
    mode: str
    method: str
    quantity: Literal["ratio", "memory", "ms"]
    limits: Mapping[str, float]
    gpu: str = ""


def _bar(title: str, mode: str, method: str, limits: tuple[float, ...], quantity: Literal["ratio", "memory"] = "ratio") -> Bar:
    gpu = "H200" if mode.startswith("cuda") else ""
    return Bar(title, "table2", mode, method, quantity, dict(zip(_MODELS, limits, strict=True)), gpu)


#: λ at which the bars are set.
DAMPING = 1.0

BARS = (
    _bar("ζ* in one CUDA graph, H200", "cuda-captured", "zeta_star", (1.00, 1.00, 1.00, 1.00, 1.02)),
    _bar("ζ* eager, H200", "cuda-eager", "zeta_star", (1.4,) * 5),
    _bar("ζ in one CUDA graph, H200", "cuda-captured", "zeta", (1.6,) * 5),
    _bar("ζ*, CPU, 1 thread", "cpu-1thread", "zeta_star", (1.45, 1.12, 1.04, 1.01, 1.09)),
    _bar("ζ, CPU, 1 thread", "cpu-1thread", "zeta", (2.2, 1.7, 1.6, 1.6, 1.6)),
    _bar("Peak memory of ζ*, CPU", "cpu-1thread", "zeta_star", (2, 2, 1, 0.5, 2), "memory"),
    _bar("Peak memory of ζ*, H200", "cuda-eager", "zeta_star", (2, 2, 1, 0.5, 2), "memory"),
    Bar("ζ* reduce, BERT-shaped, CPU, 1 thread", "shapes", "cpu-1thread", "zeta_star reduce", "ratio", {"encoder": 1.05}),
    Bar("ζ* reduce, BERT-shaped, H200 eager", "shapes", "cuda-eager", "zeta_star reduce", "ratio", {"encoder": 1.05}, "H200"),
    Bar("ζ* of 182 networks at once, H200", "grid", "cuda-captured", "zeta_star", "ms", {"grid182": 2.0}, "H200"),
    Bar("the same with products in TF32", "grid", "cuda-captured", "zeta_star", "ms", {"grid182-tf32": 2.0}, "H200"),
    Bar("ζ of 182 networks at once, H200", "grid", "cuda-captured", "zeta", "ms", {"grid182": 4.0}, "H200"),
    Bar("the same with products in TF32", "grid", "cuda-captured", "zeta", "ms", {"grid182-tf32": 4.0}, "H200"),
)
