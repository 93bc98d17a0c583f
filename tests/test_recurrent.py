"""LSTM, GRU, RNN and their cells: torch's output bit for bit, every matrix conditioned by what it multiplies."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_sequence
from torch.utils.checkpoint import checkpoint

import isaac_newton as isaac
from recurrence import Recurrence
from reference import assert_close
from test_layers import DAMPING, right

KINDS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "LSTM": (nn.LSTM, {}),
    "GRU": (nn.GRU, {}),
    "RNN": (nn.RNN, {}),
    "RNN with relu": (nn.RNN, {"nonlinearity": "relu"}),
    "LSTM with projections": (nn.LSTM, {"proj_size": 3}),
}
FORMS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "without bias": {"bias": False},
    "three layers": {"num_layers": 3},
    "bidirectional": {"bidirectional": True},
    "two layers, bidirectional, batch first": {"num_layers": 2, "bidirectional": True, "batch_first": True},
}
LENGTHS = (3, 6, 1, 5)


def make(kind: str, dtype: torch.dtype = torch.float64, **form: Any) -> nn.RNNBase:
    torch.manual_seed(0)
    layer, options = KINDS[kind]
    return layer(4, 5, dtype=dtype, **options, **form)


def sequences(lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randn(length, 4, generator=random, dtype=torch.float64) for length in lengths]


def states_of(module: nn.RNNBase, samples: int, *, zero: bool = False) -> list[Tensor]:
    random = torch.Generator().manual_seed(2)
    count = module.num_layers * (2 if module.bidirectional else 1)
    sizes = [module.proj_size or module.hidden_size, *([module.hidden_size] if module.mode == "LSTM" else [])]
    states = [torch.randn(count, samples, size, generator=random, dtype=torch.float64) for size in sizes]
    return [torch.zeros_like(state) for state in states] if zero else states


def results(module: nn.Module, x: Any, states: list[Tensor] | None = None) -> list[Tensor]:
    """Outputs and last states as a list of tensors."""
    given = () if states is None else (tuple(states) if len(states) > 1 else states[0],)
    output, last = module(x, *given)
    output = output.data if isinstance(output, PackedSequence) else output
    return [output, *(last if isinstance(last, tuple) else [last])]


def loss(tensors: list[Tensor]) -> Tensor:
    return sum((each.square().sum() for each in tensors), torch.zeros((), dtype=torch.float64))


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def check(module: nn.RNNBase, book: Recurrence, expected: dict[str, Tensor], *, joint: bool = False) -> None:
    plain = gradients(book.module)
    for name, gradient in gradients(module).items():
        wanted = expected.get(name, plain[name])
        if joint and name.startswith("bias"):
            wanted = expected[name.replace("bias", "weight")][:, -1]
        elif joint and "weight_hr" not in name:
            wanted = wanted[:, :-1]
        assert_close(gradient, wanted)
    assert set(expected) == {name for name in plain if name.startswith("weight")}


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("given", [False, True], ids=["zeros", "h_0"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_matrix_is_conditioned_by_its_rows(kind: str, form: str, given: bool, sharing: str) -> None:
    plain = make(kind, **FORMS[form])
    module, book = copy.deepcopy(plain), Recurrence(copy.deepcopy(plain))
    isaac.attach(module, DAMPING, sharing=sharing)
    samples = sequences((6, 6, 6))
    x = torch.stack(samples, 0 if module.batch_first else 1)
    states = states_of(module, 3, zero=not given)
    ours, theirs = (results(each, x, states if given else None) for each in (module, plain))
    for mine, torchs in zip(ours, theirs, strict=True):
        assert torch.equal(mine, torchs)
        assert mine.stride() == torchs.stride()
    loss(ours).backward()
    book(samples, states).backward()
    check(module, book, book.conditioned(DAMPING, sharing))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("order", ["sorted", "unsorted"])
@pytest.mark.parametrize("form", ["three layers", "two layers, bidirectional, batch first"])
@pytest.mark.parametrize("kind", KINDS)
def test_of_packed_sequences_the_rows_that_exist_count(kind: str, form: str, order: str, sharing: str) -> None:
    plain = make(kind, **FORMS[form])
    module, book = copy.deepcopy(plain), Recurrence(copy.deepcopy(plain))
    handle = isaac.attach(module, DAMPING, sharing=sharing)
    samples = sorted(sequences(), key=len, reverse=True) if order == "sorted" else sequences()
    states = states_of(module, 4)
    x = pack_sequence(samples, enforce_sorted=order == "sorted")
    ours, theirs = (results(each, x, states) for each in (module, plain))
    assert all(map(torch.equal, ours, theirs))
    loss(ours).backward()
    book(samples, states).backward()
    check(module, book, book.conditioned(DAMPING, sharing))
    assert handle.statistics[""].rows == (4 if sharing == "reduce" else sum(LENGTHS))


@pytest.mark.parametrize("packed", [False, True], ids=["side by side", "packed"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_dropout_between_layers_is_torchs_own_draw(kind: str, packed: bool) -> None:
    plain = make(kind, num_layers=3, bidirectional=True, dropout=0.4)
    module, book = copy.deepcopy(plain), Recurrence(copy.deepcopy(plain))
    isaac.attach(module, DAMPING)
    lengths = (6, 5, 3, 1) if packed else (6, 6)
    samples = sequences(lengths)
    x = pack_sequence(samples) if packed else torch.stack(samples, 1)
    both = []
    for each in (module, plain):
        torch.manual_seed(7)
        both.append(results(each, x))
        both[-1].append(torch.rand(3))  # torch's generator is where it would be
    assert all(map(torch.equal, *both))
    torch.manual_seed(7)
    shape = (sum(lengths), 10) if packed else (6, 2, 10)
    draws = [F.dropout(torch.ones(shape, dtype=torch.float64), 0.4) for _ in range(2)]
    if packed:
        padded = [nn.utils.rnn.pad_packed_sequence(x._replace(data=draw))[0] for draw in draws]
        dropped = [[draw[:length, n] for n, length in enumerate(lengths)] for draw in padded]
    else:
        dropped = [list(draw.unbind(1)) for draw in draws]
    loss(both[0][:-1]).backward()
    book(samples, states_of(module, len(samples), zero=True), dropped).backward()
    check(module, book, book.conditioned(DAMPING))


@pytest.mark.parametrize("kind", KINDS)
def test_a_joint_bias_is_conditioned_with_its_matrix(kind: str) -> None:
    module = make(kind, num_layers=2, bidirectional=True)
    book = Recurrence(copy.deepcopy(module))
    isaac.attach(module, DAMPING, bias="joint")
    samples, states = sequences(), states_of(module, 4)
    loss(results(module, pack_sequence(samples, enforce_sorted=False), states)).backward()
    book(samples, states).backward()
    check(module, book, book.conditioned(DAMPING, joint=True), joint=True)


@pytest.mark.parametrize("kind", KINDS)
def test_unbatched_input_is_one_sample(kind: str) -> None:
    plain = make(kind, num_layers=2)
    module, book = copy.deepcopy(plain), Recurrence(copy.deepcopy(plain))
    isaac.attach(module, DAMPING, sharing="reduce")
    (x,), states = sequences((6,)), states_of(module, 1)
    alone = [state[:, 0] for state in states]
    ours, theirs = results(module, x, alone), results(plain, x, alone)
    assert all(map(torch.equal, ours, theirs))
    loss(ours).backward()
    book([x], states).backward()
    check(module, book, book.conditioned(DAMPING, "reduce"))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_a_mask_leaves_padding_out(batch_first: bool, sharing: str) -> None:
    module = make("GRU", batch_first=batch_first)
    plain = copy.deepcopy(module)
    handle = isaac.attach(module, DAMPING, sharing=sharing)
    x = pad_sequence(sequences(), batch_first=True)
    handle.mask = torch.arange(6) < torch.tensor(LENGTHS)[:, None]
    for each in (module, plain):
        output = each(x if batch_first else x.transpose(0, 1))[0]
        output = output if batch_first else output.transpose(0, 1)
        output[handle.mask].square().sum().backward()
    before = torch.cat([torch.zeros(4, 1, 5).double(), output.detach()[:, :-1]], 1)
    for name, r in (("weight_ih_l0", x), ("weight_hh_l0", before)):
        parts = [r[n, :length] for n, length in enumerate(LENGTHS)]
        rows = torch.stack([part.mean(0) for part in parts]) if sharing == "reduce" else torch.cat(parts)
        assert_close(module.get_parameter(name).grad, right(plain.get_parameter(name).grad, rows))


@pytest.mark.parametrize("packed", [False, True], ids=["side by side", "packed"])
def test_drawn_rows_are_rows_of_that_matrix(packed: bool) -> None:
    module = make("LSTM", num_layers=2)
    plain = copy.deepcopy(module)
    handle = isaac.attach(module, DAMPING, max_rows=4)
    samples = sequences((6, 5, 4))
    x = pack_sequence(samples) if packed else torch.stack(sequences((6, 6)), 1)
    for each in (module, plain):
        loss(results(each, x)).backward()
    assert handle.statistics[""].rows == 4
    for name, p in plain.named_parameters():
        mine = module.get_parameter(name).grad
        assert mine is not None
        assert p.grad is not None
        if name.startswith("bias"):
            assert_close(mine, p.grad)
        else:
            # ∇ (I + rᵀr/(kλ))⁻¹ differs from ∇ in the span of at most k rows.
            difference = mine - p.grad
            assert difference.norm() > 1e-3 * p.grad.norm()
            assert int(torch.linalg.matrix_rank(difference, rtol=1e-9)) <= 4


@pytest.mark.parametrize("form", [{}, {"sharing": "reduce"}, {"bias": "joint"}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_at_the_step_rows_of_all_passes_count(kind: str, form: dict[str, Any]) -> None:
    """With one pass "step" is "backward"; two passes over parts of a batch are one over the batch."""
    once = make(kind, num_layers=2, bidirectional=True)
    parts, batch = copy.deepcopy(once), torch.stack(sequences((6, 6, 6, 6)), 1)
    backward = copy.deepcopy(once)
    isaac.attach(backward, DAMPING, **form)
    step = isaac.attach(once, DAMPING, when="step", **form)
    halves = isaac.attach(parts, DAMPING, when="step", **form)
    loss(results(backward, batch)).backward()
    loss(results(once, batch)).backward()
    step.step()
    for half in batch.split(2, 1):
        loss(results(parts, half.contiguous())).backward()
    halves.step()
    for name, gradient in gradients(backward).items():
        assert_close(once.get_parameter(name).grad, gradient)
        assert_close(parts.get_parameter(name).grad, gradient)


CELLS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTMCell(4, 5, dtype=torch.float64),
    "GRU": lambda: nn.GRUCell(4, 5, dtype=torch.float64),
    "RNN": lambda: nn.RNNCell(4, 5, dtype=torch.float64),
    "RNN with relu": lambda: nn.RNNCell(4, 5, nonlinearity="relu", dtype=torch.float64),
    "GRU without bias": lambda: nn.GRUCell(4, 5, bias=False, dtype=torch.float64),
}


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("given", [False, True], ids=["zeros", "state"])
@pytest.mark.parametrize("kind", CELLS)
def test_each_use_of_a_cell_is_conditioned_by_its_own_rows(kind: str, given: bool, batched: bool) -> None:
    torch.manual_seed(0)
    plain = CELLS[kind]()
    module = copy.deepcopy(plain)
    handle = isaac.attach(module, DAMPING)
    shape = (3,) if batched else ()
    x, h, c = (torch.randn(*shape, n, dtype=torch.float64) for n in (4, 5, 5))
    state = ((h, c) if kind == "LSTM" else h,) if given else ()
    for each in (module, plain):
        found = each(x, *state)
        tensors = list(found) if isinstance(found, tuple) else [found]
        if each is module:
            ours = tensors
        loss(tensors).backward()
    assert all(map(torch.equal, ours, tensors))
    hidden = h if given else torch.zeros_like(h)
    assert_close(module.weight_ih.grad, right(plain.weight_ih.grad, x.reshape(-1, 4)))
    assert_close(module.weight_hh.grad, right(plain.weight_hh.grad, hidden.reshape(-1, 5)))
    if kind != "GRU without bias":
        assert_close(module.bias_ih.grad, plain.bias_ih.grad)
        assert_close(module.bias_hh.grad, plain.bias_hh.grad)
    assert list(handle.conditioned) == [""]


def test_a_cell_in_a_loop_is_a_sum_over_its_uses() -> None:
    torch.manual_seed(0)
    cell = nn.GRUCell(4, 5, dtype=torch.float64)
    twin, (x,) = copy.deepcopy(cell), sequences((6,))
    isaac.attach(cell, DAMPING, bias="joint")
    uses = []
    h = other = torch.zeros(1, 5, dtype=torch.float64)
    for row in x:
        h = cell(row[None], h)
        named = {name: p.detach().clone().requires_grad_() for name, p in twin.named_parameters()}
        uses.append((named, row[None], other.detach()))
        other = functional_call(twin, named, (row[None], other))
    assert torch.equal(h, other)
    h.sum().backward()
    other.sum().backward()
    for part, rows in (("ih", 1), ("hh", 2)):
        total = torch.zeros(15, 1 + (4 if part == "ih" else 5), dtype=torch.float64)
        for use in uses:
            named, r = use[0], torch.cat([use[rows], torch.ones(1, 1).double()], 1)
            total += right(torch.cat([named[f"weight_{part}"].grad, named[f"bias_{part}"].grad[:, None]], 1), r)
        assert_close(getattr(cell, f"weight_{part}").grad, total[:, :-1])
        assert_close(getattr(cell, f"bias_{part}").grad, total[:, -1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_in_other_precisions_and_under_autocast_bits_are_torchs(kind: str, dtype: torch.dtype) -> None:
    x = torch.stack(sequences((6, 6)), 1).float()
    for autocast in (False, True):
        plain = make(kind, torch.float32 if autocast else dtype, num_layers=2, bidirectional=True)
        module = copy.deepcopy(plain)
        isaac.attach(module, DAMPING)
        both = []
        for each in (module, plain):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                both.append(results(each, x if autocast else x.to(dtype)))
            loss([tensor.double() for tensor in both[-1]]).backward()
        assert all(map(torch.equal, *both))
        for name, p in module.named_parameters():
            assert p.grad is not None
            assert p.grad.dtype == p.dtype
            assert p.grad.isfinite().all()
            torchs = plain.get_parameter(name).grad
            assert torch.equal(p.grad, torchs) == name.startswith("bias")


@pytest.mark.parametrize("how", ["output", "state"])
def test_the_loss_may_come_from_outputs_or_states_alone(how: str) -> None:
    module = make("LSTM", num_layers=2)
    book = Recurrence(copy.deepcopy(module))
    isaac.attach(module, DAMPING)
    samples, plain = sequences((6, 6)), copy.deepcopy(book.module)
    pick = (lambda found: found[:1]) if how == "output" else (lambda found: found[1:2])
    x = torch.stack(samples, 1)
    loss(pick(results(module, x))).backward()
    loss(pick(results(plain, x))).backward()
    book(samples, states_of(module, 2, zero=True))
    for name, rows in book.rows.items():
        r = torch.stack([row for sample in rows for row in sample])
        assert_close(module.get_parameter(name).grad, right(plain.get_parameter(name).grad, r))


def test_outputs_may_be_changed_in_place_as_with_torch() -> None:
    grads = []
    for in_place in (False, True):
        module = make("GRU")
        isaac.attach(module, DAMPING)
        output = module(torch.stack(sequences((6, 6)), 1))[0]
        (output.relu_() if in_place else output.relu()).sum().backward()
        grads.append(gradients(module))
    for name, gradient in grads[0].items():
        assert_close(grads[1][name], gradient, 1e-14)


def test_a_frozen_matrix_stays_out_and_the_others_do_not_mind() -> None:
    module = make("LSTM")
    whole = copy.deepcopy(module)
    module.weight_hh_l0.requires_grad_(False)
    x = torch.stack(sequences((6, 6)), 1)
    for each in (module, whole):
        isaac.attach(each, DAMPING)
        loss(results(each, x)).backward()
    assert module.weight_hh_l0.grad is None
    assert_close(module.weight_ih_l0.grad, whole.weight_ih_l0.grad, 1e-14)


def test_without_gradients_torchs_own_pass_runs_and_grad_mode_decides() -> None:
    module = make("LSTM", num_layers=2, dropout=0.5)
    plain = copy.deepcopy(module)
    handle = isaac.attach(module, DAMPING)
    x = torch.stack(sequences((6, 6)), 1)
    for prepare in (lambda each: each.train(), lambda each: each.eval()):
        both = []
        for each in (module, plain):
            torch.manual_seed(0)
            with torch.no_grad():
                both.append(results(prepare(each), x))
        assert all(map(torch.equal, *both))
    assert handle.backward_passes == 0
    ours, theirs = results(module, x), results(plain, x)  # both in eval mode: nothing is dropped
    assert all(map(torch.equal, ours, theirs))
    loss(ours).backward()
    loss(theirs).backward()
    assert handle.backward_passes == 1
    assert not torch.equal(module.weight_hh_l0.grad, plain.weight_hh_l0.grad)


@pytest.mark.parametrize("keep", [False, True])
def test_a_kept_graph_gives_the_same_again_and_another_raises_as_torchs_does(keep: bool) -> None:
    module = make("GRU", bidirectional=True)
    isaac.attach(module, DAMPING)
    total = loss(results(module, torch.stack(sequences((6, 6)), 1)))
    total.backward(retain_graph=keep)
    first = {name: gradient.clone() for name, gradient in gradients(module).items()}
    if not keep:
        with pytest.raises(RuntimeError, match="second time"):
            total.backward()
        return
    module.zero_grad()
    total.backward()
    for name, gradient in first.items():
        assert torch.equal(module.get_parameter(name).grad, gradient)


def test_a_pass_for_some_weights_or_for_the_input_alone() -> None:
    module = make("LSTM", num_layers=2)
    handle = isaac.attach(module, DAMPING)
    x = torch.stack(sequences((6, 6)), 1).requires_grad_()
    total = loss(results(module, x))
    torch.autograd.grad(total, x, retain_graph=True)
    assert handle.backward_passes == 0
    (some,) = torch.autograd.grad(total, module.weight_hh_l1, retain_graph=True)
    total.backward()
    assert torch.equal(some, module.weight_hh_l1.grad)


def test_a_gradient_penalty_is_conditioned_whole() -> None:
    """P depends on the hidden states, and so on the weights: finite differences see that too."""
    module = make("GRU", num_layers=2)
    isaac.attach(module, DAMPING)
    x = torch.stack(sequences((4, 4)), 1)
    weights = dict(module.named_parameters())

    def first(create_graph: bool = True) -> tuple[Tensor, ...]:
        return torch.autograd.grad(
            loss(results(module, x)), [module.weight_hh_l1, module.weight_ih_l0], create_graph=create_graph
        )

    # How ζ* changes along a direction in a bias, whose own gradient is plain.
    length = sum(g.square().sum() for g in first())
    (derivative,) = torch.autograd.grad(length, weights["bias_ih_l0"])
    direction, step = torch.randn(15, dtype=torch.float64), 1e-5
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            module.bias_ih_l0 += sign * step * direction
        values.append(sum(g.square().sum() for g in first(False)).item())
        with torch.no_grad():
            module.bias_ih_l0 -= sign * step * direction
    slope = torch.tensor((values[0] - values[1]) / (2 * step))
    assert_close(derivative @ direction, slope, 1e-7)


def test_penalties_on_input_gradients_reach_every_matrix_with_and_without_the_loss() -> None:
    samples = sequences((4, 4))
    for with_loss in (False, True):
        module = make("LSTM")
        plain, book = copy.deepcopy(module), Recurrence(copy.deepcopy(module))
        isaac.attach(module, DAMPING)
        for each in (module, plain):
            x = torch.stack(samples, 1).requires_grad_()
            output = each(x)[0]
            total = output.sum()  # its gradient does not look at the output
            (g,) = torch.autograd.grad(total, x, create_graph=True)
            (g.square().sum() + (total if with_loss else 0)).backward()
        book(samples, states_of(module, 2, zero=True))
        for name, rows in book.rows.items():
            r = torch.stack([row for sample in rows for row in sample])
            assert_close(module.get_parameter(name).grad, right(plain.get_parameter(name).grad, r))


def test_third_derivatives_are_refused_with_the_reason() -> None:
    module = make("GRU")
    isaac.attach(module, DAMPING)
    x = torch.stack(sequences((4, 4)), 1).requires_grad_()
    # The gradient of a sum does not look at the output.
    (g,) = torch.autograd.grad(module(x)[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no third derivatives"):
        torch.autograd.grad(g.square().sum(), module.weight_hh_l0, create_graph=True)


def test_dropped_graphs_are_freed() -> None:
    module = make("LSTM", num_layers=2, bidirectional=True)
    isaac.attach(module, DAMPING)
    gc.disable()
    try:
        for backward in (lambda total: None, lambda total: total.backward(retain_graph=True)):
            x = torch.stack(sequences((6, 6)), 1).requires_grad_()
            kept = x * 1
            total = loss(results(module, kept))
            backward(total)
            reference = weakref.ref(kept)
            del kept, total
            assert reference() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("reentrant", [True, False])
def test_under_checkpointing_rows_are_recomputed(reentrant: bool) -> None:
    grads = []
    for checkpointed in (False, True):
        module = make("LSTM", num_layers=2, bidirectional=True)
        isaac.attach(module, DAMPING)
        x = torch.stack(sequences((6, 6)), 1).requires_grad_()

        def run(x: Tensor, module: nn.Module = module) -> Tensor:
            return results(module, x)[0]

        output = checkpoint(run, x, use_reentrant=reentrant) if checkpointed else run(x)
        output.square().sum().backward()
        grads.append(gradients(module))
    for name, gradient in grads[0].items():
        assert_close(grads[1][name], gradient, 1e-12)


def test_saved_tensors_go_where_hooks_send_them() -> None:
    grads = []
    for offload in (False, True):
        module = make("GRU")
        isaac.attach(module, DAMPING)
        x = torch.stack(sequences((6, 6)), 1)
        seen: list[Tensor] = []

        def pack(tensor: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.append(tensor)
            return tensor.clone()

        if offload:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                total = loss(results(module, x))
            assert any(tensor.shape == (6, 2, 5) for tensor in seen)
        else:
            total = loss(results(module, x))
        total.backward()
        grads.append(gradients(module))
    for name, gradient in grads[0].items():
        assert_close(grads[1][name], gradient, 1e-14)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "LSTM with projections"])
@pytest.mark.parametrize("form", [{}, {"sharing": "reduce"}, {"bias": "joint"}], ids=str)
def test_torch_func_gives_the_same_gradients(kind: str, form: dict[str, Any]) -> None:
    module = make(kind, num_layers=2, bidirectional=True)
    isaac.attach(module, DAMPING, **form)
    x = torch.stack(sequences((6, 6)), 1)

    def total(parameters: dict[str, Tensor]) -> Tensor:
        output, _ = functional_call(module, parameters, (x,))
        result: Tensor = output.square().sum()
        return result

    found = grad(total)({name: p.detach() for name, p in module.named_parameters()})
    results(module, x)[0].square().sum().backward()
    for name, gradient in gradients(module).items():
        assert_close(found[name], gradient)


def test_second_derivatives_by_torch_func_are_those_of_autograd() -> None:
    module = make("GRU")
    isaac.attach(module, DAMPING)
    x = torch.stack(sequences((4, 4)), 1)

    def length(parameters: dict[str, Tensor]) -> Tensor:
        inner = grad(lambda p: functional_call(module, p, (x,))[0].square().sum())(parameters)
        return inner["weight_hh_l0"].square().sum()

    found = grad(length)({name: p.detach() for name, p in module.named_parameters()})
    names, weights = zip(*module.named_parameters(), strict=True)
    (g,) = torch.autograd.grad(module(x)[0].square().sum(), module.weight_hh_l0, create_graph=True)
    for name, wanted in zip(names, torch.autograd.grad(g.square().sum(), weights), strict=True):
        assert_close(found[name], wanted)


def test_models_stacked_by_vmap_have_their_own_conditioners() -> None:
    models = [nn.GRU(4, 5, dtype=torch.float64) for _ in range(3)]
    base = copy.deepcopy(models[0])
    isaac.attach(base, DAMPING)
    parameters, buffers = stack_module_state(models)
    x = torch.stack(sequences((6, 6)), 1)

    def total(p: dict[str, Tensor], b: dict[str, Tensor]) -> Tensor:
        result: Tensor = functional_call(base, (p, b), (x,))[0].square().sum()
        return result

    stacked = vmap(grad(total))({name: p.detach() for name, p in parameters.items()}, buffers)
    for number, model in enumerate(models):
        isaac.attach(model, DAMPING)
        model(x)[0].square().sum().backward()
        for name, gradient in gradients(model).items():
            assert_close(stacked[name][number], gradient)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")  # torch's, where it first differentiates so
def test_forward_mode_differentiation_is_torchs() -> None:
    module = make("GRU", num_layers=2)
    plain = copy.deepcopy(module)
    isaac.attach(module, DAMPING)
    x = torch.stack(sequences((4, 4)), 1)
    tangents = []
    for each in (module, plain):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            tangents.append(torch.autograd.forward_ad.unpack_dual(each(dual)[0]).tangent)
    assert_close(*tangents, 1e-14)


def test_embedded_in_a_model_with_other_layers() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.lstm = nn.Embedding(11, 4), nn.LSTM(4, 5, 2, batch_first=True, bidirectional=True)
            self.head = nn.Linear(10, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            result: Tensor = self.head(self.lstm(self.embedding(tokens))[0])
            return result

    torch.manual_seed(0)
    model = Tagger().double()
    plain = copy.deepcopy(model)
    handle = isaac.attach(model, isaac.Relative(0.1))
    tokens = torch.randint(11, (3, 6))
    for each in (model, plain):
        each(tokens).square().sum().backward()
    assert set(handle.conditioned) == {"embedding", "lstm", "head"}
    assert not handle.skipped
    for name, p in model.named_parameters():
        theirs = plain.get_parameter(name).grad
        assert torch.equal(p.grad, theirs) == ("bias" in name)
    assert "LSTM" in str(handle)
    with handle.inspecting():
        model(tokens).sum().backward()
    assert handle.statistics["lstm"].effective_rank is not None
    assert isaac.suggest_damping(model, tokens) is not None


def test_the_output_side_is_refused_with_its_reason() -> None:
    model = nn.ModuleList([nn.LSTM(3, 3), nn.GRUCell(3, 3), nn.Linear(3, 3)])
    handle = isaac.attach(model, DAMPING, output_damping=1.0)
    assert list(handle.conditioned) == ["2"]
    assert "output gradients of LSTM" in handle.skipped["0"]
    assert "output gradients of GRUCell" in handle.skipped["1"]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_computed_weights_are_conditioned_in_the_pass_and_left_out_at_the_step() -> None:
    x = torch.stack(sequences((6, 6)), 1)
    for norm in (nn.utils.weight_norm, nn.utils.parametrizations.weight_norm):
        module = norm(make("GRU"), "weight_hh_l0")
        model, plain = nn.ModuleList([module, nn.Linear(2, 2)]), norm(make("GRU"), "weight_hh_l0")
        handle = isaac.attach(model, DAMPING, when="step")
        assert "computed from other parameters" in handle.skipped["0"]
        handle.detach()
        handle = isaac.attach(model, DAMPING)
        seen = {}
        for key, each in (("ours", module), ("torch's", plain)):
            output = each(x)[0]
            output.square().sum().backward()
            seen[key] = each.weight_ih_l0.grad
        assert_close(seen["ours"], right(seen["torch's"], x.reshape(-1, 4)))


def test_copies_and_files_keep_the_attachment() -> None:
    module = make("LSTM", num_layers=2)
    isaac.attach(module, DAMPING)
    x = torch.stack(sequences((6, 6)), 1)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        loss(results(other, x)).backward()
        module.zero_grad()
        loss(results(module, x)).backward()
        for name, gradient in gradients(other).items():
            assert torch.equal(gradient, module.get_parameter(name).grad)
    isaac.detach(module)
    module.zero_grad()
    plain = make("LSTM", num_layers=2)
    for each in (module, plain):
        loss(results(each, x)).backward()
    assert torch.equal(module.weight_hh_l1.grad, plain.weight_hh_l1.grad)


def test_what_torch_refuses_is_refused_in_its_words() -> None:
    module = make("LSTM")
    isaac.attach(module, DAMPING)
    for x, message in ((torch.zeros(2, 2, 9).double(), "input_size"), (torch.zeros(2).double(), "2D or 3D")):
        with pytest.raises((RuntimeError, ValueError), match=message):
            module(x)


def test_the_automatic_form_keeps_every_norm() -> None:
    module = make("LSTM", num_layers=2, bidirectional=True)
    plain = copy.deepcopy(module)
    handle = isaac.attach(module)
    x = torch.stack(sequences((6,) * 20), 1)
    for each in (module, plain):
        loss(results(each, x)).backward()
    assert handle.statistics[""].rows == 64
    for name, p in plain.named_parameters():
        mine = module.get_parameter(name).grad
        assert_close(mine.norm(), p.grad.norm())
        assert torch.equal(mine, p.grad) == name.startswith("bias")
