r"""What ζ* would cost on a GPT that does not fit here: compute, memory and communication under FSDP2, on paper.

The formulas follow what the library does, operator by operator; `isaac-newton scaling --measure` holds each of them against a
count or a measurement. A layer has $n$ inputs and $m$ outputs; a GPU sees $T$ tokens in a micro-batch, $k$ rows of which feed
a conditioner; there are $G$ GPUs. A number of floating-point operations is twice the number of multiply-adds.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

__all__ = [
    "H100",
    "H200",
    "LIMIT",
    "MACHINES",
    "SHAPES",
    "Layer",
    "Machine",
    "Op",
    "Overhead",
    "Setting",
    "Shape",
    "Workload",
    "best",
    "candidates",
    "conditioned",
    "gathered_bytes",
    "lasting_bytes",
    "operations",
    "overhead",
    "peak_extra",
    "plain_bytes_moved",
    "plain_flops",
    "plain_memory",
    "plain_seconds",
    "summed_bytes",
    "temporary_at_step",
    "temporary_in_backward",
]

Precision: TypeAlias = Literal["half", "single", "double", "factor", "eigen"]

#: The overhead that one would not notice.
LIMIT = 0.02


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
    """How ζ* is attached: the options of `isaac_newton.attach`, one of torch's, and two that do not exist.

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
        block: Not in the library: covariances of blocks of so many features only.
        one_per_input: Not in the library: with "step", layers that receive the same tensor share one covariance.
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
    block: int | None = None
    one_per_input: bool = False

    def __post_init__(self) -> None:
        if self.when not in ("backward", "step"):
            raise ValueError(f"when must be 'backward' or 'step', got {self.when!r}")
        if self.sharing not in ("expand", "reduce"):
            raise ValueError(f"sharing must be 'expand' or 'reduce', got {self.sharing!r}")
        _at_least("refresh", self.refresh, 1)
        for name in ("max_rows", "block"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
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
        """The options that differ from their defaults, as one would write them."""
        parts = [f'when="{self.when}"'] if self.when == "step" else []
        parts += [f'sharing="{self.sharing}"'] if self.sharing == "reduce" else []
        parts += [f"max_rows={self.max_rows}"] if self.max_rows is not None else []
        parts += [f"decay={self.decay:g}"] if self.decay else []
        parts += [f"refresh={self.refresh}"] if self.refresh > 1 else []
        parts += [f"power={self.power:g}"] if self.power != 1 else []
        parts += [f"exclude {' and '.join(self.exclude)}"] if self.exclude else []
        parts += ["process_group"] if self.all_ranks else []
        parts += ["TF32"] if self.tf32 else []
        parts += [f"blocks of {self.block}"] if self.block is not None else []
        parts += ["one covariance per input"] if self.one_per_input else []
        return ", ".join(parts) or "the defaults"


@dataclass(frozen=True)
class Machine:
    """A GPU and what connects it, or the CPU on which the model is checked. Rates are per second; bytes, not bits.

    Args:
        name: For people.
        memory: Bytes.
        half: FLOP/s of dense bf16 products.
        single: FLOP/s of float32 products.
        tensor_single: The same with TF32.
        double: FLOP/s of float64 products.
        bandwidth: Of the memory.
        nvlink: Bandwidth of one GPU to the others in its node, one direction.
        network: Of one GPU's adapter to other nodes, one direction.
        per_node: GPUs in a node.
        step: Share of `half` that a plain training step attains.
        product: Share of the peak that a large product attains.
        factor: Share of `double` that factorizations and triangular solves attain.
        eigen: Share of `double` that an eigensolver attains.
        copy: Share of `bandwidth` that element-wise operators attain.
        link: Share of `nvlink` and `network` that collectives attain.
        column: Seconds that a factorization with its inverse takes for each column at least.
        collective: Seconds that a collective takes at least.
        activation: Bytes of a number in activations, and in gradients before they are reduced.
        covariance: Bytes of a number in which Σ rᵀr is summed.
        inverse: FLOPs of the inverse from the factor, over n³: 2 where it is solved for, 2/3 where LAPACK forms it.
        exact_inverses: Inverses of a backward pass are computed in float64 beyond `fused` rows.
        fused: Up to so many rows one float32 kernel does it.
    """

    name: str
    memory: float
    half: float
    single: float
    tensor_single: float
    double: float
    bandwidth: float
    nvlink: float
    network: float
    per_node: int = 8
    step: float = 0.4
    product: float = 0.7
    factor: float = 0.35
    eigen: float = 0.05
    copy: float = 0.8
    link: float = 0.8
    column: float = 1e-6
    collective: float = 5e-5
    activation: int = 2
    covariance: int = 4
    inverse: float = 2.0
    exact_inverses: bool = True
    fused: int = 128

    def __post_init__(self) -> None:
        for name in ("memory", "half", "single", "tensor_single", "double", "bandwidth", "nvlink", "network"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be > 0 and finite, got {getattr(self, name)}")
        for name in ("step", "product", "factor", "eigen", "copy", "link"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is a share: it must be above 0 and at most 1, got {getattr(self, name)}")

        for name in ("column", "collective", "inverse"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0 and finite, got {getattr(self, name)}")
        for name, least in (("per_node", 1), ("fused", 0)):
            _at_least(name, getattr(self, name), least)
        if self.activation not in (2, 4) or self.covariance not in (4, 8):
            sizes = f"got {self.activation} and {self.covariance}"
            raise ValueError(f"activation must be 2 or 4 bytes and covariance 4 or 8, {sizes}")

    def rate(self, precision: Precision, *, tf32: bool = False) -> float:
        """FLOP/s that are attained."""
        if precision == "half":
            return self.step * self.half
        if precision == "single":
            return self.product * (self.tensor_single if tf32 else self.single)
        return {"double": self.product, "factor": self.factor, "eigen": self.eigen}[precision] * self.double

    def link_rate(self, gpus: int) -> float:
        """Bytes per second of a collective over so many GPUs: all adapters of a node work for it at once."""
        across = self.per_node * self.network if gpus > self.per_node else math.inf
        return self.link * min(self.nvlink, across)


_HOPPER = {"half": 989e12, "single": 67e12, "tensor_single": 495e12, "double": 67e12, "nvlink": 450e9, "network": 50e9}
H100 = Machine("H100 SXM, 80 GB", memory=80e9, bandwidth=3.35e12, **_HOPPER)  # type: ignore[arg-type]
H200 = Machine("H200 SXM, 141 GB", memory=141e9, bandwidth=4.8e12, **_HOPPER)  # type: ignore[arg-type]
MACHINES = {"h100": H100, "h200": H200}


@dataclass(frozen=True)
class Op:
    """Some work that ζ* adds to a step, on one GPU, averaged over steps.

    Args:
        term: What it is for.
        flops: Floating-point operations.
        precision: Of them.
        traffic: Bytes that its operators read and write.
        replaces: The plain step does this too, in bf16: the difference in time counts, and no FLOPs.
        columns: Of matrices that are factorized.
    """

    term: str
    flops: float = 0.0
    precision: Precision = "single"
    traffic: float = 0.0
    replaces: bool = False
    columns: float = 0.0

    def times(self, copies: int) -> "Op":
        """The same in several layers."""
        amounts = self.flops * copies, self.precision, self.traffic * copies, self.replaces, self.columns * copies
        return Op(self.term, *amounts)

    def seconds(self, machine: Machine, *, tf32: bool = False) -> float:
        """The slower of arithmetic, memory, and the chain of dependent columns."""
        arithmetic = self.flops / machine.rate(self.precision, tf32=tf32)
        if self.replaces:
            # The share that a plain step attains covers all that happens in it; a product alone attains more.
            return max(0.0, arithmetic - self.flops / (machine.product * machine.half))
        return max(arithmetic, self.traffic / (machine.copy * machine.bandwidth), self.columns * machine.column)


def conditioned(shape: Shape, setting: Setting) -> list[Layer]:
    """The layers that `exclude` leaves."""
    known = {layer.name for layer in shape.layers}
    unknown = sorted(set(setting.exclude) - known)
    if unknown:
        raise ValueError(f"exclude: no layer {', '.join(unknown)} in {shape.name}; known: {', '.join(sorted(known))}")
    return [layer for layer in shape.layers if layer.name not in setting.exclude]


def operations(shape: Shape, work: Workload, setting: Setting, machine: Machine) -> Iterator[Op]:
    """Everything that ζ* adds to a step on one GPU."""
    if setting.when == "step" and work.gpus == 1 and (setting.decay, setting.refresh, setting.power) == (0, 1, 1):
        raise ValueError("with when='step' one GPU alone keeps rows, not covariances, which is not modelled; use gpus >= 2")
    seen: set[str] = set()
    for layer in conditioned(shape, setting):
        leads = layer.source not in seen
        seen.add(layer.source)
        if setting.takes_every_row:
            found = _every_row(layer, work, setting, machine, leads)
        elif setting.when == "backward":
            found = _few_rows(layer, work, setting, machine, leads)
        else:
            found = _step(layer, work, setting, machine, leads or not setting.one_per_input)
        for op in found:
            yield op.times(layer.copies)
    yield _embedding(shape, work, setting, machine)


def _blocks(features: int, setting: Setting) -> tuple[int, float]:
    """The size of the covariances of a layer, and how many it has."""
    side = features if setting.block is None else min(setting.block, features)
    return side, features / side


def _rows(work: Workload, setting: Setting) -> int:
    """k: rows of one micro-batch on one GPU that feed a conditioner."""
    count = work.tokens // work.length if setting.sharing == "reduce" else work.tokens
    return count if setting.max_rows is None else min(count, setting.max_rows)


def _cast(numbers: float, machine: Machine) -> float:
    """Bytes to bring half-precision numbers to float32, or back."""
    return 0.0 if machine.activation == 4 else (machine.activation + 4) * numbers


def _inverse(rows: float, width: float, copies: float, machine: Machine) -> Iterator[Op]:
    """The Gram matrix on the smaller side, and its inverse."""
    small, large = min(rows, width), max(rows, width)
    exact = machine.exact_inverses and small > machine.fused
    convert = 12 * small * large if exact else 0.0
    size = 8 if exact else 4
    traffic = convert + size * (small * large + small**2)
    yield Op("Gram matrix", copies * 2 * small**2 * large, "double" if exact else "single", copies * traffic)
    flops = small**3 / 3 + machine.inverse * small**3
    yield Op("factorization, inverse", copies * flops, "factor", copies * 4 * size * small**2, columns=copies * small)


def _every_row(layer: Layer, work: Workload, setting: Setting, machine: Machine, leads: bool) -> Iterator[Op]:
    """`autograd._Linear`: the weight gradient is formed through the inverse, in float32."""
    t, (side, blocks), m, passes = work.tokens, _blocks(layer.inputs, setting), layer.outputs, work.micro_batches
    n = layer.inputs
    yield Op("rows", traffic=passes * (_cast(t * n, machine) + _cast(t * m, machine)))
    if leads:
        yield from _inverse(t, side, passes * blocks, machine)
    # With every row in it, a block of features smaller than the rows is conditioned on its own side.
    flops = 2 * m * side**2 * blocks if t >= side else 2 * t**2 * min(side, m) * blocks
    traffic = 8 * m * n + 4 * side**2 * blocks if t >= side else 8 * t * min(n, m) + 4 * t**2
    yield Op("application", passes * flops, "single", passes * (traffic + _cast(m * n, machine)))
    if machine.activation != 4:
        yield Op("weight gradient in float32", passes * 2 * t * m * n, "single", replaces=True)


def _few_rows(layer: Layer, work: Workload, setting: Setting, machine: Machine, leads: bool) -> Iterator[Op]:
    """`autograd._Condition`: torch forms the gradient, and it is multiplied from the right."""
    n, m, passes = layer.inputs, layer.outputs, work.micro_batches
    k = _rows(work, setting)
    yield Op("rows", traffic=passes * _gather_traffic(n, k, work, setting, machine))
    if setting.all_ranks:
        k = k * work.gpus
    side, blocks = _blocks(n, setting)
    if leads:
        yield from _inverse(k, side, passes * blocks, machine)
    casts = 2 * _cast(m * n, machine)
    flops, traffic = 2 * m * side**2 * blocks, 8 * m * n + 4 * side**2 * blocks
    if k < side:
        flops, traffic = 4 * k * m * n + 2 * k**2 * m * blocks, 20.0 * m * n + 24 * m * k + 8 * k * n
    yield Op("application", passes * flops, "single", passes * (traffic + casts))


def _gather_traffic(n: int, k: int, work: Workload, setting: Setting, machine: Machine) -> float:
    """Bytes to make k rows of a layer's input: all of it is brought to float32 before any is averaged or drawn."""
    everything = work.tokens * n
    averaged = 4 * everything if setting.sharing == "reduce" else 0
    drawn = 8 * k * n if setting.max_rows is not None and setting.sharing == "expand" else 4 * k * n * bool(averaged)
    return _cast(everything, machine) + averaged + drawn


def _step(layer: Layer, work: Workload, setting: Setting, machine: Machine, leads: bool) -> Iterator[Op]:
    """`when="step"`: rows are gathered in the backward pass, the gradient's own rows multiplied before the optimizer."""
    n, m, wide = layer.inputs, layer.outputs / work.gpus, machine.covariance
    (side, blocks), k, passes = _blocks(n, setting), _rows(work, setting), work.micro_batches
    gathers, renews = 1 / setting.gathers_every, 1 / setting.refresh
    numbers = side**2 * blocks
    if leads:
        widened = (4 + wide) * k * n if wide != 4 else 0
        yield Op("rows", traffic=gathers * passes * (_gather_traffic(n, k, work, setting, machine) + widened))
        summed = wide * (numbers * (2 * passes - 1) + passes * 2 * k * n)
        precision: Precision = "single" if wide == 4 else "double"
        yield Op("Gram matrix", gathers * passes * 2 * k * side * n, precision, gathers * summed)
        # Mean, whether it is finite, a new average where there is none, average, choice, and a division: one after the other.
        average = 15 * wide + 6 + (0 if setting.decay else wide)
        yield Op("running average", traffic=gathers * average * numbers)
        if setting.power == 1:
            flops = side**3 / 3 + machine.inverse * side**3
            traffic = _renewal(wide) * numbers
            yield Op("factorization, inverse", renews * flops * blocks, "factor", renews * traffic, columns=renews * n)
        else:
            yield Op("factorization, inverse", renews * 9 * side**3 * blocks, "eigen", renews * 100 * numbers)
            yield Op("factorization, inverse", renews * 2 * side**3 * blocks, "double")
    yield Op("application", 2 * m * side * n, "single", 16 * m * n + 4 * numbers)


def _renewal(wide: int) -> float:
    """Bytes per number that the operators of `equations.root_conditioner` and `step._conditioner` read and write."""
    # Division, two identities, a multiple of one, the sum, factor and its check, inverse and whether it is finite, rounding.
    common = 16 + 16 + 16 + 24 + 32 + 16 + 46 + 12
    # On a GPU also the conversion, and the choice between inverse and identity, which nobody looks at there.
    return common + (0 if wide == 8 else wide + 8 + 24)


def _embedding(shape: Shape, work: Workload, setting: Setting, machine: Machine) -> Op:
    """Gradients are divided by counts, in float64 in a backward pass."""
    if setting.when == "backward":
        numbers = work.micro_batches * work.tokens * shape.width
        return Op("embedding", traffic=2 * (machine.activation + 8) * numbers)
    return Op("embedding", traffic=8 * shape.vocabulary * shape.width / work.gpus)


def _attention_flops(shape: Shape, work: Workload) -> float:
    """Scores and mixing, forward and backward, of a step on one GPU."""
    return 12 * work.micro_batches * work.tokens * work.length * shape.width * shape.depth * (0.5 if work.causal else 1.0)


def plain_flops(shape: Shape, work: Workload) -> float:
    """Of a plain step on one GPU: 6 for each weight of a linear layer and token, and attention."""
    weights = sum(layer.copies * layer.inputs * layer.outputs for layer in shape.layers)
    return 6 * work.micro_batches * work.tokens * weights + _attention_flops(shape, work)


def plain_bytes_moved(shape: Shape, work: Workload, machine: Machine) -> float:
    """Bytes that FSDP2 sends from one GPU in a plain step: blocks are gathered twice, the root once, gradients scattered."""
    blocks = shape.depth * shape.block_parameters
    root = shape.parameters - blocks
    numbers = machine.activation * (2 * blocks + root) + work.reduction * shape.parameters
    return work.micro_batches * numbers * (work.gpus - 1) / work.gpus


def plain_seconds(shape: Shape, work: Workload, machine: Machine) -> float:
    """Of a plain step: arithmetic or communication, whichever is slower, each hidden behind the other."""
    moved = plain_bytes_moved(shape, work, machine) / machine.link_rate(work.gpus)
    return max(plain_flops(shape, work) / machine.rate("half"), moved)


def plain_memory(shape: Shape, work: Workload) -> tuple[float, float]:
    """Bytes on one GPU: what is there all the time, and what is there at the peak of the backward pass beside it."""
    states = 16 * shape.parameters / work.gpus
    unsharded = 2 * (3 * shape.block_parameters + 2 * shape.vocabulary * shape.width)
    checkpoints = 2 * work.tokens * shape.width * shape.depth
    return states, unsharded + checkpoints + 34 * work.tokens * shape.width + 6 * work.tokens * shape.vocabulary


def _covariances(shape: Shape, setting: Setting) -> float:
    """Numbers in all covariances; every GPU has all of them."""
    total, seen = 0.0, set()
    for layer in conditioned(shape, setting):
        if layer.source in seen and setting.one_per_input:
            continue
        seen.add(layer.source)
        side, blocks = _blocks(layer.inputs, setting)
        total += layer.copies * side**2 * blocks
    return total


def lasting_bytes(shape: Shape, setting: Setting, machine: Machine) -> float:
    """What is kept from step to step on every GPU: averages and inverses of the linear layers."""
    if setting.when == "backward":
        return 0.0
    per_number = (machine.covariance if setting.decay else 0) + (4 if setting.refresh > 1 else 0)
    return per_number * _covariances(shape, setting)


def gathered_bytes(shape: Shape, setting: Setting, machine: Machine) -> float:
    """What a backward pass that gathers leaves for the step on every GPU."""
    return 0.0 if setting.when == "backward" else machine.covariance * _covariances(shape, setting)


def summed_bytes(shape: Shape, work: Workload, setting: Setting, machine: Machine) -> tuple[float, float, float]:
    """Per step: bytes that one GPU gives to all-reduce, bytes that it receives from all-gather, and how many collectives."""
    if work.gpus == 1:
        return 0.0, 0.0, 0.0
    layers = conditioned(shape, setting)
    if setting.when == "backward":
        if not setting.all_ranks:
            return 0.0, 0.0, 0.0
        leaders = {layer.source: layer for layer in layers}.values()
        rows = _rows(work, setting) * work.gpus
        received = sum(layer.copies * (4 * rows * layer.inputs + 8 * work.gpus) for layer in leaders)
        counts = sum(2 * layer.copies for layer in leaders) + 1
        return work.micro_batches * 8 * shape.vocabulary, work.micro_batches * received, work.micro_batches * counts
    sources = {layer.source: layer for layer in layers}.values() if setting.one_per_input else layers
    matrices = sum(layer.copies for layer in sources)
    given = gathered_bytes(shape, setting, machine) + 8 * matrices + 8 * (shape.vocabulary + 1)
    # One number every step says whether anybody has news.
    return given / setting.gathers_every + 8, 0.0, 2 * (matrices + 1) / setting.gathers_every + 1


def temporary_in_backward(layer: Layer, work: Workload, setting: Setting, machine: Machine) -> float:
    """Bytes that one layer needs for a moment in the backward pass, beyond what torch needs."""
    t, n, m, half = work.tokens, layer.inputs, layer.outputs, machine.activation != 4
    if not setting.takes_every_row:
        cast, rows = 4 * t * n if half else 0, 4 * _rows(work, setting) * n
        # The gradient in float32, the product that is taken off it, and the difference.
        return rows + (cast if setting.when == "step" else max(cast, (12 if half else 8) * m * n))
    side, _ = _blocks(n, setting)
    small, large = min(t, side), max(t, side)
    exact = machine.exact_inverses and small > machine.fused
    inverse = 8 * small * large + 40 * small**2 if exact else 12 * small**2
    product = 4 * small**2 + (8 * m * n if t >= side else 4 * t * min(n, m) + 4 * m * n)
    # The gradient that torch would have formed by itself is none of it.
    return (4 * t * (n + m) if half else 0) + max(inverse, product) - machine.activation * m * n


def temporary_at_step(shape: Shape, setting: Setting, machine: Machine) -> float:
    """Bytes that are there for a moment right before the optimizer's step, beyond what was gathered."""
    if setting.when == "backward":
        return 0.0
    most, freed = 0.0, 0.0
    for layer in conditioned(shape, setting):
        side, blocks = _blocks(layer.inputs, setting)
        # Six float64 matrices at once; what the layers before it had gathered is gone by then.
        most = max(most, 48 * side**2 - freed)
        freed += machine.covariance * side**2 * blocks
    return most


def peak_extra(shape: Shape, work: Workload, setting: Setting, machine: Machine) -> float:
    """Bytes by which the peak of a step rises on one GPU."""
    _, activations = plain_memory(shape, work)
    backward = max(temporary_in_backward(layer, work, setting, machine) for layer in conditioned(shape, setting))
    # The activations are gone when the optimizer steps.
    temporary = max(activations + backward, temporary_at_step(shape, setting, machine)) - activations
    return lasting_bytes(shape, setting, machine) + gathered_bytes(shape, setting, machine) + temporary


@dataclass(frozen=True)
class Overhead:
    """What ζ* adds to a step, averaged over steps; shares of the plain step's.

    Args:
        flops: Floating-point operations, whatever their precision.
        compute: Seconds of arithmetic and memory traffic.
        exposed: Seconds of communication, none of it hidden.
        moved: Bytes that a GPU sends.
        memory: Peak bytes on a GPU.
        extra_bytes: The same in bytes.
        fits: Whether the plain step and ζ* fit into the GPU.
        plain_fits: Whether the plain step does.
        seconds: By term.
    """

    flops: float
    compute: float
    exposed: float
    moved: float
    memory: float
    extra_bytes: float
    fits: bool
    plain_fits: bool
    seconds: dict[str, float] = field(default_factory=dict, hash=False)

    @property
    def time(self) -> float:
        """Share of the plain step's time."""
        return self.compute + self.exposed


def overhead(shape: Shape, work: Workload, setting: Setting, machine: Machine) -> Overhead:
    """What a setting costs."""
    seconds: dict[str, float] = {}
    flops = 0.0
    for op in operations(shape, work, setting, machine):
        seconds[op.term] = seconds.get(op.term, 0.0) + op.seconds(machine, tf32=setting.tf32)
        flops += 0 if op.replaces else op.flops
    reduced, gathered, collectives = summed_bytes(shape, work, setting, machine)
    moved = (2 * reduced + gathered) * (work.gpus - 1) / work.gpus
    exposed = moved / machine.link_rate(work.gpus) + collectives * machine.collective
    plain = plain_seconds(shape, work, machine)
    before, extra = sum(plain_memory(shape, work)), peak_extra(shape, work, setting, machine)
    return Overhead(
        flops=flops / plain_flops(shape, work),
        compute=sum(seconds.values()) / plain,
        exposed=exposed / plain,
        moved=moved / max(plain_bytes_moved(shape, work, machine), 1),
        memory=extra / before,
        extra_bytes=extra,
        fits=before + extra <= machine.memory,
        plain_fits=before <= machine.memory,
        seconds={**seconds, "communication": exposed},
    )


ROWS = (None, 4096, 1024, 256, 64, 16)
REFRESHES = (1, 5, 10, 20, 50, 100, 200, 500)
EXCLUDED: tuple[tuple[str, ...], ...] = ((), ("down",), ("down", "head"))


@functools.cache
def candidates(shape: Shape) -> tuple[Setting, ...]:
    """Settings of the library to choose from, the one that conditions most first: more weights, fresher, more rows."""
    found = []
    for exclude in EXCLUDED:
        common: dict[str, Any] = {"exclude": exclude, "tf32": True}
        found += [Setting(max_rows=rows, **common) for rows in ROWS]
        found.append(Setting(sharing="reduce", **common))
        found += [
            Setting(when="step", max_rows=rows, refresh=refresh, decay=decay, **common)
            for rows in ROWS
            for refresh in REFRESHES
            for decay in (0.9, 0.0)
        ]
    weights = {exclude: _weights(shape, exclude) for exclude in EXCLUDED}
    order = sorted(found, key=lambda one: (-weights[one.exclude], one.refresh, not one.decay, -(one.max_rows or 1e9)))
    return tuple(order)


def _weights(shape: Shape, exclude: tuple[str, ...]) -> int:
    return sum(layer.copies * layer.inputs * layer.outputs for layer in shape.layers if layer.name not in exclude)


def best(shape: Shape, work: Workload, machine: Machine, *, limit: float = LIMIT) -> tuple[Setting | None, Setting | None]:
    """The first candidate below the limit in time, bytes sent and memory, else in the first two; and the fastest that fits."""
    reached, fastest, least = None, None, math.inf
    free = machine.memory - sum(plain_memory(shape, work))
    for setting in candidates(shape):
        if peak_extra(shape, work, setting, machine) > free:
            continue
        cost = overhead(shape, work, setting, machine)
        if max(cost.time, cost.moved) < limit:
            if cost.memory < limit:
                return setting, setting
            reached = reached or setting
        if cost.time < least:
            fastest, least = setting, cost.time
    return reached, fastest
