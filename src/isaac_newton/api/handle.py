"""What `attach` returns: the report, the dampings, ζ's backward pass, the optimizer's step, and the way back."""

import contextlib
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from isaac_newton.api import report, state
from isaac_newton.api.averages import Averages
from isaac_newton.api.binding import held, steppers
from isaac_newton.api.masks import positions, unhook_models
from isaac_newton.api.step import condition_gradients
from isaac_newton.api.tied import raw
from isaac_newton.api.watch import Watch, listed
from isaac_newton.core.checks import check_count
from isaac_newton.core.layer import ConditionedLayer
from isaac_newton.core.options import OutputDamping, Run, is_kfac
from isaac_newton.core.statistics import Statistics
from isaac_newton.math.damping import Damping, check
from isaac_newton.math.equations import precise
from isaac_newton.math.likelihood import CrossEntropy, Likelihood, LossFunction, check_loss, likelihood_of, scale_of

__all__ = ["Handle"]


class Handle:
    """What `attach` returns: the report, the damping, `backward` for ζ, and the way back. Print it to see every layer."""

    def __init__(
        self, model: nn.Module, run: Run, sites: Mapping[str, ConditionedLayer], skipped: Mapping[str, str], watch: Watch
    ) -> None:
        self._model = model
        self._run = run
        self._sites = dict(sites)
        self._skipped = dict(skipped)
        self._watch = watch
        self._given = run.damping
        self._bound: list[tuple[torch.optim.Optimizer, RemovableHandle]] = []

    @property
    def conditioned(self) -> Mapping[str, nn.Module]:
        """The conditioned layers by name, and the parts of them that are layers themselves."""
        layers: dict[str, nn.Module] = {}
        for name, site in self._sites.items():
            layers |= {name: site.module, **site.parts}
        return MappingProxyType(layers)

    @property
    def skipped(self) -> Mapping[str, str]:
        """Why each other module with parameters of its own keeps its plain gradient."""
        # Parameters of which a layer's weight is made are known once it was called.
        made = raw(self._model, self._sites)
        return MappingProxyType({name: why for name, why in self._skipped.items() if name not in made})

    @property
    def statistics(self) -> Mapping[str, Statistics]:
        """What happened in each conditioned layer; on a GPU this waits until what happened is known."""
        self._settle()
        return MappingProxyType({name: site.statistics for name, site in self._sites.items()})

    @contextlib.contextmanager
    def inspecting(self) -> Iterator[Mapping[str, Statistics]]:
        """Within this block, layers also record what conditioning does to them.

        Per layer `statistics` then has the effective rank, the largest curvature, the damping in use and the angle between the
        conditioned and the plain gradient, and `print(handle)` shows them. The block has to hold the backward pass, with
        `when="step"` the step. It costs an eigenvalue problem per layer, so ask now and then. Captured steps record
        nothing.

            with handle.inspecting():
                loss_fn(model(x), y).backward()
            print(handle)
        """
        run, found = self._run, {name: site.statistics for name, site in self._sites.items()}
        for statistics in found.values():
            statistics.forget()
        last = {name: statistics.backward_pass for name, statistics in found.items()}
        with _true(run, "inspecting"):
            yield self.statistics
        blank = [name for name, statistics in found.items() if statistics.effective_rank is None]
        missed = [name for name in blank if found[name].backward_pass > last[name]]
        if missed and run.options.when == "backward":
            warnings.warn(
                f"nothing was recorded of {listed(missed)}: handle.inspecting() cannot look into captured steps",
                RuntimeWarning,
                stacklevel=3,
            )
        elif len(blank) == len(found):
            wanted = "the step" if run.options.when == "step" else "the backward pass"
            warnings.warn(f"nothing was recorded: handle.inspecting() has to hold {wanted}", RuntimeWarning, stacklevel=3)

    @property
    def damping(self) -> Damping:
        """λ_a; may change at any time, and takes effect with the next backward pass."""
        return self._run.damping

    @damping.setter
    def damping(self, value: Damping) -> None:
        self._run.set_damping(value)

    @property
    def mask(self) -> Tensor | None:
        """Which positions count: a boolean tensor (samples, length), such as an attention mask; None for all.

        Set it before the forward pass. Layers whose inputs have these leading dimensions leave the other positions out of their
        conditioner, so that padding neither dilutes the curvature nor counts as rows. It holds until it is set again;
        what is written into the tensor afterwards does not count.

        Models that are called with an `attention_mask` (those of Hugging Face) need no mask set: theirs is taken from each
        call, while None is set here.
        """
        return self._run.set_mask

    @mask.setter
    def mask(self, value: Tensor | None) -> None:
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"mask must be a tensor or None, got {type(value).__name__}")
        if value is not None and self._run.conditions_outputs:
            raise ValueError("ζ needs every row: a mask works with ζ* only (output_damping=math.inf)")
        self._run.set_mask = None if value is None else positions(value)
        self._run.take_mask(self._run.set_mask)
        self._run.differs = True

    @property
    def output_damping(self) -> OutputDamping:
        """λ_g; may change between numbers, but ζ stays ζ and ζ* stays ζ*."""
        return self._run.output_damping

    @output_damping.setter
    def output_damping(self, value: OutputDamping) -> None:
        value = value if is_kfac(value) else check(value, "output_damping")
        if (value == math.inf) == self._run.conditions_outputs:
            raise ValueError(
                f"output_damping cannot change from {self._run.output_damping} to {value}: that is another method (ζ* is "
                "inf, ζ is a number); detach and attach again"
            )
        self._run.output_damping = value

    @property
    def backward_passes(self) -> int:
        """What a damping schedule is called with next. Set it when resuming, or to count optimizer steps instead."""
        return self._run.backward_passes

    @backward_passes.setter
    def backward_passes(self, value: int) -> None:
        self._run.backward_passes = check_count("backward_passes", value, 0)

    @property
    def steps(self) -> int:
        """With `when="step"`, the steps so far, those of a warm-up too: what a damping schedule is called with."""
        return self._run.steps

    def backward(
        self,
        loss: Tensor,
        output: Tensor,
        loss_fn: LossFunction,
        *,
        scale: float | Tensor | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Run `loss.backward()` for ζ, with the extra passes for ḡ that it needs before.

        An extra pass computes no weight gradient and leaves every `.grad` alone. `loss` may be scaled, by a `GradScaler` or for
        accumulation: the result is ζ of the loss as it was, times that scale.

        Args:
            loss: The loss, `loss_fn(output, target)`, or a multiple of it.
            output: What `loss_fn` was given: the network's output.
            loss_fn: `nn.CrossEntropyLoss`, `nn.MSELoss` or `nn.BCEWithLogitsLoss` (as module, function or `functools.partial`),
                or a `Likelihood` of your own.
            scale: By how much `loss` was multiplied. Only "empirical" asks, where ḡ comes from the gradients of `loss`, and
                finds out itself where the graph of `loss` shows one loss of torch's: give it with a loss of your own.
            retain_graph: Keep the graph for another backward pass.
        """
        run = self._run
        if not run.conditions_outputs:
            raise RuntimeError(
                "handle.backward is for ζ, and output_damping=inf is ζ*, which needs no extra pass: call loss.backward(), or "
                "attach with output_damping=<a number>"
            )
        likelihood = likelihood_of(loss_fn)
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss must be the tensor that the loss function returned, got {type(loss).__name__}")
        if not loss.requires_grad:
            raise ValueError("loss has no graph to backpropagate through: compute it with gradients enabled, from output")
        if not isinstance(output, Tensor):
            raise TypeError(f"output must be the tensor the loss was computed from, got {type(output).__name__}")
        if not output.requires_grad:
            raise ValueError(
                "output has no graph to backpropagate through: compute it with gradients enabled, and do not detach it"
            )
        check_loss(loss, output, likelihood)
        if isinstance(likelihood, CrossEntropy):
            likelihood = likelihood.observing(loss, output)
        terms = likelihood.terms(output)
        terms = precise(terms).clamp_min(1) if isinstance(terms, Tensor) else max(terms, 1)
        if run.needs_extra_pass:
            collect_output_gradients(run, self._sites.values(), output, likelihood, terms)
        if run.options.output_curvature == "empirical":
            scale = scale_of(loss, output, likelihood) if scale is None else scale
            if scale is None:
                raise ValueError(
                    "with output_curvature='empirical', ḡ is the gradient of the loss before it was scaled, and the graph of "
                    "this one does not show where that was: pass scale=, by how much it was multiplied (1.0 if not at all)"
                )
            run.empirical_scale = (terms**0.5 if likelihood.reduction == "mean" else terms**-0.5) / scale
        try:
            loss.backward(retain_graph=retain_graph)
        finally:
            run.empirical_scale = None

    def bind(self, optimizer: torch.optim.Optimizer) -> "Handle":
        """Condition the gradients of this optimizer's parameters at each of its steps, right before it looks at them.

        For `when="step"`; with several optimizers (Muon for matrices, AdamW for the rest) call it for each. Clipping before
        `optimizer.step()` sees the plain gradient; to clip what the optimizer uses, call `step` by hand and clip after it.
        """
        self._needs_step("bind")
        for each in steppers(optimizer):
            if any(bound is each for bound, _ in self._bound):
                raise ValueError("this optimizer is already bound to this handle")
            if held(each).isdisjoint(map(id, self._model.parameters())):
                warnings.warn(
                    "this optimizer holds no parameter of the model, so that its steps condition nothing: bind the optimizer "
                    "of the model's own parameters; where it has copies of them, call handle.step() before copying gradients",
                    RuntimeWarning,
                    stacklevel=2,
                )
            self._bound.append((each, each.register_step_pre_hook(self._before_step)))
        self._run.bound = True
        return self

    @property
    def curvature(self) -> Mapping[str, Tensor]:
        """The average second moment S = Σ rᵀr / rows of each weight's inputs, by the name of the parameter.

        (features, features) for a linear layer and a convolution, the last feature a one with `bias="joint"`. With groups, and
        for packed weights that received several inputs: (parts, features, features), for as many equal parts of the weight's
        rows. (tokens,) for an embedding, where S is diagonal. Its type is the weight's, float32 at least. It is that of the
        last step, over all ranks, and comes back with `load_state_dict`. With `spread` a rank has those that it keeps. Attached
        with `damping=math.inf` a handle gathers it and leaves gradients plain, for optimizers that multiply by themselves.
        """
        return self._averages("curvature")

    def factor(self, name: str, damping: Damping | None = None) -> Tensor:
        """(I + S/λ)⁻ᵖ of `curvature[name]`, computed now; what a gradient (outputs, features) is multiplied by from the right.

        Args:
            name: That of the parameter.
            damping: A number or `Relative`; None: that of the handle.
        """
        return self._averages("factor").factor(name, self.damping if damping is None else check(damping))

    def _averages(self, name: str) -> Averages:
        self._needs_step(name)
        if self._run.options.decay == 0:
            raise ValueError(f"handle.{name} is of the average that decay keeps, and decay=0 keeps none: attach with decay=.95")
        return Averages(self._sites)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._step(optimizer)
            return None
        first = iter([True])

        def conditioned() -> Any:
            loss = closure()
            self._step(optimizer, counts=next(first, False))
            return loss

        # The closure computes the gradients, so it has to be followed, not preceded.
        return (args[:1], {**kwargs, "closure": conditioned})

    def step(self) -> None:
        """Condition every gradient by what its weight has gathered since the last step; for `when="step"` without `bind`."""
        self._needs_step("step")
        if self._bound:
            raise RuntimeError("an optimizer is bound to this handle and conditions its gradients itself")
        self._step(None)

    def discard(self) -> None:
        """Forget what was gathered since the last step. Clearing the gradients does that too."""
        self._needs_step("discard")
        for site in self._sites.values():
            for gathering in site.gatherings.values():
                gathering.drop()

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """Forward and backward passes within this block have plain gradients.

        with handle.plain():
            loss_fn(model(x), y).backward()
        """
        self._run.differs = True
        with _true(self._run, "is_plain"):
            yield

    @contextlib.contextmanager
    def gathering(self) -> Iterator[None]:
        """Within this block, all backward passes count for the next step, whatever becomes of their gradients.

        For `when="step"` and gradients that you sum by hand, out of `autograd.grad` or of several `.grad`:

            with handle.gathering():
                first = torch.autograd.grad(loss_1, weights)
                second = torch.autograd.grad(loss_2, weights)
            for weight, one, other in zip(weights, first, second):
                weight.grad = one + other
            optimizer.step()
        """
        self._needs_step("gathering")
        for site in self._sites.values():
            for name, gathering in site.gatherings.items():
                gathering.settle(site.module.get_parameter(name))
        with _true(self._run, "gathering"):
            yield

    def _needs_step(self, name: str) -> None:
        if self._run.options.when != "step":
            raise RuntimeError(f"handle.{name} is for when='step'; with when='backward' the gradients are already conditioned")
        if not self._sites:
            raise ValueError("this handle is detached")

    def _step(self, optimizer: torch.optim.Optimizer | None, *, counts: bool = True) -> None:
        chosen = None if optimizer is None else held(optimizer)
        if counts:
            self._run.count_step(optimizer)
        condition_gradients(self._sites, chosen)
        if self._run.is_warming_up:
            for parameter in self._model.parameters():
                if chosen is None or id(parameter) in chosen:
                    parameter.grad = None  # an optimizer leaves such a parameter alone, weight decay included

    def state_dict(self) -> dict[str, Any]:
        """Where training stands: counters, the damping if it is a number, and running averages; for `torch.save`."""
        return state.saved(self._run, self._sites, self._given)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was made; the model must be attached in the same way.

        A damping schedule stays as it is. So does, with a warning, a damping that `attach` was given anew: another one than
        where the state was made.
        """
        state.load(self._run, self._sites, self._given, state_dict)

    def detach(self) -> None:
        """Give the layers of this handle their own forward pass back."""
        if not self._sites:
            raise ValueError("this handle is already detached")
        for name, site in self._sites.items():
            if not site.is_attached:
                raise ValueError(f"layer {name!r} is no longer attached by this handle; isaac_newton.detach(model) removes all")
        for site in self._sites.values():
            site.detach()
        unhook_models(self._model, self._run)
        self._watch.stop()
        for _, hook in self._bound:
            hook.remove()
        self._sites, self._bound = {}, []

    def __repr__(self) -> str:
        self._settle()
        return report.table(self._model, self._run, self._sites, self._skipped, self._watch.gone, self._watch.newcomers())

    def _settle(self) -> None:
        if sum(site.statistics.settle() for site in self._sites.values()):
            self._run.warn_about_failure()


@contextlib.contextmanager
def _true(run: Run, name: str) -> Iterator[None]:
    """What this attribute of a run is within a block."""
    before = getattr(run, name)
    setattr(run, name, True)
    try:
        yield
    finally:
        setattr(run, name, before)


def collect_output_gradients(
    run: Run, sites: Iterable[ConditionedLayer], output: Tensor, likelihood: Likelihood, terms: int | Tensor
) -> None:
    """The extra passes of ζ: each layer records ḡ, of the loss Hessian's root or of labels drawn anew."""
    weights = [p for site in sites for p in site.module.parameters() if p.requires_grad]
    exact, samples = run.options.output_curvature == "exact", run.options.samples
    scale = (terms if exact else terms * samples) ** -0.5
    columns = likelihood.root(output.detach()) if exact else (likelihood.sample(output.detach()) for _ in range(samples))
    with _true(run, "collecting"):
        for column in columns:
            torch.autograd.grad(output, weights, grad_outputs=column * scale, retain_graph=True, allow_unused=True)
