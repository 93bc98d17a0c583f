"""Under autocast a bucket copies its weights and biases to half precision in one go: nothing but time may tell."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import isaac_newton as isaac
from isaac_newton.core.bucket import Bucket
from reference import assert_close, zeta_star

HALVES = [torch.bfloat16, torch.float16]
#: Each takes rows of inputs with positions.
FORMS: dict[str, dict[str, Any]] = {
    "drawn": {"damping": 0.1, "max_rows": 7},
    "reduce": {"damping": 0.1, "sharing": "reduce"},
    "automatic": {},
    "step": {"damping": 0.1, "when": "step"},
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 12), nn.ReLU(), nn.Linear(12, 12, bias=False), nn.ReLU(), nn.Linear(12, 3))


def batch() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(30, 4, 9)


def loss_of(model: nn.Module, x: Tensor, half: torch.dtype = torch.bfloat16) -> Tensor:
    with torch.autocast("cpu", half):
        output: Tensor = model(x)
    return output.float().square().mean()


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each node that is opened has copies."""
    seen: list[bool] = []
    opened: Callable[..., Any] = Bucket._opened

    def note(self: Bucket, *args: Any) -> Any:
        names = opened(self, *args)
        seen.append(next(iter(names.values())).opening.is_copied)
        return names

    monkeypatch.setattr(Bucket, "_opened", note)
    return seen


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_outputs_and_what_is_not_conditioned_are_bit_for_bit_those_of_plain_torch(form: str, half: torch.dtype, copied) -> None:
    plain, model, x = network(), network(), batch()
    handle = isaac.attach(model, **FORMS[form])
    for _ in range(3):  # the second pass goes the short way
        copied.clear()
        with torch.autocast("cpu", half):
            assert torch.equal(model(x), plain(x))
        inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
        for each, given in zip((model, plain), inputs, strict=True):
            each.zero_grad()
            loss_of(each, given, half).backward()
        assert torch.equal(inputs[0].grad, inputs[1].grad)
        for name, parameter in model.named_parameters():
            assert parameter.grad.dtype is torch.float32
            if name.endswith("bias"):
                assert torch.equal(parameter.grad, plain.get_parameter(name).grad)
        if form == "step":
            handle.step()
    # What waits for the step waits for other ranks too, and then each weight is by itself.
    assert copied == ([] if form == "step" else [True] * 2)


def test_the_gradient_is_that_of_the_half_precision_pass_conditioned() -> None:
    plain, model, x = network(), network(), batch()[:, :1]
    isaac.attach(model, damping=0.1, sharing="reduce")
    inputs: list[Tensor] = []
    layers = [layer for layer in plain if isinstance(layer, nn.Linear)]
    outputs: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        inputs.append(args[0])
        outputs.append(output)

    for layer in layers:
        layer.register_forward_hook(note)
    loss = loss_of(plain, x)
    gradients = torch.autograd.grad(loss, outputs)
    loss_of(model, x).backward()
    for layer, g, a in zip([model[0], model[2], model[4]], gradients, inputs, strict=True):
        wanted = zeta_star(g.reshape(30, -1).double(), a.detach().bfloat16().reshape(30, -1).double(), 0.1)
        assert_close(layer.weight.grad, wanted.float(), 2e-2)


def test_copies_are_not_used_once_weights_have_changed(copied) -> None:
    """A stray pass through the first layer leaves names of the others behind."""

    def of_the_rest(model: nn.Sequential, hidden: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output: Tensor = model[4](torch.relu(model[2](hidden)))
        return output

    model, x, hidden = network(), batch(), torch.randn(30, 4, 12)
    isaac.attach(model, damping=0.1, max_rows=7)
    changes: list[Callable[[], object]] = [
        lambda: nn.init.normal_(model[2].weight),
        lambda: setattr(model[2].weight, "data", torch.randn(12, 12)),
        lambda: _Old(model.parameters()).step(),
    ]
    for change in changes:
        stray = loss_of(nn.Sequential(model[0]), x)
        change()
        found = of_the_rest(model, hidden)
        plain = network()
        plain.load_state_dict(model.state_dict())
        assert torch.equal(found, of_the_rest(plain, hidden))
        assert copied.pop()
        del stray


@pytest.mark.parametrize("what", ["weight", "bias"])
def test_who_writes_to_data_in_the_middle_of_a_forward_pass_is_told_and_right_from_then_on(what: str, copied) -> None:
    class Clamping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.first(x))
            getattr(self.second, what).data.mul_(0.9)
            output: Tensor = self.second(x)
            return output

    torch.manual_seed(0)
    plain, x = Clamping(), torch.randn(20, 3, 6)
    torch.manual_seed(0)
    model = Clamping()
    isaac.attach(model, damping=0.1, max_rows=7)
    if what == "bias":  # it comes along from the second pass on
        loss_of(model, x).backward()
        loss_of(plain, x)
    with pytest.warns(RuntimeWarning, match=r"written to through \.data"):
        loss_of(model, x).backward()
    loss_of(plain, x)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(model(x), plain(x))
        loss_of(model, x).backward()
        loss_of(plain, x)
    assert not copied[-1]


class _Old(torch.optim.Optimizer):
    """Writes to `.data`, as many optimizers did: the weight's version does not tell."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(1.5)


def test_layers_without_autocast_inside_of_it_have_the_weights_themselves() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x).float()
            with torch.autocast("cpu", enabled=False):
                x = self.second(x)
                assert x.dtype is torch.float32
            output: Tensor = self.third(x)
            return output

    x = torch.randn(20, 3, 6)
    torch.manual_seed(0)
    plain = Mixed()
    torch.manual_seed(0)
    model = Mixed()
    isaac.attach(model, damping=0.1, max_rows=7)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(model(x), plain(x))
        for each in (model, plain):
            loss_of(each, x).backward()
    assert torch.equal(model.second.bias.grad, plain.second.bias.grad)
    assert not torch.equal(model.second.weight.grad, plain.second.weight.grad)


def test_frozen_weights_and_biases_and_other_types_stay_what_they_are(copied) -> None:
    model, x = network(), batch()
    model[0].requires_grad_(False)
    model[4].bias.requires_grad_(False)
    isaac.attach(model, damping=0.1, max_rows=7)
    for _ in range(2):
        loss_of(model, x).backward()
    assert copied == [True] * 2
    assert model[0].weight.grad is model[4].bias.grad is None
    assert model[2].weight.grad is not None
    model[2].to(torch.bfloat16)
    model.zero_grad()
    loss_of(model, x).backward()
    assert not copied[-1]
    assert model[2].weight.grad.dtype is torch.bfloat16
    assert model[4].weight.grad.dtype is torch.float32


def test_weights_that_nobody_uses_are_copied_once_only(copied) -> None:
    """As those of experts that no token comes to."""
    experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
    isaac.attach(experts, damping=0.1, max_rows=7)
    x = torch.randn(20, 3, 6)
    every, most, one = (0, 1, 2, 3, 4), (0, 1, 2, 4), (1,)
    for chosen, wanted in ((every, True), (one, True), (one, False), (most, False), (every, True)):
        copied.clear()
        loss_of(nn.Sequential(*[experts[number] for number in chosen]), x).backward()
        assert copied == [wanted], chosen


def test_gradients_accumulate_and_can_be_asked_for_one_by_one() -> None:
    model, x = network(), batch()
    isaac.attach(model, damping=0.1, sharing="reduce")
    loss_of(model, x).backward()
    once = [parameter.grad.clone() for parameter in model.parameters()]
    loss_of(model, x).backward()
    for parameter, before in zip(model.parameters(), once, strict=True):
        assert torch.equal(parameter.grad, 2 * before)
    for parameter, wanted in zip(model.parameters(), once, strict=True):
        (found,) = torch.autograd.grad(loss_of(model, x), parameter)
        assert torch.equal(found, wanted)


def test_a_gradient_penalty_under_autocast_is_conditioned_as_without_buckets() -> None:
    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        (g,) = torch.autograd.grad(loss_of(model, x), x, create_graph=True)
        return g.float().square().sum() * 1e3

    found = []
    for size in (32, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("isaac_newton.core.bucket.BUCKET", size)
            model, x = network(), batch().requires_grad_()
            isaac.attach(model, damping=0.1, sharing="reduce")
            penalty(model, x).backward()
            found.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_model_goes_with_names_that_nobody_took() -> None:
    model = network()
    isaac.attach(model, damping=0.1, max_rows=7)
    loss_of(nn.Sequential(model[0]), batch())
    weight = weakref.ref(model[2].weight)
    del model
    gc.collect()
    assert weight() is None


def test_one_copy_of_what_a_layer_sees_is_kept_and_none_after_the_pass() -> None:
    model, x = network(), batch()
    isaac.attach(model, damping=0.1, max_rows=7)
    for _ in range(2):
        loss = loss_of(model, x)
        kept = [weakref.ref(o) for o in gc.get_objects() if type(o) is Tensor and o.dtype is torch.bfloat16]
        assert kept
        loss.backward()
        del loss
        gc.collect()
        assert [reference() for reference in kept if reference() is not None] == []


class Twice(nn.Module):
    """One layer twice, three on one input, a bias that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(9, 9) for _ in range(4))
        self.third.bias = self.second.bias

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) + torch.tanh(self.second(x)) + torch.tanh(self.third(x))
        output: Tensor = self.last(torch.tanh(self.first(x)))
        return output


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.other = nn.Linear(9, 9), nn.Linear(9, 3), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.one(torch.relu(self.body(x)))
        return output


def noted(model: nn.Module, x: Tensor, half: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """A pass: the output, and the gradients of the input and of all biases."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", half):
        output = model(x)
    output.float().square().mean().backward()
    biases = [p.grad.clone() for p in model.parameters() if p.dim() == 1 and p.grad is not None]
    model.zero_grad()
    return [output, x.grad, *biases]


def _types_in_turn(model: nn.Sequential, x: Tensor) -> list[Tensor]:
    return [found for half in (*HALVES, *HALVES) for found in noted(model, x, half)]


def _several_graphs(model: nn.Sequential, x: Tensor) -> list[Tensor]:
    found: list[Tensor] = []
    for _ in range(3):
        model.zero_grad()
        found.clear()  # the first of these passes finds out that a layer is now used several times
        with torch.autocast("cpu", torch.bfloat16):
            loss = sum(model(x + shift).float().square().mean() for shift in range(3))
        loss.backward()
        found += [loss, *(p.grad.clone() for p in model.parameters() if p.dim() == 1)]
    return found


def _checkpoints(model: nn.Sequential, x: Tensor) -> list[Tensor]:
    found = []
    for reentrant in (False, True, False):
        whole = _Checkpointed(model, reentrant)
        found += noted(whole, x)
    return found


class _Checkpointed(nn.Module):
    def __init__(self, model: nn.Sequential, reentrant: bool) -> None:
        super().__init__()
        self.model, self.reentrant = model, reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.model[2:4], self.model[:2](x), use_reentrant=self.reentrant)
        output: Tensor = self.model[4](hidden)
        return output


def _scaled(model: nn.Sequential, x: Tensor) -> list[Tensor]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2)
    optimizer, found = torch.optim.SGD(model.parameters(), 0.0), []
    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x, torch.float16)).backward()
        scaler.step(optimizer)
        scaler.update()
        found += [torch.tensor(scaler.get_scale()), model[0].bias.grad.nan_to_num(7.0)]
    return found


def _penalized(model: nn.Sequential, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(loss_of(model, x * 1), x, create_graph=True)
    (g.float().square().sum() * 1e3 + loss_of(model, x)).backward()
    return [g, *(p.grad for p in model.parameters() if p.dim() == 1)]


def _called_with_others(model: nn.Sequential, x: Tensor) -> list[Tensor]:
    others = {name: (2 * p).detach().requires_grad_() for name, p in model.named_parameters() if name.endswith("bias")}
    with torch.autocast("cpu", torch.bfloat16):
        output = torch.func.functional_call(model, others, x)
    output.float().square().mean().backward()
    return [output, *(other.grad for other in others.values()), *noted(model, x)]


def _frozen_in_turn(model: nn.Sequential, x: Tensor) -> list[Tensor]:
    found = []
    for tensor in (model[0].weight, model[0].bias, model[4].bias, model[2].weight):
        for trained in (False, True):
            tensor.requires_grad_(trained)
            found += noted(model, x)
    return found


def _interrupted(model: nn.Sequential, x: Tensor) -> list[Tensor]:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    hook = model[2].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        noted(model, x)
    hook.remove()
    return noted(model, x)


def _copied_and_stored(model: nn.Sequential, x: Tensor) -> list[Tensor]:
    stray = loss_of(nn.Sequential(model[0]), x)
    found = [*noted(copy.deepcopy(model), x), *noted(pickle.loads(pickle.dumps(model)), x)]
    del stray
    return found


def _changed(model: nn.Sequential, x: Tensor) -> list[Tensor]:
    """Biases change between two layers of one pass, and back again."""

    def shift(*_: object) -> None:
        with torch.no_grad():
            model[4].bias.add_(1)
        model[0].bias.data = model[0].bias.data + 1

    hook = model[2].register_forward_hook(shift)
    found = [*noted(model, x), *noted(model, x)]
    hook.remove()
    return found


LOOPS = [
    _types_in_turn,
    _several_graphs,
    _checkpoints,
    _scaled,
    _penalized,
    _called_with_others,
    _frozen_in_turn,
    _interrupted,
    _copied_and_stored,
    _changed,
]


@pytest.mark.filterwarnings("ignore:.*lr_scheduler")
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__.strip("_"))
@pytest.mark.parametrize("form", ["drawn", "reduce"])
def test_loops_find_what_they_find_without_it(form: str, loop: Callable[..., list[Tensor]]) -> None:
    found = []
    for is_attached in (False, True):
        model, x = network(), batch()
        if is_attached:
            isaac.attach(model, **FORMS[form])
        warm = [noted(model, x) for _ in range(2)]
        found.append([*warm[1], *loop(model, x)])
    for plain, attached in zip(*found, strict=True):
        assert torch.equal(plain, attached)


@pytest.mark.parametrize("form", ["drawn", "reduce", "automatic"])
def test_gradients_meet_in_half_precision_where_those_of_torch_do(form: str) -> None:
    found = []
    for is_attached in (False, True):
        torch.manual_seed(0)
        model, x = Twice(), batch()
        if is_attached:
            isaac.attach(model, **FORMS[form])
        found.append([each for _ in range(3) for each in noted(model, x)])
    for plain, attached in zip(*found, strict=True):
        assert torch.equal(plain, attached)


def test_biases_come_along_from_the_second_pass_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    opened: Callable[..., Any] = Bucket._opened

    def note(self: Bucket, *args: Any) -> Any:
        names = opened(self, *args)
        seen.append(sum(name.bias is not None for name in names.values()))
        return names

    monkeypatch.setattr(Bucket, "_opened", note)
    model, x = network(), batch()
    isaac.attach(model, **FORMS["drawn"])
    for _ in range(3):
        loss_of(model, x).backward()
    assert seen == [0, 2, 2]
    model[0].bias.register_hook(lambda gradient: gradient)
    loss_of(model, x).backward()
    both = loss_of(model, x), loss_of(model, x)
    (both[0] + both[1]).backward()
    loss_of(model, x).backward()
    assert seen[3:] == [1, 1, 0, 0]


def test_biases_can_be_asked_for_one_by_one_and_hooks_see_gradients_only() -> None:
    torch.manual_seed(0)
    model, x = Heads(), batch()
    isaac.attach(model, **FORMS["reduce"])
    hidden: list[Tensor] = []
    model.body.register_forward_hook(lambda module, args, output: hidden.append(output))
    for parameter in model.other.parameters():
        parameter.register_hook(lambda gradient: 2 * gradient)  # would fail without one
    for number in range(4):
        loss = loss_of(model, x)
        with torch.autocast("cpu", torch.bfloat16):
            other = model.other(torch.relu(hidden.pop())).float().square().mean()
        if number == 2:
            torch.autograd.grad(other, model.other.bias, retain_graph=True)
        if number == 3:
            torch.autograd.grad(other, model.other.bias)
        loss.backward()
    model.zero_grad()
    for _ in range(3):
        loss_of(model, x).backward()
    assert model.other.bias.grad is None
