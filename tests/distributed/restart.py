"""What test_restart.py runs on two processes: training that saves every step, in which one of them may be killed.

Run by torchrun with a folder and, to be killed, a step; writes the final weights to `weights.pt` in the folder. After a kill
torchrun starts all processes again, and they go on from the last checkpoint.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import isaac_newton as isaac

STEPS = 8


def main(folder: Path, kill_at: int | None) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(attempt)  # the weights of a second attempt are not those of the first: they must come from the file
    model = DistributedDataParallel(nn.Sequential(nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    handle = isaac.attach(model.module, damping=isaac.Relative(0.3), when="step", decay=0.9, refresh=3, power=0.5)
    handle.bind(optimizer)

    first, checkpoint = 0, folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        handle.load_state_dict(saved["isaac"])
        first = saved["step"]
    if rank == 0:
        with (folder / "attempts.txt").open("a") as file:
            file.write(f"{attempt} {first}\n")

    for step in range(first, STEPS):
        if (attempt, rank, step) == (0, 1, kill_at):
            os.kill(os.getpid(), signal.SIGKILL)
        random = torch.Generator().manual_seed(10 * step + rank)
        x, y = torch.randn(6, 9, generator=random), torch.randint(3, (6,), generator=random)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "isaac": handle.state_dict()}
            torch.save({**state, "step": step + 1}, folder / "checkpoint.part")
            # A checkpoint is there as a whole or not at all.
            (folder / "checkpoint.part").replace(checkpoint)

    handle.detach()
    if rank == 0:
        torch.save(model.module.state_dict(), folder / "weights.pt")
    # Whoever leaves first may take the store away from the others while they still say goodbye.
    dist.barrier()
    # A thread of gloo's that asks for the GIL while the interpreter shuts down is unwound out of C++ that may not throw: abort.
    # All is written and all ranks know it, so there is nothing left to shut down.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
