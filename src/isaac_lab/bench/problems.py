"""What a step is measured on: a network, a fixed random batch for it, and a loss."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from isaac_lab.models import AUTOENCODER, EncoderClassifier, ResNet18, relu_layers

#: The paper's.
BATCH = 60
#: Networks of one panel of the paper's Figure 1: 13 values of λ_a times 13 of λ_g and ∞.
COPIES = 182


@dataclass(frozen=True)
class Problem:
    """One model of a benchmark; `batch` samples, a loss that is a mean over them.

    `sizes` are those of the layers, where the network is a chain of linear ones.
    """

    name: str
    title: str
    batch: int
    build: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    targets: Callable[[Tensor], Tensor]  # of these inputs
    loss_fn: nn.Module
    sizes: tuple[int, ...] = ()

    def make(self, device: str) -> tuple[nn.Module, Tensor, Tensor]:
        """The network, inputs and targets on `device`; the same numbers every time."""
        # The random numbers of whoever calls this go on as if nothing had happened.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model, x = self.build(), self.inputs()
            y = self.targets(x)
        return model.to(device), x.to(device), y.to(device)


def classes(
    name: str, title: str, batch: int, build: Callable[[], nn.Module], inputs: Callable[[], Tensor], outputs: int, **more: Any
) -> Problem:
    """Cross-entropy of so many outputs against random classes."""
    return Problem(name, title, batch, build, inputs, lambda _: torch.randint(outputs, (batch,)), nn.CrossEntropyLoss(), **more)


def chain(sizes: tuple[int, ...], batch: int, *, name: str, title: str, classified: bool = False) -> Problem:
    """Linear layers of these sizes with ReLU between them, on inputs in [0, 1].

    They are `classified`, as in `classes`; otherwise the loss is the mean squared error against numbers in [0, 1], which are
    the inputs themselves where the sizes allow it.
    """
    build, inputs = partial(relu_layers, sizes), partial(torch.rand, batch, sizes[0])
    if classified:
        return classes(name, title, batch, build, inputs, sizes[-1], sizes=sizes)
    targets = Tensor.clone if sizes[-1] == sizes[0] else lambda _: torch.rand(batch, sizes[-1])
    return Problem(name, title, batch, build, inputs, targets, nn.MSELoss(), sizes)


def encoder(*, batch: int = 8, length: int = 128) -> Problem:
    """Two layers in the shape of BERT-base."""
    title = f"BERT-shaped, 2 layers, batch {batch}, length {length}"
    return classes("encoder", title, batch, EncoderClassifier, lambda: torch.randint(30522, (batch, length)), 2)


def resnet(*, batch: int) -> Problem:
    """ResNet-18 on images of 32 × 32."""
    return classes("resnet18", f"ResNet-18 (CIFAR), batch {batch}", batch, ResNet18, lambda: torch.rand(batch, 3, 32, 32), 10)


def panel(copies: int = COPIES) -> Problem:
    """So many networks with 400 neurons per layer at once; all see the same batch."""
    sizes = (784, 400, 400, 400, 400, 10)

    def build() -> nn.Module:
        return nn.ModuleList([relu_layers(sizes) for _ in range(copies)])

    title = f"{copies} networks 5 layers × 400 at once"
    return classes(f"grid{copies}", title, BATCH, build, lambda: torch.rand(BATCH, sizes[0]), sizes[-1])


#: The models of the paper's Table 2.
TABLE2: Mapping[str, Problem] = MappingProxyType(
    {
        str(width): chain((784, *[width] * 4, 10), BATCH, name=str(width), title=f"5 layers × {width}", classified=True)
        for width in (100, 400, 1600, 6400)
    }
    | {"autoencoder": chain(AUTOENCODER, BATCH, name="autoencoder", title="auto-encoder")}
)
