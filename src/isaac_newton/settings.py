"""What one attachment has been told: shared by all of its layers, changeable while training."""

import math
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from isaac_newton.damping import Damping, check, current, number, on_device
from isaac_newton.distributed import Ranks
from isaac_newton.inputs import Inputs
from isaac_newton.rows import Sharing

__all__ = ["BiasMode", "OutputCurvature", "OutputDamping", "Settings", "When", "check_choice", "check_count", "is_kfac"]

BiasMode: TypeAlias = Literal["plain", "joint"]
OutputCurvature: TypeAlias = Literal["sampled", "exact", "empirical"]
OutputDamping: TypeAlias = Damping | Literal["kfac"]
When: TypeAlias = Literal["backward", "step"]
#: Called with a layer's site and its rows (groups, rows, features), or the counts of an embedding's tokens.
Look: TypeAlias = Callable[[Any, Tensor], None]


@dataclass(eq=False)
class Settings:
    """The options of `attach`, validated, and where training stands.

    `backward_passes`, or with `when="step"` the number of `steps`, is what a damping schedule is called with. `ranks` are the
    processes whose batches count as one; None: each its own. `mask` says which positions count. `collecting` is true during
    the extra passes of `Handle.backward`, in which layers record ḡ and form no weight gradient; `inspecting` while they record
    what conditioning does to them; `look` gets the rows of each layer in a forward pass. `empirical_scale` times the square
    root of its rows turns a layer's g into ḡ for the empirical Fisher; None: the loss is the mean over as many terms as the
    layer has rows. `graph_task` is torch's number of the current backward pass, which nobody can set. While a step is captured
    into a CUDA graph, `overlap` counts how often each weight was used, and the dampings are the numbers in `device_damping`
    and `device_output_damping`, which outlive the capture.
    """

    damping: Damping = 1.0
    sharing: Sharing = "expand"
    max_rows: int | None = None
    bias: BiasMode = "plain"
    output_damping: OutputDamping = math.inf
    output_curvature: OutputCurvature = "sampled"
    samples: int = 1
    when: When = "backward"
    decay: float = 0.0
    refresh: int = 1
    power: float = 1.0
    ranks: Ranks | None = None
    mask: Tensor | None = None
    backward_passes: int = 0
    steps: int = 0
    bound: bool = False
    awaited: list[Any] = field(default_factory=list, repr=False)
    collecting: bool = False
    inspecting: bool = False
    look: Look | None = None
    warned: bool = False
    empirical_scale: float | Tensor | None = None
    overlap: Counter[int] | None = None
    device_damping: Tensor | None = None
    device_output_damping: Tensor | None = None
    inputs: Inputs = field(default_factory=Inputs, repr=False)
    graph_task: int = field(default=-1, repr=False)

    def __post_init__(self) -> None:
        LIVE.add(self)
        self.damping = check(self.damping)
        if not is_kfac(self.output_damping):
            self.output_damping = check(self.output_damping, "output_damping")
        check_choice("sharing", self.sharing, Sharing)
        check_choice("bias", self.bias, BiasMode)
        check_choice("output_curvature", self.output_curvature, OutputCurvature)
        check_count("samples", self.samples)
        if self.max_rows is not None:
            check_count("max_rows", self.max_rows)
        if self.conditions_outputs and (self.sharing != "expand" or self.max_rows is not None):
            raise ValueError(
                f"ζ (output_damping={self.output_damping}) needs every row: it works with sharing='expand' and max_rows=None, "
                f"got sharing={self.sharing!r} and max_rows={self.max_rows}; use output_damping=math.inf for ζ*"
            )
        self._check_step()

    def _check_step(self) -> None:
        check_choice("when", self.when, When)
        check_count("refresh", self.refresh)
        _check_share("decay", self.decay, below_one=True)
        _check_share("power", self.power)
        if self.when == "backward" and (self.decay, self.refresh, self.power) != (0.0, 1, 1.0):
            raise ValueError(
                f"decay, refresh and power are for when='step', got decay={self.decay}, refresh={self.refresh}, "
                f"power={self.power} with when='backward'"
            )
        if self.conditions_outputs and (self.when == "step" or self.ranks is not None):
            raise ValueError(
                f"ζ (output_damping={self.output_damping}) conditions each backward pass on its rank: it works with "
                "when='backward' and without process_group; use output_damping=math.inf for ζ*"
            )

    def __getstate__(self) -> dict[str, Any]:
        # Graphs are not copied, and neither is what awaits their backward passes.
        return {**self.__dict__, "awaited": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Copies and unpickled settings exist too; no handle steps for them.
        self.__dict__.update(state, bound=False)
        LIVE.add(self)

    @property
    def conditions_outputs(self) -> bool:
        """Whether this is ζ rather than ζ*."""
        return self.output_damping != math.inf

    @property
    def only_trains(self) -> bool:
        """Whether a backward pass conditions the gradient by the inputs and does nothing else."""
        return self.output_damping == math.inf and not self.inspecting and self.overlap is None

    @property
    def needs_extra_pass(self) -> bool:
        """Whether ḡ has to be backpropagated beside g."""
        return self.conditions_outputs and self.output_curvature != "empirical"

    @property
    def takes_every_row(self) -> bool:
        """Whether the rows of a layer's input are themselves the rows of its conditioner."""
        every = self.sharing == "expand" and self.max_rows is None and self.mask is None
        return every and self.when == "backward" and self.ranks is None

    @property
    def takes_few_rows(self) -> bool:
        """Whether the rows of a conditioner are few, whatever the number of positions, and this rank's own."""
        return (self.sharing == "reduce" or self.max_rows is not None) and self.when == "backward" and self.ranks is None

    @property
    def keeps_rows(self) -> bool:
        """Whether the rows of this step are all that its conditioner depends on; with ranks or an average they are not."""
        alone = self.ranks is None or self.ranks.count == 1
        return alone and self.decay == 0 and self.refresh == 1 and self.power == 1

    @property
    def step(self) -> int:
        """Backward passes before the current one, or steps before the current one."""
        if self.when == "step":
            return self.steps
        return max(self.backward_passes - 1, 0)

    @property
    def seed(self) -> int:
        """For drawing rows in the current pass: follows `torch.manual_seed` and leaves torch's own generator alone."""
        return (torch.initial_seed() + 0x9E3779B97F4A7C15 * self.backward_passes) % 2**63

    def enter_backward(self) -> None:
        """Count backward passes: every layer calls this, the first one in a pass counts."""
        task = torch._C._current_graph_task_id()
        if task != self.graph_task:
            self.graph_task = task
            self.backward_passes += 1

    def warn_about_failure(self) -> None:
        """A factorization failed: said once, for all layers and steps."""
        if not self.warned:
            self.warned = True
            warnings.warn(
                "a factorization failed: for this layer and this step it was repeated with a larger damping, or the gradient "
                "left plain; handle.statistics counts how often per layer",
                RuntimeWarning,
                stacklevel=2,
            )

    def warn_about_dropped(self) -> None:
        """Rows were gathered and never used: normal where a step was skipped, a mistake where none was ever made."""
        if not self.bound:
            self.bound = True  # once is enough
            warnings.warn(
                "when='step', but nothing was conditioned so far: call handle.bind(optimizer) once, or handle.step() before "
                "each optimizer.step(); detach a copied or loaded model and attach it again to have its handle",
                RuntimeWarning,
                stacklevel=2,
            )

    def input_damping(self, a: Tensor, counted: Tensor | None = None) -> float | Tensor:
        """λ_a for rows `a` (…, rows, features) in the current backward pass, so that rows · λ_a is what is asked for.

        Of rows that are not `counted`, all of which are zero, there might as well be none: λ_a is smaller by their share. One
        that is relative to the rows' mean square is so already.
        """
        if self.device_damping is not None:
            damping: float | Tensor = on_device(self.damping, self.step, self.device_damping, a)
        else:
            damping = current(self.damping, self.step, a)
        plain = isinstance(damping, float) and damping == math.inf
        if counted is None or len(counted) == 0 or plain or number(self.damping, self.step)[1]:
            return damping
        return damping * counted.to(a.dtype).mean().clamp_min(1 / len(counted))

    def moment_damping(self, moment: Tensor, *, diagonal: bool) -> float | Tensor:
        """λ_a for a second moment (groups, features, features), or its diagonal, at the current step."""
        strength, relative = number(self.damping, self.step)
        if not relative:
            return strength
        values = moment if diagonal else moment.diagonal(dim1=-2, dim2=-1)
        return (strength * values.mean()).clamp_min(torch.finfo(moment.dtype).tiny)

    def current_output_damping(self, gbar: Tensor, rows: int) -> float | Tensor:
        """λ_g for ḡ (samples, outputs) of a layer with so many rows, in the current backward pass."""
        damping = self.damping if self.output_damping == "kfac" else self.output_damping
        on_gpu = self.device_damping if self.output_damping == "kfac" else self.device_output_damping
        if on_gpu is not None:
            return on_device(damping, self.step, on_gpu, gbar, rows)
        return current(damping, self.step, gbar, rows)


#: All that exist: `capture` finds those that a training step uses by the backward passes they count.
LIVE: "weakref.WeakSet[Settings]" = weakref.WeakSet()


def is_kfac(value: object) -> bool:
    """Whether an output damping is that of the inputs. Arrays, which are none at all, do not compare."""
    return isinstance(value, str) and value == "kfac"


def check_choice(name: str, value: object, choices: object) -> None:
    """Refuse a value that is not one of a `Literal`'s."""
    allowed = get_args(choices)
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def check_count(name: str, value: object, least: int = 1) -> int:
    """Refuse what is not a whole number of at least so much."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}")
    return value


def _check_share(name: str, value: object, *, below_one: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not (0 <= value < 1 if below_one else 0 <= value <= 1):
        raise ValueError(f"{name} must be at least 0 and {'below' if below_one else 'at most'} 1, got {value}")
