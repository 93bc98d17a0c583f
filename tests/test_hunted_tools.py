"""More right cases of the further hunt: adapters of users, PEFT, ζ, parametrizations, tools, `suggest_damping`."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.nn.utils.parametrizations import weight_norm

import isaac_newton as isaac
from test_hunted import LAMBDA, batch, close, conditioner, mlp, same

BOTH = pytest.mark.parametrize("when", ["backward", "step"])

# ------------------------------------------------------------------------------------------------------------------- automatic


def test_the_automatic_form_draws_64_rows_and_damps_by_a_tenth_of_their_largest_eigenvalue() -> None:
    """What its conditioner is made of can be had back from a gradient of full rank."""
    model = nn.Linear(100, 150, bias=False).double()
    plain = copy.deepcopy(model)
    isaac.attach(model)
    x, g = torch.rand(300, 100, dtype=torch.float64), batch(300, 150)
    for one in (model, plain):
        one(x).backward(g)
    close(model.weight.grad.norm(), plain.weight.grad.norm())
    inverse = torch.linalg.inv(torch.linalg.lstsq(plain.weight.grad, model.weight.grad).solution)
    values = torch.linalg.eigvalsh((inverse + inverse.T) / 2)
    over_damping = values / values[0] - 1
    assert int((over_damping > 1e-7).sum()) == 64
    close(over_damping[-1], torch.tensor(10.0), tolerance=1e-3)  # λ is a tenth of it


def test_an_overflow_with_norms_kept_is_skipped() -> None:
    model = mlp().float()
    before = copy.deepcopy(model)
    isaac.attach(model)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**120)
    scaler.scale((1e10 * model(torch.randn(9, 6))).square().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))


# --------------------------------------------------------------------------------------------------------------------------- ζ


def softmax_columns(z: Tensor) -> Tensor:
    p = z.softmax(1)
    return torch.cat([p[:, [k]].sqrt() * (torch.eye(4, dtype=z.dtype)[k] - p) for k in range(4)])


@pytest.mark.parametrize("labels", ["ignored", "soft", "spatial", "summed"])
def test_exact_zeta(labels: str) -> None:
    shape = (3, 5, 6) if labels == "spatial" else (9, 6)
    model, x = nn.Linear(6, 4).double(), torch.randn(*shape, dtype=torch.float64)
    plain = copy.deepcopy(model)
    y = torch.rand(9, 4, dtype=torch.float64).softmax(1) if labels == "soft" else torch.randint(4, shape[:-1])
    if labels == "ignored":
        y[:4] = -100
    loss_fn = nn.CrossEntropyLoss(reduction="sum" if labels == "summed" else "mean")
    handle = isaac.attach(model, damping=LAMBDA, output_damping=0.2, output_curvature="exact")

    def output_of(one: nn.Module) -> Tensor:
        output: Tensor = one(x)
        return output.transpose(1, 2) if labels == "spatial" else output

    output = output_of(model)
    handle.backward(loss_fn(output, y), output, loss_fn)
    loss_fn(output_of(plain), y).backward()
    terms = plain(x).detach().reshape(-1, 4)[4 if labels == "ignored" else 0 :]
    columns = softmax_columns(terms)
    left = torch.linalg.inv(torch.eye(4, dtype=torch.float64) + columns.T @ columns / (len(terms) * 0.2))
    close(model.weight.grad, left @ plain.weight.grad @ conditioner(x))


# -------------------------------------------------------------------------------------------------------------------- adapters


class Masked(nn.Linear):
    """As in MADE: some weights are taken out."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight * self.weight.detach().gt(0), self.bias)


class Packed(nn.Linear):
    """Two matrices in one parameter, with different rows."""

    def forward(self, input: Tensor) -> Tensor:
        first, second = self.weight.chunk(2)
        return F.linear(input, first) * F.linear(input.square(), second)


class Twice(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight) + F.linear(input.square(), self.weight)


@contextmanager
def adapters() -> Iterator[None]:
    from isaac_newton.layers.registry import _REGISTRY

    before = dict(_REGISTRY)

    @isaac.register(Masked)
    def masked(layer: Masked, site: isaac.Site, x: Tensor) -> Tensor:
        weight, bias = isaac.condition(layer.weight * layer.weight.detach().gt(0), layer.bias, x, site)
        return F.linear(x, weight, bias)

    @isaac.register(Packed)
    def packed(layer: Packed, site: isaac.Site, x: Tensor) -> Tensor:
        first, second = layer.weight.chunk(2)
        first, _ = isaac.condition(first, None, x, site)
        second, _ = isaac.condition(second, None, x.square(), site)
        return F.linear(x, first) * F.linear(x.square(), second)

    @isaac.register(Twice)
    def twice(layer: Twice, site: isaac.Site, x: Tensor) -> Tensor:
        first, _ = isaac.condition(layer.weight, None, x, site)
        second, _ = isaac.condition(layer.weight, None, x.square(), site)
        return F.linear(x, first) + F.linear(x.square(), second)

    try:
        yield
    finally:
        _REGISTRY.clear()
        _REGISTRY.update(before)


@BOTH
def test_an_adapter_of_a_packed_weight(when: str) -> None:
    model, x = Packed(6, 8, bias=False).double(), batch(9)
    plain = copy.deepcopy(model)
    with adapters():
        handle = isaac.attach(model, damping=LAMBDA, when=when)
        for one in (model, plain):
            one(x).square().sum().backward()
    if when == "step":
        handle.step()
    first, second = plain.weight.grad.chunk(2)
    close(model.weight.grad, torch.cat([first @ conditioner(x), second @ conditioner(x.square())]))


@BOTH
def test_an_adapter_that_uses_a_weight_twice(when: str) -> None:
    model, x, g = Twice(6, 4, bias=False).double(), batch(9), batch(9, 4)
    with adapters():
        handle = isaac.attach(model, damping=LAMBDA, when=when)
        model(x).backward(g)
    if when == "step":
        handle.step()
        expected = g.T @ (x + x.square()) @ conditioner(torch.cat([x, x.square()]))
    else:
        expected = g.T @ x @ conditioner(x) + g.T @ x.square() @ conditioner(x.square())
    close(model.weight.grad, expected)


def test_an_adapter_of_a_masked_weight_is_conditioned_or_refused() -> None:
    model, x, g = Masked(6, 4).double(), batch(9), batch(9, 4)
    with adapters():
        handle = isaac.attach(model, damping=LAMBDA)
        model(x).backward(g)
        close(model.weight.grad, g.T @ x @ conditioner(x) * model.weight.gt(0))
        handle.detach()
        isaac.attach(model, damping=LAMBDA, when="step")
        with pytest.raises(RuntimeError, match="neither a parameter nor some rows of one"):
            model(x)


# ------------------------------------------------------------------------------------------------------------------------ tools


PEFT = {
    "rank-stabilized": peft.LoraConfig(r=2, target_modules=["0", "2"], use_rslora=True, init_lora_weights=False),
    "DoRA": peft.LoraConfig(r=2, target_modules=["0", "2"], use_dora=True, init_lora_weights=False),
    "a whole layer": peft.LoraConfig(r=2, target_modules=["0"], modules_to_save=["2"], init_lora_weights=False),
    "biases": peft.LoraConfig(r=2, target_modules=["0", "2"], bias="all", init_lora_weights=False),
}


@BOTH
@pytest.mark.parametrize("config", PEFT.values(), ids=PEFT)
def test_peft(config: peft.LoraConfig, when: str) -> None:
    model = peft.get_peft_model(mlp(), config).double()
    plain, rows = copy.deepcopy(model), {}
    for name, layer in plain.named_modules():
        if isinstance(layer, nn.Linear) and layer.weight.requires_grad:
            layer.register_forward_hook(lambda _, args, out, name=name: rows.update({name: args[0].detach()}))
    handle, x = isaac.attach(model, damping=LAMBDA, when=when), batch(9)
    for one in (model, plain):
        one(x).square().sum().backward()
    if when == "step":
        handle.step()
    for name, p in plain.named_parameters():
        layer = name.removesuffix(".weight")
        close(model.get_parameter(name).grad, p.grad @ conditioner(rows[layer]) if layer in rows else p.grad)
    assert len(rows) >= 3


def test_a_cached_parametrization_is_conditioned_as_without_the_cache() -> None:
    model = mlp()
    weight_norm(model[0])
    twin = copy.deepcopy(model)
    for one in (model, twin):
        isaac.attach(one, damping=LAMBDA)
    x, y = batch(9), batch(5)
    with parametrize.cached():
        loss = model(x).square().sum() + model(y).square().sum()
    loss.backward()
    (twin(x).square().sum() + twin(y).square().sum()).backward()
    same(model, twin)


def test_a_convolution_fused_with_its_norm_computes_the_same() -> None:
    model, x = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).double(), torch.randn(4, 2, 6, 6, dtype=torch.float64)
    isaac.attach(model, damping=LAMBDA)
    model(x).sum().backward()
    model.eval()
    close(fuse_conv_bn_eval(*model)(x), model(x))


@pytest.mark.parametrize("options", [None, {}, {"when": "step", "decay": 0.9, "damping": LAMBDA}])
def test_suggesting_a_damping_leaves_everything_as_it_was(options: dict[str, Any] | None) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Dropout(0.5), nn.Flatten(), nn.Linear(48, 4))
    handle = None if options is None else isaac.attach(model, **options)
    model[2].eval()
    x, before, generator = torch.randn(5, 2, 6, 6), copy.deepcopy(model.state_dict()), torch.get_rng_state()
    isaac.suggest_damping(model, x)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(generator, torch.get_rng_state())
    assert [layer.training for layer in model] == [True, True, False, True, True]
    assert all(p.grad is None for p in model.parameters())
    assert handle is None or (handle.backward_passes, handle.steps) == (0, 0)


def test_handles_on_a_model_and_on_a_part_of_it() -> None:
    """Whoever comes second has to leave out what the first one has; each keeps its own when the other goes."""
    model, x = mlp(), batch()
    plain = copy.deepcopy(model)
    with pytest.raises(ValueError, match="already attached"):
        isaac.attach(model[0], damping=LAMBDA) and isaac.attach(model, damping=0.1)
    isaac.detach(model)
    rest, part = isaac.attach(model, damping=LAMBDA, exclude="2"), isaac.attach(model[2], damping=0.1)
    plain(x).square().sum().backward()
    model(x).square().sum().backward()
    close(model[0].weight.grad, plain[0].weight.grad @ conditioner(x))
    rest.detach()
    model.zero_grad()
    model(x).square().sum().backward()
    close(model[0].weight.grad, plain[0].weight.grad)
    close(model[2].weight.grad, plain[2].weight.grad @ conditioner(plain[:2](x).detach(), 0.1))
    part.detach()


@pytest.mark.parametrize("shape", [(3, 5, 6), (6,), (0, 6), (9, 6)])
def test_isaacs_own_linear_takes_every_shape(shape: tuple[int, ...]) -> None:
    model, x = isaac.Linear(6, 4, la=LAMBDA).double(), torch.randn(*shape, dtype=torch.float64)
    plain = nn.Linear(6, 4).double()
    plain.load_state_dict(model.state_dict())
    for one in (model, plain):
        one(x).square().sum().backward()
    close(model.weight.grad, plain.weight.grad @ conditioner(x))
