"""Every private name of torch does what the library takes it for; a new version of torch that breaks one is told which."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from isaac_newton import torch_private

SOURCES = Path(torch_private.__file__).parent


class Asking(torch.autograd.Function):
    """The weight under another name; its backward pass asks what the library asks."""

    answers: dict[str, Any]

    @staticmethod
    def forward(ctx: Any, weight: Tensor, callback: Any) -> Tensor:
        ctx.callback = callback
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        ctx.callback(ctx)
        return g, None


def asked(question: Any, *, backward: Any = Tensor.backward, **options: Any) -> list[Any]:
    """What `question` answers inside of a backward pass."""
    weight, found = nn.Parameter(torch.ones(3)), []
    loss = Asking.apply(weight, lambda ctx: found.append(question(ctx))).sum()
    backward(loss, **options)
    return found


def test_passes_have_numbers_of_their_own() -> None:
    assert torch_private.current_pass() == -1
    first, second = (asked(lambda ctx: torch_private.current_pass())[0] for _ in range(2))
    assert -1 not in (first, second)
    assert first != second


@pytest.mark.parametrize("kept", [False, True])
def test_a_pass_knows_whether_its_graph_is_kept(kept: bool) -> None:
    assert asked(lambda ctx: torch_private.keeps_graph(), retain_graph=kept) == [kept]


def test_norms_are_added_up_in_float64() -> None:
    found = torch_private.wide_norms([torch.full((2, 8), 2.0**90), torch.full((4,), 2.0**-90)])
    assert [norm.item() for norm in found] == [4 * 2.0**90, 2 * 2.0**-90]


ASKED: list[Any] = []


def _answer(context: Any) -> None:
    name, size = (context.get_local(each, stacklevel=1) for each in ("name", "size"))
    ASKED.append((name.as_python_constant(), torch_private.hint(size.as_fake())))


def _ask(name: str, size: int) -> None:
    torch_private.while_compiling(_answer)


def test_the_compiler_says_once_what_it_knows_dynamic_sizes_too() -> None:
    def function(x: Tensor) -> Tensor:
        _ask("a name", len(x))
        return x + 1

    compiled = torch.compile(function, backend="eager", dynamic=True, fullgraph=True)
    for count in (5, 7):
        compiled(torch.ones(count))
    assert ASKED == [("a name", 5)]


@pytest.mark.parametrize("strict", [False, True])
def test_an_export_is_told_from_compiled_code(strict: bool) -> None:
    """`torch.compiler.is_exporting` is true in all compiled code of torch 2.9 to 2.11: there models stayed plain."""

    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + (10 if torch_private.is_exported() else 1)

    x = torch.zeros(2)
    assert torch.compile(Module(), backend="eager", fullgraph=True)(x).tolist() == [1, 1]
    assert torch.export.export(Module(), (x,), strict=strict).module()(x).tolist() == [10, 10]
    assert Module()(x).tolist() == [1, 1]


def test_a_pass_knows_which_leaves_it_computes() -> None:
    weight, other, found = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3)), []

    def loss() -> Tensor:
        name = Asking.apply(weight, lambda ctx: found.append(torch_private.will_compute(ctx.next_functions[0][0])))
        result: Tensor = (name * other).sum()
        return result

    loss().backward()
    torch.autograd.grad(loss(), weight)
    loss().backward(inputs=[weight])
    assert found == [True, True, True]

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *weights: Tensor) -> tuple[Tensor, ...]:
            return tuple(each.view_as(each) for each in weights)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            found.append([torch_private.will_compute(node) for node, _ in ctx.next_functions])
            return gradients

    first, second = Both.apply(weight, other)
    (first * second).sum().backward(inputs=[other])
    assert found[-1] == [False, True]


def test_what_is_queued_runs_when_the_pass_has_ended() -> None:
    order: list[str] = []
    weight = nn.Parameter(torch.ones(3))

    def question(ctx: Any) -> None:
        torch_private.after_backward(lambda: order.append("after" if weight.grad is not None else "before"))

    Asking.apply(weight, question).sum().backward()
    assert order == ["after"]


def test_hooks_on_saved_tensors_are_seen() -> None:
    assert not torch_private.saves_elsewhere()
    with torch.autograd.graph.save_on_cpu():
        assert torch_private.saves_elsewhere()


def test_autocast_is_seen_and_left() -> None:
    assert not torch_private.is_autocast_on()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch_private.is_autocast_on()
        with torch_private.full_precision(torch.ones(1)):
            assert not torch.is_autocast_enabled("cpu")


def test_torch_func_is_seen() -> None:
    seen: list[tuple[bool, bool]] = []

    def function(x: Tensor) -> Tensor:
        seen.append((torch_private.is_transformed(), torch_private.has_values(x)))
        return x.sum()

    torch.func.grad(function)(torch.ones(2))
    assert seen == [(True, False)]
    assert not torch_private.is_transformed()
    assert torch_private.has_values(torch.ones(2))


def test_gradients_of_many_vectors_at_once_are_known() -> None:
    x, seen = torch.ones(2, requires_grad=True), []
    x.register_hook(lambda g: seen.append(torch_private.is_one_of_many(g)))
    y = 2 * x
    torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True, retain_graph=True)
    torch.autograd.grad(y.sum(), x)
    assert seen == [True, False]


def test_a_graph_may_go_while_torch_is_tracing_something_else() -> None:
    x = torch.ones(3, requires_grad=True) * 2
    found: list[Tensor] = []
    with FakeTensorMode():
        found.append(torch_private.detached(x))
    torch.func.vmap(lambda row: (found.append(torch_private.detached(x)), row)[1])(torch.ones(2, 3))
    torch.func.grad(lambda row: (found.append(torch_private.detached(x)), row.sum())[1])(torch.ones(3))
    for tensor in found:
        assert tensor.data_ptr() == x.data_ptr()
        assert not tensor.requires_grad
        assert tensor.tolist() == [2, 2, 2]


def test_forward_mode_is_seen() -> None:
    assert not torch_private.differentiates_forward()
    with torch.autograd.forward_ad.dual_level():
        assert torch_private.differentiates_forward()


def test_versions_bases_and_sparse_parts() -> None:
    x = torch.zeros(3, 2)
    before = torch_private.version(x)
    x.add_(1)
    assert torch_private.version(x) == before + 1
    assert torch_private.base(x) is None
    assert torch_private.base(x[1:]) is x
    sparse = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,), check_invariants=True)
    values, indices = torch_private.sparse_parts(sparse)
    assert (values.tolist(), indices.tolist()) == ([1.0, 2.0], [[0, 0]])


def test_hooks_of_parameters_and_modules_are_seen() -> None:
    layer = nn.Linear(2, 2)
    assert not torch_private.is_hooked(layer.weight)
    assert not torch_private.may_be_watched(layer)
    layer.weight.register_hook(lambda g: None)
    layer.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    layer.register_full_backward_hook(lambda *args: None)
    assert torch_private.is_hooked(layer.weight)
    assert torch_private.is_hooked(layer.bias)
    assert torch_private.hooks_of(layer.weight)
    assert not torch_private.bears_none(layer.weight)
    assert torch_private.may_be_watched(layer)
    assert isinstance(nn.BatchNorm2d(3), torch_private.BATCH_NORMS)


def test_a_function_can_be_called_without_what_torch_func_needs() -> None:
    weight = nn.Parameter(torch.ones(3))
    name = torch_private.call(Asking, weight, lambda ctx: None)
    name.sum().backward()
    assert weight.grad is not None


def test_what_is_no_view_can_be_changed_in_place() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    y = torch_private.no_view((x * 2).view(3, 2))
    assert torch_private.base(y) is None
    y.relu_().sum().backward()
    assert x.grad is not None


def test_the_gradients_of_a_convolution_one_by_one() -> None:
    layer, x = (
        nn.Conv2d(2, 3, 3, padding=1, bias=False).double(),
        torch.randn(2, 2, 5, 5, dtype=torch.float64, requires_grad=True),
    )
    output = layer(x)
    g = torch.randn_like(output)
    wanted = torch.autograd.grad(output, [x, layer.weight], g)
    how = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    for number, each in enumerate(wanted):
        flags = [number == 0, number == 1, False]
        torch.testing.assert_close(torch_private.convolution_gradients(g, x, layer.weight, how, flags)[number], each)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_look_their_kernels_up_by_a_name(kind: type[nn.RNNBase], monkeypatch: pytest.MonkeyPatch) -> None:
    name = {nn.LSTM: "lstm", nn.GRU: "gru", nn.RNN: "rnn_tanh"}[kind]
    layer, x, calls = kind(2, 3), torch.randn(4, 1, 2), []
    kernel, cell = torch_private.recurrent_kernel(name), torch_private.recurrent_kernel(f"{name}_cell")

    class Kernels:
        @staticmethod
        def seen(*args: Any) -> Any:
            calls.append(args)
            return kernel(*args)

    setattr(Kernels, name, Kernels.seen)
    wanted = layer(x)[0]
    monkeypatch.setattr(nn.modules.rnn, torch_private.RECURRENT_KERNELS, Kernels)
    assert torch.equal(layer(x)[0], wanted)
    # Input, state, weights in the order of the parameters' names, then how.
    (args,) = calls
    assert args[0] is x
    assert all(map(lambda mine, theirs: mine is theirs, args[2], layer.parameters()))
    assert args[3:] == (True, 1, 0.0, True, False, False)
    state = torch.zeros(1, 3)
    last = cell(x[0], (state, state) if kind is nn.LSTM else state, *layer.parameters())
    torch.testing.assert_close(last[0] if kind is nn.LSTM else last, wanted[0])


def test_no_other_file_uses_a_private_name_of_torch() -> None:
    private = re.compile(
        r"torch\._[a-zA-Z]|_execution_engine|\._version\b|\._base\b|\._backward_hooks|\._post_accumulate|ops\.aten\._"
    )
    found = {
        f"{path.relative_to(SOURCES)}:{number}"
        for path in SOURCES.rglob("*.py")
        if path.name != "torch_private.py"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if private.search(line)
    }
    assert found == set()


def test_hooks_before_a_forward_pass_are_removed_by_what_they_are() -> None:
    layer, seen = nn.Linear(2, 2), []
    for number, options in enumerate(({}, {"with_kwargs": True})):
        layer.register_forward_pre_hook(lambda *args, number=number: seen.append(number), **options)
    torch_private.remove_forward_pre_hooks(
        layer, lambda hook: hook.__kwdefaults__ == {"number": 1} or hook.__defaults__ == (1,)
    )
    layer(torch.ones(1, 2))
    assert seen == [0]
    assert not layer._forward_pre_hooks_with_kwargs


def test_fsdp_marks_what_it_flattens() -> None:
    from torch.distributed.fsdp import FlatParameter

    parameter: Any = nn.Parameter(torch.ones(3))
    assert not torch_private.is_flattened(parameter)
    parameter._is_flat_param = True  # as FSDP's handles do
    assert torch_private.is_flattened(parameter)
    assert isinstance(parameter, FlatParameter)
