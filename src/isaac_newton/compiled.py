"""What compiled code asks for while it runs: `torch.compile` sees one operator where a layer is conditioned.

A trace would keep the damping, the drawn rows and the precision of the day it was made. An operator is opaque to the compiler,
so each backward pass runs what eager code runs: today's damping and schedules, the float32 path, fallbacks, statistics, ranks.
It breaks no graph. Operators take numbers and tensors only, so a layer is named by its number.
"""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["number", "operator", "site"]

_SITES: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()

# A replayed CUDA graph would not ask again: the compiler keeps these operators out of them.
_TAGS = [torch.Tag.cudagraph_unsafe] if hasattr(torch.Tag, "cudagraph_unsafe") else []


def number(site: object) -> int:
    """A number by which compiled code finds this site; a copy needs one of its own."""
    new = next(_NUMBERS)
    _SITES[new] = site
    return new


def site(number: int) -> Any:
    """The site with this number."""
    return _SITES[number]


def operator(function: Callable[..., Tensor], like: Callable[..., Tensor] | None = None) -> Callable[..., Tensor]:
    """Make a function an operator. It returns a tensor like its first, unless `like` gives an empty one that it is like."""

    def run(*args: Any) -> Tensor:
        result = function(*args).contiguous()
        # What an operator returns must not share memory with what it was given.
        given = {value.untyped_storage().data_ptr() for value in args if isinstance(value, Tensor)}
        return result.clone() if result.untyped_storage().data_ptr() in given else result

    made = torch.library.custom_op(
        f"isaac_newton::{function.__name__.strip('_')}",
        run,
        mutates_args=(),
        schema=torch.library.infer_schema(function, mutates_args=()),
        tags=_TAGS,
    )
    made.register_fake(like or _like_the_first)
    return made


def _like_the_first(first: Tensor, *rest: object) -> Tensor:
    return torch.empty_like(first, memory_format=torch.contiguous_format)
