"""On a GPU every path gives the numbers of the CPU in float64: eager, Triton, captured, compiled, many at once."""

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import isaac_newton as isaac
from isaac_lab.methods.optimizers import per_copy
from isaac_newton import equations, kernels
from isaac_newton.core.conditioner import invert, multiply
from isaac_newton.core.rows import Rows
from isaac_newton.kernels import streams
from isaac_newton.math import patches
from reference import TOLERANCE, assert_close, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # The compiler of torch 2.11 warns about itself, and about a setting that is left as it is on purpose.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),  # that of its own graphs' pool
]

STEPS = 12


@pytest.fixture
def slow_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever does not wait for a branch is too early."""
    beside = streams.beside

    @contextlib.contextmanager
    def slowly(owner: object, *read: Tensor) -> Iterator[None]:
        with beside(owner, *read):
            torch.cuda._sleep(2_000_000)
            yield

    monkeypatch.setattr(streams, "beside", slowly)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(50, 70), nn.ReLU(), nn.Linear(70, 20), nn.ReLU(), nn.Linear(20, 5))


def batches(rows: int) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [(torch.rand(rows, 50, generator=random), torch.randint(5, (rows,), generator=random)) for _ in range(STEPS)]


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    """As most of the tests take it."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().cpu().reshape(-1) for p in model.parameters()])


def _copy(to: Tensor, gradient: Tensor) -> None:
    to.copy_(gradient)


def train(how: str, rows: int = 30, *, optimizer: str = "SGD", damping: Any = 0.5, **options: Any) -> Tensor:
    """What training changes in the weights: with the damping halved on the way, and the learning rate."""
    on_gpu = how != "cpu"
    model = network().cuda() if on_gpu else network().double()
    start = flat(model)
    handle = isaac.attach(model, damping, **options)
    steps = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01 if optimizer == "Adam" else 0.3)
    forward = torch.compile(model, fullgraph=True) if how == "compiled" else model

    def step(x: Tensor, y: Tensor) -> Tensor:
        steps.zero_grad()
        output = forward(x)
        loss = F.cross_entropy(output, y)
        if handle._run.conditions_outputs:
            handle.backward(loss, output, F.cross_entropy)
        else:
            loss.backward()
        steps.step()
        return loss

    run: Any = step
    if how == "captured":
        x, y = batches(rows)[0]
        run = isaac.capture(step, x.cuda(), y.cuda())
    for number, (x, y) in enumerate(batches(rows)):
        if number == 7 and isinstance(damping, float) and how != "compiled":
            handle.damping = damping / 2
        if number == 9:
            steps.param_groups[0]["lr"] = 0.005 if optimizer == "Adam" else 0.1
        run(*((x.cuda(), y.cuda()) if on_gpu else (x.double(), y)))
    return flat(model) - start


@pytest.mark.parametrize("rows", [1, 30, 60, 100, 200])
@pytest.mark.parametrize("how", ["eager", "captured"])
def test_training_equals_the_cpu_in_float64(how: str, rows: int) -> None:
    assert_close(train(how, rows), train("cpu", rows), TOLERANCE[torch.float32])


@pytest.mark.parametrize("rows", [30, 100])
@pytest.mark.parametrize("how", ["eager", "captured", "compiled"])
def test_the_automatic_form_equals_the_cpu_in_float64(how: str, rows: int) -> None:
    assert_close(train(how, rows, damping="auto"), train("cpu", rows, damping="auto"), TOLERANCE[torch.float32])


@pytest.mark.parametrize("options", [{"max_rows": 20}, {"sharing": "reduce"}, {}], ids=str)
@pytest.mark.parametrize("how", ["eager", "captured"])
def test_a_kept_norm_equals_the_cpu_in_float64(how: str, options: dict[str, Any]) -> None:
    assert_close(
        train(how, 60, keep_norm=True, **options), train("cpu", 60, keep_norm=True, **options), TOLERANCE[torch.float32]
    )


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("damping", [0.5, isaac.Relative(0.5), lambda step: 0.5 / (1 + step)])
def test_a_captured_step_equals_an_eager_one(optimizer: str, damping: Any) -> None:
    eager, captured = (train(how, optimizer=optimizer, damping=damping) for how in ("eager", "captured"))
    # Adam divides by the root of squares, which makes much of rounding where a gradient is almost zero.
    assert_close(captured, eager, 1e-5 if optimizer == "SGD" else 1e-3)


@pytest.mark.parametrize("by", ["hand", "scheduler"])
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_a_learning_rate_may_change_in_every_step(name: str, by: str) -> None:
    """From the first one on, so that it has just changed when a step is captured; with two graphs that take turns."""

    def run(captured: bool) -> Tensor:
        model = network().cuda()
        start = flat(model)
        isaac.attach(model, 0.5)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1 if name == "SGD" else 0.01)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, 1.0, total_iters=16) if by == "scheduler" else None

        step = training_step(model, optimizer)

        runs: dict[int, Any] = {}
        for number, (x, y) in enumerate([batches(60)[0], batches(30)[0]] * 8):
            if scheduler is None:
                optimizer.param_groups[0]["lr"] = (0.1 if name == "SGD" else 0.01) * (number + 1) / 16
            if captured and len(x) not in runs:
                runs[len(x)] = isaac.capture(step, x.cuda(), y.cuda())
            runs.get(len(x), step)(x.cuda(), y.cuda())
            if scheduler is not None:
                scheduler.step()
        return flat(model) - start

    assert_close(run(captured=True), run(captured=False), 1e-5 if name == "SGD" else 1e-3)


def test_a_rate_that_is_a_number_in_the_graph_must_not_change() -> None:
    """As that of torch's Muon, which neither is capturable nor has a fused form."""
    torch.manual_seed(0)
    layer = nn.Linear(20, 20, bias=False).cuda()
    isaac.attach(layer, 0.5)
    optimizer = torch.optim.Muon(layer.parameters(), lr=0.01)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    x = torch.randn(30, 20, device="cuda")
    run = isaac.capture(step, x)
    for rate in (0.03, 0.02, 0.01, 0.01, 0.01):  # until the capture it may
        optimizer.param_groups[0]["lr"] = rate
        run(x)
    optimizer.param_groups[0]["lr"] = 0.005
    with pytest.raises(RuntimeError, match=r"from 0\.01 to 0\.005 after the capture"):
        run(x)


def test_a_step_that_sets_its_learning_rate_is_not_captured() -> None:
    model = network().cuda()
    isaac.attach(model, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, 1.0, total_iters=16)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss

    x, y = batches(30)[0]
    run = isaac.capture(step, x.cuda(), y.cuda(), warmup=2)
    run(x.cuda(), y.cuda())
    run(x.cuda(), y.cuda())
    with pytest.raises(RuntimeError, match="call the scheduler after the captured step"):
        run(x.cuda(), y.cuda())


@pytest.mark.parametrize("innermost", [False, True])
@pytest.mark.parametrize("how", ["eager", "captured", "autocast"])
def test_convolutions_that_share_an_average_equal_the_cpu_in_float64(how: str, innermost: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 6, 3, stride=2), nn.Flatten(), nn.Linear(54, 4)
    )
    x, y = torch.randn(20, 3, 8, 8), torch.randint(4, (20,))

    def gradients(damping: float | None, on_gpu: bool) -> list[Tensor]:
        own = copy.deepcopy(model).cuda() if on_gpu else copy.deepcopy(model).double()
        batch = (x.cuda(), y.cuda()) if on_gpu else (x.double(), y)
        if on_gpu and innermost:
            own, batch = own.to(memory_format=torch.channels_last), (batch[0].to(memory_format=torch.channels_last), batch[1])
        if damping is not None:
            isaac.attach(own, damping=damping, sharing="reduce")
        optimizer = torch.optim.SGD(own.parameters(), lr=0.0)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=how == "autocast" and on_gpu):
                loss = F.cross_entropy(own(x), y)
            loss.backward()
            optimizer.step()
            return loss

        run = isaac.capture(step, *batch) if how == "captured" and on_gpu else step
        for _ in range(6):
            run(*batch)
        for name, parameter in own.named_parameters():
            assert parameter.grad is not None
            assert parameter.grad.stride() == parameter.stride(), name
        return [parameter.grad.cpu().double() for parameter in own.parameters()]

    # Under autocast the gradient that is conditioned is torch's, rounded by torch: conditioning may not add to that.
    rounded = [
        2 * relative_error(actual, exact) if how == "autocast" else TOLERANCE[torch.float32]
        for actual, exact in zip(gradients(None, on_gpu=True), gradients(None, on_gpu=False), strict=True)
    ]
    found = gradients(0.3, on_gpu=True), gradients(0.3, on_gpu=False)
    assert len(patches._TAPS) <= patches._MOST_TAPS
    for actual, exact, allowed in zip(*found, rounded, strict=True):
        assert_close(actual, exact, allowed)


def test_taps_without_values_are_not_kept() -> None:
    with torch._subclasses.FakeTensorMode():
        means = patches.Patches((3, 3), (1, 1), (1, 1), (1, 1)).average(torch.empty(2, 3, 17, 19, device="cuda"))[0]
    assert means.shape == (1, 2, 27)
    assert not any(isinstance(taps, torch._subclasses.FakeTensor) for taps in patches._TAPS.values())


@pytest.mark.parametrize("bias", ["plain", "joint"])
def test_a_captured_step_takes_the_options_of_attach(bias: str) -> None:
    assert_close(train("captured", bias=bias), train("cpu", bias=bias), TOLERANCE[torch.float32])


@pytest.mark.parametrize("options", [{}, {"bias": "joint"}, {"sharing": "reduce"}], ids=["expand", "joint", "reduce"])
@pytest.mark.parametrize("damping", [0.5, isaac.Relative(0.5)], ids=["number", "relative"])
@pytest.mark.parametrize("how", ["eager", "captured"])
@pytest.mark.filterwarnings("ignore:handle.mask leaves out every position")  # one batch has no rows: the CPU sees that
def test_masks_that_change_equal_the_cpu_in_float64(how: str, damping: Any, options: dict[str, Any]) -> None:
    """Each batch has a mask of its own, which neither waits for the device nor stays what it was at the capture."""

    def run(on_gpu: bool) -> Tensor:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 3))
        model = model.cuda() if on_gpu else model.double()
        start = flat(model)
        handle = isaac.attach(model, damping, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

        def step(x: Tensor, lengths: Tensor) -> Tensor:
            optimizer.zero_grad()
            handle.mask = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
            loss = (model(x) * handle.mask[..., None]).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        run: Any = step
        random = torch.Generator().manual_seed(1)
        for number in range(8):
            x = torch.randn(6, 5, 12, generator=random) + 1
            lengths = torch.randint(0 if number == 6 else 1, 1 if number == 6 else 6, (6,), generator=random)
            batch = (x.cuda(), lengths.cuda()) if on_gpu else (x.double(), lengths)
            if number == 0 and on_gpu and how == "captured":
                run = isaac.capture(step, *batch)
            run(*batch)
        return flat(model) - start

    assert_close(run(on_gpu=True), run(on_gpu=False), TOLERANCE[torch.float32])


@pytest.mark.parametrize("rows", [60, 150])
@pytest.mark.parametrize("options", [{"sharing": "reduce"}, {"max_rows": 40}, {"max_rows": 140}], ids=str)
def test_rounded_products_do_not_spoil_a_difference(options: dict[str, Any], rows: int) -> None:
    """With a small damping a gradient is the small difference of large parts; torch is allowed to round these to TF32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(400, 300), nn.Tanh(), nn.Linear(300, 5))
    x = torch.randn(rows, 3, 400) + 1

    def gradients(on_gpu: bool) -> Tensor:
        own = copy.deepcopy(model).cuda() if on_gpu else copy.deepcopy(model).double()
        isaac.attach(own, damping=0.3, **options)
        own(x.cuda() if on_gpu else x.double()).square().mean().backward()
        return torch.cat([own[number].weight.grad.double().cpu().reshape(-1) for number in (0, 2)])

    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        exact = gradients(on_gpu=True)
        torch.set_float32_matmul_precision("high")
        rounded = gradients(on_gpu=True)
    finally:
        torch.set_float32_matmul_precision(precision)
    assert_close(exact, gradients(on_gpu=False), TOLERANCE[torch.float32])
    # The plain gradient is rounded too, and that is what torch was allowed to: 2⁻¹¹ of it, where a tenth of it is left.
    assert_close(rounded, exact, 2e-2)


@pytest.mark.parametrize("how", ["eager", "captured"])
@pytest.mark.parametrize("layer", ["linear", "convolution"])
@pytest.mark.parametrize("rows", [8, 60])
def test_a_difference_in_half_precision_loses_no_more_than_the_gradient_has(rows: int, layer: str, how: str) -> None:
    """ζ* of an exact gradient is no longer than the gradient, and so it is with the error of one in half precision."""
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(400, 300, bias=False) if layer == "linear" else nn.Conv2d(64, 96, 3, bias=False)
    x = torch.randn(rows, *((3, 400) if layer == "linear" else (64, 5, 5))) + 1
    shape = model(x).shape
    # Positions of one example have almost the same gradients, so that almost all is in the span of the averages.
    target = torch.randn(shape[0], 1, 300) if layer == "linear" else torch.randn(*shape[:2], 1, 1)
    target = target.expand(shape) + 0.1 * torch.randn(shape)

    def gradient(on_gpu: bool, conditioned: bool) -> Tensor:
        own = copy.deepcopy(model).cuda() if on_gpu else copy.deepcopy(model).double()
        if conditioned:
            isaac.attach(own, damping=0.1, sharing="reduce")
        place = {"device": "cuda"} if on_gpu else {"dtype": torch.float64}

        def step(x: Tensor, target: Tensor) -> Tensor:
            own.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
                output = own(x)
            loss = (output.to(target.dtype) * target).sum()
            loss.backward()
            return loss

        run, batch = step, (x.to(**place), target.to(**place))
        if on_gpu and how == "captured":
            run = isaac.capture(step, *batch)
        for _ in range(5):
            run(*batch)
        assert own.weight.grad is not None
        return own.weight.grad.double().cpu()

    noise = (gradient(True, False) - gradient(False, False)).norm()
    exact = gradient(False, True)
    assert exact.norm() < 0.1 * gradient(False, False).norm(), "a small difference"
    assert (gradient(True, True) - exact).norm() < 1.5 * noise


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("outputs", "rows", "features"), [(64, 100, 576), (512, 100, 4608), (256, 37, 128), (10, 17, 513)])
def test_a_difference_on_tensor_cores_has_the_digits_of_float32(
    outputs: int, rows: int, features: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    r = torch.rand(rows, features, device="cuda")
    (made,) = invert([Rows(r, rows, in_difference=True)], 0.01, "")
    assert made.inverse is not None
    gradient = torch.randn(outputs, features, device="cuda").to(dtype)
    (found,) = multiply([gradient], [made])
    inverse, wide = made.inverse.double(), gradient.double()
    exact = wide - wide @ r.double().mT @ inverse @ r.double()
    assert found.dtype is dtype
    # A result in half precision is rounded once.
    assert (found - exact).norm() < 1e-6 * wide.norm() + (2**-8 * exact.norm() if dtype is torch.bfloat16 else 0)


@pytest.mark.parametrize("how", ["eager", "captured"])
def test_factorizations_of_many_layers_do_not_disturb_each_other(how: str) -> None:
    """All of them have their inputs at once, and are too large for one program."""

    def run(on_gpu: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Linear(features, 8) for features in (140, 160, 200, 300, 384, 384, 500, 500))
        model = model.cuda() if on_gpu else model.double()
        isaac.attach(model, 0.3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        xs = [torch.randn(256, layer.in_features) for layer in model]

        def step(*xs: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = torch.stack([layer(x).square().mean() for layer, x in zip(model, xs, strict=True)]).sum()
            loss.backward()
            optimizer.step()
            return loss

        batch = [x.cuda() if on_gpu else x.double() for x in xs]
        repeated = isaac.capture(step, *batch) if on_gpu and how == "captured" else step
        for _ in range(12 if on_gpu else 1):
            repeated(*batch)
        return torch.cat([layer.weight.grad.double().cpu().reshape(-1) for layer in model])

    assert_close(run(on_gpu=True), run(on_gpu=False), TOLERANCE[torch.float32])


class Threefold(nn.Module):
    """Three layers with one input, as queries, keys and values have it."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(features, features) for _ in range(3))
        self.last = nn.Linear(features, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x) for layer in self.layers)
        return self.last(torch.tanh(q) * k + v)


@pytest.mark.parametrize("features", [20, 150], ids=["fused", "factorized"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", [{}, {"bias": "joint"}, {"sharing": "reduce"}], ids=["expand", "joint", "reduce"])
@pytest.mark.usefixtures("slow_branches")
def test_layers_with_one_input_wait_for_what_one_of_them_computes(options: dict[str, Any], masked: bool, features: int) -> None:
    def run(on_gpu: bool) -> Tensor:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(features, features), Threefold(features))
        model = model.cuda() if on_gpu else model.double()
        start = flat(model)
        handle = isaac.attach(model, 0.3, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

        def step(x: Tensor, counts: Tensor) -> Tensor:
            optimizer.zero_grad()
            handle.mask = counts if masked else None
            loss = (model(x) * counts[..., None]).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        run: Any = step
        random = torch.Generator().manual_seed(1)
        for number in range(8):
            x = torch.randn(6, 40, features, generator=random) + 1
            counts = torch.rand(6, 40, generator=random) < 0.7
            batch = (x.cuda(), counts.cuda()) if on_gpu else (x.double(), counts)
            run = isaac.capture(step, *batch) if number == 0 and on_gpu else run
            run(*batch)
        return flat(model) - start

    assert_close(run(on_gpu=True), run(on_gpu=False), TOLERANCE[torch.float32])


@pytest.mark.parametrize("how", ["eager", "captured"])
def test_empirical_zeta_equals_the_cpu_in_float64(how: str) -> None:
    options = {"output_damping": 0.2, "output_curvature": "empirical"}
    assert_close(train(how, **options), train("cpu", **options), TOLERANCE[torch.float32])


def test_exact_zeta_on_the_gpu_equals_the_cpu_in_float64() -> None:
    options = {"output_damping": 0.2, "output_curvature": "exact"}
    assert_close(train("eager", **options), train("cpu", **options), TOLERANCE[torch.float32])


def test_a_captured_step_with_sampled_zeta_draws_new_labels_at_each_replay() -> None:
    model = network().cuda()
    handle = isaac.attach(model, 0.5, output_damping=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        output = model(x)
        handle.backward(F.cross_entropy(output, y), output, F.cross_entropy)
        optimizer.step()
        return model[0].weight.grad

    x, y = (tensor.cuda() for tensor in batches(30)[0])
    captured = isaac.capture(step, x, y)
    drawn = [captured(x, y).clone() for _ in range(8)]
    assert all(gradient.isfinite().all() for gradient in drawn)
    assert not torch.equal(drawn[-1], drawn[-2])


def test_a_compiled_model_equals_an_eager_one() -> None:
    assert_close(train("compiled"), _eager_without_change(), 1e-4)


def _eager_without_change() -> Tensor:
    model = network().cuda()
    start = flat(model)
    isaac.attach(model, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for number, (x, y) in enumerate(batches(30)):
        if number == 9:
            optimizer.param_groups[0]["lr"] = 0.1
        optimizer.zero_grad()
        F.cross_entropy(model(x.cuda()), y.cuda()).backward()
        optimizer.step()
    return flat(model) - start


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compilation_needs_no_graph_break(mode: str) -> None:
    model = network().cuda()
    plain = copy.deepcopy(model)
    isaac.attach(model, 0.5)
    isaac.attach(plain, 0.5)
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    for x, y in batches(30)[:4]:
        model.zero_grad()
        plain.zero_grad()
        F.cross_entropy(compiled(x.cuda()), y.cuda()).backward()
        F.cross_entropy(plain(x.cuda()), y.cuda()).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(p.grad, q.grad, 1e-4)


@pytest.mark.parametrize("how", ["eager", "captured"])
@pytest.mark.parametrize("rows", [3, 16])
def test_few_rows_equal_the_cpu_in_float64(how: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    subtract = pytest.importorskip("isaac_newton.kernels.subtract")
    calls, whole = [], subtract.subtract
    monkeypatch.setattr(subtract, "subtract", lambda *given, **more: calls.append(1) or whole(*given, **more))
    assert_close(train(how, rows, sharing="reduce"), train("cpu", rows, sharing="reduce"), TOLERANCE[torch.float32])
    # On matrices "reduce" has nothing to reduce: these take the path of "expand".
    assert not calls


@pytest.mark.parametrize("size", [129, 192, 256, 300, 512, 1024])
def test_an_inverse_swept_in_blocks_agrees_with_float64(size: int) -> None:
    torch.manual_seed(0)
    x = torch.rand(size, size + 100, device="cuda")
    exact = equations.inverse(x.double(), 1 / (size * 0.5))
    for damping in (0.5, torch.tensor(0.5, device="cuda")):
        for in_difference, wanted in ((False, exact), (True, exact / (size * 0.5))):
            (made,) = invert([Rows(x, size, in_difference=in_difference)], damping, "")
            assert made.inverse is not None
            assert made.failures == 0
            assert_close(made.inverse, wanted, TOLERANCE[torch.float32])
    x[size // 2 :] = x[: size - size // 2].clone()  # singular but for the damping
    (made,) = invert([Rows(x, size)], 1e-9, "")
    found = made.inverse
    assert found is not None
    assert found.isfinite().all()
    assert found.abs().max() <= 1.01


@pytest.mark.parametrize("rows", [1, 8, 16, 64, 100, 256])
@pytest.mark.parametrize("features", [17, 384, 4608])
@pytest.mark.parametrize("outputs", [1, 100, 512])
def test_products_of_a_list_agree_with_float64(outputs: int, features: int, rows: int) -> None:
    torch.manual_seed(0)
    rs = [torch.rand(rows, features, device="cuda") for _ in range(3)]
    gradients = [torch.randn(outputs, features, device="cuda") for _ in range(3)]
    few = rows < features
    for damping in (0.5, torch.tensor(0.5, device="cuda")):
        for _ in range(2):  # the first launch compiles, the second goes past that
            made = invert([Rows(r, rows, in_difference=few) for r in rs], damping, "")
            found = multiply(gradients, made)
        for r, gradient, result in zip(rs, gradients, found, strict=True):
            moment = r.double().mT @ r.double() / (rows * 0.5)
            exact = torch.linalg.solve(moment + torch.eye(features, device="cuda"), gradient.double(), left=False)
            assert_close(result, exact, TOLERANCE[torch.float32])
            (alone,) = multiply([gradient], invert([Rows(r, rows, in_difference=few)], damping, ""))
            assert torch.equal(result, alone)


def test_an_eager_step_inverts_all_layers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    small = pytest.importorskip("isaac_newton.kernels.inverse_small")
    calls: list[int] = []
    inverses = small.inverses
    monkeypatch.setattr(small, "inverses", lambda xs, *a, **k: calls.append(len(xs)) or inverses(xs, *a, **k))
    model = nn.Sequential(*[nn.Linear(20 + n, 21 + n) for n in range(10)]).cuda()
    isaac.attach(model, damping=1.0)
    model(torch.rand(15, 20, device="cuda")).sum().backward()
    assert calls == [10]


def test_layers_on_two_streams_do_not_wait_for_each_others_inverses() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(300, 200), nn.Linear(300, 200), nn.Linear(200, 5)])
    twin = copy.deepcopy(model).double()
    model.cuda()
    isaac.attach(model, damping=0.1)
    isaac.attach(twin, damping=0.1)
    x = torch.rand(60, 300)
    device_x, side = x.cuda(), torch.cuda.Stream()
    for _ in range(20):
        model.zero_grad()
        twin.zero_grad()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000)
            one = model[0](device_x)
        other = model[1](device_x)
        torch.cuda.current_stream().wait_stream(side)
        one.record_stream(torch.cuda.current_stream())
        model[2](torch.relu(one) * torch.tanh(other)).square().sum().backward()
        twin[2](torch.relu(twin[0](x.double())) * torch.tanh(twin[1](x.double()))).square().sum().backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert_close(p.grad.cpu().double(), q.grad, TOLERANCE[torch.float32])


def test_a_graph_that_is_kept_gives_the_same_again_in_a_captured_step() -> None:
    model = nn.Sequential(nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 4)).cuda()
    twin = copy.deepcopy(model)
    isaac.attach(model, damping=0.1)
    isaac.attach(twin, damping=0.1)
    x, y = torch.rand(8, 30, device="cuda"), torch.randint(4, (8,), device="cuda")

    def step(x: Tensor, y: Tensor) -> Tensor:
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward(retain_graph=True)
        loss.backward()
        return loss

    run = isaac.capture(step, x, y)
    for _ in range(6):
        run(x, y)
    F.cross_entropy(twin(x), y).backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(p.grad, 2 * q.grad, TOLERANCE[torch.float32])


def test_without_triton_the_library_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with_triton = train("eager")
    monkeypatch.setattr(kernels, "HAS_TRITON", False)
    assert_close(train("eager"), with_triton, TOLERANCE[torch.float32])


def test_a_branch_reads_its_inputs_before_their_memory_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main stream frees and reuses what a branch has not read yet: wrong without `record_stream`, right with it."""

    def race() -> bool:
        owner = nn.Identity()
        size = 1 << 20
        for _ in range(20):
            x = torch.ones(size, device="cuda")
            with streams.beside(owner, x):
                torch.cuda._sleep(2_000_000)
                y = x * 2
            del x
            # The allocator would hand out the same block: overwrite it.
            garbage = [torch.full((size,), 7.0, device="cuda") for _ in range(4)]
            streams.join(owner)
            if not bool((y == 2).all()):
                return False
            del garbage
        return True

    assert race()
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: None)
    assert not race()
    torch.cuda.synchronize()


@pytest.mark.parametrize("rows", [60, 200])
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": "joint"}, {"sharing": "reduce"}, {"output_damping": 0.2, "output_curvature": "empirical"}],
    ids=["plain", "joint", "reduce", "zeta"],
)
@pytest.mark.usefixtures("slow_branches")
def test_nothing_reads_a_gradient_before_its_branch_has_written_it(options: dict[str, Any], rows: int) -> None:
    assert_close(train("captured", rows, **options), train("cpu", rows, **options), TOLERANCE[torch.float32])


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.usefixtures("slow_branches")
def test_hooks_of_parameters_see_what_a_branch_has_written(register: str) -> None:
    model = network().cuda()
    isaac.attach(model, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = {parameter: torch.zeros_like(parameter) for parameter in model.parameters()}
    for parameter, copied in seen.items():
        if register == "register_hook":
            parameter.register_hook(functools.partial(_copy, copied))
        else:
            parameter.register_post_accumulate_grad_hook(lambda parameter: _copy(seen[parameter], parameter.grad))

    step = training_step(model, optimizer)

    (x, y), *_ = batches(60)
    captured = isaac.capture(step, x.cuda(), y.cuda())
    for _ in range(5):
        for copied in seen.values():
            copied.zero_()
        captured(x.cuda(), y.cuda())
        for parameter, copied in seen.items():
            assert parameter.grad is not None
            assert parameter.grad.any()
            assert torch.equal(copied, parameter.grad)


def test_tied_weights_and_a_layer_used_twice_survive_the_overlap() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.tied = nn.Linear(50, 50), nn.Linear(50, 50), nn.Linear(50, 50)
            self.tied.weight = self.second.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.tied(torch.tanh(self.second(torch.tanh(self.first(torch.tanh(self.first(x)))))))

    results = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = Twice().cuda()
        isaac.attach(model, 0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor, y: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        data = [(x.cuda(), y.cuda()) for x, y in batches(30)]
        run: Any = isaac.capture(step, *data[0]) if captured else step
        for x, y in data:
            run(x, y)
        results.append(flat(model))
    assert_close(results[1], results[0], 1e-5)


def test_captured_steps_stay_right_for_many_replays() -> None:
    """A race between branches would show as a difference between two runs of the same captured step."""

    def run() -> Tensor:
        model = network().cuda()
        isaac.attach(model, 0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        step = training_step(model, optimizer)

        data = [(x.cuda(), y.cuda()) for x, y in batches(60)]
        captured = isaac.capture(step, *data[0])
        for number in range(400):
            captured(*data[number % STEPS])
        return flat(model)

    assert torch.equal(run(), run())


@pytest.mark.parametrize("captured", [False, True])
def test_many_networks_at_once_equal_separate_runs(captured: bool) -> None:
    dampings = [math.inf, 1.0, 0.1]
    models = []
    for seed in range(3):
        torch.manual_seed(seed)
        models.append(nn.Sequential(nn.Linear(50, 70), nn.ReLU(), nn.Linear(70, 5)).cuda())
    stacked = isaac.Ensemble(models, damping=dampings)
    optimizer = per_copy("sgd", stacked, [0.1, 0.2, 0.3])

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        losses = stacked.losses(F.cross_entropy, stacked(x), y)
        losses.sum().backward()
        optimizer.step()
        return losses

    random = torch.Generator().manual_seed(1)
    data = [(torch.rand(60, 50, generator=random), torch.randint(5, (60,), generator=random)) for _ in range(50)]
    run: Any = isaac.capture(step, *(t.cuda() for t in data[0])) if captured else step
    for x, y in data:
        run(x.cuda(), y.cuda())
    for number, (model, trained) in enumerate(zip(models, stacked.separate(), strict=True)):
        single, start = copy.deepcopy(model).cpu().double(), flat(model)
        if dampings[number] != math.inf:
            isaac.attach(single, dampings[number])
        own = torch.optim.SGD(single.parameters(), lr=[0.1, 0.2, 0.3][number])
        for x, y in data:
            own.zero_grad()
            F.cross_entropy(single(x.double()), y).backward()
            own.step()
        assert relative_error(flat(trained) - start, flat(single) - start) <= TOLERANCE[torch.float32]


def test_what_cannot_be_captured_says_why() -> None:
    model = network().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = (tensor.cuda() for tensor in batches(30)[0])

    def looking(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if loss.item() > 0:
            loss.backward()
        optimizer.step()
        return loss

    step = isaac.capture(looking, x, y, warmup=1)
    step(x, y)
    with pytest.raises(RuntimeError, match="cannot be captured"):
        step(x, y)


def test_a_batch_of_another_shape_is_refused() -> None:
    x = torch.rand(30, 50, device="cuda")
    step = isaac.capture(lambda x: x.sum(), x)
    with pytest.raises(ValueError, match=r"shape \(30, 50\) as at the capture, got torch.float32 of shape \(29, 50\)"):
        step(x[:29])
    with pytest.raises(ValueError, match="captured with 1 inputs, got 2"):
        step(x, x)


def test_the_conditioners_of_a_captured_step_come_from_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden inputs need gradients; that alone must not send their conditioners to the slow path."""
    small = pytest.importorskip("isaac_newton.kernels.inverse_small")
    inverted: list[int] = []
    inverses = small.inverses
    monkeypatch.setattr(small, "inverses", lambda xs, *a, **k: inverted.append(len(xs)) or inverses(xs, *a, **k))
    for options in ({}, {"sharing": "reduce"}):
        inverted.clear()
        train("captured", **options)
        assert sum(inverted) >= 6, options  # the last warm-up step and the capture, three layers each
