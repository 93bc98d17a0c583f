"""The largest eigenvalue of Gram matrices as the kernels estimate it: here in torch's operations.

Eight products with a vector; the last one's length over that of the one before. It is never above the eigenvalue.
"""

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["largest_eigenvalue"]


def largest_eigenvalue(gram: Float[Tensor, "*groups k k"]) -> Float[Tensor, "*groups"]:
    """An estimate of it; 0 for a matrix of zeros."""
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    matrix = gram / torch.where(trace > 0, trace, 1.0)[..., None, None]
    turns = torch.arange(gram.shape[-1], dtype=torch.float32, device=gram.device) * 0.618034
    # All are positive, as what most inputs have in common, and no two alike, so that rows that cancel do not cancel here.
    vector = (0.5 + turns - turns.floor()).to(gram.dtype).expand(gram.shape[:-1])
    length = torch.ones_like(trace)
    for _ in range(8):
        vector = (matrix @ (vector / torch.where(length > 0, length, 1.0)[..., None])[..., None])[..., 0]
        length = vector.norm(dim=-1)
    return trace * length
