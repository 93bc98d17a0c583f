"""LSTM, GRU, RNN and their cells: each matrix is conditioned by what it multiplies, inputs or hidden states.

Torch's own code runs over a copy of its global names in which the kernels are ours: they call torch's with the weights under
other names. Several layers are run one by one, because their hidden states are the rows.
"""

import contextlib
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import rnn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from isaac_newton.core.gradient import condition
from isaac_newton.core.late import LateOperation, apply_late
from isaac_newton.core.layer import ConditionedLayer
from isaac_newton.core.rows import cast, working_dtype
from isaac_newton.layers.borrowed import names_of, over
from isaac_newton.layers.registry import register
from isaac_newton.torch_private import RECURRENT_KERNELS, recurrent_kernel

__all__: list[str] = []

#: The hidden state of a GRU or RNN; hidden state and cell state of an LSTM.
State: TypeAlias = Tensor | tuple[Tensor, ...]


class _Current(threading.local):
    """Whose forward pass is running in this thread."""

    site: ConditionedLayer | None = None


_CURRENT = _Current()


@register(nn.LSTM)
@register(nn.GRU)
@register(nn.RNN)
@register(nn.LSTMCell)
@register(nn.GRUCell)
@register(nn.RNNCell)
def _recurrent(layer: nn.Module, site: ConditionedLayer, *args: Any, **kwargs: Any) -> Any:
    _CURRENT.site = site
    try:
        return _FORWARDS[type(layer).forward](layer, *args, **kwargs)
    finally:
        _CURRENT.site = None


def _site() -> ConditionedLayer:
    assert _CURRENT.site is not None
    return _CURRENT.site


def _cell(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """One step of a cell: both of its factors are known before it runs."""

    def run(x: Tensor, state: State, w_x: Tensor, w_h: Tensor, b_x: Tensor | None, b_h: Tensor | None) -> Any:
        w_x, b_x = condition(w_x, b_x, x, _site())
        w_h, b_h = condition(w_h, b_h, _hidden(state), _site())
        return kernel(x, state, w_x, w_h, b_x, b_h)

    return run


def _hidden(state: State) -> Tensor:
    return state if isinstance(state, Tensor) else state[0]


def _stack(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel of torch for several layers, of sequences of one length or packed ones."""

    def run(x: Tensor, *args: Any) -> tuple[Tensor, ...]:
        if torch.compiler.is_compiling():
            from isaac_newton.core import uncompiled  # importing the compiler takes a second, and here it is there

            outside: tuple[Tensor, ...] = uncompiled.recurrent(run, x, *args)
            return outside
        sizes, batch_first = None, False
        if isinstance(args[1], list):
            start, weights, has_bias, count, dropout, training, both, batch_first = args
        else:
            sizes, start, weights, has_bias, count, dropout, training, both = args
        x = x.transpose(0, 1) if batch_first else x
        each, site = len(weights) // count, _site()
        reduce, mask = site.run.options.sharing == "reduce", site.run.mask
        if sizes is not None:
            # Rows that do not exist are not there; what a mask says of sequences side by side, packing has done.
            samples = torch.arange(int(sizes[0]), device=x.device)[:, None]
            mask = samples < sizes.to(x.device) if reduce else None
        projects = not isinstance(start, Tensor) and start[0].shape[-1] != start[1].shape[-1]
        rows_of = _RowsOf(sizes, 2 if both else 1, projects, reduce or mask is not None, mask)
        ends: list[tuple[Tensor, ...]] = []
        with _quiet_about_chunks() if x.is_cuda and count > 1 else contextlib.nullcontext():
            for number in range(count):
                here = slice(number * rows_of.directions, (number + 1) * rows_of.directions)
                begin = start[here] if isinstance(start, Tensor) else tuple(state[here] for state in start)
                layer = _layer(kernel, x, begin, has_bias, training, rows_of)
                x, *end = apply_late(layer, weights[number * each : (number + 1) * each], site)
                ends.append(tuple(end))
                if dropout and training and number < count - 1:
                    x = F.dropout(x, dropout)
        x = x.transpose(0, 1) if batch_first else x
        return x, *(torch.cat(states) if count > 1 else states[0] for states in zip(*ends, strict=True))

    return run


@contextlib.contextmanager
def _quiet_about_chunks() -> Iterator[None]:
    """One layer of several is no chunk of memory of its own: cuDNN copies its weights, and tells people to flatten them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
        yield


def _layer(
    kernel: Callable[..., Any], x: Tensor, start: State, has_bias: bool, training: bool, rows_of: "_RowsOf"
) -> LateOperation:
    """One layer of a stack, in one direction or both."""
    sizes, directions, projects = rows_of.sizes, rows_of.directions, rows_of.projects
    own = 2 + 2 * has_bias + projects
    places = [(0, 2 if has_bias else None), (1, 3 if has_bias else None), *([(own - 1, None)] if projects else [])]
    matrices = [(own * n + at, None if bias is None else own * n + bias) for n in range(directions) for at, bias in places]

    def results(weights: Sequence[Tensor]) -> Sequence[Tensor]:
        lengths, last = ((), (False,)) if sizes is None else ((sizes,), ())
        found: Sequence[Tensor] = kernel(
            x, *lengths, start, list(weights), has_bias, 1, 0.0, training, directions == 2, *last
        )  # outputs and last states
        return found

    def keep(results: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        outputs = zip(results[0].chunk(directions, -1), _hidden(start), strict=True)
        # Copies, so that who changes the output in place does not change the rows.
        before = [rows_of.before(output, first, backwards=n == 1) for n, (output, first) in enumerate(outputs)]
        # Where hidden states are projected, what that is computed from again.
        return [x, *before, *([start[1], *weights] if projects else [])]

    return LateOperation(results, keep, rows_of, matrices, rows_of.mask)


@dataclass(frozen=True, eq=False)
class _RowsOf:
    """What each matrix of a layer multiplies, from what was kept; (length, samples, features), or packed, one after another."""

    sizes: Tensor | None
    directions: int
    projects: bool
    by_sample: bool
    mask: Tensor | None

    def __call__(self, x: Tensor, *kept: Tensor) -> list[Tensor]:
        """Rows of inputs, of hidden states, and of what is projected, for each direction."""
        before, rest = kept[: self.directions], kept[self.directions :]
        inputs, rows = self._arranged(x), []
        for number, states in enumerate(before):
            rows += [inputs, self._arranged(states)]
            if self.projects:
                cells, weights = rest[0][number], rest[1:]
                own = len(weights) // self.directions
                mine = weights[number * own : (number + 1) * own]
                rows.append(self._arranged(self._unprojected(x, states, cells, mine, backwards=number == 1)))
        return rows

    def before(self, output: Tensor, start: Tensor, *, backwards: bool) -> Tensor:
        """The hidden states that each position began with."""
        if self.sizes is None:
            return torch.cat([output[1:], start[None]] if backwards else [start[None], output[:-1]])
        sizes = self.sizes.tolist()
        steps = output.split(sizes)
        if not backwards:
            return torch.cat([start, *(step[:size] for step, size in zip(steps[:-1], sizes[1:], strict=True))])
        later = (*steps[1:], output[:0])
        return torch.cat([part for step, size in zip(later, sizes, strict=True) for part in (step, start[len(step) : size])])

    def _arranged(self, x: Tensor) -> Tensor:
        """Samples first where it matters which sample a row is of."""
        if not self.by_sample:
            return x
        if self.sizes is None:
            return x.transpose(0, 1)
        return pad_packed_sequence(PackedSequence(x, self.sizes), batch_first=True)[0]

    def _unprojected(self, x: Tensor, states: Tensor, cell: Tensor, weights: Sequence[Tensor], *, backwards: bool) -> Tensor:
        """An LSTM's hidden states before their projection, which torch does not return: gates at once, cells one by one."""
        dtype = working_dtype(cell.dtype)
        w_x, w_h, *biases = (cast(weight, dtype) for weight in weights[:-1])
        gates = F.linear(cast(x, dtype), w_x) + F.linear(cast(states, dtype), w_h) + sum(biases)
        enter, stay, new, leave = gates.chunk(4, -1)
        cell, added, stay = cast(cell, dtype), enter.sigmoid() * new.tanh(), stay.sigmoid()
        lengths = [1] * len(x) if self.sizes is None else self.sizes.tolist()
        steps = list(zip(stay.split(lengths), added.split(lengths), strict=True))
        cells = []
        for kept, more in reversed(steps) if backwards else steps:
            kept, more = (kept[0], more[0]) if self.sizes is None else (kept, more)
            here = kept * cell[: len(kept)] + more
            cell = torch.cat([here, cell[len(here) :]])
            cells.append(here)
        ordered = cells[::-1] if backwards else cells
        return leave.sigmoid() * (torch.stack(ordered) if self.sizes is None else torch.cat(ordered)).tanh()


_KERNELS = {name: _stack(recurrent_kernel(name)) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")} | {
    name: _cell(recurrent_kernel(name)) for name in ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
}
_NAMES = names_of(rnn, **{RECURRENT_KERNELS: types.SimpleNamespace(**_KERNELS)})
#: Torch's code with our kernels.
_FORWARDS = {
    kind.forward: over(kind.forward, _NAMES) for kind in (nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell)
}
