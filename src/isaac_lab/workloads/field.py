"""Neural fields: an image as a function of the place, by Fourier features with ReLU (Tancik et al.), or by sines (SIREN)."""

import base64
import io
import math
from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from isaac_lab.data import pictures
from isaac_lab.data.files import md5
from isaac_lab.workload import Form, registered
from isaac_lab.workloads.examples import Examples, decibels
from isaac_newton.math.likelihood import likelihood_of

#: ω₀ of a SIREN.
FREQUENCY = 30.0


class FourierFeatures(nn.Module):
    """Sines and cosines of so many random frequencies with this standard deviation."""

    def __init__(self, features: int, spread: float) -> None:
        super().__init__()
        self.frequencies = nn.Buffer(torch.randn(2, features) * spread)

    def forward(self, places: Tensor) -> Tensor:
        """Of places in the unit square."""
        angles = 2 * math.pi * places @ self.frequencies
        return torch.cat([angles.sin(), angles.cos()], -1)


class _Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(FREQUENCY * x)


def relu(width: int = 256, hidden: int = 3, *before: nn.Module, inputs: int = 2) -> nn.Module:
    """Layers with ReLU, colours by a sigmoid; on the places themselves, or on what is before them."""
    layers = list(before)
    for number in range(hidden):
        layers += [nn.Linear(width if number else inputs, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 3), nn.Sigmoid())


def fourier(width: int = 256, hidden: int = 3, *, features: int = 256, spread: float = 10.0) -> nn.Module:
    """The same on Fourier features."""
    return relu(width, hidden, FourierFeatures(features, spread), inputs=2 * features)


def siren(width: int = 256, hidden: int = 3) -> nn.Module:
    """A first layer and `hidden` ones with sines, and a linear last one, with the initial weights of its authors."""
    layers: list[nn.Module] = []
    for number in range(hidden + 2):
        layer = nn.Linear(width if number else 2, width if number <= hidden else 3)
        bound = math.sqrt(6 / width) / FREQUENCY if number else 1 / 2
        nn.init.uniform_(layer.weight, -bound, bound)
        layers += [layer, _Sine()] if number <= hidden else [layer]
    return nn.Sequential(*layers)


TITLES = {fourier: "Fourier features", siren: "SIREN", relu: "ReLU without features"}


class Field(Examples):
    """Squared error of colours; every other pixel of every other row is fitted, and those diagonally between are held out.

    The network is a key of `TITLES`, and takes this shape. A picture, one of `pictures.NAMES`, has so many pixels on a side,
    held out ones included.
    """

    drawn = likelihood_of(nn.MSELoss())
    metrics = MappingProxyType({"psnr": "PSNR, fitted", "test_psnr": "PSNR, held out"})

    def __init__(
        self,
        form: Form,
        network: Callable[..., nn.Module],
        *,
        picture: str = "flower",
        side: int = 400,
        batch: int = 0,
        **shape: Any,
    ) -> None:
        colours = pictures.load(picture, side, form.folder)
        line = torch.arange(side) / side
        places = torch.stack(torch.meshgrid(line, line, indexing="ij"), -1)
        # A SIREN's lie between −1 and 1.
        places = 2 * places - 1 if network is siren else places
        fitted, between = ([x[at::2, at::2].flatten(0, 1) for x in (places, colours)] for at in (0, 1))
        source = f"picture {picture}, {side} × {side}", md5(colours.numpy().tobytes())
        title, self.most_measured = f"{TITLES[network]}, {source[0]}", side**2
        super().__init__(form, fitted, between, source, partial(network, **shape), title, batch=batch)
        self._places, self.original = fitted[0].to(form.device), encoded(fitted[1])

    def sums(self, model: nn.Module, *tensors: Tensor) -> dict[str, Tensor]:
        """The squared error of a pixel, the mean of its colours."""
        return {"loss": (model(tensors[0]) - tensors[1]).square().mean(1).sum(dtype=torch.float64)}

    @torch.no_grad()
    def picture(self, model: nn.Module) -> str:
        """The fitted pixels, as the network has them now."""
        return encoded(model(self._places).clamp(0, 1))

    def named(self, train: dict[str, float], test: dict[str, float]) -> dict[str, float]:
        """Peak signal-to-noise ratios in dB."""
        return {"psnr": decibels(train["loss"]), "test_psnr": decibels(test["loss"])}


def encoded(pixels: Tensor) -> str:
    """A square of pixels with values from 0 to 1, row by row, as a JPEG in base64."""
    from PIL import Image

    side, file = math.isqrt(len(pixels)), io.BytesIO()
    colours = (255 * pixels).round().to("cpu", torch.uint8).view(side, side, 3)
    Image.fromarray(colours.numpy()).save(file, "JPEG", quality=92, subsampling=0)
    return base64.b64encode(file.getvalue()).decode()


def _field(network: Callable[..., nn.Module], usual: dict[str, Any], form: Form, **options: Any) -> Field:
    """Of its usual form, or a small network for a few pixels of a picture that is generated."""
    few = {"picture": pictures.GENERATED, "side": 16, "width": 16} | ({"features": 8} if network is fourier else {})
    return Field(form, network, **(few if form.small else usual) | options)


_VARIANT = ("picture", "side", "batch", "width", "split")
registered("fourier-field", *_VARIANT)(partial(_field, fourier, {}))
registered("siren", *_VARIANT)(partial(_field, siren, {"side": 256}))
# Tancik's network without its features.
registered("relu-field", "picture", "split")(partial(_field, relu, {}))
# Of muon-inrs, 5 layers × 300.
registered("muon-inrs", "picture", "split")(partial(_field, fourier, {"width": 300, "hidden": 4, "features": 128}))
# What a CPU fits in seconds: a smaller network than Tancik's.
_QUICK = {"width": 128, "features": 64, "spread": 15.0, "side": 256, "batch": 2048}
registered("photograph", "picture", "split")(partial(_field, fourier, _QUICK))
