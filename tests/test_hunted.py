"""Training loops as users write them, each compared with a dense float64 reference made from the definition alone."""

import copy
import io
import math
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune, rnn
from torch.utils.checkpoint import checkpoint

import isaac_newton as isaac

LAMBDA = 0.3
Bind = Callable[[torch.optim.Optimizer], torch.optim.Optimizer]
Loop = Callable[[nn.Module, Bind], Any]


# The reference.


def conditioner(a: Tensor, damping: float = LAMBDA) -> Tensor:
    """(I + aᵀa/(bλ))⁻¹ of rows a, on the side of the features."""
    a = a.reshape(-1, a.shape[-1])
    identity = torch.eye(a.shape[1], dtype=a.dtype)
    return torch.linalg.inv(identity + a.T @ a / (len(a) * damping)) if len(a) else identity


def zeta_star(g: Tensor, a: Tensor, damping: float = LAMBDA) -> Tensor:
    """The definition: gᵀ (I + a aᵀ/(bλ))⁻¹ a."""
    g, a = g.reshape(-1, g.shape[-1]), a.reshape(-1, a.shape[-1])
    identity = torch.eye(len(a), dtype=a.dtype)
    return g.T @ torch.linalg.solve(identity + a @ a.T / (max(len(a), 1) * damping), a)


class Through(torch.autograd.Function):
    """A weight in the formula of an input gradient: what differentiates that (double backward) is conditioned as well."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient @ conditioner(ctx.saved_tensors[0]), None


class DenseFunction(torch.autograd.Function):
    """A linear layer whose weight gradient is the definition; with a log, the plain gradient, and its rows there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, log: "Log | None") -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.log = log
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows, columns = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
        if ctx.log is None:
            weight_gradient = zeta_star(columns, rows)
            weight = Through.apply(weight, rows) if torch.is_grad_enabled() else weight
        else:
            ctx.log.pending.append((torch._C._current_graph_task_id(), rows.detach().clone()))
            weight_gradient = columns.T @ rows
        return g @ weight, weight_gradient, columns.sum(0) if ctx.needs_input_grad[2] else None, None


class Log:
    """The rows of the passes whose gradient was accumulated in a weight since it was cleared or stepped."""

    def __init__(self, weight: nn.Parameter) -> None:
        self.pending: list[tuple[int, Tensor]] = []
        self.rows: list[Tensor] = []
        self.weight = weight
        if weight.requires_grad:
            weight.register_hook(self.before)
            weight.register_post_accumulate_grad_hook(self.after)

    def before(self, gradient: Tensor) -> None:
        if self.weight.grad is None or not self.weight.grad.any():
            self.rows.clear()

    def after(self, weight: Tensor) -> None:
        self.rows += [rows for task, rows in self.pending if task == torch._C._current_graph_task_id()]
        self.pending.clear()

    def step(self) -> None:
        if self.weight.grad is not None and self.rows:
            self.weight.grad = self.weight.grad @ conditioner(torch.cat(self.rows))
        self.rows.clear()


class DenseLinear(nn.Linear):
    """What a linear layer becomes in the reference."""

    log: Log | None = None

    def forward(self, input: Tensor) -> Tensor:
        return DenseFunction.apply(input, self.weight, self.bias, self.log)


def dense(model: nn.Module, when: str) -> tuple[nn.Module, Bind]:
    """A copy of a plain model that computes the definition, and how to bind its optimizers."""
    model = copy.deepcopy(model)
    logs: dict[int, Log] = {}
    for layer in model.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = DenseLinear
            if when == "step":
                if id(layer.weight) not in logs:
                    logs[id(layer.weight)] = Log(layer.weight)
                layer.log = logs[id(layer.weight)]

    def bind(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}

        def condition(*_: Any) -> None:
            for key, log in logs.items():
                if key in mine:
                    log.step()

        if when == "step":
            optimizer.register_step_pre_hook(condition)
        return optimizer

    return model, bind


def close(actual: Tensor | None, expected: Tensor | None, tolerance: float = 1e-6) -> None:
    """Relative error of the whole tensor."""
    if actual is None or expected is None:
        assert actual is expected
        return
    actual, expected = actual.detach().double(), expected.detach().double()
    error = (actual - expected).norm() / expected.norm().clamp(min=1e-30)
    assert error <= tolerance, f"relative error {error:.2e}"


def same(model: nn.Module, reference: nn.Module) -> None:
    for (name, p), (_, q) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        close(p.grad, q.grad)
        close(p, q)


def compare(loop: Loop, model: nn.Module, when: str = "backward", **options: Any) -> None:
    """Run the user's lines with the library and with the reference; gradients and weights must agree in the end."""
    reference, bind = dense(model, when)
    handle = isaac.attach(model, damping=LAMBDA, when=when, **options)
    seed = torch.get_rng_state()
    loop(model, handle.bind if when == "step" else lambda optimizer: optimizer)
    torch.set_rng_state(seed)
    loop(reference, bind)
    same(model, reference)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 4)).double()


def batch(rows: int = 5, features: int = 6) -> Tensor:
    return torch.randn(rows, features, dtype=torch.float64)


def sgd(model: nn.Module, bind: Bind, rate: float = 0.1, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate, **options)
    bind(optimizer)
    return optimizer


# Loops that run with both `when`.


def clipped_and_zeroed(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        model(batch()).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def zeroed_by_hand(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    for _ in range(3):
        for p in model.parameters():
            if p.grad is not None:
                p.grad.data.zero_()
        model(batch()).square().mean().backward()
        optimizer.step()


def micro_batches(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    for i in range(6):
        (model(batch(3 + i)).square().mean() / 3).backward()
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


def never_zeroed(model: nn.Module, bind: Bind) -> None:
    """A user who forgets zero_grad: momentum by accident."""
    optimizer = sgd(model, bind)
    for _ in range(3):
        model(batch()).square().mean().backward()
        optimizer.step()


def sam(model: nn.Module, bind: Bind) -> None:
    """Sharpness-aware minimization: climb along the first gradient, step by the second."""
    optimizer = sgd(model, bind)
    for _ in range(2):
        x = batch()
        model(x).square().mean().backward()
        with torch.no_grad():
            climbs = [0.05 * p.grad / p.grad.norm() for p in model.parameters()]
            for p, climb in zip(model.parameters(), climbs, strict=True):
                p.add_(climb)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        with torch.no_grad():
            for p, climb in zip(model.parameters(), climbs, strict=True):
                p.sub_(climb)
        optimizer.step()
        optimizer.zero_grad()


def lbfgs(model: nn.Module, bind: Bind) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    x = batch()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def lookahead(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    slow = [p.detach().clone() for p in model.parameters()]
    for i in range(4):
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()
        if i % 2:
            for p, s in zip(model.parameters(), slow, strict=True):
                s.add_(p.detach() - s, alpha=0.5)
                p.data.copy_(s)


def weights_replaced(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    for _ in range(2):
        optimizer.zero_grad()
        for p in model.parameters():
            p.data = p.data * 0.9
        model(batch()).square().mean().backward()
        optimizer.step()


def retained_twice(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    loss = model(batch()).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()


def two_losses(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    output = model(batch())
    output[:, :2].square().mean().backward(retain_graph=True)
    output[:, 2:].abs().mean().backward()
    optimizer.step()


def two_graphs_in_reversed_order(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    first, second = model(batch(5)).square().mean(), model(batch(8)).abs().mean()
    second.backward()
    first.backward()
    optimizer.step()


def per_sample_losses(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    losses = model(batch()).square().mean(1)
    for i in range(5):
        (losses[i] / 5).backward(retain_graph=i < 4)
    optimizer.step()


def per_sample_forward(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    for row in batch():
        (model(row).square().mean() / 5).backward()
    optimizer.step()


def siamese(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    left, right = model(batch(5)), model(batch(5) * 3)
    (left - right).square().mean().backward()
    optimizer.step()


def siamese_of_one_tensor(model: nn.Module, bind: Bind) -> None:
    """The same tensor goes through twice (dropout views): two uses, each with its rows."""
    optimizer = sgd(model, bind)
    x = batch()
    (model(x) * model(x).detach() + model(x).square()).mean().backward()
    optimizer.step()


def triplet_with_stopped_branch(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    anchor, positive = model(batch(5)), model(batch(5) * 2)
    with torch.no_grad():
        target = model(batch(5))
    (anchor - positive.detach() + target).square().mean().backward()
    optimizer.step()


def frozen_between_passes(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    for i in range(4):
        model[0].weight.requires_grad_(i % 2 == 0)
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()


def frozen_between_forward_and_backward(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    loss = model(batch()).square().mean()
    model[0].weight.requires_grad_(False)
    loss.backward()
    model[0].weight.requires_grad_(True)
    optimizer.step()


def frozen_in_the_second_of_two_micro_batches(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    model(batch(4)).square().mean().backward()
    model[0].weight.requires_grad_(False)
    model(batch(8)).square().mean().backward()
    model[0].weight.requires_grad_(True)
    optimizer.step()


def checkpointed(model: nn.Module, bind: Bind, reentrant: bool) -> None:
    optimizer = sgd(model, bind)
    for _ in range(2):
        optimizer.zero_grad()
        checkpoint(model, batch().requires_grad_(), use_reentrant=reentrant).square().mean().backward()
        optimizer.step()


def checkpointed_in_checkpoints(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)

    def inner(x: Tensor) -> Tensor:
        return checkpoint(model[0], x, use_reentrant=False).tanh()

    def outer(x: Tensor) -> Tensor:
        return model[2](checkpoint(inner, x, use_reentrant=False))

    for _ in range(2):
        optimizer.zero_grad()
        checkpoint(outer, batch(), use_reentrant=False).square().mean().backward()
        optimizer.step()


def checkpointed_and_retained(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    output = checkpoint(model, batch(), use_reentrant=False)
    output[:, :2].square().mean().backward(retain_graph=True)
    output[:, 2:].abs().mean().backward()
    optimizer.step()


def saved_on_cpu(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    with torch.autograd.graph.save_on_cpu():
        loss = model(batch()).square().mean()
    loss.backward()
    optimizer.step()


def saved_by_hooks_that_copy(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy(force=True).copy(), torch.from_numpy):
        loss = model(batch()).square().mean()
    loss.backward()
    optimizer.step()


def output_hook_scales_gradients(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    model[0].register_forward_hook(lambda m, args, y: y.register_hook(lambda g: g * 2) and None)
    model(batch()).square().mean().backward()
    optimizer.step()


def forward_hook_replaces_output(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    model[0].register_forward_hook(lambda m, args, y: y * 3)
    model(batch()).square().mean().backward()
    optimizer.step()


def forward_pre_hook_replaces_input(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    model[0].register_forward_pre_hook(lambda m, args: (args[0] * 3 + 1,))
    model(batch()).square().mean().backward()
    optimizer.step()


def full_backward_hooks(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    model[2].register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.5,))
    model[2].register_full_backward_pre_hook(lambda m, go: (go[0].clamp(-0.02, 0.02),))
    model(batch()).square().mean().backward()
    optimizer.step()


def parameter_hook_scales(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    model[0].weight.register_hook(lambda g: g * 0.5)
    model(batch()).square().mean().backward()
    optimizer.step()


def gradients_clipped_by_hook(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    model[0].weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 0.1))
    model(batch()).square().mean().backward()
    optimizer.step()


def stride_zero_inputs(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    model(batch(1).expand(5, 6)).square().mean().backward()
    optimizer.step()


def sliding_windows(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    model(torch.randn(12, dtype=torch.float64).unfold(0, 6, 1)).square().mean().backward()
    optimizer.step()


def transposed_inputs(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    model(torch.randn(6, 3, 5, dtype=torch.float64).permute(2, 1, 0)).square().mean().backward()
    optimizer.step()


def one_row(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    model(batch(1)).square().mean().backward()
    optimizer.step()


def no_rows(model: nn.Module, bind: Bind) -> None:
    """One expert got no tokens."""
    optimizer = sgd(model, bind)
    model(batch(0)).sum().backward()
    optimizer.step()


def no_rows_in_one_micro_batch(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    model(batch(0)).sum().backward()
    model(batch(4)).square().mean().backward()
    optimizer.step()


def some_rows_only(model: nn.Module, bind: Bind) -> None:
    """The loss looks at three rows; all are rows of the use."""
    optimizer = sgd(model, bind)
    model(batch())[:3].square().mean().backward()
    optimizer.step()


def anomaly_mode(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    with warnings.catch_warnings(), torch.autograd.detect_anomaly(check_nan=True):
        model(batch()).square().mean().backward()
    optimizer.step()


def two_optimizers(model: nn.Module, bind: Bind) -> None:
    first, second = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[2].parameters(), lr=0.1)
    bind(first)
    bind(second)
    for _ in range(2):
        model.zero_grad()
        model(batch()).square().mean().backward()
        first.step()
        second.step()


def alternating_optimizers(model: nn.Module, bind: Bind) -> None:
    """The one steps at each batch, the other at every second, with what both have left."""
    first, second = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2].parameters(), lr=0.1)
    bind(first)
    bind(second)
    for i in range(4):
        model(batch(4 + i)).square().mean().backward()
        first.step()
        first.zero_grad()
        if i % 2:
            second.step()
            second.zero_grad()


def gradients_changed_by_optimizer(model: nn.Module, bind: Bind) -> None:
    """SGD with weight decay, and a hook that centralizes in place."""
    optimizer = sgd(model, bind, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()
        for p in model.parameters():
            p.grad.mul_(0)


def backward_for_some_inputs(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    model(batch()).square().mean().backward(inputs=[model[2].weight, model[2].bias])
    optimizer.step()


def backward_for_some_inputs_then_all(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    model(batch(4)).square().mean().backward(inputs=[model[2].weight, model[2].bias])
    model(batch(8)).square().mean().backward()
    optimizer.step()


def adversarial_inputs(model: nn.Module, bind: Bind) -> None:
    """FGSM: a pass for the input's gradient alone, then one for the weights."""
    optimizer = sgd(model, bind)
    x = batch().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().mean(), x)
    model(x.detach() + 0.1 * gradient.sign()).square().mean().backward()
    optimizer.step()


def adversarial_by_backward(model: nn.Module, bind: Bind) -> None:
    """FGSM as tutorials have it: backward, x.grad, zero_grad."""
    optimizer = sgd(model, bind)
    x = batch().requires_grad_()
    model(x).square().mean().backward()
    model.zero_grad()
    model((x + 0.1 * x.grad.sign()).detach()).square().mean().backward()
    optimizer.step()


def free_adversarial(model: nn.Module, bind: Bind) -> None:
    """Adversarial training for free: one backward serves input and weights, gradients are kept over replays."""
    optimizer, delta = sgd(model, bind), torch.zeros(5, 6, dtype=torch.float64, requires_grad=True)
    x = batch()
    for _ in range(3):
        optimizer.zero_grad()
        model(x + delta).square().mean().backward()
        delta.data.add_(delta.grad.sign(), alpha=0.1)
        delta.grad = None
        optimizer.step()


def stochastic_depth(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    for i in range(3):
        optimizer.zero_grad()
        hidden = batch(5, 7) if i == 1 else model[:2](batch())
        model[2](hidden).square().mean().backward()
        optimizer.step()


def inplace_activation(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    F.elu_(model[0](batch())).square().mean().backward()
    model[2](torch.tanh_(model[0](batch()))).square().mean().backward()
    optimizer.step()


def exception_in_backward(model: nn.Module, bind: Bind) -> None:
    """Out of memory, say, in the first layer; the batch is dropped."""

    def fail(g: Tensor) -> Tensor:
        raise KeyboardInterrupt

    optimizer = sgd(model, bind)
    output = model[0](batch(9)).tanh()
    output.register_hook(fail)
    try:
        model[2](output).square().mean().backward()
    except KeyboardInterrupt:
        optimizer.zero_grad()
    model(batch(4)).square().mean().backward()
    optimizer.step()


def nan_batch_skipped(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    for i in range(3):
        optimizer.zero_grad()
        loss = model(batch() * (math.nan if i == 1 else 1)).square().mean()
        if not torch.isfinite(loss):
            continue
        loss.backward()
        optimizer.step()


def forward_without_backward(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    losses = [model(batch(4 + i)).square().mean() for i in range(3)]
    losses[1].backward()
    optimizer.step()


def copied_in_the_loop(model: nn.Module, bind: Bind) -> None:
    """An EMA copy taken while a graph is alive, as a teacher with no_grad."""
    optimizer = sgd(model, bind)
    for _ in range(2):
        optimizer.zero_grad()
        x = batch()
        output = model(x)
        teacher = copy.deepcopy(model)
        with torch.no_grad():
            target = teacher(x + 0.1)
        (output - target).square().mean().backward()
        optimizer.step()


def truncated_bptt(model: nn.Module, bind: Bind) -> None:
    """A recurrent use of the first layer."""
    optimizer = sgd(model, bind)
    state = torch.zeros(5, 7, dtype=torch.float64)
    for _ in range(2):
        optimizer.zero_grad()
        state = state.detach()
        for _ in range(3):
            state = torch.tanh(model[0](batch() + state[:, :6]))
        model[2](state).square().mean().backward()
        optimizer.step()


def inverted_by_autograd_backward(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    outputs = [model(batch(4)), model(batch(7))]
    torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    optimizer.step()


def detached_output_head(model: nn.Module, bind: Bind) -> None:
    """Split learning: the head's input gradient is sent by hand."""
    optimizer = sgd(model, bind)
    hidden = model[:2](batch())
    received = hidden.detach().requires_grad_()
    model[2](received).square().mean().backward()
    hidden.backward(received.grad)
    optimizer.step()


def scaled_by_scaler(model: nn.Module, bind: Bind) -> None:
    optimizer, scaler = sgd(model, bind), torch.amp.GradScaler("cpu", init_scale=64.0)
    for i in range(3):
        optimizer.zero_grad()
        factor = math.inf if i == 1 else 1.0
        scaler.scale(model(batch()).square().mean() * factor).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()


def jacobian_of_outputs(model: nn.Module, bind: Bind) -> None:
    """A sensitivity by batched vectors (is_grads_batched), then the usual pass."""
    optimizer = sgd(model, bind)
    x = batch().requires_grad_()
    output = model(x)
    (jacobian,) = torch.autograd.grad(output.sum(0), x, torch.eye(4, dtype=torch.float64), retain_graph=True, is_grads_batched=True)
    (output.square().mean() + jacobian.square().mean()).backward()
    optimizer.step()


def gradient_penalty(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    x = batch().requires_grad_()
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(x)
    with torch.enable_grad():
        model(x).abs().mean().backward()
    optimizer.step()


def pieces_of_autograd_backward_in_threads(model: nn.Module, bind: Bind) -> None:
    """Forward here, backward in another thread."""
    optimizer = sgd(model, bind)
    loss = model(batch()).square().mean()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    optimizer.step()


def direct_call_of_forward(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    model[2].forward(model[0].forward(batch())).square().mean().backward()
    optimizer.step()


def gradient_moved_to_another_tensor(model: nn.Module, bind: Bind) -> None:
    """Gradients are taken out, summed by hand, and put back."""
    optimizer = sgd(model, bind)
    model(batch(4)).square().mean().backward()
    kept = [p.grad for p in model.parameters()]
    for p in model.parameters():
        p.grad = None
    for p, g in zip(model.parameters(), kept, strict=True):
        p.grad = g
    optimizer.step()


LOOPS: list[Loop] = [
    clipped_and_zeroed,
    zeroed_by_hand,
    micro_batches,
    never_zeroed,
    sam,
    lookahead,
    weights_replaced,
    retained_twice,
    two_losses,
    two_graphs_in_reversed_order,
    per_sample_losses,
    per_sample_forward,
    siamese,
    siamese_of_one_tensor,
    triplet_with_stopped_branch,
    frozen_between_passes,
    frozen_between_forward_and_backward,
    frozen_in_the_second_of_two_micro_batches,
    partial(checkpointed, reentrant=False),
    partial(checkpointed, reentrant=True),
    checkpointed_in_checkpoints,
    checkpointed_and_retained,
    saved_on_cpu,
    saved_by_hooks_that_copy,
    output_hook_scales_gradients,
    forward_hook_replaces_output,
    forward_pre_hook_replaces_input,
    full_backward_hooks,
    parameter_hook_scales,
    gradients_clipped_by_hook,
    stride_zero_inputs,
    sliding_windows,
    transposed_inputs,
    one_row,
    no_rows,
    no_rows_in_one_micro_batch,
    some_rows_only,
    two_optimizers,
    alternating_optimizers,
    gradients_changed_by_optimizer,
    backward_for_some_inputs,
    backward_for_some_inputs_then_all,
    adversarial_inputs,
    adversarial_by_backward,
    free_adversarial,
    stochastic_depth,
    inplace_activation,
    exception_in_backward,
    nan_batch_skipped,
    forward_without_backward,
    copied_in_the_loop,
    truncated_bptt,
    inverted_by_autograd_backward,
    detached_output_head,
    scaled_by_scaler,
    gradient_penalty,
    pieces_of_autograd_backward_in_threads,
    direct_call_of_forward,
    gradient_moved_to_another_tensor,
]


def title(loop: Loop) -> str:
    return f"{loop.func.__name__}-{loop.keywords}" if isinstance(loop, partial) else loop.__name__


@pytest.mark.parametrize("when", ["backward", "step"])
@pytest.mark.parametrize("loop", LOOPS, ids=title)
def test_a_loop_gives_the_definition(loop: Loop, when: str) -> None:
    compare(loop, mlp(), when)


# Loops of one kind of conditioning, and options.


def test_lbfgs_conditions_each_closure() -> None:
    compare(lbfgs, mlp())


def test_lbfgs_at_the_step() -> None:
    model, x = mlp(), batch()
    reference, _ = dense(model, "step")
    handle = isaac.attach(model, damping=LAMBDA, when="step")
    lbfgs_of = partial(torch.optim.LBFGS, lr=0.1, max_iter=3)
    for m in (model, reference):
        optimizer = lbfgs_of(m.parameters())
        if m is model:
            handle.bind(optimizer)

        def closure(m: nn.Module = m, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = m(x).square().mean()
            loss.backward()
            if m is reference:
                for layer in m:
                    if isinstance(layer, DenseLinear):
                        layer.log.step()
            return loss

        optimizer.step(closure)
    same(model, reference)


def square() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()


def one_pass(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    model(batch()).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("when", ["backward", "step"])
def test_tied_before_attach(when: str) -> None:
    model = square()
    model[2].weight = model[0].weight
    compare(one_pass, model, when)


@pytest.mark.parametrize("when", ["backward", "step"])
def test_tied_after_attach(when: str) -> None:
    model = square()
    tied = copy.deepcopy(model)
    tied[2].weight = tied[0].weight
    reference, bind = dense(tied, when)
    handle = isaac.attach(model, damping=LAMBDA, when=when)
    model[2].weight = model[0].weight
    seed = torch.get_rng_state()
    one_pass(model, handle.bind if when == "step" else lambda o: o)
    torch.set_rng_state(seed)
    one_pass(reference, bind)
    same(model, reference)


@pytest.mark.parametrize("when", ["backward", "step"])
def test_untied_after_attach(when: str) -> None:
    model = square()
    model[2].weight = model[0].weight
    untied = copy.deepcopy(model)
    untied[2].weight = nn.Parameter(untied[2].weight.detach().clone())
    reference, bind = dense(untied, when)
    handle = isaac.attach(model, damping=LAMBDA, when=when)
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())
    seed = torch.get_rng_state()
    one_pass(model, handle.bind if when == "step" else lambda o: o)
    torch.set_rng_state(seed)
    one_pass(reference, bind)
    same(model, reference)


@pytest.mark.parametrize("when", ["backward", "step"])
def test_a_layer_under_two_names(when: str) -> None:
    layer = nn.Linear(6, 6)
    compare(one_pass, nn.Sequential(layer, nn.Tanh(), layer).double(), when)


@pytest.mark.parametrize("when", ["backward", "step"])
def test_frozen_from_the_start(when: str) -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    compare(one_pass, model, when)


@pytest.mark.parametrize("when", ["backward", "step"])
def test_assigned_by_load_state_dict(when: str) -> None:
    """load_state_dict(assign=True) in the middle puts new parameters into the layers."""

    def loop(model: nn.Module, bind: Bind) -> None:
        model.load_state_dict({k: v.detach() * 0.5 for k, v in model.state_dict().items()}, assign=True)
        for p in model.parameters():
            p.requires_grad_()
        one_pass(model, bind)

    model = mlp()
    reference, bind = dense(model, "backward")
    handle = isaac.attach(model, damping=LAMBDA, when=when)
    for m in (model, reference):
        m.load_state_dict({k: v.detach() * 0.5 for k, v in m.state_dict().items()}, assign=True)
    x = batch()
    optimizer = sgd(model, handle.bind if when == "step" else lambda o: o)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer = sgd(reference, bind)
    reference(x).square().mean().backward()
    optimizer.step()
    same(model, reference)


@pytest.mark.parametrize("when", ["backward", "step"])
@pytest.mark.parametrize("moment", ["before", "between"])
def test_converted_after_attach(when: str, moment: str) -> None:
    model = mlp().float()
    reference, _ = dense(copy.deepcopy(model).double(), "backward")
    handle = isaac.attach(model, damping=LAMBDA, when=when)
    if moment == "between":
        model(batch().float()).square().mean().backward()
        if when == "step":
            handle.step()
        model.zero_grad()
    model.double()
    x = batch()
    model(x).square().mean().backward()
    reference(x).square().mean().backward()
    if when == "step":
        handle.step()
    same(model, reference)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("when", ["backward", "step"])
def test_half_models(dtype: torch.dtype, when: str) -> None:
    model = mlp()
    reference, _ = dense(copy.deepcopy(model), "backward")
    handle = isaac.attach(model, damping=LAMBDA, when=when)
    model.to(dtype)
    x = batch()
    model(x.to(dtype)).square().mean().backward()
    reference(x).square().mean().backward()
    if when == "step":
        handle.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        close(p.grad, q.grad, 0.03)


@pytest.mark.parametrize("when", ["backward", "step"])
def test_autocast(when: str) -> None:
    model = mlp().float()
    reference, _ = dense(copy.deepcopy(model).double(), "backward")
    handle = isaac.attach(model, damping=LAMBDA, when=when)
    x = batch()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x.float()).float().square().mean()
    loss.backward()
    reference(x).square().mean().backward()
    if when == "step":
        handle.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        close(p.grad, q.grad, 0.03)


def test_a_replaced_module_is_noticed() -> None:
    """A new head after attach is not conditioned, though the handle lists the old one."""
    model = mlp()
    handle = isaac.attach(model, damping=LAMBDA)
    model[2] = nn.Linear(7, 4).double()
    with pytest.warns(RuntimeWarning):
        model(batch()).square().mean().backward()
    assert "replaced" in str(handle)


@pytest.mark.parametrize("when", ["backward", "step"])
def test_damping_changed_between_forward_and_backward(when: str) -> None:
    """It takes effect with the next backward pass."""
    layer, x = nn.Linear(6, 4, bias=False).double(), batch()
    handle = isaac.attach(layer, damping=5.0, when=when)
    loss = layer(x).sum()
    handle.damping = LAMBDA
    loss.backward()
    if when == "step":
        handle.step()
    close(layer.weight.grad, zeta_star(torch.ones(5, 4, dtype=torch.float64), x))


def test_damping_changed_between_two_backward_passes_of_one_graph() -> None:
    layer, x = nn.Linear(6, 4, bias=False).double(), batch()
    handle = isaac.attach(layer, damping=5.0)
    loss = layer(x).sum()
    loss.backward(retain_graph=True)
    layer.zero_grad()
    handle.damping = LAMBDA
    loss.backward()
    close(layer.weight.grad, zeta_star(torch.ones(5, 4, dtype=torch.float64), x))


@pytest.mark.parametrize("when", ["backward", "step"])
def test_schedule(when: str) -> None:
    layer, x = nn.Linear(6, 4, bias=False).double(), batch()
    handle = isaac.attach(layer, damping=lambda step: 0.1 * (step + 1), when=when)
    for i in range(3):
        layer.zero_grad()
        with torch.no_grad():
            layer(x)
        layer(x).sum()
        layer(x).sum().backward()
        if when == "step":
            handle.step()
        close(layer.weight.grad, zeta_star(torch.ones(5, 4, dtype=torch.float64), x, 0.1 * (i + 1)))


def test_detached_between_forward_and_backward() -> None:
    layer, x = nn.Linear(6, 4, bias=False).double(), batch()
    handle = isaac.attach(layer, damping=LAMBDA)
    loss = layer(x).sum()
    handle.detach()
    loss.backward()
    layer(x).sum().backward()
    ones = torch.ones(5, 4, dtype=torch.float64)
    plain = ones.T @ x
    expected = (zeta_star(ones, x) + plain, 2 * plain)
    assert any(torch.allclose(layer.weight.grad, e) for e in expected)


def test_detached_in_the_middle_of_a_step() -> None:
    """What was gathered is forgotten; the gradient stays plain."""
    layer, x = nn.Linear(6, 4, bias=False).double(), batch()
    handle = isaac.attach(layer, damping=LAMBDA, when="step")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    handle.bind(optimizer)
    layer(x).sum().backward()
    handle.detach()
    layer(x).sum().backward()
    optimizer.step()
    close(layer.weight.grad, 2 * torch.ones(5, 4, dtype=torch.float64).T @ x)


@pytest.mark.parametrize("when", ["backward", "step"])
def test_attached_in_the_loop(when: str) -> None:
    layer, ones = nn.Linear(6, 4, bias=False).double(), torch.ones(5, 4, dtype=torch.float64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for i in range(3):
        x = batch()
        handle = isaac.attach(layer, damping=0.1 * (i + 1), when=when)
        if when == "step":
            handle.bind(optimizer)
        optimizer.zero_grad()
        layer(x).sum().backward()
        optimizer.step()
        handle.detach()
        close(layer.weight.grad, zeta_star(ones, x, 0.1 * (i + 1)))


def test_attached_twice_is_refused() -> None:
    model = mlp()
    isaac.attach(model, damping=LAMBDA)
    with pytest.raises((ValueError, RuntimeError)):
        isaac.attach(model[0], damping=LAMBDA)


@pytest.mark.parametrize("when", ["backward", "step"])
def test_two_handles_on_two_parts(when: str) -> None:
    model, x = mlp(), batch()
    reference, _ = dense(model, "backward")
    handles = [isaac.attach(model, damping=LAMBDA, layers=name, when=when) for name in ("0", "2")]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if when == "step":
        for handle in handles:
            handle.bind(optimizer)
    model(x).square().mean().backward()
    reference(x).square().mean().backward()
    optimizer.step()
    same(model, reference)


def test_excluded_layers_keep_the_plain_gradient() -> None:
    model, x = mlp(), batch()
    plain = copy.deepcopy(model)
    isaac.attach(model, damping=LAMBDA, exclude="0")
    model(x).square().mean().backward()
    plain(x).square().mean().backward()
    close(model[0].weight.grad, plain[0].weight.grad)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "saved": lambda m: torch.load(saved(m), weights_only=False),
    "copy": copy.copy,
}


def saved(model: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("make", list(COPIES))
def test_copies_are_conditioned(make: str) -> None:
    model, x = mlp(), batch()
    reference, _ = dense(model, "backward")
    isaac.attach(model, damping=LAMBDA)
    model(x).square().mean().backward()
    model.zero_grad()
    twin = COPIES[make](model)
    twin(x).square().mean().backward()
    reference(x).square().mean().backward()
    same(twin, reference)


def test_a_model_copied_with_its_handle() -> None:
    """copy.deepcopy((model, handle)): the copied handle is that of the copied model."""
    model, x = mlp(), batch()
    reference, _ = dense(model, "step")
    handle = isaac.attach(model, damping=99.0)
    twin, twins_handle = copy.deepcopy((model, handle))
    twins_handle.damping = LAMBDA
    assert handle.damping == 99.0
    reference, _ = dense(mlp(), "backward")
    reference.load_state_dict(twin.state_dict())
    twin(x).square().mean().backward()
    reference(x).square().mean().backward()
    same(twin, reference)


def test_a_model_copied_with_its_handle_at_the_step() -> None:
    model, x = mlp(), batch()
    reference, _ = dense(model, "backward")
    handle = isaac.attach(model, damping=LAMBDA, when="step")
    twin, twins_handle = copy.deepcopy((model, handle))
    twin(x).square().mean().backward()
    twins_handle.step()
    reference(x).square().mean().backward()
    same(twin, reference)


def test_a_trainer_copied_as_a_whole_is_noticed() -> None:
    """Model, bound optimizer and handle, as population-based training copies them; torch copies no hooks."""
    model = mlp()
    handle = isaac.attach(model, damping=LAMBDA, when="step")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle.bind(optimizer)
    twin, twins_optimizer, _ = copy.deepcopy((model, optimizer, handle))
    with pytest.warns(RuntimeWarning, match="bind"):
        for _ in range(3):
            twins_optimizer.zero_grad()
            twin(batch()).square().mean().backward()
            twins_optimizer.step()


@pytest.mark.parametrize("when", ["backward", "step"])
def test_two_models_in_two_threads(when: str) -> None:
    models = [mlp(), mlp()]
    references = [dense(m, when) for m in models]
    handles = [isaac.attach(m, damping=LAMBDA, when=when) for m in models]
    batches = [[batch(4 + i) for i in range(20)] for _ in models]

    def train(model: nn.Module, bind: Bind, data: list[Tensor]) -> None:
        optimizer = sgd(model, bind, momentum=0.9)
        for x in data:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    threads = [
        threading.Thread(target=train, args=(m, h.bind if when == "step" else lambda o: o, data))
        for m, h, data in zip(models, handles, batches, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for model, (reference, bind), data in zip(models, references, batches, strict=True):
        train(reference, bind, data)
        same(model, reference)


# Gradients taken by hand.


def test_autograd_grad_for_weights() -> None:
    model, x = mlp(), batch()
    reference, _ = dense(model, "backward")
    isaac.attach(model, damping=LAMBDA)
    actual = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    expected = torch.autograd.grad(reference(x).square().mean(), list(reference.parameters()))
    for a, e in zip(actual, expected, strict=True):
        close(a, e)


def test_gathering_two_autograd_grads() -> None:
    layer, x = nn.Linear(6, 4, bias=False).double(), batch(9)
    handle = isaac.attach(layer, damping=LAMBDA, when="step")
    with handle.gathering():
        parts = [torch.autograd.grad(layer(part).sum(), layer.weight)[0] for part in x.split([4, 5])]
    layer.weight.grad = parts[0] + parts[1]
    handle.step()
    close(layer.weight.grad, zeta_star(torch.ones(9, 4, dtype=torch.float64), x))


def test_gradient_surgery_without_gathering_says_so() -> None:
    """Two tasks, each with zero_grad and backward; the gradients are kept, summed and put into `.grad`."""
    layer = nn.Linear(6, 4, bias=False).double()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    isaac.attach(layer, damping=LAMBDA, when="step").bind(optimizer)
    with pytest.warns(RuntimeWarning):
        for _ in range(3):
            parts = []
            for rows in (4, 5):
                optimizer.zero_grad()
                layer(batch(rows)).sum().backward()
                parts.append(layer.weight.grad.clone())
            layer.weight.grad = parts[0] + parts[1]
            optimizer.step()


def test_a_micro_batch_whose_gradient_is_zero_counts() -> None:
    """All labels are ignored, so the gradient is zero; its rows were accumulated nevertheless."""
    layer, x = nn.Linear(6, 4, bias=False).double(), batch(9)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    isaac.attach(layer, damping=LAMBDA, when="step").bind(optimizer)
    (layer(x[:4]).sum() * 0).backward()
    layer(x[4:]).sum().backward()
    optimizer.step()
    g = torch.cat([torch.zeros(4, 4), torch.ones(5, 4)]).double()
    close(layer.weight.grad, zeta_star(g, x))


def test_gradients_are_views_of_one_buffer() -> None:
    """One flat buffer holds all gradients and is zeroed as a whole, as bucketed optimizers do."""
    layer, ones = nn.Linear(6, 4, bias=False).double(), torch.ones(5, 4, dtype=torch.float64)
    flat = torch.zeros(24, dtype=torch.float64)
    layer.weight.grad = flat.view(4, 6)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    isaac.attach(layer, damping=LAMBDA, when="step").bind(optimizer)
    for _ in range(3):
        flat.zero_()
        layer(batch()).sum().backward()
        flat.zero_()  # this batch is dropped
        x = batch()
        layer(x).sum().backward()
        optimizer.step()
        close(flat.view(4, 6), zeta_star(ones, x))
        assert layer.weight.grad.data_ptr() == flat.data_ptr()


def test_optimizers_in_the_backward_pass() -> None:
    """One optimizer for each parameter, stepped as soon as its gradient is there."""
    model, x = mlp(), batch()
    reference, _ = dense(model, "backward")
    handle = isaac.attach(model, damping=LAMBDA, when="step")
    for m in (model, reference):
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in m.parameters()}
        if m is model:
            for optimizer in optimizers.values():
                handle.bind(optimizer)

        def step(p: Tensor, optimizers: dict[Tensor, torch.optim.Optimizer] = optimizers) -> None:
            optimizers[p].step()
            p.grad = None

        for p in m.parameters():
            p.register_post_accumulate_grad_hook(step)
        for _ in range(2):
            m(x).square().mean().backward()
    same(model, reference)


def test_optimizers_in_the_backward_pass_by_backward() -> None:
    model, x = mlp(), batch()
    reference, _ = dense(model, "backward")
    isaac.attach(model, damping=LAMBDA)
    for m in (model, reference):
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in m.parameters()}

        def step(p: Tensor, optimizers: dict[Tensor, torch.optim.Optimizer] = optimizers) -> None:
            optimizers[p].step()
            p.grad = None

        for p in m.parameters():
            p.register_post_accumulate_grad_hook(step)
        for _ in range(2):
            m(x).square().mean().backward()
    same(model, reference)


def test_a_new_optimizer_that_is_not_bound_is_noticed() -> None:
    """Gradual unfreezing makes a new optimizer and forgets to bind it."""
    model = mlp()
    handle = isaac.attach(model, damping=LAMBDA, when="step")
    handle.bind(torch.optim.SGD(model[2].parameters(), lr=0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(RuntimeWarning):
        for _ in range(4):
            model(batch()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_stepped_by_hand_and_by_the_optimizer() -> None:
    """Both handle.step() and a bound optimizer: conditioned once."""
    layer, x = nn.Linear(6, 4, bias=False).double(), batch()
    handle = isaac.attach(layer, damping=LAMBDA, when="step")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    handle.bind(optimizer)
    layer(x).sum().backward()
    with pytest.raises(RuntimeError, match="bound"):
        handle.step()
    optimizer.step()
    close(layer.weight.grad, zeta_star(torch.ones(5, 4, dtype=torch.float64), x))


def test_bound_twice_is_conditioned_once() -> None:
    layer, x = nn.Linear(6, 4, bias=False).double(), batch()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    handle = isaac.attach(layer, damping=LAMBDA, when="step").bind(optimizer)
    with pytest.raises(ValueError, match="already bound"):
        handle.bind(optimizer)
    layer(x).sum().backward()
    optimizer.step()
    close(layer.weight.grad, zeta_star(torch.ones(5, 4, dtype=torch.float64), x))


# Weights that are not parameters.


def test_functional_call_with_fast_weights() -> None:
    """First-order MAML: an inner step by autograd.grad, the outer loss at the fast weights."""
    model, support, query = mlp(), batch(), batch(7)
    reference, _ = dense(model, "backward")
    isaac.attach(model, damping=LAMBDA)

    def outer(m: nn.Module) -> None:
        weights = dict(m.named_parameters())
        inner = torch.autograd.grad(m(support).square().mean(), list(weights.values()))
        fast = {k: w - 0.1 * g for (k, w), g in zip(weights.items(), inner, strict=True)}
        torch.func.functional_call(m, fast, query).square().mean().backward()

    outer(model)
    outer(reference)
    same(model, reference)


def test_second_order_maml() -> None:
    """Second order: create_graph through a conditioned gradient."""
    model, support, query = mlp(), batch(), batch(7)
    reference, _ = dense(model, "backward")
    isaac.attach(model, damping=LAMBDA)

    def outer(m: nn.Module) -> None:
        weights = dict(m.named_parameters())
        inner = torch.autograd.grad(m(support).square().mean(), list(weights.values()), create_graph=True)
        fast = {k: w - 0.1 * g for (k, w), g in zip(weights.items(), inner, strict=True)}
        torch.func.functional_call(m, fast, query).square().mean().backward()

    outer(model)
    outer(reference)
    same(model, reference)


def test_per_sample_gradients_by_vmap() -> None:
    model, x = mlp(), batch()
    reference, _ = dense(model, "backward")
    isaac.attach(model, damping=LAMBDA)
    weights = {k: v.detach() for k, v in model.named_parameters()}

    def loss(w: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(model, w, row[None]).square().mean()

    actual = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
    for i, row in enumerate(x):
        reference.zero_grad()
        reference(row[None]).square().mean().backward()
        for name, p in reference.named_parameters():
            close(actual[name][i], p.grad)


def test_vmapped_forward_and_a_plain_backward() -> None:
    """vmap hides the use from the library: the gradient stays plain, and that is said."""
    layer, x = nn.Linear(6, 4, bias=False).double(), batch()
    isaac.attach(layer, damping=LAMBDA)
    with pytest.warns(RuntimeWarning, match="nobody called"):
        torch.vmap(layer)(x).sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_forward_mode() -> None:
    model, x = mlp(), batch()
    plain = copy.deepcopy(model)
    isaac.attach(model, damping=LAMBDA)
    close(torch.func.jvp(model, (x,), (x,))[1], torch.func.jvp(plain, (x,), (x,))[1])


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_jacobian_and_hessian_of_inputs_are_exact() -> None:
    model, x = mlp(), batch(1)
    plain = copy.deepcopy(model)
    isaac.attach(model, damping=LAMBDA)
    for take in (torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
        close(take(lambda y: model(y).square().sum())(x), take(lambda y: plain(y).square().sum())(x))


def test_gradient_penalty_of_a_critic() -> None:
    """WGAN-GP: all that reaches a weight through a use is conditioned by the rows of that use."""
    model, x = mlp(), batch().requires_grad_()
    reference, _ = dense(model, "backward")
    isaac.attach(model, damping=LAMBDA)
    for m in (model, reference):
        output = m(x)
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (output.mean() + (gradient.norm(dim=1) - 1).square().mean()).backward()
    same(model, reference)


PARAMETRIZED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}


@pytest.mark.parametrize("kind", list(PARAMETRIZED))
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.filterwarnings("default")
def test_parametrized_weights(kind: str, moment: str) -> None:
    """ζ* of the weight, then the parametrization's own chain rule; or plain, with a reason."""
    layer, x = nn.Linear(6, 4, bias=False).double(), batch()
    plain = copy.deepcopy(layer)
    if moment == "before":
        PARAMETRIZED[kind](layer)
    handle = isaac.attach(layer, damping=LAMBDA)
    if moment == "after":
        PARAMETRIZED[kind](layer)
    layer.eval()
    layer(x).square().sum().backward()
    gradients = {name: p.grad for name, p in layer.named_parameters()}
    layer.zero_grad()
    weight = layer.weight if kind != "prune" else layer.weight_orig * layer.weight_mask
    g = 2 * F.linear(x, weight).detach()
    conditioned = torch.autograd.grad(weight, list(layer.parameters()), zeta_star(g, x))
    for actual, expected in zip(gradients.values(), conditioned, strict=True):
        close(actual, expected)
    assert handle.conditioned and plain is not None


def test_a_hypernetwork_writes_the_weight() -> None:
    """The weight is a tensor that another network computes at each step."""
    layer, hyper, x = nn.Linear(6, 4, bias=False).double(), nn.Linear(3, 24).double(), batch()
    isaac.attach(layer, damping=LAMBDA)
    z = torch.randn(3, dtype=torch.float64)
    del layer.weight
    layer.weight = hyper(z).view(4, 6)
    layer(x).sum().backward()
    expected = zeta_star(torch.ones(5, 4, dtype=torch.float64), x)
    close(hyper.bias.grad, expected.flatten())


def test_lazy_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="no weights yet"):
        isaac.attach(nn.LazyLinear(4), damping=LAMBDA)


def test_an_input_made_of_the_weight_itself() -> None:
    layer = nn.Linear(6, 6, bias=False).double()
    weight = layer.weight.detach().clone().requires_grad_()
    isaac.attach(layer, damping=LAMBDA)
    layer(layer.weight).square().sum().backward()
    DenseFunction.apply(weight, weight, None, None).square().sum().backward()
    close(layer.weight.grad, weight.grad)
