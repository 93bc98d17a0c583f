"""A conditioned layer: what stands in for its forward pass, which options it shares, what it has gathered and seen."""

import copy
import itertools
import sys
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from isaac_newton import torch_private
from isaac_newton.core.distributed import is_sharded
from isaac_newton.core.gathering import Gathering, Part, part_of
from isaac_newton.core.moments import Moment, WeightSlice
from isaac_newton.core.options import Run
from isaac_newton.core.repeated import Repeats, is_special
from isaac_newton.core.rows import Rows
from isaac_newton.core.statistics import Statistics
from isaac_newton.math import equations

if TYPE_CHECKING:
    from isaac_newton.core.bucket import Bucket
    from isaac_newton.core.conditioner import Conditioner

__all__ = ["ConditionedLayer", "child", "layer_of", "live_layers"]

_NUMBERS = itertools.count()
#: Of each compilation: the numbers that stand for its dynamic sizes, and a negative one for sizes that stay the same.
_COMPILED: "weakref.WeakKeyDictionary[Any, dict[Hashable | None, int]]" = weakref.WeakKeyDictionary()
_LAYERS: "weakref.WeakValueDictionary[int, ConditionedLayer]" = weakref.WeakValueDictionary()


def live_layers() -> "list[ConditionedLayer]":
    """All that exist."""
    return list(_LAYERS.values())


def layer_of(number: int) -> "ConditionedLayer":
    """The layer with this number: operators of compiled code take numbers and tensors only."""
    return _LAYERS[number]


class ConditionedLayer:
    """One conditioned layer: its name, the run that it belongs to, its own statistics. Public as `isaac_newton.Site`.

    Args:
        name: As the model names it.
        run: Shared by all layers of one attachment.
        module: The layer itself, whose `forward` this stands in for; None where a layer calls us by itself.
        adapter: Called with the module, this, and the arguments of `forward`.
        parts: Submodules whose weights the adapter conditions too.
    """

    #: Whether it was never called.
    _is_new = True

    def __init__(
        self,
        name: str,
        run: Run,
        module: nn.Module | None = None,
        adapter: Callable[..., Any] | None = None,
        parts: Mapping[str, nn.Module] | None = None,
    ) -> None:
        self.name = name
        self.run = run
        self._module = module
        self.adapter = adapter
        self.parts = dict(parts or {})
        self.statistics = Statistics()
        #: In the first pass, while somebody watches: the gradients that calls of the layer have left for its weight.
        self.left: list[Tensor] | None = None
        #: With `when="step"`: what each parameter has gathered.
        self.gatherings: dict[str, Gathering] = {}
        #: Whether its input has positions before samples.
        self.is_time_first = False
        #: Whether a call was to have the plain gradient.
        self.was_plain = False
        #: The calls that activation checkpointing may repeat.
        self.repeats = Repeats()
        #: The bucket of its weight, and the number of the weight there.
        self.bucket: tuple[Bucket, int] | None = None
        #: The short way of calls that have nothing special, once one such call has been seen.
        self.ordinary: Callable[[Tensor], Tensor | None] | None = None
        #: Of its uses in compiled code: a number that this code tells when it runs, and the sizes.
        self.compiled: list[tuple[int, tuple[Any, ...]]] = []
        if run.options.when == "step" and module is not None:
            for parameter, tensor in module.named_parameters():
                if is_sharded(tensor):
                    self.gathering(parameter).watch(tensor)
        self._enroll()

    @property
    def module(self) -> nn.Module:
        """The layer itself."""
        if self._module is None:
            raise TypeError("when='step' needs a layer that was attached with isaac_newton.attach")
        return self._module

    def _enroll(self) -> None:
        self.number = next(_NUMBERS)
        #: The same as a word: of a number that differs from layer to layer the compiler would make a variable.
        self.token = str(self.number)
        _LAYERS[self.number] = self

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._enroll()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "compiled": [], "ordinary": None}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's forward pass: conditioned where gradients are computed, the original one otherwise."""
        if self.ordinary is not None and len(args) == 1 and not kwargs and not torch.compiler.is_compiling():
            output = self.ordinary(args[0])
            if output is not None:
                return output
        run = self.run
        if not (run.differs and is_special(run)):
            return self._call(args, kwargs)
        before = run.mask, run.is_plain
        x = args[0] if args else next(iter(kwargs.values()), None)
        run.mask, run.is_plain = self.repeats.found(self.name, run, x, training=self.module.training)
        self.was_plain |= run.is_plain
        try:
            return self._call(args, kwargs)
        finally:
            run.mask, run.is_plain = before

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module: Any = self._module
        if torch.is_grad_enabled() and not self.run.is_plain and not torch_private.is_exported():
            if self._is_new and not torch.compiler.is_compiling():
                self._check_whole()
                self._is_new = False
            return self.adapter(module, self, *args, **kwargs)  # type: ignore[misc]
        return type(module).forward(module, *args, **kwargs)

    def _check_whole(self) -> None:
        """Refuse a weight that is in parts where the layer computes. Under FSDP2 it is whole there."""
        if any(is_sharded(parameter) for parameter in self.module.parameters()):
            raise RuntimeError(
                f"layer {self.name!r}: tensor parallelism has split its weight over ranks, and a conditioner needs whole "
                "inputs and gradients: attach after parallelize_module, which leaves such layers plain, or name it in exclude="
            )

    def replicate(self) -> nn.Module:
        """For `DataParallel`: a replica with weights of its own, whose rows condition its part of the gradient."""
        if self.run.options.when == "step":
            raise RuntimeError("when='step' does not know the replicas of DataParallel: use DistributedDataParallel")
        replica = torch_private.replica_of(self.module)
        stand_in = copy.copy(self)
        stand_in._module, stand_in.bucket, stand_in.ordinary = replica, None, None
        replica.forward = stand_in
        return replica

    def install(self) -> None:
        """Stand in for the layer's forward pass."""
        vars(self.module).update({"forward": self, torch_private.REPLICATE: self.replicate})

    @property
    def is_attached(self) -> bool:
        """Whether this stands in for the forward pass of a layer."""
        return self.adapter is not None and self.adapter is not _plain

    def detach(self) -> None:
        """Give the layer its own forward pass back, also where another tool has put something around this one."""
        self.adapter, self.ordinary = _plain, None
        attributes = vars(self.module)
        attributes.pop(torch_private.REPLICATE, None)
        if attributes.get("forward") is self:
            del attributes["forward"]
        for gathering in self.gatherings.values():
            gathering.close()

    @property
    def __globals__(self) -> None:
        """What TorchScript asks a forward pass for. `torch.jit.trace` goes on without."""
        frame = sys._getframe(1)
        while frame.f_back is not None:
            frame = frame.f_back
            if frame.f_code.co_name in ("trace", "trace_module"):
                raise AttributeError("__globals__")
        raise RuntimeError(
            f"torch.jit.script cannot compile layer {self.name!r}, which is conditioned: detach first with "
            "isaac_newton.detach(model), and attach again afterwards"
        )

    def met_frozen(self) -> None:
        """It was called without a gradient for its weight: whoever watches may want to know, unless nobody wants any."""
        if self.run.watch is not None and torch.is_grad_enabled():
            self.run.watch.met_frozen(self.name)

    def fell_back(self, failures: int | Tensor = 1) -> None:
        """So many factorizations failed. On a GPU the number is not known yet: it is read with `Handle.statistics`."""
        if isinstance(failures, Tensor):
            self.statistics.count_on_device(failures)
        elif failures:
            self.statistics.fallbacks += failures
            self.run.warn_about_failure()

    def lost_digits(self) -> None:
        """A gradient had too few digits for the difference that was asked of it."""
        self.statistics.fallbacks += 1
        self.run.warn_about_digits(self.name)

    def saw(
        self,
        made: "Conditioner",
        outputs: int,
        plain: Tensor | Callable[[], Tensor],
        conditioned: Tensor,
        *,
        own: bool,
    ) -> None:
        """Note the sizes of what was multiplied, and where somebody inspects, what that did."""
        run, rows = self.run, made.rows
        self.statistics.note_sizes(run.backward_passes, rows.total, rows.r.shape, outputs, own)
        if made.lost_digits:
            self.lost_digits()
        if self.left is not None:
            self.left.append(conditioned)
        if run.inspecting:
            before = plain if isinstance(plain, Tensor) else plain()
            self.inspect(lambda: equations.spectrum(rows.r), made.damping, before, conditioned)

    def check_features(self, weight: Tensor, x: Tensor, are_last: bool, transposed: bool) -> None:
        """Refuse rows that this weight cannot multiply."""
        features = weight.shape[0] if transposed else weight.shape[1:].numel()
        if are_last and (x.dim() == 0 or x.shape[-1] != features):
            raise ValueError(
                f"layer {self.name!r}: a weight of shape {tuple(weight.shape)} multiplies rows of {features} features, got an "
                f"input of shape {tuple(x.shape)}; give isaac.condition what the weight multiplies, or an arrange="
            )

    def note_compiled(self, compilation: object, dynamic: Hashable | None, sizes: tuple[Any, ...]) -> None:
        """The compiler came to a use of these sizes; `dynamic`: what stands for those that change."""
        known = _COMPILED.setdefault(compilation, {})
        if dynamic not in known:
            known[dynamic] = next(_NUMBERS) if dynamic is not None else ~next(_NUMBERS)
        self.compiled.append((known[dynamic], sizes))

    def inspect(self, values: Callable[[], Tensor], damping: float | Tensor, plain: Tensor, conditioned: Tensor) -> None:
        """Record what conditioning did: the eigenvalues of the inputs' second moment, and the gradient before and after.

        Only where values are there to be looked at: not in captured steps and `torch.func`.
        """
        run = self.run
        if torch_private.has_values(plain) and run.capture is None:
            occasion = run.steps if run.options.when == "step" else run.backward_passes
            self.statistics.inspect(occasion, values(), float(damping), plain, conditioned)

    # ------------------------------------------------------------------------------------------ when="step"

    def slice(self, weight: Tensor, *, transposed: bool = False, bias: Tensor | None = None) -> WeightSlice | None:
        """With `when="step"`: which parameter of the layer this weight is, or is some rows of."""
        if self.run.options.when != "step":
            return None
        name, start, stop = _find(self.module, weight)
        if weight.is_leaf and torch_private.has_values(weight) and not torch.compiler.is_compiling():
            # Compiled autograd knows the hooks that are there when a backward pass begins.
            self.gathering(name).watch(weight)
        bias_name = None if bias is None else _find(self.module, bias)[0]
        return WeightSlice(name, start, stop, transposed=transposed, bias=bias_name)

    def gather(self, where: WeightSlice, rows: Rows, gradient: Tensor) -> None:
        """Keep rows for the step, unless the next step will not look at them; the gradient stays as it is."""
        if self.rests(where):
            self.pass_by(where, gradient)
        else:
            self.take(where, part_of(rows, keep=self.run.options.keeps_rows), gradient)

    def take(self, where: WeightSlice, part: Part, gradient: Tensor) -> None:
        """The same of rows whose second moment is known."""
        self.run.enter_pass()
        groups, _, features = part.shape
        where = where._replace(groups=groups)
        outputs = gradient.numel() // max(groups * (features - (where.bias is not None)), 1)
        self.statistics.note_sizes(self.run.backward_passes, part.total, part.shape, outputs, own_rows=False)
        if self.left is not None:
            self.left.append(gradient)
        self.keep(where, part.moment)

    def keep(self, where: WeightSlice, moment: Moment) -> None:
        """Add it to what the current backward pass gathers of one matrix, unless the next step will not look at that."""
        gathering = self.gathering(where.parameter)
        waiting = gathering.enter(self.module.get_parameter(where.parameter))
        if self.gathers(gathering.moments.get(where)):
            waiting[where] = waiting[where].plus(moment) if where in waiting else moment

    def gathering(self, parameter: str) -> Gathering:
        """That of one parameter."""
        if parameter not in self.gatherings:
            self.gatherings.setdefault(parameter, Gathering(self.run))  # another thread may have been faster
        return self.gatherings[parameter]

    def gathers(self, moment: Moment | None) -> bool:
        """Whether the next step will look at what the backward passes before it gather."""
        options = self.run.options
        return moment is None or moment.age == 0 or moment.age > options.refresh - options.gathered_steps

    def rests(self, where: WeightSlice) -> bool:
        """Whether the next step will not look at the rows of this matrix, so that they need not be formed."""
        moments = self.gathering(where.parameter).moments
        known = [moment for place, moment in moments.items() if place._replace(groups=where.groups) == where]
        return bool(known) and not any(self.gathers(moment) for moment in known)

    def pass_by(self, where: WeightSlice, gradient: Tensor) -> None:
        """Note that a gradient came whose rows are not looked at."""
        self.run.enter_pass()
        self.gathering(where.parameter).enter(self.module.get_parameter(where.parameter))
        self.statistics.backward_pass = self.run.backward_passes  # its sizes stay those of the last one with rows
        if self.left is not None:
            self.left.append(gradient)


def _find(module: nn.Module, tensor: Tensor) -> tuple[str, int, int]:
    """The name of the parameter that this tensor is, or a slice of whose rows it is, and which rows."""
    for name, parameter in module.named_parameters():
        if tensor is parameter:
            return name, 0, len(parameter)
        whole = torch_private.base(tensor) is parameter
        if whole and tensor.stride() == parameter.stride() and tensor.shape[1:] == parameter.shape[1:]:
            start, rest = divmod(int(tensor.storage_offset() - parameter.storage_offset()), parameter.stride(0))
            if rest == 0:
                return name, start, start + len(tensor)
    raise RuntimeError(
        f"a weight of this {type(module).__name__} is neither a parameter nor some rows of one, so when='step' does not know "
        "whose gradient to condition; use when='backward'"
    )


def _plain(module: nn.Module, site: ConditionedLayer, *args: Any, **kwargs: Any) -> Any:
    """The adapter of a layer that was detached."""
    return type(module).forward(module, *args, **kwargs)


def child(name: str, part: str) -> str:
    """The name of a part of a layer, as the model names it."""
    return f"{name}.{part}" if name else part
