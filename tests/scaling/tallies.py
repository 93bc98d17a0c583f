"""What a training step of a small GPT does, counted: operations, bytes, memory, collectives.

Floating-point operations are counted by torch's own counter, bytes by looking at every operator and every collective, memory by
torch's profiler.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from small_gpt import Trainer, attached
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from isaac_lab.bench.memory import MARK, peak_of_trace
from isaac_lab.scaling.sizes import Layer, Setting, Shape, Workload
from isaac_newton.api import step
from isaac_newton.core.clock import Clock

__all__ = [
    "collectives",
    "counted_flops",
    "counted_traffic",
    "peak_of_layer",
    "peak_of_step",
    "saved_bytes",
    "sent",
    "state_bytes",
]


@contextlib.contextmanager
def _usual() -> Iterator[None]:
    """As most steps are: a clock forms plain products in few passes, and every 64th step looks for lost digits."""
    with patch.object(Clock, "begin", lambda clock: None), patch.object(step, "_count_lost_digits", lambda *sizes: None):
        yield


def counted_flops(shape: Shape, work: Workload, setting: Setting | None) -> float:
    """FLOPs of a step, averaged over a cycle, counted by torch; those of factorizations by their sizes."""
    trainer = Trainer(shape, work, setting)
    with _usual(), FlopCounterMode(display=False, custom_mapping=_FORMULAS) as counter:
        for _ in range(trainer.cycle):
            trainer.step()
    return float(counter.get_total_flops()) / trainer.cycle


def _cubed(factor: float) -> Callable[..., float]:
    def formula(a_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> float:
        *groups, _, side = a_shape
        return float(factor * side**3 * (groups[0] if groups else 1))

    return formula


def _baddbmm(self_shape: Any, a_shape: Any, b_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> float:
    return float(2 * a_shape[0] * a_shape[1] * a_shape[2] * b_shape[2])


#: What torch's counter does not know.
_FORMULAS = {
    torch.ops.aten.linalg_cholesky_ex: _cubed(1 / 3),
    torch.ops.aten.cholesky_inverse: _cubed(2 / 3),
    torch.ops.aten._linalg_eigh: _cubed(9),
    torch.ops.aten.baddbmm_: _baddbmm,
}


class _Traffic(TorchDispatchMode):
    """Bytes that operators read and write; views move nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        taken, made = list(_tensors((args, kwargs))), list(_tensors(result))
        memory = {tensor.untyped_storage().data_ptr() for tensor in taken}
        is_view = not func._schema.is_mutable and all(tensor.untyped_storage().data_ptr() in memory for tensor in made)
        if not is_view:
            self.bytes += _moved(func._schema.name, taken, made)
        return result


def _moved(name: str, taken: list[Tensor], made: list[Tensor]) -> int:
    if name == "aten::index":
        # Of what is indexed only what comes out is read.
        taken = [*made, *taken[1:]]
    elif name == "aten::copy_":
        taken = taken[1:]
    elif name.removesuffix("_like").startswith(("aten::zeros", "aten::empty", "aten::new_", "aten::ones", "aten::full")):
        taken = []
    elif name in ("aten::addmm", "aten::baddbmm") and taken[0].shape == made[0].shape:
        # What is added to is copied into the result first.
        taken, made = [taken[0], *taken], [*made, *made]
    return sum(tensor.numel() * tensor.element_size() for tensor in taken + made)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def counted_traffic(shape: Shape, work: Workload, setting: Setting | None, dtype: torch.dtype) -> float:
    """Bytes that the operators of a step read and write, averaged over a cycle."""
    trainer = Trainer(shape, work, setting, dtype)
    with _usual():
        trainer.step()  # the first pass also compares what arrives at a weight with what its layers have left for it
        with _Traffic() as traffic:
            for _ in range(trainer.cycle):
                trainer.step()
    return float(traffic.bytes / trainer.cycle)


def peak_of_step(shape: Shape, work: Workload, setting: Setting | None, part: str) -> int:
    """Most bytes alive during a part of the step that renews: "backward", "between" or "step"."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        trainer = Trainer(shape, work, setting)
        for _ in range(trainer.cycle):
            trainer.step()
        trainer.optimizer.zero_grad()
        loss = trainer.loss()
        with record_function(MARK if part == "backward" else "backward"):
            loss.backward()
        del loss
        with record_function(MARK if part == "between" else "between"):
            torch.zeros(1)
        with record_function(MARK if part == "step" else "step"):
            trainer.optimizer.step()
    return _peak(profiler)


def _peak(profiler: profile) -> int:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return peak_of_trace(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def peak_of_layer(layer: Layer, work: Workload, setting: Setting | None) -> int:
    """Most bytes alive in the backward pass of one linear layer in bf16; of a plain layer those alive after it."""

    def run(mark: str) -> None:
        model = nn.Sequential(nn.Linear(layer.inputs, layer.outputs, bias=False, dtype=torch.bfloat16))
        if setting is not None:
            attached(model, setting)
        x = torch.randn(work.tokens // work.length, work.length, layer.inputs, dtype=torch.bfloat16)
        y = model(x)
        g = torch.ones_like(y)
        # BLAS libraries take memory of their own for a plain product, too.
        with record_function(mark if setting is not None else "backward"):
            y.backward(g)
        with record_function(mark if setting is None else "after"):
            torch.zeros(1)

    # The kernels keep an identity matrix of each size from the first time on.
    run("first")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        run(MARK)
    return _peak(profiler)


def saved_bytes(shape: Shape, work: Workload, setting: Setting | None) -> int:
    """Bytes that a forward pass keeps for the backward pass, each piece of memory once."""
    trainer, memory = Trainer(shape, work, setting), {}

    def pack(tensor: Tensor) -> Tensor:
        memory[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = trainer.loss()
    total = sum(memory.values())
    del loss
    return total


def state_bytes(shape: Shape, work: Workload, setting: Setting) -> int:
    """Bytes of matrices in the state of the handle."""
    trainer = Trainer(shape, work, setting)
    trainer.step()
    assert trainer.handle is not None
    state = trainer.handle.state_dict()["curvature"]
    tensors = _tensors([list(layer.values()) for layer in state.values()])
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.dim() > 1)


class _Collectives(TorchDispatchMode):
    """Bytes given to and received from collectives, and how many there were."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("c10d::"):
            kind, tensors = name.removeprefix("c10d::").strip("_"), list(_tensors(args[0]))
            if "reduce_scatter" in kind:
                kind, tensors = "reduce_scatter", list(_tensors(args[1]))
            elif "allgather" in kind:
                kind = "all_gather"
            self.found[kind] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            self.found[f"{kind} calls"] += 1
        return func(*args, **(kwargs or {}))


def _counted_here(shape: Shape, work: Workload, setting: Setting | None) -> dict[str, float]:
    """What one rank's collectives move in a step, averaged over a cycle; runs on every rank."""
    from torch.distributed.fsdp import fully_shard

    trainer = Trainer(shape, work, None)
    for block in trainer.model.get_submodule("blocks").children():
        fully_shard(block)
    fully_shard(trainer.model)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), 1e-3)
    trainer.setting = setting
    if setting is not None:
        trainer.attach(**({"process_group": dist.group.WORLD} if setting.all_ranks else {}))
    # In the first step the ranks tell each other what they have.
    for _ in range(trainer.cycle):
        trainer.step()
    with _Collectives() as counter:
        for _ in range(trainer.cycle):
            trainer.step()
    return {name: value / trainer.cycle for name, value in counter.found.items()}


def collectives(ranks: int, cases: Mapping[str, tuple[Shape, Workload, Setting | None]]) -> dict[str, dict[str, float]]:
    """What a step's collectives move, by case, counted in so many processes over gloo."""
    with tempfile.TemporaryDirectory() as directory:
        plan, found = Path(directory) / "plan.json", Path(directory) / "found.json"
        listed = {
            name: [asdict(shape), asdict(work), None if setting is None else asdict(setting)]
            for name, (shape, work, setting) in cases.items()
        }
        plan.write_text(json.dumps(listed), encoding="utf-8")
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [*launch, __file__, str(plan), str(found)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise RuntimeError(f"counting collectives in {ranks} processes failed:\n{done.stderr[-2000:]}")
        result: dict[str, dict[str, float]] = json.loads(found.read_text(encoding="utf-8"))
        return result


def sent(found: Mapping[str, float], ranks: int) -> float:
    """Bytes that a rank sends for these collectives, as rings do it."""
    moved = 2 * found.get("allreduce", 0) + found.get("all_gather", 0) + found.get("reduce_scatter", 0)
    return moved * (ranks - 1) / ranks


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("plan", type=Path)
    parser.add_argument("found", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = {}
    for name, (shape, work, setting) in json.loads(chosen.plan.read_text(encoding="utf-8")).items():
        if setting is not None:
            setting = Setting(**{**setting, "exclude": tuple(setting["exclude"])})
        result[name] = _counted_here(Shape(**shape), Workload(**work), setting)
    if dist.get_rank() == 0:
        chosen.found.write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # for the reason that distributed/restart.py gives


if __name__ == "__main__":
    _main()
