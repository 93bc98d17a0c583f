"""A ResNet-18 in its form for small images, all convolutions conditioned, against the plain gradient from the same start."""

import os
from statistics import fmean

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import isaac_newton as isaac

STEPS = int(os.environ.get("ISAAC_EXAMPLE_STEPS", "100"))
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8).repeat(1, 3, 1, 1) / 16, torch.tensor(labels)


class Block(nn.Module):
    """Two convolutions beside a skip connection."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)
        projection = [nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)]
        self.skip = nn.Sequential(*(projection if inputs != outputs else []))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + self.skip(x))


def resnet18(width: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    for inputs, outputs, stride in [(1, 1, 1), (1, 2, 2), (2, 4, 2), (4, 8, 2)]:
        layers += [Block(inputs * width, outputs * width, stride), Block(outputs * width, outputs * width, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10))


def train(damping: isaac.Relative | None, rate: float, seed: int) -> tuple[float, isaac.Handle | None]:
    torch.manual_seed(seed)  # the same initial weights and batches for both
    model = resnet18(width=8)  # 64 in the original
    handle = None if damping is None else isaac.attach(model, damping=damping, sharing="reduce")
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    losses = []
    for batch in torch.randint(len(x), (STEPS, 64)):
        loss = F.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return fmean(losses[-20:]), handle


print(f"training loss in the last 20 of {STEPS} steps of SGD, mean of 3 seeds, each with the best of the same learning rates")
for name, damping in {"plain gradient": None, "ζ* in all layers": isaac.Relative(1.0)}.items():
    runs = {rate: [train(damping, rate, seed) for seed in range(3)] for rate in (0.03, 0.1, 0.3, 1.0)}
    rate, best = min(runs.items(), key=lambda item: fmean(loss for loss, _ in item[1]))
    losses = [loss for loss, _ in best]
    print(f"{name:16}  {fmean(losses):.4f}, seeds from {min(losses):.4f} to {max(losses):.4f}  (learning rate {rate})")
print(best[0][1])
