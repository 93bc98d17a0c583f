"""Calls of linear layers that go the short way: where a layer is no longer what it was, they go the long one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import isaac_newton as isaac

FORMS: dict[str, dict[str, Any]] = {
    "drawn": {"damping": 0.1, "max_rows": 7},
    "reduce": {"damping": 0.1, "sharing": "reduce"},
    "automatic": {},
}


class _Shifted(nn.Module):
    def forward(self, bias: Tensor) -> Tensor:
        return 2 * bias + 1


def _as_attribute(layer: nn.Linear) -> None:
    del layer.bias
    layer.bias = torch.ones(12)


def _as_buffer(layer: nn.Linear) -> None:
    del layer.bias
    layer.register_buffer("bias", torch.ones(12))


#: What a user may do to the bias of a layer, whose weight stays what it was.
CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "parametrized": lambda layer: parametrize.register_parametrization(layer, "bias", _Shifted()),
    "normalized": lambda layer: nn.utils.weight_norm(layer, "bias", dim=None),
    "pruned": lambda layer: prune.l1_unstructured(layer, "bias", 4),
    "an attribute": _as_attribute,
    "a buffer": _as_buffer,
    "removed": lambda layer: setattr(layer, "bias", None),
    "another": lambda layer: setattr(layer, "bias", nn.Parameter(torch.ones(12))),
    "frozen": lambda layer: layer.bias.requires_grad_(False),
    "swapped": lambda layer: setattr(layer.bias, "data", torch.ones(12)),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3))


def passes(model: nn.Module, count: int = 2) -> list[Tensor]:
    """Outputs, input gradients and gradients of everything but weights."""
    found = []
    for _ in range(count):
        model.zero_grad()
        torch.manual_seed(1)
        x = torch.randn(30, 4, 9, requires_grad=True)
        output = model(x)
        output.square().mean().backward()
        gradients = [p.grad for name, p in model.named_parameters() if not name.endswith("weight") and p.grad is not None]
        found += [output, x.grad, *gradients]
    return found


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("at_once", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("form", FORMS)
def test_a_bias_that_is_no_parameter_is_added_all_the_same(form: str, change: str, at_once: bool) -> None:
    found = []
    for is_attached in (False, True):
        model = network()
        if at_once:
            CHANGES[change](model[2])
        if is_attached:
            isaac.attach(model, **FORMS[form])
        before = passes(model)
        if not at_once:
            CHANGES[change](model[2])
        found.append(before + passes(model))
    assert len(found[0]) == len(found[1])
    for plain, attached in zip(*found, strict=True):
        assert torch.equal(plain, attached)


@pytest.mark.parametrize("form", ["drawn", "automatic"])
def test_a_sparse_input_is_refused_in_words_after_a_dense_one_too(form: str) -> None:
    model = nn.Sequential(nn.Linear(9, 3))
    isaac.attach(model, **FORMS[form])
    x = torch.randn(80, 9)
    for _ in range(2):
        model(x).sum().backward()
    with pytest.raises(TypeError, match="received a sparse tensor"):
        model(x.relu().to_sparse())
