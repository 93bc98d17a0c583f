"""A stock `LightningModule` and `Trainer`, plus two lines: an auto-encoder of handwritten digits."""

import os
import warnings
from itertools import pairwise

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from isaac_newton.integrations.lightning import IsaacCallback  # line 1

STEPS = int(os.environ.get("ISAAC_EXAMPLE_STEPS", "600"))
warnings.filterwarnings("ignore", module="lightning")  # it would like more workers, and torch would like newer code of it


class AutoEncoder(pl.LightningModule):
    """64 pixels through a bottleneck of 6 numbers."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [64, 48, 24, 6, 24, 48, 64]
        layers = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.Tanh())]
        self.net = nn.Sequential(*layers[:-1])

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        (x,) = batch
        loss = F.mse_loss(self.net(x), x)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


pl.seed_everything(0, verbose=False)
images, _ = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16)
model = AutoEncoder()
trainer = pl.Trainer(
    max_steps=STEPS,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[IsaacCallback(damping=0.1)],  # line 2
)
trainer.fit(model, DataLoader(data, batch_size=60, shuffle=True))
for name, value in trainer.callback_metrics.items():
    print(f"{name:28} {value.item():.4g}")
