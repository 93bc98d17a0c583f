"""What the model is about: a GPT, what one GPU sees of a batch, how ζ* is set, and the machine."""

import functools
import math
from dataclasses import MISSING, dataclass, field, replace
from typing import Any, Literal, TypeAlias

Precision: TypeAlias = Literal["half", "single", "double", "factor", "eigen", "swept"]


def _at_least(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}")


@dataclass(frozen=True)
class Layer:
    """One linear layer of a GPT.

    Args:
        name: Its part in a block, or "head".
        inputs: n.
        outputs: m.
        source: Which tensor it receives; layers of one block with the same source can share a conditioner.
        copies: How many there are of it.
    """

    name: str
    inputs: int
    outputs: int
    source: str
    copies: int = 1


@dataclass(frozen=True)
class Shape:
    """A GPT.

    Args:
        name: What options and tables call it.
        depth: Blocks.
        width: Of the residual stream.
        hidden: Width inside the feed-forward part.
        vocabulary: Tokens.
        gated: Three matrices in the feed-forward part (SwiGLU) and separate q, k, v; otherwise two, and one for q, k, v.
        narrow: Width of k and v, where several heads share them; 0 for `width`.
        tied: The head is the embedding.
    """

    name: str
    depth: int
    width: int
    hidden: int
    vocabulary: int
    gated: bool = False
    narrow: int = 0
    tied: bool = False

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


#: GPT-2 and GPT-3 (small, medium, XL, 2.7B) and Llama 2 (7B, 13B, 70B) with Code Llama 34B, as their papers give them.
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("124M", 12, 768, 3072, 50257, tied=True),
        Shape("350M", 24, 1024, 4096, 50257, tied=True),
        Shape("1.3B", 24, 2048, 8192, 50257, tied=True),
        Shape("2.7B", 32, 2560, 10240, 50257, tied=True),
        Shape("7B", 32, 4096, 11008, 32000, gated=True),
        Shape("13B", 40, 5120, 13824, 32000, gated=True),
        Shape("34B", 48, 8192, 22016, 32000, gated=True, narrow=1024),
        Shape("70B", 80, 8192, 28672, 32000, gated=True, narrow=1024),
    )
}


@dataclass(frozen=True)
class Workload:
    """How it is trained.

    Args:
        gpus: G, all of them one FSDP2 group.
        tokens: Per GPU and micro-batch, T.
        length: Of a sequence.
        micro_batches: Per step.
        causal: Attention skips what is masked, which halves it; torch's own counter does not.
        reduction: Bytes per number in which FSDP2 sums gradients.
    """

    gpus: int = 64
    tokens: int = 8192
    length: int = 4096
    micro_batches: int = 1
    causal: bool = True
    reduction: int = 4

    def __post_init__(self) -> None:
        for name in ("gpus", "tokens", "length", "micro_batches"):
            _at_least(name, getattr(self, name), 1)
        if self.tokens % self.length:
            raise ValueError(f"tokens must be a multiple of length ({self.length}), got {self.tokens}")


@dataclass(frozen=True)
class Setting:
    """How ζ* is attached: the options of `isaac_newton.attach`, and one of torch's.

    Args:
        when: As in `attach`.
        sharing: As in `attach`.
        max_rows: As in `attach`.
        decay: As in `attach`; what counts here is whether it is 0.
        refresh: As in `attach`.
        power: As in `attach`; what counts here is whether it is 1.
        exclude: Names of layers that stay plain.
        all_ranks: `process_group`, with "backward": rows of all GPUs feed each conditioner.
        tf32: `torch.set_float32_matmul_precision("high")`.
        automatic: `attach` without a damping, which draws at most `max_rows` rows and keeps the norm.
    """

    when: Literal["backward", "step"] = "backward"
    sharing: Literal["expand", "reduce"] = "expand"
    max_rows: int | None = None
    decay: float = 0.0
    refresh: int = 1
    power: float = 1.0
    exclude: tuple[str, ...] = ()
    all_ranks: bool = False
    tf32: bool = False
    automatic: bool = False

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
        parts = ["attach(model)"] if self.automatic else []
        parts += [f'when="{self.when}"'] if self.when == "step" else []
        parts += [f'sharing="{self.sharing}"'] if self.sharing == "reduce" else []
        parts += [f"max_rows={self.max_rows}"] if self.max_rows is not None and not self.automatic else []
        parts += [f"decay={self.decay:g}"] if self.decay else []
        parts += [f"refresh={self.refresh}"] if self.refresh > 1 else []
        parts += [f"power={self.power:g}"] if self.power != 1 else []
        parts += [f"exclude {' and '.join(self.exclude)}"] if self.exclude else []
        parts += ["process_group"] if self.all_ranks else []
        parts += ["TF32"] if self.tf32 else []
        return ", ".join(parts) or "every row"


def _assumed(meaning: str, unit: float, source: str, default: Any = MISSING) -> Any:
    """A field of a machine: what it is, in which unit people write it, and where its value comes from."""
    return field(default=default, metadata={"meaning": meaning, "unit": unit, "source": source})


@dataclass(frozen=True)
class Machine:
    """A GPU and what connects it, or the CPU on which the model is checked. Rates are per second; bytes, not bits."""

    name: str
    half: float = _assumed("bf16 products, TFLOP/s", 1e12, "data sheet of the H100 and H200 (NVIDIA)")
    tensor_single: float = _assumed("TF32 products, TFLOP/s", 1e12, "data sheet")
    single: float = _assumed("float32 products, TFLOP/s", 1e12, "data sheet")
    double: float = _assumed("float64 products on tensor cores, TFLOP/s", 1e12, "data sheet")
    bandwidth: float = _assumed("memory, TB/s", 1e12, "data sheet")
    memory: float = _assumed("memory, GB", 1e9, "data sheet")
    nvlink: float = _assumed("NVLink, one direction, GB/s per GPU", 1e9, "data sheet: 900 GB/s in both directions together")
    network: float = _assumed("network, one direction, GB/s per GPU", 1e9, "one 400 Gb/s adapter per GPU (DGX H100 user guide)")
    per_node: int = _assumed("GPUs in a node", 1, "DGX H100 user guide", 8)
    step: float = _assumed(
        "share of the bf16 peak in a plain step", 1, "38 to 43 % on 16,384 H100 (The Llama 3 Herd of Models, 2024)", 0.4
    )
    product: float = _assumed(
        "share of the peak in a product", 1, "assumed; a small product on an H200 is under the checks", 0.7
    )
    factor: float = _assumed(
        "share of the float64 peak in a factorization", 1, "assumed, half of a product's; no measurement", 0.35
    )
    eigen: float = _assumed(
        "share of the float64 peak in an eigensolver", 1, "assumed; no measurement. Used where `power` is not 1", 0.05
    )
    copy: float = _assumed("share of the memory's bandwidth", 1, "assumed; no measurement", 0.8)
    link: float = _assumed("share of NVLink and network", 1, "assumed; no measurement", 0.8)
    column: float = _assumed(
        "µs per column of a factorization, at least", 1e-6, "between two records of an H200, under the checks", 1e-6
    )
    collective: float = _assumed("µs per collective, at least", 1e-6, "assumed; no measurement", 5e-5)
    activation: int = _assumed("bytes per number in activations", 1, "bf16", 2)
    covariance: int = _assumed("bytes per number in a covariance", 1, "the library: float32 on a GPU, float64 on a CPU", 4)
    inverse: float = _assumed(
        "FLOP of an inverse from its factor, over n³", 1, "torch solves for it with cuSOLVER; LAPACK needs 2/3", 2.0
    )
    #: Inverses of a backward pass are computed in float64 beyond `fused` rows.
    exact_inverses: bool = True
    fused: int = _assumed("rows up to which an inverse is one float32 kernel", 1, "the library", 128)
    swept: int = _assumed("rows up to which gradients are subtracted from by a kernel", 1, "the library", 256)
    subtracts: float = _assumed(
        "TFLOP/s that this kernel attains", 1e12, "BERT on an H200, `models-cuda-eager.json`; under the checks", 20e12
    )

    def __post_init__(self) -> None:
        for name in ("memory", "half", "single", "tensor_single", "double", "bandwidth", "nvlink", "network", "subtracts"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be > 0 and finite, got {getattr(self, name)}")
        for name in ("step", "product", "factor", "eigen", "copy", "link"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is a share: it must be above 0 and at most 1, got {getattr(self, name)}")

        for name in ("column", "collective", "inverse"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0 and finite, got {getattr(self, name)}")
        for name, least in (("per_node", 1), ("fused", 0), ("swept", 0)):
            _at_least(name, getattr(self, name), least)
        if self.activation not in (2, 4) or self.covariance not in (4, 8):
            sizes = f"got {self.activation} and {self.covariance}"
            raise ValueError(f"activation must be 2 or 4 bytes and covariance 4 or 8, {sizes}")

    def rate(self, precision: Precision, *, tf32: bool = False) -> float:
        """FLOP/s that are attained."""
        if precision == "half":
            return self.step * self.half
        if precision == "swept":
            return self.subtracts
        if precision == "single":
            return self.product * (self.tensor_single if tf32 else self.single)
        return {"double": self.product, "factor": self.factor, "eigen": self.eigen}[precision] * self.double

    def link_rate(self, gpus: int) -> float:
        """Bytes per second of a collective over so many GPUs: all adapters of a node work for it at once."""
        across = self.per_node * self.network if gpus > self.per_node else math.inf
        return self.link * min(self.nvlink, across)


H100 = Machine(
    "H100 SXM, 80 GB",
    memory=80e9,
    half=989e12,
    single=67e12,
    tensor_single=495e12,
    double=67e12,
    bandwidth=3.35e12,
    nvlink=450e9,
    network=50e9,
)


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
