"""What a branch of a captured step writes is what the parameters get, whatever autograd does with it on the way."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isaac_newton as isaac
from isaac_newton.kernels import streams


@pytest.mark.parametrize("held", [False, True], ids=["kept as it is", "copied"])
def test_a_gradient_that_was_copied_before_it_was_written_is_copied_again(held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    parameter, others, addresses = nn.Parameter(torch.zeros(3)), [], []

    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            gradient = torch.zeros(3)
            memory = gradient.detach()
            addresses.append(gradient.data_ptr())
            # Autograd takes a gradient that only it knows; this list makes it known.
            others.extend([gradient] if held else [])
            monkeypatch.setattr(streams, "join", lambda owner: memory.copy_(torch.tensor([1.0, 2.0, 3.0])))
            streams.join_after_backward(parameter, [(parameter, gradient)])
            return gradient

    Late.apply(parameter).sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [1.0, 2.0, 3.0]
    assert (parameter.grad.data_ptr() == addresses[0]) is not held


def test_a_gradient_that_is_asked_for_by_hand_goes_to_no_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter, joined = nn.Parameter(torch.zeros(3)), []
    monkeypatch.setattr(streams, "join", joined.append)

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            gradient = 2 * g
            streams.join_after_backward("owner", [(parameter, gradient), (parameter, None)])
            return gradient

    (gradient,) = torch.autograd.grad(Twice.apply(parameter).sum(), [parameter])
    assert gradient.tolist() == [2.0, 2.0, 2.0]
    assert parameter.grad is None
    assert joined == ["owner"]


class Branches:
    """In place of streams, which only a GPU has: who left the main chain, and who was waited for."""

    def __init__(self) -> None:
        self.left: list[object] = []
        self.joined: list[object] = []
        self.inside = False

    @contextlib.contextmanager
    def beside(self, owner: object, *read: Tensor) -> Iterator[None]:
        assert not self.inside or owner is self.left[-1]
        self.left.append(owner)
        self.inside, before = True, self.inside
        yield
        self.inside = before

    def join_after_backward(self, owner: object, gradients: object) -> None:
        self.joined.append(owner)


def as_captured(handle: isaac.Handle, monkeypatch: pytest.MonkeyPatch) -> Branches:
    """Let the next step run as it does when it is captured, on a CPU."""
    branches = Branches()
    for name in ("beside", "join_after_backward"):
        monkeypatch.setattr(streams, name, getattr(branches, name))
    monkeypatch.setattr(streams, "join", branches.joined.append)
    settings = handle._settings
    settings.overlap, settings.device_damping, settings.awaited = Counter(), torch.tensor(0.3), []
    return branches


def test_layers_with_few_rows_leave_the_main_chain_eight_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step does when it is captured, on a CPU: the same gradients, on one branch that begins in the forward pass."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv1d(3, 3, 3, padding=1) for _ in range(17)]
    model, x = nn.Sequential(*layers, nn.Flatten(), nn.Linear(12, 2)).double(), torch.randn(5, 3, 4, dtype=torch.float64)
    handle = isaac.attach(model, 0.3, sharing="reduce")
    model(x).square().mean().backward()
    wanted = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    branches, settings = as_captured(handle, monkeypatch), handle._settings
    loss = model(x).square().mean()
    assert branches.left == [settings] * 2
    loss.backward()
    # The last two with the first gradient, and each layer once with its own.
    assert branches.left == [settings] * (2 + 18 + 1)
    assert branches.joined == [settings] * 18
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-6, atol=1e-9)
    assert handle.statistics["0"].fallbacks == 0


def test_what_begins_under_autocast_is_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*[nn.Linear(20, 20) for _ in range(8)]), torch.randn(5, 3, 20)
    handle = isaac.attach(model, 0.3, sharing="reduce")

    def gradients() -> list[Tensor | None]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).square().mean()
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    wanted = gradients()
    as_captured(handle, monkeypatch)
    for gradient, other in zip(gradients(), wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-6)
