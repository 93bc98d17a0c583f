"""The paper's fully connected networks: a classifier of 5 × 400 and the auto-encoder, on MNIST, Fashion-MNIST or the digits."""

import abc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from isaac_lab import noise
from isaac_lab.data import sets
from isaac_lab.models import AUTOENCODER, relu_layers
from isaac_lab.trials.workload import Workload, registered, seeded

__all__ = ["Autoencoder", "Classifier"]

#: Training examples that the training loss is measured on.
MOST_MEASURED = 10_000


class _Network(Workload):
    batch = 60
    flat = True
    loss_fn: nn.Module

    def __init__(self, name: str, sizes: tuple[int, ...], device: str, folder: Path | None) -> None:
        data = sets.load(name, folder)
        self.data, self.checksum, self.sizes, self._device = name, data.checksum, sizes, device
        self.inputs, self.labels = data.train_images.to(device), data.train_labels.to(device)
        self.test_inputs, self.test_labels = data.test_images.to(device), data.test_labels.to(device)
        self.steps, self.last = len(self.inputs) // self.batch, f"fc{len(sizes) - 1}"
        # The same for every seed and method.
        self._measured = torch.randperm(len(self.inputs), generator=noise.generator("examples"))[:MOST_MEASURED].to(device)

    def model(self, seed: int) -> nn.Module:
        """Linear layers with ReLU between them."""
        return seeded(lambda: relu_layers(self.sizes), seed).to(self._device)

    def batches(self, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All examples in a new order, without the rest that fills no batch."""
        order = torch.randperm(len(self.inputs), generator=noise.generator("order", seed, epoch)).to(self._device)
        for index in order[: self.steps * self.batch].view(self.steps, self.batch):
            yield self._examples(self.inputs[index], self.labels[index])

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Mean over the batch."""
        x, y = batch
        loss: Tensor = self.loss_fn(model(x), y)
        return loss

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """On 10,000 training examples and on all test examples."""
        model.eval()
        measured = self._measured
        train = self._examples(self.inputs[measured], self.labels[measured])
        test = self._examples(self.test_inputs, self.test_labels)
        output = model(test[0])
        found = {
            "train_loss": self.loss_fn(model(train[0]), train[1]).item(),
            "test_loss": self.loss_fn(output, test[1]).item(),
            **self._measure(output, test[1]),
        }
        model.train()
        return found

    @abc.abstractmethod
    def _examples(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""

    def _measure(self, output: Tensor, target: Tensor) -> dict[str, float]:
        return {}


class Classifier(_Network):
    """Cross-entropy of ten classes."""

    loss_fn = nn.CrossEntropyLoss()
    metrics: ClassVar[Mapping[str, str]] = {"test_accuracy": "Test accuracy"}

    def _examples(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, labels

    def _measure(self, output: Tensor, target: Tensor) -> dict[str, float]:
        return {"test_accuracy": (output.argmax(1) == target).double().mean().item()}


class Autoencoder(_Network):
    """Mean squared error to the input."""

    loss_fn = nn.MSELoss()

    def _examples(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, inputs


@registered("mnist-mlp")
def mnist_mlp(small: bool, device: str, folder: Path | None) -> Workload:
    """Figure 1's network of 5 × 400."""
    made = Classifier(*_of("mnist", small, (784, 400, 400, 400, 400, 10), (64, 50, 50, 50, 50, 10)), device, folder)
    made.title = f"Classifier of 5 layers × {made.sizes[1]}, {made.data}"
    return made


@registered("mnist-autoencoder")
def mnist_autoencoder(small: bool, device: str, folder: Path | None) -> Workload:
    """Figure 2's network."""
    return _autoencoder("mnist", small, device, folder)


@registered("fashion-autoencoder")
def fashion_autoencoder(small: bool, device: str, folder: Path | None) -> Workload:
    """Figure 3's network on Fashion-MNIST."""
    return _autoencoder("fashion-mnist", small, device, folder)


def _autoencoder(data: str, small: bool, device: str, folder: Path | None) -> Workload:
    made = Autoencoder(*_of(data, small, AUTOENCODER, (64, 125, 62, 8, 62, 125, 64)), device, folder)
    made.title = f"Auto-encoder {'-'.join(map(str, made.sizes))}, {made.data}"
    return made


def _of(data: str, small: bool, sizes: tuple[int, ...], small_sizes: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    return ("digits", small_sizes) if small else (data, sizes)
