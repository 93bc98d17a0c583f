"""A layer of your own: an adapter of a few lines tells the library where its weights meet their inputs."""

import os

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import isaac_newton as isaac
from isaac_newton import Site

STEPS = int(os.environ.get("ISAAC_EXAMPLE_STEPS", "200"))
DAMPING = 0.1


class LowRank(nn.Module):
    """A linear layer whose weight is the product of two thin matrices."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.up = nn.Parameter(torch.randn(outputs, rank) / rank**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(F.linear(input, self.down), self.up, self.bias)


@isaac.register(LowRank)
def _low_rank(layer: LowRank, site: Site, input: Tensor) -> Tensor:
    # What `forward` does, but each weight goes through `condition` together with the input that it multiplies.
    down, _ = isaac.condition(layer.down, None, input, site)
    hidden = F.linear(input, down)
    up, bias = isaac.condition(layer.up, layer.bias, hidden, site)
    return F.linear(hidden, up, bias)


torch.manual_seed(0)
model = nn.Sequential(LowRank(20, 30, rank=8), nn.Tanh(), LowRank(30, 3, rank=2))
handle = isaac.attach(model, damping=DAMPING)

# The gradients are ζ* of each matrix: the equation, written out, gives the same numbers.
layer, x, g = LowRank(6, 4, rank=2), torch.randn(10, 6), torch.randn(10, 4)
isaac.attach(layer, damping=DAMPING)
layer(x).backward(g)
torch.testing.assert_close(layer.up.grad, isaac.equations.zeta_star(g, x @ layer.down.detach().T, DAMPING))
torch.testing.assert_close(layer.down.grad, isaac.equations.zeta_star(g @ layer.up.detach(), x, DAMPING))

x = torch.randn(64, 20)
y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin(), x[:, 3]], dim=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
for step in range(STEPS):
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0 or step == STEPS - 1:
        print(f"step {step:3}  training loss {loss.item():.4f}")
print(handle)
