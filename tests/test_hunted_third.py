"""A third hunt: what a user does with a training loop, tried by a few lines against the definition in float64."""

import copy
import gc
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import optimizer as optimizers

import isaac_newton as isaac
from definition import conditioner as exact_conditioner

LAMBDA = 0.3
BOTH = pytest.mark.parametrize("when", ["backward", "step"])


def conditioner(rows: Tensor) -> Tensor:
    """(I + rᵀr/(kλ))⁻¹."""
    return exact_conditioner(rows, LAMBDA)


def close(actual: Tensor | None, expected: Tensor) -> None:
    """What the library gives is the definition."""
    assert actual is not None
    assert (actual.double() - expected).norm() <= 1e-9 * expected.norm().clamp_min(1e-30)


# ---------------------------------------------------------------------------------------------------------------- the report


class DroppedWeight(nn.Module):
    """Recomputes the weight of a layer in each pass, from one that it owns, as AWD-LSTM's WeightDrop does."""

    def __init__(self, inner: nn.Module, name: str = "weight") -> None:
        super().__init__()
        self.inner, self.name = inner, name
        weight = getattr(inner, name)
        del inner._parameters[name]
        self.register_parameter(f"{name}_raw", nn.Parameter(weight.detach()))
        self.register_buffer("kept", (torch.arange(weight.numel()).reshape(weight.shape) % 3 > 0).double())

    def forward(self, x: Tensor) -> Any:
        setattr(self.inner, self.name, getattr(self, f"{self.name}_raw") * self.kept)
        return self.inner(x)


def test_a_raw_weight_that_is_conditioned_where_it_is_used_is_reported_so() -> None:
    model = nn.Sequential(DroppedWeight(nn.Linear(5, 4)), nn.Linear(4, 2, bias=False)).double()
    x = torch.randn(3, 5, dtype=torch.float64)
    plain: Any = copy.deepcopy(model)
    handle = isaac.attach(model, damping=LAMBDA)
    assert "plain: DroppedWeight" in " ".join(str(handle).split())  # before the first pass nobody can tell
    for one in (model, plain):
        one(x).square().sum().backward()
    raw: Any = model[0]
    r = conditioner(x)
    one = plain[0].inner(x) * 1.0
    weight = plain[0].inner.weight.detach().requires_grad_()
    plain[1](F.linear(x, weight, plain[0].inner.bias)).square().sum().backward()
    assert one.shape == (3, 4)
    close(raw.weight_raw.grad, weight.grad @ r * plain[0].kept)
    table = str(handle)
    assert "plain" not in table, table
    assert "ζ*, with 0.inner" in table
    assert "83.3 %" in table or "87.5 %" in table, table
    assert "0" not in handle.skipped


def test_a_raw_weight_of_a_recurrent_layer_is_reported_so() -> None:
    model: Any = DroppedWeight(nn.RNN(5, 4), "weight_hh_l0").double()
    handle = isaac.attach(model, damping=LAMBDA)
    model(torch.randn(6, 3, 5, dtype=torch.float64))[0].square().sum().backward()
    assert "plain" not in str(handle)


def test_a_raw_weight_is_reported_plain_where_its_layer_is() -> None:
    model = nn.Sequential(DroppedWeight(nn.Linear(5, 4)), nn.Linear(4, 2)).double()
    handle = isaac.attach(model, damping=LAMBDA, exclude="0*")
    model(torch.randn(3, 5, dtype=torch.float64)).square().sum().backward()
    assert str(handle).count("plain") == 2, str(handle)


# ---------------------------------------------------------------------------------------------------------------- lifetimes


def test_a_model_that_is_gone_leaves_no_hook_on_optimizers() -> None:
    """A search over settings attaches many models, and detaches none."""
    hooks: Any = vars(optimizers)["_global_optimizer_post_hooks"]
    gc.collect()
    before = len(hooks)
    model = nn.Sequential(nn.Linear(3, 2))
    isaac.attach(model, when="step")
    gc.collect()
    assert len(hooks) == before + 1, "it is the model's, and outlives the handle"
    model(torch.randn(4, 3)).sum().backward()
    with pytest.warns(RuntimeWarning, match="bind"):
        torch.optim.SGD(model.parameters(), 0.1).step()
    del model
    gc.collect()
    assert len(hooks) == before
