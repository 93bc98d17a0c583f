"""The Triton kernels give the right numbers; without a GPU they run in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

CHECK = """
import numpy as np
import torch
import triton
from triton.runtime import interpreter
from isaac_newton import equations
from isaac_newton.kernels import blocks, differences, few, fused, means

torch.manual_seed(0)
worst = 0.0
for size, features, damping in [(1, 5, 0.1), (8, 30, 0.1), (17, 40, 0.01), (60, 100, 1.0), (60, 300, 1.0), (100, 128, 1.0)]:
    for x in (torch.rand(size, features), torch.rand(2, size, features), torch.rand(features, size).mT):
        exact = equations.inverse(x.double(), 1 / (size * damping))
        for strength in (damping, torch.tensor(damping)):
            for launches in (1, 2):
                result = fused.inverse(x, strength, size, launches=launches)
                assert result.shape == exact.shape
                # Products are rounded by 2⁻²³ of the trace.
                allowed = 1.2e-7 * (x.square().sum((-2, -1)).max() / (size * damping)).item() + 4e-6
                worst = max(worst, ((result - exact).norm() / exact.norm()).item() / allowed)
                scaled = fused.inverse(x, strength, size, launches=launches, scaled=True)
                torch.testing.assert_close(scaled, result / (size * damping), rtol=1e-6, atol=0)
for x, strength in ((torch.rand(129, 150), 0.3), (torch.randn(151, 150).mT, torch.tensor(0.1))):
    size = len(x)
    exact = equations.inverse(x.double(), 1 / (size * float(strength)))
    result = blocks.inverse(x, strength, size)
    assert result.shape == exact.shape
    allowed = 1.2e-7 * (x.square().sum() / (size * strength)).item() + 4e-6
    worst = max(worst, ((result - exact).norm() / exact.norm()).item() / allowed)
x = torch.rand(140, 200)
x[70:] = x[:70]
result = blocks.inverse(x, 1e-9, 140)
assert result.isfinite().all() and result.abs().max() <= 1.01, result.abs().max()
errors = []
for _ in range(6):  # differences a tenth of their parts, for which 2⁻²³ of the trace is much
    x = torch.randn(60, 400) / 2 + 1
    scale, wide, gradient = 1 / (60 * 0.3), x.double(), (torch.randn(5, 60) @ x).double()
    exact = gradient - gradient @ wide.mT @ (scale * equations.inverse(wide, scale)) @ wide
    result = gradient - gradient @ wide.mT @ fused.inverse(x, 0.3, 60, scaled=True).double() @ wide
    errors.append(((result - exact).norm() / exact.norm()).item())
assert sum(errors) / 6 < 1.6e-4, errors
x = torch.rand(20, 50)
x[10:] = x[:10]  # singular but for the damping: rounding alone would make a pivot negative
result = fused.inverse(x, 1e-9, 20)
assert result.isfinite().all() and result.abs().max() <= 1.01, result.abs().max()
x[3, 3] = float("nan")
assert not fused.inverse(x, 1.0, 20).isfinite().all()
for shapes in ([(60, 784), (60, 100), (60, 30), (7, 7)], [(60, 40)], [(5, 9)] * 8, [(1, 5), (128, 100), (128, 128)]):
    xs = [torch.rand(*shape) for shape in shapes]
    whole = [len(x) % 2 == 1 or x.shape[1] == 100 for x in xs]
    kinds = [fused.MULTIPLIED * multiplied for multiplied in whole]
    results = fused.inverses(xs, 0.7, kinds)
    scaled = fused.inverses(xs, torch.tensor(0.7), [kind + fused.SCALED for kind in kinds], launches=2)
    for x, result, other in zip(xs, results, scaled, strict=True):
        torch.testing.assert_close(other, result / (len(x) * 0.7), rtol=1e-4, atol=1e-6)
    for x, result, multiplied in zip(xs, results, whole, strict=True):
        small = x if x.shape[0] < x.shape[1] else x.mT
        exact = equations.inverse(small.double(), 1 / (len(x) * 0.7))
        if multiplied:
            exact = exact @ x.double() if small is x else x.double() @ exact
        assert result.shape == exact.shape and result.is_contiguous()
        allowed = 1.2e-7 * (x.square().sum() / (len(x) * 0.7)).item() + 4e-6
        worst = max(worst, ((result - exact).norm() / exact.norm()).item() / allowed)
for groups, outputs, rows, features in [(1, 5, 3, 7), (1, 40, 8, 384), (2, 33, 16, 130), (1, 17, 1, 300), (1, 16, 16, 17)]:
    r = torch.rand(groups, rows, features)
    for gradient in (torch.randn(groups, outputs, features), torch.randn(groups, features, outputs).mT):
        moment = r.double().mT @ r.double() / (rows * 0.3)
        exact = gradient.double() @ torch.linalg.inv(torch.eye(features) + moment)
        for strength in (0.3, torch.tensor(0.3)):
            result = few.multiply(gradient, r, strength)
            assert result.shape == exact.shape and result.is_contiguous()
            allowed = 1.2e-7 * moment.diagonal(dim1=-2, dim2=-1).sum(-1).max().item() + 2e-6
            worst = max(worst, ((result - exact).norm() / exact.norm()).item() / allowed)
for samples, positions, features, dtype in [(1, 1, 1, "float32"), (3, 40, 70, "float32"), (8, 33, 130, "bfloat16")]:
    x = (torch.randn(samples, positions, features) + 1).to(getattr(torch, dtype))
    mask = torch.rand(samples, positions) < 0.6
    mask[0] = False
    x[0, 0, 0] = float("nan")  # where nothing counts, nothing is read
    for x, mask in ((x, mask), (x.mT.contiguous().mT, mask.T.contiguous().T)):
        exact = x.double().masked_fill(~mask[..., None], 0).sum(1) / mask.sum(1, keepdim=True).clamp_min(1)
        torch.testing.assert_close(means.average(x, mask), exact.float(), rtol=1e-5, atol=1e-6)
for groups, outputs, rows, features in [(1, 5, 3, 7), (1, 40, 8, 130), (2, 33, 16, 70), (1, 17, 1, 129)]:
    r = torch.rand(groups, rows, features)
    inverse = fused.inverse(r, 0.3, rows, scaled=True)
    for gradient in (torch.randn(groups, outputs, features), torch.randn(groups, features, outputs).mT):
        result = few.subtract(gradient, r, inverse)
        exact = gradient.double() - gradient.double() @ r.double().mT @ inverse.double() @ r.double()
        assert result.shape == exact.shape and result.is_contiguous()
        torch.testing.assert_close(result, exact.float(), rtol=1e-4, atol=1e-4)
plain = interpreter.InterpreterBuilder.create_dot
def widened(x):  # the interpreter keeps bfloat16 as integers, and would multiply these
    if x.dtype.scalar != triton.language.bfloat16:
        return x
    return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), triton.language.float32)
interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *rest: plain(self, widened(a), widened(b), *rest)
for outputs, rows, features in [(5, 17, 30), (70, 100, 130), (130, 20, 600), (64, 128, 129), (1, 33, 1000), (512, 18, 70)]:
    r = torch.rand(1, rows, features)
    inverse = (equations.inverse(r.double(), 1 / (rows * 0.3)) / (rows * 0.3)).float()
    prepared = differences.prepare(inverse, r)
    assert torch.equal(prepared[0].double().sum(0)[:rows, :features], r[0].double())
    exact = inverse.double() @ r.double()
    assert (prepared[1].double().sum(0)[:rows, :features] - exact).norm() < 3e-7 * exact.norm()
    whole = torch.randn(1, outputs, features)
    for gradient in (whole, whole.bfloat16(), torch.randn(1, features, outputs).mT):
        result = differences.subtract(gradient, prepared)
        exact = gradient.double() - gradient.double() @ r.double().mT @ inverse.double() @ r.double()
        assert result.shape == exact.shape and result.is_contiguous() and result.dtype is torch.float32
        assert (result - exact).norm() < 6e-7 * gradient.double().norm()
for samples, channels, pixels, count, dtype in [(2, 3, 20, 9, "float32"), (3, 70, 99, 9, "bfloat16"), (1, 4, 65, 25, "half")]:
    taps = (torch.rand(pixels, count) < 0.7).to(getattr(torch, dtype))
    x = torch.randn(samples, channels, pixels).to(taps.dtype)
    for x in (x, x.mT.contiguous().mT):
        exact = x.double() @ taps.double() / 7
        torch.testing.assert_close(means.tap_means(x, taps, 7, innermost=False), exact.flatten(1).float(), rtol=1e-5, atol=1e-5)
        inner = exact.mT.flatten(1).float()
        torch.testing.assert_close(means.tap_means(x, taps, 7, innermost=True), inner, rtol=1e-5, atol=1e-5)
print(worst)
"""

#: Few rows go through one kernel, in whatever way they come; a pass that will be differentiated itself does not.
LAYERS = """
import torch
from torch import nn
import isaac_newton as isaac
from isaac_newton import kernels
from isaac_newton.kernels import few, means

def gradients(create_graph, samples, masked):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2), nn.Tanh(), nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.Flatten(2), nn.Linear(9, 7),
        nn.Tanh(), nn.Linear(7, 3)
    )
    handle = isaac.attach(model, 0.3, sharing="reduce", bias="joint")
    handle.mask = torch.rand(samples, 4) < 0.6 if masked else None
    x = torch.randn(samples, 2, 7, 7, requires_grad=True)
    loss = model(x).square().mean()
    if create_graph:
        weights = list(model.parameters())
        found = torch.autograd.grad(loss, weights, create_graph=True)
        loss = sum(gradient.square().sum() for gradient in found)
    loss.backward()
    return [p.grad.clone() for p in (*model.parameters(), x)]

def recorded(name, function):
    return lambda *arguments, **more: (calls.add(name), function(*arguments, **more))[1]

makers = {"multiply": few, "subtract": few, "tap_means": means, "average": means}
functions, questions = {name: getattr(maker, name) for name, maker in makers.items()}, (kernels.can_fuse, kernels.can_average)
can_multiply = kernels.can_multiply
cases = [(False, 5, False, False), (False, 5, True, False), (False, 5, False, True), (False, 20, False, False)]
cases += [(True, 5, False, False), (True, 20, True, False)]
for create_graph, samples, masked, ahead in cases:
    kernels.can_fuse, kernels.can_average = questions
    # In a captured step the inverse is there before the gradient is.
    kernels.can_multiply = (lambda r: False) if ahead else can_multiply
    expected = gradients(create_graph, samples, masked)
    kernels.can_fuse = lambda x, size: size <= 128 and x.dtype is torch.float32
    kernels.can_average = lambda x: not (x.requires_grad and torch.is_grad_enabled())
    calls = set()
    for name, maker in makers.items():
        setattr(maker, name, recorded(name, functions[name]))
    for actual, wanted in zip(gradients(create_graph, samples, masked), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-6)
    # A pass that will be differentiated itself takes what torch can see; the pass through it need not.
    few_rows = {"subtract" if ahead else "multiply"} if samples == 5 else set()
    wanted = {"tap_means"} | few_rows | ({"average"} if masked else set())
    assert create_graph or wanted == calls, (samples, masked, calls)
print(0)
"""


@pytest.mark.parametrize("code", [CHECK, LAYERS], ids=["kernels", "layers"])
def test_the_interpreted_kernels_agree_with_float64(code: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parent.parent / "src")}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 1
