"""Arithmetic and memory traffic: of a plain step, and what ζ* adds to it, operator by operator."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from isaac_lab.scaling.sizes import Layer, Machine, Precision, Setting, Shape, Workload, conditioned, rows_of
from isaac_lab.scaling.storage import plain_bytes_moved

#: Layers whose small inverses one launch computes beside each other.
_TOGETHER = 16


def plain_flops(shape: Shape, work: Workload) -> float:
    """Of a plain step on one GPU: 6 for each weight of a linear layer and token, and attention's scores and mixing."""
    weights = sum(layer.copies * layer.inputs * layer.outputs for layer in shape.layers)
    attention = 12 * work.length * shape.width * shape.depth * (0.5 if work.causal else 1.0)
    return work.micro_batches * work.tokens * (6 * weights + attention)


def plain_seconds(shape: Shape, work: Workload, machine: Machine) -> float:
    """Of a plain step: arithmetic or communication, whichever is slower, each hidden behind the other."""
    moved = plain_bytes_moved(shape, work, machine) / machine.link_rate(work.gpus)
    return max(plain_flops(shape, work) / machine.rate("half"), moved)


@dataclass(frozen=True)
class Op:
    """Some work that ζ* adds to a step, on one GPU, averaged over steps."""

    term: str  # what it is for
    flops: float = 0.0  # floating-point operations
    precision: Precision = "single"  # of them
    traffic: float = 0.0  # bytes that its operators read and write
    replaces: bool = False  # the plain step does this too, in bf16: the difference in time counts, and no FLOPs
    columns: float = 0.0  # of matrices that are factorized

    def times(self, copies: int) -> "Op":
        """The same in several layers."""
        return replace(self, flops=self.flops * copies, traffic=self.traffic * copies, columns=self.columns * copies)

    def seconds(self, machine: Machine, *, tf32: bool = False) -> float:
        """The slower of arithmetic, memory, and the chain of dependent columns."""
        arithmetic = self.flops / machine.rate(self.precision, tf32=tf32)
        if self.replaces:
            # The share that a plain step attains covers all that happens in it; a product alone attains more.
            return max(0.0, arithmetic - self.flops / (machine.product * machine.half))
        return max(arithmetic, self.traffic / (machine.copy * machine.bandwidth), self.columns * machine.column)


def operations(shape: Shape, work: Workload, setting: Setting, machine: Machine) -> Iterator[Op]:
    """Everything that ζ* adds to a step on one GPU."""
    if setting.when == "step" and work.gpus == 1 and (setting.decay, setting.refresh, setting.power) == (0, 1, 1):
        raise ValueError("with when='step' one GPU alone keeps rows, not covariances, which is not modelled; use gpus >= 2")
    seen: set[str] = set()
    for layer in conditioned(shape, setting):
        leads = layer.source not in seen
        seen.add(layer.source)
        if setting.takes_every_row:
            found = _every_row(layer, work, machine, leads)
        elif setting.when == "backward":
            found = _few_rows(layer, work, setting, machine, leads)
        else:
            found = _step(layer, work, setting, machine, leads)
        for op in found:
            yield op.times(layer.copies)
    yield _embedding(shape, work, setting, machine)


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


def _every_row(layer: Layer, work: Workload, machine: Machine, leads: bool) -> Iterator[Op]:
    """The form of its own: the weight gradient is formed through the inverse, in float32."""
    t, n, m, passes = work.tokens, layer.inputs, layer.outputs, work.micro_batches
    yield Op("rows", traffic=passes * (_cast(t * n, machine) + _cast(t * m, machine)))
    if leads:
        yield from _inverse(t, n, passes, machine)
    flops = 2 * m * n**2 if t >= n else 2 * t**2 * min(n, m)
    traffic = 8 * m * n + 4 * n**2 if t >= n else 8 * t * min(n, m) + 4 * t**2
    yield Op("application", passes * flops, "single", passes * (traffic + _cast(m * n, machine)))
    if machine.activation != 4:
        yield Op("weight gradient in float32", passes * 2 * t * m * n, "single", replaces=True)


def _few_rows(layer: Layer, work: Workload, setting: Setting, machine: Machine, leads: bool) -> Iterator[Op]:
    """A node over the weight: torch forms the gradient, and it is multiplied from the right."""
    n, m, passes = layer.inputs, layer.outputs, work.micro_batches
    k = rows_of(work, setting)
    if k < n and k <= machine.swept and not setting.all_ranks:
        yield from _swept(layer, work, setting, machine, leads)
        return
    if leads:
        yield Op("rows", traffic=passes * _gather_traffic(n, k, work, setting, machine))
    if setting.all_ranks:
        k = k * work.gpus
    if leads:
        yield from _inverse(k, n, passes, machine)
    casts = 2 * _cast(m * n, machine)
    flops, traffic = 2 * m * n**2, 8 * m * n + 4 * n**2
    if k < n:
        flops, traffic = 4 * k * m * n + 2 * k**2 * m, 20 * m * n + 16 * m * k + 8 * k * n
    yield Op("application", passes * flops, "single", passes * (traffic + casts))


def _swept(layer: Layer, work: Workload, setting: Setting, machine: Machine, leads: bool) -> Iterator[Op]:
    """The kernels over lists: rows that are drawn are all that is read of an input, and a gradient keeps its type."""
    n, m, passes, k = layer.inputs, layer.outputs, work.micro_batches, rows_of(work, setting)
    if leads:
        read = work.tokens if setting.sharing == "reduce" else k
        yield Op("rows", traffic=passes * (machine.activation * read + 4 * k) * n)
        for op in _inverse(k, n, passes, machine):
            yield replace(op, columns=op.columns / _TOGETHER)
    traffic = 3 * machine.activation * m * n + 12 * m * k + 8 * k * n
    yield Op("application", passes * (4 * k * m * n + 2 * k**2 * m), "swept", passes * traffic)


def _gather_traffic(n: int, k: int, work: Workload, setting: Setting, machine: Machine) -> float:
    """Bytes to make k rows of a layer's input: all of it is read, and brought to float32 before any is drawn."""
    everything = work.tokens * n
    if setting.sharing == "reduce":
        return machine.activation * everything + 4 * k * n
    return _cast(everything, machine) + (8 * k * n if setting.max_rows is not None else 0)


def _step(layer: Layer, work: Workload, setting: Setting, machine: Machine, leads: bool) -> Iterator[Op]:
    """`when="step"`: rows are gathered in the backward pass, the gradient's own rows multiplied before the optimizer."""
    if leads:
        yield from _averaged(layer, work, setting, machine)
    n, m = layer.inputs, layer.outputs / work.gpus
    yield Op("application", 2 * m * n**2, "single", 16 * m * n + 4 * n**2)


def _averaged(layer: Layer, work: Workload, setting: Setting, machine: Machine) -> Iterator[Op]:
    """The second moment of an input, which all layers that receive it share, and its inverse."""
    n, wide = layer.inputs, machine.covariance
    k, passes, numbers = rows_of(work, setting), work.micro_batches, layer.inputs**2
    gathers, renews = 1 / setting.gathers_every, 1 / setting.refresh
    widened = (4 + wide) * k * n if wide != 4 else 0
    yield Op("rows", traffic=gathers * passes * (_gather_traffic(n, k, work, setting, machine) + widened))
    summed = wide * (numbers * (2 * passes - 1) + passes * 2 * k * n)
    precision: Precision = "single" if wide == 4 else "double"
    yield Op("Gram matrix", gathers * passes * 2 * k * numbers, precision, gathers * summed)
    # Mean, whether it is finite, a new average where there is none, average, choice, and a division: one after the other.
    average = 15 * wide + 6 + (0 if setting.decay else wide)
    yield Op("running average", traffic=gathers * average * numbers)
    if setting.power == 1:
        flops, traffic = n**3 / 3 + machine.inverse * n**3, _renewal(wide) * numbers
        yield Op("factorization, inverse", renews * flops, "factor", renews * traffic, columns=renews * n)
    else:
        yield Op("factorization, inverse", renews * 9 * n**3, "eigen", renews * 100 * numbers)
        yield Op("factorization, inverse", renews * 2 * n**3, "double")


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
