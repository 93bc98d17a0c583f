"""ResNet-18 on CIFAR-10, as in Figure 6: padded, cropped and mirrored images, made on the device, batches of 100."""

from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor, nn
from torch.nn import functional as F

from isaac_lab import noise
from isaac_lab.data import images
from isaac_lab.models import ResNet18
from isaac_lab.workload import HALF, Workload, registered, seeded
from isaac_lab.workloads.examples import cut

NAME = "cifar-resnet18"
#: Pixels of black on each side, within which a crop moves.
PAD = 4
#: Training images that the training loss is measured on.
MOST_MEASURED = 10_000
#: Batches that are cut out at once: one a time would leave a GPU waiting for small operations, all would fill a CPU's memory.
AT_ONCE = 10
#: Images of one pass of `evaluate`.
EVALUATED = 1000
#: Of the small form: channels of the first stage, images of a batch, to train on and to test on.
SMALL_WIDTH, SMALL_BATCH, SMALL_TRAIN, SMALL_TEST = 8, 10, 60, 50


@registered(NAME, "batch", "examples", "tested", "split")
class ResNet(Workload):
    """Ten classes of images of 32 × 32, cross-entropy.

    Weights are float32. On CUDA the network runs in bfloat16 under autocast, and what is left in float32 may use TF32.

    Args:
        small: Generated images, few of them, and an eighth of the channels.
        device: "cpu" or "cuda".
        folder: Where CIFAR-10 is looked for first.
        half: Whether the network runs in bfloat16; None for "on CUDA".
        channels_last: Whether weights, like the images, have their channels innermost, as tensor cores like them.
        batch: Images of a step; 0 for 100, or 10 in the small form.
        examples: At most so many training images; 0 for all.
        tested: At most so many images are measured on each side; 0 for all tests and 10,000 training images.
        split: With "validation", a tenth of the training images stands in place of those for tests.
    """

    batch = 100
    last = "fc"
    metrics = MappingProxyType({"test_accuracy": "Test accuracy"})

    def __init__(
        self,
        small: bool,
        device: str,
        folder: Path | None,
        *,
        half: bool | None = None,
        channels_last: bool = True,
        batch: int = 0,
        examples: int = 0,
        tested: int = 0,
        split: str = "test",
    ) -> None:
        found = images.load("toy-images" if small else "cifar-10", folder)
        train, test = (SMALL_TRAIN, SMALL_TEST) if small else (len(found.train), len(found.test))
        self.title = f"ResNet-18{f' of width {SMALL_WIDTH}' if small else ''}, {found.title}"
        self.data, self.checksum = found.title, found.checksum
        self.batch = batch or (SMALL_BATCH if small else self.batch)
        self.half = device == "cuda" if half is None else half
        self.channels_last = channels_last
        self._device, self._small, self._classes = device, small, found.classes
        inner, labels = _channels_innermost(found.train[:train]), found.train_labels[:train]
        aside = _channels_innermost(found.test[: min(test, tested or test)]), found.test_labels[: min(test, tested or test)]
        if split == "validation" or examples:
            chosen, held = cut(train, split, examples)
            aside = (inner[held][: tested or None], labels[held][: tested or None]) if split == "validation" else aside
            inner, labels, train = inner[chosen], labels[chosen], len(chosen)
        self._padded, self._labels = F.pad(inner, (0, 0, PAD, PAD, PAD, PAD)).to(device), labels.to(device)
        self._test = aside[0].to(device), aside[1].to(device)
        # The same for every seed and method.
        measured = torch.randperm(train, generator=noise.generator("examples"))[: tested or MOST_MEASURED]
        self._measured = inner[measured].to(device), self._labels[measured.to(device)]
        mean, std = (torch.tensor(values, device=device) for values in (found.mean, found.std))
        self._scale, self._shift = 1 / (255 * std), -mean / std
        self.steps = train // self.batch
        self.tensor_cores = device == "cuda" and self.half
        self.arithmetic = _arithmetic(device, self.half)
        if device == "cuda":
            # All batches have one shape: the search for the fastest kernels is made once, before a graph is captured.
            torch.backends.cudnn.benchmark = True

    def model(self, seed: int) -> nn.Module:
        """ResNet-18 in its form for small images."""
        width = {"width": SMALL_WIDTH} if self._small else {}
        made = seeded(lambda: ResNet18(classes=self._classes, **width), seed).to(self._device)
        # Torch's annotations of `Module.to` leave the memory format out.
        return made.to(memory_format=torch.channels_last) if self.channels_last else made  # type: ignore[call-overload]

    def batches(self, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All images in a new order, each cut out at a random place and mirrored or not, as seed and epoch say."""
        count = self.steps * self.batch
        order = torch.randperm(len(self._labels), generator=noise.generator("order", seed, epoch))[:count]
        random = noise.generator("augmentation", seed, epoch)
        places = torch.randint(2 * PAD + 1, (2, count), generator=random)
        mirrored = torch.randint(2, (1, count), generator=random)
        drawn = torch.cat([order[None], places, mirrored]).to(self._device)
        for which, top, left, flip in zip(*(row.split(AT_ONCE * self.batch) for row in drawn), strict=True):
            x, y = self._normalized(crops(self._padded, which, top, left, flip.bool())), self._labels[which]
            yield from zip(x.split(self.batch), y.split(self.batch), strict=True)

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Mean over the batch."""
        x, y = batch
        with self._autocast():
            return F.cross_entropy(model(x), y)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """On 10,000 training images as they are, and on all test images."""
        model.eval()
        train_loss, _ = self._measure(model, *self._measured)
        test_loss, accuracy = self._measure(model, *self._test)
        model.train()
        return {"train_loss": train_loss.item(), "test_loss": test_loss.item(), "test_accuracy": accuracy.item()}

    def _measure(self, model: nn.Module, examples: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss and the share of right answers."""
        loss, right = (torch.zeros((), dtype=torch.float64, device=self._device) for _ in range(2))
        for x, y in zip(examples.split(EVALUATED), labels.split(EVALUATED), strict=True):
            with self._autocast():
                output = model(self._normalized(x))
            loss += F.cross_entropy(output.float(), y, reduction="sum")
            right += (output.argmax(1) == y).sum()
        return loss / len(labels), right / len(labels)

    def _normalized(self, inner: UInt8[Tensor, "batch high wide 3"]) -> Float[Tensor, "batch 3 high wide"]:
        """Mean 0 and deviation 1 in each channel; channels stay innermost in memory."""
        return torch.addcmul(self._shift, inner.float(), self._scale).permute(0, 3, 1, 2)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device, torch.bfloat16, enabled=self.half)


def crops(
    padded: UInt8[Tensor, "images high wide 3"],
    which: Int[Tensor, " batch"],
    top: Int[Tensor, " batch"],
    left: Int[Tensor, " batch"],
    mirrored: Bool[Tensor, " batch"],
) -> UInt8[Tensor, "batch side side 3"]:
    """Squares cut out of images that have `PAD` pixels more on each side, all by one look-up.

    Args:
        padded: The images, channels innermost.
        which: Of the images.
        top: First row of each square, 0 … 2 `PAD`.
        left: First column of each.
        mirrored: Which squares have left and right exchanged.
    """
    place = torch.arange(padded.shape[1] - 2 * PAD, device=padded.device)
    rows = top[:, None] + place
    columns = left[:, None] + torch.where(mirrored[:, None], place.flip(0), place)
    return padded[which[:, None, None], rows[:, :, None], columns[:, None, :]]


def _channels_innermost(inputs: UInt8[Tensor, "images 3 high wide"]) -> UInt8[Tensor, "images high wide 3"]:
    return inputs.permute(0, 2, 3, 1).contiguous()


def _arithmetic(device: str, half: bool) -> str:
    if half:
        return HALF if device == "cuda" else "bfloat16 autocast, float32 weights"
    # Torch allows TF32 in convolutions unless it is told otherwise.
    return "float32, TF32 in convolutions" if device == "cuda" and torch.backends.cudnn.allow_tf32 else "float32"
