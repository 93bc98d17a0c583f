"""A recurrent language model: two LSTMs that predict the next character of Shakespeare's plays, as torch-rnn has them."""

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from isaac_lab.data import shakespeare
from isaac_lab.workload import Workload, registered, seeded
from isaac_lab.workloads.gpt import EXCERPT, MOST_MEASURED, Characters

__all__ = ["CharacterLSTM", "Recurrent"]


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


class Recurrent(Characters):
    """The windows of the GPT with another network."""

    def model(self, seed: int) -> nn.Module:
        """The LSTMs, with torch's own initial weights."""
        shape = {name: size for name, size in self._shape.items() if name != "context"}
        return seeded(lambda: CharacterLSTM(len(self.alphabet), **shape), seed).to(self._device)

    def hidden(self, model: nn.Module) -> list[Tensor]:
        """The matrices of the LSTMs."""
        return [parameter for name, parameter in model.named_parameters() if name.startswith("lstm.weight")]


@registered("char-lstm", "batch", "context", "width", "tested", "split")
def char_lstm(small: bool, device: str, folder: Path | None, *, tested: int = 0, **variant: Any) -> Workload:
    """Two LSTMs of 128 units, or of 16."""
    shape: dict[str, Any] = {"embedded": 64, "width": 128, "layers": 2, "context": 50, "batch": 50}
    shape = ({"embedded": 8, "width": 16, "layers": 2, "context": 20, "batch": 8} if small else shape) | variant
    text = shakespeare.load()[: EXCERPT if small else None]
    made = Recurrent(text, device, measured=tested or MOST_MEASURED, **shape)
    made.data, made.checksum = "Shakespeare, first 100,000 characters" if small else "Shakespeare", shakespeare.FILE.md5
    made.title = f"LSTM 2 × {shape['width']} of torch-rnn, Shakespeare"
    return made
