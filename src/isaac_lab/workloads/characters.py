"""Language models that predict the next character of Shakespeare's plays: GPTs, and the LSTMs of torch-rnn."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isaac_lab import noise
from isaac_lab.data import shakespeare
from isaac_lab.workload import Workload, registered, seeded

#: Share of the text to train on; the rest, its end, is for validation.
TRAINED = 0.9
#: Characters of the small form.
EXCERPT = 100_000
#: Windows that a loss is measured on at once, and at most; all of the validation text is less.
AT_ONCE, MOST_MEASURED = 128, 1_000
#: The same of the small form of `char-gpt`.
FEW_MEASURED = 64
#: Standard deviation of the initial weights.
SPREAD = 0.02


class GPT(nn.Module):
    """A decoder-only transformer with its normalizations before the blocks' parts.

    Args:
        characters: Size of the alphabet.
        layers: Blocks.
        width: Features of a position.
        heads: Of the attention.
        context: Positions.
        dropout: Share of the embeddings, attention weights and results of a block's parts that is left out in training.
        tied: Whether the last layer has the weights of the embedding.
    """

    def __init__(
        self, characters: int, *, layers: int, width: int, heads: int, context: int, dropout: float = 0.0, tied: bool = False
    ) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(characters, width), nn.Embedding(context, width)
        self.dropout = dropout
        self.blocks = nn.Sequential(*(_Block(width, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters, bias=False)
        self.register_buffer("places", torch.arange(context), persistent=False)
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
    """Embedding, LSTMs, and a linear layer; each window begins with a state of zeros.

    Args:
        characters: Size of the alphabet.
        embedded: Features of a character.
        width: Units of each LSTM.
        layers: LSTMs, one after the other.
    """

    def __init__(self, characters: int, *, embedded: int, width: int, layers: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, embedded)
        self.lstm = nn.LSTM(embedded, width, layers, batch_first=True)
        self.head = nn.Linear(width, characters)

    def forward(self, text: Tensor) -> Tensor:
        """Logits of the character that follows each."""
        hidden, _ = self.lstm(self.characters(text))
        logits: Tensor = self.head(hidden)
        return logits


class Characters(Workload):
    """Cross-entropy of the next character, by a GPT.

    Args:
        text: First the part to train on, then that for validation.
        device: Where the text and the networks are.
        batch: Windows of a step.
        measured: The most windows that a loss is measured on.
        split: With "validation", the end of the training text stands in place of the text for validation.
        shape: Of the network: `layers`, `width`, `heads`, `context` and what else it takes.
    """

    quantity = "test_loss"
    metrics = MappingProxyType({"test_accuracy": "Test accuracy"})
    last = "head"

    def __init__(self, text: str, device: str, *, batch: int, measured: int, split: str = "test", **shape: Any) -> None:
        self.alphabet = "".join(sorted(set(text)))
        text = text[: int(TRAINED * len(text))] if split == "validation" else text
        number = {character: place for place, character in enumerate(self.alphabet)}
        encoded = torch.tensor([number[character] for character in text])
        parts = encoded.split([int(TRAINED * len(text)), len(text) - int(TRAINED * len(text))])
        self._train, self._test = (part.to(device) for part in parts)
        self.batch, self.context, self._shape, self._device = batch, shape["context"], shape, device
        self._windows = (len(self._train) - self.context) // self.context
        self.steps = self._windows // batch
        # The same for every seed and method.
        chosen = torch.randperm(self._windows, generator=noise.generator("windows"))[:measured]
        self._measured = chosen.to(device) * self.context
        windows = (len(self._test) - 1) // self.context
        self._tested = torch.arange(min(windows, measured), device=device) * self.context

    def model(self, seed: int) -> nn.Module:
        """The transformer."""
        return seeded(lambda: GPT(len(self.alphabet), **self._shape), seed).to(self._device)

    def batches(self, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Windows side by side from a new first character on, in a new order; the rest that fills no batch is left out."""
        random = noise.generator("order", seed, epoch)
        first = int(torch.randint(self.context, (), generator=random))
        order = torch.randperm(self._windows, generator=random)[: self.steps * self.batch].to(self._device)
        for starts in (first + order * self.context).view(self.steps, self.batch):
            yield self._cut(self._train, starts)

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Mean over all characters of the batch."""
        text, following = batch
        return F.cross_entropy(model(text).flatten(0, 1), following.flatten())

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """On some windows of the training text, always the same, and on the text for validation from its beginning on."""
        model.eval()
        train, _ = self._measure(model, self._train, self._measured)
        test, accuracy = self._measure(model, self._test, self._tested)
        model.train()
        return {"train_loss": train, "test_loss": test, "test_accuracy": accuracy}

    def hidden(self, model: nn.Module) -> list[Tensor]:
        """The matrices of the blocks."""
        return [
            layer.weight for name, layer in model.named_modules() if name.startswith("blocks") and isinstance(layer, nn.Linear)
        ]

    def _measure(self, model: nn.Module, text: Tensor, starts: Tensor) -> tuple[float, float]:
        total = torch.zeros(2, dtype=torch.float64, device=self._device)
        for some in starts.split(AT_ONCE):
            before, following = self._cut(text, some)
            logits, labels = model(before).flatten(0, 1), following.flatten()
            right = (logits.argmax(1) == labels).sum()
            total += torch.stack([F.cross_entropy(logits, labels, reduction="sum"), right])
        loss, accuracy = (total / (len(starts) * self.context)).tolist()
        return loss, accuracy

    def _cut(self, text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        windows = text[starts[:, None] + torch.arange(self.context + 1, device=self._device)]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


class Recurrent(Characters):
    """The same by LSTMs."""

    def model(self, seed: int) -> nn.Module:
        """The LSTMs, with torch's own initial weights."""
        shape = {name: size for name, size in self._shape.items() if name != "context"}
        return seeded(lambda: CharacterLSTM(len(self.alphabet), **shape), seed).to(self._device)

    def hidden(self, model: nn.Module) -> list[Tensor]:
        """The matrices of the LSTMs."""
        return [parameter for name, parameter in model.named_parameters() if name.startswith("lstm.weight")]


def _made(kind: type[Characters], title: str, small: bool, device: str, shape: Mapping[str, Any], **options: Any) -> Workload:
    """On all of the text, or on its beginning."""
    made = kind(shakespeare.load()[: EXCERPT if small else None], device, **shape, **options)
    made.data, made.checksum = "Shakespeare, first 100,000 characters" if small else "Shakespeare", shakespeare.FILE.md5
    made.title = f"{title}, Shakespeare"
    return made


@registered("char-gpt")
def char_gpt(small: bool, device: str, folder: Path | None) -> Workload:
    """4 layers × 256, or 2 × 64."""
    if small:
        few = {"layers": 2, "width": 64, "heads": 4, "context": 32, "batch": 8}
        return _made(Characters, "Character GPT 2 × 64", small, device, few, measured=FEW_MEASURED)
    shape = {"layers": 4, "width": 256, "heads": 4, "context": 128, "batch": 32}
    return _made(Characters, "Character GPT 4 × 256", small, device, shape, measured=MOST_MEASURED)


@registered("nano-gpt", "batch", "context", "depth", "width", "tested", "split")
def nano_gpt(small: bool, device: str, folder: Path | None, *, tested: int = 0, depth: int = 0, **variant: Any) -> Workload:
    """NanoGPT's network for characters: 6 layers × 384, dropout 0.2, weights of the last layer those of the embedding."""
    shape: dict[str, Any] = {"layers": 6, "width": 384, "heads": 6, "context": 256, "batch": 64}
    shape = ({"layers": 2, "width": 48, "heads": 6, "context": 32, "batch": 8} if small else shape) | variant
    shape |= {"layers": depth} if depth else {}
    title = f"Character GPT {shape['layers']} × {shape['width']} of nanoGPT"
    return _made(Characters, title, small, device, shape, measured=tested or MOST_MEASURED, dropout=0.2, tied=True)


@registered("char-lstm", "batch", "context", "width", "tested", "split")
def char_lstm(small: bool, device: str, folder: Path | None, *, tested: int = 0, **variant: Any) -> Workload:
    """Two LSTMs of 128 units, or of 16."""
    shape: dict[str, Any] = {"embedded": 64, "width": 128, "layers": 2, "context": 50, "batch": 50}
    shape = ({"embedded": 8, "width": 16, "layers": 2, "context": 20, "batch": 8} if small else shape) | variant
    title = f"LSTM 2 × {shape['width']} of torch-rnn"
    return _made(Recurrent, title, small, device, shape, measured=tested or MOST_MEASURED)
