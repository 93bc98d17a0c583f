"""Random arguments, sensible and not, and what a call with them has to be: a right answer or a clear error."""

import contextlib
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Random", "Refused", "agrees", "clear", "damping", "matrix", "nonsense", "sizes"]

Random = random.Random


class Refused(Exception):  # noqa: N818
    """The call was refused, as it should be."""


@contextlib.contextmanager
def clear(*names: str, only_if: bool = True) -> Iterator[None]:
    """Errors and warnings raised here name one of the arguments; `only_if`: whether there may be any."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError, RuntimeWarning) as error:
        if not only_if:
            raise AssertionError(f"good arguments were refused: {error}") from error
        if not any(name in str(error) for name in names):
            raise AssertionError(f"{type(error).__name__}({error}) names none of {', '.join(names)}") from error
        raise Refused from error


def nonsense(draw: Random) -> Any:
    """Something that is almost never right."""
    return draw.choice(
        [
            *(
                None,
                True,
                False,
                "x",
                "",
                b"1",
                0,
                -1,
                0.0,
                -0.0,
                -2.5,
                math.nan,
                -math.inf,
                10**400,
                1 + 2j,
                [],
                {},
                (),
                set(),
            ),
            *([1.0], ["x"], {"a": 1}, object(), object, lambda: None, nn.Module, torch.float32, slice(3), range(3), ...),
            *(torch.tensor(-1.0), torch.ones(2), torch.tensor(1), torch.tensor([]), np.float64(-1), np.array([1.0, 2.0])),
        ]
    )


def damping(draw: Random) -> tuple[Any, bool]:
    """A damping, and whether it is one."""
    if draw.random() < 0.7:
        strength = 10 ** draw.uniform(-3, 3)
        return draw.choice([strength, np.float32(strength), torch.tensor(strength), max(1, int(strength)), math.inf]), True
    value = nonsense(draw)
    return value, isinstance(value, Tensor) and value.dim() == 0 and value.item() > 0


def matrix(draw: Random, rows: int, columns: int) -> tuple[Any, bool]:
    """A matrix of this shape, and whether it is one."""
    if draw.random() < 0.9:
        dtype = draw.choice([torch.float64, torch.float32, torch.float32, torch.bfloat16, torch.float16])
        return (torch.randn(rows, columns) * 10 ** draw.uniform(-2, 1)).to(dtype), True
    wrong: list[Any] = [
        nonsense(draw),
        torch.ones(rows, columns, dtype=torch.int64),
        torch.ones(rows, columns, dtype=torch.cfloat),
    ]
    wrong += [torch.ones(columns), torch.ones(2, rows, columns), torch.ones(rows + 1, columns), torch.ones(rows, columns) > 0]
    return draw.choice(wrong), False


def agrees(actual: Tensor, expected: Tensor, a: Tensor, damping: float, scale: float = 0.0, factors: float = 0.0) -> None:
    """Whether the error is one of rounding.

    That of the result, and inside, in float64, that of what was conditioned, of norm `scale`, multiplied by the condition, and
    that of a product whose `factors` have norms of this product.
    """
    condition = 1 + a.double().square().sum().item() / (max(len(a), 1) * damping)
    step = 2**-52 if actual.dtype == torch.float64 else torch.finfo(actual.dtype).eps
    size = expected.norm().item()
    limit = 8 * step * size + 64 * 2**-52 * (condition * max(size, scale) + factors) + 1e-30
    # Half types have numbers below which there is only zero.
    limit += torch.finfo(actual.dtype).tiny * math.sqrt(max(expected.numel(), 1))
    fits = expected.abs().max().item() < torch.finfo(actual.dtype).max if expected.numel() else True
    error = (actual.double() - expected).norm().item()
    assert error <= limit or not fits, f"error {error:.2e}, allowed {limit:.2e}"


def sizes(draw: Random) -> tuple[int, int, int, int]:
    return draw.choice([0, 1, 2, 5, 12]), draw.choice([0, 1, 3, 8]), draw.choice([0, 1, 2, 6]), draw.choice([0, 1, 4, 9])
