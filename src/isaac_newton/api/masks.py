"""The attention mask that a model is called with: a hook takes it, so that padding neither counts nor dilutes the curvature."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from isaac_newton import torch_private
from isaac_newton.core.options import Run

__all__ = ["hook_models", "unhook_models"]

_NAME = "attention_mask"
#: Inside of a model they are called with masks of their own: an encoder with one, a decoder with another.
_MODEL = "transformers.modeling_utils.PreTrainedModel"


class _TakesMask:
    """Called before a model's forward pass, in which gradients are computed: its mask is that of the pass."""

    def __init__(self, run: Run, position: int, outermost: bool) -> None:
        self.run, self._position, self._outermost = run, position, outermost

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        found = args[self._position] if self._position < len(args) else kwargs.get(_NAME)
        if isinstance(found, Tensor) and found.dim() == 2:
            self.run.take_mask(found)
        elif found is None or self._outermost:
            # Other forms say who sees whom, not which positions count.
            self.run.take_mask(None)


def hook_models(model: nn.Module, run: Run) -> None:
    """Take the mask of every model in here that is called with one; ζ needs every row."""
    if run.conditions_outputs:
        return
    for module, hook in _hooks(model, run, outermost=True):
        module.register_forward_pre_hook(hook, with_kwargs=True)


def _hooks(module: nn.Module, run: Run, outermost: bool) -> Iterator[tuple[nn.Module, _TakesMask]]:
    """The outermost modules whose forward pass takes an attention mask, and the models inside of them."""
    is_model = any(f"{kind.__module__}.{kind.__qualname__}" == _MODEL for kind in type(module).__mro__)
    if outermost or is_model:
        try:
            names = list(inspect.signature(module.forward).parameters)
        except (TypeError, ValueError):
            names = []
        if _NAME in names:
            yield module, _TakesMask(run, names.index(_NAME), outermost)
            outermost = False
    for child in module.children():
        yield from _hooks(child, run, outermost)


def unhook_models(model: nn.Module, run: Run) -> None:
    """The way back."""
    for module in model.modules():
        torch_private.remove_forward_pre_hooks(module, lambda hook: isinstance(hook, _TakesMask) and hook.run is run)
