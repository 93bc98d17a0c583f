"""DeepONet's first example: the antiderivative of a random function, from its values at a hundred points."""

from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isaac_lab import noise
from isaac_lab.data.files import md5
from isaac_lab.workload import registered, seeded
from isaac_lab.workloads.examples import Examples

#: Points at which functions are known and antiderivatives wanted; the length over which functions change.
POINTS, LENGTH = 100, 0.2
#: Functions to train on and for tests.
TRAINED, TESTED = 150, 1000
#: Added to the covariance, whose smallest eigenvalues are below rounding.
JITTER = 1e-10


def functions(count: int, *names: object) -> tuple[Tensor, Tensor]:
    """Functions of a Gaussian process on [0, 1], and their antiderivatives from 0, at `POINTS` points: (count, points)."""
    points = torch.linspace(0, 1, POINTS, dtype=torch.float64)
    covariance = torch.exp(-((points[:, None] - points).square()) / (2 * LENGTH**2)) + JITTER * torch.eye(POINTS)
    drawn = torch.randn(count, POINTS, generator=noise.generator("functions", *names), dtype=torch.float64)
    values = drawn @ torch.linalg.cholesky(covariance).T
    area = torch.cumulative_trapezoid(values, points)
    return values.float(), F.pad(area, (1, 0)).float()


class DeepONet(nn.Module):
    """A branch for the function and a trunk for the place; the result is their scalar product.

    Args:
        width: Units of each layer.
    """

    def __init__(self, width: int = 40) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(POINTS, width), nn.ReLU(), nn.Linear(width, width))
        self.trunk = nn.Sequential(nn.Linear(1, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.bias = nn.Parameter(torch.zeros(()))
        self.register_buffer("places", torch.linspace(0, 1, POINTS)[:, None])
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.xavier_normal_(layer.weight)
                nn.init.zeros_(layer.bias)

    def forward(self, functions: Tensor) -> Tensor:
        """The antiderivative of each function at all points."""
        result: Tensor = self.branch(functions) @ self.trunk(self.places).T + self.bias
        return result


class Antiderivative(Examples):
    """Squared error at all points; all functions are one batch. Reported is the mean relative error of a test function."""

    quantity = "test_loss"
    metrics = MappingProxyType({"test_error": "Relative error"})
    last = "trunk.2"

    def __init__(
        self, device: str, *, width: int = 40, examples: int = TRAINED, tested: int = TESTED, split: str = "test"
    ) -> None:
        train = functions(examples, "train")
        # Functions cost nothing, so those for searches are new ones too.
        test = functions(tested, split)
        super().__init__(train, test, device, batch=0)
        self._width = width
        self.data, self.checksum = "generated functions", md5(b"".join(x.numpy().tobytes() for x in (*train, *test)))
        self.title = f"DeepONet {POINTS}-{width}-{width}, antiderivative"

    def model(self, seed: int) -> nn.Module:
        """With the initial weights of Glorot."""
        return seeded(lambda: DeepONet(self._width), seed).to(self._device)

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Mean over functions and points."""
        return F.mse_loss(model(batch[0]), batch[1])

    def sums(self, model: nn.Module, *tensors: Tensor) -> dict[str, Tensor]:
        """With the error of each function relative to its norm."""
        off = model(tensors[0]) - tensors[1]
        return {"loss": off.square().mean(1).sum(), "error": (off.norm(dim=1) / tensors[1].norm(dim=1)).sum()}


@registered("antiderivative", "width", "examples", "tested", "split")
def antiderivative(small: bool, device: str, folder: Path | None, **options: Any) -> Antiderivative:
    """The published size, or a tenth of it."""
    return Antiderivative(device, **({"width": 8, "examples": 20, "tested": 30} if small else {}) | options)
