"""The variational auto-encoder of pytorch/examples on MNIST: 784-400-20 and back."""

from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isaac_lab import noise
from isaac_lab.data import sets
from isaac_lab.workload import registered, seeded
from isaac_lab.workloads.examples import Examples

HIDDEN, CODE = 400, 20


class VAE(nn.Module):
    """A normal code, drawn in training and in tests alike.

    Args:
        pixels: Of an image.
        hidden: Units of each hidden layer.
        code: Of the code.
    """

    def __init__(self, pixels: int, hidden: int = HIDDEN, code: int = CODE) -> None:
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
    """Minus the evidence lower bound of an image; see `examples.Examples` for the options."""

    quantity = "test_loss"
    metrics = MappingProxyType({"test_reconstruction": "Test cross-entropy"})
    last = "fc4"

    def __init__(self, small: bool, device: str, folder: Path | None, *, batch: int = 128, **options: int | str) -> None:
        data = sets.load("digits" if small else "mnist", folder)
        self._hidden, self._code = (32, 4) if small else (HIDDEN, CODE)
        test, random = data.test_images, noise.generator("codes")
        # Those for tests come with the random numbers of their codes, so that measuring draws none.
        pair = [(x, torch.randn(len(x), self._code, generator=random)) for x in (data.train_images, test)]
        super().__init__(pair[0], pair[1], device, batch=batch, **options)  # type: ignore[arg-type]
        self.data, self.checksum, self.title = data.name, data.checksum, f"VAE of pytorch/examples, {data.name}"

    def model(self, seed: int) -> nn.Module:
        """The network, with torch's own initial weights."""
        pixels = self._train[0].shape[1]
        return seeded(lambda: VAE(pixels, self._hidden, self._code), seed).to(self._device)

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Mean over the batch; the script adds up, which Adam does not see."""
        return _sums(batch[0], *model(batch[0]))["loss"] / len(batch[0])

    def sums(self, model: nn.Module, *tensors: Tensor) -> dict[str, Tensor]:
        """With the cross-entropy of the pixels."""
        return _sums(tensors[0], *model(*tensors))


def _sums(x: Tensor, logits: Tensor, mean: Tensor, log_variance: Tensor) -> dict[str, Tensor]:
    cross_entropy = F.binary_cross_entropy_with_logits(logits, x, reduction="sum")
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
    return {"loss": cross_entropy + divergence, "reconstruction": cross_entropy}
