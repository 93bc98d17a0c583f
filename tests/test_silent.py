"""What users do with a training loop: each pattern gives the gradient of the definition, a warning or an error.

A pattern is a function of a `Side`. It runs on an attached model and on a plain twin, whose layers note their inputs and output
gradients; from these the definition says what the attached model must have. Warnings are errors here, so that a pattern that is
right does not warn either.
"""

import contextlib
import copy
import functools
import json
import os
import pickle
import subprocess
import sys
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import isaac_newton as isaac
from definition import conditioner
from reference import TOLERANCE, assert_close, relative_error

DAMPING = 0.1
_random = torch.Generator().manual_seed(0)
X, Y = torch.randn(9, 6, generator=_random, dtype=torch.float64), torch.randint(4, (9,), generator=_random)
X2, Y2 = 3 * torch.randn(5, 6, generator=_random, dtype=torch.float64), torch.randint(4, (5,), generator=_random)


def mlp(*widths: int) -> nn.Sequential:
    torch.manual_seed(3)
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double()


def loss_of(model: nn.Module, x: Tensor = X, y: Tensor = Y, **options: Any) -> Tensor:
    return F.cross_entropy(model(x), y, **options)


class Side:
    """A model with its optimizer, which leaves the weights as they are; attached, or the plain twin."""

    def __init__(self, model: nn.Module, when: str | None, **options: Any) -> None:
        self.model, self.when, self.uses, self.handle = model, when, [], None
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        if when is None:
            for layer in model.modules():
                if isinstance(layer, nn.Linear):
                    layer.register_forward_hook(self._note)
        else:
            self.handle = isaac.attach(model, **{"damping": DAMPING, "when": when, **options})
            if when == "step":
                self.handle.bind(self.optimizer)

    def _note(self, layer: nn.Linear, args: tuple[Tensor], output: Tensor) -> None:
        if output.requires_grad:
            use: list[Any] = [layer.weight, args[0].detach().clone(), None]
            self.uses.append(use)
            output.register_hook(lambda g: use.__setitem__(2, g if use[2] is None else use[2] + g))

    def forget(self) -> None:
        """What was noted so far is not part of the gradient that is compared."""
        self.uses.clear()

    def expected(self, when: str) -> dict[str, Tensor]:
        """ζ* of each weight: summed over its uses, or with one conditioner of the rows of all of them."""
        result = {}
        for name, weight in self.model.named_parameters():
            used = [
                (a.reshape(-1, a.shape[-1]), g.reshape(-1, g.shape[-1]))
                for w, a, g in self.uses
                if w is weight and g is not None
            ]
            if not used or not weight.requires_grad:
                continue
            if when == "step":
                used = [tuple(torch.cat(column) for column in zip(*used, strict=True))]
            parts = [g.T @ a @ conditioner(a, DAMPING) if len(a) else torch.zeros_like(weight) for a, g in used]
            result[name] = torch.stack(parts).sum(0)
        return result


Pattern = Callable[[Side], Any]


def assert_right(pattern: Pattern, when: str, make: Callable[[], nn.Module] = lambda: mlp(6, 8, 4), **options: Any) -> Side:
    side, twin = Side(make(), when, **options), Side(make(), None)
    pattern(side)
    pattern(twin)
    parameters, expected = dict(side.model.named_parameters()), twin.expected(when)
    assert expected
    for name, gradient in expected.items():
        assert_close(parameters[name].grad, gradient)
    return side


# ------------------------------------------------------------------------------------------------------------------ right today

RIGHT: dict[str, Pattern] = {}
BACKWARD_ONLY = {"first order maml"}  # it has the definition of "backward" written out; with "step" see below


def right(function: Pattern) -> Pattern:
    RIGHT[function.__name__.replace("_", " ")] = function
    return function


def backward(*inputs: Any, **options: Any) -> Pattern:
    """One pass over a batch."""

    def pattern(s: Side) -> None:
        loss_of(s.model, *inputs, **options).backward()
        s.optimizer.step()

    return pattern


RIGHT |= {
    "the plain loop": backward(),
    "a sum": backward(reduction="sum"),
    "one sample": backward(X[:1], Y[:1]),
    "no sample": backward(X[:0], Y[:0], reduction="sum"),
    "a vector": backward(X[0], Y[0]),
    "an expanded input": backward(X[:1].expand(7, 6), Y[:7]),
    "a transposed input": backward(X.t().contiguous().t(), Y),
    "class weights and ignored labels": backward(X, Y.masked_fill(Y == 1, -100), weight=torch.arange(1.0, 5.0).double()),
    "large inputs": backward(1e6 * X, Y),
    "small inputs": backward(1e-20 * X, Y),
}


@right
def strided_sequences(s: Side) -> None:
    x = torch.randn(4, 3, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)[..., ::2].transpose(0, 1)
    s.model(x).square().mean().backward()
    s.optimizer.step()


@right
def two_views(s: Side) -> None:
    (s.model(X) * s.model(X + 0.1)).sum(1).mean().backward()
    s.optimizer.step()


@right
def uneven_micro_batches(s: Side) -> None:
    for x, y in ((X, Y), (X2, Y2)):
        (loss_of(s.model, x, y, reduction="sum") / 14).backward()
    s.optimizer.step()


@right
def scaled_losses(s: Side) -> None:
    for scale in (1e-8, 1e8):
        s.optimizer.zero_grad()
        s.forget()
        (scale * loss_of(s.model)).backward()
        s.optimizer.step()


@right
def a_skipped_batch(s: Side) -> None:
    """`continue` after the backward pass, zero_grad at the top."""
    for number, (x, y) in enumerate(((X2, Y2), (X, Y))):
        s.optimizer.zero_grad()
        s.forget()
        loss_of(s.model, x, y).backward()
        if number:
            s.optimizer.step()


@right
def zero_grad_to_zeros(s: Side) -> None:
    for x, y in ((X2, Y2), (X, Y)):
        s.optimizer.zero_grad(set_to_none=False)
        s.forget()
        loss_of(s.model, x, y).backward()
        s.optimizer.step()


@right
def two_losses_of_one_output(s: Side) -> None:
    output = s.model(X)
    F.cross_entropy(output, Y).backward(retain_graph=True)
    output.square().mean().backward()
    s.optimizer.step()


@right
def a_probe_without_gradients(s: Side) -> None:
    with torch.inference_mode():
        s.model(X2)
    with torch.no_grad():
        s.model(X2)
    backward()(s)


@right
def anomaly_mode(s: Side) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.set_detect_anomaly(True):
            backward()(s)


@right
def saved_tensors_on_the_host(s: Side) -> None:
    with torch.autograd.graph.save_on_cpu():
        loss = loss_of(s.model)
    loss.backward()
    s.optimizer.step()


@right
def deep_q_learning(s: Side) -> None:
    target = copy.deepcopy(s.model)
    with torch.no_grad():
        best = target(X).max(1).values
    F.smooth_l1_loss(s.model(X).gather(1, Y[:, None])[:, 0], best).backward()
    s.optimizer.step()


@right
def proximal_policy_optimization(s: Side) -> None:
    with torch.no_grad():
        old = F.log_softmax(s.model(X) + 0.1 * X[:, :4], -1)
    for index in (slice(0, 4), slice(4, 9)):
        s.optimizer.zero_grad()
        s.forget()
        log = F.log_softmax(s.model(X[index]), -1)
        ratio = (log - old[index]).gather(1, Y[index, None]).exp()
        (-torch.min(ratio, ratio.clamp(0.8, 1.2)).mean() + 0.01 * (log.exp() * log).sum(1).mean()).backward()
        s.optimizer.step()


@right
def reinforce(s: Side) -> None:
    steps = [F.log_softmax(s.model(x[None]), -1)[0, y] * r for r, (x, y) in enumerate(zip(X, Y, strict=True))]
    (-torch.stack(steps).mean()).backward()
    s.optimizer.step()


@right
def cached_representations(s: Side) -> None:
    """GradCache: gradients of the representations first, then a backward pass for each part of the batch."""
    with torch.no_grad():
        found = torch.cat([s.model(part) for part in X.split(3)])
    F.cross_entropy(found.requires_grad_() @ found.T, torch.arange(9)).backward()
    assert found.grad is not None
    for part, gradient in zip(X.split(3), found.grad.split(3), strict=True):
        s.model(part).backward(gradient)
    s.optimizer.step()


@right
def a_gradient_scaler(s: Side) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of(s.model)).backward()
    for use in s.uses:
        use[2] = use[2] / 1024.0
    scaler.unscale_(s.optimizer)
    nn.utils.clip_grad_norm_(s.model.parameters(), 1e9)
    scaler.step(s.optimizer)
    scaler.update()


@right
def closures(s: Side) -> None:
    def closure() -> Tensor:
        s.optimizer.zero_grad()
        s.forget()
        loss = loss_of(s.model)
        loss.backward()
        return loss

    s.optimizer.step(closure)
    s.optimizer.step(closure=closure)


@right
def an_optimizer_that_was_loaded(s: Side) -> None:
    s.optimizer.load_state_dict(copy.deepcopy(s.optimizer.state_dict()))
    backward()(s)


@right
def forward_and_backward_hooks(s: Side) -> None:
    s.model[2].register_full_backward_hook(lambda module, inputs, outputs: None)
    s.model[0].register_forward_hook(lambda module, args, output: output * 1.0)
    backward()(s)


@right
def only_some_weights(s: Side) -> None:
    loss_of(s.model).backward(inputs=list(s.model.parameters()))
    s.optimizer.step()


@right
def weights_loaded_in_place(s: Side) -> None:
    s.model.load_state_dict({name: value / 2 for name, value in s.model.state_dict().items()})
    a_skipped_batch(s)


@right
def converted_and_back(s: Side) -> None:
    s.model.half().float().double()
    backward()(s)


@right
def a_buffer_that_is_filled_again(s: Side) -> None:
    buffer = X2[:4].clone()
    s.model(buffer)
    buffer.copy_(X[:4])
    loss_of(s.model, buffer, Y[:4]).backward()
    s.optimizer.step()


@right
def first_order_maml(s: Side) -> None:
    """Conditioned in the inner step too, so that the twin takes the gradients that the definition gives."""
    parameters = dict(s.model.named_parameters())
    found = torch.autograd.grad(loss_of(s.model, X2, Y2), list(parameters.values()))
    named = dict(zip(parameters, found, strict=True)) | s.expected("backward")
    s.forget()
    fast = {name: (p.detach() - 0.5 * named[name]).requires_grad_() for name, p in parameters.items()}
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(fast[name])
    backward()(s)


@pytest.mark.parametrize("when", ["backward", "step"])
@pytest.mark.parametrize("name", RIGHT)
def test_a_loop_gives_the_definition(name: str, when: str) -> None:
    if when == "step" and name in BACKWARD_ONLY:
        when = "backward"
    assert_right(RIGHT[name], when)


class Branches(nn.Module):
    """Queries, keys and values of one tensor, a recurrent cell, and a low-rank branch beside a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.q, self.k, self.v = (nn.Linear(6, 6) for _ in range(3))
        self.cell, self.frozen = nn.Linear(12, 6), nn.Linear(6, 4)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 4, bias=False)
        self.frozen.requires_grad_(False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))
        state = torch.zeros_like(x)
        for _ in range(3):
            state = torch.tanh(self.cell(torch.cat([x, state], -1)))
        return self.frozen(state) + self.up(self.down(state))


@pytest.mark.parametrize("when", ["backward", "step"])
def test_shared_inputs_recurrence_and_low_rank_branches(when: str) -> None:
    assert_right(backward(), when, Branches)


def test_gradients_in_a_batch_are_those_one_by_one() -> None:
    model = mlp(6, 8, 4)
    isaac.attach(model, DAMPING)
    weights, outputs = [model[0].weight, model[2].weight], model(X).sum(0)
    together = torch.autograd.grad(outputs, weights, torch.eye(4).double(), is_grads_batched=True, retain_graph=True)
    apart = [torch.autograd.grad(output, weights, retain_graph=True) for output in outputs]
    jacobian = jacrev(lambda p: functional_call(model, p, (X,)).sum(0))({n: p.detach() for n, p in model.named_parameters()})
    for number, (name, many) in enumerate(zip(("0.weight", "2.weight"), together, strict=True)):
        wanted = torch.stack([one[number] for one in apart])
        assert_close(many, wanted)
        assert_close(jacobian[name], wanted)


def test_handles_dampings_and_graphs_go_their_own_ways() -> None:
    """Two handles; a graph that is alive while the damping changes; a copy and a loaded copy with a damping of their own."""
    model, twin = mlp(6, 8, 4), Side(mlp(6, 8, 4), None)
    first, second = isaac.attach(model, DAMPING, layers="0"), isaac.attach(model, 5.0, layers="2")
    outstanding = loss_of(model)
    loss_of(model, X2, Y2).backward()
    model.zero_grad()
    second.damping = DAMPING
    outstanding.backward()
    loss_of(twin.model).backward()
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.zero_grad()
        loss_of(other).backward()
        for name, gradient in twin.expected("backward").items():
            assert_close(other.get_parameter(name).grad, gradient)
    first.detach()
    model.zero_grad()
    loss_of(model).backward()
    assert_close(model[0].weight.grad, twin.model[0].weight.grad)
    assert_close(model[2].weight.grad, twin.expected("backward")["2.weight"])


def one_hot(ids: Tensor, words: int) -> Tensor:
    return F.one_hot(ids.reshape(-1), words).double()


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("when", ["backward", "step"])
def test_an_embedding_is_divided_by_how_often_its_words_came(when: str, sparse: bool) -> None:
    torch.manual_seed(0)
    layer, ids = nn.Embedding(10, 5, sparse=sparse).double(), torch.randint(10, (4, 7))
    handle = isaac.attach(layer, DAMPING, when=when)
    output = layer(ids)
    output *= 2.0  # in place, as scaled embeddings have it
    output.square().sum().backward()
    handle.step() if when == "step" else None
    plain = one_hot(ids, 10).T @ (8 * layer(ids).detach().reshape(-1, 5))
    gradient = layer.weight.grad
    assert gradient is not None
    assert_close(gradient.to_dense() if sparse else gradient, conditioner(one_hot(ids, 10), DAMPING) @ plain)


@pytest.mark.parametrize("options", [{}, {"when": "step"}, {"sharing": "reduce"}, {"bias": "joint"}], ids=str)
def test_all_zero_inputs_under_a_relative_damping_stay_finite(options: dict[str, Any]) -> None:
    side = Side(mlp(6, 8, 4), **{"when": "backward", "damping": isaac.Relative(0.1)} | options)
    backward(torch.zeros(9, 6).double(), Y)(side)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in side.model.parameters())


def test_an_input_overwritten_before_the_backward_pass_is_an_error() -> None:
    model, buffer = mlp(6, 8, 4), X.clone()
    isaac.attach(model, DAMPING)
    loss = loss_of(model, buffer)
    buffer.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---------------------------------------------------------------------------------------------------------- once silently wrong

BOTH = pytest.mark.parametrize("when", ["backward", "step"])


def test_a_model_in_eval_mode_is_conditioned() -> None:
    assert_right(lambda s: [s.model.eval(), backward()(s)], "backward")


# Rows count where a gradient is accumulated.


def skip_by(clear: Callable[[Side], Any], before: Callable[[Side], Any] = lambda s: None) -> Pattern:
    """A bad batch whose gradient is cleared by hand, then a good one."""

    def pattern(s: Side) -> None:
        before(s)
        loss_of(s.model, X2, Y2).backward()
        clear(s)
        s.forget()
        backward()(s)

    return pattern


def replaced(s: Side) -> None:
    s.model.load_state_dict({name: value.clone() for name, value in s.model.state_dict().items()}, assign=True)
    new_optimizer(s)


def emptied(s: Side) -> None:
    state = copy.deepcopy(s.model.state_dict())
    s.model.to("meta").to_empty(device="cpu")
    s.model.load_state_dict(state)
    new_optimizer(s)


def new_optimizer(s: Side) -> None:
    s.optimizer = torch.optim.SGD(s.model.parameters(), lr=0.0)
    if s.handle is not None and s.when == "step":
        s.handle.bind(s.optimizer)


def for_each(change: Callable[[Tensor], Any]) -> Callable[[Side], Any]:
    return lambda s: [change(p) for p in s.model.parameters()]


def cleared(s: Side) -> None:
    s.optimizer.zero_grad()


SKIPPED = {
    "load_state_dict(assign=True)": skip_by(cleared, replaced),
    "to_empty": skip_by(cleared, emptied),
    "p.grad.data.zero_()": skip_by(for_each(lambda p: p.grad.data.zero_())),
    "p.grad = zeros": skip_by(for_each(lambda p: setattr(p, "grad", torch.zeros_like(p)))),
}


@BOTH
@pytest.mark.parametrize("name", SKIPPED)
def test_a_skipped_batch_leaves_no_trace(name: str, when: str) -> None:
    assert_right(SKIPPED[name], when)


@BOTH
def test_a_probe_between_backward_and_step_adds_nothing(when: str) -> None:
    def pattern(s: Side) -> None:
        loss_of(s.model).backward()
        mine = list(s.uses)
        torch.autograd.grad(loss_of(s.model, X2, Y2), list(s.model.parameters()))
        s.uses[:] = mine
        s.optimizer.step()

    assert_right(pattern, when)


@BOTH
def test_first_order_maml_counts_the_query_batches_only(when: str) -> None:
    def pattern(s: Side) -> None:
        for support, query in (((X2, Y2), (X, Y)), ((2 * X2, Y2), (X / 2, Y))):
            parameters, noted = dict(s.model.named_parameters()), list(s.uses)
            found = torch.autograd.grad(loss_of(s.model, *support), list(parameters.values()))
            s.uses[:] = noted
            # Inner steps are plain under "step". One on the biases leaves the weights those of the twin.
            fast = {n: p - 0.5 * g if p.dim() == 1 else p for (n, p), g in zip(parameters.items(), found, strict=True)}
            F.cross_entropy(functional_call(s.model, fast, (query[0],)), query[1]).backward()
        s.optimizer.step()

    assert_right(pattern, when)


@BOTH
def test_tied_layers_have_one_conditioner_under_step(when: str) -> None:
    def tied() -> nn.Module:
        model = mlp(6, 6, 6)
        model[2].weight = model[0].weight
        return model

    assert_right(backward(), when, tied)


class Language(nn.Module):
    """As GPT-2: a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding, self.middle, self.head = nn.Embedding(12, 6), nn.Linear(6, 6), nn.Linear(6, 12, bias=False)
        self.head.weight = self.embedding.weight
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        output: Tensor = self.head(torch.tanh(self.middle(self.embedding(ids))))
        return output


class Masked(Language):
    """As BERT's masked language model: the head has a bias, and a layer of its own before it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 12).double()
        self.head.weight = self.embedding.weight


class Translation(Language):
    """As T5: encoder and decoder look up one embedding, and the head scales what it gets."""

    def forward(self, ids: Tensor) -> Tensor:
        encoded = torch.tanh(self.middle(self.embedding(ids))).mean(1, keepdim=True)
        output: Tensor = self.head(6**-0.5 * (encoded + self.embedding(ids.flip(1))))
        return output


@pytest.mark.parametrize("kind", [Language, Masked, Translation])
def test_a_head_tied_to_an_embedding_stays_plain_under_step(kind: type[Language]) -> None:
    ids, plain = torch.arange(12).reshape(3, 4), kind()

    def pattern(s: Side) -> None:
        F.cross_entropy(s.model(ids).flatten(0, 1), ids.flatten()).backward()
        s.optimizer.step()

    side, twin = Side(kind(), "step"), Side(plain, None)
    pattern(side)
    pattern(twin)
    assert side.handle is not None
    assert all("tied" in side.handle.skipped[name] for name in ("embedding", "head"))
    assert_close(side.model.head.weight.grad, plain.head.weight.grad)
    assert_close(side.model.middle.weight.grad, twin.expected("step")["middle.weight"])


def test_a_layer_tied_to_one_that_is_left_out_stays_plain_under_step() -> None:
    model = mlp(6, 6, 6, 6)
    model[4].weight = model[0].weight
    handle = isaac.attach(model, DAMPING, when="step", exclude="4")
    assert "tied to that of '4'" in handle.skipped["0"]
    assert set(handle.conditioned) == {"2"}


def test_layers_that_are_tied_after_attach_have_one_conditioner_under_step() -> None:
    def pattern(s: Side) -> None:
        s.model[2].weight = s.model[0].weight
        backward()(s)

    assert_right(pattern, "step", lambda: mlp(6, 6, 6))


def test_two_embeddings_of_one_table_have_one_conditioner_under_step() -> None:
    torch.manual_seed(0)
    model, ids = nn.ModuleList([nn.Embedding(10, 5), nn.Embedding(10, 5)]).double(), torch.randint(10, (2, 4, 7))
    model[1].weight = model[0].weight
    handle = isaac.attach(model, DAMPING, when="step")
    (2 * model[0](ids[0]) + 3 * model[1](ids[1])).sum().backward()
    handle.step()
    words = one_hot(ids, 10)
    plain = words.T @ torch.tensor([2.0, 3.0]).double().repeat_interleave(28)[:, None].expand(56, 5)
    assert_close(model[0].weight.grad, conditioner(words, DAMPING) @ plain)


def test_an_attention_with_two_layouts_in_one_step_stays_plain_and_says_so() -> None:
    """Once for a sequence itself, once for two: the rows of queries, keys and values cannot be told apart."""
    layer, x = nn.MultiheadAttention(6, 2, batch_first=True).double(), torch.randn(3, 4, 6).double()
    handle = isaac.attach(layer, DAMPING, when="step")
    layer(x, x, x)[0].sum().backward()
    layer(x, x.flip(0), x.flip(0))[0].square().sum().backward()
    with pytest.warns(RuntimeWarning, match="cannot be joined"):
        handle.step()


def summed_from_autograd_grad(s: Side) -> None:
    parameters = list(s.model.parameters())
    found = [torch.autograd.grad(loss_of(s.model, *batch), parameters) for batch in ((X, Y), (X2, Y2))]
    for p, first, second in zip(parameters, *found, strict=True):
        p.grad = first + second


def summed_from_backward(s: Side) -> None:
    parameters, found = list(s.model.parameters()), []
    for batch in ((X, Y), (X2, Y2)):
        s.optimizer.zero_grad()
        loss_of(s.model, *batch).backward()
        found.append([p.grad.clone() for p in parameters if p.grad is not None])
    for p, first, second in zip(parameters, *found, strict=True):
        p.grad = first + second


def projected(s: Side) -> None:
    """PCGrad, written to `.grad.data`; the tasks agree here, so that nothing is projected away."""
    parameters, found = list(s.model.parameters()), []
    for batch in ((X, Y), (X2, Y2)):
        s.optimizer.zero_grad()
        loss_of(s.model, *batch).backward()
        found.append(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]))
    sizes = [p.numel() for p in parameters]
    for p, part in zip(parameters, (found[0] + found[1]).split(sizes), strict=True):
        assert p.grad is not None
        p.grad.data = part.view_as(p)


def moved_to_a_buffer(s: Side) -> None:
    parameters = list(s.model.parameters())
    buffer = [torch.zeros_like(p) for p in parameters]
    for batch in ((X, Y), (X2, Y2)):
        loss_of(s.model, *batch).backward()
        for p, sum_of_all in zip(parameters, buffer, strict=True):
            sum_of_all += p.grad
            p.grad = None
    for p, sum_of_all in zip(parameters, buffer, strict=True):
        p.grad = sum_of_all


SUMMED = [summed_from_autograd_grad, summed_from_backward, projected, moved_to_a_buffer]


@pytest.mark.parametrize("pattern", SUMMED)
def test_gradients_summed_by_hand_raise_or_warn(pattern: Pattern) -> None:
    side = Side(mlp(6, 8, 4), "step")
    with pytest.raises((RuntimeError, UserWarning, RuntimeWarning), match="gathering"):
        [pattern(side), side.optimizer.step()]


@pytest.mark.parametrize("pattern", SUMMED)
def test_gradients_summed_by_hand_are_right_while_gathering(pattern: Pattern) -> None:
    def gathering(s: Side) -> None:
        with contextlib.nullcontext() if s.handle is None else s.handle.gathering():
            pattern(s)
        s.optimizer.step()

    assert_right(gathering, "step")


@pytest.mark.parametrize("options", [{"decay": 0.9}, {"refresh": 5}], ids=str)
def test_a_gradient_is_conditioned_once(options: dict[str, Any]) -> None:
    side = Side(mlp(6, 8, 4), "step", **options)
    backward()(side)
    once = [p.grad.clone() for p in side.model.parameters() if p.grad is not None]
    side.optimizer.step()
    for p, gradient in zip(side.model.parameters(), once, strict=True):
        assert_close(p.grad, gradient)


def test_gradients_of_another_model_stay_plain_and_say_so() -> None:
    """As in A3C: workers compute, and the shared model steps."""
    side, worker = Side(mlp(6, 8, 4), "step"), mlp(6, 8, 4)
    loss_of(worker).backward()
    for p, other in zip(side.model.parameters(), worker.parameters(), strict=True):
        p.grad = other.grad
    with pytest.warns(RuntimeWarning, match="stays plain"):
        side.optimizer.step()
    assert_close(side.model[0].weight.grad, worker[0].weight.grad, 0)


def halved(s: Side) -> None:
    """A gradient that is replaced by what was made of it."""
    (2 * loss_of(s.model)).backward()
    for p in s.model.parameters():
        p.grad = p.grad / 2
    for use in s.uses:
        use[2] = use[2] / 2
    s.optimizer.step()


def stepped_in_the_backward_pass(s: Side) -> None:
    """One optimizer for each parameter, which steps as soon as that has its gradient."""
    kept = {}
    if s.handle is not None:
        s.handle.detach()
    optimizers = {p: torch.optim.SGD([p], lr=0.0) for p in s.model.parameters()}

    def step(p: Tensor) -> None:
        optimizers[p].step()
        kept[p], p.grad = p.grad, None

    hooks = [p.register_post_accumulate_grad_hook(step) for p in optimizers]
    if s.handle is not None:
        s.handle = isaac.attach(s.model, DAMPING, when="step")
        for optimizer in optimizers.values():
            s.handle.bind(optimizer)
    for x, y in ((X2, Y2), (X, Y)):
        s.forget()
        loss_of(s.model, x, y).backward()
    for p, hook in zip(optimizers, hooks, strict=True):
        hook.remove()
        p.grad = kept[p]


def skipped_by_a_scaler(s: Side) -> None:
    """The first batches overflow."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for factor in (torch.inf, torch.inf, torch.inf, 1.0):
        s.optimizer.zero_grad()
        s.forget()
        scaler.scale(factor * loss_of(s.model, X2 if factor > 1 else X, Y2 if factor > 1 else Y)).backward()
        for use in s.uses:
            use[2] = use[2] / scaler.get_scale()
        scaler.step(s.optimizer)
        scaler.update()


def functional_maml(s: Side) -> None:
    """The inner weights are leaves, whose gradients are taken to the outer ones by hand: the support batch does not count."""
    fast = {name: p.detach().clone().requires_grad_() for name, p in s.model.named_parameters()}
    with contextlib.nullcontext() if s.handle is None else s.handle.plain():
        F.cross_entropy(functional_call(s.model, fast, (X2,)), Y2).backward()
    s.forget()
    backward()(s)


STEPPED = {
    f.__name__.replace("_", " "): f for f in (halved, stepped_in_the_backward_pass, skipped_by_a_scaler, functional_maml)
}


@pytest.mark.parametrize("name", STEPPED)
def test_more_loops_give_the_definition_under_step(name: str) -> None:
    assert_right(STEPPED[name], "step")


def test_what_else_enters_a_gradient_is_multiplied_under_step_and_plain_otherwise() -> None:
    """A penalty on the weight, and a head that multiplies by the table of an embedding: the page says so."""
    for when in ("backward", "step"):
        side, twin = Side(mlp(6, 4), when), Side(mlp(6, 4), None)
        for s in (side, twin):
            (loss_of(s.model) + s.model[0].weight.square().sum()).backward()
            s.optimizer.step()
        penalty = 2 * twin.model[0].weight.detach()
        factor = conditioner(X, DAMPING) if when == "step" else torch.eye(6).double()
        assert_close(side.model[0].weight.grad, twin.expected(when)["0.weight"] + penalty @ factor)


def test_a_penalty_outlives_the_removal_of_rounding() -> None:
    """Rows that are few and large: what lies outside of them is the penalty's, and not rounding."""
    torch.manual_seed(0)
    layer, x, g = nn.Linear(300, 8, bias=False), 100 + 50 * torch.randn(20, 300), torch.randn(20, 8)
    handle = isaac.attach(layer, 0.1, when="step")
    ((layer(x) * g).sum() + 1e3 * layer.weight.square().sum()).backward()
    plain = g.double().T @ x.double() + 2e3 * layer.weight.detach().double()
    handle.step()
    assert relative_error(layer.weight.grad, plain @ conditioner(x.double(), 0.1)) < 1e-3


@pytest.mark.parametrize("loss", [{}, {"decay": 0.5}], ids=str)
def test_rows_that_are_dropped_on_the_device_leave_no_trace(loss: dict[str, Any]) -> None:
    """A GPU is not asked whether a gradient was cleared: it multiplies by zero."""
    side, twin = Side(mlp(6, 8, 4), "step", **loss), Side(mlp(6, 8, 4), "step", **loss)
    for s in (side, twin):
        for number, batch in enumerate(((X2, Y2), (X, Y))):
            if number == 1:
                for layer in (s.model[0], s.model[2]):
                    (gathering,) = layer.forward.gatherings.values()
                    for moment in gathering.moments.values():
                        moment.keep_if(torch.tensor(False)) if s is side else moment.clear()
                s.optimizer.zero_grad(set_to_none=False)
            loss_of(s.model, *batch).backward()
        for layer in (s.model[0], s.model[2]):
            (gathering,) = layer.forward.gatherings.values()
            assert gathering.grown
        s.optimizer.step()
    for p, other in zip(side.model.parameters(), twin.model.parameters(), strict=True):
        assert_close(p.grad, other.grad)


# `bind` cannot be missed.


class SAM(torch.optim.Optimizer):
    """Two calls for each step; the hooks of `step` never run."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(list(parameters), {"lr": 0.0})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.0)

    def first_step(self) -> None:
        self.zero_grad()

    def second_step(self) -> None:
        self.base_optimizer.step()


def lookahead_around(base: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Without the constructor of torch's, so that its hooks run from the first zero_grad on; a new class knows of no other."""

    class Lookahead(torch.optim.Optimizer):
        def __init__(self) -> None:
            self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
            self._base_optimizer, self.param_groups, self.defaults = base, base.param_groups, base.defaults
            self.state = defaultdict(dict)

        def step(self, closure: Any = None) -> Any:
            return self._base_optimizer.step(closure)

    return Lookahead()


def sharpness_aware(s: Side, optimizer: SAM) -> None:
    loss_of(s.model, X2, Y2).backward()
    optimizer.first_step()
    s.forget()
    loss_of(s.model).backward()
    optimizer.second_step()


def bound(s: Side, optimizer: Any, to: Any) -> Any:
    """The side's handle bound to this optimizer, where it has one."""
    if s.handle is not None:
        s.handle.bind(to)
    return optimizer


def assert_right_or_loud(pattern: Pattern) -> None:
    """The gradient of the definition, or a message about `bind`."""

    def loose(s: Side) -> None:
        if s.handle is not None:
            s.handle.detach()
            s.handle = isaac.attach(s.model, DAMPING, when="step")
        pattern(s)

    try:
        assert_right(loose, "step")
    except (TypeError, ValueError, RuntimeError, UserWarning, RuntimeWarning) as error:
        message = str(error)
    else:
        return
    assert "bind" in message or "hook" in message


def sam(s: Side, base: bool) -> None:
    optimizer = SAM(s.model.parameters())
    bound(s, optimizer, optimizer.base_optimizer if base else optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        sharpness_aware(s, optimizer)


def lookahead(s: Side, zero_grad_first: bool) -> None:
    optimizer = lookahead_around(torch.optim.SGD(s.model.parameters(), lr=0.0))
    bound(s, optimizer, optimizer)
    if zero_grad_first:
        optimizer.zero_grad()
    loss_of(s.model).backward()
    optimizer.step()


def post_local(s: Side) -> None:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    averager = PeriodicModelAverager.__new__(PeriodicModelAverager)  # it asks for a process group, and is not used here
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(s.model.parameters(), lr=0.0), averager)
    bound(s, optimizer, optimizer)
    loss_of(s.model).backward()
    optimizer.optim.step()


BOUND = {
    "SAM, its base": functools.partial(sam, base=True),
    "SAM": functools.partial(sam, base=False),
    "Lookahead, zero_grad first": functools.partial(lookahead, zero_grad_first=True),
    "Lookahead": functools.partial(lookahead, zero_grad_first=False),
    "PostLocalSGDOptimizer": post_local,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
@pytest.mark.parametrize("pattern", BOUND.values(), ids=BOUND)
def test_an_optimizer_around_another_is_followed_or_refused(pattern: Pattern) -> None:
    assert_right_or_loud(pattern)


def test_an_optimizer_that_was_not_bound_is_noticed() -> None:
    """A new one after unfreezing, while the handle knows the old one."""
    model = mlp(6, 8, 4)
    old, new = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    isaac.attach(model, DAMPING, when="step").bind(old)

    def train(optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()

    train(old, 3)
    with pytest.warns(RuntimeWarning, match="also for a new one"):
        train(new, 3)


def test_an_optimizer_whose_hooks_never_run_is_refused() -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            self.param_groups, self.state, self.defaults = [{"params": list(parameters)}], defaultdict(dict), {}
            self._optimizer_step_pre_hooks = OrderedDict()

        def step(self, closure: Any = None) -> None:
            pass

    model = mlp(6, 8, 4)
    handle = isaac.attach(model, DAMPING, when="step")
    refused(lambda: handle.bind(Own(model.parameters())), "step hooks of Own never run")


def closure_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    return closure


@pytest.mark.filterwarnings("ignore")
def test_lbfgs_counts_its_steps() -> None:
    model = mlp(6, 8, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5)
    handle = isaac.attach(model, DAMPING, when="step").bind(optimizer)
    for _ in range(2):
        optimizer.step(closure_of(model, optimizer))
    assert handle.steps == 2


def test_lbfgs_is_warned_about() -> None:
    model = mlp(6, 8, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")
    with pytest.warns((UserWarning, RuntimeWarning), match="L-?BFGS"):
        isaac.attach(model, DAMPING, when="step").bind(optimizer)


def test_several_optimizers_count_every_step_once() -> None:
    model = mlp(6, 8, 4)
    rare, often = (torch.optim.SGD(model[n].parameters(), lr=0.0) for n in (0, 2))
    handle = isaac.attach(model, DAMPING, when="step").bind(rare).bind(often)
    for number in range(6):
        loss_of(model).backward()
        often.step()
        if number % 3 == 2:
            rare.step()
        model.zero_grad()
    assert handle.steps == 6


# Other gradients stay torch's.


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("way", ["retain_grad", "autograd.grad"])
def test_the_output_gradient_of_an_embedding_is_torchs(kind: Any, way: str) -> None:
    layer, ids = kind(10, 5).double(), torch.arange(28).reshape(4, 7) % 9

    def gradient() -> Tensor:
        output = layer(ids)
        if way == "autograd.grad":
            return torch.autograd.grad(output.square().sum(), output)[0]
        output.retain_grad()
        output.square().sum().backward()
        return output.grad

    plain = gradient()
    isaac.attach(layer, DAMPING)
    assert_close(gradient(), plain)


def test_the_gradient_of_an_input_moves_no_schedule() -> None:
    asked: list[int] = []
    model, x = mlp(6, 8, 4), X.clone().requires_grad_()
    handle = isaac.attach(model, damping=lambda step: asked.append(step) or DAMPING)
    for _ in range(3):
        torch.autograd.grad(loss_of(model, x), x)
    loss_of(model).backward()
    assert handle.backward_passes == 1
    assert set(asked) == {0}


# Precision.


BITS = torch.randint(256, (64, 784), generator=_random)
#: What 64 pictures can be to a layer whose gradient is a difference, and which of its rows feed the conditioner.
PIXELS: dict[str, tuple[tuple[int, ...], dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "rows": ((64, 784), {}, lambda x: x),
    "step": ((64, 784), {"when": "step"}, lambda x: x),
    "max_rows": ((64, 784), {"max_rows": 1000}, lambda x: x),
    "joint": ((64, 784), {"bias": "joint"}, lambda x: torch.cat([x, torch.ones(64, 1).double()], 1)),
    "mask": ((8, 8, 784), {"mask": torch.ones(8, 8)}, lambda x: x),
    "half a mask": (
        (8, 8, 784),
        {"mask": torch.arange(8).expand(8, 8) < 4},
        lambda x: x.reshape(8, 8, 784)[:, :4].flatten(0, 1),
    ),
    "reduce": ((16, 4, 784), {"sharing": "reduce"}, lambda x: x.reshape(16, 4, 784).mean(1)),
    "reduce, one position": ((64, 1, 784), {"sharing": "reduce"}, lambda x: x),
}


@pytest.mark.parametrize("damping", [1.0, 0.1, 1e-3])
@pytest.mark.parametrize("form", PIXELS)
def test_pixels_of_0_to_255_are_accurate(form: str, damping: float) -> None:
    shape, options, rows = PIXELS[form]
    options = dict(options)
    mask = options.pop("mask", None)
    layer, x, g = nn.Linear(784, 32), BITS.float(), torch.randn(64, 32)
    handle = isaac.attach(layer, damping, **options)
    handle.mask = mask
    layer(x.reshape(shape)).backward(g.reshape(*shape[:-1], 32))
    handle.step() if form == "step" else None
    x = x.double()
    plain, r = g.double().T @ x, rows(x)
    if form == "joint":
        plain = torch.cat([plain, g.double().sum(0)[:, None]], 1)
    wanted = (plain - plain @ r.T @ torch.linalg.solve(len(r) * damping * torch.eye(len(r)).double() + r @ r.T, r))[:, :784]
    assert layer.weight.grad is not None
    assert relative_error(layer.weight.grad, wanted) < 1e-4
    assert handle.statistics[""].fallbacks == 0


def test_digits_that_are_lost_are_counted_and_warned_about() -> None:
    """Positions that differ by less than a gradient of the pixels is precise."""
    layer, x = nn.Linear(784, 32), BITS.float()[:, None] + 1e-3 * torch.randn(64, 4, 784)
    handle = isaac.attach(layer, 1e-3, sharing="reduce")
    with pytest.warns(RuntimeWarning, match="digits were lost in layer ''"):
        layer(x).backward(torch.randn(64, 4, 32))
    assert handle.statistics[""].fallbacks == 1


# The rest of the list.


def refused(action: Callable[[], Any], words: str) -> None:
    with pytest.raises((RuntimeError, TypeError, ValueError, UserWarning, RuntimeWarning), match=words):
        action()


@pytest.mark.parametrize("when", ["backward", "step"])
@pytest.mark.parametrize("use", [F.linear, lambda x, weight: x @ weight.T], ids=["F.linear", "matmul"])
def test_a_weight_used_outside_its_layer_is_named(use: Callable[[Tensor, Tensor], Tensor], when: str) -> None:
    side = Side(mlp(6, 8, 4), when)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        use(torch.tanh(use(X, side.model[0].weight)), side.model[2].weight).sum().backward()
        side.optimizer.step()
    assert "outside" in str(side.handle)


@pytest.mark.parametrize("change", ["replaced", "added"])
def test_a_layer_that_came_after_attach_is_named(change: str) -> None:
    model = mlp(6, 8, 4)
    handle = isaac.attach(model, DAMPING)
    model.__setitem__(2, nn.Linear(8, 4).double()) if change == "replaced" else model.append(nn.Linear(4, 4).double())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss_of(model).backward()
    assert "replaced" in str(handle) or "not seen" in str(handle) or "after attach" in str(handle)


def test_a_mask_of_the_wrong_shape_is_refused() -> None:
    model = mlp(6, 8, 4)
    handle = isaac.attach(model, DAMPING)
    handle.mask = torch.ones(4, 5, dtype=torch.bool)
    refused(lambda: model(torch.randn(2, 3, 6).double()).sum().backward(), "mask")


def test_an_additive_mask_is_refused() -> None:
    handle = isaac.attach(mlp(6, 8, 4), DAMPING)
    refused(lambda: setattr(handle, "mask", torch.zeros(2, 3).masked_fill(torch.arange(3) == 2, -torch.inf)), "mask")


def test_a_gradient_penalty_under_step_does_not_warn() -> None:
    model, x = mlp(6, 8, 4), X.clone().requires_grad_()
    handle = isaac.attach(model, DAMPING, when="step")
    for _ in range(2):
        model.zero_grad()
        output = model(x)
        (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        (output.square().sum() + slope.square().sum()).backward()
        handle.step()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_state_does_not_override_a_new_damping_silently() -> None:
    state = isaac.attach(mlp(6, 8, 4), 0.5).state_dict()
    handle = isaac.attach(mlp(6, 8, 4), DAMPING)
    try:
        handle.load_state_dict(state)
    except (ValueError, UserWarning, RuntimeWarning) as error:
        message = str(error)
    else:
        message = ""
    assert handle.damping == DAMPING or "damping" in message


@pytest.mark.parametrize("when", ["backward", "step"])
def test_a_state_of_another_kind_is_refused(when: str) -> None:
    other = {"backward": "step", "step": "backward"}[when]
    state = isaac.attach(mlp(6, 8, 4), DAMPING, when=other).state_dict()
    refused(lambda: isaac.attach(mlp(6, 8, 4), DAMPING, when=when).load_state_dict(state), "when")


def test_a_frozen_layer_is_reported() -> None:
    model = mlp(6, 8, 4)
    handle = isaac.attach(model, DAMPING)
    model[0].requires_grad_(False)
    loss_of(model).backward()
    assert "frozen" in str(handle)


@pytest.mark.parametrize("when", ["backward", "step"])
def test_an_inspection_of_nothing_warns(when: str) -> None:
    handle = isaac.attach(mlp(6, 8, 4), DAMPING, when=when)
    with pytest.warns((UserWarning, RuntimeWarning), match="nothing was recorded"), handle.inspecting():
        pass


def test_many_graphs_that_are_alive_are_seldom_looked_through() -> None:
    """As REINFORCE has them: a graph for each step of an episode."""
    model, x, looks = mlp(4, 16, 2), torch.randn(1, 4).double(), []
    run = isaac.attach(model, DAMPING)._run
    alive = []
    for _ in range(4000):
        before = run.look_at
        alive.append(model(x))
        looks += [run.look_at] if run.look_at != before else []
    assert len(run.waiting) == 2 * len(alive)
    # 1,024 references, then twice as many each time: a few looks in 8,000 uses, where each use had one before.
    assert looks == [2048, 4096, 8192]
    alive.clear()
    for _ in range(400):
        model(x)
    assert len(run.waiting) <= 8192


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.weight_norm])
def test_old_style_norms_are_left_out_under_step(norm: Callable[[nn.Module], nn.Module]) -> None:
    handle = isaac.attach(nn.Sequential(norm(nn.Linear(6, 8)), nn.Linear(8, 4)).double(), DAMPING, when="step")
    assert "0" in handle.skipped


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_scripting_an_attached_model_says_what_to_do() -> None:
    model = mlp(6, 8, 4)
    isaac.attach(model, DAMPING)
    refused(lambda: torch.jit.script(model), "detach")


def test_ids_overwritten_before_the_backward_pass_are_an_error() -> None:
    layer, ids = nn.Embedding(10, 3), torch.arange(4)
    isaac.attach(layer, DAMPING)
    loss = layer(ids).sum()
    ids[0] = -100
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_detach_reaches_a_forward_that_another_tool_wrapped_or_says_so() -> None:
    model, plain = mlp(6, 8, 4), mlp(6, 8, 4)
    handle = isaac.attach(model, DAMPING)
    model[0].forward = functools.partial(model[0].forward)
    try:
        handle.detach()
    except (RuntimeError, ValueError, UserWarning, RuntimeWarning) as error:
        message = str(error)
    else:
        message = ""
        for one in (model, plain):
            loss_of(one).backward()
        assert_close(model[0].weight.grad, plain[0].weight.grad)
    assert not message or ("forward" in message and "detach again" not in message)


def test_a_replica_uses_its_own_weights_or_is_refused() -> None:
    layer = nn.Linear(6, 4).double()
    isaac.attach(layer, DAMPING)
    replica = layer._replicate_for_data_parallel()
    replica._parameters = {}
    replica.weight, replica.bias = torch.zeros_like(layer.weight), torch.zeros_like(layer.bias)
    try:
        output = replica(X)
    except (RuntimeError, TypeError) as error:
        output, message = torch.zeros(1), str(error)
    else:
        message = ""
    assert not output.any()
    assert not message or "DataParallel" in message


def test_a_replica_conditions_its_own_gradient() -> None:
    layer = nn.Linear(6, 4).double()
    handle = isaac.attach(layer, DAMPING)
    replica = layer._replicate_for_data_parallel()
    replica._parameters = {}
    replica.weight, replica.bias = (2 * p.detach() for p in layer.parameters())
    replica.weight.requires_grad_()
    replica(X).square().sum().backward()
    plain = 2 * (X @ replica.weight.detach().T + replica.bias).T @ X
    assert_close(replica.weight.grad, plain @ conditioner(X, DAMPING))
    handle.detach()
    assert not {"forward", "_replicate_for_data_parallel"} & vars(layer).keys()


def test_replicas_are_refused_under_step() -> None:
    layer = nn.Linear(6, 4).double()
    isaac.attach(layer, DAMPING, when="step")
    refused(layer._replicate_for_data_parallel, "DataParallel")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{"when": "step"}, {"sharing": "reduce"}], ids=str)
def test_compiled_autograd(options: dict[str, Any]) -> None:
    def pattern(s: Side) -> None:
        if s.handle is None:
            return backward()(s)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            loss_of(s.model).backward()
        return s.optimizer.step()

    assert_right(pattern, **{"when": "backward"} | options)


# Ranks.


class Experts(nn.Module):
    """Two layers of one shape, of which a rank may use one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.trunk, self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.double()

    def forward(self, x: Tensor, which: str = "ab") -> Tensor:
        hidden = torch.tanh(self.trunk(x))
        return torch.stack([getattr(self, name)(hidden) for name in which]).sum(0)


def experts(when: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Each rank uses one expert; rows of all ranks count, layer by layer."""
    model, twin = Experts(), Side(Experts(), None)
    options = {"process_group": dist.group.WORLD} if when == "backward" else {"when": when}
    handle = isaac.attach(model, DAMPING, **options)
    for rank, x in enumerate((X, X2)):
        (F.cross_entropy(twin.model(x, "ab"[rank]), (Y, Y2)[rank]) / 2).backward()
    rank = dist.get_rank()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    F.cross_entropy(wrapped((X, X2)[rank], "ab"[rank]), (Y, Y2)[rank]).backward()
    handle.step() if when == "step" else None
    return model, twin.expected("step")


def strangers() -> tuple[nn.Module, dict[str, Tensor]]:
    """Each rank has a model of its own, and nobody wraps it."""
    batch = ((X, Y), (X2, Y2))[dist.get_rank()]
    side, twin = Side(mlp(6, 4), "step"), Side(mlp(6, 4), None)
    for one in (side, twin):
        with torch.no_grad():
            one.model[0].weight.mul_(1 + dist.get_rank())
        backward(*batch)(one)
    return side.model, twin.expected("step")


RANKED: dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]] = {
    "experts, step": functools.partial(experts, "step"),
    "experts, process_group": functools.partial(experts, "backward"),
    "models of their own": strangers,
}


def worst_errors() -> dict[str, float]:
    """On several ranks: the largest relative error of each case; zero where an error or a warning names the group."""
    found = {}
    for name, case in RANKED.items():
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", ".*(process_group|replicated)")
                model, expected = case()
        except (RuntimeError, ValueError, UserWarning, RuntimeWarning) as error:
            worst = 0.0 if "process_group" in str(error) or "replicated" in str(error) else torch.inf
        else:
            gradients = {name: p.grad for name, p in model.named_parameters()}
            worst = max(relative_error(gradients[name], value) for name, value in expected.items())
        total = torch.tensor(worst, dtype=torch.float64)
        dist.all_reduce(total, op=dist.ReduceOp.MAX)
        found[name] = total.item()
    return found


@pytest.fixture(scope="module")
def errors_of_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    folder, path = Path(__file__).parent, tmp_path_factory.mktemp("ranks") / "errors.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    command = [*launch, str(folder / "distributed" / "loops.py"), str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, float] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("name", RANKED)
def test_ranks_mix_no_rows_that_do_not_belong_together(errors_of_ranks: dict[str, float], name: str) -> None:
    assert errors_of_ranks[name] <= TOLERANCE[torch.float64]
