"""A character-level GPT on the text of the licence: AdamW on the plain gradient against AdamW on ζ*, from the same start."""

import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import isaac_newton as isaac

STEPS = int(os.environ.get("ISAAC_EXAMPLE_STEPS", "300"))
LENGTH, WIDTH, HEADS, LAYERS, BATCH = 48, 64, 4, 2, 16

text = (Path(__file__).parent.parent / "LICENSE").read_text(encoding="utf-8")
alphabet = sorted(set(text))
data = torch.tensor([alphabet.index(character) for character in text])


class GPT(nn.Module):
    """Predicts each next character from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(len(alphabet), WIDTH), nn.Embedding(LENGTH, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, LAYERS, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, len(alphabet))

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        hidden = self.characters(tokens) + self.positions(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        logits: Tensor = self.head(self.blocks(hidden, mask=mask, is_causal=True))
        return logits


def train(damping: isaac.Relative | None, rate: float) -> tuple[float, isaac.Handle | None]:
    torch.manual_seed(0)  # the same initial weights and batches for each
    model = GPT()
    handle = None if damping is None else isaac.attach(model, damping=damping)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    losses = []
    for _ in range(STEPS):
        places = torch.randint(len(data) - LENGTH, (BATCH, 1)) + torch.arange(LENGTH + 1)
        tokens = data[places]
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-20:]) / len(losses[-20:]), handle


print(f"training loss of the last 20 of {STEPS} steps of AdamW, each with the best of the same learning rates")
for name, damping in {"plain gradient": None, "ζ* in all layers": isaac.Relative(0.1)}.items():
    runs = [(*train(damping, rate), rate) for rate in (1e-3, 3e-3, 1e-2, 3e-2)]
    loss, handle, rate = min(runs, key=lambda run: run[0])
    print(f"{name:16}  {loss:.4f}  (learning rate {rate})")
print(handle)
