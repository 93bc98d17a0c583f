"""What a branch of a captured step writes is what the parameters get, whatever autograd does with it on the way."""

import contextlib
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
    run, number = handle._run, torch.tensor(0.3)
    run.capture, run.waiting = streams.Capture(number, number, torch.tensor(0)), []
    return branches


def test_layers_with_few_rows_leave_the_main_chain_eight_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step does when it is captured, on a CPU: the same gradients, on one branch that begins in the forward pass."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv1d(3, 3, 3, padding=1) for _ in range(17)]
    model, x = nn.Sequential(*layers, nn.Linear(4, 2)).double(), torch.randn(5, 3, 4, dtype=torch.float64)
    handle = isaac.attach(model, 0.3, sharing="reduce")
    model(x).square().mean().backward()
    wanted = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    branches, run = as_captured(handle, monkeypatch), handle._run
    loss = model(x).square().mean()
    assert branches.left == [run] * 2
    loss.backward()
    # The last two with the first gradient, and each layer once with its own.
    assert branches.left == [run] * (2 + 18 + 1)
    assert branches.joined == [run] * 18
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


CONVOLUTIONS = {
    "1-d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (3, 4, 9)),
    "2-d": (lambda: nn.Conv2d(3, 5, (3, 2), padding=(2, 1), dilation=(2, 1)), (3, 3, 8, 7)),
    "3-d": (lambda: nn.Conv3d(2, 3, 2, bias=False), (3, 2, 4, 4, 4)),
    "2-d, channels last": (lambda: nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last), (3, 3, 8, 7)),
    "same": (lambda: nn.Conv2d(3, 5, 3, padding="same"), (3, 3, 6, 6)),
    "circular": (lambda: nn.Conv2d(3, 5, 3, padding=1, padding_mode="circular"), (3, 3, 6, 6)),
    "one example": (lambda: nn.Conv2d(3, 5, 3), (3, 6, 6)),
    "linear": (lambda: nn.Linear(7, 5), (4, 3, 7)),
    "linear without bias": (lambda: nn.Linear(7, 5, bias=False), (4, 3, 7)),
    "linear, every row": (lambda: nn.Linear(7, 5), (4, 3, 7)),
}


@pytest.mark.parametrize("half", [False, True], ids=["whole", "half"])
@pytest.mark.parametrize("needs_input", [False, True], ids=["first", "hidden"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_layer_that_is_taken_apart_has_all_its_gradients(
    name: str, needs_input: bool, half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a captured step the gradient of a weight is formed on a branch, and that of the input is not."""
    make, shape = CONVOLUTIONS[name]
    torch.manual_seed(0)
    layer, x = make(), torch.randn(shape)
    if not half:
        layer, x = layer.double(), x.double()
    sharing = "expand" if name == "linear, every row" else "reduce"
    handle = isaac.attach(layer, 0.3, sharing=sharing)

    def gradients() -> list[Tensor | None]:
        layer.zero_grad()
        own = x.clone().requires_grad_(needs_input)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            output = nn.functional.relu(layer(own), inplace=True)
        output.double().square().mean().backward()
        return [own.grad, *(parameter.grad for parameter in layer.parameters())]

    wanted = gradients()
    as_captured(handle, monkeypatch)
    for gradient, other in zip(gradients(), wanted, strict=True):
        if other is None:
            assert gradient is None
        else:
            assert gradient is not None
            assert gradient.dtype is other.dtype
            assert gradient.stride() == other.stride()
            size = other.double().norm().item()
            assert (gradient - other).double().norm().item() <= (1e-2 if half else 1e-6) * size


def test_only_what_somebody_has_written_down_is_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    backwards = {}
    for name, (make, shape) in CONVOLUTIONS.items():
        layer = make()
        as_captured(isaac.attach(layer, 0.3, sharing="reduce"), monkeypatch)
        backwards[name] = type(layer(torch.randn(shape)).grad_fn).__name__
    apart = [name for name, backward in backwards.items() if backward == "_LayerBackward"]
    assert apart == ["1-d", "2-d", "3-d", "2-d, channels last", "linear", "linear without bias", "linear, every row"]


def test_a_layer_that_is_used_twice_sums_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(5, 5).double(), torch.randn(4, 3, 5, dtype=torch.float64)
    handle = isaac.attach(layer, 0.3, sharing="reduce")
    layer(layer(x)).square().mean().backward()
    wanted = layer.weight.grad
    layer.zero_grad()
    branches = as_captured(handle, monkeypatch)
    layer(layer(x)).square().mean().backward()
    torch.testing.assert_close(layer.weight.grad, wanted, rtol=1e-6, atol=1e-9)
    assert branches.joined == [handle._run] * 2
