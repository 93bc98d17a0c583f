"""The curvature that one weight gathers over micro-batches, ranks and steps, for `when="step"`."""

import math
import weakref
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from isaac_newton.core.distributed import Ranks

__all__ = ["Moment", "WeightSlice"]


class WeightSlice(NamedTuple):
    """Which gradient a moment belongs to: rows `start` to `stop` of a parameter of the layer, and how to read them.

    `groups` is 0 where the curvature is diagonal: the rows of an embedding are divided, not multiplied by a matrix.
    """

    parameter: str
    start: int
    stop: int
    groups: int = 1
    transposed: bool = False
    bias: str | None = None


class Moment:
    """The second moment of a layer's rows, Σ rᵀr: what was gathered since the last step, and what lasts beyond it.

    Few rows are kept as they are, which is cheaper than their products. Of one-hot rows (an embedding's) only the diagonal is
    kept, the counts of the tokens.
    """

    def __init__(self) -> None:
        self.rows: list[Float[Tensor, "groups rows features"]] = []
        #: (groups, features, features) or, for counts, (tokens,)
        self.sum: Tensor | None = None
        self.count: float | Tensor = 0
        #: Running average of the second moment, and how much of it is there: 1 − decayᵗ after t steps.
        self.average: Tensor | None = None
        self.weight: Tensor | None = None
        #: What the average last made of a gradient, with which damping, and for how many steps it has.
        self.conditioner: Tensor | None = None
        self.damping: float | Tensor = 0.0
        self.age = 0
        #: With `spread`, the number of the rank that has these; the others know the age only.
        self.owner: int | None = None
        #: The dtype of the rows; shape and dtype of the sum, and whether the other ranks know them.
        self.dtype: torch.dtype | None = None
        self.form: tuple[tuple[int, ...], torch.dtype] | None = None
        self.announced = False
        #: What another moment had gathered before it absorbed this one, and what came out.
        self._joined: tuple[weakref.ref[Tensor], Tensor] | None = None

    @property
    def gathered(self) -> bool:
        """Whether there is anything new since the last step."""
        return bool(self.rows) or self.sum is not None

    @property
    def is_plain(self) -> bool:
        """Whether the last conditioner was that of λ = ∞, which is none."""
        return isinstance(self.damping, float) and self.damping == math.inf

    @classmethod
    def of_rows(cls, r: Float[Tensor, "groups rows features"], count: float | Tensor, *, keep: bool) -> "Moment":
        """That of these rows, of which so many count; with `keep` copies of them, if they are fewer than features."""
        r, self = r.detach(), cls()
        self.dtype, self.form, self.count = r.dtype, ((r.shape[0], r.shape[2], r.shape[2]), _wide(r.dtype, r.device)), count
        if keep and r.shape[1] < r.shape[2]:
            # Whoever owns the input may write the next batch into it before the step.
            self.rows = [r.clone()]
        else:
            r = r.to(self.form[1])
            self.sum = r.mT @ r
        return self

    @classmethod
    def of_counts(cls, counts: Float[Tensor, " tokens"]) -> "Moment":
        """That of one-hot rows: how often each token was looked up."""
        self = cls()
        self.form, self.count, self.sum = (tuple(counts.shape), counts.dtype), counts.sum(), counts
        return self

    def plus(self, other: "Moment") -> "Moment":
        """What both have gathered. They stay as they are, for layers with one input gather the same."""
        both = Moment()
        both.absorb(self)
        both.absorb(other)
        return both

    def absorb(self, other: "Moment") -> None:
        """Take over what another one has gathered, which stays as it is."""
        self.dtype, self.form, self.count = other.dtype, other.form, self.count + other.count
        if self.sum is None and other.sum is None:
            rows = [*self.rows, *other.rows]
            if sum(part.shape[1] for part in rows) < rows[0].shape[2]:
                self.rows = rows
                return
        mine, theirs = self.product(), other.product()
        if mine is not None and theirs is not None:
            # Who adds the same to the same shares the result.
            known = None if other._joined is None or other._joined[0]() is not mine else other._joined[1]
            theirs = mine + theirs if known is None else known
            other._joined = weakref.ref(mine), theirs
        self.sum, self.rows = mine if theirs is None else theirs, []

    def made_of(self) -> tuple[Hashable, ...]:
        """Equal for moments that consist of the same tensors, as those of layers with one input do."""
        return *map(id, self.rows), *map(id, (self.sum, self.average, self.conditioner)), self.age, self.owner, self.form

    def follow(self, first: "Moment") -> None:
        """Have what another one has, which consisted of the same tensors."""
        self.average, self.weight, self.conditioner = first.average, first.weight, first.conditioner
        self.damping, self.age, self.owner = first.damping, first.age, first.owner

    def keep_if(self, there: Tensor) -> None:
        """Forget what was gathered unless this is true, which only the device knows."""
        self.rows = [part * there for part in self.rows]
        self.sum = None if self.sum is None else self.sum * there
        self.count = self.count * there

    def all_rows(self) -> Float[Tensor, "groups rows features"]:
        """The rows, where they were kept."""
        r = self._together()
        # Of the rows that were forgotten on the device, zeros are left: the others make up for their number.
        return r * (r.shape[1] / self.count).sqrt().to(r.dtype) if isinstance(self.count, Tensor) else r

    def _together(self) -> Float[Tensor, "groups rows features"]:
        return self.rows[0] if len(self.rows) == 1 else torch.cat(self.rows, dim=1)

    def product(self) -> Tensor | None:
        """Σ rᵀr so far; None if nothing was gathered."""
        if not self.rows:
            return self.sum
        r = self._together()
        r = r.to(_wide(r.dtype, r.device))
        return r.mT @ r

    def sum_over(self, ranks: Ranks, device: torch.device) -> None:
        """Make the sum that of all ranks; where nothing was gathered on this one, it takes part with zeros."""
        assert self.form is not None
        total = self.product()
        if total is None:
            total = torch.zeros(self.form[0], dtype=self.form[1], device=device)
        elif total is self.sum:
            total = total.clone()  # another moment may have it too
        count = torch.as_tensor(self.count, dtype=torch.float64, device=device)
        ranks.add(total, count, owner=self.owner)
        self.rows, self.sum, self.count = [], total, count.to(total.dtype)

    def clear(self) -> None:
        """Forget what was gathered; the average stays."""
        self.rows, self.sum, self.count = [], None, 0

    def take_in(self, decay: float) -> None:
        """What was gathered enters the average, unless it is not finite."""
        total = self.product()
        if total is None:
            return
        fresh = total / self.count
        finite = fresh.isfinite().all()
        if self.average is None or self.weight is None:
            self.average, self.weight = torch.zeros_like(fresh), fresh.new_zeros(())
        # Nothing here waits for the device.
        self.average = torch.where(finite, self.average.lerp(fresh, 1 - decay), self.average)
        self.weight = torch.where(finite, decay * self.weight + (1 - decay), self.weight)

    def mean(self) -> Tensor | None:
        """The second moment, averaged over steps; None before the first."""
        if self.average is None or self.weight is None:
            return None
        return self.average / self.weight.clamp_min(torch.finfo(self.weight.dtype).tiny)

    def state(self) -> dict[str, Any]:
        """What lasts from one step to the next."""
        return {name: getattr(self, name) for name in _LASTING}

    def load(self, state: Mapping[str, Any], device: torch.device, moved: dict[int, Tensor]) -> None:
        """The way back; `moved` is what others have brought to their device, so that what is shared stays so."""
        for name in _LASTING:
            value = state.get(name)
            setattr(self, name, moved.setdefault(id(value), value.to(device)) if isinstance(value, Tensor) else value)
        if self.conditioner is None and not self.is_plain and self.owner is None:
            self.age = 0  # with refresh=1 none is kept

    def __getstate__(self) -> dict[str, Any]:
        # A copy has backward passes of its own: what was gathered in those of the original is not its.
        return {**self.__dict__, "rows": [], "sum": None, "count": 0, "_joined": None}


def _wide(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """In which dtype rows are summed up: what is lost there, trace/λ multiplies. Many GPUs are slow beyond float32."""
    return torch.float64 if device.type == "cpu" else dtype


_LASTING = ("average", "weight", "conditioner", "damping", "age", "owner", "form")
