"""How a layer's input becomes the rows of its conditioner: one layout in which every layer looks linear.

A *view* has the shape (groups, samples, *positions, *features): a strided view of the input, nothing copied.
`positions` says how many of its dimensions are positions: none for a plain batch, one for a sequence, two for the places of
a two-dimensional convolution. `rows` turns inputs into the rows that feed conditioners, and is the only place that copies.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from isaac_newton import kernels
from isaac_newton.core.distributed import Ranks
from isaac_newton.kernels.permutation import permuted
from isaac_newton.math.patches import Patches

if TYPE_CHECKING:
    from isaac_newton.core.use import Use

__all__ = [
    "PLAIN",
    "Arrange",
    "Layout",
    "Rows",
    "as_rows",
    "average",
    "cast",
    "chosen",
    "gather",
    "layout_of",
    "of_all_ranks",
    "rows",
    "sequence",
    "working_dtype",
]

#: What a list of layers received.
Uses: TypeAlias = Sequence["Use"]
#: Brings a layer's input into the layout above: the view, and how many of its dimensions are positions.
Arrange: TypeAlias = Callable[[Tensor], tuple[Tensor, int]]


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`."""
    # Even a `to` that has nothing to do takes its time, and there are many.
    return x if x.dtype is dtype else x.to(dtype)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """What linear algebra runs in where tensors have this dtype."""
    return dtype if dtype is torch.float64 else torch.float32


def as_rows(x: Tensor) -> Float[Tensor, "rows features"]:
    """All leading dimensions as one."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def sequence(x: Float[Tensor, "..."]) -> tuple[Tensor, int]:
    """The view of a linear layer's input: (samples, *positions, features); a vector is one sample without positions."""
    x = x if x.dim() > 1 else x[None]
    return x[None], x.dim() - 2


def time_first(x: Float[Tensor, "length samples features"]) -> tuple[Tensor, int]:
    """The same where positions come before samples."""
    return x.transpose(0, 1)[None], 1


class Rows(NamedTuple):
    """What feeds a conditioner."""

    r: Float[Tensor, "*groups rows in"]
    #: Rows that the layer multiplied.
    total: int
    #: On a GPU with a mask: which rows count; the others are zeros.
    counted: Bool[Tensor, " rows"] | None = None
    #: Whether the result is a difference, which can be much smaller than its parts: more digits.
    in_difference: bool = False
    #: Of the layer.
    outputs: int = 0

    @property
    def groups(self) -> int:
        """Matrices: one, unless a convolution has several groups."""
        return self.r.shape[0] if self.r.dim() == 3 else 1


@dataclass(frozen=True)
class Layout:
    """How an input becomes rows, and a gradient a matrix. Equal layouts of one input share a conditioner.

    `transposed`: dimension 0 of the weight holds the features. `joint`: a column of ones stands for the bias; it is joined in
    `rows` and in `matrix`, nowhere else. `outputs`: how the gradient of the output becomes rows, for ζ.
    """

    arrange: Arrange
    transposed: bool = False
    joint: bool = False
    outputs: Arrange = sequence

    def matrix(self, weight: Tensor, bias: Tensor | None, groups: int) -> Float[Tensor, "*groups out in"]:
        """The gradient as a matrix, one for each group if there are several."""
        if self._channels_last:
            weight = weight.movedim(1, -1)
        if groups > 1:
            matrix = weight.reshape(groups, weight.shape[0] // groups, -1)
        else:
            matrix = weight if weight.dim() == 2 else weight.reshape(weight.shape[0], -1)
        matrix = matrix.mT if self.transposed else matrix
        if not self.joint:
            return matrix
        # Without a gradient for the bias, its column is zero and does not disturb.
        column = matrix.new_zeros(matrix.shape[:-1]) if bias is None else bias.reshape(matrix.shape[:-1])
        return torch.cat([matrix, column[..., None].to(matrix.dtype)], dim=-1)

    def parts(self, matrix: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The way back, to the shapes and the types of these gradients."""
        new_bias = None
        if self.joint:
            new_bias = None if bias is None else matrix[..., -1].reshape(bias.shape).to(bias.dtype)
            matrix = matrix[..., :-1]
        matrix = matrix.mT if self.transposed else matrix
        if matrix.shape != weight.shape:
            if self._channels_last:
                matrix = matrix.reshape(weight.movedim(1, -1).shape).movedim(-1, 1)
            else:
                matrix = matrix.reshape(weight.shape)
        return cast(matrix, weight.dtype), new_bias

    @property
    def _channels_last(self) -> bool:
        return isinstance(self.arrange, Patches) and self.arrange.channels_last


#: Of most layers.
PLAIN = Layout(sequence)


@functools.lru_cache(maxsize=1024)
def layout_of(arrange: Arrange, transposed: bool = False, joint: bool = False, outputs: Arrange = sequence) -> Layout:
    """One object for equal layouts."""
    layout = Layout(arrange, transposed, joint, outputs)
    return PLAIN if layout == PLAIN else layout


def rows(uses: Uses) -> list[Rows]:
    """Stage 1: the rows of each use. On a GPU all means are one launch or a few, and so are all draws."""
    inputs = [use.input for use in uses]
    able = kernels.groupable(inputs)
    lanes = [_lane(use, x, grouped) for use, x, grouped in zip(uses, inputs, able, strict=True)]
    if len(set(lanes)) == 1:
        return _LANES[lanes[0]](uses, inputs)
    found: dict[int, Rows] = {}
    for lane in dict.fromkeys(lanes):
        numbers = [number for number, other in enumerate(lanes) if other == lane]
        made = _LANES[lane]([uses[number] for number in numbers], [inputs[number] for number in numbers])
        found.update(zip(numbers, made, strict=True))
    return [found[number] for number in range(len(uses))]


def _rows(use: "Use", r: Float[Tensor, "*groups rows in"], total: int, counted: Tensor | None = None) -> Rows:
    """With the column of a joint bias, and what the next stages need to know."""
    if use.layout.joint:
        r = _with_ones(r, counted)
    shape = r.shape
    return Rows(r, total, counted, not use.own and shape[-2] < shape[-1], use.outputs)


def of_all_ranks(uses: Uses, found: Sequence[Rows], ranks: Ranks) -> list[Rows]:
    """The rows of all ranks, where their batches count as one in each backward pass: by the names of the layers."""
    times: Counter[str] = Counter()
    names = []
    for use in uses:
        names.append((use.layer.name, times[use.layer.name]))
        times[use.layer.name] += 1
    together = [one.r if one.r.dim() == 3 else one.r[None] for one in found]
    everywhere = ranks.exchange(dict(zip(names, together, strict=True)))
    results = []
    for name, one in zip(names, found, strict=True):
        r = _one(everywhere[name])
        results.append(one._replace(r=r, in_difference=r.shape[-2] < r.shape[-1]))
    return results


def _lane(use: "Use", x: Tensor, grouped: bool) -> str:
    """Which of the ways below an input goes."""
    if use.own:
        return "own"
    if grouped and use.lane is not None:
        return use.lane
    options, is_sequence = use.layer.run.options, use.layout.arrange is sequence
    if is_sequence and not options.few_rows and use.mask is None and options.ranks is None:
        return "own"
    if not grouped:
        return "torch"
    return _lane_of_sequences(use, x) if is_sequence else _lane_of_patches(use, x)


def _lane_of_sequences(use: "Use", x: Tensor) -> str:
    options = use.layer.run.options
    most = options.max_rows
    if options.sharing == "reduce":
        return "means" if x.dim() == 3 and (most is None or x.shape[0] <= most) else "torch"
    drawn = most is not None and x.numel() > most * x.shape[-1] and use.mask is None
    return "drawn" if drawn and x.dim() > 1 and x.is_contiguous() else "torch"


def _lane_of_patches(use: "Use", x: Tensor) -> str:
    patches, options = use.layout.arrange, use.layer.run.options
    if not isinstance(patches, Patches) or patches.groups > 1 or use.mask is not None:
        return "torch"
    most = options.max_rows
    if options.sharing == "reduce":
        few = (most is None or x.shape[0] <= most) and math.prod(patches.kernel) <= kernels.MOST_TAPS
        return "tap means" if few else "torch"
    drawn = most is not None and patches.padding_mode == "zeros" and _geometry(patches, patches.batched(x).shape)[2] > most
    return "drawn patches" if drawn else "torch"


def _own(uses: Uses, inputs: Sequence[Tensor]) -> list[Rows]:
    """The input itself is the rows."""
    (grouped,) = kernels.groupable(inputs[:1])
    result = []
    for use, x in zip(uses, inputs, strict=True):
        r = as_rows(x)
        r = r if use.own or grouped else cast(r, working_dtype(r.dtype))
        result.append(_rows(use, r, r.shape[0]))
    return result


def _means(uses: Uses, inputs: Sequence[Tensor]) -> list[Rows]:
    from isaac_newton.kernels.averages import means

    shapes = [x.shape for x in inputs]
    masks = [None if use.mask is None else _mask_of(use, shape[:2]) for use, shape in zip(uses, shapes, strict=True)]
    found = means(inputs, masks)
    return [_rows(use, r, shape[0] * shape[1]) for use, r, shape in zip(uses, found, shapes, strict=True)]


def _tap_means(uses: Uses, inputs: Sequence[Tensor]) -> list[Rows]:
    from isaac_newton.kernels.averages import tap_means

    xs, taps, places, orders = [], [], [], []
    for use, whole in zip(uses, inputs, strict=True):
        patches: Any = use.layout.arrange
        x, tap, count = patches.touched(whole)
        xs.append(x)
        taps.append(tap)
        places.append(max(count, 1))
        orders.append(patches.channels_last)
    found = tap_means(xs, taps, places, orders)
    return [_rows(use, r, r.shape[0] * count) for use, r, count in zip(uses, found, places, strict=True)]


def _drawn(uses: Uses, inputs: Sequence[Tensor]) -> list[Rows]:
    """Of sequences."""
    from isaac_newton.kernels.draws import drawn_positions

    run = uses[0].layer.run
    found = drawn_positions(inputs, run.options.max_rows or 0, run.seed)
    return [_rows(use, r, x.numel() // x.shape[-1]) for use, x, r in zip(uses, inputs, found, strict=True)]


def _drawn_patches(uses: Uses, inputs: Sequence[Tensor]) -> list[Rows]:
    from isaac_newton.kernels.draws import Window, drawn

    options, seed = uses[0].layer.run.options, uses[0].layer.run.seed
    windows, totals = [], []
    for use, whole in zip(uses, inputs, strict=True):
        patches: Any = use.layout.arrange
        x = patches.batched(whole)
        before, places, total = _geometry(patches, x.shape)
        how = (patches.kernel, patches.stride, before, patches.dilation, places, patches.channels_last)
        windows.append(Window(x, x.shape, x.stride(), *how))
        totals.append(total)
    found = drawn(windows, options.max_rows or 0, seed, [0] * len(windows))
    return [_rows(use, r, total) for use, r, total in zip(uses, found, totals, strict=True)]


@functools.lru_cache(maxsize=1024)
def _geometry(patches: Patches, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Zeros before the first pixel, patches in each dimension, and patches of all samples."""
    places = patches.places_of(shape)
    return tuple(before for before, _ in patches.margins()), places[1:], math.prod(places)


def _by_torch(uses: Uses, inputs: Sequence[Tensor]) -> list[Rows]:
    return [_gathered(use) for use in uses]


_LANES: dict[str, Callable[[Uses, Sequence[Tensor]], list[Rows]]] = {
    "own": _own,
    "means": _means,
    "tap means": _tap_means,
    "drawn": _drawn,
    "drawn patches": _drawn_patches,
    "torch": _by_torch,
}


def _mask_of(use: "Use", places: Sequence[int]) -> Tensor | None:
    """The mask, unless it is one of something else in the network."""
    if use.mask is None:
        return None
    run = use.layer.run
    if use.mask.shape == torch.Size(places):
        run.mask_met = True
        return use.mask
    if len(places) > 1:
        run.mask_missed = places
    return None


def _gathered(use: "Use") -> Rows:
    """The rows of one use in torch's operations: on a CPU, in passes that are differentiated, and for what is rare."""
    options, x, arrange = use.layer.run.options, use.input, use.layout.arrange
    reduce, most = options.sharing == "reduce", options.max_rows
    seed = 0 if most is None else use.layer.run.seed
    if reduce and isinstance(arrange, Patches) and (use.mask is None or use.mask.shape != arrange.places(x)):
        means, count = arrange.average(x)
        return _rows(use, _one(gather(means, 0, most, None, seed)), count * means.shape[1])
    # Averages of half-precision numbers are formed in float32, without a copy of all of them.
    view, positions = arrange(x if reduce else cast(x, working_dtype(x.dtype)))
    places = view.shape[1 : 2 + positions]
    total, mask = math.prod(places), _mask_of(use, places)
    if reduce:
        view = average(view, positions, mask)
        mask, positions = (mask if positions == 0 else None), 0
    if mask is not None and most is None and not _may_look(use):
        counted = mask.reshape(-1)
        return _rows(use, _one(gather(view, positions, None, None, 0).masked_fill(~counted[:, None], 0)), total, counted)
    return _rows(use, _one(gather(view, positions, most, mask, seed)), total)


def _may_look(use: "Use") -> bool:
    """Whether the shape of what is computed may follow from values: a GPU would wait for them, and a graph cannot."""
    run = use.layer.run
    return not use.input.is_cuda or run.inspecting or run.options.ranks is not None


def _one(r: Float[Tensor, "groups rows in"]) -> Float[Tensor, "*groups rows in"]:
    # Of one matrix: torch takes up to three times as long for a batch of one.
    return r[0] if r.shape[0] == 1 else r


def _with_ones(r: Tensor, counted: Tensor | None) -> Tensor:
    """With a last column for a joint bias: ones, where rows count."""
    r = cast(r, working_dtype(r.dtype))
    ones = r.new_ones(*r.shape[:-1], 1)
    return torch.cat([r, ones if counted is None else ones * counted[:, None]], dim=-1)


def gather(
    view: Tensor, positions: int, most: int | None, mask: Bool[Tensor, "..."] | None, seed: int | Tensor
) -> Float[Tensor, "groups rows features"]:
    """The rows of a view (groups, samples, *positions, *features) that count, or `most` of them.

    They are drawn without replacement, all alike likely: rᵀr / rows stays unbiased.
    """
    groups, width = view.shape[0], math.prod(view.shape[2 + positions :])
    places = view.shape[1 : 2 + positions]
    count = math.prod(places) if mask is None else int(mask.sum())
    if most is None or count <= most:
        found = view if mask is None else view[:, mask]
        return found.reshape(groups, count, width)
    drawn = permuted(count, most, int(seed), 0, view.device)
    if mask is not None:
        drawn = mask.reshape(-1).nonzero().squeeze(1)[drawn]
    return chosen(view, places, drawn).reshape(groups, most, width)


def chosen(view: Tensor, places: Sequence[int], drawn: Tensor) -> Tensor:
    """The rows of a view at these positions: only they are copied, whatever the size of all the patches."""
    index: list[Tensor] = []
    for size in reversed(places):  # `torch.unravel_index` would fix the sizes in compiled code
        index, drawn = [drawn % size, *index], drawn // size
    each: tuple[slice | Tensor, ...] = (slice(None), *index)
    return view[each]


def average(view: Tensor, positions: int, mask: Tensor | None) -> Tensor:
    """(groups, samples, *features): the mean over the positions that count, in float32 or better."""
    dtype = torch.promote_types(view.dtype, torch.float32)
    if positions == 0:
        return view.to(dtype)
    dims = tuple(range(2, 2 + positions))
    if mask is None:
        return view.mean(dims, dtype=dtype)
    counts = mask.reshape(1, *mask.shape, *[1] * (view.dim() - 2 - positions))
    # A sample without a position that counts has the row 0, which conditions nothing.
    return view.masked_fill(~counts, 0).sum(dims, dtype=dtype) / counts.sum(dims).clamp_min(1)
