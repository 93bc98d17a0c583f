"""Weights that enter torch's layers under other names, which one node of the graph gives to many of them."""

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from isaac_newton import torch_private
from isaac_newton.core.conditioner import multiply
from isaac_newton.core.gathering import gather
from isaac_newton.core.operations import copies
from isaac_newton.core.outputs import condition_left
from isaac_newton.core.rows import PLAIN
from isaac_newton.core.use import Use, made_for
from isaac_newton.torch_private import bears_none, hooks_of

__all__ = ["BUCKET", "Bucket", "OpenNode"]

#: So many neighbouring weights have one node of the graph between them.
BUCKET = 32
#: Makes a node for these conditions over these weights: `open_node(conditions, saved, *weights, copied=None)`.
OpenNode: TypeAlias = Callable[..., Sequence[Tensor]]


class Opening:
    """One node of the graph over the weights of a bucket, for one forward pass; plain gradients come back to it together."""

    def __init__(self, bucket: "Bucket", size: int, half: torch.dtype | None, copied: bool) -> None:
        self._bucket = weakref.ref(bucket)  # which has the names, and these have the node that has this
        #: The type to which autocast brings weights, and whether the names are copies in that type.
        self.half, self.is_copied = half, copied
        #: Of how many tensors it matters whether this pass wants their gradients: not of biases.
        self.size = size
        self.uses: list[weakref.ref[Use] | None] = [None] * size
        #: What calls have left whose graphs went before they were used, for gradients of gradients: no graph of their inputs.
        self.left: dict[int, Use] = {}
        #: In a pass now and then: what a copy was made of, the state of that, the copy, and the place of the weight.
        self.compared: list[tuple[Tensor, tuple[int, int], Tensor, int]] = []

    def condition(
        self, gradients: Sequence[Tensor | None], saved: Tensor | None, wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """Multiply those that are there and wanted, all at once, or with `when="step"` gather their rows."""
        self.close()
        if self.compared:
            self._compare_copies()
        result: list[Tensor | None] = [None] * len(gradients)
        if self.is_copied:
            gradients = _wide(gradients)
        result[self.size :] = gradients[self.size :]  # of biases
        here = [(n, self._use(n), gradient) for n, gradient in enumerate(gradients[: self.size]) if gradient is not None]
        chosen = [each for each in here if wanted[each[0]]]
        if not chosen:
            if here:
                self._leave_biases()
            return result
        numbers, uses, plain = zip(*chosen, strict=True)
        run = uses[0].layer.run
        started = run.clock.now() if run.clock.running else 0.0
        with torch_private.full_precision(plain[0]):
            for number, done in zip(numbers, _conditioned(uses, plain), strict=True):
                result[number] = done
        if not torch_private.keeps_graph():
            for number, use in zip(numbers, uses, strict=True):
                use.kept = None
                self.left.pop(number, None)
        if len(chosen) < len(here):
            # A pass that asks for some weights only runs their neighbours too: from now on each weight is by itself.
            run.alone = True
        if started:
            run.clock.add(started)
        return result

    def close(self) -> None:
        """Its names are no longer to be taken."""
        bucket = self._bucket()
        if bucket is not None:
            bucket.close(self)

    def _compare_copies(self) -> None:
        """Whether somebody wrote to `weight.data` after the copies were made, which nothing else tells of."""
        pairs, self.compared = self.compared, []
        if pairs[0][0].is_cuda and torch.cuda.is_current_stream_capturing():
            return
        used = [each for each in pairs if self.uses[each[3]] is not None and _state(each[0]) == each[1]]
        bucket = self._bucket()
        if bucket is None or all(_has_bits_of(copy, weight) for weight, _, copy, _ in used):
            return
        bucket.may_copy = False
        warnings.warn(
            "a weight or bias was written to through .data while a forward pass ran under autocast, and that pass had its old "
            "numbers; from now on its neighbours have no copies made ahead. Write to it in torch.no_grad(), without .data",
            RuntimeWarning,
            stacklevel=2,
        )

    def _leave_biases(self) -> None:
        """A pass that asks for biases only runs all of their neighbours: from now on they are by themselves."""
        bucket = self._bucket()
        if bucket is not None:
            bucket.biases = [None] * len(bucket.biases)

    def _use(self, number: int) -> Use:
        """That of one weight, or what it has left."""
        reference = self.uses[number]
        use = None if reference is None else reference()
        if use is not None:
            return use
        left = self.left.get(number)
        if left is None:
            raise RuntimeError("Trying to backward through the graph a second time: pass retain_graph=True the first time")
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"layer {left.layer.name!r}: third derivatives need the graph of its input, which is gone: keep what the "
                "model returned until then"
            )
        return left


def _wide(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients of copies in half precision, as those of weights in float32."""
    there = [gradient for gradient in gradients if gradient is not None]
    if torch.is_grad_enabled() or not there or torch_private.is_one_of_many(there[0]):
        return [gradient if gradient is None else gradient.float() for gradient in gradients]
    wide = iter(copies(there, torch.float32))
    return [gradient if gradient is None else next(wide) for gradient in gradients]


def _conditioned(uses: Sequence[Use], gradients: Sequence[Tensor]) -> list[Tensor]:
    if uses[0].slice is not None:
        gather(uses, gradients)
        return list(gradients)
    made, run = made_for(uses), uses[0].layer.run
    matrices = [
        gradient if use.layout is PLAIN else use.layout.matrix(gradient, None, one.rows.groups)
        for use, one, gradient in zip(uses, made, gradients, strict=True)
    ]
    in_place = not (torch.is_grad_enabled() or run.inspecting)
    left = condition_left(uses, matrices, in_place=in_place) if run.conditions_outputs else matrices
    done = multiply(left, made, in_place=in_place)
    for place, (use, one, matrix, result) in enumerate(zip(uses, made, matrices, done, strict=True)):
        use.layer.saw(one, use.outputs, matrix, result, own=use.own)
        if use.layout is not PLAIN or result.dtype is not gradients[place].dtype:
            done[place] = use.layout.parts(result, gradients[place], None)[0]
    return done


class _Name(NamedTuple):
    """A weight and its bias under other names, the node they are from, and what the weight was when it got its own."""

    weight: Tensor
    bias: Tensor | None
    opening: Opening
    place: int
    address: int
    version: int
    #: Of the bias, both of these.
    state_of_bias: tuple[int, int] | None

    def is_of(self, weight: Tensor, half: torch.dtype | None) -> bool:
        """Whether the weight is still that: not swapped, and for a copy, not changed."""
        same = self.opening.half is half and self.address == weight.data_ptr()
        return same and (half is None or self.version == torch_private.version(weight))


class Bucket:
    """Neighbouring weights that enter torch's layers under other names, which one node of the graph gives them.

    Under autocast the names are copies in half precision, made in one go in place of one by one. Biases then come along, once
    a pass has used their layer, and no pass has used it twice: there autocast has one copy, where gradients meet in half
    precision. What is written to `weight.data` after the copies were made is seen in the backward pass, now and then.
    """

    def __init__(self) -> None:
        self.weights: list[Tensor] = []
        #: Those that may come along.
        self.biases: list[Tensor | None] = []
        #: By the number of the weight: who took its name last.
        self._users: dict[int, weakref.ref[Use]] = {}
        #: By the number of the weight: the names of the last node that nobody has taken yet.
        self._names: dict[int, _Name] = {}
        #: How many nobody took of those before.
        self._left = 0
        #: Whether copies are made, and how many nodes there were.
        self.may_copy, self._opened_so_far = True, 0

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_names": {}, "_users": {}}

    def add(self, weight: Tensor, bias: Tensor | None) -> int:
        """A weight gets its number."""
        self.weights.append(weight)
        self.biases.append(bias)
        return len(self.weights) - 1

    def close(self, opening: Opening) -> None:
        """A backward pass is here: names that nobody took would keep its graph, and tie the next one to its stream."""
        if self._last() is opening:
            self._left, self._names = len(self._names), {}

    def forget_copies(self) -> None:
        """An optimizer has stepped. Some write to `weight.data`, which a weight does not tell."""
        last = self._last()
        if last is not None and last.is_copied:
            self.close(last)

    def _last(self) -> Opening | None:
        """Where the names are from that nobody has taken yet."""
        name = next(iter(list(self._names.values())), None)  # a list: another thread may take one meanwhile
        return None if name is None else name.opening

    def take(
        self, use: Use, number: int, bias: Tensor | None, half: torch.dtype | None, open_node: OpenNode
    ) -> tuple[Tensor, Tensor | None]:
        """The names of weight and bias in the node that is open; if they are used up, a new one is opened. The use waits.

        A second use finds the name used up. So each use has its own gradient: layers used twice and stray forward passes too.
        Several threads may do this at once: a name is taken by one of them, together with the node that it belongs to.
        """
        if half is not None and self._is_used(number):
            self.biases[number] = None
        found = self._names.pop(number, None)
        if found is None or not found.is_of(self.weights[number], half):
            names = self._opened(number, half, open_node)
            found = names.pop(number)
            self._names = names or self._names
        name, of_bias, opening, place = found[:4]
        use.opening = opening, place
        opening.uses[place] = self._users[number] = use.wait()
        if of_bias is None or bias is None or bias is not self.biases[number] or found.state_of_bias != _state(bias):
            return name, bias
        return name, of_bias

    def _is_used(self, number: int) -> bool:
        """Whether a call waits for its backward pass."""
        user = self._users.get(number)
        use = None if user is None else user()
        return use is not None and use.kept is not None

    def _opened(self, number: int, half: torch.dtype | None, open_node: OpenNode) -> dict[int, _Name]:
        """The names that a new node gives to all weights that are trained, but for those with hooks.

        Where nobody calls its layer a hook would be called without a gradient. So such a weight is in a node of its own.
        """
        hooked = [n for n, weight in enumerate(self.weights) if hooks_of(weight) and not bears_none(weight)]
        live = [n for n, weight in enumerate(self.weights) if weight.requires_grad and n not in hooked]
        live = [number] if number in hooked else live
        weights, size = [self.weights[number] for number in live], len(live)
        copied = self.may_copy and half is not None and all(weight.dtype is torch.float32 for weight in weights)
        # Where most layers were not called, as experts may not be, autocast shall copy the weights of those that are.
        copied = copied and 2 * (self._left or len(self._names)) <= size
        self._left = 0
        biases = [(n, b) for n in live if (b := self.biases[n]) is not None and self._goes_along(n, b)] if copied else []
        opening = Opening(self, size, half, copied)
        names = open_node(opening, None, *weights, *[bias for _, bias in biases], copied=half if copied else None)
        of_biases = {number: name for (number, _), name in zip(biases, names[size:], strict=True)}
        states = {number: _state(bias) for number, bias in biases}
        self._opened_so_far += 1
        if copied and self._opened_so_far & (self._opened_so_far - 1) == 0:  # the first, second, fourth, eighth …
            places = [*range(size), *[live.index(number) for number, _ in biases]]
            made_of = [*weights, *[bias for _, bias in biases]]
            opening.compared = [(x, _state(x), name.detach(), n) for x, name, n in zip(made_of, names, places, strict=True)]
        found = {}
        for place, (number, weight) in enumerate(zip(live, weights, strict=True)):
            name, of_bias, version = names[place], of_biases.get(number), torch_private.version(weight)
            found[number] = _Name(name, of_bias, opening, place, weight.data_ptr(), version, states.get(number))
        return found

    def _goes_along(self, number: int, bias: Tensor) -> bool:
        """Whether a bias gets a copy too; one with a hook does not, as with weights."""
        is_known = number in self._users and not self._is_used(number)
        is_usual = bias.requires_grad and bias.is_leaf and bias.dtype is torch.float32
        return is_known and is_usual and not torch_private.is_hooked(bias)


def _has_bits_of(copy: Tensor, x: Tensor) -> bool:
    """Whether a copy in half precision is what would be made of it now; NaN is NaN."""
    return torch.equal(copy.view(torch.int16), x.detach().to(copy.dtype).view(torch.int16))


def _state(x: Tensor) -> tuple[int, int]:
    """What changes when it is swapped, or changed in place."""
    return x.data_ptr(), torch_private.version(x)
