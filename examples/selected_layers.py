"""The paper's experiment E3: ζ* in some layers, the plain gradient in the others. Each selection is one `layers=` argument."""

import os
from collections import OrderedDict

import torch
from sklearn.datasets import load_digits
from torch import nn

import isaac_newton as isaac

SELECTIONS: dict[str, str | list[str]] = {
    "all layers": "fc*",
    "first layer": "fc1",
    "last layer": "fc5",
    "layers 1, 2, 3": "fc[123]",
    "layers 3, 4, 5": "fc[345]",
    "odd layers": "fc[135]",
    "even layers": ["fc2", "fc4"],
}
STEPS = int(os.environ.get("ISAAC_EXAMPLE_STEPS", "300"))

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, (inputs, outputs) in enumerate([(64, 100), (100, 100), (100, 100), (100, 100), (100, 10)], start=1):
        layers[f"fc{i}"] = nn.Linear(inputs, outputs)
        layers[f"relu{i}"] = nn.ReLU()
    del layers["relu5"]
    return nn.Sequential(layers)


def train(selection: str | list[str] | None, learning_rate: float) -> float:
    model = network()
    if selection is not None:
        isaac.attach(model, damping=1.0, layers=selection)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    batches = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        batch = torch.randint(len(x), (60,), generator=batches)
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        # NaN, where it diverged, would be in the way of `min`.
        return nn.functional.cross_entropy(model(x), y).nan_to_num(torch.inf).item()


print(f"training loss after {STEPS} steps of SGD, each with the best of its learning rates")
for name, selection in {"plain gradient": None, **{f"ζ* in {name}": layers for name, layers in SELECTIONS.items()}}.items():
    # A conditioned gradient is shorter than the plain one: every selection gets its own learning rate, as in the paper.
    loss, learning_rate = min((train(selection, rate), rate) for rate in (1.0, 0.3, 0.1))
    print(f"{name:22} {loss:.4f}  (learning rate {learning_rate})")
