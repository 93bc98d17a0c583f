"""What test_distributed.py runs on several processes: each check compares a distributed step with one on the whole batch.

Run by torchrun; writes the largest relative error of each check, over all parameters and ranks, to the file named in argv.
"""

import copy
import functools
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import isaac_newton as isaac
from isaac_newton.core.moments import Moment


class Mixed(nn.Module):
    """Every kind of layer that gathers; sizes that 2 and 4 ranks do not divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.gru = nn.GRU(6, 6, batch_first=True)
        self.conv = nn.Conv1d(6, 10, 3, groups=2)
        self.transposed = nn.ConvTranspose1d(10, 5, 2)
        self.hidden = nn.Linear(5, 7)
        self.head = nn.Linear(7, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.gru(x)[0]
        x = self.transposed(F.relu(self.conv(x.mT))).mT
        return self.head(torch.tanh(self.hidden(x)).mean(1))


class Branches(nn.Module):
    """A layer that only even ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        return self.branch(x) if dist.get_rank() % 2 == 0 else x


def model() -> Mixed:
    torch.manual_seed(0)
    return Mixed().double()


def batches(step: int) -> list[tuple[Tensor, Tensor]]:
    """A batch for each rank; their sizes differ."""
    random = torch.Generator().manual_seed(step)
    sizes = [3 + (rank + step) % 3 for rank in range(dist.get_world_size())]
    total = sum(sizes)
    x, y = torch.randint(13, (total, 6), generator=random), torch.randint(3, (total,), generator=random)
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def own_loss(network: nn.Module, step: int, micro: int = 1) -> Iterator[Tensor]:
    """This rank's part of the mean loss over the batches of all ranks; averaged over ranks it is that mean."""
    parts = batches(step)
    x, y = parts[dist.get_rank()]
    total = sum(len(part) for _, part in parts)
    for own_x, own_y in zip(x.chunk(micro), y.chunk(micro), strict=True):
        yield F.cross_entropy(network(own_x), own_y, reduction="sum") * dist.get_world_size() / total


def reference(options: dict[str, object], steps: int, lr: float = 0.3) -> nn.Module:
    """The same training on the whole batch in one process, which knows of no ranks."""
    network = model()
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    handle = isaac.attach(network, **options, **({"process_group": alone} if options.get("when") == "step" else {}))
    optimizer = torch.optim.SGD(network.parameters(), lr)
    if options.get("when") == "step":
        handle.bind(optimizer)
    for step in range(steps):
        x, y = (torch.cat(column) for column in zip(*batches(step), strict=True))
        optimizer.zero_grad()
        F.cross_entropy(network(x), y).backward()
        optimizer.step()
    return network


def error(ours: nn.Module, theirs: nn.Module, before: nn.Module | None = None) -> float:
    """The largest error of a weight, relative to how far the training went."""
    worst, start = 0.0, dict((before or model()).named_parameters())
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        full = a.full_tensor() if isinstance(a, DTensor) else a
        initial = start[name.removeprefix("module.")]
        worst = max(worst, ((full - b).abs().max() / (b - initial).abs().max().clamp_min(1e-12)).item())
    result = torch.tensor(worst)
    dist.all_reduce(result, op=dist.ReduceOp.MAX)
    return result.item()


def train(network: nn.Module, optimizer: torch.optim.Optimizer, steps: range, micro: int = 1) -> None:
    for step in steps:
        optimizer.zero_grad()
        for number, loss in enumerate(own_loss(network, step, micro), start=1):
            last = number == micro
            if hasattr(network, "set_requires_gradient_sync"):
                network.set_requires_gradient_sync(last)
            with nullcontext() if last or not hasattr(network, "no_sync") else network.no_sync():
                loss.backward()
        optimizer.step()


def ddp_backward(**options: object) -> float:
    """process_group in when="backward": the conditioner of the global batch."""
    network = DistributedDataParallel(model())
    isaac.attach(network, process_group=dist.group.WORLD, **options)
    train(network, torch.optim.SGD(network.parameters(), 0.3), range(3))
    return error(network, reference(options, 3))


def ddp_step(micro: int = 1, **options: object) -> float:
    network = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(network.parameters(), 0.3)
    options = {"when": "step", **options}
    isaac.attach(network, **options).bind(optimizer)
    # Micro-batches under no_sync: their graphs are made inside it, too.
    for step in range(3):
        optimizer.zero_grad()
        parts = batches(step)
        x, y = parts[dist.get_rank()]
        total = sum(len(part) for _, part in parts)
        pieces = list(zip(x.chunk(micro), y.chunk(micro), strict=True))
        for number, (own_x, own_y) in enumerate(pieces, start=1):
            with nullcontext() if number == len(pieces) else network.no_sync():
                loss = F.cross_entropy(network(own_x), own_y, reduction="sum") * dist.get_world_size() / total
                loss.backward()
        optimizer.step()
    return error(network, reference(options, 3))


def fsdp_step(micro: int = 1, **options: object) -> float:
    network = model()
    for layer in (network.embedding, network.attention, network.conv, network.hidden):
        fully_shard(layer)
    fully_shard(network)
    options = {"when": "step", **options}
    handle = isaac.attach(network, **options)
    optimizer = torch.optim.SGD(network.parameters(), 0.3)
    handle.bind(optimizer)
    train(network, optimizer, range(3), micro)
    return error(network, reference(options, 3))


class Blocks(nn.Module):
    """A small language model whose layers see more rows than `attach(model)` draws."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.embedding, self.again = nn.Embedding(13, 8), again
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens.repeat(1, 5))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.head(x.mean(1))


def blocks(*, again: bool = False, dtype: torch.dtype = torch.float64) -> Blocks:
    torch.manual_seed(0)
    return Blocks(again=again).to(dtype)


def ddp(network: nn.Module) -> nn.Module:
    return DistributedDataParallel(network)


def fsdp(network: nn.Module, **options: object) -> nn.Module:
    for block in network.blocks:
        fully_shard(block, **options)
    return fully_shard(network, **options)


def automatic(
    wrap: Callable[[nn.Module], nn.Module], *, micro: int = 1, again: bool = False, half: str = "", **options: object
) -> float:
    """`attach(model)`: each rank conditions by draws of its own rows, and the wrapper averages what comes out.

    `half`: "autocast", or "parameters" for FSDP2's mixed precision, which forms gradients in bfloat16 and adds them in float32.
    """
    dtype = torch.float32 if half else torch.float64
    network, alone = wrap(blocks(again=again, dtype=dtype)), blocks(dtype=dtype)
    optimizer, other = (torch.optim.SGD(each.parameters(), 0.3) for each in (network, alone))
    autocast = torch.autocast("cpu", torch.bfloat16) if half == "autocast" else nullcontext()
    low = copy.deepcopy(alone).bfloat16() if half == "parameters" else alone
    isaac.attach(network, **options)
    isaac.attach(low, **options)
    for step in range(2):
        torch.manual_seed(10 * step + dist.get_rank())  # each rank draws its own rows
        with autocast:
            train(network, optimizer, range(step, step + 1), micro)
        with torch.no_grad():
            for part, whole in zip(low.parameters(), alone.parameters(), strict=True):
                part.copy_(whole)
        torch.manual_seed(10 * step + dist.get_rank())
        low.zero_grad()
        with autocast:
            for loss in own_loss(low, step, micro):
                loss.backward()
        for part, whole in zip(low.parameters(), alone.parameters(), strict=True):
            whole.grad = part.grad.to(dtype, copy=True)
            dist.all_reduce(whole.grad)
            whole.grad /= dist.get_world_size()
        other.step()
    return error(network, alone, blocks(dtype=dtype))


class Queries(nn.Module):
    """Layers with one input, of which only even ranks use all."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.embedding = nn.Embedding(13, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k = self.q(x), self.k(x)
        v = self.v(x) if dist.get_rank() % 2 == 0 else x
        return self.head(F.scaled_dot_product_attention(q, k, v).mean(1))


def one_input() -> float:
    """Layers share a second moment where they do so on all ranks; without sharing the same comes out."""
    ended, kept = [], []
    for shared in (True, False):
        torch.manual_seed(0)
        network = DistributedDataParallel(Queries().double(), find_unused_parameters=True)
        handle = isaac.attach(network.module, damping=0.2, when="step", decay=0.7, refresh=3, gather=2, warm_up=1)
        optimizer = torch.optim.SGD(network.parameters(), 0.3)
        handle.bind(optimizer)
        made_of = Moment.made_of
        if not shared:
            Moment.made_of = lambda self: (id(self),)
        train(network, optimizer, range(6))
        Moment.made_of = made_of
        moments = [m for site in handle._sites.values() for g in site.gatherings.values() for m in g.moments.values()]
        kept.append((len(moments), len({m.average.data_ptr() for m in moments})))
        ended.append([parameter.detach().clone() for parameter in network.parameters()])
    assert kept == [(5, 4), (5, 5)], kept  # q and k share, v does not
    return max((a - b).abs().max().item() for a, b in zip(*ended, strict=True))


def curvature() -> float:
    """`handle.curvature` is of the rows of all ranks."""
    network = DistributedDataParallel(model())
    handle = isaac.attach(network.module, damping=0.2, when="step", decay=0.7)
    alone = model()
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    other = isaac.attach(alone, damping=0.2, when="step", decay=0.7, process_group=group)
    for step in range(2):
        network.zero_grad()
        alone.zero_grad()
        for loss in own_loss(network, step):
            loss.backward()
        x, y = (torch.cat(column) for column in zip(*batches(step), strict=True))
        F.cross_entropy(alone(x), y).backward()
        handle.step()
        other.step()
    ours, theirs = handle.curvature, other.curvature
    assert set(ours) == set(theirs)
    return max(((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()).item() for name in theirs)


def spread_out() -> float:
    """Each average is on one rank; the same weights come out as where all ranks have all, and again after a resume."""
    options = {"damping": isaac.Relative(0.3), "when": "step", "decay": 0.7, "power": 0.5, **RARE}

    def start(*, spread: bool) -> tuple[nn.Module, torch.optim.Optimizer, isaac.Handle]:
        network = DistributedDataParallel(model())
        optimizer = torch.optim.SGD(network.parameters(), 0.3)
        return network, optimizer, isaac.attach(network.module, spread=spread, **options).bind(optimizer)

    everywhere, apart, resumed = start(spread=False), start(spread=True), start(spread=True)
    train(*everywhere[:2], range(6))
    train(*apart[:2], range(3))
    resumed[0].load_state_dict(apart[0].state_dict())
    resumed[2].load_state_dict(pickle.loads(pickle.dumps(apart[2].state_dict())))
    for network, optimizer, _ in (apart, resumed):
        train(network, optimizer, range(3, 6))
    kept = torch.tensor([float(len(handle.curvature)) for _, _, handle in (everywhere, apart, resumed)])
    assert kept[1] == kept[2]
    dist.all_reduce(kept)
    assert kept[0] == dist.get_world_size() * kept[1], kept
    with pytest.raises(ValueError, match="with spread=True each rank saves and loads its own"):
        resumed[2].load_state_dict(everywhere[2].state_dict())
    # Of more than two numbers the sum depends on the order, and that of DDP on how many passes it has seen.
    same = all(torch.equal(a, b) for a, b in zip(apart[0].parameters(), resumed[0].parameters(), strict=True))
    assert same or dist.get_world_size() > 2
    return max(error(apart[0], everywhere[0]), error(resumed[0], everywhere[0]))


def tensor_parallel() -> float:
    """Layers that are split over ranks where they compute stay plain; those beside them are conditioned."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def network() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 7), nn.Linear(7, 3)).double()

    def split(whole: nn.Sequential) -> nn.Module:
        return parallelize_module(whole, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})

    ours, theirs = split(network()), network()
    handle = isaac.attach(ours, damping=0.2)
    assert set(handle.conditioned) == {"0", "4"}
    assert all("tensor parallelism has split its weight" in handle.skipped[name] for name in ("1", "3"))
    isaac.attach(theirs, damping=0.2, layers=["0", "4"])
    torch.manual_seed(1)
    x = torch.randn(6, 5, dtype=torch.float64)
    ours(x).square().sum().backward()
    theirs(x).square().sum().backward()
    late = network()
    isaac.attach(late, damping=0.2)
    late = split(late)
    with pytest.raises(RuntimeError, match="attach after parallelize_module"):
        late(x)
    worst = 0.0
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        gradient = a.grad.full_tensor() if isinstance(a.grad, DTensor) else a.grad
        worst = max(worst, ((gradient - b.grad).abs().max() / b.grad.abs().max()).item())
    return worst


def ddp_own_batch() -> float:
    """Without process_group each rank conditions by its own batch, and DDP averages the results."""
    network = DistributedDataParallel(model())
    isaac.attach(network, damping=0.2)
    for loss in own_loss(network, 0):
        loss.backward()
    alone = model()
    isaac.attach(alone, damping=0.2)
    for loss in own_loss(alone, 0):
        loss.backward()
    worst = 0.0
    for a, b in zip(network.parameters(), alone.parameters(), strict=True):
        dist.all_reduce(b.grad)
        mean = b.grad / dist.get_world_size()
        worst = max(worst, ((a.grad - mean).abs().max() / mean.abs().max().clamp_min(1e-12)).item())
    return worst


def unused_on_some_ranks() -> float:
    """Ranks that never saw a layer end with the same weights as those that did."""
    torch.manual_seed(0)
    network = DistributedDataParallel(Branches().double(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(network.parameters(), 0.3)
    isaac.attach(network, damping=0.2, when="step", decay=0.5, refresh=2).bind(optimizer)
    for step in range(5):
        torch.manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        network(torch.randn(4, 5, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    worst = 0.0
    for parameter in network.parameters():
        other = parameter.detach().clone()
        dist.broadcast(other, 0)
        worst = max(worst, (parameter - other).abs().max().item())
    result = torch.tensor(worst)
    dist.all_reduce(result, op=dist.ReduceOp.MAX)
    return result.item()


RARE = {"decay": 0.7, "refresh": 2, "gather": 1, "warm_up": 1}

CHECKS: dict[str, Callable[[], float]] = {
    "DDP, process_group": lambda: ddp_backward(damping=0.2),
    "DDP, process_group, joint bias and relative damping": lambda: ddp_backward(damping=isaac.Relative(0.3), bias="joint"),
    "DDP, process_group, reduce": lambda: ddp_backward(damping=0.2, sharing="reduce"),
    "DDP, own batch": ddp_own_batch,
    "DDP, step": lambda: ddp_step(damping=0.2),
    "DDP, step, accumulation under no_sync": lambda: ddp_step(micro=2, damping=0.2),
    "DDP, step, average, power and refresh": lambda: ddp_step(damping=0.2, decay=0.7, power=0.5, refresh=2),
    "DDP, step, a layer that some ranks do not use": unused_on_some_ranks,
    "DDP, step, gathered in some steps after a warm-up": lambda: ddp_step(damping=0.2, **RARE),
    "DDP, step, layers with one input": one_input,
    "DDP, step, curvature": curvature,
    "DDP, automatic, accumulation under no_sync": lambda: automatic(ddp, micro=2),
    "DDP, automatic, checkpointing": lambda: automatic(ddp, again=True),
    "FSDP2, automatic, accumulation": lambda: automatic(fsdp, micro=2),
    "FSDP2, automatic, checkpointing": lambda: automatic(fsdp, again=True),
    "FSDP2, step, gathered in some steps after a warm-up": lambda: fsdp_step(damping=0.2, **RARE),
    "DDP, step, averages spread over ranks": lambda: ddp_step(damping=0.2, spread=True, **RARE),
    "FSDP2, step, averages spread over ranks": lambda: fsdp_step(damping=0.2, spread=True, micro=2, **RARE),
    "DDP, step, averages spread over ranks and resumed": spread_out,
    "tensor parallelism": tensor_parallel,
    "FSDP2, step": lambda: fsdp_step(damping=0.2),
    "FSDP2, step, accumulation": lambda: fsdp_step(micro=2, damping=0.2),
    "FSDP2, step, joint bias, average and power": lambda: fsdp_step(damping=0.2, bias="joint", decay=0.7, power=0.5),
}


#: The same in half precision, where sums over ranks are rounded in float32.
ROUNDED: dict[str, Callable[[], float]] = {
    "DDP, automatic, autocast": lambda: automatic(ddp, half="autocast"),
    "FSDP2, automatic, parameters in bfloat16": lambda: automatic(
        functools.partial(fsdp, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)), half="parameters"
    ),
}


def main(path: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    errors = {name: check() for name, check in (CHECKS | ROUNDED).items()}
    if dist.get_rank() == 0:
        path.write_text(json.dumps(errors))
    dist.barrier()
    os._exit(0)  # for the reason that restart.py gives


if __name__ == "__main__":
    main(Path(sys.argv[1]))
