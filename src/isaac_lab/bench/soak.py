"""Thousands of steps with everything that goes wrong in training: no crash, no silently wrong gradient, no growing memory.

`python -m isaac_lab.bench.soak --steps 20000` draws small models of every layer type with random shapes, options and dampings
from 1e-6 to 1e6, and trains each for a few steps. Batches of one row, zeros, NaN and infinity, factorizations that fail,
accumulation, skipped steps, copies and resumes come at random. A sample of the gradients is compared with `bench.dense`.
"""

import argparse
import contextlib
import copy
import gc
import math
import random
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn import functional as F

import isaac_newton as isaac
from isaac_lab.bench import dense
from isaac_lab.records import origin, write
from isaac_newton.math import patches as rows

__all__ = ["Report", "main", "soak"]

#: How far a gradient may be from the reference: of its own norm and, for what rounding the plain gradient does, of that one's.
TOLERANCE = {torch.float32: (1e-4, 2e-6), torch.float64: (1e-5, 1e-12)}


@dataclass
class Report:
    """What happened."""

    steps: int = 0
    seconds: float = 0.0
    models: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    checked: Counter[str] = field(default_factory=Counter)
    #: Largest error over what is allowed, by layer type; at most 1.
    worst: dict[str, float] = field(default_factory=dict)
    fallbacks: int = 0
    warnings: int = 0
    #: (step, resident MiB, tensors alive)
    memory: list[tuple[int, float, int]] = field(default_factory=list)

    @property
    def growth(self) -> tuple[float, int]:
        """MiB and tensors more at the end than after the first tenth."""
        settled = self.memory[max(len(self.memory) // 10, 1)]
        return self.memory[-1][1] - settled[1], self.memory[-1][2] - settled[2]

    def take_note(self, steps: int, checkpoints: int = 40) -> None:
        """Between two models, when nothing should be alive: what is."""
        if self.steps >= len(self.memory) * steps / checkpoints:
            self.memory.append((self.steps, _resident(), _tensors()))


def soak(steps: int, *, seed: int = 0, tick: Callable[[int], object] = lambda step: None) -> Report:
    """Run so many steps; raises at the first wrong gradient."""
    report, started = Report(), time.perf_counter()
    draw = random.Random(seed)
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        while report.steps < steps:
            run = _Run(draw, report)
            try:
                for _ in range(min(draw.randint(5, 40), steps - report.steps)):
                    run.step()
                    report.steps += 1
                    tick(report.steps)
            except Exception as error:
                raise RuntimeError(f"step {report.steps} of seed {seed}: {run}") from error
            run.end()
            del run
            report.take_note(steps)
    report.seconds = time.perf_counter() - started
    return report


def plain(steps: int, *, seed: int = 0) -> Report:
    """As many steps of models as random without the library: what torch itself keeps for every new shape."""
    report, draw = Report(), random.Random(seed)
    torch.manual_seed(seed)
    while report.steps < steps:
        model, batch = _MODELS[draw.choice(list(_MODELS))](draw)
        for _ in range(min(draw.randint(5, 40), steps - report.steps)):
            for _ in range(draw.choice([1, 1, 1, 2, 3])):
                model(batch(1 if draw.random() < 0.15 else draw.randint(2, 40))).square().mean().backward()
            report.steps += 1
        del model, batch
        report.take_note(steps)
    return report


class _Run:
    """One model with one set of options, trained for some steps."""

    def __init__(self, draw: random.Random, report: Report) -> None:
        self.draw, self.report = draw, report
        self.kind = draw.choice(["mlp", "mlp", "sequence", "conv1", "conv2", "transposed", "embedding", "bag", "attention"])
        self.dtype = draw.choice([torch.float32, torch.float32, torch.float64])
        self.model, self.batch = _MODELS[self.kind](draw)
        self.model.to(self.dtype)
        self.options = self._options()
        self.handle = isaac.attach(self.model, **self.options)
        # The gradient of attention depends on its weights, which the reference sees after the step.
        self.optimizer = draw.choice([torch.optim.SGD, torch.optim.Adam])(
            self.model.parameters(), lr=1e-4 * (self.kind != "attention")
        )
        self.by_hand = draw.random() < 0.5
        if self.when == "step" and not self.by_hand:
            self.handle.bind(self.optimizer)
        self.layers = [layer for name, layer in self.handle.conditioned.items() if not name.endswith("out_proj")]
        self.averages: dict[int, tuple[Tensor, float]] = {}
        self.kept: dict[int, tuple[Tensor, int]] = {}
        self.uses: list[dict[int, list[dense.Use]]] = []
        self.warned: Counter[str] = Counter()
        report.models[f"{self.kind}, {self.when}"] += 1

    @property
    def when(self) -> str:
        return str(self.options.get("when", "backward"))

    def __repr__(self) -> str:
        return f"{self.model}, {self.dtype}, attach({self.options})"

    def _options(self) -> dict[str, Any]:
        draw = self.draw
        options: dict[str, Any] = {"damping": self._damping()}
        if self.kind in ("mlp", "sequence") and draw.random() < 0.2:
            curvature = draw.choice(["empirical", "sampled", "exact"])
            return options | {"output_damping": 10 ** draw.uniform(-3, 6), "output_curvature": curvature}
        if draw.random() < 0.2:
            options["bias"] = "joint"
        if draw.random() < 0.2:
            options["sharing"] = "reduce"
        if draw.random() < 0.1:
            options["max_rows"] = draw.randint(1, 20)
        if self.kind != "bag" and draw.random() < 0.5:
            options |= {"when": "step"}
            if draw.random() < 0.5:
                options |= {"decay": draw.choice([0.0, 0.5, 0.9]), "refresh": draw.choice([1, 1, 3])}
                options |= {"power": draw.choice([1.0, 1.0, 0.5, 0.0])}
        return options

    def _damping(self) -> Any:
        strength = 10 ** self.draw.uniform(-6, 6)
        if self.kind != "bag" and self.draw.random() < 0.2:
            return isaac.Relative(10 ** self.draw.uniform(-3, 3))
        return math.inf if self.draw.random() < 0.03 else strength

    def step(self) -> None:
        """Micro-batches, a gradient, a comparison, an optimizer's step; or one of the accidents."""
        draw = self.draw
        if draw.random() < 0.1 and not callable(self.handle.damping):
            self.handle.damping = self._damping()
        if draw.random() < 0.01:
            self._resume()
        accident = draw.choices(["", "zeros", "poison", "failure", "skip"], [80, 5, 4, 6, 5])[0]
        self.report.events[accident or "none"] += 1
        self.optimizer.zero_grad()
        self.uses = []
        parts = draw.choice([1, 1, 1, 2, 3])
        fails = draw.choice([1, 2, 3, 100]) if accident == "failure" else 0
        before = sum(seen.fallbacks for seen in self.handle.statistics.values())
        conditions = contextlib.nullcontext if draw.random() < 0.97 else self.handle.inspecting
        with self._expecting_warnings(), _failing(fails), conditions():
            for _ in range(parts):
                self._backward(accident)
            plain = {id(p): p.grad.clone() for p in self.model.parameters() if p.grad is not None}
            if accident == "skip":
                return
            if self.when == "step" and self.by_hand:
                self.handle.step()
            elif self.when == "step":
                self.optimizer.step()
        after = sum(seen.fallbacks for seen in self.handle.statistics.values())
        self.report.fallbacks += after - before
        self._judge(accident, failed=after > before, plain=plain)
        if self.when == "step" and not self.by_hand:
            with torch.no_grad():
                self._mend()
            return
        if accident != "poison":
            self.optimizer.step()

    def _backward(self, accident: str) -> None:
        draw, uses = self.draw, dict[int, list[dense.Use]]()
        size = 1 if draw.random() < 0.15 else draw.randint(2, 40)
        inputs = self.batch(size)
        if inputs.is_floating_point():
            # Not larger for attention: a softmax of large numbers turns rounding into other weights.
            largest = 0 if self.kind == "attention" else 2
            inputs = inputs.to(self.dtype) * (0 if accident == "zeros" else 10 ** draw.uniform(-2, largest))
            if accident == "poison":
                inputs.view(-1)[draw.randrange(inputs.numel())] = draw.choice([math.nan, math.inf, -math.inf])
        hooks = [layer.register_forward_hook(_recording(uses)) for layer in self.layers]
        output = self.model(inputs)
        for hook in hooks:
            hook.remove()
        target = torch.randn_like(output)
        loss = F.mse_loss(output, target)
        if self.options.get("output_damping"):
            self.handle.backward(loss, output, nn.MSELoss())
        else:
            loss.backward()
        self.uses.append(uses)

    def _judge(self, accident: str, *, failed: bool, plain: dict[int, Tensor]) -> None:
        """Compare with the reference, or say what must hold where there is none."""
        weights = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        finite = all(grad.isfinite().all() for grad in plain.values())
        if accident == "poison":
            # A convolution with a stride may not see it. What conditions a layer does, and leaves the gradient plain.
            assert finite or any(not grad.isfinite().all() for grad in weights.values()), "NaN was swallowed"
            self._forget()
            return
        for name, grad in weights.items():
            assert grad.isfinite().all() or not finite, f"{name} is not finite"
        tracked = self.options.get("decay") or self.options.get("refresh", 1) > 1
        comparable = "max_rows" not in self.options and self.options.get("output_curvature") != "sampled"
        comparable = comparable and self.options.get("output_curvature") != "exact" and finite
        if failed or not comparable:
            self._forget()
            return
        if tracked or self.draw.random() < 0.3:
            for layer in self.layers:
                self._compare(layer)

    def _compare(self, layer: Any) -> None:
        twin = _unattached(layer)
        joint = self.options.get("bias") == "joint" and _bias(layer) is not None and not isinstance(layer, nn.ConvTranspose1d)
        joint = joint and not isinstance(layer, nn.Embedding | nn.EmbeddingBag)
        reduce = self.options.get("sharing") == "reduce"
        parts = []
        for uses in self.uses:
            for use in uses.get(id(layer), []):
                weight, bias = dense.plain(twin, use)
                matrix = dense.matrix(layer, weight, bias if joint else None)
                parts.append((matrix, dense.rows(layer, use.inputs, reduce=reduce, joint=joint), use))
        if not parts:
            return
        total = torch.stack([matrix for matrix, *_ in parts]).sum(0)
        if self.options.get("output_damping"):
            expected = torch.stack([self._zeta(layer, use) for *_, use in parts]).sum(0)
        elif self.when == "step":
            expected = total @ self._step_conditioner(layer, [r for _, r, _ in parts])
        else:
            moments = [dense.moment(r) for _, r, _ in parts]
            inverses = [dense.conditioner(m / count, self._strength(layer, m / count)) for m, count in moments]
            expected = torch.stack([m @ c for (m, *_), c in zip(parts, inverses, strict=True)]).sum(0)
        weight = layer.in_proj_weight if isinstance(layer, nn.MultiheadAttention) else layer.weight
        assert weight.grad is not None
        wanted, wanted_bias = dense.unmatrix(layer, expected, weight.shape, joint=joint)
        self._close(layer, weight.grad, wanted, total.norm().item())
        if wanted_bias is not None:
            bias = _bias(layer)
            assert bias is not None
            assert bias.grad is not None
            self._close(layer, bias.grad, wanted_bias, total.norm().item())
        self.report.checked[f"{type(layer).__name__}, {self.when}{', ζ' if self.options.get('output_damping') else ''}"] += 1

    def _zeta(self, layer: Any, use: dense.Use) -> Tensor:
        a, g = use.inputs[0].reshape(-1, layer.in_features), use.gradient.reshape(-1, layer.out_features)
        # ḡ of the empirical Fisher for a loss that is the mean over samples, each of which may have several rows
        gbar = g.double() * math.sqrt(use.inputs[0].shape[0] * a.shape[0])
        return dense.zeta(g, gbar, a, self.options["output_damping"], self._number(a))[None]

    def _step_conditioner(self, layer: Any, rows: list[Tensor]) -> Tensor:
        """The reference's own running average and its age."""
        key, decay, refresh = id(layer), self.options.get("decay", 0.0), self.options.get("refresh", 1)
        moments = [dense.moment(r) for r in rows]
        moment = sum(m for m, _ in moments) / sum(count for _, count in moments)
        assert isinstance(moment, Tensor)
        average, weight = self.averages.get(key, (torch.zeros_like(moment), 0.0))
        average, weight = decay * average + (1 - decay) * moment, decay * weight + (1 - decay)
        if decay:
            self.averages[key] = average, weight
        kept, age = self.kept.get(key, (None, 0))
        if kept is None or age >= refresh:
            moment = average / weight
            kept, age = dense.conditioner(moment, self._strength(layer, moment), self.options.get("power", 1.0)), 0
        if refresh > 1:
            self.kept[key] = kept, age + 1
        return kept

    def _strength(self, layer: Any, moment: Tensor) -> float:
        damping = self.handle.damping
        if isinstance(damping, isaac.Relative):
            return max(damping.ratio * moment.diagonal(dim1=-2, dim2=-1).mean().item(), 1e-300)
        assert isinstance(damping, float)
        return damping

    def _number(self, a: Tensor) -> float:
        return self._strength(None, (a.double().T @ a.double() / len(a))[None])

    def _close(self, layer: nn.Module, actual: Tensor, expected: Tensor, plain: float) -> None:
        relative, absolute = TOLERANCE[self.dtype]
        if isinstance(layer, nn.MultiheadAttention):
            absolute *= 10  # its plain gradient comes through more products
        allowed = relative * expected.norm().item() + absolute * plain + 1e-30
        error = (actual.double() - expected).norm().item() / allowed
        name = type(layer).__name__
        self.report.worst[name] = max(self.report.worst.get(name, 0.0), error)
        assert error <= 1, (
            f"{name}: error {error * allowed:.2e}, allowed {allowed:.2e}, of {expected.norm():.2e} and {plain:.2e}"
        )

    def _forget(self) -> None:
        """What the library averages is no longer known here: start both anew."""
        self.averages, self.kept = {}, {}
        if self.when == "step":
            state = self.handle.state_dict()
            self.handle.load_state_dict(state | {"curvature": {}})

    def _resume(self) -> None:
        """Save and load; nothing may change. A deep copy lives and dies beside it."""
        self.report.events["resume"] += 1
        self.handle.load_state_dict(copy.deepcopy(self.handle.state_dict()))
        if self.options.get("output_damping"):
            return
        twin = copy.deepcopy(self.model)
        twin(self.batch(2) if self.kind in ("embedding", "bag") else self.batch(2).to(self.dtype)).sum().backward()

    def _mend(self) -> None:
        for parameter in self.model.parameters():
            if not parameter.isfinite().all():
                parameter.normal_(std=0.1)
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor) and not value.isfinite().all():
                    value.zero_()

    @contextlib.contextmanager
    def _expecting_warnings(self) -> Iterator[None]:
        """A failed factorization is warned about, once for each attachment, and a step that never came; nothing else is."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        for warning in caught:
            message = str(warning.message)
            assert "factorization failed" in message or ("handle.step()" in message and self.by_hand), message
            self.warned[message] += 1
            assert self.warned[message] == 1, f"warned twice: {message}"
        self.report.warnings += len(caught)

    def end(self) -> None:
        """Detach; the layers are what they were."""
        self.handle.detach()
        assert not any("forward" in vars(layer) for layer in self.model.modules())


def _unattached(layer: Any) -> Any:
    held = layer.__dict__.pop("forward", None)
    twin = copy.deepcopy(layer).double()
    if held is not None:
        layer.__dict__["forward"] = held
    return twin


def _bias(layer: Any) -> Tensor | None:
    bias: Tensor | None = getattr(layer, "in_proj_bias", None) if isinstance(layer, nn.MultiheadAttention) else None
    return bias if bias is not None else getattr(layer, "bias", None)


def _recording(uses: dict[int, list[dense.Use]]) -> Callable[..., Any]:
    def record(layer: nn.Module, args: Any, output: Any) -> Any:
        # Under a name of its own, since embeddings change the gradient of their output.
        first = output[0] if isinstance(output, tuple) else output
        first = first.view_as(first)
        kept = tuple(arg.detach().clone() if isinstance(arg, Tensor) else arg for arg in args)

        def keep(g: Tensor) -> None:
            # The last gradient is that of the loss: extra passes for ḡ come before it.
            uses[id(layer)] = [dense.Use(kept, g.detach().clone())]

        first.register_hook(keep)
        return (first, *output[1:]) if isinstance(output, tuple) else first

    return record


@contextlib.contextmanager
def _failing(times: int) -> Iterator[None]:
    """The next so many factorizations fail."""
    if not times:
        yield
        return
    factorize, left = torch.linalg.cholesky_ex, [times]

    def failing(*args: Any, **kwargs: Any) -> Any:
        factor, info = factorize(*args, **kwargs)
        left[0] -= 1
        return factor, torch.ones_like(info) if left[0] >= 0 else info

    with mock.patch.object(torch.linalg, "cholesky_ex", failing):
        yield


class _SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return output


_Made = tuple[nn.Module, Callable[[int], Tensor]]


def _mlp(draw: random.Random) -> _Made:
    sizes = [draw.randint(1, 40) for _ in range(draw.randint(2, 4))]
    layers: list[nn.Module] = []
    for number in range(len(sizes) - 1):
        layers += [nn.Linear(sizes[number], sizes[number + 1], bias=draw.random() < 0.8), nn.ReLU()]
    return nn.Sequential(*layers[:-1]), lambda size: torch.randn(size, sizes[0])


def _sequence(draw: random.Random) -> _Made:
    model, batch = _mlp(draw)
    return model, lambda size: torch.stack([batch(size) for _ in range(3)], dim=1)


def _conv1(draw: random.Random) -> _Made:
    groups, kernel = draw.choice([1, 1, 2]), draw.randint(1, 3)
    channels = groups * draw.randint(1, 4)
    layer = nn.Conv1d(channels, groups * draw.randint(1, 4), kernel, draw.randint(1, 2), draw.randint(0, 2), groups=groups)
    return layer, lambda size: torch.randn(size, channels, 7)


def _conv2(draw: random.Random) -> _Made:
    groups = draw.choice([1, 1, 2])
    channels, middle = groups * draw.randint(1, 3), 2 * draw.randint(1, 4)
    first = nn.Conv2d(channels, middle, draw.randint(1, 3), draw.randint(1, 2), draw.randint(0, 2), groups=groups)
    model = nn.Sequential(first, nn.ReLU(), nn.Conv2d(middle, 3, 1, bias=False))
    return model, lambda size: torch.randn(size, channels, 5, 6)


def _transposed(draw: random.Random) -> _Made:
    groups = draw.choice([1, 1, 2])
    channels = groups * draw.randint(1, 5)
    layer = nn.ConvTranspose1d(channels, groups * draw.randint(1, 3), draw.randint(1, 3), draw.randint(1, 2), groups=groups)
    return layer, lambda size: torch.randn(size, channels, 6)


def _embedding(draw: random.Random) -> _Made:
    tokens = draw.randint(2, 30)
    return nn.Embedding(tokens, draw.randint(1, 6)), lambda size: torch.randint(tokens, (size, 5))


def _bag(draw: random.Random) -> _Made:
    tokens = draw.randint(2, 30)
    return nn.EmbeddingBag(tokens, draw.randint(1, 6), mode="mean"), lambda size: torch.randint(tokens, (size, 4))


def _attention(draw: random.Random) -> _Made:
    heads = draw.choice([1, 2])
    width = heads * draw.randint(1, 6)
    return _SelfAttention(width, heads), lambda size: torch.randn(size, 5, width)


_MODELS: dict[str, Callable[[random.Random], _Made]] = {
    "mlp": _mlp,
    "sequence": _sequence,
    "conv1": _conv1,
    "conv2": _conv2,
    "transposed": _transposed,
    "embedding": _embedding,
    "bag": _bag,
    "attention": _attention,
}


def _resident() -> float:
    """MiB of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * 4096 / 2**20


def _tensors() -> int:
    """So many are alive."""
    # Matrices of convolutions are kept on purpose, of the last 64 sizes: no more of them after any number of steps.
    rows._TAPS.clear()
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def main(arguments: list[str] | None = None) -> None:
    """Run, write the record, print a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/robustness/soak.json"))
    parser.add_argument("--plain", action="store_true", help="only measure the memory of as many steps without the library")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.plain:
        print(plain(options.steps, seed=options.seed).growth[0])
        return
    console = Console()
    with Progress(console=console) as progress:
        task = progress.add_task("soak", total=options.steps)
        report = soak(options.steps, seed=options.seed, tick=lambda step: progress.update(task, completed=step))
    megabytes, tensors = report.growth
    # In a process of its own, where nothing is warm either.
    command = [sys.executable, "-m", "isaac_lab.bench.soak", "--plain", "--steps", str(options.steps)]
    without = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    record = origin(threads=1) | {
        "kind": "soak",
        "command": f"python -m isaac_lab.bench.soak --steps {options.steps} --seed {options.seed}",
        "seed": options.seed,
        "tolerance": {str(dtype): limits for dtype, limits in TOLERANCE.items()},
        "growth": {"MiB": megabytes, "MiB without the library": without, "tensors": tensors},
        **{name: dict(value) if isinstance(value, Counter) else value for name, value in vars(report).items()},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write(options.out, record)
    console.print(
        f"{report.steps:,} steps, {sum(report.models.values()):,} models, {sum(report.checked.values()):,} gradients compared, "
        f"{report.fallbacks:,} fallbacks; worst error {max(report.worst.values()):.2f} of what is allowed; "
        f"memory {megabytes:+.1f} MiB ({without:+.1f} without the library) and {tensors:+d} tensors. Record: {options.out}"
    )


if __name__ == "__main__":
    main()
