"""Three tasks of GLUE: an encoder of Hugging Face is fine-tuned; in the small form a tiny random BERT on toy tasks."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isaac_lab import noise
from isaac_lab.data import text
from isaac_lab.data.text import Kind, Split, TextTask
from isaac_lab.scores import SCORES
from isaac_lab.workload import HALF, Form, Workload, registered
from isaac_lab.workloads.encoders import ENCODER as ENCODER
from isaac_lab.workloads.encoders import MOST_TOKENS, WANTED, Encoder, EncoderError, encoder, quietly, tiny
from isaac_lab.workloads.examples import cut

#: Lengths of batches are multiples of this, which tensor cores want; and tokens of each example where all have one shape.
MULTIPLE, FIXED_LENGTH = 8, 64
#: Training examples that the training loss is measured on, and how many examples are measured at once.
MOST_MEASURED, MEASURED_AT_ONCE = 1000, 64
#: What a task is measured by: is this a sentence, do two say the same, how similar is what they say?
METRICS: Mapping[Kind, Mapping[str, str]] = {
    "acceptability": {"matthews": "Matthews"},
    "paraphrase": {"accuracy": "accuracy", "f1": "F1"},
    "similarity": {"pearson": "Pearson", "spearman": "Spearman"},
}


class Tokens:
    """A split as the numbers of the encoder's tokenizer, on the device."""

    def __init__(self, split: Split, tokenizer: Any, device: str) -> None:
        second = None if split.second is None else list(split.second)
        most = min(MOST_TOKENS, tokenizer.model_max_length)
        with quietly():
            # Its own padding, of all examples to one length; a batch is a part of that.
            encoded = tokenizer(
                list(split.first),
                second,
                truncation=True,
                max_length=most,
                padding="longest",
                pad_to_multiple_of=MULTIPLE,
                return_attention_mask=True,
                return_tensors="pt",
            )
        #: Of each example; on the host, where the shape of a batch is decided.
        self.lengths: list[int] = encoded["attention_mask"].sum(1).tolist()
        self.names = tuple(encoded)
        self._tensors: tuple[Tensor, ...] = tuple(encoded[name].to(device) for name in self.names)
        self._labels = torch.tensor(split.labels, device=device)
        self._right = tokenizer.padding_side == "right"

    def __len__(self) -> int:
        return len(self.lengths)

    def __call__(self, index: Tensor, numbers: list[int]) -> tuple[Tensor, ...]:
        """Inputs and labels of some examples, padded to the longest of them, rounded up; `index` is on the device."""
        longest = max(self.lengths[number] for number in numbers)
        length = -(-longest // MULTIPLE) * MULTIPLE
        part = slice(length) if self._right else slice(-length, None)
        return (*(tensor[index, part] for tensor in self._tensors), self._labels[index])

    def real(self) -> Tensor:
        """All tokens one after the other, without padding."""
        return self._tensors[self.names.index("input_ids")][self._tensors[self.names.index("attention_mask")].bool()]


class Glue(Workload):
    """Fine-tuning of an encoder with a new head on one task: batches of 8 in a random order, bf16 where there is a GPU.

    Padding is masked, in attention and in ISAAC's conditioners. With the split "validation" a tenth of the training examples
    stands in place of dev.
    """

    batch = 8

    def __init__(self, task: TextTask, base: Encoder, form: Form) -> None:
        device = form.device
        if form.split == "validation":
            train, dev = (task.train.of(numbers.tolist()) for numbers in cut(len(task.train), "validation"))
            task = replace(task, train=train, dev=dev)
        self.batch = self.batch if form.batch is None else form.batch
        self.title = f"{base.name} on {task.title}"
        self.data, self.checksum, self.network, self.weights = task.title, task.checksum, base.name, base.weights
        self.task = task
        self.metrics, self._scored = METRICS[task.kind], task.kind == "similarity"
        self._base, self._device = base, device
        self.tensor_cores = device == "cuda"
        self.arithmetic = HALF if self.tensor_cores else self.arithmetic
        self.train, self.dev = (Tokens(split, base.tokenizer, device) for split in (task.train, task.dev))
        self.names = self.train.names
        self.steps = -(-len(self.train) // self.batch)
        # The same for every seed and method.
        self._measured = torch.randperm(len(self.train), generator=noise.generator("examples"))[:MOST_MEASURED].tolist()

    def build(self) -> nn.Module:
        """The encoder; the seed decides its head."""
        return self._base.build(self.task.outputs).train()

    def batches(self, seed: int, epoch: int) -> Iterator[tuple[Tensor, ...]]:
        """All examples in a new order; the last batch is what is left."""
        order = torch.randperm(len(self.train), generator=noise.generator("order", seed, epoch))
        for index, numbers in zip(order.to(self._device).split(self.batch), order.split(self.batch), strict=True):
            yield self.train(index, numbers.tolist())

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Mean over the batch: cross-entropy, or squared error of a score."""
        *inputs, labels = batch
        return self._loss(self._outputs(model, inputs), labels)

    def mask(self, *batch: Tensor) -> Tensor | None:
        """The positions that are no padding."""
        return batch[self.names.index("attention_mask")]

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """On all of dev, and on 1,000 training examples."""
        model.eval()
        train = self._loss(*self._predict(model, self.train, self._measured)).item()
        output, labels = self._predict(model, self.dev, range(len(self.dev)))
        predicted = output.squeeze(1) if self._scored else output.argmax(1)
        found = {name: SCORES[name](predicted, labels) for name in self.metrics}
        model.train()
        return {"train_loss": train, "test_loss": self._loss(output, labels).item(), **found}

    def _outputs(self, model: nn.Module, inputs: list[Tensor]) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=self._device == "cuda"):
            logits: Tensor = model(**dict(zip(self.names, inputs, strict=True))).logits
        return logits.float()

    def _predict(self, model: nn.Module, tokens: Tokens, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Outputs and labels, in an order of their own: similar lengths together."""
        outputs, labels = [], []
        ordered = sorted(numbers, key=lambda number: tokens.lengths[number])
        for start in range(0, len(ordered), MEASURED_AT_ONCE):
            part = ordered[start : start + MEASURED_AT_ONCE]
            *inputs, own = tokens(torch.tensor(part, device=self._device), part)
            outputs.append(self._outputs(model, inputs))
            labels.append(own)
        return torch.cat(outputs), torch.cat(labels)

    def _loss(self, output: Tensor, labels: Tensor) -> Tensor:
        return F.mse_loss(output.squeeze(1), labels) if self._scored else F.cross_entropy(output, labels)


class FixedLength(Glue):
    """For the time of a step: rows of 64 tokens cut from the training text, without padding, so that all do the same."""

    def __init__(self, task: TextTask, base: Encoder, form: Form) -> None:
        super().__init__(task, base, form)
        self.title += f", {FIXED_LENGTH} tokens each"
        self.names = ("input_ids",)
        stream = self.train.real()
        rows = len(stream) // (FIXED_LENGTH * self.batch) * self.batch
        self.steps = rows // self.batch
        self._rows = stream[: rows * FIXED_LENGTH].view(self.steps, self.batch, FIXED_LENGTH)
        self._labels = torch.tensor(task.train.labels[:rows], device=form.device).view(self.steps, self.batch)

    def batches(self, seed: int, epoch: int) -> Iterator[tuple[Tensor, ...]]:
        """In the order of the text."""
        yield from zip(self._rows, self._labels, strict=True)

    def mask(self, *batch: Tensor) -> Tensor | None:
        """Every position counts."""
        return None

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Nothing is learned from text that was cut anywhere."""
        raise NotImplementedError(f"{self.title} is for the time of a step only")


def _made(kind: type[Glue], name: str, form: Form) -> Workload:
    if form.small:
        return kind(text.load(f"toy-{name}"), tiny(), form)
    source = os.environ.get(ENCODER, "")
    if not source:
        raise EncoderError(f"no encoder is named: {WANTED}")
    return kind(text.load(name, form.folder), encoder(source), form)


registered("cola", "batch", "split")(partial(_made, Glue, "cola"))
registered("mrpc", "batch", "split")(partial(_made, Glue, "mrpc"))
registered("stsb")(partial(_made, Glue, "stsb"))
registered("cola-64")(partial(_made, FixedLength, "cola"))
