"""Weights that are not those of one layer alone: several layers share one, or each pass makes it anew of other parameters."""

import itertools
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from isaac_newton.core.layer import ConditionedLayer, child
from isaac_newton.layers import Registration

__all__ = ["apart", "made_of", "raw"]

#: So many operations lie between a weight and what it is made of, at most: a network that writes weights is no raw weight.
_MOST = 16


def apart(model: nn.Module, chosen: Mapping[str, tuple[nn.Module, Registration]], *, joint: bool) -> dict[str, str]:
    """The chosen layers whose rows cannot be joined with those of another layer that has the same weight, and why.

    With `when="step"` a weight has one conditioner, of the rows of all its uses.
    """
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
        for (name, module), (other, partner) in itertools.permutations(sharing, 2):
            mine, its = parts.get(name), parts.get(other)
            if mine is None or mine in reasons:
                continue
            if its is None:
                why = "which is not conditioned, and when='step' conditions a weight as a whole"
            elif mine == its or chosen[mine][1].adapter is not chosen[its][1].adapter:
                kind = type(partner).__name__
                why = f"a {kind}, whose rows are of another kind; when='backward' conditions each use by itself"
            elif joint and getattr(module, "bias", None) is not getattr(partner, "bias", None):
                why = "which has another bias, and bias='joint' conditions both together"
            else:
                continue
            reasons[mine] = f"its weight is tied to that of {other!r}, {why}"
    return reasons


def made_of(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of other modules that became weights of this one in its last call, number by number."""
    found: dict[int, nn.Parameter] = {}
    for value in vars(module).values():
        if not isinstance(value, Tensor) or value.dim() < 2:
            continue
        nodes: list[Any] = [value.grad_fn]
        for node in nodes:
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, nn.Parameter) and leaf.shape == value.shape:
                found[id(leaf)] = leaf
            following = [] if node is None else [each for each, _ in node.next_functions]
            nodes += following[: _MOST - len(nodes)]
    return list(found.values())


def raw(model: nn.Module, sites: Mapping[str, ConditionedLayer]) -> dict[str, str]:
    """By the names of modules all of whose matrices are such parameters: the conditioned layer that uses them."""
    users = {id(parameter): name for name, site in sites.items() for parameter in made_of(site.module)}
    found: dict[str, str] = {}
    if users:
        for name, module in model.named_modules():
            matrices = [id(p) for p in module.parameters(recurse=False) if p.dim() > 1]
            if matrices and all(number in users for number in matrices):
                found[name] = users[matrices[0]]
    return found
