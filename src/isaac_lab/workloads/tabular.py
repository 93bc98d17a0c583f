"""A fully connected network on a table, as the benchmarks of tabular learning train it: Diamonds, or diabetes."""

import math
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isaac_lab import noise
from isaac_lab.data import tables
from isaac_lab.data.tables import Columns
from isaac_lab.workload import registered, seeded
from isaac_lab.workloads.examples import Examples

#: One row in so many is for tests.
TESTED = 5


def prepared(columns: Columns) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Rows and targets to train on, and those for tests.

    A column of numbers becomes normal by the order of its values in the training rows; the target has mean 0 and deviation 1
    there.
    """
    from sklearn.preprocessing import QuantileTransformer

    count = len(columns.target)
    order = torch.randperm(count, generator=noise.generator("tests"))
    test, train = order[: count // TESTED], order[count // TESTED :]
    scale = QuantileTransformer(n_quantiles=min(1000, len(train)), output_distribution="normal", random_state=0)
    scale.fit(columns.numbers[train].double().numpy())
    numbers = torch.from_numpy(scale.transform(columns.numbers.double().numpy())).float()
    rows = torch.cat([numbers, columns.kinds], 1)
    known = columns.target[train]
    target = (columns.target - known.mean()) / known.std()
    return (rows[train], target[train]), (rows[test], target[test])


@registered("tabular", "data", "width", "depth", "batch", "examples", "tested", "split")
class Tabular(Examples):
    """Squared error of the target; reported is its root, in standard deviations. See `examples.Examples` for options.

    Args:
        small: A narrow network on diabetes.
        device: "cpu" or "cuda".
        folder: Where Diamonds is looked for first.
        data: One of `tables.NAMES`.
        width: Units of each hidden layer.
        depth: Hidden layers.
        dropout: Share of the hidden units that is left out in training.
        batch: Rows of a step.
        options: Of `examples.Examples`.
    """

    quantity = "test_loss"
    metrics = MappingProxyType({"test_rmse": "Test RMSE"})

    def __init__(
        self,
        small: bool,
        device: str,
        folder: Path | None,
        *,
        data: str = "",
        width: int = 0,
        depth: int = 5,
        dropout: float = 0.2889577,
        batch: int = 0,
        **options: Any,
    ) -> None:
        columns = tables.load(data or ("diabetes" if small else "diamonds"), folder)
        super().__init__(*prepared(columns), device, batch=batch or (64 if small else 512), **options)
        self._shape = width or (16 if small else 784), depth, dropout
        self.data, self.checksum, self.last = columns.title, columns.checksum, str(3 * depth)
        self.title = f"MLP {depth} × {self._shape[0]}, {columns.title}"

    def model(self, seed: int) -> nn.Module:
        """Layers with ReLU and dropout."""
        return seeded(self._built, seed).to(self._device)

    def _built(self) -> nn.Module:
        width, depth, dropout = self._shape
        layers: list[nn.Module] = []
        for number in range(depth):
            fan_in = width if number else self._train[0].shape[1]
            layers += [nn.Linear(fan_in, width), nn.ReLU(), nn.Dropout(dropout)]
        return nn.Sequential(*layers, nn.Linear(width, 1))

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Mean over the batch."""
        return F.mse_loss(model(batch[0]).squeeze(1), batch[1])

    def sums(self, model: nn.Module, *tensors: Tensor) -> dict[str, Tensor]:
        """Squared errors."""
        return {"loss": F.mse_loss(model(tensors[0]).squeeze(1), tensors[1], reduction="sum")}

    def named(self, train: dict[str, float], test: dict[str, float]) -> dict[str, float]:
        """The root of the test loss."""
        return {"test_rmse": math.sqrt(test["loss"])}
