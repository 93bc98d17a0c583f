"""What a setting of ζ* adds to a step, in all: time, bytes sent, memory; and the first settings that stay below a limit."""

import functools
import itertools
import math
from dataclasses import dataclass, field, replace

from isaac_lab.scaling.compute import operations, plain_flops, plain_seconds
from isaac_lab.scaling.sizes import Machine, Setting, Shape, Workload, conditioned
from isaac_lab.scaling.storage import peak_extra, plain_bytes_moved, plain_memory, summed_bytes

#: The overhead that one would not notice.
LIMIT = 0.02


@dataclass(frozen=True)
class Overhead:
    """What ζ* adds to a step, averaged over steps; shares of the plain step's."""

    flops: float  # operations, whatever their precision
    compute: float  # seconds of arithmetic and memory traffic
    exposed: float  # seconds of communication, none of it hidden
    moved: float  # bytes that a GPU sends
    memory: float  # peak bytes on a GPU
    extra_bytes: float  # the same in bytes
    fits: bool  # the plain step and ζ* fit into the GPU
    plain_fits: bool
    seconds: dict[str, float] = field(default_factory=dict, hash=False)  # by term

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


#: What `attach` does by itself.
AUTOMATIC = Setting(max_rows=64, automatic=True)
ROWS = (None, 4096, 1024, 256, 64, 16)
REFRESHES = (1, 5, 10, 20, 50, 100, 200, 500)
EXCLUDED: tuple[tuple[str, ...], ...] = ((), ("down",), ("down", "head"))


@functools.cache
def candidates(shape: Shape) -> tuple[Setting, ...]:
    """Settings of the library to choose from, the one that conditions most first: more weights, fresher, more rows."""
    common = [Setting(max_rows=rows, automatic=rows == AUTOMATIC.max_rows) for rows in ROWS] + [Setting(sharing="reduce")]
    common += [
        Setting(when="step", max_rows=rows, refresh=refresh, decay=decay)
        for rows, refresh, decay in itertools.product(ROWS, REFRESHES, (0.9, 0.0))
    ]
    found = [replace(one, exclude=exclude, tf32=True) for exclude in EXCLUDED for one in common]
    weights = {one: sum(layer.copies * layer.inputs * layer.outputs for layer in conditioned(shape, one)) for one in found}
    return tuple(sorted(found, key=lambda one: (-weights[one], one.refresh, not one.decay, -(one.max_rows or 1e9))))


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
