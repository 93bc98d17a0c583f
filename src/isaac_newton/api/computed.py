"""Weights that somebody makes anew in each pass, as weight dropping does: of which parameters a layer's weight was made."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

__all__ = ["made_of", "raw"]

#: So many operations lie between a weight and what it is made of, at most: a network that writes weights is no raw weight.
_MOST = 16


class _Site(Protocol):
    @property
    def module(self) -> nn.Module: ...


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


def raw(model: nn.Module, sites: Mapping[str, _Site]) -> dict[str, str]:
    """By the names of modules all of whose matrices are such parameters: the conditioned layer that uses them."""
    users = {id(parameter): name for name, site in sites.items() for parameter in made_of(site.module)}
    found: dict[str, str] = {}
    if users:
        for name, module in model.named_modules():
            matrices = [id(p) for p in module.parameters(recurse=False) if p.dim() > 1]
            if matrices and all(number in users for number in matrices):
                found[name] = users[matrices[0]]
    return found
