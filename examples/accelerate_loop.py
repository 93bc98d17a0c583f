"""A training loop with Accelerate, plus two lines: saved after half of the steps, resumed, and the same in the end."""

import os
import tempfile

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import isaac_newton as isaac

STEPS = int(os.environ.get("ISAAC_EXAMPLE_STEPS", "200"))
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def train(folder: str, *, resume: bool) -> tuple[nn.Module, float]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(int(resume))  # when resumed, everything comes from the checkpoint
    net = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=3e-3))
    # Two lines: conditioned at the step, so by the inputs of both micro-batches; and saved with everything else.
    handle = isaac.attach(net, damping=0.1, when="step", decay=0.9).bind(optimizer)
    accelerator.register_for_checkpointing(handle)
    if resume:
        accelerator.load_state(folder)
    loss = torch.zeros(())
    for step in range(STEPS // 2 if resume else 0, STEPS):
        if step == STEPS // 2 and not resume:
            accelerator.save_state(folder)
        batches = torch.randint(len(x), (2, 30), generator=torch.Generator().manual_seed(step))
        for batch in batches:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x[batch]), y[batch])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    handle.detach()
    return net, loss.item()


with tempfile.TemporaryDirectory() as folder:
    first, loss = train(folder, resume=False)
    second, _ = train(folder, resume=True)
same = all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
print(f"loss after {STEPS} steps {loss:.4f}; the resumed run ends with the same weights: {same}")
