"""One small model, trained with everything that goes wrong in training; its gradients are compared with `dense`."""

import contextlib
import copy
import math
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import dense
import torch
from models import MODELS
from torch import Tensor, nn
from torch.nn import functional as F

import isaac_newton as isaac

__all__ = ["TOLERANCE", "Run"]

#: How far a gradient may be from the reference: of its own norm and, for what rounding the plain gradient does, of that one's.
TOLERANCE = {torch.float32: (1e-4, 2e-6), torch.float64: (1e-5, 1e-12)}


class Run:
    """One model with one set of options, trained for some steps."""

    def __init__(self, draw: random.Random, report: Any) -> None:
        self.draw, self.report = draw, report
        self.kind = draw.choice(["mlp", "mlp", "sequence", "conv1", "conv2", "transposed", "embedding", "bag", "attention"])
        self.dtype = draw.choice([torch.float32, torch.float32, torch.float64])
        self.model, self.batch = MODELS[self.kind](draw)
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
