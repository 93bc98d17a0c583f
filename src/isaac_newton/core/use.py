"""What a layer received, and the conditioners of all that wait for one."""

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import Node

from isaac_newton import torch_private
from isaac_newton.core.conditioner import Conditioner, invert, multiply
from isaac_newton.core.gathering import gather
from isaac_newton.core.layer import ConditionedLayer
from isaac_newton.core.moments import WeightSlice
from isaac_newton.core.options import MOST_WAITING, Run
from isaac_newton.core.outputs import condition_left
from isaac_newton.core.rows import PLAIN, Arrange, Layout, Rows, of_all_ranks, rows, sequence
from isaac_newton.kernels import streams
from isaac_newton.torch_private import raw_stream

if TYPE_CHECKING:
    from isaac_newton.core.bucket import Opening

__all__ = ["Alone", "Use", "conditioners", "has_own_form", "made_for", "multiplied"]

#: A device, a stream and a thread.
_NOWHERE = (-1, 0, 0)


@dataclass(eq=False)
class Use:
    """One call of a layer. The graph of that call owns it; everybody else has a weak reference.

    Attributes:
        kept: The input with its graph; None once nobody needs it, and where autograd keeps it elsewhere.
        own: Whether the layer's own rows are those of its conditioner (see `multiply_own`).
        slice: With `when="step"`, whose gradient its rows are gathered for.
        made: The conditioner, of the backward pass `made_in`.
        gbar: For ζ: the output gradients of the extra passes.
        left: For ζ of drawn rows: those of the output gradients, of the backward pass `left_in`.
        output: For ζ in a captured step: the conditioner of the output side.
        branch: In a captured step, whose stream it runs on.
        node: With `process_group`, what will ask for the conditioner.
        opening: The bucket's node that its gradient comes back to, and its place there.
        source: Under autocast, what stands for the tensor of which `kept` is a copy in half precision.
        lane: How a GPU forms its rows, if that is known (see `rows`).
    """

    layer: ConditionedLayer
    layout: Layout
    kept: Tensor | None
    mask: Tensor | None
    own: bool
    outputs: int
    slice: WeightSlice | None = None
    # What few uses have is no argument: until it is set, it is read from the class, and there are many uses.
    where: tuple[int, int, int] = field(default=_NOWHERE, init=False)
    made: Conditioner | None = field(default=None, init=False)
    made_in: int = field(default=-2, init=False)
    gbar: list[Tensor] | None = field(default=None, init=False)
    left: Rows | None = field(default=None, init=False)
    left_in: int = field(default=-2, init=False)
    output: Conditioner | None = field(default=None, init=False)
    branch: object = field(default=None, init=False)
    node: "weakref.ref[Node] | None" = field(default=None, init=False)
    source: object = field(default=None, init=False)
    lane: str | None = field(default=None, init=False)
    opening: "tuple[Opening, int] | None" = field(default=None, init=False)

    def __del__(self) -> None:
        """The graph of the call is gone. What is left of it may still be differentiated, as a gradient that was kept."""
        if self.opening is not None and self.kept is not None:
            opening, place = self.opening
            opening.close()  # names that nobody took would hold what is left, and that holds the model
            x = torch_private.detached(self.kept)  # a graph would hold the node: nobody would free that circle
            left = Use(self.layer, self.layout, x, self.mask, self.own, self.outputs, self.slice)
            left.where = self.where
            opening.left[place] = left

    @property
    def input(self) -> Tensor:
        """What the layer received."""
        if self.kept is None:
            raise RuntimeError("Trying to backward through the graph a second time: pass retain_graph=True the first time")
        return self.kept

    @property
    def key(self) -> Hashable:
        """What another use has if its conditioner is this one's."""
        layout, mask = self.layout, self.mask
        known = self.source
        if known is None:
            x = self.input
            known = id(x), torch_private.version(x)
        return known, None if layout is PLAIN else layout, None if mask is None else id(mask), self.own

    def in_type(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The input in the type in which it is multiplied: autograd keeps that one, so no other is kept."""
        if x.requires_grad and x.is_leaf:
            return x  # autocast has one copy of it for all who multiply it, where their gradients meet
        self.source = self.layer.run.source_of(x)
        self.kept = half = x.to(dtype)
        return half

    def wait(self) -> "weakref.ref[Use]":
        """Let the first request of a backward pass compute the conditioner with those of all others."""
        device = self.kept.get_device()  # type: ignore[union-attr]
        # What another thread is about to use is left to it: it may release its inputs at any time.
        self.where = device, raw_stream(device) if device >= 0 else 0, get_ident()
        run, reference = self.layer.run, weakref.ref(self)
        if len(run.waiting) >= run.look_at:
            run.waiting[:] = [reference for reference in run.waiting if reference() is not None]
            # So that many graphs that are alive are not looked through again and again.
            run.look_at = max(MOST_WAITING, 2 * len(run.waiting))
        run.waiting.append(reference)
        return reference

    def compute(self, now: int) -> None:
        """The conditioners of all that wait on this device and stream, and came from this thread, in one go."""
        if self.layer.run.options.ranks is not None:
            self.made, self.made_in = self._made_with_ranks(), now
            return
        waiting, together, others = self.layer.run.waiting, [], []
        for reference in waiting:
            use = reference()
            if use is not None and use.kept is not None:
                if use.where == self.where:
                    together.append(use)
                else:
                    others.append(reference)
        waiting[:] = others
        # In the order of the forward pass, whoever asks: libraries round by where a matrix lies.
        together = together if self in together else [self, *together]
        for use, made in zip(together, conditioners(together), strict=True):
            use.made, use.made_in = made, now

    def _made_with_ranks(self) -> Conditioner:
        """The first request of a pass gathers the rows of all ranks for all layers of that pass, in an order of their own."""
        made, waiting = self.layer.run.made, self.layer.run.waiting
        if not made:
            torch_private.after_backward(made.clear)
        if self.key not in made:
            alive = [use for reference in waiting if (use := reference()) is not None and use.kept is not None]
            together = [use for use in alive if use.runs_now()]
            waiting[:] = [weakref.ref(use) for use in alive if use not in together]
            together = together if self in together else [self, *together]
            for use, one in zip(together, conditioners(together), strict=True):
                # With the input, so that no other one takes its identity meanwhile.
                made[use.key] = one, use.input
        return made[self.key][0]

    def own_node(self, name: Tensor) -> None:
        """The node that gave the weight this name will ask for the conditioner."""
        self.node = None if name.grad_fn is None else weakref.ref(name.grad_fn)

    def runs_now(self) -> bool:
        """Whether the backward pass that is running comes to this use."""
        node = None if self.node is None else self.node()
        return node is not None and torch_private.will_compute(node)


def conditioners(uses: Sequence[Use], *, early: bool = False) -> list[Conditioner]:
    """Stages 1 to 3, once for each key; failures go to the layers' statistics."""
    keys: list[Hashable] = [use.key for use in uses] if len(uses) > 1 else [None]
    # The first of each key, in their order: turned round, the first one of a key is the last to be written.
    first = dict(zip(reversed(keys), reversed(uses), strict=True))
    distinct = uses if len(first) == len(uses) else [first[key] for key in dict.fromkeys(keys)]
    run = distinct[0].layer.run
    strength, relative = run.damping_now()
    gathered, options = rows(distinct), run.options
    if options.ranks is not None and options.when == "backward":
        gathered = of_all_ranks(distinct, gathered, options.ranks)
    found = invert(gathered, strength, relative, early=early, keep_norm=options.keep_norm)
    for use, made in zip(distinct, found, strict=True):
        if isinstance(made.failures, Tensor) or made.failures:
            use.layer.fell_back(made.failures)
    if len(found) == len(uses):
        return found
    by_key = dict(zip(dict.fromkeys(keys), found, strict=True))
    return [by_key[key] for key in keys]


def has_own_form(x: Tensor, layer: ConditionedLayer, arrange: Arrange) -> bool:
    """Whether every row of a linear layer feeds its conditioner, so that this can stand between g and a; ζ needs that.

    It saves a product where rows are fewer than features. Else it saves digits: conditioned rows are rounded once, after it.
    """
    if not isinstance(x, Tensor) or x.is_nested or x.layout is not torch.strided:
        _refuse(x, layer)
    run, options = layer.run, layer.run.options
    if options.max_rows is not None and x.numel() > options.max_rows * x.shape[-1]:
        return False
    if run.mask is not None or run.row_observer is not None or not options.is_of_each_pass:
        return False
    expands = options.sharing == "expand"
    if options.keep_norm and _is_done_together(x, run):
        return expands and x.numel() >= x.shape[-1] ** 2
    return expands or (x.dim() <= 2 and arrange is sequence)


def _is_done_together(x: Tensor, run: Run) -> bool:
    """Whether kernels keep the norms of all layers together, while this form is a few products for each."""
    return x.is_cuda and run.capture is None and not run.conditions_outputs


def _refuse(x: object, layer: ConditionedLayer) -> NoReturn:
    if not isinstance(x, Tensor):
        raise TypeError(f"layer {layer.name!r} received a {type(x).__name__} in the place of a tensor")
    kind = "nested" if x.is_nested else "sparse"
    raise TypeError(
        f"layer {layer.name!r} received a {kind} tensor, and conditioners are made of dense rows: give it a dense one, or "
        "leave the layer out with layers="
    )


class Alone:
    """One weight under another name, and with it the bias where that is conditioned jointly: a bucket of one."""

    size = 2

    def __init__(self, use: Use) -> None:
        self.use = use

    def condition(
        self, gradients: Sequence[Tensor | None], saved: Tensor | None, wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """Multiply the gradients, or with `when="step"` gather the rows."""
        use, weight = self.use, gradients[0]
        if weight is None or not any(wanted):
            return list(gradients)
        clock = use.layer.run.clock
        started = clock.now() if clock.running else 0.0
        if saved is not None:
            use.kept = saved
        bias = gradients[1] if len(gradients) > 1 else None
        if use.layout.joint and bias is None and wanted[1]:
            bias = weight.new_zeros(use.outputs)
        with torch_private.full_precision(weight):
            if use.slice is not None:
                gather([use], [weight])
                result = list(gradients)
            else:
                if use.made is not None and use.made_in < 0:
                    streams.join(use.branch)  # in a captured step it was computed beside the forward pass
                result = list(multiplied(use, weight, bias, in_place=False)[: len(gradients)])
        if saved is not None or not torch_private.keeps_graph():
            use.kept = None
        if started:
            clock.add(started)
        return result


def multiplied(use: Use, weight: Tensor, bias: Tensor | None, *, in_place: bool) -> tuple[Tensor, Tensor | None]:
    """The gradient of one weight, and of the bias where that is conditioned with it; `in_place` allows to write to it."""
    (made,) = made_for([use])
    matrix = use.layout.matrix(weight, bias, made.rows.groups)
    left = condition_left([use], [matrix], in_place=in_place) if use.layer.run.conditions_outputs else [matrix]
    (done,) = multiply(left, [made], in_place=in_place)
    use.layer.saw(made, use.outputs, matrix, done, own=use.own)
    return use.layout.parts(done, weight, bias)


def made_for(uses: Sequence[Use]) -> list[Conditioner]:
    """Those of the current pass. The first request of a pass computes those of all waiting uses."""
    run, result = uses[0].layer.run, []
    now = run.enter_pass()
    if torch.is_grad_enabled():
        return [conditioners([use])[0] for use in uses]  # with their graphs
    for use in uses:
        if use.made is None or (use.made_in != now and run.capture is None):
            use.compute(now)
        assert use.made is not None
        result.append(use.made)
        if run.capture is None:
            use.made = None  # a second pass through a kept graph asks anew
    return result
