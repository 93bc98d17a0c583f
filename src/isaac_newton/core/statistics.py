"""What happened in one layer in its last backward pass, what conditioning cost it, and on request what it did."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["Statistics"]


class _Use(NamedTuple):
    """The sizes of one use of a layer."""

    total: int
    rows: int
    features: int
    outputs: int
    groups: int
    own_rows: bool

    @property
    def side(self) -> Literal["rows", "features"]:
        return "rows" if self.rows < self.features else "features"

    @property
    def own(self) -> int:
        return 3 * self.groups * self.total * self.features * self.outputs

    @property
    def extra(self) -> int:
        small, large = min(self.rows, self.features), max(self.rows, self.features)
        # Gram matrix, Cholesky factor and inverse of the smaller side
        cost = small**2 * large + small**3 // 2
        if self.side == "features":
            cost += self.outputs * self.features**2
        elif self.own_rows:
            cost += self.rows**2 * min(self.features, self.outputs)
        else:
            cost += 2 * self.rows * self.features * self.outputs + self.rows**2 * self.outputs
        return self.groups * cost

    @property
    def size(self) -> int:
        return 4 * self.groups * min(self.rows, self.features) ** 2


class _Lookup(NamedTuple):
    """The same of an embedding."""

    rows: int
    width: int
    side: Literal["counts"] = "counts"
    size: int = 0

    @property
    def own(self) -> int:
        return 2 * self.rows * self.width

    @property
    def extra(self) -> int:
        return self.rows * self.width


@dataclass
class _Inspected:
    """What one backward pass or step has shown so far."""

    occasion: int
    ranks: list[float] = field(default_factory=list)
    dampings: list[float] = field(default_factory=list)
    largest: list[float] = field(default_factory=list)
    #: ⟨∇, ζ⟩, ⟨∇, ∇⟩, ⟨ζ, ζ⟩
    products: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])


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
    #: Sizes, not costs: layers note them in every backward pass, and hardly anybody asks. How often each was seen, the last
    #: one last; so it stays short even where `backward_passes` is held at one number.
    _uses: dict[_Use | _Lookup, int] = field(default_factory=dict, repr=False)
    #: What was noted in the last pass, if that was one use only.
    _once: tuple[Any, ...] | None = field(default=None, repr=False)
    _inspected: "_Inspected | None" = field(default=None, repr=False)
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
        return sum(use.size * times for use, times in self._uses.items())

    @property
    def weight_size(self) -> int:
        """Numbers in the gradient that was multiplied last; 0 before the first backward pass and for embeddings."""
        last = next(reversed(self._uses)) if self._uses else None
        return last.groups * last.features * last.outputs if isinstance(last, _Use) else 0

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
            self._note(backward_pass, _Use(total, shape[-2], shape[-1], outputs, groups, own_rows), sizes)

    def note_counts(self, backward_pass: int, tokens: int, width: int) -> None:
        """Record a use of an embedding: one division for each number that came out, and no matrix."""
        self._note(backward_pass, _Lookup(tokens, width), None)

    def note_pass(self, backward_pass: int) -> None:
        """Record a backward pass in which a layer took no rows: its sizes stay those of the last one in which it did."""
        self.backward_pass = backward_pass

    def _note(self, backward_pass: int, use: _Use | _Lookup, noted: tuple[Any, ...] | None) -> None:
        if backward_pass != self.backward_pass:
            self.backward_pass, self._uses = backward_pass, {}
        self._once = None if self._uses else noted
        self._uses[use] = self._uses.pop(use, 0) + 1

    def inspect(
        self, occasion: int, values: Float[Tensor, "*groups small"], damping: float, plain: Tensor, conditioned: Tensor
    ) -> None:
        """Record what conditioning did to one matrix, or to one for each group, in this backward pass or step."""
        if self._inspected is None or self._inspected.occasion != occasion:
            self._inspected = _Inspected(occasion)
        seen = self._inspected
        groups = values.reshape(-1, values.shape[-1])
        for share in (groups / (groups + damping)).sum(-1).tolist():
            seen.ranks.append(share)
            seen.dampings.append(damping)
        if groups.numel():
            seen.largest.append(groups.max().item())
        before, after = plain.detach().double().reshape(-1), conditioned.detach().double().reshape(-1)
        for number, (x, y) in enumerate([(before, after), (before, before), (after, after)]):
            seen.products[number] += torch.dot(x, y).item()
        self.effective_rank = math.fsum(seen.ranks) / max(len(seen.ranks), 1)
        self.damping = math.fsum(seen.dampings) / max(len(seen.dampings), 1)
        self.largest_curvature = max(seen.largest, default=0.0)
        together, *lengths = seen.products
        size = math.sqrt(lengths[0]) * math.sqrt(lengths[1])
        self.angle = math.degrees(math.acos(max(-1.0, min(1.0, together / size)))) if size > 0 else None

    def forget(self) -> None:
        """Before a new inspection: what an earlier one recorded."""
        self.effective_rank = self.largest_curvature = self.damping = self.angle = self._inspected = None

    def missed(self, last: int) -> bool:
        """Whether there was a backward pass after that one of which an inspection recorded nothing."""
        return self.backward_pass > last and self.effective_rank is None
