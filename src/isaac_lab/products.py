"""How torch computes for a while: in what precision it multiplies matrices of float32, and in how many threads."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def float32_products(*, tensor_cores: bool) -> Iterator[None]:
    """Within this block a GPU multiplies in TF32, or it does not, whatever was set outside."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tensor_cores else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute in so many threads; 0 for as many as there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
