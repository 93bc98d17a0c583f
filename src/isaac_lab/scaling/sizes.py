"""What the model is about: a GPT, what one GPU sees of a batch, how ζ* is set, and the machine; numbers are in sizes.toml."""

import functools
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any, Literal, TypeAlias

Precision: TypeAlias = Literal["half", "single", "double", "factor", "eigen", "swept"]
_KNOWN: Mapping[str, Any] = tomllib.loads((files(__package__) / "sizes.toml").read_text(encoding="utf-8"))


def _at_least(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}")


@dataclass(frozen=True)
class Layer:
    """One linear layer of a GPT: n `inputs`, m `outputs`, so many `copies`.

    Layers of one block with the same `source`, the tensor that they receive, can share a conditioner.
    """

    name: str
    inputs: int
    outputs: int
    source: str
    copies: int = 1


@dataclass(frozen=True)
class Shape:
    """A GPT.

    A gated one has three matrices in its feed-forward part (SwiGLU) and separate q, k, v; else two, and one for q, k, v.
    """

    name: str  # what options and tables call it
    depth: int  # blocks
    width: int  # of the residual stream
    hidden: int  # width inside the feed-forward part
    vocabulary: int  # tokens
    gated: bool = False
    narrow: int = 0  # width of k and v, where several heads share them; 0 for `width`
    tied: bool = False  # the head is the embedding

    def __post_init__(self) -> None:
        for name in ("depth", "width", "hidden", "vocabulary"):
            _at_least(name, getattr(self, name), 1)

    @functools.cached_property
    def layers(self) -> tuple[Layer, ...]:
        """All linear layers."""
        d, narrow, depth = self.width, self.narrow or self.width, self.depth
        if self.gated:
            first = [Layer("q", d, d, "attention"), Layer("k", d, narrow, "attention"), Layer("v", d, narrow, "attention")]
            second = [Layer("gate", d, self.hidden, "mlp"), Layer("up", d, self.hidden, "mlp")]
        else:
            first = [Layer("qkv", d, 2 * narrow + d, "attention")]
            second = [Layer("up", d, self.hidden, "mlp")]
        block = [*first, Layer("out", d, d, "mixed"), *second, Layer("down", self.hidden, d, "hidden")]
        return *(replace(layer, copies=depth) for layer in block), Layer("head", d, self.vocabulary, "head")

    @functools.cached_property
    def block_parameters(self) -> int:
        """Weights of the linear layers of one block; norms and biases are left out."""
        return sum(layer.inputs * layer.outputs for layer in self.layers if layer.name != "head")

    @property
    def parameters(self) -> int:
        """All weights."""
        return self.depth * self.block_parameters + (1 if self.tied else 2) * self.vocabulary * self.width


SHAPES = {name: Shape(name, **own) for name, own in _KNOWN["shapes"].items()}


@dataclass(frozen=True)
class Workload:
    """How it is trained."""

    gpus: int = 64  # G, all of them one FSDP2 group
    tokens: int = 8192  # per GPU and micro-batch, T
    length: int = 4096  # of a sequence
    micro_batches: int = 1  # per step
    causal: bool = True  # attention skips what is masked, which halves it; torch's own counter does not
    reduction: int = 4  # bytes per number in which FSDP2 sums gradients

    def __post_init__(self) -> None:
        for name in ("gpus", "tokens", "length", "micro_batches"):
            _at_least(name, getattr(self, name), 1)
        if self.tokens % self.length:
            raise ValueError(f"tokens must be a multiple of length ({self.length}), got {self.tokens}")


@dataclass(frozen=True)
class Setting:
    """How ζ* is attached: options of `isaac_newton.attach`, with their names there, and others."""

    when: str = "backward"
    sharing: str = "expand"
    max_rows: int | None = None
    decay: float = 0.0  # what counts here is whether it is 0
    refresh: int = 1
    power: float = 1.0  # what counts here is whether it is 1
    exclude: tuple[str, ...] = ()  # names of layers
    all_ranks: bool = False  # with a `process_group`
    tf32: bool = False  # torch's own products
    automatic: bool = False  # `attach(model)` by itself

    def __post_init__(self) -> None:
        if self.when not in ("backward", "step"):
            raise ValueError(f"when must be 'backward' or 'step', got {self.when!r}")
        if self.sharing not in ("expand", "reduce"):
            raise ValueError(f"sharing must be 'expand' or 'reduce', got {self.sharing!r}")
        _at_least("refresh", self.refresh, 1)
        if self.max_rows is not None:
            _at_least("max_rows", self.max_rows, 1)
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay must be at least 0 and below 1, got {self.decay}")
        if not 0 < self.power <= 1:
            raise ValueError(f"power must be above 0 and at most 1, got {self.power}")
        if self.when == "backward" and (self.decay, self.refresh, self.power) != (0, 1, 1):
            raise ValueError("decay, refresh and power are for when='step'")
        if self.when == "step" and self.all_ranks:
            raise ValueError("all_ranks is for when='backward'; with when='step' all ranks count anyway")

    @property
    def takes_every_row(self) -> bool:
        """As in the library: the rows of a layer's input are themselves those of its conditioner."""
        return self.when == "backward" and self.sharing == "expand" and self.max_rows is None and not self.all_ranks

    @property
    def gathers_every(self) -> int:
        """Every how many steps rows are gathered: with an average always, otherwise before the inverse is renewed."""
        return 1 if self.decay else self.refresh

    @property
    def words(self) -> str:
        """The options that differ from those of the paper's form, as one would write them."""
        said = {
            "attach(model)": self.automatic,
            f'when="{self.when}"': self.when == "step",
            f'sharing="{self.sharing}"': self.sharing == "reduce",
            f"max_rows={self.max_rows}": self.max_rows is not None and not self.automatic,
            f"decay={self.decay:g}": self.decay,
            f"refresh={self.refresh}": self.refresh > 1,
            f"power={self.power:g}": self.power != 1,
            f"exclude {' and '.join(self.exclude)}": self.exclude,
            "process_group": self.all_ranks,
            "TF32": self.tf32,
        }
        return ", ".join(words for words, there in said.items() if there) or "every row"


def _assumed(kind: str, name: str) -> Any:
    """A field of a machine; its metadata say what it is, in which unit people write it, and where its value comes from."""
    return field(default=_KNOWN[kind][name]["value"], metadata=_KNOWN[kind][name])


#: By kind of number, what is allowed.
_RANGES: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "rates": (lambda value: 0 < value < math.inf, "must be > 0 and finite"),
    "shares": (lambda value: 0 < value <= 1, "is a share: it must be above 0 and at most 1"),
    "costs": (lambda value: 0 <= value < math.inf, "must be at least 0 and finite"),
}


@dataclass(frozen=True)
class Machine:
    """A GPU and what connects it, or the CPU on which the model is checked."""

    name: str
    half: float = _assumed("rates", "half")
    tensor_single: float = _assumed("rates", "tensor_single")
    single: float = _assumed("rates", "single")
    double: float = _assumed("rates", "double")
    bandwidth: float = _assumed("rates", "bandwidth")
    memory: float = _assumed("rates", "memory")
    nvlink: float = _assumed("rates", "nvlink")
    network: float = _assumed("rates", "network")
    per_node: int = _assumed("counts", "per_node")
    step: float = _assumed("shares", "step")
    product: float = _assumed("shares", "product")
    factor: float = _assumed("shares", "factor")
    eigen: float = _assumed("shares", "eigen")
    copy: float = _assumed("shares", "copy")
    link: float = _assumed("shares", "link")
    column: float = _assumed("costs", "column")
    collective: float = _assumed("costs", "collective")
    activation: int = _assumed("bytes", "activation")
    covariance: int = _assumed("bytes", "covariance")
    inverse: float = _assumed("costs", "inverse")
    #: Inverses of a backward pass are computed in float64 beyond `fused` rows.
    exact_inverses: bool = True
    fused: int = _assumed("counts", "fused")
    swept: int = _assumed("counts", "swept")
    subtracts: float = _assumed("rates", "subtracts")

    def __post_init__(self) -> None:
        for kind, (allowed, words) in _RANGES.items():
            for name in _KNOWN[kind]:
                if not allowed(getattr(self, name)):
                    raise ValueError(f"{name} {words}, got {getattr(self, name)}")
        for name, known in _KNOWN["counts"].items():
            _at_least(name, getattr(self, name), known["least"])
        for name, known in _KNOWN["bytes"].items():
            if getattr(self, name) not in known["allowed"]:
                raise ValueError(f"{name} must be {' or '.join(map(str, known['allowed']))} bytes, got {getattr(self, name)}")

    def rate(self, precision: Precision, *, tf32: bool = False) -> float:
        """FLOP/s that are attained."""
        return {
            "half": self.step * self.half,
            "swept": self.subtracts,
            "single": self.product * (self.tensor_single if tf32 else self.single),
            "double": self.product * self.double,
            "factor": self.factor * self.double,
            "eigen": self.eigen * self.double,
        }[precision]

    def link_rate(self, gpus: int) -> float:
        """Bytes per second of a collective over so many GPUs: all adapters of a node work for it at once."""
        across = self.per_node * self.network if gpus > self.per_node else math.inf
        return self.link * min(self.nvlink, across)


H100 = Machine("H100 SXM, 80 GB")


def conditioned(shape: Shape, setting: Setting) -> list[Layer]:
    """The layers that `exclude` leaves."""
    known = {layer.name for layer in shape.layers}
    unknown = sorted(set(setting.exclude) - known)
    if unknown:
        raise ValueError(f"exclude: no layer {', '.join(unknown)} in {shape.name}; known: {', '.join(sorted(known))}")
    return [layer for layer in shape.layers if layer.name not in setting.exclude]


def rows_of(work: Workload, setting: Setting) -> int:
    """k: rows of one micro-batch on one GPU that feed a conditioner."""
    count = work.tokens // work.length if setting.sharing == "reduce" else work.tokens
    return count if setting.max_rows is None else min(count, setting.max_rows)
