"""How a run trains: its gradient, conditioned or not, and its optimizers, as one step on a batch."""

import contextlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import isaac_newton as isaac
from isaac_lab import method
from isaac_lab.method import UnableError
from isaac_lab.methods.kfac import Kfac
from isaac_lab.methods.optimizers import optimizers
from isaac_lab.methods.schedule_free import ScheduleFree
from isaac_lab.methods.soap import Soap
from isaac_lab.trial import Trial
from isaac_lab.workload import Workload

#: Options of `isaac_newton.attach` for a running average of the inputs' second moment.
RUNNING: dict[str, Any] = {"when": "step", "decay": 0.9, "refresh": 20, "power": 0.5}
#: Those that make it FOOF.
FOOF: dict[str, Any] = {"when": "step", "decay": 0.95, "refresh": 10}


class Prepared:
    """A model that is ready to be trained: conditioned as the run says, with its optimizers."""

    def __init__(self, trial: Trial, workload: Workload, model: nn.Module) -> None:
        self._workload, self._model = workload, model
        self.done = 0
        _, how = method.find(trial.method)
        zeta, kfac = how == "isaac" and "output_damping" in dict(trial.settings), trial.method == "kfac"
        # Whether a step takes random numbers after its batch, for labels that are drawn from the model.
        self.draws = (zeta or kfac) and workload.flat and trial.get("curvature", "sampled") == "sampled"
        #: What goes in place of `loss.backward()`, with output and likelihood.
        self._curved: Callable[[Tensor, Tensor, isaac.Likelihood], object] | None = None
        #: Whose mask is set: whoever adds one line sets none.
        self._handle: isaac.Handle | None = None
        conditioners: list[Any] = []
        layers = _layers(trial, workload, model)
        if how == "line":
            conditioners = [isaac.attach(model)]
        elif how:
            damping = isaac.Relative(trial.damping) if trial.get("relative") else trial.damping
            self._handle = isaac.attach(model, damping, layers=layers, **_options(trial))
            self._curved = partial(self._handle.backward, scale=1.0) if zeta else None
            conditioners = [self._handle]
        elif kfac:
            conditioners = [Kfac(model, layers, trial)]
            self._curved = conditioners[0].backward
        self.optimizers: tuple[torch.optim.Optimizer, ...] = optimizers(trial, workload, model)
        if self._handle is not None and (trial.get("running") or how == "foof"):
            for optimizer in self.optimizers:
                self._handle.bind(optimizer)
        #: All that changes in training besides the model.
        self.stateful = [*self.optimizers, *conditioners]
        self._clip = float(trial.get("clip", math.inf))
        self._largest = [float(group["lr"]) for optimizer in self.optimizers for group in optimizer.param_groups]
        self._share: float | None = 1.0

    def set_rate(self, share: float) -> None:
        """Set every learning rate to this share of its largest."""
        if share != self._share:
            self._share = share
            groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
            for group, largest in zip(groups, self._largest, strict=True):
                group["lr"] = largest * share

    def forget_rate(self) -> None:
        """The learning rates may be any, because a state was loaded."""
        self._share = None

    @property
    def special(self) -> bool:
        """Whether the next step does what a graph of the others does not."""
        return any(isinstance(one, Soap) and one.special for one in self._told())

    def measured(self) -> contextlib.AbstractContextManager[None]:
        """The weights are those that are measured within, where the optimizer trains others."""
        first = self.optimizers[0]
        return first.averaged() if isinstance(first, ScheduleFree) else contextlib.nullcontext()

    def _told(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers, told how many steps were taken: a graph that is replayed does not count."""
        for one in self.optimizers:
            if isinstance(one, Soap):
                one.done = self.done
        return self.optimizers

    def step(self, *batch: Tensor) -> Tensor:
        """Train on a batch, with random numbers after it if `draws`; returns the loss."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self._backward(*batch)
        if self._clip < math.inf:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        for optimizer in self._told():
            optimizer.step()
        self.done += 1
        return loss.detach()

    def _backward(self, *batch: Tensor) -> Tensor:
        workload = self._workload
        if self._curved is None:
            if self._handle is not None:
                self._handle.mask = workload.mask(*batch)
            loss = workload.loss(self._model, *batch)
            loss.backward()
            return loss
        batch, numbers = (batch[:-1], batch[-1]) if self.draws else (batch, None)
        output: Tensor = self._model(batch[0])
        loss = workload.loss(_Given(output), *batch)
        likelihood = workload.drawn or workload.likelihood(output.new_empty(0) if numbers is None else numbers)
        self._curved(loss, output, likelihood)
        return loss


class _Given(nn.Module):
    """A network whose output is there already."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self._output = output

    def forward(self, *inputs: Tensor) -> Tensor:
        return self._output


def prepare(trial: Trial, workload: Workload, model: nn.Module) -> Prepared:
    """Condition the model as the run says, and make its optimizers."""
    method.check(trial)
    reason = unable(trial, workload)
    if reason:
        raise UnableError(f"{trial.title}: {reason}")
    return Prepared(trial, workload, model)


def unable(trial: Trial, workload: Workload) -> str:
    """Why this method cannot train this workload, or ""."""
    zeta, kfac = "output_damping" in dict(trial.settings), trial.method == "kfac"
    if not workload.flat and (zeta or (kfac and workload.drawn is None)):
        return f"{'ζ is' if zeta else 'K-FAC and ζ are'} here for networks of linear layers with one row per example only"
    return method.missing(trial)


def _options(trial: Trial) -> dict[str, Any]:
    found = {name: trial.get(name) for name in ("sharing", "max_rows") if trial.get(name) is not None}
    found |= RUNNING if trial.get("running") else FOOF if trial.method.endswith("+foof") else {}
    if "output_damping" in dict(trial.settings):
        found |= {"output_damping": trial.output_damping, "output_curvature": trial.get("curvature", "sampled")}
    return found


def last_layer(model: nn.Module) -> str:
    """Its name."""
    names: list[str] = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    return names[-1]


def _layers(trial: Trial, workload: Workload, model: nn.Module) -> Sequence[str] | str | None:
    """Names of the layers that are conditioned; None for all."""
    chosen = trial.get("layers")
    if chosen is None:
        return None
    if chosen == "last":
        return last_layer(model)
    count = int(last_layer(model).removeprefix("fc")) if workload.flat else 0
    numbers = (chosen,) if isinstance(chosen, int) else chosen
    if isinstance(numbers, str) or not numbers or not set(numbers) <= set(range(1, count + 1)):
        known = f"numbers from 1 to {count}, or last" if count else "last"
        raise UnableError(f"layers must be {known}, got {chosen!r}")
    return [f"fc{number}" for number in numbers]
