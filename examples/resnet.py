"""A ResNet-18 in its form for small images, all convolutions conditioned, against the plain gradient from the same start."""

import os

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import isaac_newton as isaac

STEPS = int(os.environ.get("ISAAC_EXAMPLE_STEPS", "150"))
WIDTH = 16  # 64 in the original

images, labels = load_digits(return_X_y=True)
x = F.interpolate(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, scale_factor=2.0).repeat(1, 3, 1, 1)
y = torch.tensor(labels)
train_x, train_y, test_x, test_y = x[:1297], y[:1297], x[1297:], y[1297:]


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.skip = nn.Sequential()
        if inputs != outputs:
            self.skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        branch = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(branch + self.skip(x))


def resnet18(width: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    for inputs, outputs, stride in [(1, 1, 1), (1, 2, 2), (2, 4, 2), (4, 8, 2)]:
        layers += [Block(inputs * width, outputs * width, stride), Block(outputs * width, outputs * width, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10))


def train(damping: isaac.Relative | None, rate: float) -> tuple[float, float, isaac.Handle | None]:
    torch.manual_seed(0)  # the same initial weights and batches for each
    model = resnet18(WIDTH)
    handle = None if damping is None else isaac.attach(model, damping=damping, sharing="reduce")
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(STEPS):
        batch = torch.randint(len(train_x), (64,))
        loss = F.cross_entropy(model(train_x[batch]), train_y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        loss, right = F.cross_entropy(model(train_x), train_y), model(test_x).argmax(1) == test_y
    return loss.item(), right.float().mean().item(), handle


for name, damping in {"plain gradient": None, "ζ* in all layers": isaac.Relative(1.0)}.items():
    # A conditioned gradient is shorter than the plain one: each takes the best of the same learning rates.
    loss, accuracy, handle, rate = min(((*train(damping, rate), rate) for rate in (0.03, 0.1, 0.3)), key=lambda run: run[0])
    print(f"{name:16}  training loss {loss:.5f}, test accuracy {accuracy:.1%} after {STEPS} steps (learning rate {rate})")
print(handle)
