"""A third hunt: what a user does with a training loop, tried by a few lines against the definition in float64."""

import copy
import gc
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import optimizer as optimizers

import isaac_newton as isaac
from definition import attach as define
from definition import conditioner as exact_conditioner
from isaac_newton.api import watch

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


def test_a_model_that_is_gone_is_not_looked_after() -> None:
    """A search over settings attaches many models, and detaches none."""
    hooks: Any = vars(optimizers)["_global_optimizer_post_hooks"]
    isaac.attach(nn.Sequential(nn.Linear(3, 2)), when="step")
    gc.collect()
    before, alive = len(hooks), len(watch._ALIVE)
    model = nn.Sequential(nn.Linear(3, 2))
    isaac.attach(model, when="step")
    gc.collect()
    assert len(watch._ALIVE) == alive + 1, "what looks after it is the model's, and outlives the handle"
    model(torch.randn(4, 3)).sum().backward()
    with pytest.warns(RuntimeWarning, match="bind"):
        torch.optim.SGD(model.parameters(), 0.1).step()
    del model
    gc.collect()
    assert len(watch._ALIVE) == alive
    assert len(hooks) == before, "one for all models"


def test_a_model_may_be_freed_while_an_optimizer_steps() -> None:
    """A hook that went with its model changed what torch was just going through."""
    models = [nn.Sequential(nn.Linear(3, 2)) for _ in range(3)]
    for model in models:
        isaac.attach(model, when="step")
    del model
    alive = len(watch._ALIVE)

    def free(*args: object) -> None:
        models.clear()
        gc.collect()

    hook = optimizers.register_optimizer_step_post_hook(free)
    torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1).step()
    hook.remove()
    assert len(watch._ALIVE) <= alive - 3


@BOTH
@pytest.mark.parametrize("passes", [0, 2])
def test_layers_that_are_all_replaced_are_named(passes: int, when: str) -> None:
    """Then nothing of the library is called any more in a pass: gradients were plain without a word."""
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(5, 6)
    handle = isaac.attach(model, damping=LAMBDA, when=when)

    def train(steps: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if when == "step":
            handle.bind(optimizer)
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()

    train(passes)
    model[0], model[2] = nn.Linear(6, 8), nn.Linear(8, 3)
    with pytest.warns(RuntimeWarning, match=r"layers '0', '2' were replaced after attach"):
        train(5)


def test_many_optimizers_that_step_once_a_pass_do_not_look_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(*[nn.Linear(6, 6) for _ in range(8)]), torch.randn(5, 6)
    handle = isaac.attach(model, damping=LAMBDA)
    optimizers = [torch.optim.SGD([p], 1e-3) for p in model.parameters()]
    looks: list[int] = []
    monkeypatch.setattr(handle._watch, "say_what_changed", lambda: looks.append(1))
    for _ in range(30):
        model(x).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert len(looks) < 10


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler warns about itself
def test_an_optimizer_can_be_compiled() -> None:
    torch.compiler.reset()
    model, x = nn.Sequential(nn.Linear(6, 8)), torch.randn(5, 6)
    isaac.attach(model, damping=LAMBDA)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    frames: list[int] = []

    def count(graph: Any, inputs: Any) -> Any:
        frames.append(1)
        return graph.forward

    step = torch.compile(optimizer.step, backend=count)
    for _ in range(4):
        model(x).square().sum().backward()
        step()
    assert len(frames) == 1


# ---------------------------------------------------------------------------------------------------------------- compiled code

#: The compiler warns about itself.
COMPILES = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning", "ignore:.*grad attribute of a")


@pytest.mark.parametrize("options", ["automatic", "drawn", "reduced"])
def test_statistics_of_compiled_code_follow_the_batch(options: str) -> None:
    # In a process of its own: the checks of shapes that the tests add to every call are not made to be compiled.
    script, source = Path(__file__).parent / "dynamic.py", Path(__file__).parent.parent / "src"
    environment = {**os.environ, "PYTHONPATH": str(source)}
    result = subprocess.run(
        [sys.executable, str(script), options], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "as in eager code\n"


@COMPILES
def test_failures_in_compiled_code_are_counted_for_every_batch() -> None:
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(40, 3))
    handle = isaac.attach(model, damping=isaac.Relative(1e-7, to="largest"), sharing="reduce")
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    for number, count in enumerate((12, 15), 1):
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            compiled(torch.randn(count, 2, 40)).square().mean().backward()
        assert handle.statistics["0"].fallbacks == number


GIVEN_UP: dict[str, Any] = {
    "every row": {"damping": LAMBDA},
    "automatic": {},
    "drawn": {"damping": isaac.Relative(0.1), "max_rows": 4},
    "joint": {"damping": LAMBDA, "bias": "joint", "sharing": "reduce"},
    "step": {"damping": LAMBDA, "when": "step"},
}


@COMPILES
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("options", GIVEN_UP.values(), ids=GIVEN_UP)
def test_many_compiled_models_are_conditioned_alike(options: dict[str, Any], alone: bool) -> None:
    """The compiler gives up on a function that it has compiled for too many models, in the middle of it."""
    torch.compiler.reset()
    for _ in range(12):
        layers = [nn.Linear(7, 4)] if alone else [nn.Linear(7, 4), nn.Tanh(), nn.Linear(4, 2)]
        model = nn.Sequential(*layers).double()
        twin, x = copy.deepcopy(model), torch.randn(6, 2, 7, dtype=torch.float64)
        handle, other = (isaac.attach(one[0] if alone else one, **options) for one in (model, twin))
        for each in (x, 2 * x):
            torch.compile(model[0] if alone else model, backend="aot_eager")(each).square().sum().backward()
            twin(each).square().sum().backward()
        if "when" in options:
            handle.step()
            other.step()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert q.grad is not None
            close(p.grad, q.grad)
        assert {seen.backward_pass for seen in handle.statistics.values()} == {2}


# ---------------------------------------------------------------------------------------------------------------- torch.func


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(torch.tanh(self.table(x)))
        return output


ENSEMBLES: dict[str, Any] = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), lambda: torch.randn(5, 6), {}),
    "joint": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh()), lambda: torch.randn(5, 6), {"bias": "joint"}),
    "automatic": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh()), lambda: torch.randn(5, 6), {"damping": "auto"}),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh()), lambda: torch.randn(2, 2, 6, 6), {}),
    "words": (Words, lambda: torch.randint(9, (7,)), {}),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented the batching rule")
@pytest.mark.parametrize(("make", "inputs", "options"), ENSEMBLES.values(), ids=ENSEMBLES)
def test_an_ensemble_of_stacked_weights_is_conditioned(make: Any, inputs: Any, options: dict[str, Any]) -> None:
    """As in torch's tutorial: a forward pass by vmap over weights, and an ordinary backward pass. Gradients stayed plain."""
    models = [make().double() for _ in range(3)]
    x = inputs()
    x = x.double() if x.is_floating_point() else x
    options = {"damping": LAMBDA, **options}
    base = copy.deepcopy(models[0])
    isaac.attach(base, **options)
    weights, buffers = torch.func.stack_module_state(models)
    torch.func.vmap(lambda given: torch.func.functional_call(base, (given, buffers), (x,)))(weights).square().sum().backward()
    for number, model in enumerate(models):
        isaac.attach(model, **options)
        model(x).square().sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert weights[name].grad is not None
            close(weights[name].grad[number], parameter.grad)


@pytest.mark.parametrize("kind", ["linear", "convolution", "words"])
def test_schedules_and_draws_go_on_in_torch_func(kind: str) -> None:
    make, inputs, _ = ENSEMBLES[kind]
    model, x, seen = make().double(), inputs(), []

    def schedule(step: int) -> float:
        seen.append(step)
        return LAMBDA

    isaac.attach(model, damping=schedule, max_rows=3)
    given = {name: p.detach() for name, p in model.named_parameters()}
    x = x.double() if x.is_floating_point() else x
    found = []
    for _ in range(3):
        gradient = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).square().sum())(given)
        found.append(gradient[next(iter(given))])
    assert sorted(set(seen)) == [0, 1, 2]
    assert kind == "words" or not torch.equal(found[0], found[1]), "other rows"


# ---------------------------------------------------------------------------------------------------------------- dampings


@BOTH
@pytest.mark.parametrize("damping", [1e-300, 1e-45, 1e-38, 1e38, 1e300])
def test_dampings_that_float32_does_not_know(damping: float, when: str) -> None:
    """Far below all curvature what is left is rounding: it is small, and counted where digits were asked for."""
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(5, 6)
    plain, handle = copy.deepcopy(model), isaac.attach(model, damping=damping, when=when)
    with warnings.catch_warnings(record=True) as met:
        warnings.simplefilter("always")
        model(x).square().sum().backward()
        if when == "step":
            handle.step()
    plain(x).square().sum().backward()
    for name, layer in (("0", 0), ("2", 2)):
        before, after = plain[layer].weight.grad, model[layer].weight.grad
        if damping > 1:
            close(after, before.double()) if torch.equal(after, before) else torch.testing.assert_close(after, before)
        else:
            assert after.norm() < 1e-3 * before.norm()
            assert met or after.norm() < 1e-9 * before.norm(), handle.statistics[name]


# ---------------------------------------------------------------------------------------------------------------- right loops


class Reversed(torch.autograd.Function):
    """The gradient turns round on its way back, as in adversarial domain adaptation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class Net(nn.Module):
    """A trunk, heads that see the same, and one behind a reversed gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))
        self.judge = nn.Linear(6, 2)

    def forward(self, x: Tensor, heads: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        x = torch.tanh(self.trunk(x))
        return torch.cat([*(self.heads[number](x) for number in heads), self.judge(Reversed.apply(x))], 1)


def target_network(net: Any, x: Tensor) -> None:
    target = copy.deepcopy(net).requires_grad_(False)
    (net(x) - target(x + 1)).square().sum().backward()


def stopped_gradient(net: Any, x: Tensor) -> None:
    with torch.no_grad():
        other = net(x + 1)
    (net(x) * other).sum().backward()


def two_losses(net: Any, x: Tensor) -> None:
    output = net(x)
    output[:, 0].sum().backward(retain_graph=True)
    output[:, 1:].square().sum().backward()


def saliency_first(net: Any, x: Tensor) -> None:
    seen = x.clone().requires_grad_()
    loss = net(seen).square().sum()
    torch.autograd.grad(loss, seen, retain_graph=True)
    loss.backward()


def stored_elsewhere(net: Any, x: Tensor) -> None:
    with torch.autograd.graph.save_on_cpu():
        loss = net(x).square().sum()
    loss.backward()


def validated_in_between(net: Any, x: Tensor) -> None:
    loss = net(x).square().sum()
    with torch.inference_mode():
        net(2 * x)
    loss.backward()


def weights_swapped_and_back(net: Any, x: Tensor) -> None:
    kept = {name: value.clone() for name, value in net.state_dict().items()}
    net.load_state_dict({name: 0 * value for name, value in kept.items()})
    with torch.no_grad():
        net(x)
    net.load_state_dict(kept)
    net(x).square().sum().backward()


def merged(net: Any, x: Tensor) -> None:
    with torch.no_grad():
        net.trunk.weight += torch.arange(36.0).reshape(6, 6) / 100
    net(x).square().sum().backward()


def gradients_ready_made(net: Any, x: Tensor) -> None:
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    net(x).square().sum().backward()


def some_heads(net: Any, x: Tensor) -> None:
    net(x, (0, 2)).square().sum().backward()


def frozen_and_not(net: Any, x: Tensor) -> None:
    net.trunk.requires_grad_(False)
    net(x).square().sum()
    net.trunk.requires_grad_(True)
    net(x).square().sum().backward()


def averaged_model(net: Any, x: Tensor) -> None:
    average = torch.optim.swa_utils.AveragedModel(net)
    net(x).square().sum().backward()
    average.update_parameters(net)
    average(x)


def tokens_that_are_far_from_contiguous(net: Any, x: Tensor) -> None:
    net(x.T.contiguous().T[::2]).square().sum().backward()


def anomalies_detected(net: Any, x: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            net(x).square().sum().backward()


def unused_graphs(net: Any, x: Tensor) -> None:
    kept = [net(x) for _ in range(70)]
    net(x).square().sum().backward()
    assert kept


RIGHT = [
    target_network,
    stopped_gradient,
    two_losses,
    saliency_first,
    stored_elsewhere,
    validated_in_between,
    weights_swapped_and_back,
    merged,
    gradients_ready_made,
    some_heads,
    frozen_and_not,
    averaged_model,
    tokens_that_are_far_from_contiguous,
    anomalies_detected,
    unused_graphs,
]


@BOTH
@pytest.mark.parametrize("loop", RIGHT, ids=lambda loop: loop.__name__)
def test_a_loop_is_right_and_does_not_warn(loop: Any, when: str) -> None:
    model, x = Net().double(), torch.randn(8, 6, dtype=torch.float64)
    plain = copy.deepcopy(model)
    handle = isaac.attach(model, damping=LAMBDA, when=when)
    define(plain, LAMBDA)
    for one in (model, plain):
        loop(one, x)
    if when == "step":
        handle.step()
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None)
        if other.grad is not None:
            close(parameter.grad, other.grad)


@COMPILES
def test_layers_that_are_compiled_one_by_one_need_no_number_that_stays() -> None:
    """`nn.Sequential(…).compile()` compiles no whole: torch comes to each layer by itself, with ever new numbers.

    The compiler of torch 2.11 failed then.
    """
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(6)])
    twin = copy.deepcopy(model)
    for each in (model, twin):
        isaac.attach(each)
    model.compile(backend="aot_eager")
    x = torch.randn(8, 6)
    for each in (model, twin):
        for _ in range(2):
            each.zero_grad()
            each(x).square().mean().backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
