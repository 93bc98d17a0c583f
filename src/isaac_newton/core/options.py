"""What `attach` was told, and where the training that it serves stands."""

import itertools
import math
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from isaac_newton import torch_private
from isaac_newton.core.checks import check_choice, check_count, check_flag, check_share
from isaac_newton.core.clock import Clock
from isaac_newton.core.distributed import Ranks
from isaac_newton.kernels.permutation import draw_seed
from isaac_newton.math.damping import Damping, RelativeTo, check, number, relative_to

if TYPE_CHECKING:
    from isaac_newton.core.conditioner import Conditioner
    from isaac_newton.core.gathering import Part
    from isaac_newton.core.use import Use
    from isaac_newton.kernels.streams import Capture

__all__ = [
    "LIVE",
    "BiasMode",
    "Options",
    "OutputCurvature",
    "OutputDamping",
    "Run",
    "Sharing",
    "When",
    "is_kfac",
]

BiasMode: TypeAlias = Literal["plain", "joint"]
OutputCurvature: TypeAlias = Literal["sampled", "exact", "empirical"]
OutputDamping: TypeAlias = Damping | Literal["kfac"]
Sharing: TypeAlias = Literal["expand", "reduce"]
When: TypeAlias = Literal["backward", "step"]
#: Called with a layer and its rows (groups, rows, features), or the counts of an embedding's tokens.
RowObserver: TypeAlias = Callable[[Any, Tensor], None]

#: Forward passes whose graphs are dropped leave dead references behind.
MOST_WAITING = 1024


class Watcher(Protocol):
    """Who looks after each backward pass whether everything was conditioned that should have been."""

    gone: dict[str, str]

    def after_pass(self) -> None: ...
    def met_frozen(self, name: str) -> None: ...
    def stop(self) -> None: ...


@dataclass(frozen=True)
class Options:
    """The options of `attach` that never change, validated; `ranks` are the processes whose batches count as one."""

    sharing: Sharing = "expand"
    max_rows: int | None = None
    bias: BiasMode = "plain"
    output_curvature: OutputCurvature = "sampled"
    samples: int = 1
    when: When = "backward"
    decay: float = 0.0
    refresh: int = 1
    gather: int | None = None
    warm_up: int = 0
    power: float = 1.0
    spread: bool = False
    ranks: Ranks | None = None
    keep_norm: bool = False
    #: Whether conditioners are made of fewer rows than a layer multiplies, or of copies.
    few_rows: bool = field(init=False)
    #: Whether the rows of a backward pass on this rank condition its gradient, and nothing else does.
    is_of_each_pass: bool = field(init=False)

    def __post_init__(self) -> None:
        check_choice("sharing", self.sharing, Sharing)
        check_choice("bias", self.bias, BiasMode)
        check_choice("output_curvature", self.output_curvature, OutputCurvature)
        check_choice("when", self.when, When)
        check_flag("keep_norm", self.keep_norm)
        check_flag("spread", self.spread)
        few = self.sharing == "reduce" or self.max_rows is not None or self.when == "step"
        vars(self).update(few_rows=few, is_of_each_pass=self.when == "backward" and self.ranks is None)
        check_count("samples", self.samples)
        check_count("refresh", self.refresh)
        if self.max_rows is not None:
            check_count("max_rows", self.max_rows)
        check_share("decay", self.decay, below_one=True)
        check_share("power", self.power)
        check_count("warm_up", self.warm_up, 0)
        running = {name: getattr(self, name) for name in ("decay", "refresh", "gather", "warm_up", "power", "spread")}
        if self.when == "backward" and tuple(running.values()) != (0.0, 1, None, 0, 1.0, False):
            given = ", ".join(f"{name}={value}" for name, value in running.items())
            raise ValueError(
                f"decay, refresh, gather, warm_up, power and spread are for when='step', got {given} with when='backward'"
            )
        self._check_gather()

    def _check_gather(self) -> None:
        """Refuse to gather what nobody would look at."""
        if self.gather is not None and check_count("gather", self.gather) > self.refresh:
            raise ValueError(
                f"gather counts the last steps before a refresh: at most refresh={self.refresh}, got {self.gather}"
            )
        if self.spread and self.decay == 0 and self.refresh == 1:
            raise ValueError("spread=True divides among ranks what lasts over steps: give a decay above 0, or refresh above 1")
        if self.decay == 0 and (self.warm_up or (self.gather or 1) > 1):
            raise ValueError(
                f"gather={self.gather} and warm_up={self.warm_up} fill an average, and decay=0 keeps none: give decay=0.95, say"
            )

    @property
    def gathered_steps(self) -> int:
        """In how many of every `refresh` steps rows are gathered, the last ones: what no average keeps is not gathered."""
        return self.gather or (self.refresh if self.decay else 1)

    @property
    def keeps_rows(self) -> bool:
        """Whether the rows of this step are all that its conditioner depends on; with ranks or an average they are not."""
        alone = self.ranks is None or self.ranks.count == 1
        return alone and self.decay == 0 and self.refresh == 1 and self.power == 1

    def check_outputs(self, output_damping: OutputDamping) -> None:
        """Refuse what ζ cannot do."""
        if output_damping == math.inf:
            return
        if self.sharing != "expand":
            raise ValueError(
                f"ζ (output_damping={output_damping}) needs rows of inputs and of output gradients: it works with "
                f"sharing='expand', got sharing={self.sharing!r}; use output_damping=math.inf for ζ*"
            )
        if self.max_rows is not None and self.output_curvature != "empirical":
            raise ValueError(
                f"ζ (output_damping={output_damping}) with output_curvature={self.output_curvature!r} needs every row: it "
                f"works with max_rows=None, got max_rows={self.max_rows}; use output_curvature='empirical'"
            )
        if not self.is_of_each_pass:
            raise ValueError(
                f"ζ (output_damping={output_damping}) conditions each backward pass on its rank: it works with "
                "when='backward' and without process_group; use output_damping=math.inf for ζ*"
            )


@dataclass(eq=False)
class Run:
    """Where training stands: what changes while the options stay. All layers of one attachment share it.

    Attributes:
        damping: λ_a.
        output_damping: λ_g; infinite for ζ*.
        mask: Which positions count, in the forward pass that runs: what was set by hand, else what the model was called with.
        set_mask: What was set by hand.
        memory: What an encoder has made, as its decoder is called with it, and the mask of that.
        differs: Whether calls of a layer may differ by mask or `is_plain`.
        backward_passes: With `steps`, what a damping schedule is called with.
        bound: Whether somebody is to condition the gradients at the step.
        is_plain: Whether forward passes lead to plain gradients.
        gathering: With `when="step"`: whether passes count although no gradient is accumulated.
        fresh: With `when="step"`: whether gradients came since the last step that was counted.
        collecting: True during the extra passes of `Handle.backward`, in which layers record ḡ and form no weight gradient.
        inspecting: True while layers record what conditioning does to them.
        row_observer: Gets the rows of each layer in a forward pass.
        empirical_scale: Times the square root of its rows, turns a layer's g into ḡ for the empirical Fisher; None: the loss is
            the mean over as many terms as the layer has rows.
        capture: Set while a step is captured into a CUDA graph.
        waiting: Uses whose conditioners nobody has asked for yet; their graphs own them.
        made: With `process_group`, the conditioners of this pass and their inputs.
        parts: With `when="step"`, the inputs of this pass and what they add to second moments.
        look_at: At this length of the list, references to graphs that were dropped leave it.
        alone: Whether weights have a node of their own from now on (see `use.Opening`).
        watch: Looks at what happened when a backward pass has ended.
        clock: Runs in a pass now and then.
        mask_met, mask_missed: Whether an input began with the mask's shape since it was set, and with what another one began.
        relative: What the damping is relative to. Compiled code is made for that, and for any number.
        number: Stands for this in compiled code; `noted`: of its uses there, the passes last filled into the statistics.
    """

    options: Options = field(default_factory=Options)
    damping: Damping = 1.0
    output_damping: OutputDamping = math.inf
    mask: Tensor | None = None
    set_mask: Tensor | None = None
    memory: tuple[Tensor, Tensor | None] | None = field(default=None, repr=False)
    differs: bool = False
    backward_passes: int = 0
    steps: int = 0
    bound: bool = False
    gathering: bool = False
    is_plain: bool = False
    fresh: bool = False
    collecting: bool = False
    inspecting: bool = False
    row_observer: RowObserver | None = None
    empirical_scale: float | Tensor | None = None
    capture: "Capture | None" = None
    waiting: "list[weakref.ref[Use]]" = field(default_factory=list, repr=False)
    look_at: int = MOST_WAITING
    alone: bool = False
    made: "dict[Hashable, tuple[Conditioner, Tensor]]" = field(default_factory=dict, repr=False)
    parts: "dict[Hashable, tuple[weakref.ref[Tensor], Part]]" = field(default_factory=dict, repr=False)
    watch: "Watcher | None" = field(default=None, repr=False)
    clock: Clock = field(default_factory=Clock, repr=False)
    mask_met: bool = False
    mask_missed: Sequence[int] | None = None
    relative: RelativeTo | None = field(init=False)
    number: int = field(init=False)
    noted: dict[int, int] = field(default_factory=dict, repr=False)
    _pass: int = field(default=-1, repr=False)
    _source: "tuple[weakref.ref[Tensor], int, object] | None" = field(default=None, repr=False)
    _stepped: set[int] = field(default_factory=set, repr=False)
    _dropped_in: int = field(default=-1, repr=False)
    _missed: int = field(default=0, repr=False)
    _told: set[str] = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        LIVE.add(self)
        self.number = next(_NUMBERS)
        self.set_damping(self.damping)
        if not is_kfac(self.output_damping):
            self.output_damping = check(self.output_damping, "output_damping")
        self.options.check_outputs(self.output_damping)

    def __getstate__(self) -> dict[str, Any]:
        # Graphs are not copied, and neither is what waits for their backward passes. No handle steps for a copy.
        fresh: dict[str, Any] = {"_source": None, "waiting": [], "made": {}, "parts": {}, "noted": {}, "memory": None}
        return {**self.__dict__, **fresh, "_pass": -1, "_stepped": set(), "bound": False, "watch": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        LIVE.add(self)
        self.number = next(_NUMBERS)

    def set_damping(self, damping: Damping) -> None:
        """From now on this one. Compiled code asks what it is relative to, and must not keep the number."""
        self.damping = check(damping)
        self.relative = relative_to(self.damping)

    @property
    def conditions_outputs(self) -> bool:
        """Whether this is ζ rather than ζ*."""
        return self.output_damping != math.inf

    @property
    def needs_extra_pass(self) -> bool:
        """Whether ḡ has to be backpropagated beside g."""
        return self.conditions_outputs and self.options.output_curvature != "empirical"

    @property
    def step(self) -> int:
        """Backward passes before the current one, or steps before the current one."""
        return max((self.steps if self.options.when == "step" else self.backward_passes) - 1, 0)

    @property
    def is_warming_up(self) -> bool:
        """Whether the current step only gathers."""
        return self.steps <= self.options.warm_up

    @property
    def seed(self) -> int | Tensor:
        """For drawing rows in the current pass: follows `torch.manual_seed` and leaves torch's own generators alone."""
        if self.capture is not None:
            return self.capture.seed
        # A pass has one seed, also before somebody has counted it.
        return draw_seed(self.backward_passes + (torch_private.current_pass() not in (-1, self._pass)))

    def source_of(self, x: Tensor) -> object:
        """What stands for a tensor that may be gone in the backward pass: the same as long as it comes again and again."""
        version = torch_private.version(x)
        if self._source is None or self._source[0]() is not x or self._source[1] != version:
            self._source = weakref.ref(x), version, object()
        return self._source[2]

    def enter_pass(self) -> int:
        """Count the current backward pass, once; returns torch's number of it, which nobody can set."""
        now = torch_private.current_pass()
        if now != self._pass:
            self._pass = now
            self.backward_passes += 1
            if self.watch is not None and now >= 0 and not torch.compiler.is_compiling():
                torch_private.after_backward(self.watch.after_pass)
        return now

    def take_mask(self, mask: Tensor | None) -> None:
        """The mask that a model is called with holds until another forward pass."""
        self.mask, self.memory, self.mask_met, self.mask_missed = mask, None, False, None

    def damping_now(self) -> tuple[float | Tensor, RelativeTo]:
        """λ, or ρ and what it is relative to, for the current backward pass or step."""
        if self.capture is None and isinstance(self.damping, float):
            return self.damping, ""
        strength, relative = number(self.damping, self.step)
        return (strength if self.capture is None else self.capture.damping), relative

    def output_damping_now(self) -> tuple[float | Tensor, RelativeTo]:
        """The same of the output side."""
        kfac = is_kfac(self.output_damping)
        strength, relative = number(self.damping if kfac else self.output_damping, self.step)  # type: ignore[arg-type]
        if self.capture is not None:
            return (self.capture.damping if kfac else self.capture.output_damping), relative
        return strength, relative

    def is_news(self, what: str) -> bool:
        """Whether nobody was told so far, of what is said once."""
        is_new = what not in self._told
        self._told.add(what)
        return is_new

    def warn_about_failure(self) -> None:
        """A factorization failed: said once, for all layers and steps."""
        if self.is_news("failure"):
            warnings.warn(
                "a factorization failed: for this layer and this step it was repeated with a larger damping, or the gradient "
                "left plain; handle.statistics counts how often per layer",
                RuntimeWarning,
                stacklevel=2,
            )

    def warn_about_digits(self, name: str) -> None:
        """Too little of a gradient is left for its precision: said once, for all layers and steps."""
        if self.is_news("digits"):
            warnings.warn(
                f"digits were lost in layer {name!r}: conditioning leaves less of its gradient than that is precise; scale the "
                "inputs to about 1, or take a larger damping. handle.statistics counts how often per layer, as fallbacks",
                RuntimeWarning,
                stacklevel=2,
            )

    def count_step(self, optimizer: object) -> None:
        """Count a step. Optimizers that step one after the other on the same gradients make one step together."""
        if self.fresh or not self._stepped or id(optimizer) in self._stepped:
            self.steps += 1
            self._stepped = set()
        self._stepped.add(id(optimizer))
        self.fresh, self._missed, self.bound = False, 0, True

    def note_dropped(self, *, changed: bool) -> None:
        """A gradient was cleared that no step has seen: normal where steps are skipped, a mistake where none is ever made.

        `changed`: whether the weights have changed meanwhile, as they do where an optimizer steps that is not bound.
        """
        if self._dropped_in == self._pass:
            return
        self._dropped_in = self._pass
        # SAM changes weights once before each step, and a GradScaler may skip a few steps in the beginning.
        self._missed += 8 if changed else 1 if self.bound else 16
        if self._missed >= 16:
            self.warn_about_missed()

    def warn_about_missed(self) -> None:
        """No step conditions the gradients: said once."""
        if self.is_news("missed"):
            warnings.warn(
                "when='step', but gradients are cleared and no step has conditioned them: call handle.bind(optimizer) once for "
                "each optimizer, also for a new one, or handle.step() before each optimizer.step(); detach a copied or loaded "
                "model and attach it again to have its handle",
                RuntimeWarning,
                stacklevel=2,
            )

    def warn_about_strange(self, weights: Sequence[str]) -> None:
        """Gradients came from elsewhere: said once."""
        if self.is_news("strange"):
            named = ", ".join(map(repr, weights[:5])) + (f" and {len(weights) - 5} more" if len(weights) > 5 else "")
            warnings.warn(
                f"the gradient of {named} is not the sum of the backward passes since the last step, or its rows cannot be "
                "joined: it stays plain. Run the passes whose gradients you sum by hand inside of `with handle.gathering():`",
                RuntimeWarning,
                stacklevel=2,
            )

    def warn_about_lent(self) -> None:
        """A gradient arrived at a weight that the layer does not hold: said once."""
        if self.is_news("lent"):
            warnings.warn(
                "when='step', but a layer was called with a weight of somebody else (torch.func.functional_call), whose "
                "gradient no step conditions: it stays plain. Use when='backward' for it, or `with handle.plain():` if that is "
                "meant",
                RuntimeWarning,
                stacklevel=2,
            )


#: All that exist: `capture` finds those that a training step uses by the backward passes they count.
LIVE: "weakref.WeakSet[Run]" = weakref.WeakSet()
_NUMBERS = itertools.count()


def is_kfac(value: object) -> bool:
    """Whether an output damping is that of the inputs. Arrays, which are none at all, do not compare."""
    return isinstance(value, str) and value == "kfac"
