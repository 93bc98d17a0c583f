"""Problems whose examples are generated: antiderivatives for a DeepONet, two half moons for a flow, sums for a TCN."""

import math
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from isaac_lab import noise
from isaac_lab.workload import Form, registered
from isaac_lab.workloads.examples import Examples

#: Of the functions: points at which they are known, the length over which they change, and what is added to the covariance,
#: whose smallest eigenvalues are below rounding.
POINTS, LENGTH, JITTER = 100, 0.2, 1e-10
#: Of the moons: the normal noise of each coordinate.
NOISE = 0.05
#: Of the TCN: its kernels, and the deviation of the initial weights of what has no weight norm.
KERNEL, SPREAD = 7, 0.01


def functions(count: int, *names: object) -> tuple[Tensor, Tensor]:
    """Functions of a Gaussian process on [0, 1], and their antiderivatives from 0, at `POINTS` points: (count, points)."""
    points = torch.linspace(0, 1, POINTS, dtype=torch.float64)
    covariance = torch.exp(-((points[:, None] - points).square()) / (2 * LENGTH**2)) + JITTER * torch.eye(POINTS)
    drawn = torch.randn(count, POINTS, generator=noise.generator("functions", *names), dtype=torch.float64)
    values = drawn @ torch.linalg.cholesky(covariance).T
    area = torch.cumulative_trapezoid(values, points)
    return values.float(), F.pad(area, (1, 0)).float()


class DeepONet(nn.Module):
    """A branch for the function and a trunk for the place; the result is their scalar product."""

    def __init__(self, width: int = 40) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(POINTS, width), nn.ReLU(), nn.Linear(width, width))
        self.trunk = nn.Sequential(nn.Linear(1, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.bias = nn.Parameter(torch.zeros(()))
        self.places = nn.Buffer(torch.linspace(0, 1, POINTS)[:, None])
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.xavier_normal_(layer.weight)
                nn.init.zeros_(layer.bias)

    def forward(self, functions: Tensor) -> Tensor:
        """The antiderivative of each function at all points."""
        result: Tensor = self.branch(functions) @ self.trunk(self.places).T + self.bias
        return result


@registered("antiderivative", "split")
class Antiderivative(Examples):
    """DeepONet's first example: squared error at all points, and the relative error of a function; all are one batch."""

    metrics = MappingProxyType({"test_error": "Relative error"})

    def __init__(self, form: Form) -> None:
        width, examples, tested = (8, 20, 30) if form.small else (40, 150, 1000)
        # Functions cost nothing, so those for searches are new ones too.
        train, test = functions(examples, "train"), functions(tested, form.split)
        title, form = f"DeepONet {POINTS}-{width}-{width}, antiderivative", replace(form, split="test")
        super().__init__(form, train, test, "generated functions", lambda: DeepONet(width), title, batch=0)

    def sums(self, model: nn.Module, *tensors: Tensor) -> dict[str, Tensor]:
        """With the error of each function relative to its norm."""
        off = model(tensors[0]) - tensors[1]
        return {"loss": off.square().mean(1).sum(), "error": (off.norm(dim=1) / tensors[1].norm(dim=1)).sum()}


def moons(count: int, name: str) -> Tensor:
    """Points (count, 2), half of them on each of scikit-learn's moons."""
    random = noise.generator("moons", name)
    angle = math.pi * torch.rand(count, generator=random)
    upper = torch.stack([angle.cos(), angle.sin()], 1)
    points = torch.where((torch.arange(count) % 2 == 0)[:, None], upper, torch.tensor([1.0, 0.5]) - upper)
    return points + NOISE * torch.randn(count, 2, generator=random)


class RealNVP(nn.Module):
    """Couplings, each of which moves one coordinate by what two networks say of the other."""

    def __init__(self, width: int = 256, couplings: int = 6) -> None:
        super().__init__()
        self.scales = nn.ModuleList(nn.Sequential(_coupling(width), nn.Tanh()) for _ in range(couplings))
        self.shifts = nn.ModuleList(_coupling(width) for _ in range(couplings))
        self.kept = nn.Buffer(torch.eye(2).repeat(-(-couplings // 2), 1)[:couplings])

    def forward(self, points: Tensor) -> Tensor:
        """Minus the logarithm of the density at each point."""
        volume = points.new_zeros(len(points))
        for scaled, shifted, kept in zip(self.scales, self.shifts, self.kept, strict=True):
            scale, shift = ((1 - kept) * network(kept * points) for network in (scaled, shifted))
            points = kept * points + (1 - kept) * (points - shift) * (-scale).exp()
            volume = volume + scale.sum(1)
        return points.square().sum(1) / 2 + math.log(2 * math.pi) + volume


def _coupling(width: int) -> nn.Sequential:
    # Both coordinates go in, one of them zero, and both come out, as in the script.
    first, second, last = nn.Linear(2, width), nn.Linear(width, width), nn.Linear(width, 2)
    return nn.Sequential(first, nn.LeakyReLU(), second, nn.LeakyReLU(), last)


@registered("real-nvp", "examples", "tested", "split")
class Moons(Examples):
    """Minus the logarithm of the density, in nats; an epoch has as many points as the 5,001 steps of the script draw."""

    def __init__(self, form: Form) -> None:
        count, tested, batch, width = (400, 100, 20, 16) if form.small else (100 * 5001, 10_000, 100, 256)
        train, test = (moons(count, "train"),), (moons(tested, "test"),)
        title = f"RealNVP 6 × {width}, two moons"
        super().__init__(form, train, test, "generated points", lambda: RealNVP(width), title, batch=batch)

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Mean over the batch."""
        mean: Tensor = model(batch[0]).mean()
        return mean

    def sums(self, model: nn.Module, *tensors: Tensor) -> dict[str, Tensor]:
        """Of the points."""
        return {"loss": model(tensors[0]).sum()}


def additions(count: int, length: int, name: str) -> tuple[Tensor, Tensor]:
    """Uniform numbers and marks of two of them (count, 2, length), and the sums of these two (count, 1)."""
    random = noise.generator("additions", name, length)
    numbers = torch.rand(count, length, generator=random)
    first = torch.randint(length, (count,), generator=random)
    second = (first + 1 + torch.randint(length - 1, (count,), generator=random)) % length
    marks = F.one_hot(first, length) + F.one_hot(second, length)
    return torch.stack([numbers, marks.float()], 1), (numbers * marks).sum(1, keepdim=True)


class TCN(nn.Module):
    """Blocks of two convolutions that see the past only, twice as far in each block; the last place decides."""

    def __init__(self, levels: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(_Block(width if level else 2, width, 2**level) for level in range(levels)))
        self.head = nn.Linear(width, 1)
        nn.init.normal_(self.head.weight, std=SPREAD)

    def forward(self, sequences: Tensor) -> Tensor:
        """Sums (batch, 1)."""
        result: Tensor = self.head(self.blocks(sequences)[..., -1])
        return result


class _Block(nn.Module):
    def __init__(self, inputs: int, width: int, dilation: int) -> None:
        super().__init__()
        self.past = (KERNEL - 1) * dilation
        # The script sets the weights of these too, but weight norm forms them anew: torch's own initial weights stay.
        self.conv1 = weight_norm(nn.Conv1d(inputs, width, KERNEL, dilation=dilation))
        self.conv2 = weight_norm(nn.Conv1d(width, width, KERNEL, dilation=dilation))
        self.through = nn.Identity() if inputs == width else nn.Conv1d(inputs, width, 1)
        if isinstance(self.through, nn.Conv1d):
            nn.init.normal_(self.through.weight, std=SPREAD)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv1(F.pad(x, (self.past, 0))).relu()
        hidden = self.conv2(F.pad(hidden, (self.past, 0))).relu()
        return F.relu(hidden + self.through(x))


@registered("adding-tcn", "length", "depth", "examples", "tested", "split")
class Adding(Examples):
    """The adding problem: squared error of the sum of the two numbers that are marked in a row of `length`."""

    def __init__(self, form: Form, *, length: int = 0, depth: int = 0) -> None:
        usual = (20, 2, 6, 500, 100) if form.small else (400, 8, 30, 50_000, 1_000)
        length, levels, width = length or usual[0], depth or usual[1], usual[2]
        train, test = (additions(count, length, name) for count, name in zip(usual[3:], ("train", "test"), strict=True))
        title = f"TCN {levels} × {width}, adding problem of length {length}"
        super().__init__(form, train, test, "generated sequences", lambda: TCN(levels, width), title, batch=32)
