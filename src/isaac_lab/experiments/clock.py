"""Seconds per step of each method, alone on one CPU thread: the paper's time axes, whatever device the training ran on."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import isaac_newton as isaac
from isaac_lab.bench import timing
from isaac_lab.bench.modes import Mode
from isaac_lab.bench.problems import Problem, chain
from isaac_lab.bench.steps import LEARNING_RATE, METHODS, Method, Step, missing
from isaac_lab.config import Config
from isaac_lab.records import origin

__all__ = ["explicit_kfac", "measure", "seconds_per_step"]

#: Pixels of an image; the other data sets have 28 × 28.
PIXELS = {"digits": 64}
CLASSES = 10

OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=LEARNING_RATE),
}


def measure(configs: Mapping[str, Config], *, rounds: int, tick: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """A record with the time of a step of each of these runs; they take turns, on a fixed random batch of their own size.

    Args:
        configs: By name; the first is what ratios are relative to.
        rounds: How often they take turns.
        tick: Called after each round.
    """
    kfac = missing("kfac")
    mode = Mode("cpu", threads=1)
    steps = {}
    with mode.active():
        for name, config in configs.items():
            model, x, y = problem(config).make("cpu")
            step = method(config)(model, problem(config).loss_fn, config.damping)
            steps[name] = _bound(step, x, y)
        timings = timing.measure(steps, rounds=rounds, tick=tick)
    ratios = timing.ratios(timings.seconds, next(iter(configs)))
    methods = [
        {
            "name": name,
            "batch": config.batch,
            "implementation": _implementation(config, backpack=kfac is None),
            "seconds_per_step": asdict(timing.spread(timings.seconds[name])),
            "ratio": asdict(timing.spread(ratios[name])),
            "seconds": timings.seconds[name],
        }
        for name, config in configs.items()
    ]
    settings = {"rounds": rounds, "turn_seconds": timing.TURN, "threads": 1}
    packages = ("torch", "backpack-for-pytorch")
    return {"kind": "step times", "settings": settings, **origin(threads=1, packages=packages), "methods": methods}


def seconds_per_step(record: Mapping[str, Any]) -> dict[str, float]:
    """The median of each method."""
    return {method["name"]: float(method["seconds_per_step"]["median"]) for method in record["methods"]}


def problem(config: Config) -> Problem:
    """The network of a run with a random batch."""
    pixels = PIXELS.get(config.data, 784)
    classes = config.task == "classification"
    sizes = (pixels, *config.hidden, CLASSES if classes else pixels)
    return chain(sizes, config.batch, name=config.key, title=config.key, classes=classes)


def method(config: Config) -> Method:
    """The training step of a run, alone and operation by operation."""
    if config.kfac:
        return explicit_kfac if missing("kfac") else METHODS["kfac"]

    def prepare(model: nn.Module, loss_fn: nn.Module, damping: float) -> Step:
        optimizer = OPTIMIZERS[config.optimizer](model.parameters())
        names = [f"fc{number}" for number in config.layers] or None
        handle = None
        if config.sector != "gradient":
            handle = isaac.attach(
                model,
                damping=damping,
                output_damping=config.output_damping,
                output_curvature="empirical" if config.curvature == "empirical" else "sampled",
                layers=names,
            )

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            output = model(x)
            loss: Tensor = loss_fn(output, y)
            if handle is not None and config.draws:
                handle.backward(loss, output, loss_fn)
            else:
                loss.backward()
            optimizer.step()
            return loss

        return step

    return prepare


def explicit_kfac(model: nn.Module, loss_fn: nn.Module, damping: float) -> Step:
    """K-FAC where BackPACK is not installed: both factors by a second backward pass, both inverses, one sample per example."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    seen: list[tuple[Tensor, Tensor]] = []
    for layer in layers:
        layer.register_forward_hook(lambda layer, inputs, output: seen.append((inputs[0].detach(), output)))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        seen.clear()
        output: Tensor = model(x)
        loss: Tensor = loss_fn(output, y)
        sampled = torch.autograd.grad(output, [z for _, z in seen], _sample(loss_fn, output.detach()), retain_graph=True)
        loss.backward()
        with torch.no_grad():
            for layer, (a, _), g in zip(layers, seen, sampled, strict=True):
                left, right = (_damped_inverse(rows.mT @ rows / len(rows), damping) for rows in (g, a))
                assert layer.weight.grad is not None
                layer.weight.grad = damping**2 * left @ layer.weight.grad @ right
        optimizer.step()
        return loss

    return step


def _sample(loss_fn: nn.Module, output: Tensor) -> Tensor:
    """For each example one draw with the loss Hessian as its covariance (Remark 1)."""
    if isinstance(loss_fn, nn.MSELoss):
        return torch.randn_like(output) * math.sqrt(2 / output.shape[1])
    p = output.softmax(1)
    return p - F.one_hot(p.multinomial(1).squeeze(1), p.shape[1])


def _damped_inverse(factor: Tensor, damping: float) -> Tensor:
    return torch.inverse(factor + damping * torch.eye(len(factor)))


def _implementation(config: Config, *, backpack: bool) -> str:
    if config.kfac:
        return "K-FAC, factors by BackPACK" if backpack else "K-FAC, explicit factors"
    return "torch" if config.sector == "gradient" else "isaac-newton"


def _bound(step: Step, x: Tensor, y: Tensor) -> Callable[[], object]:
    return lambda: step(x, y)
