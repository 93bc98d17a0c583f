# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""One launch for up to 16 layers: their addresses are arguments, their sizes stand in a table on the device.

A program finds its job in the table: there stands the first program of each job. Nothing is copied to the device per step, and
a launch can be captured in a CUDA graph, since neither addresses nor sizes are read from memory of the host.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "JOBS",
    "TYPES",
    "Grouped",
    "Room",
    "by_class",
    "hinted",
    "is_aligned",
    "job_of",
    "names",
    "pick",
    "remember",
    "size_of",
]

#: Jobs of a launch, at most.
JOBS = 16
#: What a kernel calls the types of tensors.
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
#: Plans of lists of one kernel: batches of ever new sizes must not fill the memory.
_MOST_PLANS = 1024
#: Tables that are kept, of one or two kilobytes each. They are kept for good: a CUDA graph may read them at any time.
_MOST_TABLES = 8192
#: No program, size or stride reaches this number.
_NEVER = 2**48

_T = TypeVar("_T")
_TABLES: dict[Hashable, Tensor] = {}
_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


class Grouped:
    """A launch for some jobs of a list, of one class.

    Args:
        kernel: Its first arguments are its own, then come the table and 16 addresses for each list of addresses.
        members: Which jobs of the list.
        programs: How many programs each of them takes.
        numbers: Their sizes, as the kernel reads them.
        device: Where.
        warps: Of a program.
        constants: What the kernel is compiled for.
    """

    def __init__(
        self,
        kernel: Any,
        members: Sequence[int],
        programs: Sequence[int],
        numbers: Sequence[Sequence[int]],
        device: torch.device,
        warps: int,
        constants: dict[str, Any],
    ) -> None:
        unused = JOBS - len(members)
        # Places that are not used repeat the first job, so that the types of the arguments are always the same.
        self._of_members: Callable[[Sequence[int]], tuple[int, ...]] = itemgetter(*members, *[members[0]] * unused)
        firsts = list(accumulate(programs, initial=0))
        sizes = [number for row in numbers for number in row]
        self._numbers = (*firsts[:-1], *[_NEVER] * unused, *sizes)
        self._device, self._table = device, _TABLES.get((device, self._numbers))
        self._kernel, self._grid, self._how = kernel, (firsts[-1], 1, 1), {**constants, "num_warps": warps}
        self._constants = tuple(constants.values())
        #: The compiled kernel, past Triton's handling of arguments.
        self._run: Callable[..., None] | None = None

    def __call__(self, own: Sequence[Any], *addresses: Sequence[int]) -> None:
        """Launch it with addresses of all jobs of the list."""
        table = self._table if self._table is not None else self._make_table()
        of_members, run = self._of_members, self._run
        chosen = [address for each in addresses for address in of_members(each)]
        if run is not None:
            run(*own, table, *chosen, *self._constants)
            return
        compiled = self._kernel[self._grid](*own, table, *chosen, **self._how)
        if compiled is not None:  # it is, where Triton interprets
            self._run = compiled[self._grid]

    def _make_table(self) -> Tensor:
        device, numbers = self._device, self._numbers
        key = (device, numbers)
        if key in _TABLES:
            self._table = _TABLES[key]
            return self._table
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # It is there when the graph runs, and not before: nobody else may use it.
            return _written(numbers, device)
        host = torch.tensor(numbers, dtype=torch.int64)
        if device.type != "cuda":
            made = host
        elif len(_TABLES) >= _MOST_TABLES:
            return host.pin_memory().to(device, non_blocking=True)
        else:
            made = _copied(host, device)
        if len(_TABLES) < _MOST_TABLES:
            self._table = _TABLES[key] = made
        return made


def _copied(host: Tensor, device: torch.device) -> Tensor:
    """A copy that is there for every stream, without waiting for what the current one has to do."""
    stream = _STREAMS.get(device)
    if stream is None:
        stream = _STREAMS[device] = torch.cuda.Stream(device)
        _written((0,), device)  # compiled now, since nothing can be loaded while a graph is captured
    with torch.cuda.stream(stream):
        made = host.pin_memory().to(device, non_blocking=True)
    stream.synchronize()
    return made


def _written(numbers: Sequence[int], device: torch.device) -> Tensor:
    """The same by kernels, for a stream that is being captured.

    All numbers are shifted, so that all are 64 bits wide and one compiled kernel does.
    """
    made = torch.empty(len(numbers), dtype=torch.int64, device=device)
    for start in range(0, len(numbers), JOBS):
        some = [number + _NEVER for number in numbers[start : start + JOBS]]
        _write[(len(some),)](made, start, *some, *some[:1] * (JOBS - len(some)), SHIFT=_NEVER, num_warps=1)
    return made


class Room:
    """Places of tensors of some shapes in one flat tensor, each at a multiple of 16 numbers; None takes no place.

    Equal shapes stand one after the other, so that torch splits them all with one call.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...] | None], start: int = 0) -> None:
        members: dict[tuple[int, ...], list[int]] = {}
        for number, shape in enumerate(shapes):
            if shape is not None:
                members.setdefault(shape, []).append(number)
        self.shapes = shapes
        self.offsets = [-1] * len(shapes)
        self._views: list[tuple[list[int], tuple[int, ...], tuple[int, ...], int]] = []
        for shape, numbers in members.items():
            strides = _contiguous(shape)
            length = -(-strides[0] // 16) * 16
            for place, number in enumerate(numbers):
                self.offsets[number] = start + place * length
            self._views.append((numbers, (len(numbers), *shape), (length, *strides[1:]), start))
            start += length * len(numbers)
        self.end = start

    def split(self, flat: Tensor) -> list[Tensor | None]:
        """The tensors in the flat one."""
        result: list[Tensor | None] = [None] * len(self.offsets)
        for numbers, shape, strides, start in self._views:
            for number, view in zip(numbers, flat.as_strided(shape, strides, start).unbind(), strict=True):
                result[number] = view
        return result

    def one(self, flat: Tensor, number: int) -> Tensor | None:
        """One of the tensors in the flat one."""
        shape = self.shapes[number]
        return None if shape is None else flat.as_strided(shape, _contiguous(shape)[1:], self.offsets[number])


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The number of elements, and the strides."""
    return tuple(accumulate((*shape[::-1],), lambda a, b: a * b, initial=1))[::-1]


def remember(plans: dict[Any, _T], key: object, plan: _T) -> _T:
    """The plan, which is found under this key from now on."""
    if len(plans) >= _MOST_PLANS:
        plans.clear()
    plans[key] = plan
    return plan


def by_class(classes: Sequence[Hashable]) -> Iterator[tuple[Any, list[int]]]:
    """Jobs that one launch can do: those of one class, a few at a time; a class of None is left out."""
    members: dict[Hashable, list[int]] = {}
    for number, one in enumerate(classes):
        if one is not None:
            members.setdefault(one, []).append(number)
    for one, numbers in members.items():
        for start in range(0, len(numbers), JOBS):
            yield one, numbers[start : start + JOBS]


def is_aligned(address: int, *sizes: int) -> bool:
    """Whether a program may load 16 bytes at once from rows of these lengths or strides."""
    return address % 16 == 0 and all(size % 16 == 0 for size in sizes)


def names(letters: str, *others: str) -> list[str]:
    """Arguments for whose values a kernel is not compiled anew."""
    return [*others, *(f"{letter}{number}" for letter in letters for number in range(JOBS))]


@triton.jit
def pick(job, v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15):
    """The value of a job."""
    a = tl.where(job < 2, tl.where(job < 1, v0, v1), tl.where(job < 3, v2, v3))
    b = tl.where(job < 6, tl.where(job < 5, v4, v5), tl.where(job < 7, v6, v7))
    c = tl.where(job < 10, tl.where(job < 9, v8, v9), tl.where(job < 11, v10, v11))
    d = tl.where(job < 14, tl.where(job < 13, v12, v13), tl.where(job < 15, v14, v15))
    return tl.where(job < 8, tl.where(job < 4, a, b), tl.where(job < 12, c, d))


@triton.jit
def job_of(table, program, FIELDS: tl.constexpr):
    """The job of a program, which program of that job it is, and where the job's numbers stand."""
    firsts = tl.load(table + tl.arange(0, 16))
    job = tl.sum((firsts <= program).to(tl.int32), axis=0) - 1
    return job, program - tl.load(table + job).to(tl.int32), table + 16 + job * FIELDS


@triton.jit
def hinted(address, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """An address as a pointer."""
    pointer = address.to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def size_of(place, ALIGNED: tl.constexpr):
    """A number of the table, of which the compiler may know that it is a multiple of 16."""
    size = tl.load(place)
    if ALIGNED:
        size = tl.multiple_of(size, 16)
    return size


# fmt: off
@triton.jit(do_not_specialize=names("v", "start"))
def _write(table, start, v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15, SHIFT: tl.constexpr):
    # fmt: on
    job = tl.program_id(0)
    value = pick(job, v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15)
    tl.store(table + start + job, value - SHIFT)
