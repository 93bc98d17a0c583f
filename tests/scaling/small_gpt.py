"""A GPT of any shape, small enough to be counted, and a training step of it, plain or conditioned."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import isaac_newton as isaac
from isaac_lab.scaling.sizes import Setting, Shape, Workload

__all__ = ["Gpt", "Trainer", "attached"]

#: Large enough that no inverse needs float64 on a CPU, where that is decided by a look at the trace.
DAMPING = 1e4


class Gpt(nn.Module):
    """A GPT of a given shape, made of linear layers, an embedding, and nothing else that has weights."""

    def __init__(self, shape: Shape, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape, heads) for _ in range(shape.depth))
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(_norm(x))
        return logits


class Block(nn.Module):
    """Attention and a feed-forward part."""

    def __init__(self, shape: Shape, heads: int) -> None:
        super().__init__()
        self.shape, self.heads = shape, heads
        for layer in shape.layers:
            if layer.name != "head":
                self.add_module(layer.name, nn.Linear(layer.inputs, layer.outputs, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """One block."""
        narrow, y = self.shape.narrow or self.shape.width, _norm(x)
        if self.shape.gated:
            q, k, v = (self.get_submodule(name)(y) for name in ("q", "k", "v"))
        else:
            q, k, v = self.get_submodule("qkv")(y).split([self.shape.width, narrow, narrow], dim=-1)
        size = self.shape.width // self.heads
        q, k, v = (part.unflatten(-1, (-1, size)).transpose(1, 2) for part in (q, k, v))
        k, v = (part.repeat_interleave(self.heads // part.shape[1], dim=1) for part in (k, v))
        with sdpa_kernel(SDPBackend.MATH):
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.get_submodule("out")(mixed.transpose(1, 2).flatten(-2))
        y = _norm(x)
        up = self.get_submodule("up")(y)
        hidden = F.silu(self.get_submodule("gate")(y)) * up if self.shape.gated else F.gelu(up)
        result: Tensor = x + self.get_submodule("down")(hidden)
        return result


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def attached(model: nn.Module, setting: Setting, **options: Any) -> isaac.Handle:
    """`attach` as a setting says."""
    names = [f"blocks.*.{name}" if name != "head" else "head" for name in setting.exclude]
    return isaac.attach(
        model,
        DAMPING,
        sharing=setting.sharing,
        max_rows=setting.max_rows,
        when=setting.when,
        decay=setting.decay,
        refresh=setting.refresh,
        power=setting.power,
        exclude=names,
        **options,
    )


class Trainer:
    """A model with an optimizer, plain or conditioned, and a batch."""

    def __init__(self, shape: Shape, work: Workload, setting: Setting | None, dtype: torch.dtype = torch.float32) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model: nn.Module = Gpt(shape).to(dtype)
            samples = work.tokens // work.length
            self.tokens = torch.randint(shape.vocabulary, (samples, work.length + 1))
        self.passes = work.micro_batches
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)
        self.setting = setting
        self.handle: isaac.Handle | None = None
        if setting is not None:
            self.attach()

    def attach(self, **options: Any) -> None:
        """Condition, as the setting says."""
        assert self.setting is not None
        self.handle = attached(self.model, self.setting, **options)
        if self.setting.when == "step":
            self.handle.bind(self.optimizer)

    def loss(self) -> Tensor:
        """Of one micro-batch."""
        logits = self.model(self.tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())

    def backward(self) -> None:
        """All micro-batches."""
        self.optimizer.zero_grad()
        for _ in range(self.passes):
            self.loss().backward()

    def step(self) -> None:
        """A whole step."""
        self.backward()
        self.optimizer.step()

    @property
    def cycle(self) -> int:
        """Steps after which everything repeats."""
        return 1 if self.setting is None else self.setting.refresh
