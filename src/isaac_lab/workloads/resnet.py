"""Networks on CIFAR-10: ResNet-18 as in Figure 6, a small vision transformer, and super-resolution."""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import pairwise
from types import MappingProxyType

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor, nn
from torch.nn import functional as F

from isaac_lab import noise
from isaac_lab.data import images
from isaac_lab.workload import HALF, Form, registered
from isaac_lab.workloads.examples import Examples, Measured, decibels, parted

NAME = "cifar-resnet18"
#: Pixels of black on each side, within which a crop moves.
PAD = 4
#: Training images that the training loss is measured on.
MOST_MEASURED = 10_000
#: Batches that are cut out at once: one a time would leave a GPU waiting for small operations, all would fill a CPU's memory.
AT_ONCE = 10
#: Of the small form: channels of the first stage, images of a batch, to train on and to test on.
SMALL_WIDTH, SMALL_BATCH, SMALL_TRAIN, SMALL_TEST = 8, 10, 60, 50
#: Of super-resolution: how much larger a side becomes, and a target's side, the largest multiple in an image of 32.
FACTOR, SIDE = 3, 30
#: Of red, green and blue in the brightness.
BRIGHTNESS = (0.299, 0.587, 0.114)


class ResNet18(nn.Module):
    """ResNet-18 for images of 32 × 32: a 3 × 3 stem and no pooling before the first of four stages; each doubles the width."""

    def __init__(self, *, classes: int = 10, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        channels = [width, width, 2 * width, 4 * width, 8 * width]
        blocks: list[nn.Module] = []
        for before, after in pairwise(channels):
            blocks += [_Block(before, after, stride=1 if before == after else 2), _Block(after, after, stride=1)]
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(channels[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (batch, classes) of images (batch, 3, height, width)."""
        logits: Tensor = self.fc(self.blocks(self.stem(images)).mean((2, 3)))
        return logits


class _Block(nn.Module):
    """Two 3 × 3 convolutions beside a shortcut."""

    def __init__(self, before: int, after: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        residual: Tensor = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(residual + self.shortcut(x))


@registered(NAME, "batch", "examples", "tested", "split")
class ResNet(Measured):
    """Ten classes of images of 32 × 32, padded, cropped and mirrored on the device.

    Weights are float32. On CUDA, or where `half` says so, the network runs in bfloat16 under autocast, and what is left in
    float32 may use TF32. Measured are all tests and 10,000 training images, or at most `tested` of each.
    The small form has few generated images and an eighth of the channels.
    """

    batch = 100
    metrics = MappingProxyType({"test_accuracy": "Test accuracy"})
    at_once = 1000
    #: Whether weights, like the images, have their channels innermost, as tensor cores like them.
    channels_last = True
    called = "ResNet-18", f" of width {SMALL_WIDTH}"  # and what is said of the small form
    made_by: type[nn.Module] = ResNet18
    few: Mapping[str, int] = {"width": SMALL_WIDTH}  # sizes of the small form

    def __init__(self, form: Form, *, half: bool | None = None) -> None:
        small, device = form.small, form.device
        found = images.load("toy-images" if small else "cifar-10", form.folder)
        count, tests = (SMALL_TRAIN, SMALL_TEST) if small else (len(found.train), len(found.test))
        self.data, self.checksum = found.title, found.checksum
        self.batch = form.batch or (SMALL_BATCH if small else self.batch)
        self.half = device == "cuda" if half is None else half
        self._device, self.build = device, partial(self.made_by, classes=found.classes, **(self.few if small else {}))
        inner, other = (x.permute(0, 2, 3, 1).contiguous() for x in (found.train[:count], found.test[:tests]))
        (inner, labels), aside = parted((inner, found.train_labels[:count]), (other, found.test_labels[:tests]), form)
        self._padded, self._labels = F.pad(inner, (0, 0, PAD, PAD, PAD, PAD)).to(device), labels.to(device)
        self._test = tuple(x[: form.tested or None].to(device) for x in aside)
        # The same for every seed and method.
        measured = torch.randperm(len(labels), generator=noise.generator("examples"))[: form.tested or MOST_MEASURED]
        self._measured = inner[measured].to(device), labels[measured].to(device)
        mean, std = (torch.tensor(values, device=device) for values in (found.mean, found.std))
        self._scale, self._shift = 1 / (255 * std), -mean / std
        self.steps = len(labels) // self.batch
        self.tensor_cores = device == "cuda" and self.half
        # Torch allows TF32 in convolutions unless it is told otherwise.
        full = "float32, TF32 in convolutions" if device == "cuda" and torch.backends.cudnn.allow_tf32 else "float32"
        self.arithmetic = (HALF if device == "cuda" else "bfloat16 autocast, float32 weights") if self.half else full
        self.title = f"{self.called[0]}{self.called[1] * small}, {found.title}"
        if device == "cuda":
            # All batches have one shape: the search for the fastest kernels is made once, before a graph is captured.
            torch.backends.cudnn.benchmark = True

    def model(self, seed: int) -> nn.Module:
        """In the layout of the images."""
        made = super().model(seed)
        # Torch's annotations of `Module.to` leave the memory format out.
        return made.to(memory_format=torch.channels_last) if self.channels_last else made  # type: ignore[call-overload]

    def batches(self, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All images in a new order, each cut out at a random place and mirrored or not, as seed and epoch say."""
        count = self.steps * self.batch
        order = torch.randperm(len(self._labels), generator=noise.generator("order", seed, epoch))[:count]
        random = noise.generator("augmentation", seed, epoch)
        places = torch.randint(2 * PAD + 1, (2, count), generator=random)
        mirrored = torch.randint(2, (1, count), generator=random)
        for drawn in torch.cat([order[None], places, mirrored]).to(self._device).split(AT_ONCE * self.batch, 1):
            which, top, left, flip = drawn
            x, y = self._normalized(crops(self._padded, which, top, left, flip.bool())), self._labels[which]
            yield from zip(x.split(self.batch), y.split(self.batch), strict=True)

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Mean over the batch."""
        with self._autocast():
            return F.cross_entropy(model(batch[0]), batch[1])

    def sums(self, model: nn.Module, *tensors: Tensor) -> dict[str, Tensor]:
        """With the number of right answers."""
        with self._autocast():
            output = model(self._normalized(tensors[0]))
        loss = F.cross_entropy(output.float(), tensors[1], reduction="sum")
        return {"loss": loss, "accuracy": (output.argmax(1) == tensors[1]).sum()}

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
    """Squares of some images that have `PAD` pixels more on each side, from their first rows and columns on, by one look-up."""
    place = torch.arange(padded.shape[1] - 2 * PAD, device=padded.device)
    rows = top[:, None] + place
    columns = left[:, None] + torch.where(mirrored[:, None], place.flip(0), place)
    return padded[which[:, None, None], rows[:, :, None], columns[:, None, :]]


class VisionTransformer(nn.Module):
    """ViT-tiny, on patches of so many pixels a side, with a token for the class."""

    def __init__(
        self, classes: int = 10, *, width: int = 192, layers: int = 12, heads: int = 3, patch: int = 4, side: int = 32
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 1 + (side // patch) ** 2, width))
        blocks = (
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.blocks, self.norm, self.head = nn.Sequential(*blocks), nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (batch, classes) of images (batch, 3, height, width)."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.first.expand(len(images), -1, -1), patches], 1) + self.places
        logits: Tensor = self.head(self.norm(self.blocks(tokens)[:, 0]))
        return logits


@registered("cifar-vit", "batch", "examples", "tested", "split")
class ViT(ResNet):
    """The same images with another network."""

    channels_last = False
    called = "ViT-tiny", ", 2 layers of width 32"
    made_by = VisionTransformer
    few: Mapping[str, int] = {"width": 32, "layers": 2, "heads": 2, "patch": 8}


def pairs(found: UInt8[Tensor, "images 3 32 32"]) -> tuple[Tensor, Tensor]:
    """Small and large brightness of the middle of each image."""
    edge = (found.shape[-1] - SIDE) // 2
    middle = found[:, :, edge : edge + SIDE, edge : edge + SIDE]
    # Part by part, because all images in float32 and three colours would fill a small memory.
    large = torch.cat([torch.einsum("ichw,c->ihw", part / 255, torch.tensor(BRIGHTNESS)) for part in middle.split(1000)])
    small = F.interpolate(large[:, None], scale_factor=1 / FACTOR, mode="bilinear", antialias=True)
    return small, large[:, None]


class SubPixel(nn.Sequential):
    """Convolutions on the small image; the last one has nine channels, which become the nine pixels of each place."""

    def __init__(self, channels: int = 64) -> None:
        first, second = nn.Conv2d(1, channels, 5, padding=2), nn.Conv2d(channels, channels, 3, padding=1)
        third = nn.Conv2d(channels, channels // 2, 3, padding=1)
        last = nn.Conv2d(channels // 2, FACTOR**2, 3, padding=1)
        for layer in (first, second, third):
            nn.init.orthogonal_(layer.weight, nn.init.calculate_gain("relu"))
        nn.init.orthogonal_(last.weight)
        super().__init__(first, nn.ReLU(), second, nn.ReLU(), third, nn.ReLU(), last, nn.PixelShuffle(FACTOR))


@registered("super-resolution", "batch", "examples", "tested", "split")
class SuperResolution(Examples):
    """The network of pytorch/examples: squared error of a pixel; reported is the PSNR."""

    metrics = MappingProxyType({"test_psnr": "PSNR"})

    def __init__(self, form: Form) -> None:
        found = images.load("toy-images" if form.small else "cifar-10", form.folder)
        train, test = (pairs(part[:60] if form.small else part) for part in (found.train, found.test))
        # 289 images of 30 × 30 have as many pixels as the script's four of 255 × 255.
        batch, channels = (10, 8) if form.small else (289, 64)
        source, title = (found.title, found.checksum), f"Super-resolution, {found.title}"
        super().__init__(form, train, test, source, lambda: SubPixel(channels), title, batch=batch)

    def sums(self, model: nn.Module, *tensors: Tensor) -> dict[str, Tensor]:
        """Mean squared error of each image."""
        return {"loss": (model(tensors[0]) - tensors[1]).square().flatten(1).mean(1).sum()}

    def named(self, train: dict[str, float], test: dict[str, float]) -> dict[str, float]:
        """In decibels, of all pixels together."""
        return {"test_psnr": decibels(test["loss"])}
