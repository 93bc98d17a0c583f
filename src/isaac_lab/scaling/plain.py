"""The plain step: its arithmetic, what FSDP2 sends, its time and its memory."""

from isaac_lab.scaling.sizes import Machine, Shape, Workload

__all__ = ["plain_bytes_moved", "plain_flops", "plain_memory", "plain_seconds"]


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
