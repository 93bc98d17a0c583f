"""The paper's fully connected networks: a classifier and the auto-encoder, on MNIST, Fashion-MNIST or the digits."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import isaac_newton as isaac
from isaac_lab import noise
from isaac_lab.data import sets
from isaac_lab.trial import TrialError
from isaac_lab.workload import Form, Workload, registered
from isaac_lab.workloads.examples import MOST_MEASURED, parted

#: Numbers that an evaluation computes at once in each layer.
EVALUATED_AT_ONCE = {"cpu": 2**22, "cuda": 2**28}
#: Layer sizes of the paper's auto-encoder, which is that of Botev et al. (2017).
AUTOENCODER = (784, 1000, 500, 30, 500, 1000, 784)


def relu_layers(sizes: Sequence[int]) -> nn.Sequential:
    """The paper's fully connected networks: linear layers from each size to the next, fc1, fc2, …, with ReLU between them."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, (fan_in, fan_out) in enumerate(pairwise(sizes), start=1):
        layers[f"fc{number}"] = nn.Linear(fan_in, fan_out)
        if number < len(sizes) - 1:
            layers[f"relu{number}"] = nn.ReLU()
    return nn.Sequential(layers)


class Network(Workload):
    """Linear layers with ReLU between them, and the cross-entropy of classes; where it is told to, an auto-encoder.

    An incomplete last batch is dropped. Where they are `standardized`, the pixels of all images for training have mean 0 and
    deviation 1, and others are moved alike.
    """

    flat = True

    def __init__(
        self, name: str, hidden: Sequence[int], form: Form, *, reconstructs: bool = False, standardized: bool = False
    ) -> None:
        data, batch, device = sets.load(name, form.folder), 60 if form.batch is None else form.batch, form.device
        # The same for every seed, so that runs with different seeds differ in nothing else.
        shuffled = torch.randperm(len(data.train_images), generator=noise.generator("examples"))
        if not 0 <= form.examples <= len(shuffled):
            raise TrialError(f"examples must be at most {len(shuffled)}, all that {name} has, got {form.examples}")
        train, tests = (data.train_images, data.train_labels), (data.test_images, data.test_labels)
        (inputs, labels), aside = parted(train, tests, form)
        if standardized:
            mean, deviation = inputs.mean(), inputs.std()
            inputs, aside = (inputs - mean) / deviation, ((aside[0] - mean) / deviation, aside[1])
        if not 1 <= batch <= len(inputs):
            raise TrialError(f"batch must be at most {len(inputs)}, the number of training examples, got {batch}")
        if not hidden or min(hidden) < 1:
            raise TrialError(f"width must be at least 1, got {min(hidden, default=0)}")
        self.data, self.checksum, self.batch, self._device = name, data.checksum, batch, device
        self.inputs, self.targets, *test = (tensor.to(device) for tensor in (inputs, labels, *aside))
        self.reconstructs = reconstructs
        self.loss_fn: Callable[..., Tensor] = F.mse_loss if reconstructs else F.cross_entropy
        self._noise: Any = noise.GivenNormal if reconstructs else noise.GivenUniform
        self.metrics = {} if reconstructs else {"test_accuracy": "Test accuracy"}
        if reconstructs:
            self.targets, test[1] = self.inputs, test[0]
        self.test = test[0], test[1]
        measured = shuffled[shuffled < len(inputs)][:MOST_MEASURED].to(device)
        self.measured = self.inputs[measured], self.targets[measured]
        self.sizes = (inputs.shape[1], *hidden, inputs.shape[1] if reconstructs else data.classes)
        self.steps = len(self.inputs) // batch
        self.title = f"Auto-encoder {'-'.join(map(str, self.sizes))}, {name}"
        if not reconstructs:
            self.title = f"Classifier of {len(hidden) + 1} layers × {hidden[0]}, {name}"

    def build(self) -> nn.Module:
        """With torch's own initial weights."""
        return relu_layers(self.sizes)

    def batches(self, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All examples in a new order, without the rest that fills no batch."""
        yield from self._in(torch.randperm(len(self.inputs), generator=noise.generator("order", seed, epoch)))

    def _in(self, order: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for index in order.to(self._device)[: self.steps * self.batch].view(self.steps, self.batch):
            yield self.inputs[index], self.targets[index]

    def draws(self, seed: int, epoch: int) -> Iterator[Tensor]:
        """Uniform numbers for classes, normal ones for pixels."""
        random = noise.generator("labels", seed, epoch, device=self._device)
        for _ in range(self.steps):
            yield self._noise.draw(self.batch, self.sizes[-1], random)

    def likelihood(self, numbers: Tensor) -> isaac.Likelihood:
        """Of the mean loss."""
        made: isaac.Likelihood = self._noise(numbers)
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
        columns = [train, *self._measure(outputs, model, *self.test)]
        names = ("train_loss", "test_loss", *self.metrics)
        return [dict(zip(names, row, strict=False)) for row in zip(*columns, strict=True)]

    def _measure(
        self, outputs: Callable[[Tensor], Tensor], model: nn.Module, inputs: Tensor, targets: Tensor
    ) -> list[list[float]]:
        """Mean loss and share of right answers of each network."""
        widest = max(max(parameter.shape[-2:]) for parameter in model.parameters())
        copies = outputs(inputs[:1]).shape[0]
        rows = max(1, EVALUATED_AT_ONCE[self._device] // (copies * widest))
        losses, right = (torch.zeros(copies, dtype=torch.float64, device=inputs.device) for _ in range(2))
        for x, y in zip(inputs.split(rows), targets.split(rows), strict=True):
            output = outputs(x)
            if self.reconstructs:
                losses += (output - y).square_().mean(2).sum(1, dtype=torch.float64)
            else:
                each = F.cross_entropy(output.flatten(0, 1), y.repeat(copies), reduction="none")
                losses += each.view(copies, -1).sum(1, dtype=torch.float64)
                right += (output.argmax(2) == y).sum(1)
        return [(losses / len(inputs)).tolist(), (right.float() / len(inputs)).tolist()]


class Digits(Network):
    """The demo's: in the order of one generator for each seed, which its committed records have."""

    def batches(self, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All examples in a new order."""
        random = torch.Generator().manual_seed(seed)
        *_, order = (torch.randperm(len(self.inputs), generator=random) for _ in range(epoch))
        yield from self._in(order)


@registered("mnist-mlp", "width", "batch", "data", "examples", "split", "standardized")
def mnist_mlp(form: Form, *, width: int = 0, data: str = "", standardized: bool = False) -> Workload:
    """Figure 1's network: four hidden layers of 400, or 50 in the small form."""
    hidden = [width or (50 if form.small else 400)] * 4
    return Network(data or ("digits" if form.small else "mnist"), hidden, form, standardized=standardized)


def _autoencoder(name: str, form: Form, *, data: str = "") -> Workload:
    """The paper's, an eighth as wide in the small form."""
    hidden = [max(8, size // 8) if form.small else size for size in AUTOENCODER[1:-1]]
    return Network(data or ("digits" if form.small else name), hidden, form, reconstructs=True)


for _name, _data in {"mnist-autoencoder": "mnist", "fashion-autoencoder": "fashion-mnist"}.items():
    registered(_name, "batch", "data", "examples", "split")(partial(_autoencoder, _data))
# On the digits of scikit-learn: the paper's network, and a small auto-encoder.
registered("digits-mlp")(partial(Digits, "digits", [400] * 4))
registered("digits-autoencoder")(partial(Network, "digits", [200, 100, 20, 100, 200], reconstructs=True))


@registered("digits-convolutions")
class Convolutions(Digits):
    """Two convolutions with two linear layers after them, on square images."""

    flat = False

    def __init__(self, form: Form) -> None:
        super().__init__("digits", [128], form)
        self.title = "Two convolutions and two linear layers, digits"

    def build(self) -> nn.Module:
        """With 32 and 64 channels."""
        side = math.isqrt(self.sizes[0])
        return nn.Sequential(
            nn.Unflatten(1, (1, side, side)),
            *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(64 * (side // 4) ** 2, 128), nn.ReLU(), nn.Linear(128, self.sizes[-1])),
        )
