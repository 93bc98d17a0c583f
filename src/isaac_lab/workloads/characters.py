"""Language models that predict the next character of Shakespeare's plays: GPTs, and the LSTMs of torch-rnn."""

from collections.abc import Iterator
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isaac_lab import noise
from isaac_lab.data.text import SHAKESPEARE, shakespeare
from isaac_lab.workload import Form, registered
from isaac_lab.workloads.examples import Measured

#: Share of the text to train on; the rest, its end, is for validation.
TRAINED = 0.9
#: Characters of the small form.
EXCERPT = 100_000
#: Windows that a loss is measured on at most; all of the validation text is less.
MOST_MEASURED = 1_000
#: Standard deviation of the initial weights.
SPREAD = 0.02


class GPT(nn.Module):
    """A decoder-only transformer with its normalizations before the blocks' parts.

    Dropout is of the embeddings, the attention weights and the results of a block's parts; where it is `tied`, the last layer
    has the weights of the embedding.
    """

    def __init__(
        self, characters: int, *, layers: int, width: int, heads: int, context: int, dropout: float = 0.0, tied: bool = False
    ) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(characters, width), nn.Embedding(context, width)
        self.dropout = dropout
        self.blocks = nn.Sequential(*(_Block(width, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters, bias=False)
        self.places = nn.Buffer(torch.arange(context), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What is added to the stream of residuals is smaller the more of it there is.
                last = name.endswith(("project.weight", "down.weight"))
                nn.init.normal_(parameter, std=SPREAD * (2 * layers) ** -0.5 if last else SPREAD)
        if tied:
            self.head.weight = self.characters.weight

    def forward(self, text: Tensor) -> Tensor:
        """Logits of the character that follows each."""
        hidden = F.dropout(self.characters(text) + self.positions(self.places), self.dropout, self.training)
        logits: Tensor = self.head(self.norm(self.blocks(hidden)))
        return logits


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attend(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        x = x + F.dropout(self.project(attended.transpose(1, 2).reshape(batch, length, width)), dropout, self.training)
        added: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + F.dropout(added, dropout, self.training)


class CharacterLSTM(nn.Module):
    """Embedding, LSTMs one after the other, and a linear layer; each window, of any length, begins with a state of zeros."""

    def __init__(self, characters: int, *, embedded: int, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, embedded)
        self.lstm = nn.LSTM(embedded, width, layers, batch_first=True)
        self.head = nn.Linear(width, characters)

    def forward(self, text: Tensor) -> Tensor:
        """Logits of the character that follows each."""
        hidden, _ = self.lstm(self.characters(text))
        logits: Tensor = self.head(hidden)
        return logits


class Characters(Measured):
    """Cross-entropy of the next character, by a network of this shape, in windows of `context` characters.

    The end of the text is for tests. With the split "validation" the end of the training text stands in its place. A loss is
    measured on so many windows at most. The title may name what is in the shape.
    """

    metrics = MappingProxyType({"test_accuracy": "Test accuracy"})
    at_once = 128

    def __init__(
        self, form: Form, title: str, network: type[nn.Module], *, batch: int, measured: int = MOST_MEASURED, **shape: Any
    ) -> None:
        text, device = shakespeare()[: EXCERPT if form.small else None], form.device
        self.title, self.checksum = f"{title.format(**shape)}, Shakespeare", SHAKESPEARE.md5
        self.data = "Shakespeare, first 100,000 characters" if form.small else "Shakespeare"
        self.alphabet = "".join(sorted(set(text)))
        text = text[: int(TRAINED * len(text))] if form.split == "validation" else text
        number = {character: place for place, character in enumerate(self.alphabet)}
        self.text = torch.tensor([number[character] for character in text]).to(device)
        self.trained, batch, measured = int(TRAINED * len(text)), form.batch or batch, form.tested or measured
        self.batch, self.context, self._device = batch, shape["context"], device
        self.build = partial(network, len(self.alphabet), **shape)
        self._windows = (self.trained - self.context) // self.context
        self.steps = self._windows // batch
        # Windows to measure on are the same for every seed and method; those for validation are its first.
        chosen = torch.randperm(self._windows, generator=noise.generator("windows"))[:measured]
        tested = torch.arange(min((len(text) - self.trained - 1) // self.context, measured))
        self._measured = ((chosen * self.context).to(device),)
        self._test = ((self.trained + tested * self.context).to(device),)

    def batches(self, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Windows side by side from a new first character on, in a new order; the rest that fills no batch is left out."""
        random = noise.generator("order", seed, epoch)
        first = int(torch.randint(self.context, (), generator=random))
        order = torch.randperm(self._windows, generator=random)[: self.steps * self.batch].to(self._device)
        for starts in (first + order * self.context).view(self.steps, self.batch):
            yield self._cut(starts)

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Mean over all characters of the batch."""
        text, following = batch
        return F.cross_entropy(model(text).flatten(0, 1), following.flatten())

    def sums(self, model: nn.Module, *tensors: Tensor) -> dict[str, Tensor]:
        """Means of each window, with the share of right answers."""
        before, following = self._cut(tensors[0])
        logits, labels = model(before).flatten(0, 1), following.flatten()
        found = {"loss": F.cross_entropy(logits, labels, reduction="sum"), "accuracy": (logits.argmax(1) == labels).sum()}
        return {name: value.double() / self.context for name, value in found.items()}

    def hidden(self, model: nn.Module) -> list[Tensor]:
        """The matrices of the blocks, or of the LSTMs."""
        return [own for name, own in model.named_parameters() if own.dim() == 2 and name.startswith(("blocks.", "lstm."))]

    def _cut(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        windows = self.text[starts[:, None] + torch.arange(self.context + 1, device=self._device)]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


@registered("char-gpt")
def char_gpt(form: Form) -> Characters:
    """4 layers × 256, or 2 × 64."""
    shape = {"layers": 4, "width": 256, "heads": 4, "context": 128, "batch": 32}
    few = {"layers": 2, "width": 64, "heads": 4, "context": 32, "batch": 8, "measured": 64}
    return Characters(form, "Character GPT {layers} × {width}", GPT, **(few if form.small else shape))


@registered("nano-gpt", "batch", "context", "depth", "width", "tested", "split")
def nano_gpt(form: Form, *, depth: int = 0, **variant: Any) -> Characters:
    """NanoGPT's network for characters: 6 layers × 384, dropout 0.2, weights of the last layer those of the embedding."""
    shape = {"layers": 6, "width": 384, "heads": 6, "context": 256, "batch": 64, "dropout": 0.2, "tied": True}
    shape |= {"layers": 2, "width": 48, "context": 32, "batch": 8} if form.small else {}
    variant |= {"layers": depth} if depth else {}
    return Characters(form, "Character GPT {layers} × {width} of nanoGPT", GPT, **shape | variant)


@registered("char-lstm", "batch", "tested", "split")
def char_lstm(form: Form) -> Characters:
    """Two LSTMs of 128 units, or of 16."""
    shape = {"embedded": 64, "width": 128, "layers": 2, "context": 50, "batch": 50}
    few = {"embedded": 8, "width": 16, "layers": 2, "context": 20, "batch": 8}
    return Characters(form, "LSTM 2 × {width} of torch-rnn", CharacterLSTM, **(few if form.small else shape))
