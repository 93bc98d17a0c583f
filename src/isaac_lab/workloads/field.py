"""Neural fields: an image as a function of the place, by Fourier features with ReLU (Tancik et al.), or by sines (SIREN)."""

import base64
import io
import math
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isaac_lab.data import pictures
from isaac_lab.data.files import md5
from isaac_lab.workload import Workload, registered, seeded
from isaac_lab.workloads.examples import Examples
from isaac_newton.math.likelihood import likelihood_of

#: ω₀ of a SIREN.
FREQUENCY = 30.0


class FourierFeatures(nn.Module):
    """Sines and cosines of random frequencies.

    Args:
        features: So many of each.
        spread: Standard deviation of the frequencies.
    """

    frequencies: Tensor

    def __init__(self, features: int, spread: float) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.randn(2, features) * spread)

    def forward(self, places: Tensor) -> Tensor:
        """Of places in the unit square."""
        angles = 2 * math.pi * places @ self.frequencies
        return torch.cat([angles.sin(), angles.cos()], -1)


class _Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(FREQUENCY * x)


def fourier(width: int = 256, hidden: int = 3, features: int = 256, spread: float = 10.0) -> nn.Module:
    """Four layers with ReLU on Fourier features, colours by a sigmoid."""
    layers: list[nn.Module] = [FourierFeatures(features, spread)]
    for number in range(hidden):
        layers += [nn.Linear(width if number else 2 * features, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 3), nn.Sigmoid())


def relu(width: int = 256, hidden: int = 3) -> nn.Module:
    """The same on the places themselves."""
    layers: list[nn.Module] = []
    for number in range(hidden):
        layers += [nn.Linear(width if number else 2, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 3), nn.Sigmoid())


def siren(width: int = 256, hidden: int = 3) -> nn.Module:
    """A first layer and `hidden` ones with sines, and a linear last one, with the initial weights of its authors."""
    layers: list[nn.Module] = []
    for number in range(hidden + 2):
        layer = nn.Linear(width if number else 2, width if number <= hidden else 3)
        bound = math.sqrt(6 / width) / FREQUENCY if number else 1 / 2
        nn.init.uniform_(layer.weight, -bound, bound)
        layers += [layer, _Sine()] if number <= hidden else [layer]
    return nn.Sequential(*layers)


class Field(Examples):
    """Squared error of colours; every other pixel of every other row is fitted, and those diagonally between are held out.

    Args:
        build: Makes the network.
        wide: Whether places lie between −1 and 1, as for a SIREN, or between 0 and 1.
        device: "cpu" or "cuda".
        picture: One of `pictures.NAMES`.
        side: Pixels of its side, held out ones included.
        batch: Pixels of a step; 0 for all.
        split: With "validation", a tenth of the fitted pixels is held out in place of the others.
        folder: Where the picture is looked for first.
    """

    drawn = likelihood_of(nn.MSELoss())
    quantity = "train_loss"
    metrics = MappingProxyType({"psnr": "PSNR, fitted", "test_psnr": "PSNR, held out"})

    def __init__(
        self,
        build: Callable[[], nn.Module],
        wide: bool,
        device: str,
        *,
        picture: str = "flower",
        side: int = 400,
        batch: int = 0,
        split: str = "test",
        folder: Path | None = None,
    ) -> None:
        self._build: Callable[[], nn.Module] = build
        colours = pictures.load(picture, side, folder)
        line = torch.arange(side) / side
        places = torch.stack(torch.meshgrid(line, line, indexing="ij"), -1)
        places = 2 * places - 1 if wide else places
        fitted, between = ([x[at::2, at::2].flatten(0, 1) for x in (places, colours)] for at in (0, 1))
        super().__init__(fitted, between, device, batch=batch, tested=side**2, split=split)
        self._places, self.original = fitted[0].to(device), encoded(fitted[1])
        self.data, self.checksum = f"picture {picture}, {side} × {side}", md5(colours.numpy().tobytes())
        self.title = f"{'SIREN' if wide else 'Fourier features'}, {self.data}"
        self.last = [name for name, layer in self.model(0).named_modules() if isinstance(layer, nn.Linear)][-1]

    def model(self, seed: int) -> nn.Module:
        """The network; frequencies are drawn with its weights."""
        return seeded(self._build, seed).to(self._device)

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Mean over pixels and colours."""
        return F.mse_loss(model(batch[0]), batch[1])

    def sums(self, model: nn.Module, *tensors: Tensor) -> dict[str, Tensor]:
        """The squared error of a pixel, the mean of its colours."""
        return {"loss": (model(tensors[0]) - tensors[1]).square().mean(1).sum(dtype=torch.float64)}

    @torch.no_grad()
    def picture(self, model: nn.Module) -> str:
        """The fitted pixels, as the network has them now."""
        return encoded(model(self._places).clamp(0, 1))

    def named(self, train: dict[str, float], test: dict[str, float]) -> dict[str, float]:
        """Peak signal-to-noise ratios in dB."""
        return {"psnr": _decibels(train["loss"]), "test_psnr": _decibels(test["loss"])}


def encoded(pixels: Tensor) -> str:
    """A square of pixels with values from 0 to 1, row by row, as a JPEG in base64."""
    from PIL import Image

    side, file = math.isqrt(len(pixels)), io.BytesIO()
    colours = (255 * pixels).round().to("cpu", torch.uint8).view(side, side, 3)
    Image.fromarray(colours.numpy()).save(file, "JPEG", quality=92, subsampling=0)
    return base64.b64encode(file.getvalue()).decode()


def _decibels(error: float) -> float:
    return -10 * math.log10(error) if error > 0 else math.nan


_VARIANT = ("picture", "side", "batch", "width", "split")


def _made(build: Callable[[], nn.Module], wide: bool, small: bool, usual: int, device: str, **options: Any) -> Field:
    """With so many pixels usually, or with a few of a picture that is generated."""
    few = {"picture": pictures.GENERATED, "side": 16} if small else {"side": usual}
    return Field(build, wide, device, **few | options)


@registered("fourier-field", *_VARIANT, "features")
def fourier_field(small: bool, device: str, folder: Path | None, *, width: int = 0, features: int = 0, **options: Any) -> Field:
    """Tancik's network, or a small one for a few pixels."""
    width, features = width or (16 if small else 256), features or (8 if small else 256)
    return _made(lambda: fourier(width, features=features), False, small, 400, device, folder=folder, **options)


@registered("siren", *_VARIANT)
def siren_field(small: bool, device: str, folder: Path | None, *, width: int = 0, **options: Any) -> Field:
    """A SIREN, or a small one for a few pixels."""
    width = width or (16 if small else 256)
    return _made(lambda: siren(width), True, small, 256, device, folder=folder, **options)


@registered("photograph", "picture", "split")
def photograph(small: bool, device: str, folder: Path | None, **options: Any) -> Workload:
    """A smaller network than Tancik's on every other pixel of 256 × 256: what a CPU fits in seconds."""
    if small:
        return fourier_field(small, device, folder, **options)
    own = {"side": 256, "batch": 2048} | options
    return Field(lambda: fourier(128, features=64, spread=15.0), False, device, folder=folder, **own)


@registered("muon-inrs", "picture", "split")
def muon_inrs(small: bool, device: str, folder: Path | None, **options: Any) -> Workload:
    """The network of muon-inrs: 5 layers × 300 on 128 features."""
    if small:
        return fourier_field(small, device, folder, **options)
    return Field(lambda: fourier(300, 4, 128), False, device, folder=folder, **options)


@registered("relu-field", "picture", "split")
def relu_field(small: bool, device: str, folder: Path | None, **options: Any) -> Workload:
    """Tancik's network without its features."""
    own: dict[str, Any] = {"picture": pictures.GENERATED, "side": 16} if small else {}
    made = Field(lambda: relu(16 if small else 256), False, device, folder=folder, **own | options)
    made.title = f"ReLU without features, {made.data}"
    return made
