"""Work beside the stream that a step is captured on: branches of a CUDA graph that need not wait for each other.

What a branch reads was allocated on the main stream and may be freed there before the branch has run; `record_stream` tells the
allocator. What it writes is the main stream's again once that has waited for the branch.
"""

import contextlib
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

__all__ = ["beside", "join", "join_after_backward"]

#: A stream for each owner, made when first asked for. Streams neither copy nor pickle, so they do not live on the owner.
_STREAMS: "weakref.WeakKeyDictionary[object, torch.cuda.Stream]" = weakref.WeakKeyDictionary()


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

    torch.autograd.Variable._execution_engine.queue_callback(callback)
