"""Examples that lie in memory: their order, the part that is cut off for searches, and what is measured on them."""

import abc
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isaac_lab import noise
from isaac_lab.data.files import md5
from isaac_lab.trial import TrialError
from isaac_lab.workload import Form, Workload

#: One in so many training examples is cut off for searches.
VALIDATED = 10
#: Examples of each side that are measured at most.
MOST_MEASURED = 10_000


def cut(count: int, split: str, examples: int = 0) -> tuple[Tensor, Tensor]:
    """Numbers of the examples to train on, all or so many, and of those cut off for searches; the same for every seed."""
    order = torch.randperm(count, generator=noise.generator("examples"))
    held = count // VALIDATED if split == "validation" else 0
    if not 0 <= examples <= count - held:
        raise TrialError(f"examples must be at most {count - held}, all that there are, got {examples}")
    return order[: examples or count - held], order[count - held :]


def parted(
    train: Sequence[Tensor], test: Sequence[Tensor], form: Form, *, shuffled: bool = False
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """What is trained on and what is measured; all as they come, unless the form wants a part or they are to be shuffled."""
    if form.split == "test" and not form.examples and not shuffled:
        return train, test
    chosen, held = cut(len(train[0]), form.split, form.examples)
    return [x[chosen] for x in train], [x[held] for x in train] if form.split == "validation" else test


class Measured(Workload):
    """What is measured are means over two sets of examples, some to train on and those for tests, part by part."""

    at_once = 500
    _measured: tuple[Tensor, ...]
    _test: tuple[Tensor, ...]

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """On both sets."""
        model.eval()
        train, test = self._mean(model, self._measured), self._mean(model, self._test)
        model.train()
        return {"train_loss": train["loss"], "test_loss": test["loss"], **self.named(train, test)}

    def named(self, train: dict[str, float], test: dict[str, float]) -> dict[str, float]:
        """Each of `metrics`, from the means of `sums`."""
        return {f"test_{name}": value for name, value in test.items() if name != "loss"}

    def _mean(self, model: nn.Module, tensors: tuple[Tensor, ...]) -> dict[str, float]:
        totals: dict[str, Tensor] = {}
        for part in zip(*(tensor.split(self.at_once) for tensor in tensors), strict=True):
            for name, value in self.sums(model, *part).items():
                totals[name] = totals.get(name, torch.zeros((), dtype=torch.float64, device=self._device)) + value
        return {name: value.item() / len(tensors[0]) for name, value in totals.items()}

    @abc.abstractmethod
    def sums(self, model: nn.Module, *tensors: Tensor) -> dict[str, Tensor]:
        """The "loss" and what the metrics need, added up over these examples."""


class Examples(Measured):
    """Inputs and targets on the device; a batch is some of them, in a new order in each epoch.

    A subclass has its `criterion` unless that is the squared error, and says what else is measured.

    Args:
        form: In which it is wanted.
        train: Tensors of one length: inputs, targets.
        test: The same for tests.
        source: What the data are called, and their checksum; without it they are generated, and it is taken here.
        build: Makes the network.
        title: Of the workload.
        batch: The usual number of examples of a step; the last one of an epoch has the rest. 0 for all.
    """

    criterion: Callable[..., Tensor] = staticmethod(F.mse_loss)
    most_measured = MOST_MEASURED

    def __init__(
        self,
        form: Form,
        train: Sequence[Tensor],
        test: Sequence[Tensor],
        source: tuple[str, str] | str,
        build: Callable[[], nn.Module],
        title: str,
        *,
        batch: int,
    ) -> None:
        if isinstance(source, str):
            source = source, md5(b"".join(x.numpy().tobytes() for x in (*train, *test)))
        self.data, self.checksum = source
        self.build, self.title, self._device = build, title, form.device
        train, aside = parted(train, test, form, shuffled=True)
        most = form.tested or self.most_measured
        self._train = tuple(tensor.to(form.device) for tensor in train)
        self._test = tuple(tensor[:most].to(form.device) for tensor in aside)
        self._measured = tuple(tensor[:most] for tensor in self._train)
        count, batch = len(train[0]), batch if form.batch is None else form.batch
        if not 0 <= batch <= count:
            raise TrialError(f"batch must be at most {count}, the number of training examples, got {batch}")
        self.batch = batch or count
        self.steps = -(-count // self.batch)

    def batches(self, seed: int, epoch: int) -> Iterator[tuple[Tensor, ...]]:
        """All examples in a new order; the last batch has the rest."""
        if self.steps == 1:
            yield self._train
            return
        order = torch.randperm(len(self._train[0]), generator=noise.generator("order", seed, epoch)).to(self._device)
        for index in order.split(self.batch):
            yield tuple(tensor[index] for tensor in self._train)

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Mean over the batch."""
        return self.criterion(model(batch[0]), batch[1])

    def sums(self, model: nn.Module, *tensors: Tensor) -> dict[str, Tensor]:
        """With the number of right answers where that is a metric."""
        output, targets = model(tensors[0]), tensors[1]
        right = {"accuracy": (output.argmax(1) == targets).sum()} if "test_accuracy" in self.metrics else {}
        return {"loss": self.criterion(output, targets, reduction="sum"), **right}


def decibels(error: float) -> float:
    """A mean squared error of values up to 1 as a peak signal-to-noise ratio."""
    return -10 * math.log10(error) if error > 0 else math.nan
