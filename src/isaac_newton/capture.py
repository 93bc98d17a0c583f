"""A whole training step as one CUDA graph: forward, loss, backward and optimizer replayed with a single launch."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from isaac_newton.core.options import LIVE, Run, is_kfac
from isaac_newton.kernels.permutation import draw_seed
from isaac_newton.kernels.streams import Capture
from isaac_newton.math.damping import RelativeTo, number
from isaac_newton.torch_private import version

__all__ = ["CapturedStep", "capture"]


def capture(train_step: Callable[..., Tensor], *inputs: Tensor, warmup: int = 3) -> "CapturedStep":
    """Turn a training step into one that replays a CUDA graph.

    Each call of the result is one training step. The first `warmup` calls run as they are, so that the optimizer has its
    state and libraries their workspaces; the next one captures, and from then on a step is a single launch. In the graph
    the conditioners and the weight gradients of linear layers run beside the chain of input gradients.

    Learning rates (`optimizer.param_groups[i]["lr"]`, by hand or by a scheduler) and dampings may change between calls; the
    rate of an optimizer that is neither capturable nor fused, such as torch's Muon, may not, and an error says so. Everything
    else that Python decides, such as dropout rates, which layers run, or the size of a batch, is what it was at the capture.

    Args:
        train_step: Called with tensors like `inputs`; clears the gradients, computes the loss, runs backward and the
            optimizer's step, and returns the loss (any tensor, or a tuple of tensors). It must not look at values
            (`.item()`, `print(loss)`).
        *inputs: An example batch on the GPU: its shapes and dtypes are those of every batch to come.
        warmup: Steps before the capture, at least 1.
    """
    if not callable(train_step):
        raise TypeError(f"train_step must be a function that runs one training step, got {train_step!r}")
    if not isinstance(warmup, int) or isinstance(warmup, bool) or warmup < 1:
        raise ValueError(f"warmup must be a whole number >= 1, got {warmup!r}: a first step allocates what a graph cannot")
    for position, tensor in enumerate(inputs):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"input {position} must be a tensor, got {type(tensor).__name__}")
        if tensor.device.type != "cuda":
            raise ValueError(f"input {position} is on {tensor.device}: only steps on a CUDA device can be captured")
    if not torch.cuda.is_available():
        raise RuntimeError("capture needs a CUDA device, and there is none; call train_step itself")
    return CapturedStep(train_step, inputs, warmup)


class CapturedStep:
    """What `capture` returns; call it with a batch."""

    def __init__(self, train_step: Callable[..., Tensor], inputs: tuple[Tensor, ...], warmup: int) -> None:
        self._train_step = train_step
        self._static = tuple(tensor.detach().clone() for tensor in inputs)
        self._device = inputs[0].device if inputs else torch.device("cuda", torch.cuda.current_device())
        self._warmup = warmup
        self._calls = 0
        # What everything waits for goes first; the branches fill what it leaves.
        self._stream = torch.cuda.Stream(priority=-1)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Any = None
        self._rates = _LearningRates()
        self._numbers: list[_DeviceNumbers] = []
        self._passes = {run: run.backward_passes for run in LIVE}

    def __call__(self, *inputs: Tensor) -> Any:
        """Run one training step on this batch; returns the loss, which the next call overwrites."""
        self._copy(inputs)
        self._calls += 1
        if self._graph is None and self._calls <= self._warmup:
            return self._warm_up(last=self._calls == self._warmup)
        if self._graph is None:
            self._capture()
        assert self._graph is not None
        self._rates.refresh()
        for numbers in self._numbers:
            numbers.refresh()
        self._graph.replay()
        return self._result

    def _copy(self, inputs: tuple[Tensor, ...]) -> None:
        if len(inputs) != len(self._static):
            raise ValueError(f"the step was captured with {len(self._static)} inputs, got {len(inputs)}")
        for position, (static, given) in enumerate(zip(self._static, inputs, strict=True)):
            if given.shape != static.shape or given.dtype != static.dtype:
                raise ValueError(
                    f"input {position} must be {static.dtype} of shape {tuple(static.shape)} as at the capture, got "
                    f"{given.dtype} of shape {tuple(given.shape)}; drop the last incomplete batch, or call train_step itself "
                    "for it"
                )
            static.copy_(given, non_blocking=True)

    def _warm_up(self, *, last: bool) -> Any:
        # On the stream of the later capture, so that what is allocated now is found there then. The last time with all the
        # branches, each of which has libraries to wake up that could not wake up during a capture.
        self._stream.wait_stream(torch.cuda.current_stream())
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.cuda.stream(self._stream))
            stack.enter_context(self._rates.watching())
            for run in list(LIVE) if last else []:
                stack.enter_context(_DeviceNumbers(run, self._device).on_device())
            result = _without_graph(self._train_step(*self._static))
        torch.cuda.current_stream().wait_stream(self._stream)
        return result

    def _capture(self) -> None:
        used = [run for run in LIVE if run.backward_passes > self._passes.get(run, 0)]
        self._numbers = [_DeviceNumbers(run, self._device) for run in used]
        passes = [run.backward_passes for run in used]
        graph = torch.cuda.CUDAGraph()
        with contextlib.ExitStack() as stack:
            for numbers in self._numbers:
                stack.enter_context(numbers.on_device())
            # A rate that was set since the last step is written now: in the graph every replay would write it again.
            self._rates.refresh()
            stack.enter_context(self._rates.watching())
            before = self._rates.state()
            torch.cuda.synchronize()
            try:
                with torch.cuda.graph(graph, stream=self._stream):
                    self._result = _without_graph(self._train_step(*self._static))
            except RuntimeError as error:
                _end_failed_capture()
                raise RuntimeError(
                    "the training step cannot be captured into a CUDA graph. It must not look at values on the device "
                    "(.item(), .cpu(), print(loss), an `if` on a tensor) nor allocate pinned memory, optimizers must be "
                    "capturable, and no tensor may hold on to the graph of an earlier step (`del loss` before)."
                    f"{_about_ranks()} What CUDA said: {error}"
                ) from error
        if self._rates.state() != before:
            raise RuntimeError(
                "train_step sets a learning rate itself, and a CUDA graph would set this one in every step to come: call the "
                "scheduler after the captured step, not in it"
            )
        self._rates.hold()
        for run, count in zip(used, passes, strict=True):
            # The capture computed nothing; the replay that follows counts.
            run.backward_passes = count
        self._graph = graph


def _about_ranks() -> str:
    """What else may be in the way where processes train together."""
    if not (dist.is_available() and dist.is_initialized()):
        return ""
    return (
        " A model in DistributedDataParallel cannot be captured: its reducer waits on the host. Capture the step of the model "
        "itself, and average the gradients in train_step with torch.distributed.all_reduce."
    )


def _without_graph(result: Any) -> Any:
    """The same tensors detached: a graph that is kept alive ties the next one to the stream of this one."""
    if isinstance(result, Tensor):
        return result.detach()
    if isinstance(result, tuple | list):
        return type(result)(_without_graph(item) for item in result)
    return result


def _end_failed_capture() -> None:
    """Bring torch's generator out of the capture that it still believes in; a capture that succeeds does."""
    torch.cuda.synchronize()
    with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")


class _DeviceNumbers:
    """The dampings of one run and the seed of its draws, on the device: a graph reads them, we write between replays."""

    def __init__(self, run: Run, device: torch.device) -> None:
        self._run = weakref.ref(run)
        self._damping, self._output_damping = (_DeviceNumber(device, torch.float32) for _ in range(2))
        self._seed = _DeviceNumber(device, torch.int64)
        self._kinds: tuple[RelativeTo, RelativeTo] | None = None
        self._write(run)

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """While a step is captured: the layers read the numbers and overlap their work."""
        run = self._run()
        assert run is not None
        # What other steps computed is not in this graph, nor this one's for them.
        run.waiting = []
        run.capture = Capture(self._damping.value, self._output_damping.value, self._seed.value)
        try:
            yield
        finally:
            run.capture, run.waiting = None, []

    def refresh(self) -> None:
        """Before a replay: write what changed, and count the backward pass."""
        run = self._run()
        if run is not None:
            self._write(run)
            run.backward_passes += 1

    def _write(self, run: Run) -> None:
        step = run.backward_passes  # of the pass to come
        strength, relative = number(run.damping, step)
        output, output_relative = 1.0, relative
        if run.conditions_outputs and not is_kfac(run.output_damping):
            output, output_relative = number(run.output_damping, step)  # type: ignore[arg-type]
        if self._kinds not in (None, (relative, output_relative)):
            raise RuntimeError("a damping changed between a number and isaac.Relative after the capture; capture the step anew")
        self._kinds = (relative, output_relative)
        self._damping.set(strength)
        self._output_damping.set(output)
        if run.options.max_rows is not None:
            self._seed.set(draw_seed(step + 1))


class _DeviceNumber:
    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.value = torch.zeros((), dtype=dtype, device=device)
        self._last: float | None = None

    def set(self, number: float) -> None:
        if number != self._last:
            self.value.fill_(number)
            self._last = number


#: The learning rates of optimizers on the device, by the number of their group: several graphs of one training read the same.
_RATES: "weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[int, Tensor]]" = weakref.WeakKeyDictionary()


class _LearningRates:
    """The learning rates of the optimizers that step, moved to the device, where a graph reads them."""

    def __init__(self) -> None:
        self._groups: list[tuple[dict[str, Any], Tensor]] = []
        #: Groups of optimizers that take a number for a rate, and that number in the graph, once there is one.
        self._held: list[tuple[dict[str, Any], Any]] = []
        self._takes_numbers: list[dict[str, Any]] = []
        self._known: "weakref.WeakSet[torch.optim.Optimizer]" = weakref.WeakSet()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Make every optimizer that steps in the block ready to be captured."""
        hook = register_optimizer_step_pre_hook(self._prepare)
        try:
            yield
        finally:
            hook.remove()

    def refresh(self) -> None:
        """Write the rates that were set since the last step."""
        for group, rate in self._groups:
            if group["lr"] is not rate:
                rate.fill_(float(group["lr"]))
                group["lr"] = rate
        for group, held in self._held:
            if group["lr"] is not held and float(group["lr"]) != float(held):
                raise RuntimeError(
                    f"a learning rate changed from {float(held):g} to {float(group['lr']):g} after the capture, but its "
                    "optimizer cannot read it on the device: capture the step anew, or keep this rate constant"
                )

    def hold(self) -> None:
        """The graph is there: rates that are not on the device are what they are in it."""
        self._held = [(group, group["lr"]) for group in self._takes_numbers]

    def state(self) -> list[tuple[bool, int]]:
        """Of every rate, whether its group has it, and how often it was written."""
        return [(group["lr"] is rate, version(rate)) for group, rate in self._groups]

    def _prepare(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in self._known:
            self._known.add(optimizer)
            for number, group in enumerate(optimizer.param_groups):
                self._move(optimizer, group, number)
        self.refresh()

    def _move(self, optimizer: torch.optim.Optimizer, group: dict[str, Any], number: int) -> None:
        device = group["params"][0].device
        if device.type != "cuda" or "lr" not in group:
            return
        if "capturable" in group:
            group["capturable"] = True
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                if isinstance(state.get("step"), Tensor):
                    state["step"] = state["step"].to(device)
        elif "fused" in group and not group.get("differentiable"):
            # SGD has no capturable form, but its fused kernel reads the learning rate on the device.
            group["fused"], group["foreach"] = True, False
        else:
            self._takes_numbers.append(group)
            return
        given, known = group["lr"], _RATES.setdefault(optimizer, {})
        if number not in known or known[number].device != device:
            known[number] = given.to(device) if isinstance(given, Tensor) else torch.tensor(float(given), device=device)
        self._groups.append((group, known[number]))
