"""Which optimizers change weights: those inside of one that `Handle.bind` was given, and those that nobody has bound."""

import warnings
from collections.abc import Iterator, Mapping

import torch
from torch.optim import Optimizer

from isaac_newton import torch_private
from isaac_newton.core.layer import ConditionedLayer

__all__ = ["held", "notice_unbound", "steppers"]


def notice_unbound(sites: Mapping[str, ConditionedLayer], optimizer: Optimizer) -> None:
    """After any optimizer's step: say so if it has used gradients that nobody has conditioned."""
    waiting = [(site, name) for site in sites.values() for name, gathering in site.gatherings.items() if gathering.grown]
    if not waiting:
        return  # as after each step of an optimizer that is bound
    mine = held(optimizer)
    for site, name in waiting:
        parameter = site.module.get_parameter(name)
        if parameter.grad is not None and id(parameter) in mine:
            site.run.warn_about_missed()


def steppers(optimizer: object) -> list[Optimizer]:
    """The optimizers whose steps change the weights of this one: itself, or those inside of it, or both."""
    inside = [each for inner in _inside(optimizer) for each in steppers(inner)]
    if not isinstance(optimizer, Optimizer):
        if isinstance(optimizer, torch.nn.Module) or not inside:
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        return inside
    if held(optimizer) <= {number for inner in inside for number in held(inner)}:
        return inside  # SAM, Lookahead, what trainers put around: they may call the other's step, and skip it
    if not torch_private.runs_step_hooks(optimizer):
        raise ValueError(
            f"the step hooks of {type(optimizer).__name__} never run, so nothing would be conditioned: bind the optimizer "
            "inside of it, or call handle.step() right before each of its steps"
        )
    if isinstance(optimizer, torch.optim.LBFGS) and any(group.get("line_search_fn") for group in optimizer.param_groups):
        warnings.warn(
            "the line search of LBFGS compares gradients with the loss, and ζ* is not the gradient of the loss: it will end at "
            "the wrong place; use line_search_fn=None, or LBFGS without isaac_newton",
            RuntimeWarning,
            stacklevel=3,
        )
    return [*inside, optimizer]


def _inside(optimizer: object) -> Iterator[Optimizer]:
    """The optimizers that this one holds: those with parameters of its own, if it has any."""
    mine = held(optimizer) if isinstance(optimizer, Optimizer) else set()
    for value in list(getattr(optimizer, "__dict__", {}).values()):
        several = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        for each in several:
            if isinstance(each, Optimizer) and each is not optimizer and (not mine or mine & held(each)):
                yield each


def held(optimizer: Optimizer) -> set[int]:
    """The parameters that it changes."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
