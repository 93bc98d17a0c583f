"""The cases of the further hunt that were right: loops, layers and tools, each in few lines; warnings are errors."""

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import isaac_newton as isaac
from test_hunted import LAMBDA, Bind, Loop, batch, close, compare, conditioner, mlp, same, sgd, title

BOTH = pytest.mark.parametrize("when", ["backward", "step"])


def deep() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 4)).double()


# ---------------------------------------------------------------------------------------------------------------------- loops


def a_group_added_later(model: nn.Module, bind: Bind) -> None:
    """The body is thawed in the middle of training."""
    model[0].requires_grad_(False)
    optimizer = sgd(model, bind)
    for i in range(4):
        if i == 2:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters())})
        optimizer.zero_grad()
        model(batch(3 + i)).square().mean().backward()
        optimizer.step()


def a_body_without_gradients(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    for i in range(4):
        optimizer.zero_grad()
        x = batch()
        with torch.set_grad_enabled(bool(i % 2)):
            hidden = model[:2](x)
        model[2](hidden.detach()).square().mean().backward()
        optimizer.step()


def an_exception_in_the_forward_pass(model: nn.Module, bind: Bind) -> None:
    """Out of memory: the batch comes again in halves."""
    optimizer, x = sgd(model, bind), batch(8)
    hook = model[2].register_forward_pre_hook(lambda *_: [][0])
    with pytest.raises(IndexError):
        model(x)
    hook.remove()
    for part in x.chunk(2):
        model(part).square().mean().backward()
    optimizer.step()


def weights_swapped_before_the_step(model: nn.Module, bind: Bind) -> None:
    """Validation with averaged weights, between backward pass and step."""
    optimizer = sgd(model, bind)
    model(batch()).square().mean().backward()
    mine = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
        model(batch())
        for p, before in zip(model.parameters(), mine, strict=True):
            p.copy_(before)
    optimizer.step()


def stages_with_detached_boundaries(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    for x in batch(8).chunk(3):
        sent = model[:2](x)
        received = sent.detach().requires_grad_()
        model[2](received).square().mean().backward()
        sent.backward(received.grad)
    optimizer.step()


def one_forward_one_backward(model: nn.Module, bind: Bind) -> None:
    optimizer, losses = sgd(model, bind), []
    for i in range(4):
        losses.append(model(batch(3 + i)).square().mean())
        if i:
            losses.pop(0).backward()
    losses.pop().backward()
    optimizer.step()


def gradients_of_inputs_first(model: nn.Module, bind: Bind) -> None:
    optimizer, x = sgd(model, bind), batch().requires_grad_()
    loss = model(x).square().mean()
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    optimizer.step()


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


def reversed_and_straight_through(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    hidden = model[:2](batch())
    quantized = hidden + (hidden.sign() - hidden).detach()
    (model[2](quantized).square().mean() + model[2](Reversed.apply(hidden)).abs().mean()).backward()
    optimizer.step()


def scaled_by_hand(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    model(batch()).square().mean().backward()
    for p in model.parameters():
        p.grad = p.grad / 2
    optimizer.step()


def recursion(model: nn.Module, bind: Bind) -> None:
    """A tree: as many calls with one vector each as it has nodes."""
    optimizer = sgd(model, bind)

    def node(depth: int) -> Tensor:
        x = batch(1)[0] if depth == 0 else F.pad(node(depth - 1) + node(depth // 2), (0, 2))
        output: Tensor = model(x)
        return output

    node(3).square().sum().backward()
    optimizer.step()


def checkpointed_in_segments(model: nn.Module, bind: Bind, reentrant: bool) -> None:
    optimizer = sgd(model, bind)
    checkpoint_sequential(model, 2, batch().requires_grad_(), use_reentrant=reentrant).square().mean().backward()
    if not reentrant:
        chosen = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)
        checkpoint(model, batch().requires_grad_(), use_reentrant=False, context_fn=chosen).square().mean().backward()
    optimizer.step()


def counted(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    with FlopCounterMode(display=False):
        model(batch()).square().mean().backward()
    optimizer.step()


LOOPS = [
    a_group_added_later,
    a_body_without_gradients,
    an_exception_in_the_forward_pass,
    weights_swapped_before_the_step,
    stages_with_detached_boundaries,
    one_forward_one_backward,
    gradients_of_inputs_first,
    reversed_and_straight_through,
    scaled_by_hand,
    recursion,
    functools.partial(checkpointed_in_segments, reentrant=True),
    functools.partial(checkpointed_in_segments, reentrant=False),
    counted,
]


@BOTH
@pytest.mark.parametrize("loop", LOOPS, ids=title)
def test_a_loop_gives_the_definition(loop: Loop, when: str) -> None:
    compare(loop, mlp(), when)


def test_two_models_of_one_optimizer() -> None:
    first, second = mlp(), nn.Sequential(nn.Linear(4, 3)).double()
    pair = nn.ModuleList([first, second])
    whole = copy.deepcopy(pair)
    optimizer = torch.optim.SGD(pair.parameters(), lr=0.1)
    for model in (first, second):
        isaac.attach(model, damping=LAMBDA, when="step").bind(optimizer)
    other = torch.optim.SGD(whole.parameters(), lr=0.1)
    isaac.attach(whole, damping=LAMBDA)
    x = batch()
    for models, one in ((pair, optimizer), (whole, other)):
        models[1](models[0](x)).square().mean().backward()
        one.step()
    same(pair, whole)


@BOTH
@pytest.mark.parametrize("way", ["threads", "fx"])
def test_passes_in_threads_and_by_a_traced_copy_count_alike(way: str, when: str) -> None:
    model, xs = mlp(), [batch(3 + i) for i in range(4)]
    twin = copy.deepcopy(model)
    handles = [isaac.attach(one, damping=LAMBDA, when=when) for one in (model, twin)]
    called = torch.fx.symbolic_trace(model) if way == "fx" else model
    threads = [threading.Thread(target=lambda x=x: called(x).square().mean().backward()) for x in xs]
    for thread in threads:
        thread.start()
        if way == "fx":
            thread.join()
    for thread, x in zip(threads, xs, strict=True):
        thread.join()
        twin(x).square().mean().backward()
    if when == "step":
        for handle in handles:
            handle.step()
    same(model, twin)


# ------------------------------------------------------------------------------------ one batch, by backward and at the step

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "linear": (lambda: nn.Linear(6, 4), (9, 6), 0),
    "sequences": (lambda: nn.Linear(6, 4), (3, 5, 6), 0),
    "groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), (3, 4, 5, 5), 0),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), (3, 4, 4, 4), 0),
    "LSTM": (lambda: nn.LSTM(5, 4, 2, bidirectional=True, proj_size=3), (4, 3, 5), 1),
    "GRU": (lambda: nn.GRU(5, 4, batch_first=True), (3, 4, 5), 0),
    "cell": (lambda: nn.LSTMCell(5, 4), (3, 5), 0),
    "attention": (lambda: nn.MultiheadAttention(8, 2), (5, 3, 8), 1),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0), (5, 3, 8), 1),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "paper": {"damping": LAMBDA},
    "automatic": {},
    "relative": {"damping": isaac.Relative(0.3)},
    "norm kept": {"damping": LAMBDA, "keep_norm": True},
    "reduce": {"damping": isaac.Relative(0.3), "sharing": "reduce", "keep_norm": True},
    "joint": {"damping": LAMBDA, "bias": "joint"},
}


def output_of(layer: nn.Module, x: Tensor) -> Tensor:
    output = layer(x, x, x) if isinstance(layer, nn.MultiheadAttention) else layer(x)
    return output if isinstance(output, Tensor) else output[0]


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("make", "shape", "samples"), LAYERS.values(), ids=LAYERS)
def test_backward_step_and_micro_batches_agree(
    make: Callable[[], nn.Module], shape: tuple[int, ...], samples: int, options: dict[str, Any]
) -> None:
    whole, x = make().double(), torch.randn(*shape, dtype=torch.float64)
    once, parts = copy.deepcopy(whole), copy.deepcopy(whole)
    isaac.attach(whole, **options)
    output_of(whole, x).square().sum().backward()
    for model, sizes in ((once, [shape[samples]]), (parts, [1, shape[samples] - 1])):
        handle = isaac.attach(model, when="step", **options)
        for part in x.split(sizes, samples):
            output_of(model, part).square().sum().backward()
        handle.step()
        same(model, whole)


# ------------------------------------------------------------------------------------------------------------------ torch.func


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_torch_func_gives_what_backward_gives(options: dict[str, Any]) -> None:
    """Of the whole batch by `grad`, and sample by sample by `vmap`."""
    model, x = mlp(), torch.rand(3, 5, 6, dtype=torch.float64) + 1
    twin, weights = copy.deepcopy(model), {name: p.detach() for name, p in model.named_parameters()}
    isaac.attach(model, **options)
    isaac.attach(twin, **options)

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        output: Tensor = functional_call(model, weights, (x,)).square().mean()
        return output

    twin(x).square().mean().backward()
    for name, found in grad(loss)(weights, x).items():
        close(found, twin.get_parameter(name).grad)
    one_by_one = vmap(grad(lambda weights, row: loss(weights, row[None])), (None, 0))(weights, x)
    for number, row in enumerate(x):
        twin.zero_grad()
        twin(row[None]).square().mean().backward()
        for name, found in one_by_one.items():
            close(found[number], twin.get_parameter(name).grad)


# --------------------------------------------------------------------------------------------------------- recurrent, attention


@BOTH
@pytest.mark.parametrize("state", ["detached", "kept", "burnt in"])
def test_a_state_carried_from_chunk_to_chunk(state: str, when: str) -> None:
    """Rows of the recurrent matrix are the outputs before; each call has its conditioner, a step has one."""
    model, x = nn.RNN(5, 4).double(), torch.randn(6, 3, 5, dtype=torch.float64)
    plains = [copy.deepcopy(model), copy.deepcopy(model)]
    handle = isaac.attach(model, damping=LAMBDA, when=when)

    def run(first: nn.Module, second: nn.Module) -> list[list[Tensor]]:
        rows, h, loss = [], x.new_zeros(1, 3, 4), x.new_zeros(())
        for part, layer in ((x[:2], first), (x[2:], second)):
            with torch.set_grad_enabled(state != "burnt in" or layer is second):
                output, after = layer(part, h)
                rows.append([part, torch.cat([h, output[:-1]]).detach()])
            h, loss = after.detach() if state == "detached" else after, loss + output.square().sum()
        loss.backward()
        return rows

    run(model, model) if state != "burnt in" else run(copy.deepcopy(plains[0]), model)
    rows = run(*plains)
    if when == "step":
        handle.step()
    used = [(p, r) for p, r in zip(plains, rows, strict=True) if p.weight_hh_l0.grad is not None]
    for number, name in enumerate(("weight_ih_l0", "weight_hh_l0")):
        parts = [(p.get_parameter(name).grad, r[number].reshape(-1, r[number].shape[-1])) for p, r in used]
        if when == "backward":
            expected = sum(g @ conditioner(r) for g, r in parts)
        else:
            expected = sum(g for g, _ in parts) @ conditioner(torch.cat([r for _, r in parts]))
        close(model.get_parameter(name).grad, expected)


class Dropped(nn.Module):
    """Weight drop, as in AWD-LSTM: the layer's recurrent weight is made anew in each pass."""

    def __init__(self, rnn: nn.RNN) -> None:
        super().__init__()
        self.rnn, self.raw = rnn, nn.Parameter(rnn.weight_hh_l0.detach())
        del rnn._parameters["weight_hh_l0"]
        self.register_buffer("kept", (torch.arange(16).reshape(4, 4) % 3 > 0).double())

    def forward(self, x: Tensor) -> Tensor:
        self.rnn.weight_hh_l0 = self.raw * self.kept
        output: Tensor = self.rnn(x)[0]
        return output


def test_a_weight_that_is_dropped_out_is_conditioned_where_it_is_used() -> None:
    model, x = Dropped(nn.RNN(5, 4).double()), torch.randn(6, 3, 5, dtype=torch.float64)
    plain = Dropped(nn.RNN(5, 4).double())
    plain.load_state_dict(model.state_dict())
    isaac.attach(model, damping=LAMBDA)
    for one in (model, plain):
        output = one(x)
        one.rnn.weight_hh_l0.retain_grad()
        output.square().sum().backward()
    before = torch.cat([output.new_zeros(1, 3, 4), output[:-1].detach()])
    close(model.raw.grad, plain.rnn.weight_hh_l0.grad @ conditioner(before) * plain.kept)


ATTENTION: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "weights in the loss": ({}, {"average_attn_weights": False}),
    "a learned key": ({"add_bias_kv": True}, {}),
    "a key of zeros": ({"add_zero_attn": True}, {"need_weights": False}),
    "a mask": ({"bias": False}, {"attn_mask": torch.ones(5, 4).triu(1).bool(), "need_weights": False}),
    "padding": ({}, {"key_padding_mask": torch.arange(4) >= torch.tensor([4, 2, 3])[:, None]}),
}


@BOTH
@pytest.mark.parametrize(("made", "called"), ATTENTION.values(), ids=ATTENTION)
def test_attention(made: dict[str, Any], called: dict[str, Any], when: str) -> None:
    model: Any = nn.MultiheadAttention(8, 2, batch_first=True, **made).double()
    q, k, v = (torch.randn(3, length, 8, dtype=torch.float64) for length in (5, 4, 4))
    plain, handle = copy.deepcopy(model), isaac.attach(model, damping=LAMBDA, when=when)
    for one in (model, plain):
        output, weights = one(query=q, key=k, value=v, **called)
        (output.square().sum() + (0 if weights is None else weights.square().sum())).backward()
    if when == "step":
        handle.step()
    parts = zip(plain.in_proj_weight.grad.chunk(3), (q, k, v), strict=True)
    close(model.in_proj_weight.grad, torch.cat([g @ conditioner(r) for g, r in parts]))
