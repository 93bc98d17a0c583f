"""Whatever a training loop does with a backward pass, it sees ζ*; how many weights share an autograd node is not visible.

Each situation is a function of a `Run`: it makes models, runs backward passes, and returns what a user could look at. It runs
with the library, whose buckets have 1, 2, 16 or all weights, and with the definition. The library agrees with the definition to
1e-9, and with itself bit for bit.
"""

import contextlib
import functools
import gc
import importlib
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import definition
import isaac_newton as isaac
from reference import TOLERANCE, assert_close, zeta_star

DAMPING = 0.1


#: Where the size of a bucket stands.
BUCKETS = importlib.import_module("isaac_newton.core.bucket")
ALL = 1000
SIZES = [1, 2, 16, ALL]


@contextlib.contextmanager
def bucket_of(size: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BUCKETS, "BUCKET", size)
        yield


@pytest.fixture(params=SIZES, ids=lambda size: f"bucket of {'all' if size == ALL else size}")
def bucket(request: pytest.FixtureRequest) -> Iterator[int]:
    with bucket_of(request.param):
        yield request.param


# ---------------------------------------------------------------------------------------------------------- models and options


class Form(NamedTuple):
    """A model whose output has the shape of its input, with two neighbouring layers of one shape, and the options."""

    make: Callable[[], nn.Sequential]
    shape: tuple[int, ...]
    options: dict[str, Any]


def linear(hidden: int = 2) -> nn.Sequential:
    middle = [layer for _ in range(hidden) for layer in (nn.Linear(9, 9), nn.Tanh())]
    return nn.Sequential(nn.Linear(8, 9), nn.Tanh(), *middle, nn.Linear(9, 8))


def convolutional() -> nn.Sequential:
    def convolution(channels: int, out: int, kernel: int = 3) -> nn.Conv2d:
        return nn.Conv2d(channels, out, kernel, padding=kernel // 2)

    layers = convolution(2, 3), convolution(3, 3), convolution(3, 3), convolution(3, 2, 1)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2], nn.Tanh(), layers[3])


FORMS = {
    "own form": Form(linear, (5, 8), {}),  # fewer rows than features
    "many rows": Form(linear, (13, 8), {}),
    "many rows, max_rows": Form(linear, (13, 8), {"max_rows": 1000}),
    "sequences": Form(linear, (2, 3, 8), {}),
    "relative damping": Form(linear, (5, 8), {"damping": isaac.Relative(0.3)}),
    "relative damping, reduce": Form(linear, (5, 3, 8), {"damping": isaac.Relative(0.3), "sharing": "reduce"}),
    "sequences, reduce": Form(linear, (5, 3, 8), {"sharing": "reduce"}),
    "eighteen layers, reduce": Form(functools.partial(linear, 16), (5, 3, 8), {"sharing": "reduce"}),  # two buckets of 16
    "sequences, max_rows": Form(linear, (2, 3, 8), {"max_rows": 1000}),
    "sequences, joint bias": Form(linear, (2, 3, 8), {"bias": "joint"}),
    "joint bias, reduce": Form(linear, (5, 3, 8), {"bias": "joint", "sharing": "reduce"}),
    "convolutions": Form(convolutional, (4, 2, 4, 5), {}),
    "convolutions, reduce": Form(convolutional, (4, 2, 4, 5), {"sharing": "reduce"}),
}


class Run:
    """One way to attach, and what a situation needs."""

    def __init__(self, form: Form, attach: Callable[..., Any] = isaac.attach) -> None:
        self.form, self.attach = form, attach

    def model(self, change: Callable[[nn.Sequential], Any] = lambda model: None, seed: int = 0) -> nn.Sequential:
        torch.manual_seed(seed)
        model = self.form.make().double()
        change(model)
        self.attach(model, **({"damping": DAMPING} | self.form.options))
        return model

    def batch(self, seed: int = 0) -> Tensor:
        return torch.randn(self.form.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


Seen = dict[str, Tensor]
SITUATIONS: dict[str, Callable[[Run], Seen]] = {}


def situation(function: Callable[[Run], Seen]) -> Callable[[Run], Seen]:
    SITUATIONS[function.__name__.replace("_", " ")] = function
    return function


def loss_of(output: Tensor) -> Tensor:
    return (output - 0.3).square().sum()


def gradients(*models: nn.Module) -> Seen:
    """Which parameters have a gradient, and which."""
    named = [(f"{n}.{name}", p) for n, model in enumerate(models) for name, p in model.named_parameters()]
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


# ------------------------------------------------------------------------------------------------------------------ situations


@situation
def plain_backward(run: Run) -> Seen:
    model = run.model()
    loss_of(model(run.batch())).backward()
    return gradients(model)


@situation
def autograd_grad(run: Run) -> Seen:
    model, x = run.model(), run.batch().requires_grad_()
    named = {**dict(model.named_parameters()), "input": x}
    found = torch.autograd.grad(loss_of(model(x)), list(named.values()))
    return {**dict(zip(named, found, strict=True)), **gradients(model)}


@situation
def backward_with_inputs(run: Run) -> Seen:
    """Two layers of four, without their neighbours."""
    model = run.model()
    loss_of(model(run.batch())).backward(inputs=[model[0].weight, model[4].weight, model[4].bias])
    return gradients(model)


@situation
def retain_graph_twice(run: Run) -> Seen:
    model = run.model()
    loss = loss_of(model(run.batch()))
    loss.backward(retain_graph=True)
    first = gradients(model)
    loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    return first | {f"{name}, last": gradient for name, gradient in gradients(model).items()}


def checkpointed(run: Run, *, reentrant: bool, upto: int | None) -> Seen:
    model, x = run.model(), run.batch().requires_grad_()
    upto = len(model) if upto is None else upto
    hidden = checkpoint(model[:upto], x, use_reentrant=reentrant)
    loss_of(model[upto:](hidden)).backward()
    assert x.grad is not None
    return gradients(model) | {"input": x.grad}


for _reentrant in (True, False):
    for _part, _upto in (("all", None), ("half", 3)):
        _name = f"{_part} checkpointed, {'reentrant' if _reentrant else 'not reentrant'}"
        SITUATIONS[_name] = functools.partial(checkpointed, reentrant=_reentrant, upto=_upto)


@situation
def accumulation(run: Run) -> Seen:
    model = run.model()
    for seed in range(3):
        loss_of(model(run.batch(seed))).backward()
    return gradients(model)


@situation
def zero_grad_keeps_the_tensors(run: Run) -> Seen:
    model = run.model()
    loss_of(model(run.batch(1))).backward()
    kept = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=False)
    loss_of(model(run.batch())).backward()
    assert all(p.grad is grad for p, grad in zip(model.parameters(), kept, strict=True))
    return gradients(model)


@situation
def tensor_hooks(run: Run) -> Seen:
    model, seen = run.model(), {}
    for name, p in model.named_parameters():
        p.register_hook(lambda g, name=name: seen.update({f"{name}, seen": g.clone()}))
        p.register_hook(lambda g: 3 * g)
    loss_of(model(run.batch())).backward()
    return seen | gradients(model)


@situation
def post_accumulate_hooks(run: Run) -> Seen:
    model, seen = run.model(), {}
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.update({f"{name}, seen": p.grad.clone()}))
    for seed in range(2):
        loss_of(model(run.batch(seed))).backward()
    return seen | gradients(model)


@situation
def module_hooks(run: Run) -> Seen:
    """A full backward hook reads the gradients of its module's output and input, and may read `.grad` of the layers above."""
    model, seen = run.model(), {}
    for number in (0, 2, 4):

        def read(module: nn.Module, inputs: Any, outputs: Any, number: int = number) -> None:
            seen[f"output of {number}"] = outputs[0].clone()
            seen[f"weight above {number}"] = model[number + 2].weight.grad.clone()

        model[number].register_full_backward_hook(read)
    loss_of(model(run.batch().requires_grad_())).backward()
    return seen | gradients(model)


@situation
def clipping_inside_a_hook(run: Run) -> Seen:
    model = run.model()
    for p in model.parameters():
        p.register_hook(lambda g: g * min(1.0, 0.01 / g.norm().item()))
    loss_of(model(run.batch())).backward()
    return gradients(model)


@situation
def clipping_after_accumulation(run: Run) -> Seen:
    model = run.model()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: nn.utils.clip_grad_norm_([p], 0.01) and None)
    for seed in range(2):
        loss_of(model(run.batch(seed))).backward()
    return gradients(model)


@situation
def optimizer_in_backward(run: Run) -> Seen:
    model = run.model()
    optimizers = {p: torch.optim.SGD([p], 0.05, momentum=0.9) for p in model.parameters()}

    def step(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for seed in range(3):
        loss_of(model(run.batch(seed))).backward()
    return dict(model.named_parameters())


@situation
def tied_weights(run: Run) -> Seen:
    model = run.model(lambda model: setattr(model[4], "weight", model[2].weight))
    loss_of(model(run.batch())).backward()
    return gradients(model)


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.sin() / 2


@situation
def parametrized_weights(run: Run) -> Seen:
    model = run.model(lambda model: [parametrize.register_parametrization(model[n], "weight", Halved()) for n in (0, 4)])
    loss_of(model(run.batch())).backward()
    return gradients(model)


@situation
def parametrized_and_cached(run: Run) -> Seen:
    model = run.model(lambda model: parametrize.register_parametrization(model[2], "weight", Halved()))
    with parametrize.cached():
        loss_of(model[2](model[:2](run.batch()))).backward(retain_graph=True)
        loss_of(model(run.batch(1))).backward()
    return gradients(model)


@situation
def a_layer_used_twice(run: Run) -> Seen:
    model, x = run.model(), run.batch()
    loss_of(model[4:](torch.tanh(model[2](model[:4](x))))).backward()
    return gradients(model)


@situation
def a_model_used_twice(run: Run) -> Seen:
    """As in contrastive learning: two views in one graph."""
    model = run.model()
    (model(run.batch(0)) * model(run.batch(1))).sum().backward()
    return gradients(model)


@situation
def stray_forward_passes(run: Run) -> Seen:
    model, x = run.model(), run.batch()
    kept = loss_of(model(run.batch(1)))
    model(3 * x)
    with torch.no_grad():
        model(2 * x)
    part = model[:3](run.batch(2))
    loss_of(model(x)).backward()
    first = gradients(model)
    model.zero_grad()
    kept.backward()
    return first | {f"{name}, kept": gradient for name, gradient in gradients(model).items()} | {"part": part}


@situation
def graphs_in_any_order(run: Run) -> Seen:
    """Three graphs are alive; the second, the first and the third are differentiated."""
    model, seen = run.model(), {}
    losses = [loss_of(model(run.batch(seed))) for seed in range(3)]
    for number in (1, 0, 2):
        model.zero_grad()
        losses[number].backward()
        seen |= {f"{name}, {number}": gradient for name, gradient in gradients(model).items()}
    return seen


@situation
def several_losses(run: Run) -> Seen:
    """Two losses of one forward pass, one after the other; the second reaches a part of the layers."""
    model = run.model()
    hidden = model[:4](run.batch())
    loss_of(model[4:](hidden)).backward(retain_graph=True)
    loss_of(hidden).backward()
    return gradients(model)


@situation
def an_unused_layer(run: Run) -> Seen:
    model = run.model()
    for upto in (5, 7):
        loss_of(model[:upto](run.batch(upto))).backward()
    return gradients(model)


@situation
def a_frozen_layer(run: Run) -> Seen:
    model = run.model()
    for frozen in (2, 4):
        model[frozen].requires_grad_(False)
        loss_of(model(run.batch(frozen))).backward()
        model[frozen].requires_grad_(True)
    return gradients(model)


@situation
def weights_that_moved(run: Run) -> Seen:
    """Parameters with other memory, and other parameters, after a first pass."""
    model = run.model()
    loss_of(model(run.batch())).backward()
    model[2].weight.data = model[2].weight.data.clone() / 2
    model[4].weight = nn.Parameter(model[4].weight.detach() / 2)
    loss_of(model(run.batch(1))).backward()
    model.load_state_dict({name: value.clone() / 2 for name, value in model.state_dict().items()}, assign=True)
    loss_of(model(run.batch(2))).backward()
    return gradients(model)


@situation
def a_pass_that_fails(run: Run) -> Seen:
    """A hook raises in the middle; the next pass knows nothing of it."""
    model = run.model()

    def fail(gradient: Tensor) -> None:
        raise ArithmeticError

    hook = model[2].weight.register_hook(fail)
    with pytest.raises(ArithmeticError):
        loss_of(model(run.batch(1))).backward()
    hook.remove()
    model.zero_grad()
    loss_of(model(run.batch())).backward()
    return gradients(model)


@situation
def two_models_in_one_graph(run: Run) -> Seen:
    first, second = run.model(), run.model(seed=1)
    loss_of(second(torch.tanh(first(run.batch())))).backward()
    loss_of(first(torch.tanh(second(run.batch(1))))).backward()
    return gradients(first, second)


@situation
def alternating_passes(run: Run) -> Seen:
    """As a GAN has them: D on real and fake, then G through D."""
    generator, discriminator = run.model(), run.model(seed=1)
    optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in (discriminator, generator)]
    for seed in range(3):
        fake = generator(run.batch(seed))
        optimizers[0].zero_grad()
        (loss_of(discriminator(run.batch(seed + 10))) - discriminator(fake.detach()).sum()).backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        discriminator(fake).square().mean().backward()
        optimizers[1].step()
    return gradients(generator, discriminator)


@situation
def alternating_passes_with_one_frozen(run: Run) -> Seen:
    generator, discriminator = run.model(), run.model(seed=1)
    for seed in range(2):
        fake = generator(run.batch(seed))
        (loss_of(discriminator(run.batch(seed + 10))) - discriminator(fake.detach()).sum()).backward()
        discriminator.requires_grad_(False)
        discriminator(fake).square().mean().backward()
        discriminator.requires_grad_(True)
    return gradients(generator, discriminator)


@situation
def create_graph(run: Run) -> Seen:
    """The conditioned gradients, and the gradient of their squares: through gradients, conditioners and inputs."""
    model = run.model()
    found = torch.autograd.grad(loss_of(model(run.batch())), list(model.parameters()), create_graph=True)
    torch.stack([gradient.square().sum() for gradient in found]).sum().backward()
    return {name: g.detach() for (name, _), g in zip(model.named_parameters(), found, strict=True)} | {
        f"{name}, second": gradient for name, gradient in gradients(model).items()
    }


@situation
def a_gradient_penalty(run: Run) -> Seen:
    model, x = run.model(), run.batch().requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    (loss_of(output) + (slope.flatten(1).norm(dim=1) - 1).square().sum()).backward()
    return gradients(model)


@situation
def a_residual_of_a_differential_equation(run: Run) -> Seen:
    """As a PINN has it: Δu + u."""
    model, x = run.model(), run.batch().requires_grad_()
    u = model(x)
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    ((second + u).square().sum() + u[0].square().sum()).backward()
    return gradients(model)


@situation
def an_overflow_under_a_gradient_scaler(run: Run) -> Seen:
    model = run.model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for seed in range(3):
        optimizer.zero_grad()
        loss = loss_of(model(run.batch(seed)))
        scaler.scale(loss * torch.inf if seed == 1 else loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 512.0
    return gradients(model) | {f"{name} itself": p.detach() for name, p in model.named_parameters()}


# ----------------------------------------------------------------------------------------------------------------- comparisons


@functools.cache
def by_definition(name: str, form: str) -> Seen:
    return SITUATIONS[name](Run(FORMS[form], definition.attach))


@functools.cache
def alone(name: str, form: str) -> Seen:
    with bucket_of(1):
        return SITUATIONS[name](Run(FORMS[form]))


def assert_same(seen: Seen, expected: Seen) -> None:
    assert seen.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(seen[name], gradient)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SITUATIONS)
def test_a_situation_gives_the_definition_and_does_not_see_buckets(name: str, form: str, bucket: int) -> None:
    seen = SITUATIONS[name](Run(FORMS[form]))
    assert_same(seen, by_definition(name, form))
    assert all(torch.equal(value, seen[key]) for key, value in alone(name, form).items())


@pytest.mark.parametrize(("shape", "features"), [((5, 8), 8), ((13, 8), 8)])
def test_the_definition_is_the_papers(shape: tuple[int, ...], features: int) -> None:
    layer, x, g = nn.Linear(features, 3).double(), torch.randn(shape).double(), torch.randn(shape[0], 3).double()
    definition.attach(layer, DAMPING)
    layer(x).backward(g)
    assert_close(layer.weight.grad, zeta_star(g, x, DAMPING))


DRAWN = {
    "linear": Form(linear, (2, 3, 8), {"max_rows": 4}),
    "linear, reduce": Form(linear, (5, 3, 8), {"max_rows": 3, "sharing": "reduce"}),
    "convolutions": Form(convolutional, (4, 2, 4, 5), {"max_rows": 16}),
}


@pytest.mark.parametrize("name", ["accumulation", "graphs in any order", "a layer used twice", "stray forward passes"])
@pytest.mark.parametrize("form", DRAWN)
def test_rows_are_drawn_by_the_seed_whatever_the_bucket(name: str, form: str, bucket: int) -> None:
    def seen(size: int, seed: int) -> Seen:
        with bucket_of(size), pytest.MonkeyPatch.context() as patch:
            # The seed of the weights stays; that of the draws is the one torch had last.
            make = Run.model
            patch.setattr(Run, "model", lambda *args: (make(*args), torch.manual_seed(seed))[0])
            return SITUATIONS[name](Run(DRAWN[form]))

    first, again, other = seen(1, 7), seen(bucket, 7), seen(bucket, 8)
    assert all(torch.equal(value, again[key]) for key, value in first.items())
    assert any(not torch.equal(value, other[key]) for key, value in first.items())


# -------------------------------------------------------------------------------------------------------- a part of the weights


def last_layer_first(model: nn.Sequential, x: Tensor) -> Seen:
    """As a probe of the head has it."""
    hidden = model[:6](x)
    (last,) = torch.autograd.grad(loss_of(model[6](hidden)), model[6].weight)
    loss_of(hidden).backward()
    return {"last": last} | gradients(model)


def branches_one_by_one(model: nn.Sequential, x: Tensor) -> Seen:
    hidden = model[:2](x).detach()
    losses = [loss_of(model[number](hidden)) for number in (2, 4)]
    for loss in losses:
        loss.backward()
    return gradients(model)


@pytest.mark.parametrize("part", [last_layer_first, branches_one_by_one])
@pytest.mark.parametrize("form", FORMS)
def test_a_pass_through_a_part_of_the_weights_works_or_names_retain_graph(
    form: str, part: Callable[[nn.Sequential, Tensor], Seen], bucket: int
) -> None:
    """The one case where a bucket may be visible: plain torch does this without `retain_graph`."""
    run = Run(FORMS[form])
    wanted = part(Run(FORMS[form], definition.attach).model(), run.batch())
    model = run.model()
    refused = ""
    try:
        assert_same(part(model, run.batch()), wanted)
    except RuntimeError as error:
        refused = str(error)
    assert not refused or (bucket > 1 and "retain_graph" in refused)
    for _ in range(2):
        # Once seen, the weights of this model go alone.
        model.zero_grad()
        assert_same(part(model, run.batch()), wanted)
    model.zero_grad()
    loss_of(model(run.batch())).backward()
    assert_same(gradients(model), by_definition("plain backward", form))


# ------------------------------------------------------------------------------------------------------------------- lifetimes


def _after_a_failure(model: nn.Sequential, x: Tensor) -> None:
    hook = model[2].weight.register_hook(lambda gradient: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        loss_of(model(x)).backward()
    hook.remove()


def _beside_others(model: nn.Sequential, x: Tensor) -> Tensor:
    """A pass while other graphs are alive, which go without a pass of their own."""
    stray = model(2 * x), model[:3](3 * x)
    loss = loss_of(model(x))
    loss.backward()
    assert all(output.requires_grad for output in stray)
    return loss


def _differentiated(model: nn.Sequential, x: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    loss = slope.square().sum()
    loss.backward()
    return loss


#: Each returns what a user still holds: everything that plain torch has freed by then must be free.
PASSES: dict[str, Callable[[nn.Sequential, Tensor], Any]] = {
    "backward": lambda model, x: [loss := loss_of(model(x)), loss.backward()],
    "kept graph": lambda model, x: [loss := loss_of(model(x)), loss.backward(retain_graph=True), loss.backward()],
    "of the weights": lambda model, x: [loss := loss_of(model(x)), torch.autograd.grad(loss, list(model.parameters()))],
    "of the input": lambda model, x: [loss := loss_of(model(x)), torch.autograd.grad(loss, x)],
    "of one weight": lambda model, x: [loss := loss_of(model(x)), loss.backward(inputs=[model[0].weight])],
    "of the last weight": lambda model, x: [loss := loss_of(model(x)), loss.backward(inputs=[model[6].weight])],
    "no pass, output dropped": lambda model, x: model(x).shape,
    "no pass, a part dropped": lambda model, x: model[:5](x).shape,
    "beside other graphs": _beside_others,
    "a layer used twice": lambda model, x: [loss := loss_of(model[4:](model[4](model[:4](x)))), loss.backward()],
    "a failure": _after_a_failure,
    "second derivatives": _differentiated,
    "checkpointed": lambda model, x: [loss := loss_of(checkpoint(model, x, use_reentrant=False)), loss.backward()],
    "checkpointed, reentrant": lambda model, x: [loss := loss_of(checkpoint(model, x, use_reentrant=True)), loss.backward()],
    "checkpointed, no pass": lambda model, x: checkpoint(model, x, use_reentrant=False),
}


#: Passes that do not ask for all weights.
PARTIAL = ("of the input", "of one weight", "of the last weight")


def kept_inputs(model: nn.Sequential, x: Tensor, go: Callable[[nn.Sequential, Tensor], Any]) -> list[bool]:
    """Which inputs of layers are alive after a pass, and then without what the user holds; cycles are not collected."""
    inputs: list[weakref.ref[Tensor]] = []
    for layer in model:
        layer.register_forward_pre_hook(lambda module, args: inputs.append(weakref.ref(args[0])))
    gc.disable()
    try:
        held = go(model, x.clone().requires_grad_().sin())
        alive = [ref() is not None for ref in inputs]
        del held
        return alive + [ref() is not None for ref in inputs]
    finally:
        gc.enable()


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("form", FORMS)
def test_inputs_are_released_as_early_as_torch_releases_them(form: str, name: str, bucket: int) -> None:
    run = Run(FORMS[form])
    plain = kept_inputs(Run(run.form, lambda model, **options: None).model(), run.batch(), PASSES[name])
    attached = kept_inputs(run.model(), run.batch(), PASSES[name])
    assert len(attached) == len(plain)
    if name in PARTIAL:
        # Nobody tells a weight's node that it will not run: what it waits with goes with the graph, not before.
        attached, plain = (each[len(each) // 2 :] for each in (attached, plain))
    assert [n for n, (ours, torchs) in enumerate(zip(attached, plain, strict=True)) if ours and not torchs] == []


@pytest.mark.parametrize("form", ["own form", "sequences, reduce", "convolutions"])
def test_forward_passes_alone_do_not_pile_up(form: str, bucket: int) -> None:
    run = Run(FORMS[form])
    model, x = run.model(), run.batch()
    counts = []
    for passes in (50, 600):
        for _ in range(passes):
            model(x)
        gc.collect()
        counts.append(len(gc.get_objects()))
    # One object for each use would be 2,400; a list of weak references may be looked through now and then.
    assert counts[1] - counts[0] < 1100


# ----------------------------------------------------------------------------------------------------------------------- ranks


class Part(nn.Module):
    """Runs all layers, or the first so many."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor, upto: int | None = None) -> Tensor:
        output: Tensor = self.layers[:upto](x)
        return output


def one_pass(model: Any, run: Run) -> None:
    loss_of(model(run.batch(dist.get_rank()))).backward()


def with_an_unused_layer(model: Any, run: Run) -> None:
    loss_of(model(run.batch(dist.get_rank()), upto=7 - 2 * dist.get_rank())).backward()


def micro_batches(model: Any, run: Run) -> None:
    """The first without communication; then all again, into the same tensors."""
    for _ in range(2):
        model.zero_grad(set_to_none=False)
        for number in range(2):
            with model.no_sync() if hasattr(model, "no_sync") and number == 0 else contextlib.nullcontext():
                if hasattr(model, "set_requires_gradient_sync"):
                    model.set_requires_gradient_sync(number == 1)
                loss_of(model(run.batch(2 * number + dist.get_rank()))).backward()


def shard(model: nn.Module) -> nn.Module:
    for layer in model.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            fully_shard(layer)
    return fully_shard(model)


class Ranked(NamedTuple):
    """What the ranks do, with a model that is wrapped after it was attached, or changed before."""

    loop: Callable[[Any, Run], None]
    after: Callable[[nn.Module], nn.Module] = lambda model: model
    before: Callable[[nn.Sequential], Any] = lambda model: None


DDP = DistributedDataParallel
RANKED = {
    "DDP": Ranked(one_pass, DDP),
    "DDP, buckets as views": Ranked(micro_batches, functools.partial(DDP, gradient_as_bucket_view=True)),
    "DDP, static graph": Ranked(one_pass, functools.partial(DDP, static_graph=True)),
    "DDP, no_sync": Ranked(micro_batches, DDP),
    "DDP, a layer that one rank does not use": Ranked(
        with_an_unused_layer, functools.partial(DDP, find_unused_parameters=True)
    ),
    "FSDP2": Ranked(one_pass, shard),
    "FSDP2, sharded before it is attached": Ranked(one_pass, before=shard),
    "FSDP2, micro-batches": Ranked(micro_batches, shard),
}


def on_this_rank(ranked: Ranked, run: Run) -> Seen:
    """The gradients that a rank ends with."""
    model = Part(run.model(ranked.before))
    ranked.loop(ranked.after(model), run)
    whole = {name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for name, p in model.named_parameters()}
    return {name: torch.zeros_like(p) if whole[name] is None else whole[name] for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What distributed/orders.py found; one launch for all of it."""
    folder, path = Path(__file__).parent, tmp_path_factory.mktemp("ranks") / "found.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    command = [*launch, str(folder / "distributed" / "orders.py"), str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, dict[str, Any]] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", RANKED)
def test_ranks_end_with_the_mean_of_what_the_definition_gives_each(on_two_ranks: Any, name: str, form: str) -> None:
    found = on_two_ranks[f"{name}, {form}"]
    assert [int(size) for size in found] == SIZES
    for size, (error, same) in found.items():
        assert error <= TOLERANCE[torch.float64], f"bucket of {size}"
        assert same, f"a bucket of {size} is not a bucket of 1"


NCCL = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(
    ("backend", "device", "dtype"),
    [
        pytest.param("gloo", "cpu", torch.float64, id="gloo"),
        pytest.param("nccl", "cuda", torch.float64, id="nccl", marks=NCCL),
        pytest.param("nccl", "cuda", torch.float32, id="nccl, float32", marks=NCCL),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_one_rank_under_ddp_is_the_model_itself(
    form: str, backend: str, device: str, dtype: torch.dtype, bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seen(size: int) -> Seen:
        with bucket_of(size):
            model = Run(FORMS[form]).model(lambda model: model.to(device, dtype))
            wrapped = DDP(model)
            for seed in range(2):
                loss_of(wrapped(Run(FORMS[form]).batch(seed).to(device, dtype))).backward()
        return {name: gradient.cpu() for name, gradient in gradients(model).items()}

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    # In float64 cuDNN sums a kernel's gradient in any order: without DDP too.
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        found, single = seen(bucket), seen(1)
    finally:
        dist.destroy_process_group()
    model = Run(FORMS[form], definition.attach).model()
    for seed in range(2):
        loss_of(model(Run(FORMS[form]).batch(seed))).backward()
    expected = gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(found[name], gradient, TOLERANCE[dtype])
        assert torch.equal(found[name], single[name])
