"""Every public function of the library, each called with random arguments."""

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import dense
import drawn
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import isaac_newton as isaac

__all__ = ["TARGETS", "WEIGHTS"]


def _equations(draw: drawn.Random) -> None:
    rows, inputs, outputs, samples = drawn.sizes(draw)
    (a, good_a), (g, good_g) = drawn.matrix(draw, rows, inputs), drawn.matrix(draw, rows, outputs)
    (gbar, good_gbar), (damping, good_damping) = drawn.matrix(draw, samples, outputs), drawn.damping(draw)
    output_damping, good_output_damping = drawn.damping(draw)
    if any(isinstance(value, Tensor) and value.dim() == 0 and value < 0 for value in (damping, output_damping)):
        return  # tensors pass unread there
    which = draw.choice(["condition_rows", "zeta_star", "zeta", "kfac"])
    names = {"condition_rows": ["a", "damping"], "zeta_star": ["g", "a", "damping"], "kfac": ["g", "gbar", "a", "damping"]}
    names |= {"zeta": ["g", "gbar", "a", "output_damping", "damping"]}
    values = {"a": a, "g": g, "gbar": gbar, "output_damping": output_damping, "damping": damping}
    fine = {"a": good_a, "g": good_g, "gbar": good_gbar, "output_damping": good_output_damping, "damping": good_damping}
    arguments = [values[name] for name in names[which]]
    good = all(fine[name] for name in names[which])
    with drawn.clear(*(f"{name} " for name in names[which]), only_if=not good):
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
    drawn.agrees(actual, expected, (both / rows).sqrt().reshape(1, 1), 1.0, scale, factors)


def _relative(draw: drawn.Random) -> None:
    value, good = drawn.damping(draw)
    with drawn.clear("ratio", only_if=not good or math.isinf(value)):
        relative = isaac.Relative(value)
    layer, x = nn.Linear(3, 2, bias=False).double(), torch.randn(5, 3).double()
    with drawn.clear("ratio", only_if=not good):
        isaac.attach(layer, relative)
        layer(x).sum().backward()
    _same(layer, torch.ones(5, 2), x, float(value) * x.square().mean().item())


def _same(layer: nn.Linear, g: Tensor, a: Tensor, damping: float) -> None:
    assert layer.weight.grad is not None
    drawn.agrees(layer.weight.grad, dense.zeta_star(g, a, damping), a, damping)


def _drop_in(draw: drawn.Random) -> None:
    (damping, good), (la, good_la) = drawn.damping(draw), drawn.damping(draw)
    given: dict[str, Any] = draw.choice([{"damping": damping}, {"la": la}, {"damping": damping, "la": la}, {}])
    good = ("damping" not in given or good or damping is None) and ("la" not in given or good_la or la is None)
    both = given.get("damping") is not None and given.get("la") is not None
    with drawn.clear("damping", "la", only_if=not good or both):
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


def _model(draw: drawn.Random) -> nn.Module:
    return draw.choice(_MODELS)()


#: What each option may be; the rest is nonsense.
_OPTIONS: Mapping[str, Callable[[drawn.Random], Any]] = {
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


def _attach(draw: drawn.Random) -> None:
    model = _model(draw) if draw.random() < 0.95 else draw.choice([drawn.nonsense(draw), nn.ReLU(), nn.LayerNorm(3)])
    given: dict[str, Any] = {"damping": drawn.damping(draw)[0]}
    for name in draw.sample(list(_OPTIONS), draw.randint(0, 4)):
        given[name] = _OPTIONS[name](draw) if draw.random() < 0.85 else drawn.nonsense(draw)
    names = ("model", "no parameters", "no layer", "process_group", "positional argument", *given)
    before = [dict(vars(module)) for module in model.modules()] if isinstance(model, nn.Module) else []
    try:
        with drawn.clear(*names):
            handle = isaac.attach(model, **given)
    except drawn.Refused:
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
    with drawn.clear("schedule", "damping", "positional argument", only_if=schedule):
        handle.backward(loss, output, nn.MSELoss()) if given.get("output_damping", math.inf) != math.inf else loss.backward()
        if given.get("when") == "step":
            handle.step()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    assert str(handle)
    handle.detach()


def _handle(draw: drawn.Random) -> None:
    """Setters and methods, with nonsense in the place of arguments."""
    model = _model(draw)
    options: dict[str, Any] = draw.choice([{}, {"when": "step"}, {"output_damping": 1.0}])
    handle = isaac.attach(model, 0.5, **options)
    value = drawn.damping(draw)[0] if draw.random() < 0.5 else drawn.nonsense(draw)
    action = draw.choice(
        ["damping", "output_damping", "mask", "backward_passes", "backward", "bind", "load", "step", "discard"]
    )
    with drawn.clear(
        action, "damping", "handle", "loss", "output", "optimizer", "mask", "state", "schedule", "positional argument"
    ):
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


def _register(draw: drawn.Random) -> None:
    fresh = type("Layer", (nn.Module,), {})
    layer_type = draw.choice([fresh, f"nowhere.Layer{draw.getrandbits(60)}", nn.Linear, drawn.nonsense(draw)])
    options = draw.choice([{}, {"parts": draw.choice([("a",), drawn.nonsense(draw)])}, {"refuse": drawn.nonsense(draw)}])
    adapter = draw.choice([lambda layer, site, x: x, drawn.nonsense(draw)])
    with drawn.clear("layer_type", "adapter", "parts", "refuse", "nn.Linear", "Linear"):
        isaac.register(layer_type, **options)(adapter)
    assert layer_type is fresh or isinstance(layer_type, str), f"{layer_type!r} was registered"


def _condition(draw: drawn.Random) -> None:
    layer = nn.Linear(4, 3).double()
    isaac.attach(layer, 0.5)
    site = layer.forward
    x = torch.randn(6, 4).double()
    arguments: dict[str, Any] = {"weight": layer.weight, "bias": layer.bias, "input": x, "site": site}
    wrong = draw.random() < 0.6
    if wrong:
        name = draw.choice(list(arguments))
        arguments[name] = drawn.nonsense(draw)
        wrong = not (name == "bias" and arguments[name] is None)
    with drawn.clear("weight", "bias", "input", "site", only_if=wrong):
        weight, bias = isaac.condition(**arguments)
    if not wrong:
        g = torch.randn(6, 3).double()
        F.linear(x, weight, bias).backward(g)
        _same(layer, g, x, 0.5)


def _ensemble(draw: drawn.Random) -> None:
    copies = draw.randint(1, 3)
    models: Any = [nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)) for _ in range(copies)]
    dampings: Any = draw.choice([0.5, [0.1 * (n + 1) for n in range(copies)], math.inf])
    given: dict[str, Any] = {"damping": dampings, "samples": 1, "output_curvature": "sampled", "output_damping": math.inf}
    wrong = draw.random() < 0.6
    if wrong:
        name = draw.choice(["models", *given])
        value = draw.choice(
            [drawn.nonsense(draw), [nn.LayerNorm(3)], [nn.Linear(2, 2), nn.Linear(3, 2)], [models[0], nn.ReLU()]]
        )
        if name == "models":
            models = value
        else:
            given[name] = value
    with drawn.clear("model", *given, "layer", only_if=wrong):
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


def _suggest(draw: drawn.Random) -> None:
    model: Any = _model(draw) if draw.random() < 0.9 else drawn.nonsense(draw)
    attached = isinstance(model, nn.Module) and draw.random() < 0.3
    if attached:
        options: dict[str, Any] = draw.choice([{}, {"when": "step"}, {"sharing": "reduce"}])
        isaac.attach(model, 0.5, **options)
    scale, rows = draw.choice([0.0, 1e-6, 1.0, 1e6, math.nan, math.inf]), draw.choice([0, 2, 7])
    batch = draw.choice([(), (torch.randn(rows, 4) * scale,)])
    before = _state(model) if isinstance(model, nn.Module) else None
    # Batch norm refuses a batch without rows, in its own words.
    with drawn.clear("model", "batch", "inputs", "finite", "rows", "values per channel"):
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


def _detach(draw: drawn.Random) -> None:
    value = draw.choice([drawn.nonsense(draw), nn.Linear(2, 2)])
    with drawn.clear("model", "attached"):
        isaac.detach(value)
    raise AssertionError(f"{value!r} was detached")


def _capture(draw: drawn.Random) -> None:
    with drawn.clear("train_step", "warmup", "input", "CUDA"):
        isaac.capture(
            draw.choice([lambda x: x, drawn.nonsense(draw)]),
            drawn.nonsense(draw),
            warmup=draw.choice([1, 3, drawn.nonsense(draw)]),
        )
    raise AssertionError("a step was captured without a GPU")


TARGETS: Mapping[str, Callable[[drawn.Random], None]] = {
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
WEIGHTS = {"equations": 20, "attach": 15, "Handle": 10, "suggest_damping": 4, "Ensemble": 4, "Linear": 4}
