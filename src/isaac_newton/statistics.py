"""What happened in one layer in its last backward pass, and what conditioning cost it."""

import warnings
from dataclasses import dataclass
from typing import Literal

__all__ = ["Statistics"]


@dataclass
class Statistics:
    """Counts of one conditioned layer.

    Attributes:
        fallbacks: Factorizations that failed and were redone with a larger damping, since attaching.
        backward_pass: The last backward pass, which the rest is about. A layer used several times in it adds up its costs.
        rows: Rows that fed the conditioner in the last backward pass; 0 before the first.
        side: Which side was inverted then: "rows" (rows × rows), "features" (features × features), or "counts" where
            the inverse is diagonal.
        extra_multiplications: What conditioning added in the last pass; of a conditioner shared by several layers each
            counts all.
        own_multiplications: What the layer itself multiplied: forward, input gradient and weight gradient.
        extra_bytes: The inverse, in float32.
    """

    fallbacks: int = 0
    backward_pass: int = 0
    rows: int = 0
    side: Literal["", "rows", "features", "counts"] = ""
    extra_multiplications: int = 0
    own_multiplications: int = 0
    extra_bytes: int = 0

    def fell_back(self) -> None:
        """Count a factorization that failed, and warn."""
        self.fallbacks += 1
        warnings.warn(
            "a factorization failed and was repeated with a larger damping; handle.statistics counts how often per layer",
            RuntimeWarning,
            stacklevel=2,
        )

    def saw(
        self, backward_pass: int, total: int, count: int, features: int, outputs: int, *, groups: int = 1, own_rows: bool = True
    ) -> None:
        """Record a use: `total` rows were multiplied, `count` of them (or means of them) fed the conditioner."""
        small, large = min(count, features), max(count, features)
        # Gram matrix, Cholesky factor and inverse of the smaller side
        cost = small**2 * large + small**3 // 2
        if count >= features:
            cost += outputs * features**2
        elif own_rows:
            cost += count**2 * min(features, outputs)
        else:
            cost += 2 * count * features * outputs + count**2 * outputs
        self._add(backward_pass, 3 * groups * total * features * outputs, groups * cost, 4 * groups * small**2)
        self.rows, self.side = count, "rows" if count < features else "features"

    def saw_counts(self, backward_pass: int, tokens: int, width: int) -> None:
        """Record a use of an embedding: one division for each number that came out, and no matrix."""
        self._add(backward_pass, 2 * tokens * width, tokens * width, 0)
        self.rows, self.side = tokens, "counts"

    def _add(self, backward_pass: int, own: int, extra: int, size: int) -> None:
        if backward_pass != self.backward_pass:
            self.backward_pass = backward_pass
            self.own_multiplications = self.extra_multiplications = self.extra_bytes = 0
        self.own_multiplications += own
        self.extra_multiplications += extra
        self.extra_bytes += size
