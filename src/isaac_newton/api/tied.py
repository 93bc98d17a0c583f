"""Weights that several layers share: with `when="step"` a weight has one conditioner, of the rows of all its uses."""

from collections.abc import Mapping

from torch import nn

from isaac_newton.core.layer import child
from isaac_newton.layers import Registration

__all__ = ["apart"]


def apart(model: nn.Module, chosen: Mapping[str, tuple[nn.Module, Registration]], *, joint: bool) -> dict[str, str]:
    """The chosen layers whose rows cannot be joined with those of another layer that has the same weight, and why."""
    parts = {child(name, part): name for name, (_, found) in chosen.items() for part in ("", *found.parts)} | {
        name: name for name in chosen
    }
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            if parameter.dim() > 1:
                owners.setdefault(id(parameter), []).append((name, module))
    reasons: dict[str, str] = {}
    for sharing in owners.values():
        for name, module in sharing:
            for other, partner in sharing:
                why = "" if other == name else _difference(module, partner, parts.get(name), parts.get(other), chosen, joint)
                if why and name in parts:
                    reasons.setdefault(parts[name], f"its weight is tied to that of {other!r}, {why}")
    return reasons


def _difference(
    module: nn.Module,
    partner: nn.Module,
    name: str | None,
    other: str | None,
    chosen: Mapping[str, tuple[nn.Module, Registration]],
    joint: bool,
) -> str:
    """Why one conditioner cannot serve both; empty if it can."""
    if other is None:
        return "which is not conditioned, and when='step' conditions a weight as a whole"
    if name is not None and (chosen[name][1].adapter is not chosen[other][1].adapter or name == other):
        return f"a {type(partner).__name__}, whose rows are of another kind; when='backward' conditions each use by itself"
    if joint and getattr(module, "bias", None) is not getattr(partner, "bias", None):
        return "which has another bias, and bias='joint' conditions both together"
    return ""
