"""Many models trained at once, each with its own damping, learning rate, seed and data order.

Copies of one architecture are stacked: every linear layer becomes one batched product over all copies, and so does every
conditioner. A grid over dampings that would take hours one run after the other takes minutes.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from isaac_newton import kernels
from isaac_newton.core.checks import check_count
from isaac_newton.kernels import cpu
from isaac_newton.math import equations
from isaac_newton.math.damping import as_float
from isaac_newton.math.likelihood import LossFunction, likelihood_of

__all__ = ["Ensemble"]

EnsembleCurvature: TypeAlias = Literal["sampled", "empirical"]


class Ensemble(nn.Module):
    """Copies of one model, stacked; equal to as many separate runs.

    The parametrized layers must be `nn.Linear`; whatever else the model does must not mind a leading dimension of copies.

    Args:
        models: Models of one architecture, with the weights each copy starts from.
        damping: λ_a of each copy, or one for all; `math.inf` gives the plain gradient.
        output_damping: λ_g of each copy, or one for all; `math.inf` gives ζ*. If any is finite, call `backward` of the
            ensemble.
        output_curvature: Where ḡ comes from: "sampled" labels (Remark 1), or the "empirical" Fisher (Remark 4), which needs no
            extra pass.
        samples: Labels drawn per example for "sampled".
    """

    damping: Float[Tensor, " copies"]
    output_damping: Float[Tensor, " copies"]

    def __init__(
        self,
        models: Sequence[nn.Module],
        *,
        damping: float | Sequence[float] = math.inf,
        output_damping: float | Sequence[float] = math.inf,
        output_curvature: EnsembleCurvature = "sampled",
        samples: int = 1,
    ) -> None:
        super().__init__()
        _check_models(models)
        check_count("samples", samples)
        if not isinstance(output_curvature, str) or output_curvature not in get_args(EnsembleCurvature):
            raise ValueError(f"output_curvature must be 'sampled' or 'empirical', got {output_curvature!r}")
        self.copies, self.samples, self.output_curvature = len(models), samples, output_curvature
        dampings = _per_copy("damping", damping, self.copies)
        output_dampings = _per_copy("output_damping", output_damping, self.copies)
        self.conditions_inputs = any(value != math.inf for value in dampings)
        self.conditions_outputs = any(value != math.inf for value in output_dampings)
        first = next(models[0].parameters())
        self.register_buffer("damping", torch.tensor(dampings, dtype=first.dtype, device=first.device), persistent=False)
        self.register_buffer(
            "output_damping", torch.tensor(output_dampings, dtype=first.dtype, device=first.device), persistent=False
        )
        self._templates = [models]
        self.model = copy.deepcopy(models[0])
        for name, module in list(self.model.named_modules()):
            if isinstance(module, nn.Linear):
                stacked = _StackedLinear([model.get_submodule(name) for model in models], self)
                if name:
                    self.model.get_submodule(name.rpartition(".")[0]).__setattr__(name.rpartition(".")[2], stacked)
                else:
                    self.model = stacked
            elif any(True for _ in module.parameters(recurse=False)):
                raise TypeError(f"layer {name!r} is {type(module).__name__}: an ensemble can only stack nn.Linear")

    def forward(self, x: Float[Tensor, "*copies batch features"]) -> Float[Tensor, "copies batch outputs"]:
        """The outputs of all copies, for one batch (batch, features) or for a batch each (copies, batch, features)."""
        if x.dim() == 2:
            x = x.expand(self.copies, *x.shape)
        elif x.dim() != 3 or x.shape[0] != self.copies:
            raise ValueError(f"x must be (batch, features) or ({self.copies}, batch, features), got {tuple(x.shape)}")
        output: Tensor = self.model(x)
        return output

    def losses(self, loss_fn: Callable[[Tensor, Tensor], Tensor], output: Tensor, target: Tensor) -> Float[Tensor, " copies"]:
        """The loss of each copy; `target` for all, or one for each copy."""
        per_copy = target.shape[0] == self.copies and target.dim() > 1 and target.shape[1] == output.shape[1]
        result: Tensor = torch.vmap(loss_fn, in_dims=(0, 0 if per_copy else None))(output, target)
        return result

    def backward(self, losses: Float[Tensor, " copies"], output: Tensor, loss_fn: LossFunction) -> None:
        """`losses.sum().backward()`, with the extra passes that ζ needs before. The copies do not mix; all targets count."""
        likelihood = likelihood_of(loss_fn) if self.conditions_outputs else None
        if likelihood is not None and self.output_curvature == "empirical":
            terms = output.shape[1] if likelihood.reduction == "mean" else 1
            for layer in self._layers():
                layer.output_rows = lambda g: g * terms
        elif likelihood is not None:
            flat = output.detach().flatten(0, 1)
            weights = [p for p in self.parameters() if p.requires_grad]
            scale = (output.shape[1] * self.samples) ** -0.5
            for layer in self._layers():
                layer.collected = []
            for _ in range(self.samples):
                column = likelihood.sample(flat).view_as(output) * scale
                torch.autograd.grad(output, weights, grad_outputs=column, retain_graph=True, allow_unused=True)
            for layer in self._layers():
                gbar, layer.collected = torch.cat(layer.collected or [], dim=1), None
                layer.output_rows = lambda g, gbar=gbar: gbar * math.sqrt(g.shape[1])
        losses.sum().backward()

    def separate(self) -> list[nn.Module]:
        """The models again, each with the weights that its copy has now."""
        models = [copy.deepcopy(model) for model in self._templates[0]]
        with torch.no_grad():
            for name, module in self.model.named_modules():
                if isinstance(module, _StackedLinear):
                    for number, model in enumerate(models):
                        layer = model.get_submodule(name)
                        layer.get_parameter("weight").copy_(module.weight[number])
                        if module.bias is not None:
                            layer.get_parameter("bias").copy_(module.bias[number, 0])
        return models

    def _layers(self) -> Iterator["_StackedLinear"]:
        return (module for module in self.model.modules() if isinstance(module, _StackedLinear))


class _StackedLinear(nn.Module):
    bias: nn.Parameter | None

    def __init__(self, layers: Sequence[nn.Module], ensemble: Ensemble) -> None:
        super().__init__()
        with torch.no_grad():
            self.weight = nn.Parameter(torch.stack([layer.get_parameter("weight") for layer in layers]))
            has_bias = getattr(layers[0], "bias", None) is not None
            self.bias = nn.Parameter(torch.stack([layer.get_parameter("bias")[None] for layer in layers])) if has_bias else None
        # In a list, so that the ensemble is not registered as a part of its own layer.
        self._ensemble = [ensemble]
        #: While ḡ is collected: the output gradients seen so far.
        self.collected: list[Tensor] | None = None
        #: For the backward pass to come: from g, the ḡ whose ḡᵀḡ / rows is the curvature.
        self.output_rows: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Float[Tensor, "copies batch in"]) -> Float[Tensor, "copies batch out"]:
        output: Tensor = _BatchedLinear.apply(x, self.weight, self.bias, self)  # type: ignore[no-untyped-call]
        return output

    def conditioned(
        self, g: Float[Tensor, "copies batch out"], a: Float[Tensor, "copies batch in"]
    ) -> Float[Tensor, "copies out in"]:
        """ζ* or ζ of every copy."""
        ensemble, rows, features = self._ensemble[0], a.shape[1], a.shape[2]
        if self.output_rows is not None:
            g, self.output_rows = self._condition_outputs(g, self.output_rows(g)), None
        if not ensemble.conditions_inputs or rows == 0:
            return torch.bmm(g.mT, a)
        # Where the damping is infinite, the inverse is the identity: the plain gradient.
        return _product(g, _inverse(a if rows < features else a.mT, ensemble.damping, rows), a)

    def _condition_outputs(self, g: Tensor, gbar: Tensor) -> Tensor:
        rows, (samples, outputs) = g.shape[1], gbar.shape[1:]
        gbar = gbar * self._ensemble[0].output_damping.rsqrt()[:, None, None]
        by_rows = samples < outputs
        inverse = _inverse(gbar if by_rows else gbar.mT, 1.0, rows, in_difference=by_rows).to(g.dtype)
        if not by_rows:
            return g @ inverse
        gbar = gbar.to(g.dtype)
        with cpu.unrounded(g):
            return torch.baddbmm(g, g @ gbar.mT @ inverse, gbar, alpha=-1)


def _inverse(
    x: Float[Tensor, "copies k l"], damping: float | Tensor, rows: int, *, in_difference: bool = False
) -> Float[Tensor, "copies k k"]:
    """(I + x xᵀ/(rows·λ))⁻¹ of each copy, divided by the rows in a difference, where λ is 1.

    It is the identity for copies that are not finite: one that diverged takes nothing from the others.
    """
    # With rows over √λ the damping of every copy is 1.
    x = x * damping.rsqrt()[:, None, None] if isinstance(damping, Tensor) else x
    if kernels.groupable([x])[0] and x.dtype is torch.float32 and x.shape[1] <= kernels.MOST_INVERTED:
        return _inverse_by_triton(x.contiguous(), rows, in_difference)
    if x.is_cuda:
        inverse = equations.inverse(equations.precise(x), 1 / rows)
        identity = torch.eye(x.shape[1], dtype=inverse.dtype, device=x.device)
        inverse = torch.where(equations.is_nan(inverse), 0 * identity if in_difference else identity, inverse).to(x.dtype)
        return inverse / rows if in_difference else inverse
    found, failures = cpu.inverse(x, 1 / rows, in_difference)
    if found is None:
        finite = x.isfinite().flatten(1).all(1)
        found, failures = cpu.inverse(torch.where(finite[:, None, None], x, 0.0), 1 / rows, in_difference)
    if failures:
        warnings.warn(
            "a factorization failed: a copy of the ensemble was damped more in this step", RuntimeWarning, stacklevel=2
        )
    assert found is not None
    return found / rows if in_difference else found


def _inverse_by_triton(x: Float[Tensor, "copies k l"], rows: int, in_difference: bool) -> Float[Tensor, "copies k k"]:
    from isaac_newton.kernels import inverse_large, inverse_small

    inverses = inverse_small.inverses if x.shape[1] <= kernels.MOST_SMALL else inverse_large.inverses
    # The kernel divides by the rows that it sees, which are the layer's unless x is on the side of the features.
    kinds = [inverse_small.SCALED if in_difference else 0] * len(x)
    made = inverses(x.unbind(), rows / x.shape[1], "", kinds)
    return torch.stack([inverse for each in made if (inverse := each.inverse) is not None])


def _product(
    g: Float[Tensor, "copies rows out"], inverse: Float[Tensor, "copies k k"], a: Float[Tensor, "copies rows in"]
) -> Float[Tensor, "copies out in"]:
    """gᵀ P a with P on the side of the rows, or gᵀ a Q with Q on that of the features."""
    if inverse.dtype is not a.dtype:
        # The inverse needed float64. Conditioned rows can be rounded, since nothing cancels in them afterwards.
        wide = a.to(inverse.dtype)
        multiplied = torch.bmm(inverse, wide) if a.shape[1] < a.shape[2] else torch.bmm(wide, inverse)
        return torch.bmm(g.mT, multiplied.to(a.dtype))
    if a.shape[1] >= a.shape[2]:
        return torch.bmm(torch.bmm(g.mT, a), inverse)
    if g.shape[2] <= a.shape[2]:
        return torch.bmm(torch.bmm(inverse, g).mT, a)
    return torch.bmm(g.mT, torch.bmm(inverse, a))


class _BatchedLinear(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, layer: _StackedLinear) -> Tensor:
        return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias, x, weight.mT)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, _, ctx.layer = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (a, weight), layer = ctx.saved_tensors, ctx.layer
        grad_input = g @ weight if ctx.needs_input_grad[0] else None
        if layer.collected is not None:
            layer.collected.append(g)
            return grad_input, None, None, None
        grad_weight = layer.conditioned(g, a) if ctx.needs_input_grad[1] else None
        return grad_input, grad_weight, g.sum(1, keepdim=True) if ctx.needs_input_grad[2] else None, None


def _check_models(models: Sequence[nn.Module]) -> None:
    """Refuse what is not several models of one architecture."""
    if not isinstance(models, Sequence) or not all(isinstance(model, nn.Module) for model in models):
        raise TypeError(f"models must be a sequence of nn.Module, got {type(models).__name__}")
    if not models:
        raise ValueError("models must hold at least one model, got none: an ensemble needs something to stack")
    shapes = [{name: tuple(parameter.shape) for name, parameter in model.named_parameters()} for model in models]
    if not shapes[0]:
        raise ValueError(f"models must have parameters, got {type(models[0]).__name__}")
    for number, own in enumerate(shapes):
        if own != shapes[0]:
            raise ValueError(
                f"models must have one architecture, got parameters {shapes[0]} in the first and {own} in number {number}"
            )


def _per_copy(name: str, value: float | Sequence[float], copies: int) -> list[float]:
    try:
        values = [value] * copies if isinstance(value, int | float) else list(value)
    except TypeError:
        raise TypeError(f"{name} must be a number or a sequence of numbers, got {value!r}") from None
    if len(values) != copies:
        raise ValueError(f"{name} must be one number or one for each of the {copies} copies, got {len(values)}")
    return [as_float(number, name) for number in values]
