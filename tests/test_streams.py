"""What a branch of a captured step writes is what the parameters get, whatever autograd does with it on the way."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
