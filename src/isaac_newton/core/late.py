"""Layers whose rows are known only when they have run: recurrent weights multiply hidden states, which are results.

A node below the results keeps what rows are made of. Going back it runs first, and gives them to the weights' nodes. These
could not keep rows themselves: rows hold the graph that holds the nodes, and nobody would free that circle.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from isaac_newton import torch_private
from isaac_newton.core import traced
from isaac_newton.core.gradient import hand_out, is_joint, observe
from isaac_newton.core.layer import ConditionedLayer
from isaac_newton.core.rows import layout_of, sequence
from isaac_newton.core.use import Alone, Use

__all__ = ["LateOperation", "apply_late"]

Tensors: TypeAlias = Sequence[Tensor]
#: Of what was kept, the rows of each matrix: (samples, *positions, features).
RowsOf: TypeAlias = Callable[..., Tensors]


@dataclass(frozen=True, eq=False)
class LateOperation:
    """A function of weights that returns tensors.

    Attributes:
        results: The function.
        keep: What rows are made of, from results and weights.
        rows_of: Makes rows of what was kept. It holds no tensor of the graph itself.
        matrices: Where in the list of weights each matrix stands, and where its bias.
        mask: Which positions count.
    """

    results: Callable[[Tensors], Tensors]
    keep: Callable[[Tensors, Tensors], Tensors]
    rows_of: RowsOf
    matrices: Sequence[tuple[int, int | None]]
    mask: Tensor | None


def apply_late(operation: LateOperation, weights: Tensors, layer: ConditionedLayer) -> tuple[Tensor, ...]:
    """The results, bit for bit; the gradient of each matrix will be conditioned by the rows that this gives."""
    if traced.is_traced():
        return _traced(operation, weights, layer)
    uses: list[Use | None] = []
    names = list(weights)
    known = _Known(operation.rows_of, uses)
    for matrix, place in operation.matrices:
        weight, bias = weights[matrix], None if place is None else weights[place]
        uses.append(_use_of(weight, bias, operation.mask, layer) if weight.requires_grad else None)
        use = uses[-1]
        if use is None or layer.run.row_observer is not None:
            continue
        joint = [bias] if bias is not None and use.layout.joint else []
        names[matrix], *rest = hand_out(_Late(use, known), None, weight, *joint)
        use.own_node(names[matrix])
        for name in rest:
            assert place is not None
            names[place] = name
    results = tuple(operation.results(names))
    if not any(uses):
        return results
    kept = operation.keep(results, names)
    if layer.run.row_observer is not None:
        with torch.no_grad():
            known.take(kept)
        for use in filter(None, uses):
            observe(use)
        return results
    passed: tuple[Tensor, ...] = torch_private.call(_Results, known, kept, *results)
    return passed


def _use_of(weight: Tensor, bias: Tensor | None, mask: Tensor | None, layer: ConditionedLayer) -> Use:
    joint = is_joint(bias, layer)
    where = layer.slice(weight, bias=bias if joint else None) if layer.run.options.when == "step" else None
    return Use(layer, layout_of(sequence, joint=joint), None, mask, False, weight.shape[0], where)


class _Known:
    """The matrices of one call, and their rows for as long as a backward pass needs them."""

    def __init__(self, rows_of: RowsOf, uses: Sequence[Use | None]) -> None:
        self.rows_of, self.uses = rows_of, uses
        self.known_in = -1

    def take(self, kept: Tensors) -> None:
        """Make rows; with their graph only where gradients are differentiated."""
        if not torch.is_grad_enabled():
            kept = [each.detach() for each in kept]
        with torch_private.full_precision(kept[0]):
            for use, found in zip(self.uses, self.rows_of(*kept), strict=True):
                if use is not None:
                    use.kept = found

    def enter(self, kept: Tensors) -> None:
        """In a backward pass: the gradients that come now can be conditioned."""
        self.known_in = torch_private.current_pass()
        uses = [use for use in self.uses if use is not None]
        if all(use.slice is not None and use.layer.rests(use.slice) for use in uses):
            return
        self.take(kept)
        run = uses[0].layer.run
        if torch.is_grad_enabled():
            torch_private.after_backward(self.leave)
        elif run.capture is None and run.options.when == "backward":
            # In a captured step each is computed where its gradient is multiplied: on this stream.
            for use in uses:
                use.wait()

    def leave(self) -> None:
        """Rows with a graph would keep themselves."""
        for use in self.uses:
            if use is not None and use.kept is not None:
                use.kept = use.kept.detach()


class _Late(Alone):
    """One matrix under another name."""

    def __init__(self, use: Use, known: _Known) -> None:
        super().__init__(use)
        self._known = known

    def condition(
        self, gradients: Sequence[Tensor | None], saved: Tensor | None, wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """As of any weight, once the results have given the rows."""
        if torch.is_grad_enabled() and self._known.known_in != torch_private.current_pass():
            raise RuntimeError(
                f"layer {self.use.layer.name!r}: of recurrent layers there are no third derivatives, because the second "
                "backward pass does not reach the hidden states that condition it; leave the layer out with layers="
            )
        return super().condition(gradients, saved, wanted)


class _Results(torch.autograd.Function):
    """The results as they are; going back, the first to be asked."""

    @staticmethod
    def forward(ctx: Any, known: _Known, kept: Tensors, *results: Tensor) -> tuple[Tensor, ...]:
        ctx.known = known
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*kept)
        # Of views that a Function returns none may be changed in place.
        return tuple(result.detach() for result in results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.known.enter(ctx.saved_tensors)
        return None, None, *gradients

    @staticmethod
    def jvp(ctx: Any, known: None, kept: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if tangent is None else tangent.view_as(tangent) for tangent in tangents)


def _traced(operation: LateOperation, weights: Tensors, layer: ConditionedLayer) -> tuple[Tensor, ...]:
    """In torch.func nobody may hand rows from node to node. So the layer runs once more, with the rows that it had.

    And once more again: what derivatives of a conditioner add to a weight's gradient is conditioned too.
    """
    names = list(weights)
    for _ in range(2):
        kept = operation.keep(operation.results(names), names)
        for (matrix, place), r in zip(operation.matrices, operation.rows_of(*kept), strict=True):
            bias = None if place is None else weights[place]
            names[matrix], name = traced.condition(weights[matrix], bias, r, layer, sequence, False, operation.mask)
            if place is not None and name is not None:
                names[place] = name
    return tuple(operation.results(names))
