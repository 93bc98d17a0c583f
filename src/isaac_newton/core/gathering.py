"""What backward passes have gathered for the gradient of one parameter, for `when="step"`: rows count where it is accumulated.

The rows of a pass wait until the parameter has received its gradient in that pass, and are dropped with the gradient.
"""

import functools
import threading
import weakref
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from isaac_newton import torch_private
from isaac_newton.core.distributed import is_sharded
from isaac_newton.core.moments import Moment, WeightSlice
from isaac_newton.core.options import Run
from isaac_newton.core.rows import Rows, rows

if TYPE_CHECKING:
    from isaac_newton.core.use import Use

__all__ = ["Gathering", "Part", "gather", "part_of"]


class Part(NamedTuple):
    """What one input adds to the second moments of the layers that received it."""

    moment: Moment
    #: Groups, rows that feed a conditioner, and features; rows that the layer multiplied.
    shape: torch.Size
    total: int


def part_of(found: Rows, *, keep: bool) -> Part:
    """The second moment of these rows."""
    r = found.r if found.r.dim() == 3 else found.r[None]
    count = r.shape[1] if found.counted is None else found.counted.sum()
    return Part(Moment.of_rows(r, count, keep=keep), r.shape, found.total)


def gather(uses: "Sequence[Use]", gradients: Sequence[Tensor]) -> None:
    """Form the rows of these uses and keep them for the step, unless it will not look at them; gradients stay as they are."""
    run, now = uses[0].layer.run, torch_private.current_pass()
    here: list[tuple[Hashable, Use, WeightSlice, Tensor]] = []
    missing: dict[Hashable, Use] = {}
    for use, gradient in zip(uses, gradients, strict=True):
        assert use.slice is not None
        if use.layer.rests(use.slice):
            use.layer.pass_by(use.slice, gradient)
            continue
        key: Hashable = (now, use.key)
        here.append((key, use, use.slice, gradient))
        if key not in run.parts or run.parts[key][0]() is not use.input:
            missing.setdefault(key, use)
    for (key, use), found in zip(missing.items(), rows(list(missing.values())) if missing else [], strict=True):
        run.parts[key] = weakref.ref(use.input), part_of(found, keep=run.options.keeps_rows)
    for key, use, where, gradient in here:
        use.layer.take(where, run.parts[key][1], gradient)


_LOCK = threading.RLock()


class Gathering:
    """Belongs to one parameter of a layer.

    Attributes:
        moments: Of each matrix that the parameter holds: what its gradient consists of, and what lasts beyond a step.
        grown: Whether the gradient has grown since the last step.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.moments: dict[WeightSlice, Moment] = {}
        self._shape: torch.Size | None = None
        self._hooks: list[tuple[weakref.ref[Tensor], RemovableHandle]] = []
        #: For passes that are running: the parameter, and what was gathered; None once that has received its gradient.
        self._waiting: dict[int, tuple[Tensor, dict[WeightSlice, Moment]] | None] = {}
        #: Under FSDP2: the optimizer's parameter. Gradients wait in places of their own before they arrive there.
        self._home: Tensor | None = None
        self._gradient: tuple[TensorWeakRef, int] | None = None
        #: Whether that had a number other than zero, and its version: what is cleared later has another, or no zeros before.
        self._filled: tuple[Tensor | bool, int] = True, -1
        self._changes = -1
        #: Whether a gradient was cleared since the last step.
        self._dropped = False
        #: The version of the parameter in the last pass whose gradient went elsewhere.
        self._lent_at = -1
        self._forget()

    def _forget(self) -> None:
        for moment in self.moments.values():
            moment.clear()
        self.grown = self._arrived = self._by_hand = self._strange = self._is_lent = False
        #: After such a pass: the gradient as backward passes have left it, and its version then.
        self._left: tuple[Tensor, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy has parameters and backward passes of its own. Its moments forget by themselves what they have gathered.
        nothing = Gathering(self._run)
        return {**vars(nothing), "moments": self.moments}

    # ------------------------------------------------------------------------------------------------ in a backward pass

    def enter(self, parameter: Tensor) -> dict[WeightSlice, Moment]:
        """What the current backward pass gathers: it waits here until the parameter has its gradient."""
        now = torch_private.current_pass()
        waiting = self._waiting.get(now)
        if now not in self._waiting:
            self.watch(parameter)
            with _one_at_a_time():
                self.settle(parameter)
            self._by_hand |= self._run.gathering
            if not torch.compiler.is_compiling():  # as compiled autograd is, which cannot tell when it ends
                torch_private.after_backward(functools.partial(self._leave, now, parameter))
        if waiting is None:
            waiting = self._waiting[now] = parameter, {}
        return waiting[1]

    def watch(self, parameter: Tensor) -> None:
        """Be told when this parameter has received a gradient."""
        if self._shape != parameter.shape:
            if self._shape is not None:
                self.moments.clear()  # averages are of a weight of another size
            self._shape = parameter.shape
        if not any(known() is parameter for known, _ in self._hooks):
            hook = parameter.register_post_accumulate_grad_hook(functools.partial(_tell, weakref.ref(self)))
            self._hooks = [(known, hook) for known, hook in self._hooks if known() is not None]
            self._hooks.append((weakref.ref(parameter), hook))
        if is_sharded(parameter):
            self._home = parameter

    def close(self) -> None:
        """Do not watch any longer."""
        for _, hook in self._hooks:
            hook.remove()
        self._hooks = []

    def settle(self, parameter: Tensor) -> None:
        """Drop what belongs to a gradient that was cleared since."""
        if self._run.gathering:
            return  # these passes leave no gradient
        if self._home is not None:
            if self._arrived and self._home.grad is None:
                self.drop(parameter)
            return
        gradient = parameter.grad
        if gradient is None:
            self.drop(parameter)
        elif self.grown or not self._is_known(gradient):
            there = self._is_still_there(gradient)
            if isinstance(there, Tensor) and self._run.bound and self._is_known(gradient):
                for moment in self.moments.values():
                    moment.keep_if(there)  # nothing waits for the device
            elif not there:
                self.drop(parameter)
            elif not any(self._waiting.values()):  # another thread's pass may have left it, and not told yet
                self._strange |= not self._explains(gradient)

    def _is_still_there(self, gradient: Tensor) -> Tensor | bool:
        """Whether it was not cleared; on a GPU not known yet. One without numbers was not, if a pass has left it so."""
        there = _is_filled(gradient)
        before, version = self._filled
        if self._is_known(gradient) and version == torch_private.version(gradient):
            return there | ~before if isinstance(before, Tensor) else there or not before
        return there

    def drop(self, parameter: Tensor | None = None) -> None:
        """Forget what was gathered since the last step."""
        if self.grown:
            self._dropped = True
            if parameter is not None:
                self._run.note_dropped(changed=torch_private.version(parameter) != self._changes)
        self._forget()

    def _accumulated(self, parameter: Tensor) -> None:
        self._arrived |= parameter is self._home
        now = torch_private.current_pass()
        waiting = self._waiting.get(now)
        if waiting is None:
            return
        if waiting[0] is parameter:
            self.take_in(now)
            if torch.compiler.is_compiling():
                self._remember(parameter)  # there is no end of the pass
        elif parameter is not self._home:
            self._run.warn_about_lent()

    def take_in(self, which: int) -> None:
        """The parameter has received its gradient of this pass."""
        waiting = self._waiting.get(which)
        if waiting is None:
            return
        with _one_at_a_time():
            self._waiting[which] = None
            for where, moment in waiting[1].items():
                self.moments.setdefault(where, Moment()).absorb(moment)
            self.grown = self._run.fresh = True

    def _leave(self, which: int, parameter: Tensor) -> None:
        """The pass is over. What still waits was for somebody else: `autograd.grad` accumulates nothing."""
        self._run.parts.clear()
        if self._run.gathering:
            self.take_in(which)
        if self._waiting.pop(which, None) is None:
            self._remember(parameter)  # DistributedDataParallel may have put another tensor in its place
        else:
            self._is_lent, version = True, torch_private.version(parameter)
            if self._lent_at not in (-1, version) and not self._run.bound:
                self._run.note_dropped(changed=True)  # who changes the weights, changes them by plain gradients
            self._lent_at = version
        gradient = parameter.grad
        if self._is_lent and self._home is None and gradient is not None and gradient.layout is torch.strided:
            version = torch_private.version(gradient)
            if self._left is None or self._left[1] != version:
                self._left = gradient.detach().clone(), version  # what is added to it in place afterwards can be seen then

    def _remember(self, parameter: Tensor) -> None:
        gradient, self._changes = parameter.grad, torch_private.version(parameter)
        self._gradient = None if gradient is None else (TensorWeakRef(gradient), _address(gradient))
        if gradient is not None and self._home is None and not torch.compiler.is_compiling():
            self._filled = _is_filled(gradient), torch_private.version(gradient)

    # ------------------------------------------------------------------------------------------------------ at the step

    def explains(self, gradient: Tensor) -> bool:
        """Whether this gradient is that of the passes whose rows were gathered, as far as one can see."""
        return not self._strange and self._explains(gradient) and not self._has_more(gradient)

    def _has_more(self, gradient: Tensor) -> bool:
        """Whether something was added in place after a pass whose gradient went elsewhere: scaling and clipping only shrink."""
        if self._left is None or self._left[0].shape != gradient.shape:
            return False
        left, version = self._left
        if self._is_known(gradient) and version == torch_private.version(gradient):
            return False
        share = torch.where(left == 0, torch.zeros_like(left), gradient / left)
        most = share.amax()
        is_scaled = torch.allclose(gradient, most * left, rtol=1e-3, atol=0.0)
        is_clipped = bool(((share >= 0) & (share <= 1)).all()) and not bool(gradient[left == 0].any())
        return not (is_scaled or is_clipped)

    def _explains(self, gradient: Tensor) -> bool:
        return self._by_hand or self._is_known(gradient) or (self.grown and not self._dropped)

    def _is_known(self, gradient: Tensor) -> bool:
        """Whether backward passes have left this tensor, whatever happened to its numbers since."""
        if self._home is not None:
            return True
        return self._gradient is not None and (self._gradient[0]() is gradient and self._gradient[1] == _address(gradient))

    def join(self, other: "Gathering", parameter: str) -> None:
        """Take over what another layer with the same parameter, which bears this name here, has gathered."""
        for where, moment in other.moments.items():
            mine = self.moments.setdefault(where._replace(parameter=parameter), Moment())
            mine.form = moment.form  # on ranks that saw nothing of it, too
            if moment.gathered:
                mine.absorb(moment)
        self.grown |= other.grown
        self._by_hand |= other._by_hand
        self._dropped |= other._dropped
        self._strange |= other._strange
        self._gradient = self._gradient or other._gradient
        other.consume()

    def consume(self) -> None:
        """After the step: begin anew."""
        self._forget()
        self._run.parts.clear()  # compiled autograd does not tell when a pass ends
        self._dropped = False
        # Of a pass that ended in an exception.
        now = torch_private.current_pass()
        self._waiting = {which: waiting for which, waiting in self._waiting.items() if which == now}


def _one_at_a_time() -> AbstractContextManager[Any]:
    """Backward passes in several threads end as they like. The compiler knows no locks, and no threads either."""
    return nullcontext() if torch.compiler.is_compiling() else _LOCK


def _tell(gathering: "weakref.ref[Gathering]", parameter: Tensor) -> None:
    """A hook on a parameter. What it holds the collector cannot see, and that must not be the model."""
    told = gathering()
    if told is not None:
        told._accumulated(parameter)


def _is_filled(gradient: Tensor) -> Tensor | bool:
    """Whether it has a number other than zero; on a GPU not known yet."""
    numbers = torch_private.sparse_parts(gradient)[0] if gradient.is_sparse else gradient
    if numbers.is_cuda:
        return numbers.any()
    return bool(numbers[:1].any()) or bool(numbers.any())  # one row tells it nearly always, and at once


def _address(gradient: Tensor) -> int:
    return gradient.data_ptr() if gradient.layout is torch.strided else 0
