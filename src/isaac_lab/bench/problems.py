"""What a step is measured on: a network, a fixed random batch for it, and a loss."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn

from isaac_lab.models import AUTOENCODER, EncoderClassifier, ResNet18, relu_layers

#: The paper's.
BATCH = 60


@dataclass(frozen=True)
class Problem:
    """One model of a benchmark.

    Args:
        name: What options, records and tables call it.
        title: The same for people.
        batch: Samples in a batch.
        build: Makes the network.
        draw: Makes inputs and targets.
        loss_fn: The loss, a mean over the batch.
        sizes: Of the layers, where the network is a chain of linear ones.
    """

    name: str
    title: str
    batch: int
    build: Callable[[], nn.Module]
    draw: Callable[[], tuple[Tensor, Tensor]]
    loss_fn: nn.Module
    sizes: tuple[int, ...] = ()

    def make(self, device: str) -> tuple[nn.Module, Tensor, Tensor]:
        """The network, inputs and targets on `device`; the same numbers every time."""
        # The random numbers of whoever calls this go on as if nothing had happened.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model, (x, y) = self.build(), self.draw()
        return model.to(device), x.to(device), y.to(device)


def classes(
    name: str, title: str, batch: int, build: Callable[[], nn.Module], inputs: Callable[[], Tensor], outputs: int
) -> Problem:
    """Cross-entropy of so many outputs against random classes."""
    return Problem(name, title, batch, build, lambda: (inputs(), torch.randint(outputs, (batch,))), nn.CrossEntropyLoss())


def chain(sizes: tuple[int, ...], batch: int, *, name: str, title: str, classified: bool = False) -> Problem:
    """Linear layers with ReLU between them, on inputs in [0, 1].

    Args:
        sizes: From the inputs to the outputs.
        batch: Samples in a batch.
        name: As in `Problem`.
        title: As in `Problem`.
        classified: As in `classes`; otherwise the mean squared error against numbers in [0, 1], which are the inputs
            themselves where the sizes allow it.
    """
    build = partial(relu_layers, sizes)
    if classified:
        found = classes(name, title, batch, build, lambda: torch.rand(batch, sizes[0]), sizes[-1])
        return replace(found, sizes=sizes)

    def draw() -> tuple[Tensor, Tensor]:
        x = torch.rand(batch, sizes[0])
        return x, x.clone() if sizes[-1] == sizes[0] else torch.rand(batch, sizes[-1])

    return Problem(name, title, batch, build, draw, nn.MSELoss(), sizes)


def encoder(*, batch: int = 8, length: int = 128) -> Problem:
    """Two layers in the shape of BERT-base."""
    title = f"BERT-shaped, 2 layers, batch {batch}, length {length}"
    return classes("encoder", title, batch, EncoderClassifier, lambda: torch.randint(30522, (batch, length)), 2)


def resnet(*, batch: int) -> Problem:
    """ResNet-18 on images of 32 × 32."""
    return classes("resnet18", f"ResNet-18 (CIFAR), batch {batch}", batch, ResNet18, lambda: torch.rand(batch, 3, 32, 32), 10)


def _table2() -> dict[str, Problem]:
    problems = {
        str(width): chain((784, *[width] * 4, 10), BATCH, name=str(width), title=f"5 layers × {width}", classified=True)
        for width in (100, 400, 1600, 6400)
    }
    return problems | {"autoencoder": chain(AUTOENCODER, BATCH, name="autoencoder", title="auto-encoder")}


#: The models of the paper's Table 2.
TABLE2: Mapping[str, Problem] = MappingProxyType(_table2())
