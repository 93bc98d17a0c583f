"""Masks: the one that is set by hand is checked, and a hook takes the one that a model is called with.

So padding neither counts nor dilutes the curvature.
"""

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from isaac_newton import torch_private
from isaac_newton.core.options import Run

__all__ = ["hook_models", "positions", "unhook_models"]

_NAME = "attention_mask"
#: What a decoder is called with for its cross-attention.
_MEMORY, _MEMORY_MASK = "encoder_hidden_states", "encoder_attention_mask"
#: Inside of a model they are called with masks of their own: an encoder with one, a decoder with another.
_MODEL = "transformers.modeling_utils.PreTrainedModel"


class _TakesMask:
    """Called before a model's forward pass, in which gradients are computed: its mask is that of the pass."""

    def __init__(self, run: Run, names: Sequence[str], outermost: bool, is_model: bool) -> None:
        self.run, self._outermost, self._is_model = run, outermost, is_model
        self._places = {name: names.index(name) for name in (_NAME, _MEMORY, _MEMORY_MASK) if name in names}

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not torch.is_grad_enabled() or self.run.set_mask is not None:
            return
        given = {name: args[at] if at < len(args) else kwargs.get(name) for name, at in self._places.items()}
        found, memory, memory_mask = (given.get(name) for name in (_NAME, _MEMORY, _MEMORY_MASK))
        if isinstance(found, Tensor) and found.dim() == 2 and (self._is_model or not _is_triangle(found)):
            self.run.take_mask(self._counting(found))
        elif found is None or self._outermost:
            # Other forms say who sees whom, not which positions count.
            self.run.take_mask(None)
        if isinstance(memory, Tensor):
            counts = self._counting(memory_mask) if isinstance(memory_mask, Tensor) and memory_mask.dim() == 2 else None
            self.run.memory = memory, counts

    def _counting(self, mask: Tensor) -> Tensor | None:
        """Which positions count, in any convention but of models, who all have one; None if all do."""
        if self._is_model:
            counts = mask.to(torch.bool, copy=True)
        elif mask.dtype is torch.bool:
            counts = mask | ~mask.any()  # all where none would
        else:
            counts = torch.where((mask == 1).any(), mask != 0, mask == 0)  # of what is added to scores, those with zero
        # A GPU would wait for the answer.
        if counts.device.type == "cpu" and not torch.compiler.is_compiling():
            if bool(counts.all()):
                return None  # with nothing to leave out, layers keep the form that is cheapest
            _warn_if_inverted(counts, "the attention_mask that the model was called with")
        return counts


def _is_triangle(mask: Tensor) -> bool:
    """Whether this is who sees whom in causal attention, in any of its forms, and not what counts."""
    if mask.shape[0] != mask.shape[1] or len(mask) < 3 or torch.compiler.is_compiling():
        return False
    there, lower = mask.to(torch.bool), torch.ones_like(mask, dtype=torch.bool).tril()
    return torch.equal(there, lower) or torch.equal(there, ~lower)


def positions(mask: Tensor) -> Tensor:
    """A mask that is set by hand, as a copy of true and false."""
    if mask.is_floating_point():
        is_other = not ((mask == 0) | (mask == 1)).all()
    else:
        is_other = mask.dtype is not torch.bool and mask.device.type == "cpu" and bool((mask < 0).any())
    if is_other:
        raise ValueError(
            "mask must say which positions count, with true and false or 1 and 0; this one has other numbers, as masks "
            "that are added to attention scores have: give (mask == 0)"
        )
    counts = mask.to(torch.bool, copy=True)
    if counts.device.type == "cpu":
        _warn_if_inverted(counts, "handle.mask")
    return counts


def _warn_if_inverted(mask: Tensor, name: str) -> None:
    """A batch is as long as its longest sample: where that has no position and others end with some, padding was marked."""
    if mask.dim() != 2 or not mask.numel():
        return
    if not mask.any():
        what = "every position, so that gradients stay plain"
    elif bool((~mask.any(1)).any() & (mask[:, 1:] & ~mask[:, :-1]).any()):
        what = "whole samples and the beginnings of others"
    else:
        return
    warnings.warn(
        f"{name} leaves out {what}, as if it were true for padding: it has to be true for what counts, so give ~mask",
        RuntimeWarning,
        stacklevel=4,
    )


def hook_models(model: nn.Module, run: Run) -> None:
    """Take the mask of every model in here that is called with one; ζ needs every row."""
    if not run.conditions_outputs:
        _hook(model, run, outermost=True, known=set())


def _hook(module: nn.Module, run: Run, outermost: bool, known: set[nn.Module]) -> None:
    """The outermost modules whose forward pass takes an attention mask, and the models inside of them, each once."""
    if module in known:
        return
    known.add(module)
    is_model = any(f"{kind.__module__}.{kind.__qualname__}" == _MODEL for kind in type(module).__mro__)
    if outermost or is_model:
        try:
            names = list(inspect.signature(module.forward).parameters)
        except (TypeError, ValueError):
            names = []
        takes = _NAME in names
        if takes or not outermost:
            run.differs = True
            # What another model inside sees, as images, is not what the mask is of.
            hook = _TakesMask(run, names if takes else (), outermost, is_model)
            module.register_forward_pre_hook(hook, with_kwargs=True)
        outermost &= not takes
    for child in module.children():
        _hook(child, run, outermost, known)


def unhook_models(model: nn.Module, run: Run) -> None:
    """The way back."""
    for module in model.modules():
        torch_private.remove_forward_pre_hooks(module, lambda hook: isinstance(hook, _TakesMask) and hook.run is run)
