"""What a training loop works on: one network, or many stacked as an ensemble; captured where they can be."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Size, Tensor, nn

import isaac_newton as isaac
from isaac_lab import method
from isaac_lab.methods import Prepared, prepare
from isaac_lab.methods.optimizers import per_copy
from isaac_lab.trial import Trial, TrialError
from isaac_lab.workload import Workload

#: Steps that run as they are before a CUDA graph is captured.
WARM_UP = 3


class Alone:
    """One network."""

    def __init__(self, trials: Sequence[Trial], workload: Workload, device: str) -> None:
        (trial,) = trials
        torch.manual_seed(trial.seed)
        self._trial, self._workload, self._device = trial, workload, device
        self.model = workload.model(trial.seed)
        self.prepared: Prepared = prepare(trial, workload, self.model)
        self._captured = device == "cuda" and method.capturable(trial)
        self.step: Callable[..., object] = self.prepared.step
        if self._captured:
            self.step = Graphs(self.prepared, WARM_UP)
            self.prepared.set_rate(trial.share(0))
            with _unseen(self.model, self.prepared.stateful, trial.seed):
                first = next(self.batches(1))
                for _ in range(WARM_UP + 1):
                    self.step(*first)
            self.prepared.done = 0

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, ...]]:
        """With random numbers after them, where labels are drawn."""
        found = self._workload.batches(self._trial.seed, epoch)
        if not self.prepared.draws:
            return found
        draws = self._workload.draws(self._trial.seed, epoch)
        return ((*batch, numbers) for batch, numbers in zip(found, draws, strict=True))

    def set_rate(self, share: float) -> None:
        """Of all optimizers."""
        self.prepared.set_rate(share)

    def measure(self) -> list[dict[str, float]]:
        """Of the one network."""
        with self.prepared.measured():
            return [self._workload.evaluate(self.model)]

    def freeze(self, number: int) -> None:
        """There is no other, so training has ended."""

    def state(self) -> dict[str, Any]:
        """Model, optimizers and what else changes, and torch's random numbers."""
        random = {"cpu": torch.get_rng_state()}
        if self._device == "cuda":
            random["cuda"] = torch.cuda.get_rng_state()
        parts = [part.state_dict() for part in self.prepared.stateful]
        return {"model": self.model.state_dict(), "parts": parts, "random": random, "done": self.prepared.done}

    def load(self, state: Mapping[str, Any]) -> None:
        """All of it; a graph's tensors are filled, not replaced, and what only Python counts is not in it."""
        self.model.load_state_dict(state["model"])
        for part, saved in zip(self.prepared.stateful, state["parts"], strict=True):
            if not self._captured:
                part.load_state_dict(saved)
            elif isinstance(part, torch.optim.Optimizer):
                for number, name, value in _kept(part):
                    value.copy_(saved["state"][number][name])
        self.prepared.forget_rate()
        self.prepared.done = state["done"]
        torch.set_rng_state(state["random"]["cpu"])
        if self._device == "cuda":
            torch.cuda.set_rng_state(state["random"]["cuda"])

    def weights(self, number: int) -> list[Tensor]:
        """Of the one network."""
        return [parameter.detach() for parameter in self.model.parameters()]


class Stacked:
    """Many networks that share everything but learning rate, dampings and seed, as one ensemble."""

    def __init__(self, trials: Sequence[Trial], workload: Workload, device: str) -> None:
        from isaac_lab.workloads.mlp import Network

        if not isinstance(workload, Network) or len({alike(trial) for trial in trials} - {None}) > 2:
            raise TrialError("an ensemble trains chains of linear layers that differ in rates, dampings and seeds only")
        self._trials, self._workload, self._device = trials, workload, device
        for trial in trials:
            method.check(trial)
        self._curvatures = {t.get("curvature", "sampled") for t in trials if math.isfinite(t.output_damping)}
        if len(self._curvatures) > 1 or not all(map(can_stack, trials)):
            raise TrialError("the networks of an ensemble must have one curvature, and all of their layers conditioned")
        self._seeds = sorted({trial.seed for trial in trials})
        networks = {seed: workload.model(seed) for seed in self._seeds}
        self.model = self._ensemble = isaac.Ensemble(
            [networks[trial.seed] for trial in trials],
            damping=[trial.damping for trial in trials],
            output_damping=[trial.output_damping for trial in trials],
            output_curvature="empirical" if "empirical" in self._curvatures else "sampled",
        )
        base = trials[0].method.partition("+")[0]
        self.optimizer = per_copy(base, self._ensemble, [trial.learning_rate for trial in trials])
        #: For each network the number of its seed; None where all have the same and share one batch.
        self._which: Tensor | None = None
        if len(self._seeds) > 1:
            self._which = torch.tensor([self._seeds.index(trial.seed) for trial in trials], device=device)
        # From a step for nothing on, all steps are alike: those of new runs, and those of runs that go on.
        self.step: Callable[..., object] = self._step
        with _unseen(self.model, [self.optimizer], 0):
            first = next(self.batches(1))
            if device == "cuda":
                self.step = isaac.capture(self._step, *first, warmup=WARM_UP)
            for _ in range(1 + WARM_UP * (device == "cuda")):
                self.step(*first)

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, ...]]:
        """Shared by all networks, or one for each."""
        own = [self._workload.batches(seed, epoch) for seed in self._seeds]
        draws = [self._workload.draws(seed, epoch) for seed in self._seeds] if "sampled" in self._curvatures else []
        for batches in zip(*own, strict=True):
            numbers = [next(random) for random in draws]
            columns = [*zip(*batches, strict=True), *([tuple(numbers)] if numbers else [])]
            yield tuple(c[0] if self._which is None else torch.stack(c)[self._which] for c in columns)

    def _step(self, x: Tensor, y: Tensor, *draws: Tensor) -> Tensor:
        ensemble, workload = self._ensemble, self._workload
        self.optimizer.zero_grad()
        output = ensemble(x)
        losses = ensemble.losses(workload.loss_fn, output, y if workload.metrics else y.expand_as(output))
        ensemble.backward(losses, output, workload.likelihood(draws[0] if draws else output.new_empty(0)))
        self.optimizer.step()
        return losses

    def set_rate(self, share: float) -> None:
        """Rates of an ensemble are constant."""
        if share != 1:
            raise TrialError("an ensemble has constant learning rates")

    def measure(self) -> list[dict[str, float]]:
        """Of all networks."""
        found: list[dict[str, float]] = self._workload.measure(self._ensemble, self.model)
        return found

    def freeze(self, number: int) -> None:
        """Make it a network of zeros, which goes on without overflowing."""
        for tensor in _tensors(self.model, [self.optimizer]).values():
            if tensor.dim():
                tensor[number].zero_()

    def state(self) -> dict[str, Any]:
        """Weights, and what the optimizer keeps."""
        return {name: tensor.cpu().clone() for name, tensor in _tensors(self.model, [self.optimizer]).items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """All of it."""
        for name, tensor in _tensors(self.model, [self.optimizer]).items():
            tensor.copy_(state[name])

    def weights(self, number: int) -> list[Tensor]:
        """Of one of the networks, in the shapes that it has alone."""
        own = [parameter.detach()[number] for parameter in self.model.parameters()]
        # A stacked bias has a dimension for the rows that it is added to.
        return [tensor[0] if position % 2 else tensor for position, tensor in enumerate(own)]


class Graphs:
    """A step that replays the CUDA graph of its batch's shape, such as sentences padded to the longest of a few.

    A shape that comes seldom never gets one: its first steps, `warmup` of them, run as they are. So do special ones.
    """

    def __init__(self, prepared: Prepared, warmup: int) -> None:
        self._prepared, self._warmup = prepared, warmup
        self._steps: dict[tuple[Size, ...], Callable[..., Tensor]] = {}

    def __call__(self, *batch: Tensor) -> Tensor:
        """One training step."""
        if self._prepared.special:
            return self._prepared.step(*batch)
        shapes, done = tuple(tensor.shape for tensor in batch), self._prepared.done
        if shapes not in self._steps:
            self._steps[shapes] = isaac.capture(self._prepared.step, *batch, warmup=self._warmup)
        loss = self._steps[shapes](*batch)
        # A replay does not count.
        self._prepared.done = done + 1
        return loss


def can_stack(trial: Trial) -> bool:
    """Whether an ensemble can train this run."""
    found, how = method.find(trial.method)
    own = {"learning_rate", "damping", "output_damping", "curvature"}
    chain = trial.workload in ("mnist-mlp", "mnist-autoencoder", "fashion-autoencoder")
    return chain and found.stacks and how != "line" and trial.schedule == "constant" and set(dict(trial.settings)) <= own


def alike(trial: Trial) -> Trial | None:
    """What runs have in common that an ensemble can train together; None where it cannot train this one."""
    if not can_stack(trial):
        return None
    settings = (("curvature", trial.get("curvature", "sampled")),) if math.isfinite(trial.output_damping) else ()
    base = trial.method.partition("+")[0]
    return replace(trial, method=base, settings=settings, seed=0, rules="")


@contextlib.contextmanager
def _unseen(model: nn.Module, stateful: Sequence[Any], seed: int) -> Iterator[None]:
    """Afterwards everything is as it was: weights, and optimizers that have their state, at zero, where they all start."""
    start = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    yield
    with torch.no_grad():
        for name, tensor in _tensors(model, stateful).items():
            if name not in start:
                tensor.zero_()
        for name, tensor in model.state_dict().items():
            tensor.copy_(start[name])
    torch.manual_seed(seed)


def _tensors(model: nn.Module, stateful: Sequence[Any]) -> dict[str, Tensor]:
    """Everything that a step changes, by name."""
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for place, part in enumerate(stateful):
        if isinstance(part, torch.optim.Optimizer):
            named |= {f"optimizer.{place}.{number}.{name}": value for number, name, value in _kept(part)}
    return named


def _kept(part: torch.optim.Optimizer) -> Iterator[tuple[int, str, Tensor]]:
    """The tensors that an optimizer keeps: of which parameter, what, and the tensor."""
    parameters = [parameter for group in part.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        for name, value in part.state[parameter].items():
            if isinstance(value, Tensor):
                yield number, name, value
