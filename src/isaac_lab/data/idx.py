"""The idx format of MNIST: a magic number, the sizes (big-endian), then the bytes of the array."""

import math
import struct
from pathlib import Path

import torch
from jaxtyping import UInt8
from torch import Tensor

from isaac_lab.data.files import DataError

__all__ = ["decode"]

#: The third byte of the magic number: what the array consists of.
TYPES = {0x08: "unsigned bytes", 0x09: "signed bytes", 0x0B: "int16", 0x0C: "int32", 0x0D: "float32", 0x0E: "float64"}
UNSIGNED_BYTES = 0x08


def decode(content: bytes, source: str | Path) -> UInt8[Tensor, "..."]:
    """The array in the decompressed bytes of an idx file; errors name `source`."""
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in TYPES:
        raise DataError(
            f"{source} is not an idx file: it begins with {content[:4].hex() or 'nothing'}, expected 000008 and a rank"
        )
    if content[2] != UNSIGNED_BYTES:
        raise DataError(f"{source} holds {TYPES[content[2]]}, expected unsigned bytes (magic number {content[:4].hex()})")
    rank = content[3]
    header = 4 + 4 * rank
    if len(content) < header:
        raise DataError(f"{source} ends within its header: {len(content):,} bytes, expected {header} and the array")
    shape = struct.unpack_from(f">{rank}I", content, 4)
    expected = header + math.prod(shape)
    if len(content) != expected:
        sizes = " × ".join(map(str, shape))
        raise DataError(f"{source} has a wrong length: {len(content):,} bytes, expected {expected:,} for sizes {sizes}")
    # A copy, because a tensor could be written to and bytes cannot.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)[header:].reshape(shape)
