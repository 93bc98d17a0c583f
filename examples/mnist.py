"""The paper's classifier on MNIST, with and without ISAAC: python examples/mnist.py --data FOLDER (or the embedded digits)."""

import argparse
import os
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import isaac_newton as isaac
from isaac_lab.data.sets import DataError, Dataset, load

STEPS = int(os.environ.get("ISAAC_EXAMPLE_STEPS", "0"))  # 0: as many as the epochs have
WIDTH, BATCH = 400, 60

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", type=Path, help="a folder with MNIST's four files in mnist/; ISAAC_DATA names one too")
options = parser.parse_args()


def network(inputs: int, classes: int) -> nn.Sequential:
    torch.manual_seed(0)  # the same initial weights for each
    sizes = [inputs, WIDTH, WIDTH, WIDTH, WIDTH, classes]
    layers = [module for a, b in pairwise(sizes) for module in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def train(data: Dataset, epochs: int, rate: float, adam: bool, damping: float | None) -> tuple[float, float]:
    model = network(data.train_images.shape[1], data.classes)
    if damping is not None:
        isaac.attach(model, damping=damping)  # the one line
    optimizer = (torch.optim.Adam if adam else torch.optim.SGD)(model.parameters(), lr=rate)
    shuffle = torch.Generator().manual_seed(0)  # the same batches for each
    batches = [b for _ in range(epochs) for b in torch.randperm(len(data.train_images), generator=shuffle).split(BATCH)]
    for batch in batches[: STEPS or None]:
        loss = F.cross_entropy(model(data.train_images[batch]), data.train_labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        right = (model(data.test_images).argmax(1) == data.test_labels).float().mean().item()
        return F.cross_entropy(model(data.train_images), data.train_labels).item(), right


try:
    data = load("mnist" if options.data or os.environ.get("ISAAC_DATA") else "digits", options.data)
except DataError as error:
    parser.error(str(error))
epochs = 1 if data.name == "mnist" else 10
damping = isaac.suggest_damping(network(data.train_images.shape[1], data.classes), data.train_images[:BATCH]).damping
print(f"{data.name}, {epochs} epoch(s), batch {BATCH}, best of two learning rates each, one seed; suggested λ = {damping:.2g}")
for adam, rates in {False: (0.3, 1.0), True: (1e-3, 3e-3)}.items():
    for used in (None, damping):
        (loss, right), rate = min((train(data, epochs, rate, adam, used), rate) for rate in rates)
        name = ("Adam" if adam else "SGD") + ("" if used is None else " + ISAAC")
        print(f"{name:12}  training loss {loss:.4f}  test accuracy {right:.2%}  (learning rate {rate})")
