"""Random arguments, sensible and not, for every public function: each call gives a right answer or a clear error.

`python -m isaac_lab.bench.fuzz --cases 100000` runs so many and writes results/robustness/fuzz.json. A right answer agrees
with `bench.dense`; a clear error is a TypeError, ValueError or RuntimeError whose message names the argument.
"""

import argparse
import contextlib
import copy
import math
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn import functional as F

import isaac_newton as isaac
from isaac_lab.bench import dense
from isaac_lab.records import origin, write

__all__ = ["TARGETS", "case", "main"]

Random = random.Random


class Refused(Exception):  # noqa: N818
    """The call was refused, as it should be."""


def case(name: str, draw: Random) -> str:
    """Run one case of a target: "answered" or "refused"; anything else raises."""
    torch.manual_seed(draw.getrandbits(31))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            TARGETS[name](draw)
    except Refused:
        return "refused"
    return "answered"


@contextlib.contextmanager
def _clear(*names: str, only_if: bool = True) -> Iterator[None]:
    """Errors raised here name one of the arguments; `only_if`: whether there may be any."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        if not only_if:
            raise AssertionError(f"good arguments were refused: {error}") from error
        if not any(name in str(error) for name in names):
            raise AssertionError(f"{type(error).__name__}({error}) names none of {', '.join(names)}") from error
        raise Refused from error


def _nonsense(draw: Random) -> Any:
    """Something that is almost never right."""
    return draw.choice(
        [
            *(
                None,
                True,
                False,
                "x",
                "",
                b"1",
                0,
                -1,
                0.0,
                -0.0,
                -2.5,
                math.nan,
                -math.inf,
                10**400,
                1 + 2j,
                [],
                {},
                (),
                set(),
            ),
            *([1.0], ["x"], {"a": 1}, object(), object, lambda: None, nn.Module, torch.float32, slice(3), range(3), ...),
            *(torch.tensor(-1.0), torch.ones(2), torch.tensor(1), torch.tensor([]), np.float64(-1), np.array([1.0, 2.0])),
        ]
    )


def _damping(draw: Random) -> tuple[Any, bool]:
    """A damping, and whether it is one."""
    if draw.random() < 0.7:
        strength = 10 ** draw.uniform(-3, 3)
        return draw.choice([strength, np.float32(strength), torch.tensor(strength), max(1, int(strength)), math.inf]), True
    value = _nonsense(draw)
    return value, isinstance(value, Tensor) and value.dim() == 0 and value.item() > 0


def _matrix(draw: Random, rows: int, columns: int) -> tuple[Any, bool]:
    """A matrix of this shape, and whether it is one."""
    if draw.random() < 0.9:
        dtype = draw.choice([torch.float64, torch.float32, torch.float32, torch.bfloat16, torch.float16])
        return (torch.randn(rows, columns) * 10 ** draw.uniform(-2, 1)).to(dtype), True
    wrong: list[Any] = [
        _nonsense(draw),
        torch.ones(rows, columns, dtype=torch.int64),
        torch.ones(rows, columns, dtype=torch.cfloat),
    ]
    wrong += [torch.ones(columns), torch.ones(2, rows, columns), torch.ones(rows + 1, columns), torch.ones(rows, columns) > 0]
    return draw.choice(wrong), False


def _agrees(actual: Tensor, expected: Tensor, a: Tensor, damping: float, scale: float = 0.0, factors: float = 0.0) -> None:
    """Whether the error is one of rounding.

    That of the result, and inside, in float64, that of what was conditioned, of norm `scale`, multiplied by the condition, and
    that of a product whose `factors` have norms of this product.
    """
    condition = 1 + a.double().square().sum().item() / (max(len(a), 1) * damping)
    step = 2**-52 if actual.dtype == torch.float64 else torch.finfo(actual.dtype).eps
    size = expected.norm().item()
    limit = 8 * step * size + 64 * 2**-52 * (condition * max(size, scale) + factors) + 1e-30
    # Half types have numbers below which there is only zero.
    limit += torch.finfo(actual.dtype).tiny * math.sqrt(max(expected.numel(), 1))
    fits = expected.abs().max().item() < torch.finfo(actual.dtype).max if expected.numel() else True
    error = (actual.double() - expected).norm().item()
    assert error <= limit or not fits, f"error {error:.2e}, allowed {limit:.2e}"


def _sizes(draw: Random) -> tuple[int, int, int, int]:
    return draw.choice([0, 1, 2, 5, 12]), draw.choice([0, 1, 3, 8]), draw.choice([0, 1, 2, 6]), draw.choice([0, 1, 4, 9])


def _equations(draw: Random) -> None:
    rows, inputs, outputs, samples = _sizes(draw)
    (a, good_a), (g, good_g) = _matrix(draw, rows, inputs), _matrix(draw, rows, outputs)
    (gbar, good_gbar), (damping, good_damping) = _matrix(draw, samples, outputs), _damping(draw)
    output_damping, good_output_damping = _damping(draw)
    if any(isinstance(value, Tensor) and value.dim() == 0 and value < 0 for value in (damping, output_damping)):
        return  # tensors pass unread there
    which = draw.choice(["condition_rows", "zeta_star", "zeta", "kfac"])
    names = {"condition_rows": ["a", "damping"], "zeta_star": ["g", "a", "damping"], "kfac": ["g", "gbar", "a", "damping"]}
    names |= {"zeta": ["g", "gbar", "a", "output_damping", "damping"]}
    values = {"a": a, "g": g, "gbar": gbar, "output_damping": output_damping, "damping": damping}
    fine = {"a": good_a, "g": good_g, "gbar": good_gbar, "output_damping": good_output_damping, "damping": good_damping}
    arguments = [values[name] for name in names[which]]
    good = all(fine[name] for name in names[which])
    with _clear(*(f"{name} " for name in names[which]), only_if=not good):
        actual = getattr(isaac.equations, which)(*arguments)
    strength, other = float(damping), float(output_damping) if which == "zeta" else 1.0
    if not good or (which == "kfac" and math.isinf(strength)):
        return
    if 0 in (rows, inputs, outputs) or (samples == 0 and which == "kfac"):
        assert actual.isfinite().all() or actual.dtype == torch.float16  # which λ² takes K-FAC beyond
        return
    expected = {
        "condition_rows": lambda: dense.zeta_star(torch.eye(rows), a, strength),
        "zeta_star": lambda: dense.zeta_star(g, a, strength),
        "zeta": lambda: dense.zeta(g, gbar, a, other, strength),
        "kfac": lambda: dense.kfac(g, gbar, a, strength),
    }[which]()
    both, scale = a.double().square().sum() / strength, 0.0
    factors = 0.0 if which == "condition_rows" else g.double().norm().item() * a.double().norm().item()
    if which in ("zeta", "kfac"):
        # On the outputs' side a difference cancels: the gradient need not lie in the span of gbar.
        both = both + gbar.double().square().sum() / (other if which == "zeta" else strength)
        scale = dense.zeta_star(g, a, strength).norm().item() / (strength**2 if which == "kfac" else 1)
    factors /= strength**2 if which == "kfac" else 1
    _agrees(actual, expected, (both / rows).sqrt().reshape(1, 1), 1.0, scale, factors)


def _relative(draw: Random) -> None:
    value, good = _damping(draw)
    with _clear("ratio", only_if=not good or math.isinf(value)):
        relative = isaac.Relative(value)
    layer, x = nn.Linear(3, 2, bias=False).double(), torch.randn(5, 3).double()
    with _clear("ratio", only_if=not good):
        isaac.attach(layer, relative)
        layer(x).sum().backward()
    _same(layer, torch.ones(5, 2), x, float(value) * x.square().mean().item())


def _same(layer: nn.Linear, g: Tensor, a: Tensor, damping: float) -> None:
    assert layer.weight.grad is not None
    _agrees(layer.weight.grad, dense.zeta_star(g, a, damping), a, damping)


def _drop_in(draw: Random) -> None:
    (damping, good), (la, good_la) = _damping(draw), _damping(draw)
    given: dict[str, Any] = draw.choice([{"damping": damping}, {"la": la}, {"damping": damping, "la": la}, {}])
    good = ("damping" not in given or good or damping is None) and ("la" not in given or good_la or la is None)
    both = given.get("damping") is not None and given.get("la") is not None
    with _clear("damping", "la", only_if=not good or both):
        layer = isaac.Linear(4, 3, bias=False, dtype=torch.float64, **given)
    if not good:
        # Whatever can be called is taken for a schedule, and asked when it is needed.
        assert callable(layer.damping)
        return
    x, g = torch.randn(6, 4).double(), torch.randn(6, 3).double()
    layer(x).backward(g)
    assert isinstance(layer.damping, float)
    _same(layer, g, x, layer.damping)


_MODELS: tuple[Callable[[], nn.Module], ...] = (
    lambda: nn.Linear(4, 3),
    lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)),
    lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 3)),
    lambda: nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 3, padding=1), nn.Flatten(), nn.Linear(8, 3)),
)


def _model(draw: Random) -> nn.Module:
    return draw.choice(_MODELS)()


#: What each option may be; the rest is nonsense.
_OPTIONS: Mapping[str, Callable[[Random], Any]] = {
    "layers": lambda draw: draw.choice([None, "*", ["*"], lambda name, module: True]),
    "exclude": lambda draw: draw.choice([(), []]),
    "sharing": lambda draw: draw.choice(["expand", "reduce"]),
    "max_rows": lambda draw: draw.choice([None, 1, 3, 100]),
    "bias": lambda draw: draw.choice(["plain", "joint"]),
    "output_damping": lambda draw: draw.choice([math.inf, math.inf, 0.5, "kfac"]),
    "output_curvature": lambda draw: draw.choice(["sampled", "exact", "empirical"]),
    "samples": lambda draw: draw.choice([1, 2]),
    "when": lambda draw: draw.choice(["backward", "backward", "step"]),
    "decay": lambda draw: draw.choice([0.0, 0.0, 0.5]),
    "refresh": lambda draw: draw.choice([1, 1, 2]),
    "power": lambda draw: draw.choice([1.0, 1.0, 0.5, 0]),
}


def _attach(draw: Random) -> None:
    model = _model(draw) if draw.random() < 0.95 else draw.choice([_nonsense(draw), nn.ReLU(), nn.LayerNorm(3)])
    given: dict[str, Any] = {"damping": _damping(draw)[0]}
    for name in draw.sample(list(_OPTIONS), draw.randint(0, 4)):
        given[name] = _OPTIONS[name](draw) if draw.random() < 0.85 else _nonsense(draw)
    names = ("model", "no parameters", "no layer", "process_group", "positional argument", *given)
    before = [dict(vars(module)) for module in model.modules()] if isinstance(model, nn.Module) else []
    try:
        with _clear(*names):
            handle = isaac.attach(model, **given)
    except Refused:
        if before:
            assert [dict(vars(module)) for module in model.modules()] == before, "a refused attachment changed the model"
        raise
    x = torch.randn(6, 4)
    plain = copy.deepcopy(model)
    isaac.detach(plain)
    random_state = torch.get_rng_state()
    expected = plain(x)
    torch.set_rng_state(random_state)
    output = model(x)
    assert torch.equal(output, expected), "the forward pass changed"
    loss = F.mse_loss(output, torch.zeros_like(output))
    schedule = callable(given["damping"]) or callable(given.get("output_damping"))
    with _clear("schedule", "damping", "positional argument", only_if=schedule):
        handle.backward(loss, output, nn.MSELoss()) if given.get("output_damping", math.inf) != math.inf else loss.backward()
        if given.get("when") == "step":
            handle.step()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    assert str(handle)
    handle.detach()


def _handle(draw: Random) -> None:
    """Setters and methods, with nonsense in the place of arguments."""
    model = _model(draw)
    options: dict[str, Any] = draw.choice([{}, {"when": "step"}, {"output_damping": 1.0}])
    handle = isaac.attach(model, 0.5, **options)
    value = _damping(draw)[0] if draw.random() < 0.5 else _nonsense(draw)
    action = draw.choice(
        ["damping", "output_damping", "mask", "backward_passes", "backward", "bind", "load", "step", "discard"]
    )
    with _clear(action, "damping", "handle", "loss", "output", "optimizer", "mask", "state", "schedule", "positional argument"):
        if action in ("damping", "output_damping", "mask", "backward_passes"):
            setattr(handle, action, value)
        elif action == "bind":
            handle.bind(value)
        elif action == "backward":
            output = model(torch.randn(3, 4))
            good: list[Any] = [output.sum(), output, nn.MSELoss()]
            good[draw.randrange(3)] = value
            handle.backward(*good)
        elif action == "load":
            state = handle.state_dict()
            handle.load_state_dict(draw.choice([value, state | {draw.choice(list(state)): value}]))
        else:
            getattr(handle, action)()
        output = model(torch.randn(3, 4))
        loss = F.mse_loss(output, torch.zeros_like(output))
        zeta = handle.output_damping != math.inf
        handle.backward(loss, output, nn.MSELoss()) if zeta else loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def _register(draw: Random) -> None:
    fresh = type("Layer", (nn.Module,), {})
    layer_type = draw.choice([fresh, f"nowhere.Layer{draw.getrandbits(60)}", nn.Linear, _nonsense(draw)])
    options = draw.choice([{}, {"parts": draw.choice([("a",), _nonsense(draw)])}, {"refuse": _nonsense(draw)}])
    adapter = draw.choice([lambda layer, site, x: x, _nonsense(draw)])
    with _clear("layer_type", "adapter", "parts", "refuse", "nn.Linear", "Linear"):
        isaac.register(layer_type, **options)(adapter)
    assert layer_type is fresh or isinstance(layer_type, str), f"{layer_type!r} was registered"


def _condition(draw: Random) -> None:
    layer = nn.Linear(4, 3).double()
    isaac.attach(layer, 0.5)
    site = layer.forward
    x = torch.randn(6, 4).double()
    arguments: dict[str, Any] = {"weight": layer.weight, "bias": layer.bias, "input": x, "site": site}
    wrong = draw.random() < 0.6
    if wrong:
        name = draw.choice(list(arguments))
        arguments[name] = _nonsense(draw)
        wrong = not (name == "bias" and arguments[name] is None)
    with _clear("weight", "bias", "input", "site", only_if=wrong):
        weight, bias = isaac.condition(**arguments)
    if not wrong:
        g = torch.randn(6, 3).double()
        F.linear(x, weight, bias).backward(g)
        _same(layer, g, x, 0.5)


def _ensemble(draw: Random) -> None:
    copies = draw.randint(1, 3)
    models: Any = [nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)) for _ in range(copies)]
    dampings: Any = draw.choice([0.5, [0.1 * (n + 1) for n in range(copies)], math.inf])
    given: dict[str, Any] = {"damping": dampings, "samples": 1, "output_curvature": "sampled", "output_damping": math.inf}
    wrong = draw.random() < 0.6
    if wrong:
        name = draw.choice(["models", *given])
        value = draw.choice([_nonsense(draw), [nn.LayerNorm(3)], [nn.Linear(2, 2), nn.Linear(3, 2)], [models[0], nn.ReLU()]])
        if name == "models":
            models = value
        else:
            given[name] = value
    with _clear("model", *given, "layer", only_if=wrong):
        ensemble = isaac.Ensemble(models, **given)
    if wrong:
        return
    x = torch.randn(6, 4)
    output = ensemble(x)
    losses = ensemble.losses(F.mse_loss, output, torch.zeros(6, 3))
    ensemble.backward(losses, output, nn.MSELoss())
    number = draw.randrange(copies)
    single = copy.deepcopy(models[number])
    damping = dampings[number] if isinstance(dampings, list) else dampings
    isaac.attach(single, damping)
    F.mse_loss(single(x), torch.zeros(6, 3)).backward()
    expected = single[0].weight.grad
    actual = next(ensemble.parameters()).grad
    assert actual is not None
    assert (actual[number] - expected).norm() <= 1e-4 * expected.norm() + 1e-9


def _suggest(draw: Random) -> None:
    model: Any = _model(draw) if draw.random() < 0.9 else _nonsense(draw)
    attached = isinstance(model, nn.Module) and draw.random() < 0.3
    if attached:
        options: dict[str, Any] = draw.choice([{}, {"when": "step"}, {"sharing": "reduce"}])
        isaac.attach(model, 0.5, **options)
    scale, rows = draw.choice([0.0, 1e-6, 1.0, 1e6, math.nan, math.inf]), draw.choice([0, 2, 7])
    batch = draw.choice([(), (torch.randn(rows, 4) * scale,)])
    before = _state(model) if isinstance(model, nn.Module) else None
    # Batch norm refuses a batch without rows, in its own words.
    with _clear("model", "batch", "inputs", "finite", "rows", "values per channel"):
        try:
            suggestion = isaac.suggest_damping(model, *batch)
        finally:
            assert before is None or _unchanged(before, _state(model)), "the model changed"
    assert 0 < suggestion.damping < math.inf
    assert 0 < suggestion.relative < math.inf
    assert str(suggestion)
    assert repr(suggestion)


def _state(model: nn.Module) -> list[Any]:
    modules: list[Any] = [(module.training, sorted(vars(module))) for module in model.modules()]
    return [modules, torch.get_rng_state(), *(value.clone() for value in model.state_dict().values())]


def _unchanged(before: list[Any], after: list[Any]) -> bool:
    return before[0] == after[0] and all(
        torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(before[1:], after[1:], strict=True)
    )


def _detach(draw: Random) -> None:
    value = draw.choice([_nonsense(draw), nn.Linear(2, 2)])
    with _clear("model", "attached"):
        isaac.detach(value)
    raise AssertionError(f"{value!r} was detached")


def _capture(draw: Random) -> None:
    with _clear("train_step", "warmup", "input", "CUDA"):
        isaac.capture(draw.choice([lambda x: x, _nonsense(draw)]), _nonsense(draw), warmup=draw.choice([1, 3, _nonsense(draw)]))
    raise AssertionError("a step was captured without a GPU")


TARGETS: Mapping[str, Callable[[Random], None]] = {
    "equations": _equations,
    "Relative": _relative,
    "Linear": _drop_in,
    "attach": _attach,
    "Handle": _handle,
    "register": _register,
    "condition": _condition,
    "Ensemble": _ensemble,
    "suggest_damping": _suggest,
    "detach": _detach,
    "capture": _capture,
}
#: How often each is drawn, for one of the shortest.
_WEIGHTS = {"equations": 20, "attach": 15, "Handle": 10, "suggest_damping": 4, "Ensemble": 4, "Linear": 4}


def main(arguments: list[str] | None = None) -> None:
    """Run, write the record, print a summary; stops at the first case that is neither answered nor refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/robustness/fuzz.json"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console, outcomes, started = Console(), Counter[str](), time.perf_counter()
    choose = random.Random(options.seed)
    names = list(TARGETS)
    with Progress(console=console) as progress:
        task = progress.add_task("fuzz", total=options.cases)
        for number in range(options.cases):
            name = choose.choices(names, [_WEIGHTS.get(name, 1) for name in names])[0]
            try:
                outcomes[f"{name}, {case(name, random.Random(f'{options.seed}/{number}'))}"] += 1
            except BaseException as error:
                raise RuntimeError(
                    f"case {number} of seed {options.seed}: case({name!r}, Random('{options.seed}/{number}'))"
                ) from error
            progress.update(task, advance=1)
    record = origin(threads=1, packages=("torch", "numpy")) | {
        "kind": "fuzz",
        "command": f"python -m isaac_lab.bench.fuzz --cases {options.cases} --seed {options.seed}",
        "seed": options.seed,
        "cases": options.cases,
        "seconds": time.perf_counter() - started,
        "outcomes": dict(sorted(outcomes.items())),
        "crashes": 0,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write(options.out, record)
    console.print(f"{options.cases:,} cases, each answered or refused. Record: {options.out}")


if __name__ == "__main__":
    main()
