"""Newton-Muon: Muon orthogonalizes what ISAAC has conditioned by a running average of the layers' inputs; the GPT of gpt.py."""

import os
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import isaac_newton as isaac

STEPS = int(os.environ.get("ISAAC_EXAMPLE_STEPS", "100"))
LENGTH, WIDTH, HEADS, LAYERS, BATCH, SEEDS = 32, 48, 4, 2, 12, 2
text = (Path(__file__).parent.parent / "LICENSE").read_text(encoding="utf-8")
alphabet = sorted(set(text))
data = torch.tensor([alphabet.index(character) for character in text])


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(len(alphabet), WIDTH), nn.Embedding(LENGTH, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, LAYERS, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, len(alphabet))

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        hidden = self.characters(tokens) + self.positions(torch.arange(LENGTH))
        logits: Tensor = self.head(self.blocks(hidden, mask=mask, is_causal=True))
        return logits


def train(isaac_too: bool, rate: float, seed: int) -> float:
    torch.manual_seed(seed)  # the same initial weights and batches with and without
    model = GPT()
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    rest = [p for name, p in model.named_parameters() if p.dim() != 2 or not name.startswith("blocks")]
    optimizers = [torch.optim.Muon(matrices, lr=rate, weight_decay=0.0), torch.optim.AdamW(rest, lr=3e-3)]
    if isaac_too:
        damping = isaac.Relative(1.0)
        handle = isaac.attach(model, damping=damping, layers="blocks.*", when="step", decay=0.9, refresh=5, power=0.5)
        handle.bind(optimizers[0]).bind(optimizers[1])
    losses = []
    for _ in range(STEPS):
        tokens = data[torch.randint(len(data) - LENGTH, (BATCH, 1)) + torch.arange(LENGTH + 1)]
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return fmean(losses[-20:])


print(f"training loss of the last 20 of {STEPS} steps, mean of {SEEDS} seeds, best of the same learning rates for Muon")
for name, isaac_too in {"Muon": False, "Muon + ISAAC": True}.items():
    loss, rate = min((fmean(train(isaac_too, rate, seed) for seed in range(SEEDS)), rate) for rate in (0.03, 0.04, 0.06))
    print(f"{name:12}  {loss:.4f}  (learning rate {rate})")
