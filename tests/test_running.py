"""Running curvature: rows gathered in some of the steps only, steps that only gather, and what layers share."""

import copy
import itertools
import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import definition
import isaac_newton as isaac
from isaac_newton.core import gathering, moments
from reference import assert_close

RATE = 0.05


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 9), nn.Tanh(), nn.Linear(9, 3)).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(100 + step)
    return torch.randn(8, 2, 6, 6, dtype=torch.float64, generator=random), torch.randint(3, (8,), generator=random)


class Defined:
    """Training by the definition: sums over rows written out, a dense inverse, and no optimizer."""

    def __init__(self, damping: float, decay: float, refresh: int, gather: int, warm_up: int, power: float = 1.0) -> None:
        self.model, self.damping, self.decay, self.power = network(), damping, decay, power
        self.refresh, self.gather, self.warm_up, self.steps = refresh, gather, warm_up, 0
        self.layers = [layer for layer in self.model if hasattr(layer, "weight")]
        self.inputs: dict[nn.Module, list[Tensor]] = {layer: [] for layer in self.layers}
        self.average: dict[nn.Module, Any] = dict.fromkeys(self.layers, 0.0)
        self.weight, self.conditioner = 0.0, {}
        for layer in self.layers:
            layer.register_forward_pre_hook(lambda layer, args: self.inputs[layer].append(args[0].detach()))

    def gathers(self) -> bool:
        """Step 0 is the first after the warm-up, and renews; from then on the last steps of each `refresh` gather."""
        step = self.steps - self.warm_up
        return step <= 0 or (step - 1) % self.refresh >= self.refresh - self.gather

    def step(self, parts: int) -> None:
        x, y = batch(self.steps)
        self.model.zero_grad()
        for part_x, part_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (F.cross_entropy(self.model(part_x), part_y) / parts).backward()
        if self.gathers():
            self.weight = self.decay * self.weight + 1 - self.decay
            for layer, seen in self.inputs.items():
                r = torch.cat([definition.rows(layer, x, "expand") for x in seen])
                self.average[layer] = self.decay * self.average[layer] + (1 - self.decay) * r.T @ r / len(r)
        for seen in self.inputs.values():
            seen.clear()
        step, self.steps = self.steps - self.warm_up, self.steps + 1
        if step < 0:
            return
        if step % self.refresh == 0:
            for layer in self.layers:
                values, vectors = torch.linalg.eigh(self.average[layer] / self.weight)
                self.conditioner[layer] = vectors * (1 + values / self.damping).pow(-self.power) @ vectors.T
        with torch.no_grad():
            for layer in self.layers:
                layer.bias -= RATE * layer.bias.grad
                layer.weight -= RATE * (layer.weight.grad.flatten(1) @ self.conditioner[layer]).view_as(layer.weight)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, parts: int = 1) -> None:
    for step in steps:
        x, y = batch(step)
        optimizer.zero_grad()
        for part_x, part_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (F.cross_entropy(model(part_x), part_y) / parts).backward()
        optimizer.step()


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    ("refresh", "gather", "warm_up", "power"),
    [(5, 2, 0, 1.0), (5, 1, 3, 1.0), (4, 4, 2, 0.5), (1, 1, 4, 1.0), (6, 3, 5, 0.5)],
)
def test_gathering_in_the_last_steps_after_a_warm_up_is_what_it_is_defined_to_be(
    refresh, gather, warm_up, power, parts
) -> None:
    defined = Defined(0.2, 0.8, refresh, gather, warm_up, power)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    options = {"refresh": refresh, "gather": gather, "warm_up": warm_up, "power": power}
    isaac.attach(model, damping=0.2, when="step", decay=0.8, **options).bind(optimizer)
    train(model, optimizer, range(17), parts)
    for _ in range(17):
        defined.step(parts)
    initial = network()
    for ours, theirs, before in zip(model.parameters(), defined.model.parameters(), initial.parameters(), strict=True):
        assert_close(ours - before, theirs - before)


def test_a_step_that_does_not_gather_forms_no_rows(monkeypatch) -> None:
    formed: list[int] = []
    real = gathering.rows
    monkeypatch.setattr(gathering, "rows", lambda uses: formed.append(len(uses)) or real(uses))
    parts = {"tokens": nn.Embedding(7, 6), "gru": nn.GRU(6, 6, batch_first=True)}
    model = nn.ModuleDict({**parts, "head": nn.Linear(6, 3), "conv": nn.Conv1d(6, 4, 2)})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    handle = isaac.attach(model, damping=0.2, when="step", decay=0.8, refresh=4, gather=1).bind(optimizer)
    seen = []
    for _ in range(9):
        formed.clear()
        optimizer.zero_grad()
        hidden, _ = model["gru"](model["tokens"](torch.randint(7, (3, 5))))
        (model["head"](hidden).square().mean() + model["conv"](hidden.mT).square().mean()).backward()
        gathered = [m.gathered for site in handle._sites.values() for g in site.gatherings.values() for m in g.moments.values()]
        seen.append((sum(formed), set(gathered)))
        optimizer.step()
        assert "not seen" not in str(handle)
    assert [rows for rows, _ in seen] == [4, 0, 0, 0, 4, 0, 0, 0, 4]
    assert [gathered for _, gathered in seen] == [{True}, {False}, {False}, {False}] * 2 + [{True}]


def test_a_step_between_two_renewals_looks_at_no_average(monkeypatch) -> None:
    asked = []
    real = moments.Moment.mean
    monkeypatch.setattr(moments.Moment, "mean", lambda self: asked.append(self) or real(self))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    isaac.attach(model, damping=0.2, when="step", decay=0.8, refresh=4, gather=2).bind(optimizer)
    counts = []
    for step in range(6):
        train(model, optimizer, range(step, step + 1))
        counts.append(len(asked))
    assert counts == [3, 3, 3, 3, 6, 6]


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_a_warm_up_changes_nothing_but_the_average_of_the_first_step(make) -> None:
    model = network()
    optimizer = make(model.parameters(), 0.1, weight_decay=0.3)
    handle = isaac.attach(model, damping=0.2, when="step", decay=0.8, warm_up=3).bind(optimizer)
    before = copy.deepcopy(model.state_dict())
    train(model, optimizer, range(3))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not optimizer.state
    assert handle.steps == 3
    train(model, optimizer, range(3, 4))
    assert not any(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_warm_up_by_hand_and_with_a_closure_leaves_the_weights_alone() -> None:
    for by_hand in (True, False):
        model, (x, y) = network(), batch(0)
        before = copy.deepcopy(model.state_dict())
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        handle = isaac.attach(model, damping=0.2, when="step", decay=0.8, warm_up=1)
        if not by_hand:
            handle.bind(optimizer)

        def closure(model=model, x=x, y=y, handle=handle, by_hand=by_hand) -> Tensor:
            model.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if by_hand:
                handle.step()
            return loss

        closure() if by_hand else optimizer.step(closure)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_warm_up_under_a_gradient_scaler_leaves_the_weights_alone() -> None:
    model, (x, y) = network(), batch(0)
    before = copy.deepcopy(model.state_dict())
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")
    isaac.attach(model, damping=0.2, when="step", decay=0.8, warm_up=2).bind(optimizer)
    for step in range(3):
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        if step == 1:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert not any(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_two_optimizers_warm_up_together() -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    first, second = (torch.optim.SGD(part.parameters(), RATE) for part in (model[:3], model[3:]))
    handle = isaac.attach(model, damping=0.2, when="step", decay=0.8, warm_up=2).bind(first).bind(second)
    for step in range(3):
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        x, y = batch(step)
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        first.step()
        second.step()
    assert handle.steps == 3
    assert not any(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("at", [2, 6, 9, 13])
def test_a_resume_within_the_warm_up_and_within_a_period_is_bit_identical(tmp_path, at) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer, isaac.Handle]:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        options = {"decay": 0.8, "refresh": 5, "gather": 2, "warm_up": 4}
        return model, optimizer, isaac.attach(model, damping=0.2, when="step", **options).bind(optimizer)

    model, optimizer, handle = make()
    train(model, optimizer, range(at))
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "isaac": handle.state_dict()}
    torch.save(states, tmp_path / "checkpoint.pt")
    train(model, optimizer, range(at, 20))
    resumed, other, new = make()
    saved = torch.load(tmp_path / "checkpoint.pt")
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    new.load_state_dict(saved["isaac"])
    train(resumed, other, range(at, 20))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))


@pytest.mark.parametrize("options", [{"damping": math.inf}, {"damping": 0.2, "power": 0}])
def test_where_nothing_is_conditioned_rows_are_gathered_as_rarely(options) -> None:
    model = network()
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), RATE) for m in (model, plain)]
    handle = isaac.attach(model, when="step", decay=0.8, refresh=4, gather=1, **options).bind(optimizers[0])
    averages = []
    for step in range(9):
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            train(m, optimizer, range(step, step + 1))
        averages.append(next(iter(handle.state_dict()["curvature"]["3"].values()))["average"])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    changed = [not torch.equal(before, after) for before, after in itertools.pairwise(averages)]
    assert changed == [False, False, False, True] * 2


def test_the_report_names_what_was_asked_for() -> None:
    handle = isaac.attach(network(), damping=0.2, when="step", decay=0.8, refresh=5, gather=2, warm_up=4)
    assert "refresh=5, gather=2, warm_up=4" in str(handle)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gather": 2}, "gather=2, warm_up=0, power=1.0, spread=False with when='backward'"),
        ({"warm_up": 2}, "gather=None, warm_up=2, power=1.0, spread=False with when='backward'"),
        ({"when": "step", "decay": 0.9, "gather": 2}, "at most refresh=1, got 2"),
        ({"when": "step", "decay": 0.9, "gather": 0}, "gather must be a whole number >= 1, got 0"),
        ({"when": "step", "decay": 0.9, "warm_up": -1}, "warm_up must be a whole number >= 0, got -1"),
        ({"spread": True}, "spread=True with when='backward'"),
        ({"when": "step", "spread": True}, "spread=True divides among ranks what lasts over steps"),
        ({"when": "step", "warm_up": 5}, "warm_up=5 fill an average, and decay=0 keeps none"),
        ({"when": "step", "refresh": 5, "gather": 2}, "gather=2 and warm_up=0 fill an average"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        isaac.attach(network(), damping=0.1, **options)


class Attention(nn.Module):
    """Layers of their own and packed weights that receive one tensor, and one that receives another."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, 6) for _ in range(3))
        self.packed = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))
        return self.head(self.packed(x, x, x, need_weights=False)[0]).mean(1)


def attention() -> Attention:
    torch.manual_seed(1)
    return Attention().double()


def attend(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, parts: int = 1) -> None:
    for step in steps:
        random = torch.Generator().manual_seed(step)
        x, y = torch.randn(6, 5, 6, dtype=torch.float64, generator=random), torch.randint(3, (6,), generator=random)
        optimizer.zero_grad()
        for part_x, part_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
            F.cross_entropy(model(part_x), part_y).backward()
        optimizer.step()


def lasting(handle: isaac.Handle) -> tuple[int, int]:
    """How many averages and conditioners there are, and how many of them are tensors of their own."""
    kept = [m for site in handle._sites.values() for g in site.gatherings.values() for m in g.moments.values()]
    tensors = [tensor for m in kept for tensor in (m.average, m.conditioner) if tensor is not None]
    return len(tensors), len({tensor.data_ptr() for tensor in tensors})


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    "options", [{"decay": 0.8, "refresh": 3, "gather": 2, "warm_up": 2}, {"max_rows": 4, "decay": 0.5}, {}]
)
def test_layers_with_one_input_have_one_second_moment(options, parts, monkeypatch) -> None:
    shared, alone = attention(), attention()
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (shared, alone)]
    handle = isaac.attach(shared, damping=0.2, when="step", **options).bind(optimizers[0])
    torch.manual_seed(5)
    attend(shared, optimizers[0], range(9), parts)
    if options:
        expected = (12, 8) if "refresh" in options else (6, 4)  # q, k and v; the packed three; its output; the head
        assert lasting(handle) == expected
    monkeypatch.setattr(moments.Moment, "made_of", lambda self: (id(self),))
    apart = isaac.attach(alone, damping=0.2, when="step", **options).bind(optimizers[1])
    torch.manual_seed(5)
    attend(alone, optimizers[1], range(9), parts)
    assert lasting(apart)[0] == lasting(handle)[0]
    assert all(torch.equal(a, b) for a, b in zip(shared.parameters(), alone.parameters(), strict=True))


def test_one_input_is_multiplied_by_itself_once(monkeypatch) -> None:
    made = []
    real = moments.Moment.of_rows.__func__
    of_rows = classmethod(lambda cls, *args, **options: made.append(args[0]) or real(cls, *args, **options))
    monkeypatch.setattr(moments.Moment, "of_rows", of_rows)
    model = attention()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    isaac.attach(model, damping=0.2, when="step", decay=0.8).bind(optimizer)
    attend(model, optimizer, range(1))
    assert len(made) == 4


def test_what_is_shared_stays_so_over_a_checkpoint(tmp_path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer, isaac.Handle]:
        model = attention()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return model, optimizer, isaac.attach(model, damping=0.2, when="step", decay=0.8, refresh=5).bind(optimizer)

    model, optimizer, handle = make()
    attend(model, optimizer, range(7))
    torch.save({"model": model.state_dict(), "isaac": handle.state_dict()}, tmp_path / "checkpoint.pt")
    attend(model, optimizer, range(7, 14))
    resumed, other, new = make()
    saved = torch.load(tmp_path / "checkpoint.pt")
    resumed.load_state_dict(saved["model"])
    new.load_state_dict(saved["isaac"])
    assert lasting(new) == (12, 8)
    attend(resumed, other, range(7, 14))
    assert lasting(new) == (12, 8)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))


def test_layers_part_when_they_no_longer_receive_the_same() -> None:
    class Parting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            return self.one(x) + self.two(other)

    torch.manual_seed(1)
    model, alone = Parting().double(), nn.Linear(6, 3).double()
    handle = isaac.attach(model, damping=0.2, when="step", decay=0.5)
    second = isaac.attach(alone, damping=0.2, when="step", decay=0.5)
    for step in range(4):
        x, other = torch.randn(2, 5, 6, dtype=torch.float64)
        model.zero_grad()
        alone.zero_grad()
        other = x if step < 2 else other
        model(x, other).sum().backward()
        alone(other).sum().backward()
        handle.step()
        second.step()
        assert_close(model.two.weight.grad, alone.weight.grad)
        assert lasting(handle) == (2, 1 if step < 2 else 2)


def test_rows_that_a_mask_leaves_out_do_not_count_on_a_gpu_either(monkeypatch) -> None:
    """There they are zeros, because nothing may wait for their number."""
    torch.manual_seed(0)
    x, mask = torch.randn(3, 5, 4, dtype=torch.float64), torch.rand(3, 5) > 0.4
    gradients = []
    for may_look in (True, False):
        monkeypatch.setattr("isaac_newton.core.rows._may_look", lambda use, may_look=may_look: may_look)
        for decay in (0.0, 0.5):
            torch.manual_seed(0)
            layer = nn.Linear(4, 3, bias=False).double()
            handle = isaac.attach(layer, damping=0.2, when="step", decay=decay)
            handle.mask = mask
            layer(x).square().sum().backward()
            handle.step()
            gradients.append(layer.weight.grad)
    for gradient in gradients[1:]:
        assert_close(gradient, gradients[0])


def example(name: str) -> Any:
    """What a script defines, without running it."""
    return runpy.run_path(str(Path(__file__).parent.parent / "examples" / f"{name}.py"), run_name=name)


def rows_of(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The rows of each linear layer and convolution, by the name of its weight."""
    found, hooks = {}, []
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):

            def note(layer: nn.Module, args: Any, name: str = name) -> None:
                found[f"{name}.weight"] = definition.rows(layer, args[0].detach(), "expand")

            hooks.append(layer.register_forward_pre_hook(note))
    model(x)
    for hook in hooks:
        hook.remove()
    return found


def test_the_curvature_is_the_average_second_moment_of_the_rows_of_each_weight() -> None:
    model = network()
    handle = isaac.attach(model, damping=math.inf, when="step", decay=0.8, power=0.5)
    assert not handle.curvature
    average, total = dict[str, Any](), 0.0
    for step in range(4):
        x, y = batch(step)
        for name, r in rows_of(model, x).items():
            average[name] = 0.8 * average.get(name, 0.0) + 0.2 * r.T @ r / len(r)
        total = 0.8 * total + 0.2
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        handle.step()
    curvature = handle.curvature
    assert set(curvature) == {"0.weight", "3.weight", "5.weight"} == set(average)
    for name, moment in curvature.items():
        assert_close(moment, average[name] / total)
        for damping, strength in [(0.3, 0.3), (isaac.Relative(0.3), 0.3 * moment.trace() / len(moment))]:
            values, vectors = torch.linalg.eigh(average[name] / total)
            assert_close(handle.factor(name, damping), vectors * (1 + values / strength).pow(-0.5) @ vectors.T)


def test_a_gradient_is_multiplied_by_the_factor() -> None:
    model, (x, y) = network(), batch(0)
    handle = isaac.attach(model, damping=0.3, when="step", decay=0.8)
    F.cross_entropy(model(x), y).backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    handle.step()
    for name in handle.curvature:
        expected = plain[name].flatten(1) @ handle.factor(name)
        assert_close(model.get_parameter(name).grad.flatten(1), expected)


class Packed(nn.Module):
    """What has one matrix for several parts of a weight, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.groups = nn.Conv1d(6, 4, 1, groups=2)
        self.frozen = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)
        self.frozen.weight.requires_grad_(False)

    def forward(self, tokens: Tensor, memory: Tensor) -> Tensor:
        x = self.attention(self.tokens(tokens), memory, memory, need_weights=False)[0]
        return self.head(self.frozen(self.groups(x.mT).mT))


def test_the_curvature_of_packed_weights_groups_and_embeddings_has_a_matrix_for_each_part() -> None:
    torch.manual_seed(0)
    model = Packed().double()
    handle = isaac.attach(model, damping=0.2, when="step", decay=0.8, bias="joint")
    tokens, memory = torch.randint(7, (3, 5)), torch.randn(3, 4, 6, dtype=torch.float64)
    model(tokens, memory).square().mean().backward()
    handle.step()
    curvature = handle.curvature
    shapes = {name: tuple(moment.shape) for name, moment in curvature.items()}
    assert shapes == {
        "tokens.weight": (7,),
        "attention.in_proj_weight": (3, 7, 7),
        "attention.out_proj.weight": (7, 7),
        "groups.weight": (2, 4, 4),
        "head.weight": (5, 5),
    }
    assert_close(curvature["tokens.weight"], tokens.flatten().bincount(minlength=7).double() / tokens.numel())
    for part, x in enumerate([model.tokens(tokens), memory, memory]):
        r = torch.cat([x.flatten(0, 1), torch.ones(x.shape[:2].numel(), 1)], dim=1).detach()
        assert_close(curvature["attention.in_proj_weight"][part], r.T @ r / len(r))
        inverse = torch.linalg.inv(torch.eye(7, dtype=torch.float64) + r.T @ r / len(r) / 0.2)
        assert_close(handle.factor("attention.in_proj_weight")[part], inverse)


def test_the_curvature_has_the_type_of_the_weight_and_comes_back_from_a_checkpoint() -> None:
    wide = torch.float32
    for dtype, damping, expected in [(wide, 1e-3, wide), (torch.bfloat16, 10.0, wide), (torch.float64, 1e-3, torch.float64)]:
        torch.manual_seed(0)
        layer, other = nn.Linear(4, 3).to(dtype), nn.Linear(4, 3).to(dtype)
        handle, resumed = (isaac.attach(one, damping=damping, when="step", decay=0.8) for one in (layer, other))
        layer(torch.randn(6, 4, dtype=dtype)).sum().backward()
        handle.step()
        resumed.load_state_dict(handle.state_dict())
        assert handle.curvature["weight"].dtype == handle.factor("weight").dtype == expected
        assert torch.equal(handle.curvature["weight"], resumed.curvature["weight"])
        assert torch.equal(handle.factor("weight"), resumed.factor("weight"))


def test_a_curvature_that_is_not_kept_is_refused() -> None:
    handle = isaac.attach(network(), damping=0.2, when="step")
    with pytest.raises(ValueError, match=r"handle\.curvature is of the average that decay keeps"):
        _ = handle.curvature
    handle.detach()
    with pytest.raises(RuntimeError, match=r"handle\.factor is for when='step'"):
        isaac.attach(network(), damping=0.2).factor("3.weight")
    handle = isaac.attach(network(), damping=0.2, when="step", decay=0.5)
    with pytest.raises(ValueError, match=r"no second moment of '3\.weight' .* those of: none"):
        handle.factor("3.weight")


def test_the_example_of_foof_is_momentum_times_the_inverse_of_the_average() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    expected, momentum = copy.deepcopy(model), dict[str, Any]()
    optimizer = example("foof")["FOOF"](model, lr=0.1, damping=0.3, momentum=0.9, every=4)
    average, inverse = dict[str, Any](), dict[str, Tensor]()
    for step in range(16):
        x, y = torch.randn(6, 5, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        real = step - 5  # after five steps that only gather
        if real <= 0 or (real - 1) % 4 >= 2:
            for name, r in rows_of(expected, x).items():
                average[name] = 0.95 * average.get(name, 0.0) + 0.05 * r.T @ r / len(r)
        if real < 0:
            continue
        gathered = sum(1 for done in range(real + 1) if done == 0 or (done - 1) % 4 >= 2) + 5
        names = dict(expected.named_parameters())
        gradients = torch.autograd.grad(F.mse_loss(expected(x), y), list(names.values()))
        for (name, p), gradient in zip(names.items(), gradients, strict=True):
            momentum[name] = 0.9 * momentum.get(name, 0.0) + gradient
            if name in average and real % 4 == 0:
                mean = average[name] / (1 - 0.95**gathered)
                inverse[name] = torch.linalg.inv(mean + 0.3 * torch.eye(len(mean), dtype=torch.float64))
            with torch.no_grad():
                p -= 0.1 * (momentum[name] @ inverse[name] if name in average else momentum[name])
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert_close(ours, theirs)


def test_the_example_of_locoprop_ends_at_the_solution_of_its_local_loss() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4, bias=False)).double()
    optimizer = example("locoprop")["LocoProp"](model, lr=0.5, strength=2.0, inner=4000)
    before, x = model[0].weight.detach().clone(), torch.randn(6, 5, dtype=torch.float64)
    for _ in range(6):  # five of them only gather
        model.zero_grad()
        model(x).square().sum().backward()
        gradient = model[0].weight.grad.clone()
        optimizer.step()
    second = x.T @ x / 6 + torch.eye(5, dtype=torch.float64) / 2.0
    assert_close(model[0].weight.detach() - before, -0.5 * gradient @ torch.linalg.inv(second))


def test_momentum_comes_before_the_conditioning_or_after_it() -> None:
    """Bound, an optimizer has the momentum of conditioned gradients; by hand, the momentum of plain ones is conditioned."""
    x, g = torch.randn(6, 6, 4, dtype=torch.float64), torch.randn(6, 6, 3, dtype=torch.float64)
    for first in (True, False):
        torch.manual_seed(0)
        layer = nn.Linear(4, 3, bias=False).double()
        expected, kept, average = layer.weight.detach().clone(), torch.zeros(3, 4, dtype=torch.float64), 0.0
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.0 if first else 0.9)
        handle = isaac.attach(layer, damping=0.3, when="step", decay=0.5)
        momentum = torch.zeros_like(layer.weight)
        if not first:
            handle.bind(optimizer)
        for step in range(6):
            optimizer.zero_grad()
            layer(x[step]).backward(g[step])
            if first:
                layer.weight.grad.copy_(momentum.mul_(0.9).add_(layer.weight.grad))
                handle.step()
            optimizer.step()
            average = 0.5 * average + 0.5 * x[step].T @ x[step] / 6
            mean = average / (1 - 0.5 ** (step + 1))
            factor = torch.linalg.inv(torch.eye(4, dtype=torch.float64) + mean / 0.3)
            plain = g[step].T @ x[step]
            kept = 0.9 * kept + (plain if first else plain @ factor)
            expected -= 0.1 * (kept @ factor if first else kept)
        assert_close(layer.weight, expected)


@pytest.mark.parametrize("change", ["nothing", "scaled", "clipped", "added"])
def test_what_is_added_in_place_after_a_pass_for_somebody_else_is_noticed(change: str) -> None:
    """The rows of `autograd.grad` count for no parameter, so a gradient that has them too is not that of its rows."""
    torch.manual_seed(0)
    layer = nn.Linear(5, 3)
    handle = isaac.attach(layer, damping=1.0, when="step")
    layer(torch.randn(4, 5)).square().sum().backward()
    (other,) = torch.autograd.grad(layer(torch.randn(4, 5)).sum(), layer.weight)
    gradient = layer.weight.grad
    changes = {
        "nothing": lambda: None,
        "scaled": lambda: gradient.mul_(0.5),
        "clipped": lambda: gradient.clamp_(-0.1, 0.1),
        "added": lambda: gradient.add_(other),
    }
    changes[change]()
    plain = gradient.clone()
    if change == "added":
        with pytest.warns(RuntimeWarning, match=r"the gradient of 'weight' is not the sum of the backward passes"):
            handle.step()
        assert torch.equal(gradient, plain)
    else:
        handle.step()
        assert not torch.equal(gradient, plain)
