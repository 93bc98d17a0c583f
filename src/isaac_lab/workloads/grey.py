"""Networks on MNIST: a small convolutional one, a variational auto-encoder, and the deep auto-encoder of Hinton's."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isaac_lab import noise
from isaac_lab.data import sets
from isaac_lab.trial import TrialError
from isaac_lab.workload import Form, registered
from isaac_lab.workloads.examples import Examples
from isaac_newton.math.likelihood import likelihood_of

#: Of the pixels, by data set: mean and standard deviation.
MOMENTS = {"mnist": (0.1307, 0.3081), "fashion-mnist": (0.286, 0.353)}
#: Of the deep auto-encoder, from the image to the code.
SIZES = (784, 1000, 500, 250, 30)


def _convnet(side: int, channels: int) -> nn.Sequential:
    """Two convolutions, of which the second has twice as many channels, and two linear layers, with dropout."""
    pixels = 2 * channels * ((side - 4) // 2) ** 2
    layers: dict[str, nn.Module] = {
        **{"conv1": nn.Conv2d(1, channels, 3), "relu1": nn.ReLU()},
        **{"conv2": nn.Conv2d(channels, 2 * channels, 3), "relu2": nn.ReLU(), "pool": nn.MaxPool2d(2)},
        **{"dropout1": nn.Dropout(0.25), "flat": nn.Flatten(), "fc1": nn.Linear(pixels, 4 * channels), "relu3": nn.ReLU()},
        **{"dropout2": nn.Dropout(0.5), "fc2": nn.Linear(4 * channels, 10)},
    }
    return nn.Sequential(OrderedDict(layers))


@registered("mnist-cnn", "batch", "channels", "data", "examples", "tested", "split")
class MnistCNN(Examples):
    """The network of pytorch/examples on one of `MOMENTS`, with so many `channels` in its first convolution."""

    criterion = staticmethod(F.cross_entropy)
    metrics = MappingProxyType({"test_accuracy": "Test accuracy"})

    def __init__(self, form: Form, *, channels: int = 0, data: str = "mnist") -> None:
        if data not in MOMENTS:
            raise TrialError(f"data must be {' or '.join(MOMENTS)}, got {data!r}")
        (mean, std), found = MOMENTS[data], sets.load("digits" if form.small else data, form.folder)
        side, channels = (8, 4) if form.small else (28, channels or 32)
        pairs = (found.train_images, found.train_labels), (found.test_images, found.test_labels)
        train, test = (((x.view(-1, 1, side, side) - mean) / std, y) for x, y in pairs)
        source, title = (found.name, found.checksum), f"CNN of pytorch/examples, {found.name}"
        super().__init__(form, train, test, source, lambda: _convnet(side, channels), title, batch=64)


class VAE(nn.Module):
    """A normal code, drawn in training and in tests alike."""

    def __init__(self, pixels: int, hidden: int = 400, code: int = 20) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(pixels, hidden), nn.Linear(hidden, code), nn.Linear(hidden, code)
        self.fc3, self.fc4 = nn.Linear(code, hidden), nn.Linear(hidden, pixels)

    def forward(self, x: Tensor, drawn: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the pixels, mean and logarithm of the variance of the code; `drawn` are its random numbers."""
        hidden = F.relu(self.fc1(x))
        mean, log_variance = self.fc21(hidden), self.fc22(hidden)
        code = mean + (log_variance / 2).exp() * (torch.randn_like(mean) if drawn is None else drawn)
        return self.fc4(F.relu(self.fc3(code))), mean, log_variance


@registered("mnist-vae", "batch", "examples", "tested", "split")
class MnistVAE(Examples):
    """That of pytorch/examples: minus the evidence lower bound of an image."""

    metrics = MappingProxyType({"test_reconstruction": "Test cross-entropy"})

    def __init__(self, form: Form) -> None:
        data = sets.load("digits" if form.small else "mnist", form.folder)
        pixels, (hidden, code) = data.train_images.shape[1], (32, 4) if form.small else (400, 20)
        random = noise.generator("codes")
        # Those for tests come with the random numbers of their codes, so that measuring draws none.
        train, test = ((x, torch.randn(len(x), code, generator=random)) for x in (data.train_images, data.test_images))
        source, title = (data.name, data.checksum), f"VAE of pytorch/examples, {data.name}"
        super().__init__(form, train, test, source, lambda: VAE(pixels, hidden, code), title, batch=128)

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Mean over the batch; the script adds up, which Adam does not see."""
        return self.sums(model, batch[0])["loss"] / len(batch[0])

    def sums(self, model: nn.Module, *tensors: Tensor) -> dict[str, Tensor]:
        """With the cross-entropy of the pixels."""
        logits, mean, log_variance = model(*tensors)
        cross_entropy = F.binary_cross_entropy_with_logits(logits, tensors[0], reduction="sum")
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
        return {"loss": cross_entropy + divergence, "reconstruction": cross_entropy}


def _deep(sizes: Sequence[int]) -> nn.Module:
    """As Martens and Grosse (2015) have it, with the initial weights of Glorot and Bengio, which keep their units alive."""
    middle, layers = len(sizes) // 2, list[nn.Module]()
    for number, (fan_in, fan_out) in enumerate(pairwise(sizes), start=1):
        layer = nn.Linear(fan_in, fan_out)
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)
        layers += [layer] if number in (middle, len(sizes) - 1) else [layer, nn.Tanh()]
    return nn.Sequential(*layers)


@registered("deep-autoencoder", "batch", "examples", "tested", "split")
class DeepAutoencoder(Examples):
    """What second-order methods are measured on: `SIZES` and back, with a linear code; an eighth as wide in the small form.

    Cross-entropy summed over the pixels; reported is the squared error of an image.
    """

    drawn = likelihood_of(nn.BCEWithLogitsLoss(reduction="sum"))
    metrics = MappingProxyType({"test_error": "Squared error of a test image"})

    def __init__(self, form: Form) -> None:
        data = sets.load("digits" if form.small else "mnist", form.folder)
        down = (data.train_images.shape[1], *(size // (8 if form.small else 1) for size in SIZES[1:-1]), SIZES[-1])
        sizes = (*down, *down[-2::-1])
        train, test, source = (data.train_images,), (data.test_images,), (data.name, data.checksum)
        title = f"Auto-encoder {'-'.join(map(str, down))} with tanh, {data.name}"
        super().__init__(form, train, test, source, lambda: _deep(sizes), title, batch=100)

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Mean over the batch."""
        return F.binary_cross_entropy_with_logits(model(batch[0]), batch[0], reduction="sum") / len(batch[0])

    def sums(self, model: nn.Module, *tensors: Tensor) -> dict[str, Tensor]:
        """With the squared error."""
        (x,), logits = tensors, model(tensors[0])
        error = (logits.sigmoid() - x).square().sum()
        return {"loss": F.binary_cross_entropy_with_logits(logits, x, reduction="sum"), "error": error}
