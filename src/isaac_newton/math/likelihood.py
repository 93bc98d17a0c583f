r"""Where ḡ comes from: the curvature of the loss with respect to the network's output, for each loss.

A loss is a sum or mean of terms $\ell(f, y) = -\log p(y \mid f)$. Its Hessian $\nabla^2_f \ell$ has a root that can be taken
column by column ("exact"), or estimated from labels drawn from the model's own $p(y \mid f)$ ("sampled", Remark 1).
Backpropagating a column or a sample to a layer's outputs gives ḡ there.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.nn import functional as F

__all__ = [
    "BinaryCrossEntropy",
    "CrossEntropy",
    "Likelihood",
    "LossFunction",
    "SquaredError",
    "check_loss",
    "likelihood_of",
    "scale_of",
]

Reduction: TypeAlias = Literal["mean", "sum"]


@runtime_checkable
class Likelihood(Protocol):
    r"""What `Handle.backward` needs to know of a loss of your own; pass an object with these as `loss_fn`.

    The loss is the mean (`reduction="mean"`) or sum of `terms(output)` terms $\ell$. `sample` returns, for one
    $\hat y \sim p(· | f)$ per term, the gradients $\nabla_f \ell(f, \hat y)$ in the shape of the output. `root` yields
    tensors $s_k$ in the shape of the output with $\sum_k s_k s_k^\top = \nabla^2_f \ell$ for each term; a tensor may carry
    one column for every term of the batch at once, as long as terms that meet in a layer (positions of one sequence) do
    not share one.
    """

    @property
    def reduction(self) -> Reduction:
        """Whether the loss averages its terms or sums them."""

    def terms(self, output: Tensor) -> int | Tensor:
        """How many terms the loss has for this output; a tensor if that is known on the device only."""

    def sample(self, output: Tensor) -> Tensor:
        """Gradients of the terms for labels drawn from the model."""

    def root(self, output: Tensor) -> Iterator[Tensor]:
        """Columns of a root of the Hessian of the terms."""


LossFunction: TypeAlias = Likelihood | nn.Module | Callable[..., Tensor]


@dataclass(frozen=True)
class CrossEntropy:
    r"""Categorical: $\nabla^2 \ell = \mathrm{diag}(p) - p p^\top$. Classes are dim 1, or dim 0 of an unbatched output."""

    reduction: Reduction = "mean"
    #: 1 where a target counts, 0 where `ignore_index` blanked it out; None: all count.
    counted: Tensor | None = None

    def observing(self, loss: Tensor, output: Tensor) -> "CrossEntropy":
        """Leave out the terms that the loss left out, because their target was `ignore_index`."""
        node: Any = _loss_node(loss, output, self)
        if node is not None:
            counted = (node._saved_target != node._saved_ignore_index).unsqueeze(_class_dim(output))
            if counted.dim() == output.dim() and counted.shape[0] == output.shape[0]:
                return replace(self, counted=counted)
        # In a loss of several parts, say: the terms left out are those without a gradient.
        (gradient,) = torch.autograd.grad(loss, output, retain_graph=True)
        return replace(self, counted=(gradient != 0).any(_class_dim(gradient), keepdim=True))

    def terms(self, output: Tensor) -> int | Tensor:
        """Targets that count."""
        if self.counted is not None:
            return self.counted.sum()
        return output.numel() // output.shape[_class_dim(output)]

    def sample(self, output: Tensor) -> Tensor:
        """P − onehot(ŷ)."""
        dim = _class_dim(output)
        p = _softmax(output)
        # The first of exponential clocks with rates p rings with probability p. `multinomial` would wait for the device.
        labels = (p / torch.empty_like(p).exponential_()).argmax(dim, keepdim=True)
        return self._only_counted(p.scatter_add(dim, labels, torch.full_like(p, -1.0).narrow(dim, 0, 1)), output)

    def root(self, output: Tensor) -> Iterator[Tensor]:
        """√p_k (e_k − p), for each class k and each position."""
        dim = _class_dim(output)
        p = _softmax(output)
        for k in range(p.shape[dim]):
            column = -p
            column.select(dim, k).add_(1)
            column = self._only_counted(column * p.select(dim, k).sqrt().unsqueeze(dim), output)
            yield from _by_position(column, keep=dim)

    def _only_counted(self, column: Tensor, output: Tensor) -> Tensor:
        return (column if self.counted is None else column * self.counted).to(output.dtype)


@dataclass(frozen=True)
class _OfEachOutput:
    """A loss of each output by itself: its terms are the samples, the first dimension."""

    reduction: Reduction = "mean"

    def terms(self, output: Tensor) -> int:
        """Samples."""
        return output.shape[0]

    def _averaged(self, output: Tensor) -> int:
        """How many outputs of one sample the loss averages."""
        return math.prod(output.shape[1:]) if self.reduction == "mean" else 1


@dataclass(frozen=True)
class SquaredError(_OfEachOutput):
    r"""Gaussian: $\nabla^2 \ell = 2 I$ for a sum of squares, $2 / C · I$ for a mean over the $C$ outputs of a sample."""

    def sample(self, output: Tensor) -> Tensor:
        """Standard normal, scaled to the Hessian's root."""
        return torch.randn_like(output) * math.sqrt(2 / self._averaged(output))

    def root(self, output: Tensor) -> Iterator[Tensor]:
        """One unit column per output."""
        yield from _by_position(torch.full_like(output, math.sqrt(2 / self._averaged(output))))


@dataclass(frozen=True)
class BinaryCrossEntropy(_OfEachOutput):
    r"""Bernoulli with logits: $\nabla^2 \ell = \mathrm{diag}(σ (1 - σ))$, over $C$ for a mean over $C$ outputs."""

    def sample(self, output: Tensor) -> Tensor:
        """σ − ŷ, scaled to the Hessian's root."""
        p = output.sigmoid()
        # Drawing with probability NaN raises; p itself carries it on, to where a GradScaler sees it.
        return (p - torch.bernoulli(p.nan_to_num(0.5))) / math.sqrt(self._averaged(output))

    def root(self, output: Tensor) -> Iterator[Tensor]:
        """One column per output."""
        # σ(−f) rather than 1 − σ(f), which is 0 in float32 from f = 17 on
        deviation = (output.sigmoid() * (-output).sigmoid()).sqrt()
        yield from _by_position(deviation / math.sqrt(self._averaged(output)))


_KNOWN: dict[object, type[CrossEntropy] | type[SquaredError] | type[BinaryCrossEntropy]] = {
    nn.CrossEntropyLoss: CrossEntropy,
    F.cross_entropy: CrossEntropy,
    nn.MSELoss: SquaredError,
    F.mse_loss: SquaredError,
    nn.BCEWithLogitsLoss: BinaryCrossEntropy,
    F.binary_cross_entropy_with_logits: BinaryCrossEntropy,
}


def likelihood_of(loss_fn: LossFunction) -> Likelihood:
    """The likelihood behind a loss: one torch knows, as module, function or `functools.partial` of it, or a `Likelihood`."""
    if isinstance(loss_fn, Likelihood) and not isinstance(loss_fn, type):
        return loss_fn
    base, options = _taken_apart(loss_fn)
    kind = _KNOWN.get(base) if isinstance(base, type) or callable(base) else None
    if kind is None:
        raise TypeError(
            f"handle.backward does not know the loss {loss_fn!r}: pass nn.CrossEntropyLoss, nn.MSELoss or nn.BCEWithLogitsLoss "
            "(or their functions), or an object that implements isaac_newton.Likelihood"
        )
    smoothing = options.get("label_smoothing") or 0.0
    if smoothing:
        raise ValueError(
            f"label_smoothing={smoothing} has no likelihood to draw labels from; use label_smoothing=0, or "
            "output_curvature='empirical' with loss.backward()"
        )
    for name in ("weight", "pos_weight"):
        if options.get(name) is not None:
            raise ValueError(f"{name}= of {loss_fn!r} is not supported; implement isaac_newton.Likelihood for a weighted loss")
    reduction = options.get("reduction") or "mean"
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    return kind("mean" if reduction == "mean" else "sum")


def _taken_apart(loss_fn: object) -> tuple[object, dict[str, object]]:
    """The class or function that is torch's, and the options that it will be called with."""
    if isinstance(loss_fn, functools.partial):
        return loss_fn.func, dict(loss_fn.keywords)
    if isinstance(loss_fn, nn.Module):
        names = ("reduction", "label_smoothing", "weight", "pos_weight")
        return type(loss_fn), {name: getattr(loss_fn, name, None) for name in names}
    return loss_fn, {}


#: What torch calls a loss in a graph.
_NODES: dict[type, tuple[str, ...]] = {
    CrossEntropy: ("NllLossBackward0", "NllLoss2DBackward0"),
    SquaredError: ("MseLossBackward0",),
    BinaryCrossEntropy: ("BinaryCrossEntropyWithLogitsBackward0",),
}


def scale_of(loss: Tensor, output: Tensor, likelihood: Likelihood) -> Tensor | None:
    """By how much the loss was multiplied (by a `GradScaler`, for accumulation); None if its graph does not tell."""
    node = _loss_node(loss, output, likelihood)
    if node is None:
        return None
    (scale,) = torch.autograd.grad(loss, [GradientEdge(node, 0)], retain_graph=True)
    return scale


#: Losses without a likelihood here.
_OTHERS = ("SmoothL1LossBackward0", "HuberLossBackward0", "KlDivBackward0", "BinaryCrossEntropyBackward0")
_REDUCTIONS = {1: "mean", 2: "sum"}


def check_loss(loss: Tensor, output: Tensor, likelihood: Likelihood) -> None:
    """Refuse a loss whose graph shows that another function computed it; graphs that show nothing pass."""
    names = _NODES.get(type(likelihood))
    if names is None:
        return
    found = _nodes(loss, output, {name for each in _NODES.values() for name in each} | set(_OTHERS))
    same = [node for node in found if type(node).__name__ in names]
    if found and not same:
        made_by = ", ".join(sorted({type(node).__name__.removesuffix("0").removesuffix("Backward") for node in found}))
        raise ValueError(
            f"loss_fn is a {type(likelihood).__name__}, but the loss was computed by {made_by}: pass the function that made it"
        )
    if any(getattr(node, name, None) is not None for node in same for name in ("_saved_weight", "_saved_pos_weight")):
        raise ValueError("loss_fn has no weights, but the loss was computed with weight=: pass a Likelihood that has them")
    reductions = {_REDUCTIONS.get(getattr(node, "_saved_reduction", 0)) for node in same} - {None}
    if reductions and likelihood.reduction not in reductions:
        raise ValueError(
            f"loss_fn has reduction={likelihood.reduction!r}, but the loss was computed with {reductions.pop()!r}: pass the "
            "function that made it"
        )


def _loss_node(loss: Tensor, output: Tensor, likelihood: Likelihood) -> Node | None:
    """The one place in the graph of `loss`, after `output`, where the loss itself was computed; None if there is not one."""
    found = _nodes(loss, output, set(_NODES.get(type(likelihood), ())))
    return found[0] if len(found) == 1 else None


def _nodes(loss: Tensor, output: Tensor, names: set[str]) -> list[Node]:
    """The places of these names in the graph of `loss` after `output`."""
    found, seen, waiting = [], {output.grad_fn, None}, [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node in seen or node is None:
            continue
        seen.add(node)
        if type(node).__name__ in names:
            found.append(node)
        else:
            waiting += [before for before, _ in node.next_functions]
    return found


def _class_dim(output: Tensor) -> int:
    return 0 if output.dim() == 1 else 1


def _softmax(output: Tensor) -> Tensor:
    return output.to(torch.promote_types(output.dtype, torch.float32)).softmax(_class_dim(output))


def _by_position(column: Tensor, keep: int = 0) -> Iterator[Tensor]:
    """Split a column that speaks for all positions of a sample into one tensor each; `keep`: a dimension that stays whole."""
    places: list[Iterable[int | slice]] = [
        [slice(None)] if dim in (0, keep) else range(size) for dim, size in enumerate(column.shape)
    ]
    for place in itertools.product(*places):
        single = torch.zeros_like(column)
        single[place] = column[place]
        yield single
