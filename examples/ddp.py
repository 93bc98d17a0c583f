"""Data-parallel training, conditioned by the inputs of all ranks: torchrun --nproc-per-node 2 examples/ddp.py (or python)."""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import isaac_newton as isaac

STEPS = int(os.environ.get("ISAAC_EXAMPLE_STEPS", "200"))
BATCH = 60  # of all ranks together

distributed = "WORLD_SIZE" in os.environ  # torchrun sets it
if distributed:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, ranks = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if distributed and torch.cuda.is_available() else "cpu"

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32, device=device) / 16, torch.tensor(labels, device=device)

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10)).to(device)
model = DistributedDataParallel(net) if distributed else net
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
# At the step the ranks add up what each has gathered, so the result is that of one process with the whole batch. With
# when="backward" each rank would condition by its own part, or, with process_group=dist.group.WORLD, by all of them.
handle = isaac.attach(net, damping=0.3, when="step").bind(optimizer)

for step in range(STEPS):
    batch = torch.randint(len(x), (BATCH,), generator=torch.Generator().manual_seed(step))[rank::ranks]
    loss = F.cross_entropy(model(x[batch]), y[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

handle.detach()
if rank == 0:
    with torch.no_grad():
        print(f"{ranks} process(es): training loss {F.cross_entropy(net(x), y).item():.6f} after {STEPS} steps")
if distributed:
    del model  # DDP must not be the last to hold the group: freeing that can wait forever
    dist.destroy_process_group()
