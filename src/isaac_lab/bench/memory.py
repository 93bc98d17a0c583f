"""What a step takes of a device: peak memory, everything that torch's allocator holds at the worst moment, and a GPU's time.

Counted are parameters, gradients, the batch, activations, and whatever the method keeps or needs in between, during one full
step after warm-up. On the CPU torch's profiler writes down every allocation from before the model exists, in a process of its
own, so the figure is exact; memory that a BLAS library takes for itself does not pass through the allocator. On CUDA it is
the allocator's peak, less the workspaces of cuBLAS, which are given beside it.
"""

import gc
import json
import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from isaac_lab.bench.problems import TABLE2, Problem
from isaac_lab.bench.steps import METHODS, Method
from isaac_lab.products import threads as with_threads

WARM_UP = 3
MARK = "measured step"


def cpu_peak(model: str, method: str, *, damping: float, threads: int) -> dict[str, int]:
    """Peak bytes of a method on a model of Table 2, measured in a new process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_named_peak, model, method, damping, threads).result()


def _named_peak(model: str, method: str, damping: float, threads: int) -> dict[str, int]:
    return profiled_peak(TABLE2[model], METHODS[method], damping=damping, threads=threads)


def profiled_peak(problem: Problem, method: Method, *, damping: float, threads: int = 1) -> dict[str, int]:
    """The same in this process; everything that the method allocates must be allocated here."""
    with (
        with_threads(threads),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler,
    ):
        model, x, y = problem.make("cpu")
        step = method(model, problem.loss_fn, damping)
        for _ in range(WARM_UP):
            step(x, y)
        with record_function(MARK):
            step(x, y)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return {"peak_bytes": peak_of_trace(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])}


def peak_of_trace(events: list[dict[str, Any]]) -> int:
    """Most bytes alive at once during the marked step, from the allocations and releases in a profiler's trace."""
    (mark,) = (event for event in events if event.get("name") == MARK and event.get("ph") == "X")
    alive = peak = 0
    for event in sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: float(event["ts"])):
        if event["ts"] > mark["ts"] + mark["dur"]:
            break
        if event["ts"] >= mark["ts"]:
            peak = max(peak, alive)
        alive += event["args"]["Bytes"]
    return max(peak, alive)


def cuda_peak(problem: Problem, method: Method, *, damping: float) -> dict[str, int]:
    """Peak bytes of an eager step on the GPU."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    model, x, y = problem.make("cuda")
    step = method(model, problem.loss_fn, damping)
    for _ in range(WARM_UP):
        step(x, y)
    peak = _peak(lambda: step(x, y))
    alive = torch.cuda.memory_allocated()
    # cuBLAS keeps a workspace per stream, larger than the small models: what it takes depends on the GPU, not on the method.
    torch._C._cuda_clearCublasWorkspaces()
    workspace = alive - torch.cuda.memory_allocated()
    return {"peak_bytes": peak - workspace - before, "workspace_bytes": workspace}


def device_work(step: Callable[[], object], copies: int) -> dict[str, float]:
    """What one step leaves to a GPU: seconds that it is busy, kernels that are launched, the peak of its memory.

    So many copies of the model, with their optimizers, are there at once; the peak is that of one.
    """
    gc.collect()
    resident = torch.cuda.memory_allocated()
    peak = _peak(step) - resident + resident // copies
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    events: list[Any] = [event for event in profiler.key_averages() if str(event.device_type).endswith("CUDA")]
    return {
        "device_seconds": sum(event.self_device_time_total for event in events) / 1e6,
        "launches": sum(event.count for event in events),
        "allocated_bytes": peak,
    }


def _peak(step: Callable[[], object]) -> int:
    """The most that the allocator has held while a step ran."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()
