"""The deep auto-encoder that second-order methods are measured on: 784-1000-500-250-30 and back, with a linear code."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

from torch import Tensor, nn
from torch.nn import functional as F

from isaac_lab.data import sets
from isaac_lab.trial import TrialError
from isaac_lab.workload import registered, seeded
from isaac_lab.workloads.examples import Examples
from isaac_newton.math.likelihood import likelihood_of

#: Of Hinton and Salakhutdinov (2006), from the image to the code.
SIZES = (784, 1000, 500, 250, 30)
#: Sigmoid units are Hinton's and Martens's (2010); tanh is that of Martens and Grosse (2015).
UNITS: Mapping[str, type[nn.Module]] = {"tanh": nn.Tanh, "sigmoid": nn.Sigmoid}


@registered("deep-autoencoder", "batch", "examples", "tested", "units", "split")
class DeepAutoencoder(Examples):
    """Cross-entropy summed over the pixels; reported is the squared error of an image. See `examples.Examples` for options.

    Args:
        small: Layers an eighth as wide, on the digits.
        device: "cpu" or "cuda".
        folder: Where MNIST is looked for first.
        units: A key of `UNITS`.
        batch: Images of a step.
        options: Of `examples.Examples`.
    """

    drawn = likelihood_of(nn.BCEWithLogitsLoss(reduction="sum"))
    quantity = "test_loss"
    metrics = MappingProxyType({"test_error": "Squared error of a test image"})

    def __init__(
        self, small: bool, device: str, folder: Path | None, *, units: str = "tanh", batch: int = 100, **options: int | str
    ) -> None:
        if units not in UNITS:
            raise TrialError(f"units must be one of {', '.join(UNITS)}, got {units!r}")
        data = sets.load("digits" if small else "mnist", folder)
        super().__init__((data.train_images,), (data.test_images,), device, batch=batch, **options)  # type: ignore[arg-type]
        pixels = data.train_images.shape[1]
        down = (pixels, *(size // (8 if small else 1) for size in SIZES[1:-1]), SIZES[-1])
        self.sizes, self._units = (*down, *down[-2::-1]), units
        self.last = str(2 * len(self.sizes) - 5)
        self.data, self.checksum = data.name, data.checksum
        self.title = f"Auto-encoder {'-'.join(map(str, down))} with {units}, {data.name}"

    def model(self, seed: int) -> nn.Module:
        """With the initial weights of Glorot and Bengio, which keep units that saturate alive."""
        return seeded(self._built, seed).to(self._device)

    def _built(self) -> nn.Module:
        middle, layers = len(self.sizes) // 2, list[nn.Module]()
        for number, (fan_in, fan_out) in enumerate(pairwise(self.sizes), start=1):
            layer = nn.Linear(fan_in, fan_out)
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
            layers.append(layer)
            if number not in (middle, len(self.sizes) - 1):
                layers.append(UNITS[self._units]())
        return nn.Sequential(*layers)

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Mean over the batch."""
        return F.binary_cross_entropy_with_logits(model(batch[0]), batch[0], reduction="sum") / len(batch[0])

    def sums(self, model: nn.Module, *tensors: Tensor) -> dict[str, Tensor]:
        """With the squared error."""
        (x,), logits = tensors, model(tensors[0])
        error = (logits.sigmoid() - x).square().sum()
        return {"loss": F.binary_cross_entropy_with_logits(logits, x, reduction="sum"), "error": error}
