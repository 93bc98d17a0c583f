"""Randomness that does not depend on how a run is executed: the order of the data, and the labels that ζ draws.

Every stream of numbers is a function of the seed, the epoch and what it is for. The labels are computed from numbers that are
drawn outside of the training step and given to it, without a dimension of copies: so a network sees the same labels alone, in
an ensemble, and after a run was resumed.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor


def generator(*names: object, device: str = "cpu") -> torch.Generator:
    """A generator whose numbers these names decide."""
    digest = hashlib.sha256(" ".join(map(str, names)).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@dataclass(frozen=True)
class _Given:
    """The likelihood of a mean loss, with labels that given numbers decide: shared by all copies, or for each of them."""

    numbers: Tensor
    reduction: Literal["mean"] = "mean"

    def terms(self, output: Tensor) -> int:
        """Examples."""
        return output.shape[0]

    def root(self, output: Tensor) -> Iterator[Tensor]:
        """Not needed: the laboratory draws."""
        raise NotImplementedError("these numbers are for a sampled output curvature, not an exact one")


class GivenUniform(_Given):
    """Of a mean cross-entropy: labels are drawn by inverting their distribution at uniform numbers (*copies batch)."""

    @staticmethod
    def draw(batch: int, outputs: int, random: torch.Generator) -> Float[Tensor, " batch"]:
        """Numbers for one step."""
        return torch.rand(batch, generator=random, device=random.device)

    def sample(self, output: Float[Tensor, "rows classes"]) -> Float[Tensor, "rows classes"]:
        """The softmax minus one at the label drawn; rows are those of one batch, or of a batch for each copy."""
        p = output.softmax(1)
        numbers = self.numbers.expand(output.shape[0] // self.numbers.shape[-1], -1).reshape(-1, 1)
        # Rounding can leave the last sum below 1.
        label = (p.cumsum(1) <= numbers).sum(1, keepdim=True).clamp_max(output.shape[1] - 1)
        return p.scatter_add(1, label, torch.full_like(numbers, -1.0))


class GivenNormal(_Given):
    """Of a mean squared error, by standard normal numbers (*copies batch outputs)."""

    @staticmethod
    def draw(batch: int, outputs: int, random: torch.Generator) -> Float[Tensor, "batch outputs"]:
        """Numbers for one step."""
        return torch.randn(batch, outputs, generator=random, device=random.device)

    def sample(self, output: Float[Tensor, "rows outputs"]) -> Float[Tensor, "rows outputs"]:
        """The numbers, scaled to the root of the Hessian, 2 / outputs · I."""
        batch, outputs = self.numbers.shape[-2:]
        numbers = self.numbers.expand(output.shape[0] // batch, -1, -1).reshape(-1, outputs)
        return numbers * math.sqrt(2 / outputs)
