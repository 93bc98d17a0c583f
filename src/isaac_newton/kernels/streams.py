"""Work beside the stream that a step is captured on: branches of a CUDA graph that need not wait for each other.

What a branch reads was allocated on the main stream and may be freed there before the branch has run; `record_stream` tells the
allocator. What it writes is the main stream's again once that has waited for the branch.
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from isaac_newton.math.patches import is_channels_last
from isaac_newton.torch_private import after_backward, is_hooked

__all__ = ["Capture", "beside", "join", "join_gradients", "laid_out"]

#: A stream for each owner, made when first asked for. Streams neither copy nor pickle, so they do not live on the owner.
_STREAMS: "weakref.WeakKeyDictionary[object, torch.cuda.Stream]" = weakref.WeakKeyDictionary()


@dataclass(eq=False)
class Capture:
    """What a run needs to know while a step is captured: the numbers that the graph reads on the device, and who used what.

    Attributes:
        damping: λ or ρ.
        output_damping: The same of the output side.
        seed: Of the rows that are drawn.
        uses: How often each parameter was used, by its identity.
        first: The first use of each input, which computes the conditioner for the others.
    """

    damping: Tensor
    output_damping: Tensor
    seed: Tensor
    uses: Counter[int] = field(default_factory=Counter)
    first: "dict[Hashable, weakref.ref[Any]]" = field(default_factory=dict)

    def remember(self, key: Hashable, use: Any) -> None:
        """The first use of an input."""
        self.first[key] = weakref.ref(use)


def _stream(owner: object) -> torch.cuda.Stream:
    stream = _STREAMS.get(owner)
    if stream is None:
        stream = _STREAMS[owner] = torch.cuda.Stream()
    return stream


@contextlib.contextmanager
def beside(owner: object, *read: Tensor) -> Iterator[None]:
    """Run the block on the owner's stream, after what the current stream has done so far; `read` is what it reads of that."""
    stream = _stream(owner)
    stream.wait_stream(torch.cuda.current_stream())
    for tensor in read:
        tensor.record_stream(stream)
    with torch.cuda.stream(stream):
        yield


def join(owner: object) -> None:
    """Let the current stream wait for the owner's."""
    torch.cuda.current_stream().wait_stream(_stream(owner))


def join_after_backward(owner: object, gradients: Iterable[tuple[Tensor, Tensor | None]]) -> None:
    """The same when the backward pass that is running has ended: the optimizer is the first to need what the branch wrote.

    Autograd keeps a gradient as it is if nobody else holds it, and otherwise a copy, made before the branch has written. Torch
    does not promise the former, so what a parameter got is looked at, and a copy is made again.

    Args:
        owner: Whose branch it is.
        gradients: The parameters for which it computes gradients, and these.
    """
    # Another tensor over the same memory: this one does not keep autograd from taking the gradient.
    written = [(parameter, gradient.detach()) for parameter, gradient in gradients if gradient is not None]

    def callback() -> None:
        join(owner)
        for parameter, gradient in written:
            if parameter.grad is not None and parameter.grad.data_ptr() != gradient.data_ptr():
                parameter.grad.copy_(gradient)

    after_backward(callback)


def join_gradients(
    owner: object, uses: Mapping[int, int], parameters: Sequence[Tensor], gradients: Sequence[Tensor | None], *, joint: bool
) -> None:
    """Wait for a layer's branch: at the end of the backward pass where nothing needs its gradients before, else now."""
    if not joint and all(_is_first_read_by_the_optimizer(parameter, uses) for parameter in parameters):
        join_after_backward(owner, zip(parameters, gradients, strict=False))
    else:
        join(owner)


def _is_first_read_by_the_optimizer(parameter: Tensor, uses: Mapping[int, int]) -> bool:
    """Whether a new gradient of this parameter becomes its `.grad` as it is, before anything looks at it.

    Autograd adds to a gradient that exists, sums those of several uses, and copies one whose layout is not the parameter's;
    hooks may do anything.
    """
    dense = parameter.is_contiguous() or is_channels_last(parameter)
    alone = uses.get(id(parameter), 0) <= 1 and not is_hooked(parameter) and not torch.is_grad_enabled()
    return parameter.is_leaf and parameter.grad is None and alone and dense


def laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient with the parameter's strides, so that autograd need not copy it."""
    return gradient if gradient.stride() == parameter.stride() else torch.empty_like(parameter).copy_(gradient)
