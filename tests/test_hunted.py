"""Training loops as users write them, each compared with a dense float64 reference made from the definition alone."""

import copy
import io
import math
import pickle
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune, rnn
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
        def condition(*_: Any) -> None:
            mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        anomaly = torch.autograd.detect_anomaly(check_nan=True)
    with anomaly:
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
    (jacobian,) = torch.autograd.grad(
        output.sum(0), x, torch.eye(4, dtype=torch.float64), retain_graph=True, is_grads_batched=True
    )
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

    def train() -> None:
        for _ in range(3):
            twins_optimizer.zero_grad()
            twin(batch()).square().mean().backward()
            twins_optimizer.step()

    with pytest.warns(RuntimeWarning, match="bind"):
        train()


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

    def train() -> None:
        for _ in range(3):
            parts = []
            for rows in (4, 5):
                optimizer.zero_grad()
                layer(batch(rows)).sum().backward()
                parts.append(layer.weight.grad.clone())
            layer.weight.grad = parts[0] + parts[1]
            optimizer.step()

    with pytest.warns(RuntimeWarning, match="gathering"):
        train()


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

    def train() -> None:
        for _ in range(4):
            model(batch()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.warns(RuntimeWarning, match="bind"):
        train()


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
    assert handle.conditioned


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


# Other layers: one use, so that the conditioned gradient is ∇ (I + rᵀr/(kλ))⁻¹ with the rows r of that use.


def conditioned(
    layer: nn.Module, call: Callable[[nn.Module], Tensor], rows: dict[str, Tensor], when: str = "backward", **options: Any
) -> None:
    """`rows` has those of each conditioned weight (grouped: a list dimension first); all other gradients stay plain."""
    plain = copy.deepcopy(layer)
    handle = isaac.attach(layer, damping=LAMBDA, when=when, **options)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    if when == "step":
        handle.bind(optimizer)
    call(layer).square().sum().backward()
    optimizer.step()
    call(plain).square().sum().backward()
    for (name, p), q in zip(layer.named_parameters(), plain.parameters(), strict=True):
        expected = q.grad.to_dense() if q.grad.is_sparse else q.grad
        if name in rows:
            r = rows[name]
            grouped = expected.reshape(len(r), -1, r.shape[-1]) if r.dim() == 3 else expected.reshape(1, -1, r.shape[-1])
            parts = [g @ conditioner(a) for g, a in zip(grouped, r if r.dim() == 3 else r[None], strict=True)]
            expected = torch.stack(parts).reshape(expected.shape)
        close(p.grad.to_dense() if p.grad.is_sparse else p.grad, expected)


def patches(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """(groups, rows, features) of a convolution, its padding applied."""
    if conv.padding_mode == "zeros":
        how = {"padding": conv.padding}
    else:
        ph, pw = conv.padding
        x, how = F.pad(x, (pw, pw, ph, ph), mode=conv.padding_mode), {}
    columns = F.unfold(x, conv.kernel_size, dilation=conv.dilation, stride=conv.stride, **how)
    n, features, places = columns.shape
    return (
        columns.view(n, conv.groups, features // conv.groups, places).permute(1, 0, 3, 2).reshape(conv.groups, n * places, -1)
    )


CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "groups": {"groups": 2},
    "depthwise": {"groups": 4},
    "dilation": {"dilation": 2},
    "stride": {"stride": 2, "padding": 1},
    "circular": {"padding": 1, "padding_mode": "circular"},
    "reflect": {"padding": (1, 2), "padding_mode": "reflect"},
    "replicate": {"padding": 2, "padding_mode": "replicate"},
}


@pytest.mark.parametrize("when", ["backward", "step"])
@pytest.mark.parametrize("kind", list(CONVOLUTIONS))
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "expanded"])
def test_convolutions(kind: str, layout: str, when: str) -> None:
    conv, x = nn.Conv2d(4, 8, 3, **CONVOLUTIONS[kind]).double(), torch.randn(3, 4, 7, 8, dtype=torch.float64)
    if layout == "channels_last":
        conv, x = conv.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    if layout == "expanded":
        x = x[:1].expand(3, -1, -1, -1)
    conditioned(conv, lambda m: m(x), {"weight": patches(x, conv)}, when)


def test_same_padding_of_an_even_kernel() -> None:
    """padding="same" pads one side more than the other."""
    conv, x = nn.Conv1d(3, 4, 4, padding="same", dilation=1).double(), torch.randn(2, 3, 9, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        conditioned(conv, lambda m: m(x), {"weight": F.pad(x, (1, 2)).unfold(2, 4, 1).permute(0, 2, 1, 3).reshape(18, 12)})


@pytest.mark.parametrize("when", ["backward", "step"])
def test_conv1d_without_a_batch(when: str) -> None:
    conv, x = nn.Conv1d(3, 4, 3).double(), torch.randn(3, 9, dtype=torch.float64)
    conditioned(conv, lambda m: m(x), {"weight": x.unfold(1, 3, 1).permute(1, 0, 2).reshape(7, 9)}, when)


def test_conv_called_for_one_image_and_reduced() -> None:
    conv, x = nn.Conv2d(3, 4, 3).double(), torch.randn(3, 6, 6, dtype=torch.float64)
    conditioned(conv, lambda m: m(x), {"weight": patches(x[None], conv).mean(1)}, sharing="reduce")


@pytest.mark.parametrize("options", [{}, {"stride": 2, "padding": 1, "output_padding": 1}, {"dilation": 2}])
def test_transposed_convolutions(options: dict[str, Any]) -> None:
    """The places of the input are the rows; the weight has its features in dimension 0."""
    conv, x = nn.ConvTranspose2d(4, 5, 3, **options).double(), torch.randn(2, 4, 5, 5, dtype=torch.float64)
    plain = copy.deepcopy(conv)
    isaac.attach(conv, damping=LAMBDA)
    conv(x).square().sum().backward()
    plain(x).square().sum().backward()
    rows = x.permute(0, 2, 3, 1).reshape(-1, 4)
    close(conv.weight.grad, (conditioner(rows) @ plain.weight.grad.reshape(4, -1)).view_as(plain.weight))


def test_transposed_convolution_with_output_size() -> None:
    conv, x = nn.ConvTranspose1d(4, 5, 3, stride=2).double(), torch.randn(2, 4, 5, dtype=torch.float64)
    plain = copy.deepcopy(conv)
    isaac.attach(conv, damping=LAMBDA)
    conv(x, output_size=[12]).square().sum().backward()
    plain(x, output_size=[12]).square().sum().backward()
    rows = x.permute(0, 2, 1).reshape(-1, 4)
    close(conv.weight.grad, (conditioner(rows) @ plain.weight.grad.reshape(4, -1)).view_as(plain.weight))


EMBEDDINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"padding_idx": 0},
    "negative padding": {"padding_idx": -1},
    "norm": {"max_norm": 0.5},
    "frequency": {"scale_grad_by_freq": True},
    "sparse": {"sparse": True},
    "sparse padding": {"sparse": True, "padding_idx": 0},
}


@pytest.mark.parametrize("when", ["backward", "step"])
@pytest.mark.parametrize("kind", list(EMBEDDINGS))
def test_embeddings(kind: str, when: str) -> None:
    """One-hot rows: each token's gradient is divided by 1 + count/(bλ); padding does not count."""
    layer, tokens = nn.Embedding(6, 3, **EMBEDDINGS[kind]).double(), torch.tensor([[0, 0, 1, 5], [2, 1, 1, 5]])
    plain = copy.deepcopy(layer)
    handle = isaac.attach(layer, damping=LAMBDA, when=when)
    layer(tokens).square().sum().backward()
    plain(tokens).square().sum().backward()
    if when == "step":
        handle.step()
    kept = tokens[tokens != layer.padding_idx] if layer.padding_idx is not None else tokens.flatten()
    counts = torch.bincount(kept.flatten(), minlength=6).double()
    expected = plain.weight.grad.to_dense() / (1 + counts / (len(kept.flatten()) * LAMBDA))[:, None]
    close(layer.weight.grad.to_dense(), expected)
    close(layer.weight, plain.weight)


@pytest.mark.parametrize("when", ["backward", "step"])
def test_sparse_embeddings_accumulate(when: str) -> None:
    """Sparse gradients of two micro-batches are not coalesced."""
    layer = nn.Embedding(6, 3, sparse=True).double()
    parts = [torch.tensor([0, 1, 1, 5]), torch.tensor([1, 2])]
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    handle = isaac.attach(layer, damping=LAMBDA, when=when)
    if when == "step":
        handle.bind(optimizer)
    for tokens in parts:
        layer(tokens).sum().backward()
    optimizer.step()
    counts = [torch.bincount(t, minlength=6).double() for t in parts]
    if when == "step":
        total = counts[0] + counts[1]
        expected = total / (1 + total / (6 * LAMBDA))
    else:
        expected = sum(c / (1 + c / (n * LAMBDA)) for c, n in zip(counts, (4, 2), strict=True))
    close(layer.weight.grad.to_dense(), expected[:, None].expand(6, 3))


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize("norm", [None, 0.5])
def test_embedding_bags(mode: str, padding: int | None, norm: float | None) -> None:
    """A row is what is in a bag."""
    bag = nn.EmbeddingBag(6, 3, mode=mode, padding_idx=padding, max_norm=norm).double()
    tokens, offsets = torch.tensor([0, 1, 1, 5, 2, 0, 3]), torch.tensor([0, 4, 5])
    rows = torch.zeros(3, 6, dtype=torch.float64)
    for i, part in enumerate(tokens.tensor_split([4, 5])):
        part = part if padding is None else part[part != padding]
        for token in part:
            rows[i, token] += 1 / len(part) if mode == "mean" else 1
    plain = copy.deepcopy(bag)
    isaac.attach(bag, damping=LAMBDA)
    bag(tokens, offsets).square().sum().backward()
    plain(tokens, offsets).square().sum().backward()
    close(bag.weight.grad, conditioner(rows) @ plain.weight.grad)


def test_embedding_bag_with_weights_of_samples() -> None:
    bag = nn.EmbeddingBag(6, 3, mode="sum", include_last_offset=True).double()
    tokens, offsets = torch.tensor([0, 1, 1, 5, 2]), torch.tensor([0, 4, 5])
    weights = torch.rand(5, dtype=torch.float64)
    rows = torch.zeros(2, 6, dtype=torch.float64)
    for i, token in enumerate(tokens):
        rows[int(i == 4), token] += weights[i]
    plain = copy.deepcopy(bag)
    isaac.attach(bag, damping=LAMBDA)
    bag(tokens, offsets, weights).square().sum().backward()
    plain(tokens, offsets, weights).square().sum().backward()
    close(bag.weight.grad, conditioner(rows) @ plain.weight.grad)


@pytest.mark.parametrize("when", ["backward", "step"])
@pytest.mark.parametrize("ordered", [True, False])
def test_a_packed_bidirectional_lstm(ordered: bool, when: str) -> None:
    lstm, x = nn.LSTM(4, 3, bidirectional=True, batch_first=True).double(), torch.randn(3, 5, 4, dtype=torch.float64)
    lengths = torch.tensor([5, 3, 2]) if ordered else torch.tensor([2, 5, 3])

    def call(m: nn.Module) -> Tensor:
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=ordered)
        return rnn.pad_packed_sequence(m(packed)[0], batch_first=True)[0]

    outputs = call(lstm).detach()
    inputs = torch.cat([x[i, :n] for i, n in enumerate(lengths)])
    zero = torch.zeros(1, 3, dtype=torch.float64)
    forward = torch.cat([torch.cat([zero, outputs[i, : n - 1, :3]]) for i, n in enumerate(lengths)])
    backward = torch.cat([torch.cat([outputs[i, 1:n, 3:], zero]) for i, n in enumerate(lengths)])
    rows = {"weight_ih_l0": inputs, "weight_ih_l0_reverse": inputs}
    conditioned(lstm, call, {**rows, "weight_hh_l0": forward, "weight_hh_l0_reverse": backward}, when)


@pytest.mark.parametrize("when", ["backward", "step"])
def test_a_cell_in_a_loop(when: str) -> None:
    """By backward each call has its conditioner, at the step all calls have one."""
    cell, xs = nn.GRUCell(4, 3, bias=False).double(), torch.randn(3, 5, 4, dtype=torch.float64)
    handle = isaac.attach(cell, damping=LAMBDA, when=when)
    plain = [copy.deepcopy(cell) for _ in xs]
    isaac.detach(plain[0])
    for p in plain[1:]:
        isaac.detach(p)

    def run(cells: list[nn.Module]) -> list[Tensor]:
        states = [torch.zeros(5, 3, dtype=torch.float64)]
        for c, x in zip(cells, xs, strict=True):
            states.append(c(x, states[-1]))
        states[-1].square().sum().backward()
        return [s.detach() for s in states[:-1]]

    states = run([cell] * 3)
    run(plain)
    if when == "step":
        handle.step()
        expected = sum(p.weight_hh.grad for p in plain) @ conditioner(torch.cat(states))
    else:
        expected = sum(p.weight_hh.grad @ conditioner(s) for p, s in zip(plain, states, strict=True))
    close(cell.weight_hh.grad, expected)


@pytest.mark.parametrize("when", ["backward", "step"])
@pytest.mark.parametrize("mode", ["train", "eval", "padded", "padded eval"])
def test_a_transformer_layer(mode: str, when: str) -> None:
    """In eval() torch has a fast path; with gradients it must not be taken. Padding counts unless handle.mask is set."""
    model, x = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True).double(), torch.randn(3, 4, 6).double()
    mask = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 1]]).bool() if "padded" in mode else None
    model.train("eval" not in mode)
    seen: dict[str, Tensor] = {}
    hooks = [model.linear1.register_forward_pre_hook(lambda m, a: seen.update(one=a[0].detach().reshape(-1, 6)))]
    hooks.append(model.linear2.register_forward_pre_hook(lambda m, a: seen.update(two=a[0].detach().reshape(-1, 8))))
    model(x, src_key_padding_mask=mask).sum().backward()
    model.zero_grad()
    for hook in hooks:
        hook.remove()
    rows = {"linear1.weight": seen["one"], "linear2.weight": seen["two"], "self_attn.in_proj_weight": x.reshape(-1, 6)}
    plain = copy.deepcopy(model)
    handle = isaac.attach(model, damping=LAMBDA, when=when)
    model(x, src_key_padding_mask=mask).square().sum().backward()
    plain(x, src_key_padding_mask=mask).square().sum().backward()
    if when == "step":
        handle.step()
    named = dict(plain.named_parameters())
    for name, r in rows.items():
        close(model.get_parameter(name).grad, named[name].grad @ conditioner(r))


def test_attention_with_masks_and_other_sizes() -> None:
    """Queries, keys and values of their own, kdim and vdim, a causal mask."""
    layer = nn.MultiheadAttention(6, 2, kdim=4, vdim=5, batch_first=True).double()
    q, k, v = (torch.randn(3, 4, n, dtype=torch.float64) for n in (6, 4, 5))
    causal = torch.ones(4, 4).triu(1).bool()
    plain = copy.deepcopy(layer)
    isaac.attach(layer, damping=LAMBDA)
    layer(q, k, v, attn_mask=causal, need_weights=False)[0].square().sum().backward()
    plain(q, k, v, attn_mask=causal)[0].square().sum().backward()
    for name, x in {"q_proj_weight": q, "k_proj_weight": k, "v_proj_weight": v}.items():
        close(getattr(layer, name).grad, getattr(plain, name).grad @ conditioner(x))


# Options.


def test_a_stale_mask() -> None:
    """A mask of another batch's shape matches no input: all rows count, and that is said."""
    layer, x = nn.Linear(6, 4, bias=False).double(), torch.randn(3, 4, 6, dtype=torch.float64)
    handle = isaac.attach(layer, damping=LAMBDA)
    handle.mask = torch.ones(2, 4).bool()
    with pytest.warns(RuntimeWarning, match="inputs do not begin"):
        layer(x).sum().backward()
    close(layer.weight.grad, zeta_star(torch.ones(12, 4, dtype=torch.float64), x))


@pytest.mark.parametrize("when", ["backward", "step"])
def test_a_mask_changed_between_forward_and_backward(when: str) -> None:
    """The mask of the forward pass is meant."""
    layer, x = nn.Linear(6, 4, bias=False).double(), torch.randn(3, 4, 6, dtype=torch.float64)
    handle = isaac.attach(layer, damping=LAMBDA, when=when)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]).bool()
    handle.mask = mask
    loss = (layer(x) * mask[..., None]).sum()
    handle.mask = None
    loss.backward()
    if when == "step":
        handle.step()
    close(layer.weight.grad, zeta_star(torch.ones(7, 4, dtype=torch.float64), x[mask]))


@pytest.mark.parametrize("when", ["backward", "step"])
def test_a_mask_written_over_in_place(when: str) -> None:
    """A user's mask buffer is refilled for the next batch before the backward pass of this one."""
    layer, x = nn.Linear(6, 4, bias=False).double(), torch.randn(3, 4, 6, dtype=torch.float64)
    handle = isaac.attach(layer, damping=LAMBDA, when=when)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]).bool()
    kept = mask.clone()
    handle.mask = mask
    loss = (layer(x) * mask[..., None].double()).sum()
    mask.fill_(True)
    loss.backward()
    if when == "step":
        handle.step()
    close(layer.weight.grad, zeta_star(torch.ones(7, 4, dtype=torch.float64), x[kept]))


def test_max_rows_beyond_the_rows() -> None:
    model, x = mlp(), batch()
    reference, _ = dense(model, "backward")
    isaac.attach(model, damping=LAMBDA, max_rows=50)
    model(x).square().mean().backward()
    reference(x).square().mean().backward()
    same(model, reference)


@pytest.mark.parametrize("when", ["backward", "step"])
@pytest.mark.parametrize("frozen", [None, "weight", "bias"])
def test_a_joint_bias(when: str, frozen: str | None) -> None:
    """A frozen bias is no column; under a frozen weight the bias stays plain."""
    layer, x = nn.Linear(6, 4).double(), batch()
    if frozen:
        getattr(layer, frozen).requires_grad_(False)
    handle = isaac.attach(layer, damping=LAMBDA, bias="joint", when=when)
    for part in x.split([2, 3]) if when == "step" else [x]:
        layer(part).sum().backward()
    if when == "step":
        handle.step()
    ones = torch.ones(5, 4, dtype=torch.float64)
    joint = zeta_star(ones, torch.cat([x, ones[:, :1]], 1))
    close(layer.weight.grad, {None: joint[:, :-1], "weight": None, "bias": zeta_star(ones, x)}[frozen])
    close(layer.bias.grad, {None: joint[:, -1], "weight": ones.sum(0), "bias": None}[frozen])


@pytest.mark.parametrize("when", ["backward", "step"])
def test_keep_norm(when: str) -> None:
    layer, x, ones = nn.Linear(6, 4, bias=False).double(), batch(), torch.ones(5, 4, dtype=torch.float64)
    handle = isaac.attach(layer, damping=LAMBDA, keep_norm=True, when=when)
    layer(x).sum().backward()
    if when == "step":
        handle.step()
    z = zeta_star(ones, x)
    close(layer.weight.grad, z * (ones.T @ x).norm() / z.norm())


def test_keep_norm_of_two_uses() -> None:
    """Siamese: each use's ζ* gets the norm of its plain gradient, or their sum that of the sum."""
    layer, a, b = nn.Linear(6, 4, bias=False).double(), batch(), batch(7)
    isaac.attach(layer, damping=LAMBDA, keep_norm=True)
    (layer(a).sum() - layer(b).sum()).backward()
    plain = [torch.ones(5, 4).double().T @ a, -torch.ones(7, 4).double().T @ b]
    zetas = [zeta_star(torch.ones(5, 4).double(), a), -zeta_star(torch.ones(7, 4).double(), b)]
    each = sum(z * p.norm() / z.norm() for z, p in zip(zetas, plain, strict=True))
    close(layer.weight.grad, each)


def test_nothing_given() -> None:
    """λ is a tenth of the largest eigenvalue, at most 64 rows, the norm is kept."""
    layer, ones = nn.Linear(6, 4, bias=False).double(), torch.ones(5, 4, dtype=torch.float64)
    x = batch() + 3  # the largest eigenvalue stands out: its estimate is good to four digits
    isaac.attach(layer)
    layer(x).sum().backward()
    z = zeta_star(ones, x, 0.1 * float(torch.linalg.eigvalsh(x.T @ x / 5)[-1]))
    close(layer.weight.grad, z * (ones.T @ x).norm() / z.norm(), 1e-3)


def test_inspecting_changes_nothing() -> None:
    model, x = mlp(), batch()
    reference, _ = dense(model, "backward")
    handle = isaac.attach(model, damping=LAMBDA)
    with handle.inspecting():
        model(x).square().mean().backward()
    reference(x).square().mean().backward()
    same(model, reference)


@pytest.mark.parametrize("curvature", ["empirical", "exact"])
def test_zeta_with_accumulation(curvature: str) -> None:
    """Two micro-batches by handle.backward: the sum of their ζ."""
    layer, loss_fn = nn.Linear(6, 4, bias=False).double(), nn.CrossEntropyLoss()
    handle = isaac.attach(layer, damping=LAMBDA, output_damping=0.2, output_curvature=curvature)
    expected = torch.zeros(4, 6, dtype=torch.float64)
    for rows in (5, 7):
        x, y = batch(rows), torch.randint(4, (rows,))
        output = layer(x)
        handle.backward(loss_fn(output, y) / 2, output, loss_fn)
        p = output.detach().softmax(1)
        g = (p - F.one_hot(y, 4)) / rows
        eye = torch.eye(4, dtype=torch.float64)
        exact = torch.cat([p[:, [k]].sqrt() * (eye[k] - p) for k in range(4)])
        bar = exact if curvature == "exact" else rows * g
        left = 0.2 * torch.linalg.inv(bar.T @ bar / rows + 0.2 * eye)
        expected += left @ zeta_star(g, x) / 2
    close(layer.weight.grad, expected)


def test_zeta_by_a_plain_backward_says_so() -> None:
    layer = nn.Linear(6, 4, bias=False).double()
    isaac.attach(layer, damping=LAMBDA, output_damping=0.2)
    with pytest.raises(RuntimeError, match=r"handle\.backward"):
        layer(batch()).square().mean().backward()


def test_isaacs_own_linear() -> None:
    model, x = nn.Sequential(isaac.Linear(6, 7, LAMBDA), nn.Tanh(), isaac.Linear(7, 4, LAMBDA)).double(), batch()
    plain = mlp()
    plain.load_state_dict(model.state_dict())
    reference, _ = dense(plain, "backward")
    copy.deepcopy(model)(x).square().mean().backward()
    for m in (model, reference):
        checkpoint(m, x, use_reentrant=False).square().mean().backward()
    same(model, reference)


def test_an_ensemble_steps_as_separate_runs() -> None:
    models, x, y = [mlp(), mlp()], batch(), torch.randint(4, (5,))
    ensemble = isaac.Ensemble(copy.deepcopy(models), damping=[0.1, 0.7])
    optimizer = torch.optim.SGD(ensemble.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        loss = sum(F.cross_entropy(output, y) for output in ensemble(x))
        loss.backward()
        optimizer.step()
    for model, twin, damping in zip(models, ensemble.separate(), (0.1, 0.7), strict=True):
        isaac.attach(model, damping=damping)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        same_weights = zip(model.parameters(), twin.parameters(), strict=True)
        for p, q in same_weights:
            close(p, q)


# Libraries, and models that are called in other ways.


def rows_of(model: nn.Module, *names: str) -> dict[str, Tensor]:
    """What these layers will have received, once the model was called."""
    seen: dict[str, Tensor] = {}
    for name in names:

        def note(m: nn.Module, args: tuple[Tensor], name: str = name) -> None:
            seen[name] = args[0].detach()

        model.get_submodule(name).register_forward_pre_hook(note)
    return seen


@pytest.mark.parametrize("when", ["backward", "step"])
@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32])
def test_a_bert_with_padding(dtype: torch.dtype, when: str) -> None:
    """The attention mask of the call says which rows count."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=11,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = transformers.BertModel(config, add_pooling_layer=False).double()
    plain = copy.deepcopy(model)
    tokens, mask = torch.randint(11, (3, 5)), (torch.arange(5) < torch.tensor([5, 3, 2])[:, None]).to(dtype)
    names = [name for name, m in plain.named_modules() if type(m) is nn.Linear]
    seen = rows_of(plain, *names)
    handle = isaac.attach(model, damping=LAMBDA, when=when)
    for m in (model, plain):
        output = m(input_ids=tokens, attention_mask=mask).last_hidden_state
        (output * mask[..., None]).square().sum().backward()
    if when == "step":
        handle.step()
    assert len(names) == 6
    for name in names:
        expected = plain.get_submodule(name).weight.grad @ conditioner(seen[name][mask.bool()])
        close(model.get_submodule(name).weight.grad, expected)


@pytest.mark.parametrize("when", ["backward", "step"])
def test_a_gpt2_whose_mask_is_refilled_in_micro_batches(when: str) -> None:
    """One mask buffer for all micro-batches, two graphs alive."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2, attn_pdrop=0.0)
    config.resid_pdrop = config.embd_pdrop = 0.0
    model = transformers.GPT2Model(config).double()
    plain = copy.deepcopy(model)
    name, mask = "h.0.mlp.c_fc", torch.zeros(2, 4).bool()
    seen, kept = rows_of(plain, name), []
    batches = [(torch.randint(11, (2, 4)), torch.arange(4) < torch.tensor(n)[:, None]) for n in ([4, 2], [3, 3])]
    handle = isaac.attach(model, damping=LAMBDA, when=when)
    losses = []
    for tokens, lengths in batches:
        mask.copy_(lengths)
        losses.append(model(input_ids=tokens, attention_mask=mask).last_hidden_state.square().sum())
    sum(losses).backward()
    if when == "step":
        handle.step()
    for tokens, lengths in batches:
        plain.zero_grad()
        plain(input_ids=tokens, attention_mask=lengths).last_hidden_state.square().sum().backward()
        kept.append((plain.get_submodule(name).weight.grad.T.clone(), seen[name][lengths]))
    if when == "step":
        expected = sum(g for g, _ in kept) @ conditioner(torch.cat([a for _, a in kept]))
    else:
        expected = sum(g @ conditioner(a) for g, a in kept)
    close(model.get_submodule(name).weight.grad.T, expected)


@pytest.mark.parametrize("when", ["backward", "step"])
def test_lora_by_peft_merged_and_unmerged(when: str) -> None:
    """Adapters are merged for an evaluation and unmerged again; A sees the inputs, B what A makes of them."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["0", "2"], r=2, init_lora_weights=False, lora_dropout=0.0)
    model = peft.get_peft_model(mlp(), config).double()
    x = batch()
    handle = isaac.attach(model, damping=LAMBDA, when=when)
    model.merge_adapter()
    with torch.no_grad():
        model(x)
    model.unmerge_adapter()
    model(x).square().mean().backward()
    if when == "step":
        handle.step()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    handle.detach()
    model.zero_grad()
    seen = rows_of(model, *[n.removesuffix(".weight") for n in found])
    model(x).square().mean().backward()
    assert len(found) == 4
    for name, gradient in found.items():
        plain = model.get_parameter(name).grad
        close(gradient, plain @ conditioner(seen[name.removesuffix(".weight")]))


def test_two_lora_adapters_switched() -> None:
    """set_adapter in the loop: each adapter is conditioned when it is active."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["0"], r=2, init_lora_weights=False, lora_dropout=0.0)
    model = peft.get_peft_model(mlp(), config)
    model.add_adapter("second", config)
    model, x = model.double(), batch()
    handle = isaac.attach(model, damping=LAMBDA)
    model.set_adapter("second")
    model(x).square().mean().backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    handle.detach()
    model.zero_grad()
    seen = rows_of(model, *[n.removesuffix(".weight") for n in found])
    model(x).square().mean().backward()
    assert len(found) == 2
    for name, gradient in found.items():
        close(gradient, model.get_parameter(name).grad @ conditioner(seen[name.removesuffix(".weight")]))


@pytest.mark.parametrize("moment", ["before", "after"])
def test_accelerates_hooks(moment: str) -> None:
    """add_hook_to_module puts another forward into the layer, before or after attach."""
    hooks = pytest.importorskip("accelerate.hooks")
    model, x = mlp(), batch()
    reference, _ = dense(model, "backward")
    if moment == "before":
        hooks.add_hook_to_module(model[0], hooks.ModelHook())
    handle = isaac.attach(model, damping=LAMBDA)
    if moment == "after":
        hooks.add_hook_to_module(model[0], hooks.ModelHook())
    model(x).square().mean().backward()
    reference(x).square().mean().backward()
    close(model[2].weight.grad, reference[2].weight.grad)
    if "0" not in handle.skipped:  # which names it, and why
        same(model, reference)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_forward_of_the_users_own(moment: str) -> None:
    """A layer's forward wrapped by hand: conditioned, or named."""
    model, x = mlp(), batch()
    reference, _ = dense(model, "backward")
    handle = None if moment == "before" else isaac.attach(model, damping=LAMBDA)
    inner = model[0].forward
    model[0].forward = lambda y: inner(y * 2) / 2
    handle = handle or isaac.attach(model, damping=LAMBDA)
    inside = reference[0].forward
    reference[0].forward = lambda y: inside(y * 2) / 2
    model(x).square().mean().backward()
    if "0" in handle.skipped:
        model[0].weight.grad = None
        reference(x).square().mean().backward()
        close(model[2].weight.grad, reference[2].weight.grad)
        return
    reference(x).square().mean().backward()
    same(model, reference)


def test_a_tied_head_by_f_linear() -> None:
    """The head uses the embedding's weight without a layer: that share is plain, the embedding's is ζ*."""
    embedding, tokens, x = nn.Embedding(6, 4).double(), torch.tensor([0, 1, 1, 5]), batch(4, 4)
    isaac.attach(embedding, damping=LAMBDA)
    (embedding(tokens).sum() + F.linear(x, embedding.weight).sum()).backward()
    counts = torch.bincount(tokens, minlength=6).double()
    expected = (counts / (1 + counts / (4 * LAMBDA)))[:, None] + torch.ones(4, 6, dtype=torch.float64).T @ x
    close(embedding.weight.grad, expected)


def test_a_second_use_by_f_linear_at_the_step() -> None:
    """`.grad` is conditioned as a whole, by the rows of the layer's own uses."""
    layer, x, y = nn.Linear(6, 4, bias=False).double(), batch(), batch()
    handle = isaac.attach(layer, damping=LAMBDA, when="step")
    (layer(x) + F.linear(y, layer.weight)).sum().backward()
    handle.step()
    close(layer.weight.grad, torch.ones(5, 4, dtype=torch.float64).T @ (x + y) @ conditioner(x))


def test_weight_decay_in_the_loss() -> None:
    """A penalty on the weight itself in the loss: ζ* of the data, and the penalty's gradient as it is."""
    layer, x = nn.Linear(6, 4, bias=False).double(), batch()
    isaac.attach(layer, damping=LAMBDA)
    (layer(x).sum() + 0.5 * layer.weight.square().sum()).backward()
    close(layer.weight.grad, zeta_star(torch.ones(5, 4, dtype=torch.float64), x) + layer.weight)


def test_weight_decay_in_the_loss_at_the_step() -> None:
    """At the step `.grad` is conditioned as a whole, the penalty's part with it."""
    layer, x = nn.Linear(6, 4, bias=False).double(), batch()
    handle = isaac.attach(layer, damping=LAMBDA, when="step")
    (layer(x).sum() + 0.5 * layer.weight.square().sum()).backward()
    handle.step()
    close(layer.weight.grad, (torch.ones(5, 4, dtype=torch.float64).T @ x + layer.weight) @ conditioner(x))


@pytest.mark.parametrize("when", ["backward", "step"])
def test_one_encoder_in_two_models(when: str) -> None:
    """Two heads on one encoder, attached one after the other: refused, or the encoder is conditioned once."""
    encoder = nn.Linear(6, 5, bias=False).double()
    first, second = (nn.Sequential(encoder, nn.Linear(5, 2, bias=False).double()) for _ in range(2))
    isaac.attach(first, damping=LAMBDA, when=when)
    with pytest.raises(ValueError, match="attached"):
        isaac.attach(second, damping=LAMBDA, when=when)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_compiled_in_parts() -> None:
    model, x = mlp(), batch()
    reference, _ = dense(model, "backward")
    isaac.attach(model, damping=LAMBDA)
    model[0] = torch.compile(model[0], backend="aot_eager")
    for m in (model, reference):
        m(x).square().mean().backward()
    same(model, reference)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_compiled_before_attach() -> None:
    model, x = mlp(), batch()
    reference, _ = dense(model, "backward")
    compiled = torch.compile(model, backend="aot_eager")
    compiled(x)
    isaac.attach(model, damping=LAMBDA)
    for m in (compiled, reference):
        m(x).square().mean().backward()
    same(model, reference)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_compiled_and_detached() -> None:
    model, x = mlp(), batch()
    plain = copy.deepcopy(model)
    handle = isaac.attach(model, damping=LAMBDA)
    compiled = torch.compile(model, backend="aot_eager")
    compiled(x).square().mean().backward()
    handle.detach()
    model.zero_grad()
    for m in (compiled, plain):
        m(x).square().mean().backward()
    same(model, plain)


def test_data_parallel_without_devices() -> None:
    model, x = mlp(), batch()
    reference, _ = dense(model, "backward")
    isaac.attach(model, damping=LAMBDA)
    nn.DataParallel(model)(x).square().mean().backward()
    reference(x).square().mean().backward()
    same(model, reference)


@pytest.mark.parametrize("when", ["backward", "step"])
def test_swapped_parameters(when: str) -> None:
    """Conversion by torch.utils.swap_tensors."""
    model, x = mlp().float(), batch()
    reference, _ = dense(copy.deepcopy(model).double(), "backward")
    handle = isaac.attach(model, damping=LAMBDA, when=when)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    for m in (model, reference):
        m(x).square().mean().backward()
    if when == "step":
        handle.step()
    same(model, reference)


def test_averaged_models() -> None:
    model, x = mlp(), batch()
    reference, _ = dense(model, "backward")
    isaac.attach(model, damping=LAMBDA)
    averages = []
    for m in (model, reference):
        average = torch.optim.swa_utils.AveragedModel(m, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            optimizer.step()
            average.update_parameters(m)
        averages.append(average)
        average.module(x).square().mean().backward()
    same(model, reference)
    same(averages[0].module, averages[1].module)


def test_stateless_call_with_other_shapes_of_batch() -> None:
    """An ensemble of heads evaluated by functional_call, gradients by backward into the stacked weights."""
    layer, x = nn.Linear(6, 4, bias=False).double(), batch()
    stacked = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    isaac.attach(layer, damping=LAMBDA)
    for i in range(3):
        torch.func.functional_call(layer, {"weight": stacked[i]}, (x[: i + 2],)).sum().backward()
    for i in range(3):
        close(stacked.grad[i], zeta_star(torch.ones(i + 2, 4, dtype=torch.float64), x[: i + 2]))


@pytest.mark.parametrize("kind", [nn.Parameter, Tensor.requires_grad_])
def test_functional_call_at_the_step_says_so(kind: Callable[[Tensor], Tensor]) -> None:
    """The tensor that receives the gradient is none of the model's parameters: nothing to condition at the step."""
    layer, x = nn.Linear(6, 4, bias=False).double(), batch()
    weight = kind(torch.randn(4, 6, dtype=torch.float64))
    isaac.attach(layer, damping=LAMBDA, when="step")
    with pytest.warns(RuntimeWarning, match="a weight of somebody else"):
        torch.func.functional_call(layer, {"weight": weight}, (x,)).sum().backward()
    close(weight.grad, torch.ones(5, 4, dtype=torch.float64).T @ x)


def test_first_order_maml_at_the_step() -> None:
    """The fast weights pass their gradient on to the parameters, whose conditioner has the rows of the query."""
    layer, support, query = nn.Linear(6, 4, bias=False).double(), batch(), batch(7)
    handle = isaac.attach(layer, damping=LAMBDA, when="step")
    (inner,) = torch.autograd.grad(layer(support).square().mean(), layer.weight)
    fast = {"weight": layer.weight - 0.1 * inner}
    torch.func.functional_call(layer, fast, (query,)).sum().backward()
    handle.step()
    close(layer.weight.grad, zeta_star(torch.ones(7, 4, dtype=torch.float64), query))


def test_inputs_made_in_inference_mode() -> None:
    """A frozen backbone in inference_mode feeds the head; torch wants a clone, then all is as usual."""
    model = mlp()
    reference, _ = dense(model, "backward")
    with torch.inference_mode():
        x = batch().tanh()
    x = x.clone()
    isaac.attach(model, damping=LAMBDA)
    for m in (model, reference):
        m(x).square().mean().backward()
    same(model, reference)


def test_an_input_written_over_raises_as_torch_does() -> None:
    layer, x = nn.Linear(6, 4, bias=False).double(), batch()
    isaac.attach(layer, damping=LAMBDA)
    loss = layer(x).sum()
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_complex_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="complex"):
        isaac.attach(nn.Linear(6, 4, dtype=torch.cdouble), damping=LAMBDA)


@pytest.mark.parametrize("when", ["backward", "step"])
def test_large_inputs_in_float32(when: str) -> None:
    """Large inputs, small damping, float32: near the definition in float64 nevertheless."""
    layer, x = nn.Linear(6, 4, bias=False), batch() * 100 + 50
    handle = isaac.attach(layer, damping=0.01, when=when)
    layer(x.float()).sum().backward()
    if when == "step":
        handle.step()
    close(layer.weight.grad, zeta_star(torch.ones(5, 4, dtype=torch.float64), x.float().double(), 0.01), 1e-2)


def test_lightnings_manual_optimization() -> None:
    """Two optimizers stepped by hand, when="step", against a loop."""
    pl = pytest.importorskip("lightning.pytorch")
    from isaac_newton.integrations.lightning import IsaacCallback

    class Model(pl.LightningModule):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net, self.automatic_optimization = net, False

        def training_step(self, x: Tensor, index: int) -> None:
            self.manual_backward(self.net(x).square().mean())
            first, second = self.optimizers()
            first.step()
            first.zero_grad()
            if index % 2:
                second.step()
                second.zero_grad()

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [torch.optim.SGD(self.net[i].parameters(), lr=0.1) for i in (0, 2)]

    net, data = mlp(), [batch(3), batch(4), batch(5), batch(6)]
    reference, bind = dense(net, "step")
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(max_epochs=1, accelerator="cpu", callbacks=[IsaacCallback(damping=LAMBDA, when="step")], **quiet)
        trainer.fit(Model(net), torch.utils.data.DataLoader(data, batch_size=None))
    first, second = (bind(torch.optim.SGD(reference[i].parameters(), lr=0.1)) for i in (0, 2))
    for i, x in enumerate(data):
        reference(x).square().mean().backward()
        first.step()
        first.zero_grad()
        if i % 2:
            second.step()
            second.zero_grad()
    for p, q in zip(net.parameters(), reference.parameters(), strict=True):
        close(p, q)


# More loops.


@pytest.mark.parametrize("when", ["backward", "step"])
def test_a_linear_over_packed_data(when: str) -> None:
    """A layer over the data of a packed sequence: padding is no row."""
    layer, x = nn.Linear(6, 4, bias=False).double(), torch.randn(3, 5, 6, dtype=torch.float64)
    packed = rnn.pack_padded_sequence(x, torch.tensor([5, 3, 2]), batch_first=True)
    conditioned(layer, lambda m: m(packed.data), {"weight": packed.data}, when)


@pytest.mark.parametrize("when", ["backward", "step"])
def test_a_mixture_of_experts(when: str) -> None:
    """Experts see the tokens that were sent to them; one may see none in a step, and none in any."""

    def loop(model: nn.Module, bind: Bind) -> None:
        optimizer = sgd(model, bind)
        for routed in ([0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]):
            optimizer.zero_grad()
            x, to = batch(), torch.tensor(routed)
            sum(expert(x[to == i]).square().sum() for i, expert in enumerate(model)).backward()
            optimizer.step()

    compare(loop, nn.ModuleList([nn.Linear(6, 4) for _ in range(3)]).double(), when)


@pytest.mark.parametrize("when", ["backward", "step"])
def test_a_gan(when: str) -> None:
    """Two optimizers and two losses; the generator's loss runs through the discriminator, which is not stepped by it."""

    def loop(model: nn.Module, bind: Bind) -> None:
        generator, discriminator = model
        first = torch.optim.SGD(generator.parameters(), lr=0.1)
        second = torch.optim.SGD(discriminator.parameters(), lr=0.1)
        bind(first)
        bind(second)
        for _ in range(3):
            fake = generator(batch())
            second.zero_grad()
            (F.softplus(discriminator(fake.detach())) + F.softplus(-discriminator(batch(5, 6)))).mean().backward()
            second.step()
            first.zero_grad()
            F.softplus(-discriminator(fake)).mean().backward()
            first.step()

    model = nn.ModuleList([nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))]).double()
    compare(loop, model, when)


@pytest.mark.parametrize("when", ["backward", "step"])
def test_a_gan_in_one_step(when: str) -> None:
    """A gradient reversal: one backward pass, one optimizer."""

    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return -g

    def loop(model: nn.Module, bind: Bind) -> None:
        optimizer = sgd(model, bind)
        for _ in range(2):
            optimizer.zero_grad()
            model[2](Reverse.apply(model[:2](batch()))).square().mean().backward()
            optimizer.step()

    compare(loop, mlp(), when)


@pytest.mark.parametrize("when", ["backward", "step"])
def test_momentum_contrast(when: str) -> None:
    """A key encoder that follows by EMA, is part of the attached model and gets no gradient."""

    def loop(model: nn.Module, bind: Bind) -> None:
        query, key = model
        key.requires_grad_(False)
        optimizer = sgd(model, bind)
        for _ in range(3):
            optimizer.zero_grad()
            x = batch()
            with torch.no_grad():
                for k, q in zip(key.parameters(), query.parameters(), strict=True):
                    k.lerp_(q, 0.1)
                target = key(x)
            F.cross_entropy(query(x + 0.1) @ target.T, torch.arange(5)).backward()
            optimizer.step()

    compare(loop, nn.ModuleList([mlp(), mlp()]), when)


@pytest.mark.parametrize("when", ["backward", "step"])
def test_deep_supervision_with_a_shared_head(when: str) -> None:
    """One head reads two depths: two uses of one weight with rows of two tensors."""

    def loop(model: nn.Module, bind: Bind) -> None:
        optimizer = sgd(model, bind)
        body, more, head = model
        hidden = body(batch()).tanh()
        (head(hidden).square().mean() + head(more(hidden).tanh()).abs().mean()).backward()
        optimizer.step()

    compare(loop, nn.ModuleList([nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(7, 2)]).double(), when)


@pytest.mark.parametrize("when", ["backward", "step"])
def test_a_deep_equilibrium(when: str) -> None:
    """A fixed point found without gradients, then one step with them, iterated in the backward pass by a hook."""

    def loop(model: nn.Module, bind: Bind) -> None:
        optimizer = sgd(model, bind)
        x = batch()
        with torch.no_grad():
            z = torch.zeros(5, 6, dtype=torch.float64)
            for _ in range(5):
                z = torch.tanh(model[0](z) * 0.3 + x)
        z = z.requires_grad_()
        new = torch.tanh(model[0](z) * 0.3 + x)

        def solve(g: Tensor) -> Tensor:
            return g + torch.autograd.grad(new, z, g, retain_graph=True)[0]

        output = new.clone()
        output.register_hook(solve)
        model[2](output).square().mean().backward()
        optimizer.step()

    compare(loop, square(), when)


@pytest.mark.parametrize("when", ["backward", "step"])
def test_a_backward_pass_inside_of_a_backward_pass(when: str) -> None:
    """A custom function that runs a whole backward pass for the weights in its own, as reversible networks do."""

    class Reversible(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
            ctx.save_for_backward(x)
            ctx.layer = layer
            return layer(x)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                ctx.layer(x).backward(g)
            return x.grad, None

    def loop(model: nn.Module, bind: Bind) -> None:
        optimizer = sgd(model, bind)
        for _ in range(2):
            optimizer.zero_grad()
            hidden = Reversible.apply(batch().requires_grad_(), model[0]).tanh()
            model[2](Reversible.apply(hidden, model[2]) @ torch.ones(6, 6, dtype=torch.float64)).square().mean().backward()
            optimizer.step()

    compare(loop, square(), when)


@pytest.mark.parametrize("when", ["backward", "step"])
def test_gradients_of_two_models_in_one_backward_pass(when: str) -> None:
    """Student and teacher learn from each other; each has its own handle."""
    models, x = [mlp(), mlp()], batch()
    references = [dense(m, when)[0] for m in models]
    handles = [isaac.attach(m, damping=LAMBDA, when=when) for m in models]
    for first, second in (models, references):
        (first(x) - second(x)).square().mean().backward()
    for model, reference, handle in zip(models, references, handles, strict=True):
        if when == "step":
            handle.step()
            for layer in (reference[0], reference[2]):
                layer.log.step()
        same(model, reference)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_rate_of_the_rows_drawn_is_the_same_under_checkpoints(reentrant: bool) -> None:
    """max_rows draws the same rows, with or without activation checkpointing, for the same seed."""
    found = []
    model, x = mlp(), batch(20)
    for kept in (True, False):
        m = copy.deepcopy(model)
        isaac.attach(m, damping=LAMBDA, max_rows=5)
        torch.manual_seed(1)
        y = m(x) if kept else checkpoint(m, x.clone().requires_grad_(), use_reentrant=reentrant)
        y.square().mean().backward()
        found.append(m)
    same(*found)


def test_the_generator_is_left_alone() -> None:
    """Dropout draws what it would have drawn without the library, also with max_rows and "auto"."""
    model = nn.Sequential(nn.Linear(6, 7), nn.Dropout(0.5), nn.Linear(7, 4)).double()
    plain, x = copy.deepcopy(model), batch(100)
    isaac.attach(model)
    outputs = []
    for m in (model, plain):
        torch.manual_seed(3)
        for _ in range(3):
            output = m(x)
            output.square().mean().backward()
        outputs.append(output)
    assert torch.equal(*outputs)


def test_plain_at_infinity_bit_for_bit() -> None:
    model, x = mlp(), batch()
    plain = copy.deepcopy(model)
    handle = isaac.attach(model, damping=LAMBDA)
    handle.damping = math.inf
    for m in (model, plain):
        m(x).square().mean().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("when", ["backward", "step"])
def test_reduced_sequences_of_other_lengths(when: str) -> None:
    """sharing="reduce" in micro-batches whose lengths differ: one row for each sample."""
    layer = nn.Linear(6, 4, bias=False).double()
    parts = [torch.randn(2, n, 6, dtype=torch.float64) for n in (3, 5)]
    handle = isaac.attach(layer, damping=LAMBDA, sharing="reduce", when=when)
    for x in parts:
        layer(x).sum().backward()
    plain = [torch.ones(2 * x.shape[1], 4, dtype=torch.float64).T @ x.flatten(0, 1) for x in parts]
    if when == "step":
        handle.step()
        expected = (plain[0] + plain[1]) @ conditioner(torch.cat([x.mean(1) for x in parts]))
    else:
        expected = sum(g @ conditioner(x.mean(1)) for g, x in zip(plain, parts, strict=True))
    close(layer.weight.grad, expected)


def test_saved_and_resumed_between_micro_batches_is_clean() -> None:
    """state_dict in the middle of a step; the resumed handle knows nothing of gradients that were not saved."""
    layer, x = nn.Linear(6, 4, bias=False).double(), batch()
    handle = isaac.attach(layer, damping=LAMBDA, when="step", decay=0.5)
    layer(batch()).sum().backward()
    state = copy.deepcopy(handle.state_dict())
    handle.detach()
    layer.zero_grad()
    handle = isaac.attach(layer, damping=LAMBDA, when="step", decay=0.5)
    handle.load_state_dict(state)
    layer(x).sum().backward()
    handle.step()
    close(layer.weight.grad, zeta_star(torch.ones(5, 4, dtype=torch.float64), x))


@pytest.mark.parametrize("refresh", [1, 3])
def test_decay_over_steps_with_accumulation(refresh: int) -> None:
    """The average of the second moments of the steps, with its bias corrected; the inverse every few steps."""
    layer = nn.Linear(6, 4, bias=False).double()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    isaac.attach(layer, damping=LAMBDA, when="step", decay=0.8, refresh=refresh).bind(optimizer)
    average, right = torch.zeros(6, 6, dtype=torch.float64), None
    for t in range(1, 6):
        optimizer.zero_grad()
        parts = [batch(3), batch(4)]
        for x in parts:
            layer(x).sum().backward()
        optimizer.step()
        rows = torch.cat(parts)
        average = 0.8 * average + 0.2 * rows.T @ rows / 7
        if (t - 1) % refresh == 0:
            right = torch.linalg.inv(torch.eye(6, dtype=torch.float64) + average / (1 - 0.8**t) / LAMBDA)
        close(layer.weight.grad, torch.ones(7, 4, dtype=torch.float64).T @ rows @ right)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_embeddings_with_max_norm_compiled() -> None:
    layer, tokens = nn.Embedding(6, 3, max_norm=0.5).double(), torch.tensor([0, 0, 1, 5])
    eager = copy.deepcopy(layer)
    for m in (layer, eager):
        isaac.attach(m, damping=LAMBDA)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compile(layer, backend="aot_eager")(tokens).square().sum().backward()
    eager(tokens).square().sum().backward()
    close(layer.weight.grad, eager.weight.grad)
    close(layer.weight, eager.weight)


def test_master_weights_are_noticed() -> None:
    """Float32 masters of half-precision weights: the optimizer steps tensors that the model does not have."""
    model = mlp()
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    handle = isaac.attach(model, damping=LAMBDA, when="step")
    with pytest.warns(RuntimeWarning, match="no parameter of the model"):
        handle.bind(optimizer)


def replaced_by_zeros(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    for i in range(4):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        model(batch(3 + i)).square().mean().backward()
        if i % 2:
            optimizer.step()


def zeroed_by_foreach(model: nn.Module, bind: Bind) -> None:
    optimizer = sgd(model, bind)
    model(batch(3)).square().mean().backward()
    for i in range(3):
        torch._foreach_zero_([p.grad for p in model.parameters()])
        model(batch(3 + i)).square().mean().backward()
        model(batch(7)).square().mean().backward()
        optimizer.step()


def stepped_before_the_second_backward(model: nn.Module, bind: Bind) -> None:
    """Actor and critic on one body: each loss is stepped by itself, the graph is kept."""
    body, head = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2].parameters(), lr=0.1)
    bind(body)
    bind(head)
    for _ in range(2):
        hidden = model[:2](batch())
        head.zero_grad()
        model[2](hidden.detach()).square().mean().backward()
        head.step()
        body.zero_grad()
        model[2](hidden).abs().mean().backward()
        body.step()


def gradients_accumulated_across_a_skipped_step(model: nn.Module, bind: Bind) -> None:
    """A step is skipped because of its loss, but its gradient is kept for the next."""
    optimizer = sgd(model, bind)
    for i in range(4):
        loss = model(batch(3 + i)).square().mean()
        loss.backward()
        if i in (1, 3):
            optimizer.step()
            optimizer.zero_grad()


def a_weight_replaced_by_a_view(model: nn.Module, bind: Bind) -> None:
    """All weights live in one flat buffer, as fused optimizers have it."""
    optimizer = sgd(model, bind)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    place = 0
    for p in model.parameters():
        p.data = flat[place : place + p.numel()].view_as(p)
        place += p.numel()
    for _ in range(2):
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("when", ["backward", "step"])
@pytest.mark.parametrize(
    "loop",
    [
        replaced_by_zeros,
        zeroed_by_foreach,
        stepped_before_the_second_backward,
        gradients_accumulated_across_a_skipped_step,
        a_weight_replaced_by_a_view,
        anomaly_mode,
        jacobian_of_outputs,
    ],
    ids=title,
)
def test_another_loop_gives_the_definition(loop: Loop, when: str) -> None:
    compare(loop, mlp(), when)
