"""A kept norm is kept at every scale: a gradient that is 2⁸⁰ times as long is conditioned to 2⁸⁰ times the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

import isaac_newton as isaac

#: What a loss, and so each gradient, is multiplied by: squares of such numbers overflow or vanish in float32.
SCALES = [2.0**66, 2.0**90, 2.0**-66, 2.0**-90]


class Case:
    """A layer, its input, and the options of `attach`."""

    def __init__(self, make: Callable[[], nn.Module], x: Callable[[], Tensor], /, **options: Any) -> None:
        self.make, self.x, self.options = make, x, options
        #: With a joint bias or a softmax, gradients do not follow the size of inputs.
        self.is_relative = "damping" not in options and "bias" not in options and make is not SelfAttention


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x, x, x, need_weights=False)[0]
        return output


CASES = {
    "fewer rows than features": Case(lambda: nn.Linear(20, 5), lambda: torch.randn(8, 20)),
    "a strong damping": Case(lambda: nn.Linear(20, 5), lambda: torch.randn(8, 20), damping=1e-2, keep_norm=True),
    "an inverse of float64": Case(lambda: nn.Linear(20, 5), lambda: torch.randn(8, 20), damping=1e-4, keep_norm=True),
    "more rows than features": Case(lambda: nn.Linear(6, 5), lambda: torch.randn(8, 6)),
    "more rows than outputs": Case(lambda: nn.Linear(20, 5), lambda: torch.randn(18, 20)),
    "drawn rows": Case(lambda: nn.Linear(200, 5), lambda: torch.randn(99, 200)),
    "drawn rows, features": Case(lambda: nn.Linear(20, 5), lambda: torch.randn(99, 20)),
    "in float32": Case(lambda: nn.Linear(200, 5), lambda: torch.randn(99, 200), damping=9.0, max_rows=8, keep_norm=True),
    "a convolution": Case(lambda: nn.Conv2d(20, 5, 3), lambda: torch.randn(2, 20, 9, 9)),
    "groups": Case(lambda: nn.Conv2d(40, 6, 3, groups=2), lambda: torch.randn(2, 40, 9, 9)),
    "groups, weakly": Case(
        lambda: nn.Conv2d(40, 6, 3, groups=2), lambda: torch.randn(2, 40, 9, 9), damping=9.0, keep_norm=True
    ),
    "joint": Case(lambda: nn.Linear(20, 5), lambda: torch.randn(8, 20), bias="joint"),
    "reduce": Case(lambda: nn.Linear(20, 5), lambda: torch.randn(8, 3, 20), sharing="reduce", damping=9.0, keep_norm=True),
    "an embedding": Case(lambda: nn.Embedding(20, 5), lambda: torch.randint(20, (9,)), damping=1e-2, keep_norm=True),
    "a sparse one": Case(
        lambda: nn.Embedding(20, 5, sparse=True), lambda: torch.randint(20, (9,)), damping=0.1, keep_norm=True
    ),
    "bags": Case(lambda: nn.EmbeddingBag(20, 5), lambda: torch.randint(20, (9, 3)), damping=1e-2, keep_norm=True),
    "attention": Case(SelfAttention, lambda: torch.randn(3, 4, 16)),
    "step": Case(lambda: nn.Linear(20, 5), lambda: torch.randn(8, 20), when="step"),
    "zeta": Case(
        lambda: nn.Linear(20, 5),
        lambda: torch.randn(8, 20),
        damping=0.1,
        keep_norm=True,
        output_damping=isaac.Relative(0.1),
        output_curvature="empirical",
    ),
}


def gradients(case: Case, scale: float, how: str, of_inputs: float = 1.0) -> tuple[list[Tensor], list[Tensor]]:
    """Plain and conditioned, where the loss is multiplied by this."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model, x = case.make(), case.x()
    x = x * of_inputs if x.is_floating_point() else x
    weights = {name: p for name, p in model.named_parameters() if p.dim() > 1}
    direction = torch.randn_like(model(x))

    def loss(given: dict[str, nn.Parameter] | None = None) -> Tensor:
        output = compiled(x) if given is None else functional_call(model, given, (x,))
        # By hand, so that it stays finite: only gradients are at these scales.
        return (output * (direction * scale)).sum()

    compiled: Callable[[Tensor], Tensor] = model
    plain = torch.autograd.grad(loss(), list(weights.values()))
    handle = isaac.attach(model, **case.options)
    if how == "torch.func":
        found = grad(loss)({name: p.detach() for name, p in weights.items()})
        return list(plain), [found[name] for name in weights]
    if how == "compiled":
        compiled = torch.compile(model, backend="aot_eager")
    if how == "differentiated":
        return list(plain), list(torch.autograd.grad(loss(), list(weights.values()), create_graph=True))
    loss().backward()
    if case.options.get("when") == "step":
        handle.step()
    return list(plain), [torch.as_tensor(p.grad) for p in weights.values()]


def check(name: str, how: str, *, inputs: bool = False) -> None:
    case = CASES[name]
    _, ordinary = gradients(case, 1.0, how)
    for scale in SCALES:
        plain, conditioned = gradients(case, *(1.0, how, scale) if inputs else (scale, how))
        for before, after, one in zip(plain, conditioned, ordinary, strict=True):
            before, after, one = (each.to_dense().double() for each in (before, after, one))
            # Of a joint bias it is the norm of both together.
            assert name == "joint" or abs((after.norm() / before.norm()).item() - 1) < 1e-5, scale
            assert (after / scale - one).norm() < 1e-4 * one.norm(), scale
            assert (one - before / scale).norm() > 1e-3 * one.norm()  # it is conditioned at all


@pytest.mark.parametrize("name", CASES)
def test_long_and_short_gradients_keep_their_norm(name: str) -> None:
    check(name, "backward")


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the compiler warns about itself
@pytest.mark.parametrize("how", ["differentiated", "torch.func", "compiled"])
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("an embedding", "a sparse one", "bags", "attention")])
def test_the_same_in_other_ways_to_a_gradient(name: str, how: str) -> None:
    check(name, "compiled" if name == "step" else how)


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].is_relative])
def test_a_relative_damping_follows_inputs_of_every_size(name: str) -> None:
    check(name, "backward", inputs=True)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_where_compiled_code_cannot_follow_it_says_so() -> None:
    with pytest.warns(RuntimeWarning, match="digits"):
        gradients(CASES["drawn rows"], 1.0, "compiled", 2.0**-66)


def test_half_a_gradient_may_be_zero() -> None:
    """Lengths of zero and numbers that are not finite leave a gradient as it is, and do not spread."""
    model = nn.Linear(20, 5)
    isaac.attach(model)
    x = torch.randn(8, 20)
    (model(x) * 0).sum().backward()
    assert model.weight.grad is not None
    assert not model.weight.grad.any()
    model.zero_grad()
    (model(x) * torch.tensor([1.0, 1.0, torch.inf, 1.0, 1.0])).sum().backward()
    assert not model.weight.grad.isfinite().all()
