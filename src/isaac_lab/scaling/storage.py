"""Bytes: what a plain step keeps and sends, and what ζ* keeps, sends and needs for a moment beside it."""

from collections.abc import Sequence

from isaac_lab.scaling.sizes import Layer, Machine, Setting, Shape, Workload, conditioned, rows_of


def plain_bytes_moved(shape: Shape, work: Workload, machine: Machine) -> float:
    """Bytes that FSDP2 sends from one GPU in a plain step: blocks are gathered twice, the root once, gradients scattered."""
    blocks = shape.depth * shape.block_parameters
    root = shape.parameters - blocks
    numbers = machine.activation * (2 * blocks + root) + work.reduction * shape.parameters
    return work.micro_batches * numbers * (work.gpus - 1) / work.gpus


def plain_memory(shape: Shape, work: Workload) -> tuple[float, float]:
    """Bytes on one GPU: what is there all the time, and what is there at the peak of the backward pass beside it."""
    states = 16 * shape.parameters / work.gpus
    unsharded = 2 * (3 * shape.block_parameters + 2 * shape.vocabulary * shape.width)
    checkpoints = 2 * work.tokens * shape.width * shape.depth
    return states, unsharded + checkpoints + 34 * work.tokens * shape.width + 6 * work.tokens * shape.vocabulary


def _covariances(shape: Shape, setting: Setting) -> float:
    """Numbers in all covariances; every GPU has all of them."""
    return sum(layer.copies * layer.inputs**2 for layer in _leaders(conditioned(shape, setting)))


def _leaders(layers: Sequence[Layer]) -> list[Layer]:
    """One of those that receive the same."""
    return list({layer.source: layer for layer in layers}.values())


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
    if work.gpus == 1 or (setting.when == "backward" and not setting.all_ranks):
        return 0.0, 0.0, 0.0
    layers = conditioned(shape, setting)
    if setting.when == "backward":
        leaders = _leaders(layers)
        rows = rows_of(work, setting) * work.gpus
        received = sum(layer.copies * (4 * rows * layer.inputs + 8 * work.gpus) for layer in leaders)
        # Three numbers in two collectives say once a pass whether all ranks have rows of the same layers, two in one whether
        # they are at the same embedding, whose counts are summed.
        counts = sum(2 * layer.copies for layer in leaders) + 2 + 2
        given = 8.0 * (shape.vocabulary + 3 + 2)
        return work.micro_batches * given, work.micro_batches * received, work.micro_batches * counts
    matrices = sum(layer.copies for layer in layers)
    moments = sum(layer.copies for layer in _leaders(layers))
    given = gathered_bytes(shape, setting, machine) + 8 * moments + 8 * (shape.vocabulary + 1)
    # One number every step says whether anybody has news, one of each weight whose average it shares, and two whether a
    # gradient is there to be conditioned.
    return given / setting.gathers_every + 8 + 24 * (matrices + 1), 0.0, 2 * (moments + 1) / setting.gathers_every + 3


def temporary_in_backward(layer: Layer, work: Workload, setting: Setting, machine: Machine) -> float:
    """Bytes that one layer needs for a moment in the backward pass, beyond what torch needs."""
    t, n, m, half = work.tokens, layer.inputs, layer.outputs, machine.activation != 4
    k = rows_of(work, setting)
    if setting.when == "backward" and k < n and k <= machine.swept and not (setting.takes_every_row or setting.all_ranks):
        # Rows, the same multiplied, what the gradient has in common with them, and the result.
        return 8 * k * n + 8 * k * m + machine.activation * m * n
    if not setting.takes_every_row:
        cast, rows = 4 * t * n if half else 0, 4 * rows_of(work, setting) * n
        # The gradient in float32, what is left of it, and that rounded; a gradient that is in float32 is torch's own.
        return rows + (cast if setting.when == "step" else max(cast, (10 if half else 4) * m * n))
    small, large = min(t, n), max(t, n)
    exact = machine.exact_inverses and small > machine.fused
    inverse = 8 * small * large + 40 * small**2 if exact else 12 * small**2
    product = 4 * small**2 + (8 * m * n if t >= n else 4 * t * min(n, m) + 4 * m * n)
    # The gradient that torch would have formed by itself is none of it.
    return (4 * t * (n + m) if half else 0) + max(inverse, product) - machine.activation * m * n


def temporary_at_step(shape: Shape, setting: Setting, machine: Machine) -> float:
    """Bytes that are there for a moment right before the optimizer's step, beyond what was gathered."""
    if setting.when == "backward":
        return 0.0
    most, freed = 0.0, 0.0
    for layer in _leaders(conditioned(shape, setting)):
        # Six float64 matrices at once; what the layers before it had gathered is gone by then.
        most = max(most, 48 * layer.inputs**2 - freed)
        freed += machine.covariance * layer.inputs**2
    return most


def peak_extra(shape: Shape, work: Workload, setting: Setting, machine: Machine) -> float:
    """Bytes by which the peak of a step rises on one GPU."""
    _, activations = plain_memory(shape, work)
    backward = max(temporary_in_backward(layer, work, setting, machine) for layer in conditioned(shape, setting))
    # The activations are gone when the optimizer steps.
    temporary = max(activations + backward, temporary_at_step(shape, setting, machine)) - activations
    return lasting_bytes(shape, setting, machine) + gathered_bytes(shape, setting, machine) + temporary
