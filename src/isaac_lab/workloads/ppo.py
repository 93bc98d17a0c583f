"""Proximal policy optimization of a pole on a cart, with the settings of CleanRL; cart and pole are a few lines of torch.

An epoch is one round: the policy plays in several carts at once, then learns from what happened in a few passes. Where carts
stand and what happened are buffers of the model, so that a checkpoint has them. Every random number comes with a batch.
"""

import math
from collections.abc import Iterator
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isaac_lab import noise
from isaac_lab.workload import Form, Workload, registered

#: Of Barto, Sutton and Anderson (1983), as in the gym: gravity, mass of the pole and of all, half its length, force, seconds.
GRAVITY, POLE, WHOLE, HALF, FORCE, TAU = 9.8, 0.1, 1.1, 0.5, 10.0, 0.02
#: A round ends when the cart or the pole is out of these bounds, or after so many steps.
FAR, TILTED, LONGEST = 2.4, 12 * math.pi / 180, 500
#: Numbers of a state; a cart begins within this distance of zero in each of them.
STATE, START = 4, 0.05
DISCOUNT, TRACE, CLIPPED, ENTROPY, VALUE = 0.99, 0.95, 0.2, 0.01, 0.5
PASSES, PARTS = 4, 4
#: Rounds that are played to measure.
MEASURED = 64


def pushed(state: Tensor, right: Tensor) -> Tensor:
    """The states (carts, 4) after a push: place, speed, angle, angular speed."""
    place, speed, angle, turning = state.unbind(1)
    force = torch.where(right, FORCE, -FORCE)
    cosine, sine = angle.cos(), angle.sin()
    swing = (force + POLE * HALF * turning.square() * sine) / WHOLE
    turned = (GRAVITY * sine - cosine * swing) / (HALF * (4 / 3 - POLE * cosine.square() / WHOLE))
    moved = swing - POLE * HALF * turned * cosine / WHOLE
    return torch.stack([place + TAU * speed, speed + TAU * moved, angle + TAU * turning, turning + TAU * turned], 1)


def fallen(state: Tensor) -> Tensor:
    """Which carts or poles are out of bounds."""
    return (state[:, 0].abs() > FAR) | (state[:, 2].abs() > TILTED)


def _network(outputs: int, last: float) -> nn.Sequential:
    layers = [nn.Linear(STATE, 64), nn.Linear(64, 64), nn.Linear(64, outputs)]
    for layer, gain in zip(layers, (math.sqrt(2), math.sqrt(2), last), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class Player(nn.Module):
    """Actor and critic, so many carts, and what happened in the last round of so many steps."""

    def __init__(self, length: int, carts: int) -> None:
        super().__init__()
        self.actor, self.critic = _network(2, 0.01), _network(1, 1.0)
        self.state, self.clock = nn.Buffer((2 * torch.rand(carts, STATE) - 1) * START), nn.Buffer(torch.zeros(carts))
        # Of each step and cart: the logarithm of the chance of what was done, the critic's value, the advantage, what was
        # seen, and whether the push was to the right.
        self.chance, self.value, self.advantage = (nn.Buffer(torch.zeros(length, carts)) for _ in range(3))
        self.seen = nn.Buffer(torch.zeros(length, carts, STATE))
        self.right = nn.Buffer(torch.zeros(length, carts, dtype=torch.bool))

    @torch.no_grad()
    def play(self, numbers: Tensor) -> None:
        """A round; `numbers` (length, carts, 5), between 0 and 1, decide what is done and where new rounds begin."""
        ended = torch.zeros_like(self.chance)
        for step, (drawn, *_) in enumerate(numbers.split(1)):
            chances = F.log_softmax(self.actor(self.state), 1)
            right = drawn[:, 0] < chances[:, 1].exp()
            self.seen[step], self.right[step] = self.state, right
            self.chance[step] = torch.where(right, chances[:, 1], chances[:, 0])
            self.value[step] = self.critic(self.state).squeeze(1)
            state, clock = pushed(self.state, right), self.clock + 1
            over = fallen(state) | (clock >= LONGEST)
            ended[step] = over.float()
            self.state.copy_(torch.where(over[:, None], (2 * drawn[:, 1:] - 1) * START, state))
            self.clock.copy_(torch.where(over, 0.0, clock))
        following, trace = self.critic(self.state).squeeze(1), torch.zeros_like(self.clock)
        for step in range(len(numbers) - 1, -1, -1):
            goes_on = 1 - ended[step]
            trace = 1 + DISCOUNT * goes_on * following - self.value[step] + DISCOUNT * TRACE * goes_on * trace
            self.advantage[step], following = trace, self.value[step]


@registered("cartpole", "length", "carts", "split")
class CartPole(Workload):
    """Each step of a pole that stands is worth 1; reported is the sum of a round, at most 500.

    Learned from are rounds of `length` steps by so many carts: CleanRL's 128 by 4, or 16 by 2. With the split "validation"
    other rounds are played to measure.
    """

    metrics = MappingProxyType({"test_return": "Return of a round"})
    data = "cart and pole, generated"

    def __init__(self, form: Form, *, length: int = 0, carts: int = 0) -> None:
        length, carts = length or (16 if form.small else 128), carts or (2 if form.small else 4)
        self._device, self._length, self._carts, self._split = form.device, length, carts, form.split
        self.build = partial(Player, length, carts)
        self.batch, self.steps = length * carts // PARTS, PASSES * PARTS
        self.title = f"PPO of CleanRL, cart and pole, {carts} × {length}"

    def batches(self, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Numbers of the steps to learn from; the first batch brings the random numbers to play with."""
        random = noise.generator("round", seed, epoch)
        numbers = torch.rand(self._length, self._carts, 1 + STATE, generator=random).to(self._device)
        for _ in range(PASSES):
            for index in torch.randperm(self._length * self._carts, generator=random).to(self._device).split(self.batch):
                yield index, numbers
                numbers = numbers[:0]

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """PPO's clipped loss, of actor and critic together."""
        index, numbers = batch
        assert isinstance(model, Player)
        if len(numbers):
            model.play(numbers)
        seen, right = model.seen.flatten(0, 1)[index], model.right.flatten()[index]
        before, value, advantage = (x.flatten()[index] for x in (model.chance, model.value, model.advantage))
        target = value + advantage
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        chances = F.log_softmax(model.actor(seen), 1)
        ratio = (torch.where(right, chances[:, 1], chances[:, 0]) - before).exp()
        policy = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIPPED, 1 + CLIPPED) * advantage).mean()
        now = model.critic(seen).squeeze(1)
        near = value + (now - value).clamp(-CLIPPED, CLIPPED)
        critic = torch.maximum((now - target).square(), (near - target).square()).mean() / 2
        entropy = -(chances.exp() * chances).sum(1).mean()
        return policy - ENTROPY * entropy + VALUE * critic

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The critic's squared error on the last round, how far the return is from the best, and the return.

        The return is the mean of rounds that are always the same but for what the actor does.
        """
        assert isinstance(model, Player)
        error = (model.critic(model.seen).squeeze(2) - model.value - model.advantage).square().mean().item()
        random = noise.generator("rounds", self._split)
        state = (2 * torch.rand(MEASURED, STATE, generator=random) - 1).to(self._device) * START
        numbers = torch.rand(LONGEST, MEASURED, generator=random).to(self._device)
        total = torch.zeros(MEASURED, device=self._device)
        standing = total == 0
        for drawn in numbers:
            right = drawn < model.actor(state).softmax(1)[:, 1]
            total += standing
            state = pushed(state, right)
            standing &= ~fallen(state)
            if not standing.any():
                break
        played = total.mean().item()
        return {"train_loss": error, "test_loss": LONGEST - played, "test_return": played}
