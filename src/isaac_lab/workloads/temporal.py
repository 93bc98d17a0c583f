"""A temporal convolutional network on the adding problem: which two of a long row of numbers are marked, and their sum."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from isaac_lab import noise
from isaac_lab.data.files import md5
from isaac_lab.workload import registered, seeded
from isaac_lab.workloads.examples import Examples

#: Sequences to train on and for tests.
TRAINED, TESTED = 50_000, 1_000
KERNEL = 7
#: Standard deviation of the initial weights of what has no weight norm.
SPREAD = 0.01


def additions(count: int, length: int, name: str) -> tuple[Tensor, Tensor]:
    """Uniform numbers and marks of two of them (count, 2, length), and the sums of these two (count, 1)."""
    random = noise.generator("additions", name, length)
    numbers = torch.rand(count, length, generator=random)
    first = torch.randint(length, (count,), generator=random)
    second = (first + 1 + torch.randint(length - 1, (count,), generator=random)) % length
    marks = F.one_hot(first, length) + F.one_hot(second, length)
    return torch.stack([numbers, marks.float()], 1), (numbers * marks).sum(1, keepdim=True)


class TCN(nn.Module):
    """Blocks of two convolutions that see the past only, twice as far in each block; the last place decides.

    Args:
        levels: Blocks.
        width: Channels.
    """

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
    """Squared error of the sum; see `examples.Examples` for other options.

    Args:
        small: Short sequences and few channels.
        device: "cpu" or "cuda".
        folder: Not needed.
        length: Of a sequence.
        depth: Blocks of the network.
        options: Of `examples.Examples`.
    """

    quantity = "test_loss"
    last = "head"

    def __init__(
        self, small: bool, device: str, folder: Path | None, *, length: int = 0, depth: int = 0, **options: int | str
    ) -> None:
        length, self._shape = length or (20 if small else 400), (depth or (2 if small else 8), 6 if small else 30)
        train = additions(TRAINED // (100 if small else 1), length, "train")
        test = additions(TESTED // (10 if small else 1), length, "test")
        super().__init__(train, test, device, batch=32, **options)  # type: ignore[arg-type]
        self.data, self.checksum = "generated sequences", md5(b"".join(x.numpy().tobytes() for x in (*train, *test)))
        self.title = f"TCN {self._shape[0]} × {self._shape[1]}, adding problem of length {length}"

    def model(self, seed: int) -> nn.Module:
        """The network of the script."""
        return seeded(lambda: TCN(*self._shape), seed).to(self._device)

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Mean over the batch."""
        return F.mse_loss(model(batch[0]), batch[1])

    def sums(self, model: nn.Module, *tensors: Tensor) -> dict[str, Tensor]:
        """Squared errors."""
        return {"loss": F.mse_loss(model(tensors[0]), tensors[1], reduction="sum")}
