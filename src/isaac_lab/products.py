"""In what precision torch multiplies matrices of float32."""

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["float32_products"]


@contextlib.contextmanager
def float32_products(*, tensor_cores: bool) -> Iterator[None]:
    """Within this block a GPU multiplies in TF32, or it does not, whatever was set outside."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tensor_cores else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
