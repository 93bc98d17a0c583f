"""What happened in one layer in its last backward pass, what conditioning cost it, and on request what it did."""

import functools
import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["Statistics"]


class _Cost(NamedTuple):
    """Of one use: rows of the conditioner, which of its sides is inverted, multiply-adds, bytes, numbers in the weight."""

    rows: int
    side: Literal["rows", "features", "counts"]
    own: int
    extra: int
    bytes: int
    weight: int = 0


@functools.lru_cache(maxsize=4096)
def _cost(total: int, rows: int, features: int, outputs: int, groups: int, own_rows: bool) -> _Cost:
    small, large = min(rows, features), max(rows, features)
    # Gram matrix, Cholesky factor and inverse of the smaller side
    extra = small**2 * large + small**3 // 2
    if rows >= features:
        extra += outputs * features**2
    elif own_rows:
        extra += rows**2 * min(features, outputs)
    else:
        extra += 2 * rows * features * outputs + rows**2 * outputs
    side: Literal["rows", "features"] = "rows" if rows < features else "features"
    weight = groups * features * outputs
    return _Cost(rows, side, 3 * total * weight, groups * extra, 4 * groups * small**2, weight)


class _Inspected(NamedTuple):
    """What one matrix, or one for each group, has shown in a backward pass or step."""

    occasion: int
    ranks: list[float]
    damping: float
    largest: float
    #: ⟨∇, ζ⟩, ⟨∇, ∇⟩, ⟨ζ, ζ⟩
    products: list[float]


@dataclass
class Statistics:
    """Counts of one conditioned layer.

    Attributes:
        fallbacks: How often, since attaching, a factorization failed and the layer was conditioned with a larger damping or,
            where that failed too, kept its plain gradient.
        backward_pass: The last backward pass, which the rest is about. A layer used several times in it adds up its costs.
        effective_rank: Σ s/(s+λ) over the eigenvalues s of aᵀa/b: how many directions of the inputs are damped. This and what
            follows is recorded within `Handle.inspecting` only and is None before. A layer with several matrices
            (groups, projections of attention, several uses) has the mean of theirs here.
        largest_curvature: The largest of these eigenvalues, of all matrices.
        damping: λ, as used: of a schedule or a relative damping, what it came to.
        angle: Between the conditioned gradient and the plain one, in degrees; None where there is no gradient.
        elsewhere: Whether, in the first backward pass, a part of the weight's gradient came from outside of the layer: from a
            penalty on the weight, or from `h @ layer.weight.T`.
    """

    fallbacks: int = 0
    backward_pass: int = 0
    effective_rank: float | None = None
    largest_curvature: float | None = None
    damping: float | None = None
    angle: float | None = None
    elsewhere: bool = False
    #: How often each was seen, the last one last; so it stays short even where `backward_passes` is held at one number.
    _uses: dict[_Cost, int] = field(default_factory=dict, repr=False)
    #: The sizes of the only use of the last pass, if there was one only.
    _once: tuple[Any, ...] | None = field(default=None, repr=False)
    _inspected: list[_Inspected] = field(default_factory=list, repr=False)
    _on_device: Tensor | None = field(default=None, repr=False)

    @property
    def rows(self) -> int:
        """Rows that fed the conditioner in the last backward pass; 0 before the first."""
        return next(reversed(self._uses)).rows if self._uses else 0

    @property
    def side(self) -> Literal["", "rows", "features", "counts"]:
        """Which side was inverted then: "rows" (rows × rows), "features" (features × features), or "counts": diagonal."""
        return next(reversed(self._uses)).side if self._uses else ""

    @property
    def extra_multiplications(self) -> int:
        """What conditioning added in the last pass; of a conditioner shared by several layers each counts all."""
        return sum(use.extra * times for use, times in self._uses.items())

    @property
    def own_multiplications(self) -> int:
        """What the layer itself multiplied: forward, input gradient and weight gradient."""
        return sum(use.own * times for use, times in self._uses.items())

    @property
    def extra_bytes(self) -> int:
        """The inverse, in float32."""
        return sum(use.bytes * times for use, times in self._uses.items())

    @property
    def weight_size(self) -> int:
        """Numbers in the gradient that was multiplied last; 0 before the first backward pass and for embeddings."""
        return next(reversed(self._uses)).weight if self._uses else 0

    def count_on_device(self, failures: Tensor) -> None:
        """Add up failures where they are known, in memory that a replayed graph adds to as well."""
        if self._on_device is None:
            self._on_device = torch.zeros_like(failures)
        self._on_device.add_(failures)

    def settle(self) -> int:
        """Count what the device has counted; waits for it. Returns the number of new failures."""
        failures = 0 if self._on_device is None else int(self._on_device.item())
        if self._on_device is not None and failures:
            self._on_device.zero_()
            self.fallbacks += failures
        return failures

    def note_sizes(self, backward_pass: int, total: int, shape: tuple[int, ...], outputs: int, own_rows: bool = True) -> None:
        """Record a use: `total` rows were multiplied, those of this shape (or means of them) fed the conditioner."""
        sizes = (total, shape, outputs, own_rows)
        if sizes == self._once and backward_pass != self.backward_pass:
            # As in the pass before, which is what nearly all layers do nearly always.
            self.backward_pass = backward_pass
        else:
            groups = shape[0] if len(shape) > 2 else 1
            self._note(backward_pass, _cost(total, shape[-2], shape[-1], outputs, groups, own_rows))
            self._once = sizes if sum(self._uses.values()) == 1 else None

    def note_counts(self, backward_pass: int, tokens: int, width: int) -> None:
        """Record a use of an embedding: one division for each number that came out, and no matrix."""
        self._note(backward_pass, _Cost(tokens, "counts", 2 * tokens * width, tokens * width, 0))

    def _note(self, backward_pass: int, cost: _Cost) -> None:
        if backward_pass != self.backward_pass:
            self.backward_pass, self._uses = backward_pass, {}
        self._uses[cost] = self._uses.pop(cost, 0) + 1

    def inspect(
        self, occasion: int, values: Float[Tensor, "*groups small"], damping: float, plain: Tensor, conditioned: Tensor
    ) -> None:
        """Record what conditioning did to one matrix, or to one for each group, in this backward pass or step."""
        groups = values.reshape(-1, values.shape[-1])
        ranks = (groups / (groups + damping)).sum(-1).tolist()
        before, after = plain.detach().double().reshape(-1), conditioned.detach().double().reshape(-1)
        products = [torch.dot(x, y).item() for x, y in ((before, after), (before, before), (after, after))]
        seen = [each for each in self._inspected if each.occasion == occasion]
        seen.append(_Inspected(occasion, ranks, damping, groups.max().item() if groups.numel() else 0.0, products))
        self._inspected = seen
        count = max(sum(len(each.ranks) for each in seen), 1)
        self.effective_rank = math.fsum(rank for each in seen for rank in each.ranks) / count
        self.damping = math.fsum(each.damping for each in seen for _ in each.ranks) / count
        self.largest_curvature = max(each.largest for each in seen)
        together, *lengths = map(sum, zip(*(each.products for each in seen), strict=True))
        size = math.sqrt(lengths[0]) * math.sqrt(lengths[1])
        self.angle = math.degrees(math.acos(max(-1.0, min(1.0, together / size)))) if size > 0 else None

    def forget(self) -> None:
        """Before a new inspection: what an earlier one recorded."""
        self.effective_rank = self.largest_curvature = self.damping = self.angle = None
        self._inspected = []
