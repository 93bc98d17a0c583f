"""A fully connected network on a table, as the benchmarks of tabular learning train it: Diamonds, or diabetes."""

import math
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from isaac_lab import noise
from isaac_lab.data import tables
from isaac_lab.data.tables import Columns
from isaac_lab.workload import registered
from isaac_lab.workloads.examples import Examples

#: One row in so many is for tests.
TESTED = 5
#: Share of the hidden units that is left out in training.
DROPOUT = 0.2889577


def prepared(columns: Columns) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Rows and targets (rows, 1) to train on, and those for tests.

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
    target = ((columns.target - known.mean()) / known.std())[:, None]
    return (rows[train], target[train]), (rows[test], target[test])


@registered("tabular", "data", "width", "depth", "batch", "examples", "tested", "split")
class Tabular(Examples):
    """Squared error of the target in one of `tables.NAMES`; reported is its root, in standard deviations."""

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
        batch: int = 0,
        **options: Any,
    ) -> None:
        columns = tables.load(data or ("diabetes" if small else "diamonds"), folder)
        source, (train, test) = (columns.title, columns.checksum), prepared(columns)
        width, batch = width or (16 if small else 784), batch or (64 if small else 512)
        title, network = f"MLP {depth} × {width}, {columns.title}", partial(_network, train[0].shape[1], width, depth)
        super().__init__(train, test, device, source, network, title, batch=batch, **options)
        self.last = str(3 * depth)

    def named(self, train: dict[str, float], test: dict[str, float]) -> dict[str, float]:
        """The root of the test loss."""
        return {"test_rmse": math.sqrt(test["loss"])}


def _network(inputs: int, width: int, depth: int) -> nn.Module:
    layers: list[nn.Module] = []
    for number in range(depth):
        layers += [nn.Linear(width if number else inputs, width), nn.ReLU(), nn.Dropout(DROPOUT)]
    return nn.Sequential(*layers, nn.Linear(width, 1))
