"""A damping proposed for a model, from what its layers see in one batch."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from isaac_newton.api.attach import attach
from isaac_newton.core.checks import check_module
from isaac_newton.core.layer import ConditionedLayer
from isaac_newton.math import equations

__all__ = ["Spectrum", "Suggestion", "suggest_damping"]

#: The share of the model's curvature that the proposed damping takes away; docs/damping.md says how it was chosen.
SHARE = 0.8


@dataclass(frozen=True, eq=False)
class Spectrum:
    """What one layer saw in the batch.

    Attributes:
        rows: Rows that feed the conditioner.
        features: Width of a row.
        matrices: How many second moments there are: groups of a convolution, projections of attention, uses of a layer.
        mean: The mean eigenvalue of these, zeros included: what `Relative` is relative to.
        eigenvalues: Those that can differ from 0, of all matrices together; float64, ascending.
    """

    rows: int
    features: int
    matrices: int
    mean: float
    eigenvalues: Float[Tensor, " some"]

    @property
    def largest(self) -> float:
        """The largest eigenvalue."""
        return float(self.eigenvalues[-1])

    @property
    def curvature(self) -> float:
        """Σ s."""
        return float(self.eigenvalues.sum())

    def effective_rank(self, damping: float) -> float:
        """Σ s/(s+λ), per matrix: how many directions of the inputs are damped."""
        return float((self.eigenvalues / (self.eigenvalues + damping)).sum()) / self.matrices

    def damped(self, damping: float) -> float:
        """How much of the curvature conditioning takes away: Σ s · s/(s+λ); Σ sλ/(s+λ) is left."""
        return float((self.eigenvalues**2 / (self.eigenvalues + damping)).sum())


@dataclass(frozen=True, eq=False, repr=False)
class Suggestion:
    """What `suggest_damping` returns; print it to see why.

    Attributes:
        damping: λ, one number for the model.
        relative: ρ, for `isaac_newton.Relative(ρ)`: one ratio, and a λ for each layer.
        layers: What each layer saw.
    """

    damping: float
    relative: float
    layers: Mapping[str, Spectrum]

    def __repr__(self) -> str:
        return f"Suggestion(damping={self.damping:.3g}, relative={self.relative:.3g}, layers={list(self.layers)})"

    def __str__(self) -> str:
        headings = ("layer", "rows", "features", "mean", "largest", "curvature", "effective rank", "damped")
        lines, total = [headings], sum(seen.curvature for seen in self.layers.values())
        for name, seen in self.layers.items():
            sizes = (str(seen.rows), str(seen.features), f"{seen.mean:.2g}", f"{seen.largest:.2g}")
            share = f"{seen.curvature:.2g}, {seen.curvature / total:.0%}"
            rank = f"{seen.effective_rank(self.damping):.2g} of {min(seen.rows, seen.features)}"
            damped = f"{seen.damped(self.damping) / seen.curvature:.0%}" if seen.curvature else "–"
            lines.append((name or "(model)", *sizes, share, rank, damped))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
        small, large = (f"{self.damping * factor:.2g}" for factor in (1 / 3, 3))
        words = (
            f"damping={self.damping:.2g} takes away {SHARE:.0%} of the model's curvature, Σ s over the eigenvalues s of the",
            "second moments of all layers' inputs. Directions with s far above λ are flattened to λ, those far below stay",
            "as in the plain gradient, and a layer of which little is damped stays nearly plain.",
            f"Try {small} and {large} too. With SGD a smaller λ wants a higher learning rate, since ζ* shrinks with λ.",
            f"isaac.Relative({self.relative:.2g}) takes away as much with a λ for each layer, so many times its mean",
            "eigenvalue, which follows the inputs while they change.",
        )
        return "\n".join([*table, *words])


def suggest_damping(model: nn.Module, *batch: Any, **named: Any) -> Suggestion:
    r"""Propose a damping from one batch: the λ that takes away four fifths of the model's curvature.

    Runs the model forward once, as in training. With eigenvalues $s$ of $a^\top a / b$, $\sum s$ is the curvature that the
    inputs of a layer bring, and $\sum s λ / (s + λ)$ what is left of it after conditioning. There is one λ at which that is a
    fifth, over all layers together. It has no unit: inputs twice as large get a λ four times as large.

    The model is what it was afterwards: buffers (those of batch norm), training mode, torch's random numbers, what is attached.
    Nothing is attached for it; an attached model is looked at as it is, with its layers, `sharing`, `max_rows`, mask and bias.

    Args:
        model: Any module that `attach` takes, attached or not.
        *batch: What the model is called with, `model(*batch)`; a single mapping is `model(**batch)`. No targets are needed.
        **named: What it is called with by name.
    """
    check_module(model)
    _check_values(model)
    if not batch and not named:
        raise ValueError("suggest_damping needs a batch to look at: suggest_damping(model, *inputs)")
    if batch and isinstance(batch[0], DataLoader):
        raise TypeError("suggest_damping looks at one batch, got a DataLoader: give the inputs in next(iter(loader))")
    layers = _spectra(model, batch, named)
    seen = [spectrum for spectrum in layers.values() if spectrum.largest > 0]
    if not seen:
        raise ValueError(f"the batch gives no damping: the inputs of {', '.join(map(repr, layers))} are all zero")
    largest, smallest = max(each.largest for each in seen), min(each.mean for each in seen)
    return Suggestion(
        damping=_where(seen, [1.0] * len(seen), largest),
        relative=_where(seen, [each.mean for each in seen], largest / smallest),
        layers=layers,
    )


def _check_values(model: nn.Module) -> None:
    """Refuse what cannot be run yet."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(
                f"parameter {name!r} is on the meta device and has no values: fill the model before asking for a damping"
            )
        if is_lazy(parameter):
            raise ValueError(f"parameter {name!r} has no size yet: run one batch through the model before asking for a damping")


def _where(seen: Sequence[Spectrum], units: Sequence[float], most: float) -> float:
    """The number at which dampings of so many units take away `SHARE`. That falls from 1 at 0 to 0 at ∞, so there is one."""
    low, high = 0.0, most  # where less than a half is taken away
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        damped = sum(each.damped(middle * unit) for each, unit in zip(seen, units, strict=True))
        low, high = (middle, high) if damped / sum(each.curvature for each in seen) > SHARE else (low, middle)
    return high


def _spectra(model: nn.Module, batch: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Spectrum]:
    found: dict[str, list[tuple[int, int, Tensor]]] = {}
    with contextlib.ExitStack() as stack:
        sites = _sites(model)
        if not sites:
            handle = attach(model)
            stack.callback(handle.detach)
            sites = _sites(model)
        names = {id(site): name for name, site in sites.items()}

        def observe(site: ConditionedLayer, rows: Tensor) -> None:
            if rows.dim() == 1:
                # One-hot rows: the second moment is diagonal and holds how often each token came.
                total = rows.sum().clamp_min(1)
                count, features, values = int(total), len(rows), (rows / total)[None]
            else:
                count, features, values = rows.shape[-2], rows.shape[-1], equations.spectrum(rows)
            found.setdefault(names[id(site)], []).append((count, features, values.cpu()))

        for run in {id(site.run): site.run for site in sites.values()}.values():
            stack.callback(setattr, run, "row_observer", run.row_observer)
            run.row_observer = observe
        stack.enter_context(_as_it_was(model))
        _call(model, batch, named)
    if not found:
        raise ValueError(
            f"the batch went past every layer ({', '.join(map(repr, sites))}): their weights are frozen, or nothing called them"
        )
    return {name: _together(name, found[name]) for name in sites if name in found}


def _call(model: nn.Module, batch: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    if len(batch) == 1 and isinstance(batch[0], Mapping):
        model(**batch[0], **named)
        return
    try:
        model(*batch, **named)
    except (TypeError, AttributeError) as error:
        if len(batch) == 1 and isinstance(batch[0], tuple | list):
            raise TypeError(
                f"the model was called with one {type(batch[0]).__name__} and refused it: suggest_damping(model, *inputs) "
                "gives it the parts, without the targets"
            ) from error
        raise


def _sites(model: nn.Module) -> dict[str, ConditionedLayer]:
    """The conditioned layers of a model, by name."""
    return {
        name: site
        for name, module in model.named_modules()
        for site in (vars(module).get("_site"), vars(module).get("forward"))  # of an `isaac_newton.Linear`, or attached
        if isinstance(site, ConditionedLayer)
    }


def _together(name: str, seen: list[tuple[int, int, Tensor]]) -> Spectrum:
    values = torch.cat([values.reshape(-1) for *_, values in seen]).sort().values
    if not values.isfinite().all():
        raise ValueError(f"the inputs of layer {name!r} are not finite in this batch, so they suggest no damping")
    if len(values) == 0:
        raise ValueError(f"layer {name!r} saw no rows in this batch, so there is nothing to look at")
    width = sum(features * len(values) for _, features, values in seen)
    return Spectrum(
        rows=max(rows for rows, *_ in seen),
        features=max(features for _, features, _ in seen),
        matrices=sum(len(values) for *_, values in seen),
        mean=float(values.sum()) / width,
        eigenvalues=values,
    )


@contextlib.contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """A forward pass as in training that leaves no trace."""
    training = {module: module.training for module in model.modules()}
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        # Compiled code does not call us.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        try:
            if not model.training:
                model.train()
            yield
        finally:
            for module, mode in training.items():
                module.training = mode
            with torch.no_grad():
                for module, name, buffer, value in buffers:
                    module._buffers[name] = buffer
                    # One that did not change may be part of a graph, and must not look as if it had.
                    if buffer is not None and value is not None and not torch.equal(buffer, value):
                        buffer.copy_(value)
