"""What goes past a handle: weights used outside their layers, layers replaced or added later, masks that fit nothing."""

import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from isaac_newton import torch_private
from isaac_newton.api.binding import notice_unbound
from isaac_newton.core.distributed import is_sharded
from isaac_newton.core.layer import ConditionedLayer
from isaac_newton.core.options import Run
from isaac_newton.layers import Registration, find

__all__ = ["Watch", "listed"]

_OUTSIDE = (
    "the weights of {} received a gradient, but nobody called these layers, so that it stayed plain: call the layer in place "
    "of F.linear(x, layer.weight), pass its weight through isaac.condition if it has an adapter, or name it in exclude="
)
_REPLACED = "{} were replaced after attach, and what took their place keeps its plain gradient: detach and attach again"
_ADDED = "{} came after attach and keep their plain gradient: detach and attach again"
_ADDED_UP = (
    "the gradients of {} are sums of what lookups gave and of something else, as h @ embedding.weight.T or a penalty, and "
    "when='step' conditions such a sum by the lookups: use when='backward', or name them in exclude="
)
_MASK = (
    "the mask (handle.mask, or the attention_mask that the model was called with) has the shape {}, with which inputs do "
    "not begin (one has {}), so that every position counted there: set handle.mask to one of (samples, length), or to None"
)


class Watch:
    """Looks after each backward pass for layers that should have been conditioned and were not; says so once.

    A layer is watched closely until it is seen for the first time: a hook on its weight tells of a gradient that came without
    it. After that its own count of passes says enough.

    Args:
        model: What was attached.
        run: That of the attachment.
        sites: Its conditioned layers.
        wanted: Whether `attach` was told to condition a layer of this name.
    """

    def __init__(
        self,
        model: nn.Module,
        run: Run,
        sites: Mapping[str, ConditionedLayer],
        wanted: Callable[[str, nn.Module], bool],
    ) -> None:
        self._model, self._run, self._sites, self._wanted = model, run, sites, wanted
        self._known = weakref.WeakSet(model.modules())
        self._unseen: dict[str, list[RemovableHandle]] = {}
        #: Of layers that were seen: those that were looked for when they did not come.
        self._looked_for: set[str] = set()
        self._next_look = 1
        #: Layers that were trained at first. Tools that freeze them put others in their place, and then no pass tells.
        self._trained = {name for name, site in sites.items() if any(p.requires_grad for p in site.module.parameters())}
        self._said: set[tuple[str, str]] = set()
        self._news: list[str] = []
        #: Layers that are no longer what was attached, with what happened to them.
        self.gone: dict[str, str] = {}
        self._buckets = {site.bucket[0] for site in sites.values() if site.bucket is not None}
        self._is_on_cpu = all(p.device.type == "cpu" for p in model.parameters())
        self._hook_weights()
        #: Steps of optimizers since the last backward pass, that pass, and at how many of them somebody looks.
        self._idle, self._idle_since, self._look_idle = 0, -1, 4
        _ALIVE.add(self)
        _hook_optimizers()
        run.watch = self

    def _hook_weights(self) -> None:
        users: dict[nn.Parameter, list[str]] = {}
        for name, site in self._sites.items():
            self._unseen[name] = []
            for weight in site.module.parameters():
                if weight.is_leaf and weight.requires_grad and weight.dim() > 1:
                    users.setdefault(weight, []).append(name)
            own = getattr(site.module, "weight", None)
            if isinstance(own, nn.Parameter) and self._run.options.bias == "plain" and not torch_private.is_hooked(own):
                site.left = []
        for parameter, names in users.items():
            self._unseen[names[0]].append(parameter.register_hook(_Arrival(weakref.ref(self), names)))

    def came_past(self, names: Iterable[str], gradient: Tensor) -> None:
        """The weight of these layers received a gradient; one of them should have been seen."""
        if self._run.is_plain or any(self._sites[name].was_plain for name in names):
            return
        if any(self._sites[name].statistics.backward_pass for name in names):
            self._compare(names, gradient)
            return
        self.gone |= dict.fromkeys(names, "used outside its layer")
        if not self._news:
            torch_private.after_backward(self._say_outside)
        self._news += names

    def _compare(self, names: Iterable[str], gradient: Tensor) -> None:
        """Whether that is what calls of these layers have left for it."""
        sites = [self._sites[name] for name in names]
        parts = [part for site in sites for part in site.left or ()]
        known = self._run.capture is None and all(site.left is not None for site in sites)
        if not known or not _differs(parts, gradient):
            return
        for site in sites:
            site.statistics.elsewhere = True
        if self._run.options.when == "step":
            self._say(_ADDED_UP, [site.name for site in sites if isinstance(site.module, nn.Embedding)])

    def _say_outside(self) -> None:
        names, self._news = self._news, []
        self._say(_OUTSIDE, names)

    def after_pass(self) -> None:
        """When a backward pass has ended."""
        run, now = self._run, self._run.backward_passes
        run.memory = None  # of the forward pass, and large
        if run.clock.running:
            run.clock.end()
        missing, unseen = False, bool(self._unseen)
        for name, site in self._sites.items():
            if site.statistics.backward_pass == now:
                if unseen and name in self._unseen:
                    for hook in self._unseen.pop(name):
                        hook.remove()
                    self.gone.pop(name, None)
                    site.left = None
            elif name not in self._looked_for and name not in self._unseen:
                missing = True
                self._looked_for.add(name)
        if missing or now >= self._next_look:
            self._next_look = 2 * now
            self.say_what_changed()
        # An input did not begin with the mask's shape: one over samples fits all inputs, one over positions fits some.
        if run.mask is not None and run.mask_missed is not None and (run.mask.dim() == 1 or not run.mask_met):
            self._say(_MASK, ["mask"], tuple(run.mask.shape), tuple(run.mask_missed))
        if now + 1 >= self._next_look and self._is_on_cpu:
            run.clock.begin()

    def after_step(self, optimizer: Optimizer) -> None:
        """When some optimizer has stepped: where all layers were replaced no backward pass tells."""
        for bucket in self._buckets:
            bucket.forget_copies()
        if self._run.options.when == "step":
            notice_unbound(self._sites, optimizer)
        now = self._run.backward_passes
        self._idle = self._idle + 1 if now == self._idle_since else 1
        self._idle_since = now
        if self._idle >= self._look_idle:
            self._look_idle *= 2
            self.say_what_changed()

    def met_frozen(self, name: str) -> None:
        """A layer was called whose weight is frozen."""
        if name in self._trained:
            self._trained.clear()
            self.say_what_changed()

    def say_what_changed(self) -> None:
        """Whether the model still consists of what it was."""
        came = self.newcomers()
        there = set(map(id, self._model.modules()))
        replaced = [name for name, site in self._sites.items() if site.is_attached and id(site.module) not in there]
        self.gone |= dict.fromkeys(replaced, "replaced")
        self._say(_REPLACED, replaced)
        self._say(_ADDED, [name for name in came if name not in replaced and self._stays_plain(name, came[name])])

    def newcomers(self) -> dict[str, nn.Module]:
        """What was not there when the model was attached."""
        return {name: module for name, module in self._model.named_modules() if module not in self._known}

    def _stays_plain(self, name: str, module: nn.Module) -> bool:
        """Whether this layer, which came later, is one that `attach` would have conditioned."""
        live = any(p.requires_grad and p.dim() > 1 for p in module.parameters(recurse=False))
        return live and isinstance(find(module), Registration) and self._wanted(name, module)

    def _say(self, message: str, names: Iterable[str], *about: object) -> None:
        fresh = [name for name in names if (message, name) not in self._said]
        if fresh:
            self._said.update((message, name) for name in fresh)
            warnings.warn(message.format(*about or [f"layers {listed(fresh, 8)}"]), RuntimeWarning, stacklevel=_level_of_user())

    def stop(self) -> None:
        """When the handle is detached."""
        for hooks in self._unseen.values():
            for hook in hooks:
                hook.remove()
        for name in self._unseen:
            self._sites[name].left = None
        self._unseen.clear()
        _ALIVE.discard(self)
        self._run.watch = None


#: Those of models that are there and attached.
_ALIVE: "weakref.WeakSet[Watch]" = weakref.WeakSet()


@functools.cache
def _hook_optimizers() -> None:
    """One hook for all, and for good: one that went with its model could go while torch calls them one after the other."""
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    if not torch.compiler.is_compiling():
        for watch in list(_ALIVE):
            watch.after_step(optimizer)


class _Arrival:
    """A hook on a weight none of whose layers was seen so far."""

    bears_none = True

    def __init__(self, watch: "weakref.ref[Watch]", names: list[str]) -> None:
        self._watch, self._names = watch, names

    def __call__(self, gradient: Tensor | None) -> None:
        told = None if torch.compiler.is_compiling() or gradient is None else self._watch()
        if told is not None and gradient is not None:
            told.came_past(self._names, gradient)


def _differs(parts: Sequence[Tensor], gradient: Tensor) -> bool:
    """Whether a gradient is not the sum of these parts, as far as one can see."""
    if not parts or len({part.shape for part in parts}) > 1:
        return False
    if not all(part.numel() == gradient.numel() and _is_dense(part) for part in [*parts, gradient]):
        return False
    # Layers may hold it transposed, which norms do not see.
    total = torch.stack([part.detach().double() for part in parts]).sum(0).norm()
    digits = max(torch.finfo(part.dtype).eps for part in [*parts, gradient])
    return bool((gradient.detach().double().norm() - total).abs() > 100 * digits * total)


def _is_dense(tensor: Tensor) -> bool:
    """Whether it has numbers that can be added up here."""
    there = torch_private.has_values(tensor) and not torch_private.is_one_of_many(tensor)
    return there and tensor.layout is torch.strided and not is_sharded(tensor)


def _level_of_user() -> int:
    """How far up the line is that began the backward pass, past torch and this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("isaac_newton", "torch"):
        level, frame = level + 1, frame.f_back
    return level


def listed(candidates: Iterable[str], most: int = 40) -> str:
    """Names for a message, not too many."""
    names = [repr(name) if name else "'' (the model itself)" for name in candidates]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
