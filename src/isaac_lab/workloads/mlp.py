"""The paper's fully connected networks: a classifier and the auto-encoder, on MNIST, Fashion-MNIST or the digits."""

import abc
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import isaac_newton as isaac
from isaac_lab import noise
from isaac_lab.data import sets
from isaac_lab.models import AUTOENCODER, relu_layers
from isaac_lab.trial import TrialError
from isaac_lab.workload import Workload, registered, seeded
from isaac_lab.workloads.examples import cut

#: Training examples that the training loss is measured on.
MOST_MEASURED = 10_000
#: Numbers that an evaluation computes at once in each layer.
EVALUATED_AT_ONCE = {"cpu": 2**22, "cuda": 2**28}


class Network(Workload):
    """Linear layers with ReLU between them.

    Args:
        name: Of the data set.
        hidden: Sizes of the layers between input and output.
        device: "cpu" or "cuda".
        folder: Where data sets are looked for first.
        batch: Examples of a step. An incomplete last batch is dropped.
        examples: So many training examples, the same for every seed; 0 for all.
        split: With "validation", a tenth of the training examples stands in place of those for tests.
        standardized: Whether the pixels of all images for training have mean 0 and deviation 1, and others are moved alike.
    """

    flat = True
    loss_fn: Callable[..., Tensor]
    noise: Any

    def __init__(
        self,
        name: str,
        hidden: Sequence[int],
        device: str,
        folder: Path | None,
        *,
        batch: int = 60,
        examples: int = 0,
        split: str = "test",
        standardized: bool = False,
    ) -> None:
        data = sets.load(name, folder)
        inputs, labels = data.train_images, data.train_labels
        # The same for every seed, so that runs with different seeds differ in nothing else.
        shuffled = torch.randperm(len(inputs), generator=noise.generator("examples"))
        if not 0 <= examples <= len(inputs):
            raise TrialError(f"examples must be at most {len(inputs)}, all that {name} has, got {examples}")
        aside = data.test_images, data.test_labels
        if examples or split == "validation":
            chosen, held = cut(len(inputs), split, examples)
            aside = (inputs[held], labels[held]) if split == "validation" else aside
            inputs, labels = inputs[chosen], labels[chosen]
        if standardized:
            mean, deviation = inputs.mean(), inputs.std()
            inputs, aside = (inputs - mean) / deviation, ((aside[0] - mean) / deviation, aside[1])
        if not 1 <= batch <= len(inputs):
            raise TrialError(f"batch must be at most {len(inputs)}, the number of training examples, got {batch}")
        if not hidden or min(hidden) < 1:
            raise TrialError(f"width must be at least 1, got {min(hidden, default=0)}")
        self.data, self.checksum, self.batch, self._device = name, data.checksum, batch, device
        self.inputs, self.targets = self._pair(inputs.to(device), labels.to(device))
        self.test = self._pair(aside[0].to(device), aside[1].to(device))
        measured = shuffled[shuffled < len(inputs)][:MOST_MEASURED].to(device)
        self.measured = self.inputs[measured], self.targets[measured]
        self.sizes = (inputs.shape[1], *hidden, self._outputs(data))
        self.steps, self.last = len(self.inputs) // batch, f"fc{len(self.sizes) - 1}"

    def model(self, seed: int) -> nn.Module:
        """Linear layers with ReLU between them."""
        return seeded(lambda: relu_layers(self.sizes), seed).to(self._device)

    def batches(self, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All examples in a new order, without the rest that fills no batch."""
        order = torch.randperm(len(self.inputs), generator=noise.generator("order", seed, epoch)).to(self._device)
        for index in order[: self.steps * self.batch].view(self.steps, self.batch):
            yield self.inputs[index], self.targets[index]

    def draws(self, seed: int, epoch: int) -> Iterator[Tensor]:
        """Uniform numbers for classes, normal ones for pixels."""
        random = noise.generator("labels", seed, epoch, device=self._device)
        for _ in range(self.steps):
            yield self.noise.draw(self.batch, self.sizes[-1], random)

    def likelihood(self, numbers: Tensor) -> isaac.Likelihood:
        """Of the mean loss."""
        made: isaac.Likelihood = self.noise(numbers)
        return made

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Mean over the batch."""
        return self.loss_fn(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """On 10,000 training examples and on all test examples."""
        model.eval()
        (found,) = self.measure(lambda x: model(x)[None], model)
        model.train()
        return found

    @torch.no_grad()
    def measure(self, outputs: Callable[[Tensor], Tensor], model: nn.Module) -> list[dict[str, float]]:
        """Of each network; `outputs` gives those of all networks (networks, rows, outputs) for one batch."""
        train, _ = self._measure(outputs, model, *self.measured)
        test, right = self._measure(outputs, model, *self.test)
        found = [{"train_loss": own, "test_loss": other} for own, other in zip(train, test, strict=True)]
        if self.metrics:
            found = [own | {"test_accuracy": share} for own, share in zip(found, right, strict=True)]
        return found

    def _measure(
        self, outputs: Callable[[Tensor], Tensor], model: nn.Module, inputs: Tensor, targets: Tensor
    ) -> tuple[list[float], list[float]]:
        """Mean loss and share of right answers of each network."""
        widest = max(max(parameter.shape[-2:]) for parameter in model.parameters())
        copies = outputs(inputs[:1]).shape[0]
        rows = max(1, EVALUATED_AT_ONCE[self._device] // (copies * widest))
        losses, right = (torch.zeros(copies, dtype=torch.float64, device=inputs.device) for _ in range(2))
        for x, y in zip(inputs.split(rows), targets.split(rows), strict=True):
            self._add(losses, right, outputs(x), y)
        return (losses / len(inputs)).tolist(), (right.float() / len(inputs)).tolist()

    @abc.abstractmethod
    def _pair(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""

    @abc.abstractmethod
    def _outputs(self, data: sets.Dataset) -> int:
        """How many outputs there are."""

    @abc.abstractmethod
    def _add(self, losses: Tensor, right: Tensor, output: Tensor, y: Tensor) -> None:
        """Add the losses of a batch, and how many answers are right, for each network."""


class Classifier(Network):
    """Cross-entropy of ten classes."""

    loss_fn = staticmethod(F.cross_entropy)
    noise = noise.GivenUniform
    metrics = MappingProxyType({"test_accuracy": "Test accuracy"})

    def _pair(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, labels

    def _outputs(self, data: sets.Dataset) -> int:
        return data.classes

    def _add(self, losses: Tensor, right: Tensor, output: Tensor, y: Tensor) -> None:
        copies = len(losses)
        each = F.cross_entropy(output.flatten(0, 1), y.repeat(copies), reduction="none")
        losses += each.view(copies, -1).sum(1, dtype=torch.float64)
        right += (output.argmax(2) == y).sum(1)


class Digits(Classifier):
    """The demo's: in the order of one generator for each seed, which its committed records have."""

    def batches(self, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All examples in a new order."""
        random = torch.Generator().manual_seed(seed)
        *_, order = (torch.randperm(len(self.inputs), generator=random) for _ in range(epoch))
        for index in order.to(self._device).view(self.steps, self.batch):
            yield self.inputs[index], self.targets[index]


class Convolutions(Digits):
    """Two convolutions with two linear layers after them, on square images."""

    flat = False

    def model(self, seed: int) -> nn.Module:
        """With 32 and 64 channels."""
        side = math.isqrt(self.sizes[0])
        return seeded(lambda: _convolutions(side, self.sizes[-1]), seed).to(self._device)


class Autoencoder(Network):
    """Mean squared error to the input."""

    loss_fn = staticmethod(F.mse_loss)
    noise = noise.GivenNormal

    def _pair(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, inputs

    def _outputs(self, data: sets.Dataset) -> int:
        return int(data.train_images.shape[1])

    def _add(self, losses: Tensor, right: Tensor, output: Tensor, y: Tensor) -> None:
        losses += (output - y).square_().mean(2).sum(1, dtype=torch.float64)


@registered("mnist-mlp", "width", "batch", "data", "examples", "split", "standardized")
def mnist_mlp(small: bool, device: str, folder: Path | None, *, width: int = 0, data: str = "", **options: Any) -> Workload:
    """Figure 1's network: four hidden layers of 400, or 50 in the small form."""
    hidden = [width or (50 if small else 400)] * 4
    made = Classifier(data or ("digits" if small else "mnist"), hidden, device, folder, **options)
    made.title = f"Classifier of 5 layers × {made.sizes[1]}, {made.data}"
    return made


@registered("digits-mlp")
def digits_mlp(small: bool, device: str, folder: Path | None) -> Workload:
    """The paper's network on the digits of scikit-learn."""
    made = Digits("digits", [400] * 4, device, folder)
    made.title = "Classifier of 5 layers × 400, digits"
    return made


@registered("digits-autoencoder")
def digits_autoencoder(small: bool, device: str, folder: Path | None) -> Workload:
    """A small auto-encoder on the digits of scikit-learn."""
    made = Autoencoder("digits", [200, 100, 20, 100, 200], device, folder)
    made.title = f"Auto-encoder {'-'.join(map(str, made.sizes))}, digits"
    return made


@registered("digits-convolutions")
def digits_convolutions(small: bool, device: str, folder: Path | None) -> Workload:
    """A small convolutional network on the digits of scikit-learn."""
    made = Convolutions("digits", [128], device, folder)
    made.title, made.last = "Two convolutions and two linear layers, digits", "10"
    return made


def _convolutions(side: int, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, side, side)),
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * (side // 4) ** 2, 128), nn.ReLU(), nn.Linear(128, classes)),
    )


def _autoencoder(name: str, small: bool, device: str, folder: Path | None, *, data: str = "", **variant: Any) -> Workload:
    """The paper's, an eighth as wide in the small form."""
    hidden = [max(8, size // 8) if small else size for size in AUTOENCODER[1:-1]]
    made = Autoencoder(data or ("digits" if small else name), hidden, device, folder, **variant)
    made.title = f"Auto-encoder {'-'.join(map(str, made.sizes))}, {made.data}"
    return made


for _name, _data in {"mnist-autoencoder": "mnist", "fashion-autoencoder": "fashion-mnist"}.items():
    registered(_name, "batch", "data", "examples", "split")(partial(_autoencoder, _data))
