"""The network of pytorch/examples on MNIST or Fashion-MNIST: two convolutions, two linear layers, dropout."""

from pathlib import Path
from types import MappingProxyType

from torch import Tensor, nn
from torch.nn import functional as F

from isaac_lab.data import sets
from isaac_lab.trial import TrialError
from isaac_lab.workload import registered, seeded
from isaac_lab.workloads.examples import Examples

#: Of the pixels, by data set: mean and standard deviation.
MOMENTS = {"mnist": (0.1307, 0.3081), "fashion-mnist": (0.286, 0.353)}


class ConvNet(nn.Module):
    """Convolutions of 32 and 64 channels, a hidden layer of 128.

    Args:
        side: Of the images.
        channels: Of the first convolution; the second has twice as many, the hidden layer four times as many.
    """

    def __init__(self, side: int = 28, channels: int = 32) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, channels, 3), nn.Conv2d(channels, 2 * channels, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(2 * channels * ((side - 4) // 2) ** 2, 4 * channels), nn.Linear(4 * channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = F.relu(self.fc1(self.dropout1(x).flatten(1)))
        logits: Tensor = self.fc2(self.dropout2(x))
        return logits


@registered("mnist-cnn", "batch", "channels", "data", "examples", "tested", "split")
class MnistCNN(Examples):
    """Cross-entropy of ten classes, on one of `MOMENTS`; see `examples.Examples` for the options."""

    metrics = MappingProxyType({"test_accuracy": "Test accuracy"})
    last = "fc2"

    def __init__(
        self,
        small: bool,
        device: str,
        folder: Path | None,
        *,
        batch: int = 64,
        channels: int = 0,
        data: str = "mnist",
        **options: int | str,
    ) -> None:
        if data not in MOMENTS:
            raise TrialError(f"data must be {' or '.join(MOMENTS)}, got {data!r}")
        (mean, std), data_set = MOMENTS[data], sets.load("digits" if small else data, folder)
        self._side, self._channels = (8, 4) if small else (28, channels or 32)
        pairs = (data_set.train_images, data_set.train_labels), (data_set.test_images, data_set.test_labels)
        train, test = (((x.view(-1, 1, self._side, self._side) - mean) / std, y) for x, y in pairs)
        super().__init__(train, test, device, batch=batch, **options)  # type: ignore[arg-type]
        self.data, self.checksum = data_set.name, data_set.checksum
        self.title = f"CNN of pytorch/examples, {self.data}"

    def model(self, seed: int) -> nn.Module:
        """The network, with torch's own initial weights."""
        return seeded(lambda: ConvNet(self._side, self._channels), seed).to(self._device)

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Mean over the batch."""
        return F.cross_entropy(model(batch[0]), batch[1])

    def sums(self, model: nn.Module, *tensors: Tensor) -> dict[str, Tensor]:
        """With the number of right answers."""
        output, labels = model(tensors[0]), tensors[1]
        return {"loss": F.cross_entropy(output, labels, reduction="sum"), "accuracy": (output.argmax(1) == labels).sum()}
