"""Compiled once for all sizes, a model has the statistics of eager code: `python tests/dynamic.py automatic`."""

import copy
import sys
from typing import Any

import torch
from torch import Tensor, nn

import isaac_newton as isaac

OPTIONS: dict[str, dict[str, Any]] = {
    "automatic": {},
    "drawn": {"damping": isaac.Relative(0.1), "max_rows": 20},
    "reduced": {"damping": 1.0, "sharing": "reduce", "keep_norm": True},
}
STATISTICS = ("rows", "side", "extra_multiplications", "own_multiplications", "extra_bytes", "backward_pass", "fallbacks")


class Picture(nn.Module):
    """Layers with different numbers of rows: pixels of two sizes, samples; one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3, stride=2)
        self.hidden, self.head = nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.first(x))).mean((2, 3))
        output: Tensor = self.head(self.hidden(torch.tanh(self.hidden(x))))
        return output


def check(options: dict[str, Any]) -> None:
    model = Picture().double()
    twin = copy.deepcopy(model)
    handle, eager = isaac.attach(model, **options), isaac.attach(twin, **options)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for size, count in ((9, 4), (9, 7), (12, 90), (9, 3)):
        x = torch.randn(count, 3, size, size, dtype=torch.float64)
        for one in (compiled, twin):
            one(x).square().mean().backward()
        for name, seen in eager.statistics.items():
            for what in STATISTICS:
                found, expected = getattr(handle.statistics[name], what), getattr(seen, what)
                assert found == expected, (name, what, count, found, expected)


if __name__ == "__main__":
    check(OPTIONS[sys.argv[1]])
    print("as in eager code")
