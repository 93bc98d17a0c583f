r"""Multiply-adds of a training step, counted: what ζ* costs in theory.

A linear layer with $n$ inputs, $m$ outputs and $b$ rows needs $3bnm$ for the plain gradient (output, input gradient, weight
gradient), or $2bnm$ where nobody asks for the input gradient: in the first layer. ζ* adds, for $b < n$,

| what                            | multiply-adds   |
|---------------------------------|-----------------|
| Gram matrix $a a^\top$, in full | $b^2 n$         |
| Cholesky factorization          | $b^3 / 6$       |
| inverse from the factor         | $b^3 / 3$       |
| product with $g$ or with $a$    | $b^2 \min(n,m)$ |

and for $b ≥ n$, on the other side, $n^2 b + n^3/2 + n^2 m$. The Gram matrix is symmetric, but matrix products compute it in
full. At batch 60 the step costs 1.42, 1.12, 1.03, 1.007 and 1.06 times the plain one for the five models of Table 2.
"""

from collections.abc import Sequence
from itertools import pairwise


def gradient(sizes: Sequence[int], batch: int) -> float:
    """Multiply-adds of a plain step of a chain of linear layers with these sizes."""
    return sum((3 if number else 2) * batch * n * m for number, (n, m) in enumerate(pairwise(sizes)))


def conditioner(sizes: Sequence[int], batch: int) -> float:
    """What ζ* adds."""
    b, found = batch, 0.0
    for n, m in pairwise(sizes):
        small = b**2 * n + b**3 / 6 + b**3 / 3 + b**2 * min(n, m)
        found += small if b < n else n**2 * b + n**3 / 2 + n**2 * m
    return found


def ratio(sizes: Sequence[int], batch: int) -> float:
    """A step with ζ* over a plain step."""
    return 1 + conditioner(sizes, batch) / gradient(sizes, batch)
