"""A normalizing flow: RealNVP learns where the points of two half moons lie."""

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from isaac_lab import noise
from isaac_lab.data.files import md5
from isaac_lab.workload import registered, seeded
from isaac_lab.workloads.examples import Examples

#: Points of a step, and steps of the script, each of which has new points.
BATCH, STEPS = 100, 5001
TESTED = 10_000
#: Of the normal noise that is added to each coordinate.
NOISE = 0.05


def moons(count: int, name: str) -> Tensor:
    """Points (count, 2), half of them on each of scikit-learn's moons."""
    random = noise.generator("moons", name)
    angle = math.pi * torch.rand(count, generator=random)
    upper = torch.stack([angle.cos(), angle.sin()], 1)
    points = torch.where((torch.arange(count) % 2 == 0)[:, None], upper, torch.tensor([1.0, 0.5]) - upper)
    return points + NOISE * torch.randn(count, 2, generator=random)


class RealNVP(nn.Module):
    """Couplings, each of which moves one coordinate by what two networks say of the other.

    Args:
        width: Units of each hidden layer.
        couplings: How many there are.
    """

    kept: Tensor

    def __init__(self, width: int = 256, couplings: int = 6) -> None:
        super().__init__()
        self.scales = nn.ModuleList(nn.Sequential(_coupling(width), nn.Tanh()) for _ in range(couplings))
        self.shifts = nn.ModuleList(_coupling(width) for _ in range(couplings))
        self.register_buffer("kept", torch.tensor([[1.0, 0.0], [0.0, 1.0]]).repeat(-(-couplings // 2), 1)[:couplings])

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
    """Minus the logarithm of the density; an epoch has as many points as the script draws. See `examples.Examples`."""

    quantity = "test_loss"
    last = "shifts.5.4"

    def __init__(self, small: bool, device: str, folder: Path | None, **options: int | str) -> None:
        count, tested, batch = (400, 100, 20) if small else (BATCH * STEPS, TESTED, BATCH)
        train, test = moons(count, "train"), moons(tested, "test")
        super().__init__((train,), (test,), device, batch=batch, **options)  # type: ignore[arg-type]
        self._width = 16 if small else 256
        self.data, self.checksum = "generated points", md5(b"".join(x.numpy().tobytes() for x in (train, test)))
        self.title = f"RealNVP 6 × {self._width}, two moons"

    def model(self, seed: int) -> nn.Module:
        """The couplings, with torch's own initial weights."""
        return seeded(lambda: RealNVP(self._width), seed).to(self._device)

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Mean over the batch."""
        mean: Tensor = model(batch[0]).mean()
        return mean

    def sums(self, model: nn.Module, *tensors: Tensor) -> dict[str, Tensor]:
        """In nats."""
        return {"loss": model(tensors[0]).sum()}
