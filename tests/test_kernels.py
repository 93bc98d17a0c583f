"""The kernels over lists of layers give the right numbers; without a GPU they run in Triton's interpreter.

Run as a script in a process of its own: `python tests/test_kernels.py subtract cpu`.
"""

import copy
import importlib
import itertools
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isaac_newton as isaac
from isaac_newton.math import equations

CHECKS: dict[str, Callable[[str], None]] = {}


def check(function: Callable[[str], None]) -> Callable[[str], None]:
    CHECKS[function.__name__] = function
    return function


def kernels(name: str) -> Any:
    return importlib.import_module(f"isaac_newton.kernels.{name}")


def relative_error(actual: Tensor, exact: Tensor) -> float:
    return ((actual.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def same(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> bool:
    return all((a is None and b is None) or torch.equal(a, b) for a, b in zip(first, second, strict=True))


# Inverses


def exact_inverse(x: Tensor, strength: float, relative: str, kind: int) -> tuple[Tensor, Tensor, float, Tensor]:
    """What `Small` has, in float64."""
    x = x.double()
    k, n = x.shape
    gram = x @ x.mT if k < n else x.mT @ x
    to = {"": 1.0, "mean": (x.square().sum() / (k * n)).item(), "largest": torch.linalg.eigvalsh(gram)[-1].item() / k}
    damping = strength * to[relative]
    inverse = torch.linalg.inv(torch.eye(len(gram), dtype=x.dtype, device=x.device) + gram / (k * damping))
    if kind & 2:
        inverse = inverse / (k * damping)
    return inverse, inverse @ x if k < n else x @ inverse, damping, gram


def check_inverses(module: Any, xs: list[Tensor], strength: float | Tensor, relative: str, kinds: list[int]) -> None:
    results = module.inverses(xs, strength, relative, kinds)
    assert len(results) == len(xs)
    for number, (x, kind, result) in enumerate(zip(xs, kinds, results, strict=True)):
        inverse, multiplied, damping, gram = exact_inverse(x, float(strength), relative, kind)
        # Products are rounded by 2⁻²³ of the trace; eight products find an eigenvalue that stands out to four digits.
        allowed = 1.2e-7 * gram.trace().item() / (len(x) * damping) + 4e-6
        allowed += 2e-4 if relative == "largest" else 0.0
        # Of numbers of half precision: tensor cores add up with fewer digits than float32 has.
        summed = 2e-6 if x.dtype is torch.float32 else 1e-5
        allowed += summed
        assert result.damping.dim() == 0
        assert result.inverse.shape == inverse.shape
        assert abs(result.damping.item() / damping - 1) < (2e-4 if relative == "largest" else summed)
        assert relative_error(result.inverse, inverse) < allowed, (x.shape, x.dtype, relative, kind)
        assert (result.multiplied is not None) == bool(kind & module.MULTIPLIED)
        assert (result.gram is not None) == bool(kind & module.GRAM)
        if kind & module.MULTIPLIED:
            assert result.multiplied.shape == x.shape
            assert result.multiplied.is_contiguous()
            assert relative_error(result.multiplied, multiplied) < 2 * allowed
        if kind & module.GRAM:
            assert relative_error(result.gram, gram) < summed
        if number % 3 == 0:
            assert same(module.inverses([x], strength, relative, [kind])[0], result), "the list shows in the bits"


def check_careful(module: Any, size: int, device: str) -> None:
    """Repeated rows with a tiny damping, rows of zeros, what is not a number, and a difference much smaller than its parts."""
    x = torch.rand(size, 2 * size, device=device)
    x[size // 2 :] = x[: size - size // 2]
    result = module.inverses([x], 1e-9, "", [0])[0].inverse
    assert result.isfinite().all()
    assert result.abs().max() <= 1.01
    for relative in ("mean", "largest"):
        plain = module.inverses([torch.zeros_like(x)], 0.1, relative, [module.MULTIPLIED])[0]
        assert torch.equal(plain.inverse, torch.eye(size, device=device))
        assert not plain.multiplied.any()
    x[3, 3] = float("nan")
    for relative in ("", "mean", "largest"):
        small = module.inverses([x], 1.0, relative, [module.MULTIPLIED])[0]
        assert not small.inverse.isfinite().all()
        assert not small.multiplied.isfinite().all()


@check
def inverse_small(device: str) -> None:
    module = kernels("inverse_small")
    shapes = [(1, 5), (15, 30), (16, 700), (17, 40), (60, 300), (64, 64), (128, 129), (300, 60), (7, 1), (1, 1), (64, 256)]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for relative, strength in (("", 0.3), ("mean", torch.tensor(0.3, device=device)), ("largest", 0.1)):
            # Each type and each damping with every shape, if not each with each: the interpreter is slow.
            every = device == "cuda" or (dtype, relative) == (torch.float32, "mean")
            few = shapes[:4] if (dtype, relative) == (torch.float32, "largest") else [(1, 5), (17, 40)]
            some = shapes if every else few
            xs = [torch.rand(*shape, device=device).to(dtype) for shape in some]
            check_inverses(module, xs, strength, relative, [(3 * number + 1) % 8 for number in range(len(xs))])
    for count in (1, 3, 17, 40) if device == "cuda" else (3, 17):
        xs = [torch.rand(9 + number % 3, 20, device=device) for number in range(count)]
        check_inverses(module, xs, 0.7, "mean", [module.MULTIPLIED] * count)
    assert module.inverses([], 0.3, "", []) == []
    check_careful(module, 20, device)
    # Differences a tenth of their parts, for which 2⁻²³ of the trace is much: raising every pivot by it gives a median of 6.5.
    errors, random = [], torch.Generator().manual_seed(0)
    for _ in range(12):
        x = torch.randn(60, 400, generator=random) / 2 + 1
        gradient, wide = (torch.randn(5, 60, generator=random) @ x).double(), x.double()

        def error(inverse: Tensor, wide: Tensor = wide, gradient: Tensor = gradient) -> float:
            exact = exact_inverse(wide, 0.3, "", module.SCALED)[1]
            rows = gradient @ wide.mT
            return relative_error(gradient - rows @ inverse.double() @ wide, gradient - rows @ exact)

        library = torch.linalg.inv(torch.eye(60) + x @ x.mT / 18) / 18
        errors.append(error(module.inverses([x.to(device)], 0.3, "", [module.SCALED])[0].inverse.cpu()) / error(library))
    assert statistics.median(errors) < 5, errors


# Differences

DIFFERENCES = [(5, 3, 7), (70, 16, 130), (64, 64, 192), (130, 60, 300), (1, 17, 33), (10, 128, 200), (96, 200, 256), (3, 1, 1)]


def differences(device: str, dtype: torch.dtype, transposed: bool, cases: Sequence[tuple[int, int, int]]) -> tuple[Any, ...]:
    gradients, rows, inverses = [], [], []
    for outputs, k, features in cases:
        shape = (features, outputs) if transposed else (outputs, features)
        gradient = torch.randn(shape, device=device).to(dtype)
        gradients.append(gradient.mT if transposed else gradient)
        rows.append(torch.randn(k, features, device=device) + 0.5)
        inverses.append(exact_inverse_of_rows(rows[-1]))
    multiplied = [(p.double() @ r.double()).float() for p, r in zip(inverses, rows, strict=True)]
    return gradients, rows, multiplied, inverses


def exact_inverse_of_rows(r: Tensor) -> Tensor:
    """P in the scaled form, with fewer features than rows as well."""
    k, gram = len(r), r.double() @ r.double().mT
    return (torch.linalg.inv(torch.eye(k, device=r.device) + gram / (k * 0.5)) / (k * 0.5)).float()


@check
def subtract(device: str) -> None:
    module = kernels("subtract")
    # The interpreter cuts digits off where it rounds to bfloat16.
    rounding = {torch.float32: 2e-6, torch.bfloat16: 2**-8 if device == "cuda" else 2**-7, torch.float16: 2**-11}
    for dtype, transposed in ((torch.float32, False), (torch.float32, True), (torch.bfloat16, False), (torch.float16, True)):
        cases = DIFFERENCES if device == "cuda" or (dtype, transposed) == (torch.float32, False) else DIFFERENCES[:2]
        gradients, rows, multiplied, inverses = differences(device, dtype, transposed, cases)
        pairs = [(p, r @ r.mT) if number % 4 else None for number, (p, r) in enumerate(zip(inverses, rows, strict=True))]
        for in_place, keep_norm in ((False, None), (True, pairs)):
            given = [gradient.clone() for gradient in gradients]
            results = module.subtract(given, rows, multiplied, in_place=in_place, keep_norm=keep_norm)
            for n, (plain, r, m, result) in enumerate(zip(gradients, rows, multiplied, results, strict=True)):
                exact = plain.double() - plain.double() @ r.double().mT @ m.double()
                if keep_norm and keep_norm[n]:
                    exact *= plain.double().norm() / exact.norm()
                    if dtype is torch.float32:
                        assert abs(result.double().norm() / plain.double().norm() - 1) < 1e-5
                assert result.shape == plain.shape
                assert result.dtype is dtype
                assert result.stride() == plain.stride()
                assert (result is given[n]) == in_place
                assert in_place or torch.equal(given[n], plain)
                assert (result.double() - exact).norm() < rounding[dtype] * plain.double().norm(), (n, dtype, transposed)
                if n % 3 == 0:
                    alone = module.subtract([plain], [r], [m], in_place=False, keep_norm=keep_norm and [keep_norm[n]])
                    assert torch.equal(alone[0], result), "the list shows in the bits"
    subtract_lists(module, device)


def subtract_lists(module: Any, device: str) -> None:
    """Long lists, slices, norms that are 0 or not finite."""
    for count in (3, 17, 40) if device == "cuda" else (3, 17):
        gradients, rows, multiplied, _ = differences(device, torch.float32, False, [(4, 2 + n % 2, 6) for n in range(count)])
        results = module.subtract(gradients, rows, multiplied, in_place=False)
        for gradient, r, m, result in zip(gradients, rows, multiplied, results, strict=True):
            assert relative_error(result, gradient.double() - gradient.double() @ r.double().mT @ m.double()) < 2e-6
    assert module.subtract([], [], [], in_place=True) == []
    (gradient,), (r,), (m,), (p,) = differences(device, torch.float32, False, [(70, 8, 40)])
    part = gradient[3:, 5:]
    r, m = r[:, 5:].contiguous(), m[:, 5:].contiguous()
    exact = part.double() - part.double() @ r.double().mT @ m.double()
    whole = gradient.clone()
    assert relative_error(module.subtract([whole[3:, 5:]], [r], [m], in_place=True)[0], exact) < 2e-6
    assert torch.equal(whole[:3], gradient[:3])
    assert torch.equal(whole[:, :5], gradient[:, :5])
    assert relative_error(module.subtract([part], [r], [m], in_place=False)[0], exact) < 2e-6
    pair = [(p, r @ r.mT)]
    assert not module.subtract([torch.zeros_like(part)], [r], [m], in_place=False, keep_norm=pair)[0].any()
    broken = part.clone()
    broken[1, 2] = float("nan")
    result = module.subtract([broken], [r], [m], in_place=False, keep_norm=pair)[0]
    assert result[1].isnan().all()
    assert torch.equal(result[2:], module.subtract([part], [r], [m], in_place=False)[0][2:])
    with pytest.raises(ValueError, match="contiguous"):
        module.subtract([gradient[::2, ::2]], [r], [m], in_place=True)


# Large inverses


@check
def inverse_large(device: str) -> None:
    module = kernels("inverse_large")
    large = device == "cuda"  # the interpreter takes seconds for each block
    shapes = [(40, 50), (100, 120), (90, 70)] + large * [(129, 150), (300, 257), (256, 3072), (1024, 1030), (1000, 1024)]
    for relative, strength in (("", 0.3), ("mean", torch.tensor(0.3, device=device)), ("largest", 0.1)):
        some = shapes if large or relative == "mean" else shapes[:1]
        for dtype in (torch.float32, torch.bfloat16) if large else (torch.float32 if relative else torch.bfloat16,):
            xs = [torch.rand(*shape, device=device).to(dtype) for shape in some]
            check_inverses(module, xs, strength, relative, [7, 3, 1, 3, 2, 5, 3, 0][: len(xs)])
    check_careful(module, 140 if large else 40, device)


@check
def largest_eigenvalue(device: str) -> None:
    """Both kernels estimate it as `equations` does, also where rows cancel each other."""
    estimate = equations.largest_eigenvalue
    x = torch.randn(24, 40).to(device)  # the same on every device: how fast the products find it depends on the numbers
    for rows in (x, torch.cat([x, -x]), torch.cat([x, torch.zeros_like(x)])):
        gram = rows.double() @ rows.double().mT
        expected = estimate(gram).item()
        exact = torch.linalg.eigvalsh(gram)[-1].item()
        assert 0.9 * exact < expected <= exact * (1 + 1e-9)
        wide = torch.cat([rows, torch.zeros(len(rows), 40, device=device)], dim=1).contiguous()
        for module in ("inverse_small", "inverse_large"):
            damping = kernels(module).inverses([wide], 1.0, "largest", [0])[0].damping.item()
            assert abs(damping * len(rows) / expected - 1) < 1e-5


# Drawn rows


def window_of(module: Any, x: Tensor, *how: Any) -> Any:
    return module.Window(x, x.shape, x.stride(), *how)


def rows_of(window: Any) -> Tensor:
    """All rows of a window, one pixel at a time."""
    missing = 3 - len(window.kernel)
    x = window.x.double()
    x = x.reshape(*x.shape[:2], *[1] * missing, *x.shape[2:])
    kernel, stride, dilation, places = (
        (1,) * missing + each for each in (window.kernel, window.stride, window.dilation, window.places)
    )
    padding = (0,) * missing + window.padding
    rows = torch.zeros(len(x), *places, x.shape[1], *kernel, dtype=x.dtype, device=x.device)
    for place in itertools.product(*map(range, places)):
        for tap in itertools.product(*map(range, kernel)):
            at = [p * s - o + t * d for p, s, o, t, d in zip(place, stride, padding, tap, dilation, strict=True)]
            if all(0 <= each < size for each, size in zip(at, x.shape[2:], strict=True)):
                rows[(slice(None), *place, slice(None), *tap)] = x[(slice(None), slice(None), *at)]
    rows = rows.movedim(4, -1) if window.channels_last else rows
    return rows.flatten(0, 3).flatten(1)


@check
def draws(device: str) -> None:
    module = kernels("draws")

    def linear(x: Tensor) -> Any:
        return window_of(module, x.movedim(-1, 1), (1,), (1,), (0,), (1,), (x.shape[1],))

    image = torch.randn(5, 16, 9, 8, device=device)
    windows = [
        linear(torch.randn(4, 30, 70, device=device)),
        linear(torch.randn(3, 50, 144, device=device).bfloat16()),
        linear(torch.randn(30, 5, 7, device=device).movedim(0, 1)[:, ::2]),
        window_of(module, image[:, :3], (3, 3), (2, 1), (1, 0), (1, 2), (5, 4)),
        window_of(module, image.to(memory_format=torch.channels_last), (3, 3), (1, 1), (1, 1), (1, 1), (9, 8), True),
        window_of(
            module, torch.randn(2, 3, 4, 5, 6, device=device).half(), (2, 1, 3), (1, 2, 1), (1, 0, 1), (1, 1, 1), (4, 3, 6)
        ),
        window_of(module, torch.randn(9, 4, 20, device=device), (5,), (3,), (2,), (1,), (7,)),
        window_of(module, image, (1, 1), (2, 2), (0, 0), (1, 1), (5, 4)),
    ]
    rows = [rows_of(window) for window in windows]
    numbers = [7 * number for number in range(len(windows))]
    for seed in (-1, 123456789012345, torch.tensor(-5, device=device)):
        for count in (1, 17) if device == "cuda" or seed == -1 else (17,):
            results = module.drawn(windows, count, seed, numbers)
            for n, (window, every, result) in enumerate(zip(windows, rows, results, strict=True)):
                places = module.permuted(len(every), count, int(seed), numbers[n], device)
                assert len(set(places.tolist())) == count
                assert torch.equal(result.double(), every[places]), (n, count, seed)
                if n % 3 == 0 and count == 17:
                    assert torch.equal(module.drawn([window], count, seed, [numbers[n]])[0], result)
    many = [windows[0]] * 40
    assert len({tuple(each.flatten().tolist()) for each in module.drawn(many, 3, 0, range(40))}) == 40
    with pytest.raises(ValueError, match="cannot be drawn"):
        module.drawn([windows[0]], 121, 0, [0])


@check
def permutation(device: str) -> None:
    """Every number alike likely, every pair of numbers too, and each number once."""
    permuted = kernels("permutation").permuted
    for total in (1, 2, 3, 64, 65, 1000, 4097):
        assert torch.equal(permuted(total, total, 5, 1, device).sort()[0], torch.arange(total, device=device))

    def excess(found: Tensor, cells: int) -> float:
        """χ² less its mean, in standard deviations."""
        counts = torch.bincount(found.flatten(), minlength=cells).double()
        expected = found.numel() / cells
        return (((counts - expected).square() / expected).sum().item() - (cells - 1)) / (2 * (cells - 1)) ** 0.5

    for total in (5, 16):
        for keys in ([(seed, 3) for seed in range(800)], [(3, number) for number in range(800)]):
            pairs = torch.stack([permuted(total, 2, *key, "cpu") for key in keys])
            assert excess(pairs[:, 0], total) < 4
            second = pairs[:, 1] - (pairs[:, 1] > pairs[:, 0]).long()
            assert excess(pairs[:, 0] * (total - 1) + second, total * (total - 1)) < 4
    drawn = torch.stack([permuted(1000, 64, seed, 0, "cpu") for seed in range(800)])
    assert excess(drawn, 1000) < 4
    assert excess((drawn[:, 1] - drawn[:, 0]) % 1000 - 1, 999) < 4
    # Seeds one after the other have as much in common as chance gives them: 4.1 rows of 64.
    shared = [len(set(a) & set(b)) for a, b in itertools.pairwise(drawn.tolist())]
    assert abs(sum(shared) / len(shared) - 4.096) < 0.35


# Averages


@check
def averages(device: str) -> None:
    module = kernels("averages")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        xs: list[Tensor] = []
        masks: list[Tensor | None] = []
        for samples, positions, features in ((1, 1, 1), (3, 40, 70), (2, 33, 128), (5, 7, 16)):
            x = (torch.randn(samples, positions, features, device=device) + 1).to(dtype)
            mask = torch.rand(samples, positions, device=device) < 0.6
            mask[0] = False
            broken = x.clone()
            broken[0, 0, 0] = float("nan")  # where nothing counts, nothing is read
            xs += [x, broken, broken.mT.contiguous().mT]
            masks += [None, mask, mask.T.contiguous().T]
        for n, (x, mask, result) in enumerate(zip(xs, masks, module.means(xs, masks), strict=True)):
            counts = torch.ones(x.shape[:2], dtype=torch.bool, device=device) if mask is None else mask
            exact = x.double().masked_fill(~counts[..., None], 0).sum(1) / counts.sum(1, keepdim=True).clamp_min(1)
            torch.testing.assert_close(result, exact.float(), rtol=1e-5, atol=1e-6)
            assert n % 4 or torch.equal(module.means([x], [mask])[0], result)
        taps, images, last = [], [], []
        for samples, channels, pixels, count in ((2, 3, 20, 9), (3, 70, 99, 9), (1, 4, 64, 25), (1, 5, 10, 49)):
            image = torch.randn(samples, channels, pixels, device=device).to(dtype)
            taps += [(torch.rand(pixels, count, device=device) < 0.7).to(dtype)] * 2
            images += [image, image.mT.contiguous().mT]
            last += [channels % 2 == 0, channels % 2 == 1]
        places = [7 + n for n in range(len(images))]
        for n, result in enumerate(module.tap_means(images, taps, places, last)):
            exact = images[n].double() @ taps[n].double() / places[n]
            exact = (exact.mT if last[n] else exact).flatten(1).float()
            torch.testing.assert_close(result, exact, rtol=1e-5, atol=1e-5)
            assert n % 4 or torch.equal(module.tap_means([images[n]], [taps[n]], [places[n]], [last[n]])[0], result)


# Launches


@check
def tables(device: str) -> None:
    module = kernels("tables")
    numbers = (0, 3, 2**48, 5, -1, 2**33, *range(30))
    assert module._written(numbers, torch.device(device)).tolist() == list(numbers)
    room = module.Room([(2, 3), None, (), (2, 3)], 16)
    flat = torch.arange(room.end, device=device)
    first, none, number, second = room.split(flat)
    assert none is None
    assert all(offset % 16 == 0 for offset in (*room.offsets[:1], *room.offsets[2:]))
    assert first.is_contiguous()
    assert (first[0, 0], number, second[0, 0]) == (room.offsets[0], room.offsets[2], room.offsets[3])


def conditioned(rows: int, gradients: list[Tensor], xs: list[Tensor], strength: Tensor, seed: Tensor) -> list[Tensor]:
    """All stages, as a step runs them."""
    draw, invert, difference = kernels("draws"), kernels("inverse_small"), kernels("subtract")
    windows = [window_of(draw, x.movedim(-1, 1), (1,), (1,), (0,), (1,), (x.shape[1],)) for x in xs]
    drawn = draw.drawn(windows, rows, seed, range(len(xs)))
    kinds = [invert.MULTIPLIED + invert.SCALED + invert.GRAM] * len(xs)
    small = invert.inverses(drawn, strength, "largest", kinds)
    pairs = [(each.inverse, each.gram) for each in small]
    result: list[Tensor] = difference.subtract(
        gradients, drawn, [each.multiplied for each in small], in_place=False, keep_norm=pairs
    )
    return result


@check
def stages(device: str) -> None:
    """Draw, invert and subtract give what the equations say, and the norm of the gradient stays."""
    xs = [torch.randn(3, 8, features, device=device) + 0.5 for features in (20, 33)]
    gradients = [torch.randn(30, x.shape[2], device=device) for x in xs]
    strength, seed = torch.tensor(0.3, device=device), torch.tensor(9, device=device)
    for n, (x, gradient, result) in enumerate(zip(xs, gradients, conditioned(16, gradients, xs, strength, seed), strict=True)):
        r = x.flatten(0, 1)[kernels("permutation").permuted(24, 16, 9, n, device)].double()
        moment = r.mT @ r
        damping = 0.3 * equations.largest_eigenvalue(r @ r.mT)
        exact = gradient.double() @ torch.linalg.inv(torch.eye(len(moment), device=device) + moment / damping)
        assert relative_error(result, exact * (gradient.double().norm() / exact.norm())) < 1e-5
        assert abs(result.double().norm() / gradient.double().norm() - 1) < 1e-5


#: Layers, the shape of their input, and options: together they take every way from rows to gradients that launches have.
MODELS: list[tuple[Callable[[], list[nn.Module]], tuple[int, ...], dict[str, Any]]] = [
    (lambda: [nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 20), nn.Tanh(), nn.Linear(20, 3)], (18, 5, 24), options)
    for options in (
        {"damping": 0.3},
        {"damping": 0.3, "sharing": "reduce"},
        {"damping": 0.3, "max_rows": 7},
        {"damping": isaac.Relative(0.1), "sharing": "reduce", "keep_norm": True},
        {"damping": isaac.Relative(0.1, to="largest"), "max_rows": 16, "keep_norm": True},
        {"damping": 0.3, "sharing": "reduce", "bias": "joint"},
        {"damping": 0.3, "output_damping": 0.5, "output_curvature": "empirical", "max_rows": 7},
    )
]
MODELS += [
    (lambda: [nn.Conv2d(3, 5, 3), nn.Tanh(), nn.Conv2d(5, 4, 2)], (9, 3, 6, 5), {"damping": 0.3, "sharing": "reduce"}),
    (lambda: [nn.Conv2d(3, 5, 3), nn.Tanh(), nn.Conv2d(5, 4, 2)], (9, 3, 6, 5), {"damping": 0.3, "max_rows": 8}),
]
#: In the interpreter this one takes five times as long as all others.
LARGE = (lambda: [nn.Linear(150, 140), nn.Tanh(), nn.Linear(140, 150)], (30, 5, 150), {"damping": 0.3, "max_rows": 133})


@check
def models(device: str) -> None:
    """Gradients by launches are those by torch's operations in float64: in a first pass, and in one with known plans."""
    launched = take_all_tensors() if device == "cpu" else None
    for make, shape, options in [*MODELS, LARGE] if device == "cuda" else MODELS:
        single = nn.Sequential(*make()).to(device)
        double = copy.deepcopy(single).double().cpu()
        for model in (single, double):
            isaac.attach(model, **options)
        for turn in range(2):
            x = torch.randn(shape) + 0.5
            for model, own in ((single, x.to(device)), (double, x.double())):
                model.zero_grad()
                model(own).square().mean().backward()
            for (name, parameter), exact in zip(single.named_parameters(), double.parameters(), strict=True):
                assert parameter.grad is not None
                assert exact.grad is not None
                assert relative_error(parameter.grad.cpu(), exact.grad) < 2e-4, (options, turn, name)
    assert launched is None or launched[0] > 100


def take_all_tensors() -> list[int]:
    """Triton's interpreter takes tensors of a CPU; returns how many launches there were."""
    package, grouped, count = importlib.import_module("isaac_newton.kernels"), kernels("tables").Grouped, [0]
    launch = grouped.__call__

    def counted(self: Any, *args: Any) -> None:
        count[0] += 1
        launch(self, *args)

    package.groupable = lambda xs: [x.dtype is torch.float32 and not package.is_differentiable(x) for x in xs]
    grouped.__call__ = counted
    return count


def capture(device: str) -> None:
    """A captured step follows its inputs, its damping and its seed; also where its tables are written by the graph itself."""

    def make(width: int) -> tuple[list[Tensor], list[Tensor]]:
        xs = [torch.randn(4, 50, width + 16 * n, device=device) for n in range(20)]
        return [torch.randn(96, x.shape[2], device=device) for x in xs], xs

    strength, seed = torch.tensor(0.1, device=device), torch.tensor(1, device=device)
    conditioned(64, *make(64), strength, seed)  # compiles
    gradients, xs = make(256)
    for _ in range(2):  # the first graph writes its tables by itself; the second finds those of the steps outside of it
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = conditioned(64, gradients, xs, strength, seed)
        for turn in range(2):
            strength.fill_(0.3 + turn)
            seed.fill_(5 + turn)
            for each in (*xs, *gradients):
                each.normal_()
            graph.replay()
            replayed = [result.clone() for result in results]
            assert same(replayed, conditioned(64, gradients, xs, strength, seed))


# How they are run


def run(name: str, device: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent / "src")}
    if device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    result = subprocess.run(
        [sys.executable, __file__, name, device], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{name} is right\n"


@pytest.mark.parametrize("name", CHECKS)
def test_the_interpreted_kernels_agree_with_float64(name: str) -> None:
    pytest.importorskip("triton")
    run(name, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKS)
def test_the_compiled_kernels_agree_with_float64(name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    run(name, "cuda")


@pytest.mark.gpu
def test_a_captured_step_follows_its_inputs() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    run("capture", "cuda")


def repair_interpreter() -> None:
    """It keeps bfloat16 as integers, and would multiply these."""
    import numpy as np
    import triton
    from triton.runtime import interpreter

    plain = interpreter.InterpreterBuilder.create_dot

    def widened(x: Any) -> Any:
        if x.dtype.scalar != triton.language.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), triton.language.float32)

    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *rest: plain(self, widened(a), widened(b), *rest)


if __name__ == "__main__":
    if sys.argv[2] == "cpu":
        repair_interpreter()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    {**CHECKS, "capture": capture}[sys.argv[1]](sys.argv[2])
    print(f"{sys.argv[1]} is right")
