# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""What the sweeps of small and of large matrices have in common."""

import triton
import triton.language as tl

__all__ = ["PRECISIONS", "RELATIVE", "least_pivot", "start_vector"]

#: What a damping may be relative to.
RELATIVE = {"": 0, "mean": 1, "largest": 2}
#: Of products in a sweep, and where its result is scaled: in the difference that is for (Woodbury), errors of the former would
#: be two to four times those of float32.
PRECISIONS = ("tf32x3", "ieee")


@triton.jit
def least_pivot(trace):
    """What stands for the identity beside a Gram matrix of this trace, and what no pivot is smaller than.

    Products are rounded by 2⁻²³ of the trace. Where rows repeat and that outweighs the identity, pivots would be noise, so
    that as much again is added; far below, nothing to speak of, since in a difference (Woodbury) it would be seen.
    """
    rounding = 1.1920929e-07 * trace
    return 1.0 + rounding * tl.minimum(rounding, 1.0)


@triton.jit
def start_vector(i, size):
    """All positive, as what most inputs have in common, and no two alike, so that rows that cancel do not cancel here."""
    turns = i.to(tl.float32) * 0.618034
    return tl.where(i < size, 0.5 + turns - tl.floor(turns), 0.0)
