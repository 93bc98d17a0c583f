"""One input, one conditioner: found by identity and version of the tensor, and freed when the step is over."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isaac_newton as isaac
import reference
from isaac_newton.core import rows
from isaac_newton.core.rows import Layout, sequence
from isaac_newton.core.use import Use
from isaac_newton.kernels import cpu
from reference import TOLERANCE, assert_close

EXACT = TOLERANCE[torch.float64]


class Projections(nn.Module):
    """Queries, keys and values: three layers that receive one tensor, or three copies of it."""

    def __init__(self, copies: bool = False) -> None:
        super().__init__()
        self.copies = copies
        self.q, self.k, self.v = (nn.Linear(6, 5) for _ in range(3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x.clone() if self.copies else x) for layer in (self.q, self.k, self.v))
        output: Tensor = q.square() + k.sin() * v
        return output


@pytest.fixture
def conditioners(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Tensor]]:
    """Every inverse computed from now on; nothing here keeps one alive."""
    computed: list[weakref.ref[Tensor]] = []
    inverses = cpu.inverses

    def recording(xs: list[Tensor], *args: Any) -> list[tuple[Tensor | None, int]]:
        results = inverses(xs, *args)
        computed.extend(weakref.ref(result) for result, _ in results if result is not None)
        return results

    monkeypatch.setattr(cpu, "inverses", recording)
    return computed


@pytest.mark.parametrize("options", [{}, {"sharing": "reduce"}, {"max_rows": 4}, {"bias": "joint"}], ids=str)
def test_layers_that_receive_one_tensor_compute_one_conditioner_per_step(
    options: dict[str, Any], conditioners: list[weakref.ref[Tensor]]
) -> None:
    together, apart = Projections(), Projections(copies=True)
    apart.load_state_dict(together.state_dict())
    isaac.attach(together, 0.1, **options)
    isaac.attach(apart, 0.1, **options)
    for number in range(1, 3):
        x = torch.randn(4, 5, 6, dtype=torch.float64)
        together(x).sum().backward()
        assert len(conditioners) == number + 3 * (number - 1)
        apart(x).sum().backward()
        assert len(conditioners) == number + 3 * number
    for one, other in zip(together.parameters(), apart.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert_close(one.grad, other.grad)


def test_a_tensor_changed_in_place_is_another_input() -> None:
    model = Projections()
    isaac.attach(model, 0.1)
    x = torch.randn(4, 6, dtype=torch.float64)
    g = torch.randn(4, 5, dtype=torch.float64)
    before = vars(model.q)["forward"]
    first = Use(before, Layout(sequence), x, None, True, 5)
    key = first.key
    assert Use(before, Layout(sequence), x, None, True, 5).key == key
    x.add_(1)
    assert first.key != key
    model.q(x).backward(g)
    assert_close(model.q.weight.grad, reference.zeta_star(g, x, 0.1))


def test_a_buffer_refilled_in_place_gives_each_step_its_own_conditioner() -> None:
    layer = nn.Linear(6, 5, dtype=torch.float64)
    isaac.attach(layer, 0.1)
    x = torch.empty(4, 6, dtype=torch.float64)
    g = torch.randn(4, 5, dtype=torch.float64)
    outputs = []  # old graphs that are still around
    for _ in range(3):
        x.normal_()
        layer.zero_grad()
        outputs.append(layer(x))
        outputs[-1].backward(g)
        assert_close(layer.weight.grad, reference.zeta_star(g, x, 0.1))


@pytest.mark.parametrize(("options", "times"), [({"sharing": "reduce"}, 1), ({"max_rows": 4}, 1), ({}, 3)], ids=str)
def test_few_rows_are_gathered_once_and_freed(options: dict[str, Any], times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[weakref.ref[Tensor]] = []

    def gather(*args: Any, **settings: Any) -> Tensor:
        found = keep(*args, **settings) * 1
        gathered.append(weakref.ref(found))
        return found

    keep = rows.gather
    monkeypatch.setattr(rows, "gather", gather)
    model = Projections()
    handle = isaac.attach(model, 0.1, **options)
    handle.mask = torch.ones(4, 3)
    loss = model(torch.randn(4, 3, 6, dtype=torch.float64)).sum()
    loss.backward()
    gc.collect()
    assert len(gathered) == times
    assert [found() for found in gathered] == [None] * times


def test_layers_that_receive_a_tensor_and_its_changed_copy_have_a_conditioner_each() -> None:
    model = Projections()
    isaac.attach(model, 0.1)
    x = torch.randn(4, 6, dtype=torch.float64)
    changed = x.clone().mul_(3)
    g = torch.randn(4, 5, dtype=torch.float64)
    ((model.q(x) + model.k(changed) + model.v(x)) * g).sum().backward()
    for layer, a in ((model.q, x), (model.k, changed), (model.v, x)):
        assert_close(layer.weight.grad, reference.zeta_star(g, a, 0.1))


def test_a_new_tensor_at_an_old_address_is_another_input() -> None:
    layer = nn.Linear(6, 5, dtype=torch.float64)
    isaac.attach(layer, 0.1)
    for _ in range(20):  # each batch takes the address of the one before
        x, g = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
        layer.zero_grad()
        layer(x).backward(g)
        assert_close(layer.weight.grad, reference.zeta_star(g, x, 0.1))
        del x


@pytest.mark.parametrize("fixed", [False, True], ids=["new inputs", "the same input"])
def test_conditioners_are_freed_with_every_step(fixed: bool, conditioners: list[weakref.ref[Tensor]]) -> None:
    model = Projections()
    isaac.attach(model)
    x = torch.randn(4, 6, dtype=torch.float64)
    for number in range(1, 4):
        # The loss keeps its graph alive until the next one takes its name, as in most training loops.
        loss = model(x if fixed else x.clone()).sum()
        loss.backward()
        gc.collect()
        assert len(conditioners) == number
        assert [conditioner() for conditioner in conditioners] == [None] * number


def test_a_conditioner_that_not_every_layer_asked_for_is_freed_with_the_graph(conditioners: list[weakref.ref[Tensor]]) -> None:
    model = Projections()
    isaac.attach(model)
    x = torch.randn(4, 6, dtype=torch.float64)
    unused, loss = model.k(x), model.q(x).sum()
    loss.backward()
    del unused, loss
    gc.collect()
    assert [conditioner() for conditioner in conditioners] == [None]


def test_a_mask_set_between_two_layers_holds_for_the_second_only() -> None:
    model = Projections()
    handle = isaac.attach(model, 0.1)
    x, g = torch.randn(4, 3, 6, dtype=torch.float64), torch.randn(4, 3, 5, dtype=torch.float64)
    masks = [torch.arange(3) < torch.tensor([3, 2, 1, 2])[:, None], torch.arange(3).expand(4, 3) != 1]
    outputs = []
    for layer, mask in zip((model.q, model.k), masks, strict=True):
        handle.mask = mask
        outputs.append(layer(x))
    torch.autograd.backward(outputs, [g, g])
    for layer, mask in zip((model.q, model.k), masks, strict=True):
        gradient = g.flatten(0, 1).T @ x.flatten(0, 1)
        factor = x[mask].T @ x[mask] / mask.sum() + 0.1 * torch.eye(6, dtype=torch.float64)
        assert_close(layer.weight.grad, 0.1 * gradient @ torch.linalg.inv(factor))


def test_a_backward_pass_that_failed_leaves_no_conditioner_behind() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            raise RuntimeError("out of memory")

    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    handle = isaac.attach(model, damping=10.0)

    def outputs(x: Tensor) -> Tensor:
        result: Tensor = model[0](x) + model[1](x)
        return result

    # Made first, so that its backward comes last and raises after the conditioner was computed.
    early = Failing.apply(nn.Parameter(torch.zeros(4, dtype=torch.float64)))
    loss = (outputs(x) + early).square().sum()
    with pytest.raises(RuntimeError, match="out of memory"):
        loss.backward()
    handle.damping = 0.1
    gradients = []
    for same in (x, x.clone()):
        model.zero_grad()
        outputs(same).square().sum().backward()
        gradients.append(model[0].weight.grad.clone())
    assert torch.equal(*gradients)
