"""torch.compile takes an attached model whole and gives the eager gradients; torch.func and capture know their limits."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import isaac_newton as isaac
from isaac_newton.capture import _DeviceNumbers
from isaac_newton.core.options import LIVE, Run
from reference import assert_close

CHECK = """
import copy, torch
from torch import nn
from torch.nn import functional as F
import isaac_newton as isaac

worst = 0.0
for backend, options in (("inductor", {}), ("aot_eager", {"damping": isaac.Relative(0.5), "bias": "joint"})):
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(inplace=True), nn.Linear(30, 5))
    eager = copy.deepcopy(model)
    isaac.attach(model, **options)
    isaac.attach(eager, **options)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for shape in ((96, 20), (24, 4, 20)):
        x, y = torch.randn(shape), torch.randint(5, (96,))
        F.cross_entropy(compiled(x).reshape(96, 5), y).backward()
        F.cross_entropy(eager(x).reshape(96, 5), y).backward()
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        worst = max(worst, ((p.grad - q.grad).norm() / q.grad.norm()).item())
print(worst)
"""


def test_a_linear_model_compiles_without_a_graph_break_and_gives_the_eager_gradients() -> None:
    # In a process of its own: the checks of shapes that the tests add to every call are not made to be compiled.
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent / "src")}
    result = subprocess.run([sys.executable, "-c", CHECK], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 1e-5


def test_functional_calls_use_the_given_weights() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    isaac.attach(model, 0.1)
    other = {name: torch.randn_like(p).requires_grad_() for name, p in model.named_parameters()}
    x = torch.randn(4, 6, dtype=torch.float64)
    torch.func.functional_call(model, other, x).square().sum().backward()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(other[name])
    model(x).square().sum().backward()
    for name, p in model.named_parameters():
        assert_close(other[name].grad, p.grad, 1e-14)


def test_torch_func_grad_gives_the_conditioned_gradient() -> None:
    model = nn.Linear(6, 3, bias=False, dtype=torch.float64)
    isaac.attach(model, 0.1)
    x, g = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)

    def loss(weight: Tensor) -> Tensor:
        output: Tensor = torch.func.functional_call(model, {"weight": weight}, x)
        return (output * g).sum()

    gradient = torch.func.grad(loss)(model.weight.detach())
    assert_close(gradient, isaac.equations.zeta_star(g, x, 0.1))


def test_capture_refuses_what_it_cannot_do() -> None:
    x = torch.ones(2)
    with pytest.raises(TypeError, match="train_step must be a function"):
        isaac.capture(3, x)
    with pytest.raises(ValueError, match=r"warmup must be a whole number >= 1, got 0"):
        isaac.capture(torch.sum, x, warmup=0)
    with pytest.raises(TypeError, match="input 0 must be a tensor, got list"):
        isaac.capture(torch.sum, [1])
    with pytest.raises(ValueError, match="input 0 is on cpu: only steps on a CUDA device"):
        isaac.capture(torch.sum, x)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="capture needs a CUDA device"):
            isaac.capture(torch.sum)


def test_a_copy_of_an_attached_model_can_be_captured_too() -> None:
    model = nn.Linear(3, 2)
    handle = isaac.attach(model)
    twin = copy.deepcopy(model)
    assert handle._run in LIVE
    assert vars(twin)["forward"].run in LIVE


def test_a_captured_schedule_is_at_the_step_to_come() -> None:
    """What a graph reads before each replay, and in the last step before the capture; the numbers do not need a GPU."""
    run = Run(damping=lambda step: 10.0 + step, output_damping=lambda step: isaac.Relative(1.0 + step))
    run.backward_passes = 3
    dampings = _DeviceNumbers(run, torch.device("cpu"))
    with dampings.on_device():
        assert run.capture is not None
        assert (run.capture.damping.item(), run.capture.output_damping.item()) == (13.0, 4.0)
        read = run.capture.damping
    assert run.capture is None
    for step in (3, 4, 5):
        dampings.refresh()
        assert read.item() == 10.0 + step
        assert run.backward_passes == step + 1
    run.set_damping(isaac.Relative(0.5))
    with pytest.raises(RuntimeError, match=r"between a number and isaac\.Relative"):
        dampings.refresh()
