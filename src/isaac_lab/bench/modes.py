"""How a step is executed: on the CPU with some threads, or on a GPU, operation by operation or as one CUDA graph."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

import isaac_newton
from isaac_lab.bench.problems import Problem
from isaac_lab.bench.steps import Method
from isaac_lab.products import threads

#: Their inverses read an error flag back from the device, which a CUDA graph cannot.
NOT_CAPTURED = ("paper", "kfac")


@dataclass(frozen=True)
class Mode:
    """One way to execute a step; `captured`: the whole of it is one CUDA graph, by `isaac_newton.capture`."""

    device: str
    threads: int = 1
    captured: bool = False

    @property
    def name(self) -> str:
        """For file names and tables."""
        if self.device == "cpu":
            return f"cpu-{self.threads}thread{'' if self.threads == 1 else 's'}"
        return f"{self.device}-{'captured' if self.captured else 'eager'}"

    def wait(self) -> None:
        """Until the device has done what it was told to."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def active(self) -> AbstractContextManager[None]:
        """Compute with this mode's threads, afterwards with as many as before."""
        return threads(self.threads)

    def prepare(
        self, problem: Problem, methods: Mapping[str, Method], damping: float
    ) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
        """The step of each method, ready to be called, and why others have none."""
        steps: dict[str, Callable[[], object]] = {}
        skipped: dict[str, str] = {}
        for name, method in methods.items():
            if self.captured and name in NOT_CAPTURED:
                skipped[name] = "cannot be captured: its inverse reads an error flag back from the device"
                continue
            try:
                steps[name] = self._step(problem, method, damping)
            except RuntimeError as error:
                # Out of memory, or an operation that cannot be captured: a result too, and no reason to lose the others.
                skipped[name] = f"failed: {str(error).splitlines()[0]}"
        return steps, skipped

    def _step(self, problem: Problem, method: Method, damping: float) -> Callable[[], object]:
        model, x, y = problem.make(self.device)
        step = method(model, problem.loss_fn, damping)
        if self.captured:
            step = isaac_newton.capture(step, x, y)
        return lambda: step(x, y)


def modes(device: str, threads: int) -> tuple[Mode, ...]:
    """All modes of a device."""
    if device == "cpu":
        return (Mode("cpu", threads),)
    if not torch.cuda.is_available():
        raise ValueError("this machine has no CUDA device that torch can use; use --device cpu")
    return Mode(device, threads), Mode(device, threads, captured=True)
