"""The training loop: one network, or many at once, from the first epoch to the last, with everything that a record needs."""

import abc
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import isaac_newton as isaac
from isaac_lab import noise
from isaac_lab.config import Config, ConfigError
from isaac_lab.models import relu_layers
from isaac_lab.store import Epoch, Point, rounded
from isaac_newton.ensemble import SGD, Adam

if TYPE_CHECKING:
    from isaac_lab.data.sets import Dataset

__all__ = ["Alone", "Stacked", "Training", "can_stack"]

MOMENTUM = 0.9
#: A run with a larger training loss, or one that is no number, has diverged.
LARGEST_LOSS = 1e6
#: Training examples that the training loss is measured on.
MOST_MEASURED = 10_000
#: Numbers that an evaluation computes at once in each layer.
EVALUATED_AT_ONCE = {"cpu": 2**22, "cuda": 2**28}


class Training:
    """A run, or several runs that share everything but learning rate, dampings and seed, trained together.

    Nothing of the state is random: weights, order and noise are functions of seed and epoch (`noise`). So a training that was
    loaded goes on as the one that was saved would have.

    Args:
        configs: The runs.
        data: Their data set.
        stacked: Train them as one ensemble; else there is one run.
        device: "cpu" or "cuda".
    """

    def __init__(self, configs: Sequence[Config], data: "Dataset", *, stacked: bool, device: str = "cpu") -> None:
        self._began = time.perf_counter()
        self.configs = tuple(configs)
        self._config, self._device = self.configs[0], device
        self._examples = _Examples(self._config, data, device)
        self._trainer: _Trainer = (Stacked if stacked else Alone)(self.configs, self._examples, device)
        #: Epochs done; −1 before the untrained networks were measured.
        self.epoch = -1
        self.diverged = [False] * len(self.configs)
        self._seconds = self._wall = 0.0
        seeds = sorted({config.seed for config in self.configs})
        self._seeds = seeds
        #: For each network the number of its seed; None where all have the same and share one batch.
        self._which = None
        if len(seeds) > 1:
            self._which = torch.tensor([seeds.index(config.seed) for config in self.configs], device=device)
        self._trainer.prepare(*next(self._batches(1)))

    @property
    def steps(self) -> int:
        """Training steps of an epoch."""
        return len(self._examples.inputs) // self._config.batch

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to train."""
        return self.epoch >= self._config.epochs or all(self.diverged)

    def epochs(self) -> Iterator[Epoch]:
        """Train; the untrained networks are measured first, then after each epoch."""
        if self.epoch < 0:
            self.epoch = 0
            yield self._measure()
        while not self.ended:
            batches = self._batches(self.epoch + 1)
            self._wait()
            started = time.perf_counter()
            for batch in batches:
                self._trainer.step(*batch)
            self._wait()
            self._seconds += time.perf_counter() - started
            self.epoch += 1
            yield self._measure()

    def state(self) -> dict[str, Any]:
        """All that changes, on the CPU."""
        return {
            "epoch": self.epoch,
            "seconds": self._seconds,
            "wall": self._now(),
            "diverged": list(self.diverged),
            "tensors": {name: tensor.cpu().clone() for name, tensor in self._trainer.tensors().items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        tensors = self._trainer.tensors()
        saved = state["tensors"]
        if {name: tensor.shape for name, tensor in saved.items()} != {name: tensor.shape for name, tensor in tensors.items()}:
            raise ConfigError("the checkpoint is of other networks, or of another optimizer")
        for name, tensor in tensors.items():
            tensor.copy_(saved[name])
        self.epoch, self.diverged = state["epoch"], list(state["diverged"])
        self._seconds, self._wall = state["seconds"], state["wall"]
        self._began = time.perf_counter()

    def digests(self) -> list[str | None]:
        """Of the weights of each network as it is now; None where it diverged."""
        return [None if gone else self._digest(number) for number, gone in enumerate(self.diverged)]

    def weights(self, number: int = 0) -> list[Tensor]:
        """Weight and bias of each layer of one network, in turn."""
        return self._trainer.weights(number)

    def _digest(self, number: int) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for tensor in self.weights(number):
            digest.update(tensor.contiguous().cpu().numpy().tobytes())
        return digest.hexdigest()

    def _batches(self, epoch: int) -> Iterator[tuple[Tensor, ...]]:
        """The inputs of each step of an epoch: the numbers of its examples, and noise where labels are drawn.

        The order is made and uploaded at once, before the clock starts; noise is drawn step by step.
        """
        count, batch = len(self._examples.inputs), self._config.batch
        orders = [torch.randperm(count, generator=noise.generator("order", seed, epoch)) for seed in self._seeds]
        order = torch.stack([one[: self.steps * batch].view(self.steps, batch) for one in orders], dim=1).to(self._device)
        draws = any(config.draws for config in self.configs)
        randoms = [noise.generator("labels", seed, epoch, device=self._device) for seed in self._seeds] if draws else []
        draw, outputs = self._examples.noise.draw, self._examples.outputs

        def batches() -> Iterator[tuple[Tensor, ...]]:
            for indices in order:
                drawn = [draw(batch, outputs, random) for random in randoms]
                if self._which is None:
                    yield indices[0], *drawn
                else:
                    yield indices[self._which], *([torch.stack(drawn)[self._which]] if drawn else [])

        return batches()

    def _measure(self) -> Epoch:
        examples, step = self._examples, self.epoch * self.steps
        train, _ = self._trainer.evaluate(examples.measured_inputs, examples.measured_targets)
        test, accuracy = self._trainer.evaluate(examples.test_inputs, examples.test_targets)
        seconds = rounded(self._seconds)
        points: list[Point | None] = []
        now_diverged: list[int] = []
        for number, gone in enumerate(self.diverged):
            if gone:
                points.append(None)
                continue
            correct = None if accuracy is None else rounded(accuracy[number])
            points.append(Point(self.epoch, step, _loss(train[number]), _loss(test[number]), correct, seconds))
            # Written so that NaN is caught.
            if not train[number] <= LARGEST_LOSS:
                now_diverged.append(number)
                self.diverged[number] = True
                self._trainer.freeze(number)
        return Epoch(self.epoch, step, seconds, rounded(self._now()), tuple(points), tuple(now_diverged))

    def _wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()

    def _now(self) -> float:
        return self._wall + time.perf_counter() - self._began


class _Examples:
    """The data of a run on its device; a batch is gathered there by its numbers."""

    def __init__(self, config: Config, data: "Dataset", device: str) -> None:
        classification = config.task == "classification"
        inputs, labels = data.train_images, data.train_labels
        # The same for every seed, so that runs with different seeds differ in nothing else.
        shuffled = torch.randperm(len(inputs), generator=noise.generator("examples"))
        if config.examples > len(inputs):
            raise ConfigError(f"examples must be at most {len(inputs)}, all that {data.name} has, got {config.examples}")
        if config.examples:
            inputs, labels = inputs[shuffled[: config.examples]], labels[shuffled[: config.examples]]
        if config.batch > len(inputs):
            raise ConfigError(f"batch must be at most {len(inputs)}, the number of training examples, got {config.batch}")
        chosen = shuffled[shuffled < len(inputs)][:MOST_MEASURED]
        self.noise = noise.GivenUniform if classification else noise.GivenNormal
        self.outputs = data.classes if classification else inputs.shape[1]
        self.inputs, self.test_inputs = inputs.to(device), data.test_images.to(device)
        self.targets = labels.to(device) if classification else self.inputs
        self.test_targets = data.test_labels.to(device) if classification else self.test_inputs
        self.measured_inputs = self.inputs[chosen.to(device)]
        self.measured_targets = self.targets[chosen.to(device)]

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets with these numbers, in the shape of `index`."""
        flat = index.flatten()
        inputs, targets = self.inputs.index_select(0, flat), self.targets.index_select(0, flat)
        return inputs.view(*index.shape, -1), targets.view(*index.shape, *targets.shape[1:])


class _Trainer(abc.ABC):
    """What `Training` needs to know of the networks: how they step, what they put out, and which tensors they are."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(self, configs: Sequence[Config], examples: _Examples, device: str) -> None:
        self._examples, self._device = examples, device
        self._classification = configs[0].task == "classification"
        self._loss_fn = F.cross_entropy if self._classification else F.mse_loss
        #: One training step; a replay of it once it is captured.
        self.step: Callable[..., Tensor] = self._step

    @abc.abstractmethod
    def _step(self, index: Tensor, *draws: Tensor) -> Tensor:
        """Train on the examples with these numbers; returns the loss of each network."""

    @abc.abstractmethod
    def outputs(self, x: Tensor) -> Tensor:
        """Of all networks (networks, rows, outputs) for one batch."""

    @abc.abstractmethod
    def weights(self, number: int) -> list[Tensor]:
        """Of one network."""

    @abc.abstractmethod
    def freeze(self, number: int) -> None:
        """Training goes on without this network."""

    def prepare(self, *inputs: Tensor) -> None:
        """Step for nothing, so that the optimizer has its state and CUDA its graph, and put everything back.

        From then on all steps are alike: those of a new run, and those of a run that goes on.
        """
        start = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        steps = 1
        if self._device == "cuda":
            warm_up = 3
            self.step = isaac.capture(self._step, *inputs, warmup=warm_up)
            steps += warm_up
        for _ in range(steps):
            self.step(*inputs)
        for name, tensor in self.tensors().items():
            if name in start:
                tensor.copy_(start[name])
            else:
                tensor.zero_()  # what every optimizer here starts from

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a step changes, by name."""
        named = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        for number, parameter in enumerate(self.model.parameters()):
            for name, value in self.optimizer.state[parameter].items():
                if isinstance(value, Tensor):
                    named[f"optimizer.{number}.{name}"] = value
        return named

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> tuple[list[float], list[float] | None]:
        """Mean loss and accuracy of each network."""
        widest = max(max(parameter.shape[-2:]) for parameter in self.model.parameters())
        copies = self.outputs(inputs[:1]).shape[0]
        rows = max(1, EVALUATED_AT_ONCE[self._device] // (copies * widest))
        losses = torch.zeros(copies, dtype=torch.float64, device=inputs.device)
        correct = torch.zeros(copies, dtype=torch.int64, device=inputs.device)
        for x, y in zip(inputs.split(rows), targets.split(rows), strict=True):
            output = self.outputs(x)
            if self._classification:
                flat, repeated = output.flatten(0, 1), y.repeat(copies)
                losses += F.cross_entropy(flat, repeated, reduction="none").view(copies, -1).sum(1, dtype=torch.float64)
                correct += (output.argmax(2) == y).sum(1)
            else:
                losses += (output - y).square_().mean(2).sum(1, dtype=torch.float64)
        return (losses / len(inputs)).tolist(), (correct / len(inputs)).tolist() if self._classification else None


class Alone(_Trainer):
    """One network, with torch's own optimizers."""

    def __init__(self, configs: Sequence[Config], examples: _Examples, device: str) -> None:
        super().__init__(configs, examples, device)
        (config,) = configs
        self.model = _network(config, examples).to(device)
        self._handle: isaac.Handle | None = None
        self._kfac: _ConventionalKFAC | None = None
        names = [f"fc{number}" for number in config.layers or range(1, len(config.hidden) + 2)]
        if config.kfac:
            self._kfac = _ConventionalKFAC(self.model, names, config)
        elif config.sector != "gradient":
            self._handle = isaac.attach(
                self.model,
                config.damping,
                layers=names,
                output_damping=config.output_damping,
                output_curvature="empirical" if config.curvature == "empirical" else "sampled",
            )
        self._zeta = config.sector == "zeta"
        if config.optimizer == "adam":
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=config.learning_rate)
        else:
            momentum = MOMENTUM if config.optimizer == "momentum" else 0.0
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=config.learning_rate, momentum=momentum)

    def _step(self, index: Tensor, *draws: Tensor) -> Tensor:
        x, y = self._examples.batch(index)
        self.optimizer.zero_grad()
        output = self.model(x)
        loss = self._loss_fn(output, y)
        likelihood = self._examples.noise(draws[0] if draws else output.new_empty(0))
        if self._kfac is not None:
            self._kfac.backward(loss, output, likelihood)
        elif self._handle is not None and self._zeta:
            self._handle.backward(loss, output, likelihood, scale=1.0)
        else:
            loss.backward()
        self.optimizer.step()
        return loss

    def outputs(self, x: Tensor) -> Tensor:
        """Of the one network."""
        self.model.eval()
        output: Tensor = self.model(x)
        self.model.train()
        return output[None]

    def weights(self, number: int) -> list[Tensor]:
        """Of the one network."""
        return [parameter.detach() for parameter in self.model.parameters()]

    def freeze(self, number: int) -> None:
        """There is no other, so training has ended."""


class Stacked(_Trainer):
    """Many networks, as one ensemble."""

    def __init__(self, configs: Sequence[Config], examples: _Examples, device: str) -> None:
        super().__init__(configs, examples, device)
        for config in configs:
            if not can_stack(config):
                raise ConfigError("an ensemble conditions all layers of its networks, and not by explicit K-FAC")
        curvatures = {config.curvature for config in configs if config.sector == "zeta"}
        if len(curvatures) > 1:
            raise ConfigError("the networks of an ensemble must have one curvature")
        networks: dict[int, nn.Module] = {}
        for config in configs:
            if config.seed not in networks:
                networks[config.seed] = _network(config, examples).to(device)
        self.model = self._ensemble = isaac.Ensemble(
            [networks[config.seed] for config in configs],
            damping=[config.damping for config in configs],
            output_damping=[config.output_damping for config in configs],
            output_curvature="empirical" if "empirical" in curvatures else "sampled",
        )
        rates = [config.learning_rate for config in configs]
        if configs[0].optimizer == "adam":
            self.optimizer = Adam(self._ensemble, rates)
        else:
            self.optimizer = SGD(self._ensemble, rates, momentum=MOMENTUM if configs[0].optimizer == "momentum" else 0.0)

    def _step(self, index: Tensor, *draws: Tensor) -> Tensor:
        ensemble, (x, y) = self._ensemble, self._examples.batch(index)
        self.optimizer.zero_grad()
        output = ensemble(x)
        losses = ensemble.losses(self._loss_fn, output, y if self._classification else y.expand_as(output))
        ensemble.backward(losses, output, self._examples.noise(draws[0] if draws else output.new_empty(0)))
        self.optimizer.step()
        return losses

    def outputs(self, x: Tensor) -> Tensor:
        """Of all networks."""
        output: Tensor = self._ensemble(x)
        return output

    def weights(self, number: int) -> list[Tensor]:
        """Of one of the networks, in the shapes that it has alone."""
        own = [parameter.detach()[number] for parameter in self.model.parameters()]
        # A stacked bias has a dimension for the rows that it is added to.
        return [tensor[0] if position % 2 else tensor for position, tensor in enumerate(own)]

    def freeze(self, number: int) -> None:
        """Make it a network of zeros, which goes on without overflowing."""
        for tensor in self.tensors().values():
            if tensor.dim():
                tensor[number].zero_()


class _ConventionalKFAC:
    """K-FAC from its definition: of each layer the inputs and output gradients, both factors, and a solve with each."""

    def __init__(self, model: nn.Module, names: Sequence[str], config: Config) -> None:
        self._damping, self._empirical = config.damping, config.curvature == "empirical"
        self._layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        self._conditioned = set(names)
        self._seen: dict[str, tuple[Tensor, Tensor]] = {}
        for name, layer in self._layers.items():
            layer.register_forward_hook(self._hook(name))

    def backward(self, loss: Tensor, output: Tensor, likelihood: isaac.Likelihood) -> None:
        """Leave λ² (B + λI)⁻¹ ∇ (A + λI)⁻¹ in the gradients of the weights; with λ² it is ζ, at ζ's learning rates."""
        outputs = [out for _, out in self._seen.values()]
        gradients = torch.autograd.grad(loss, outputs, retain_graph=not self._empirical)
        if self._empirical:
            sampled = tuple(g * len(g) for g in gradients)
        else:
            sampled = torch.autograd.grad(output, outputs, likelihood.sample(output.detach()))
        for (name, (a, _)), g, gbar in zip(self._seen.items(), gradients, sampled, strict=True):
            layer = self._layers[name]
            if name in self._conditioned:
                layer.weight.grad = self._damping**2 * isaac.equations.kfac(g, gbar, a, self._damping)
            else:
                layer.weight.grad = g.mT @ a
            layer.bias.grad = g.sum(0)
        self._seen = {}

    def _hook(self, name: str) -> Any:
        def record(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if torch.is_grad_enabled():
                self._seen[name] = (inputs[0].detach(), output)

        return record


def can_stack(config: Config) -> bool:
    """Whether an ensemble can train this run."""
    return not config.kfac and not config.layers


def _network(config: Config, examples: _Examples) -> nn.Module:
    """The network that every run with this seed and these sizes starts from."""
    # The random numbers of whoever calls this go on as if nothing had happened.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return relu_layers([examples.inputs.shape[1], *config.hidden, examples.outputs])


def _loss(value: float) -> float:
    return rounded(value) if math.isfinite(value) else math.nan
