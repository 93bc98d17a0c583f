"""A fully connected network on a table, as the benchmarks of tabular learning train it: Diamonds, or diabetes."""

import math
from types import MappingProxyType

import torch
from torch import Tensor, nn

from isaac_lab import noise
from isaac_lab.data import tables
from isaac_lab.data.tables import Columns
from isaac_lab.workload import Form, registered
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


@registered("tabular", "width", "examples", "tested", "split")
class Tabular(Examples):
    """Five hidden layers, squared error of the target; reported is its root, in standard deviations."""

    metrics = MappingProxyType({"test_rmse": "Test RMSE"})

    def __init__(self, form: Form, *, width: int = 0) -> None:
        columns = tables.load("diabetes" if form.small else "diamonds", form.folder)
        source, (train, test) = (columns.title, columns.checksum), prepared(columns)
        width, batch = (width or 16, 64) if form.small else (width or 784, 512)
        title, inputs = f"MLP 5 × {width}, {columns.title}", train[0].shape[1]
        super().__init__(form, train, test, source, lambda: _network(inputs, width), title, batch=batch)

    def named(self, train: dict[str, float], test: dict[str, float]) -> dict[str, float]:
        """The root of the test loss."""
        return {"test_rmse": math.sqrt(test["loss"])}


def _network(inputs: int, width: int) -> nn.Module:
    layers: list[nn.Module] = []
    for fan_in in (inputs, width, width, width, width):
        layers += [nn.Linear(fan_in, width), nn.ReLU(), nn.Dropout(DROPOUT)]
    return nn.Sequential(*layers, nn.Linear(width, 1))
