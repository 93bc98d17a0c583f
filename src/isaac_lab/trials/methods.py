"""How a trial trains: the optimizers people pick, and ISAAC on top of those that take any gradient."""

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

import isaac_newton as isaac
from isaac_lab.bench.formula import attach_formula
from isaac_lab.records import installed
from isaac_lab.trials.kfac import Kfac
from isaac_lab.trials.muon import Muon
from isaac_lab.trials.trial import Trial
from isaac_lab.trials.workload import Workload

__all__ = ["CONDITIONINGS", "OPTIMIZERS", "Optimizer", "Training", "UnableError", "capturable", "prepare", "unable"]

MOMENTUM = 0.9
#: Steps between two new preconditioners of SOAP, Shampoo, SINGD and K-FAC: what their authors use to make them affordable.
EVERY = 10


class UnableError(ValueError):
    """A method that cannot train this network; the message says why."""


@dataclass(frozen=True)
class Optimizer:
    """An optimizer as the laboratory uses it.

    Args:
        title: For tables and pictures.
        make: Takes the trial, the workload and the model, and returns torch optimizers; their settings are the trial's.
        package: The distribution that it comes from.
        module: The module to import for it; "" for torch.
        captured: Whether a CUDA graph can hold its step at a constant learning rate.
        scheduled: Whether it still can if the learning rate changes.
        damped: Whether it has a damping of its own.
    """

    title: str
    make: Callable[[Trial, Workload, nn.Module], tuple[torch.optim.Optimizer, ...]]
    package: str = "torch"
    module: str = ""
    captured: bool = False
    scheduled: bool = False
    damped: bool = False


class Training:
    """A model that is ready to be trained.

    Args:
        step: Takes a batch, trains on it, and returns the loss.
        optimizers: Whose learning rates the schedule sets; those that they have now are the largest.
    """

    def __init__(self, step: Callable[..., Tensor], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.step = step
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._largest = [(group, float(group["lr"])) for group in groups]
        self._share = 1.0

    def set_rate(self, share: float) -> None:
        """Set every learning rate to this share of its largest."""
        if share != self._share:
            self._share = share
            for group, largest in self._largest:
                group["lr"] = largest * share


def _sgd(trial: Trial, workload: Workload, model: nn.Module) -> tuple[torch.optim.Optimizer, ...]:
    return (torch.optim.SGD(model.parameters(), trial.learning_rate, weight_decay=trial.weight_decay),)


def _momentum(trial: Trial, workload: Workload, model: nn.Module) -> tuple[torch.optim.Optimizer, ...]:
    decay = trial.weight_decay
    return (torch.optim.SGD(model.parameters(), trial.learning_rate, momentum=MOMENTUM, weight_decay=decay),)


def _adam(trial: Trial, workload: Workload, model: nn.Module) -> tuple[torch.optim.Optimizer, ...]:
    return (torch.optim.Adam(model.parameters(), trial.learning_rate),)


def _adamw(trial: Trial, workload: Workload, model: nn.Module) -> tuple[torch.optim.Optimizer, ...]:
    return (_decoupled(model.parameters(), trial.learning_rate, trial.weight_decay),)


def _decoupled(parameters: Iterable[nn.Parameter], rate: float, decay: float) -> torch.optim.AdamW:
    """AdamW, on a GPU in one kernel, as SGD is in a captured step: torch's default there takes twice as long."""
    parameters = list(parameters)
    return torch.optim.AdamW(parameters, rate, weight_decay=decay, fused=all(parameter.is_cuda for parameter in parameters))


def _muon(trial: Trial, workload: Workload, model: nn.Module) -> tuple[torch.optim.Optimizer, ...]:
    hidden = workload.hidden(model)
    if not hidden:
        raise UnableError("Muon trains matrices only, and this network has none but its first and last")
    ours = set(hidden)
    rest = [parameter for parameter in model.parameters() if parameter not in ours]
    return (
        Muon(hidden, lr=trial.learning_rate, weight_decay=trial.weight_decay),
        _decoupled(rest, trial.second_rate, trial.weight_decay),
    )


def _soap(trial: Trial, workload: Workload, model: nn.Module) -> tuple[torch.optim.Optimizer, ...]:
    library = importlib.import_module("pytorch_optimizer")
    decay = trial.weight_decay
    made = library.SOAP(model.parameters(), lr=trial.learning_rate, weight_decay=decay, precondition_frequency=EVERY)
    return (made,)


def _shampoo(trial: Trial, workload: Workload, model: nn.Module) -> tuple[torch.optim.Optimizer, ...]:
    library = importlib.import_module("pytorch_optimizer")
    decay = trial.weight_decay
    made = library.ScalableShampoo(
        model.parameters(), lr=trial.learning_rate, weight_decay=decay, preconditioning_compute_steps=EVERY
    )
    return (made,)


def _singd(trial: Trial, workload: Workload, model: nn.Module) -> tuple[torch.optim.Optimizer, ...]:
    library = importlib.import_module("singd.optim.optimizer")
    made = library.SINGD(
        model,
        lr=trial.learning_rate,
        momentum=MOMENTUM,
        damping=trial.damping,
        weight_decay=trial.weight_decay,
        T=EVERY,
        loss_average=workload.averaged,
        # Without, its factors ran away on all settings that were tried; its authors advise it for that.
        normalize_lr_cov=True,
        warn_unsupported=False,
    )
    return (made,)


OPTIMIZERS: Mapping[str, Optimizer] = MappingProxyType(
    {
        "sgd": Optimizer("SGD", _sgd, captured=True, scheduled=True),
        "momentum": Optimizer("SGD + momentum", _momentum, captured=True, scheduled=True),
        "adam": Optimizer("Adam", _adam, captured=True, scheduled=True),
        "adamw": Optimizer("AdamW", _adamw, captured=True, scheduled=True),
        "muon": Optimizer("Muon + AdamW", _muon, captured=True, scheduled=True),
        "soap": Optimizer("SOAP", _soap, "pytorch_optimizer", "pytorch_optimizer"),
        "shampoo": Optimizer("Shampoo", _shampoo, "pytorch_optimizer", "pytorch_optimizer"),
        "singd": Optimizer("SINGD", _singd, "singd", "singd", damped=True),
        "kfac": Optimizer("K-FAC", _sgd, "backpack-for-pytorch", "backpack", damped=True),
    }
)

#: Options of `isaac_newton.attach`, by name; None for what is done in another way.
CONDITIONINGS: Mapping[str, Mapping[str, Any] | None] = MappingProxyType(
    {
        "none": None,
        "zeta_star": {},
        "reduce": {"sharing": "reduce"},
        "max_rows": {"max_rows": 256},
        "last": {},
        "running": {"when": "step", "decay": 0.9, "refresh": 20, "power": 0.5},
        "formula": None,
    }
)


def unable(trial: Trial, workload: Workload) -> str:
    """Why this method cannot train this workload, or ""."""
    optimizer = OPTIMIZERS[trial.optimizer]
    if optimizer.module and not installed(optimizer.module):
        return f"{optimizer.package} is not installed"
    if trial.optimizer == "kfac" and (workload.loss_fn is None or not workload.flat):
        return "BackPACK's factors exist for networks of linear layers with one row per example only"
    if trial.conditioning == "formula" and not workload.flat:
        return "the printed formula is for linear layers with one row per example only"
    return ""


def capturable(trial: Trial) -> bool:
    """Whether the step can be a CUDA graph."""
    optimizer = OPTIMIZERS[trial.optimizer]
    fits = optimizer.scheduled if trial.schedule != "constant" else optimizer.captured
    # Rows are drawn on the host: a graph would keep the first draw, and cannot copy it to the device.
    return fits and trial.conditioning not in ("running", "formula", "max_rows")


def prepare(trial: Trial, workload: Workload, model: nn.Module) -> Training:
    """Condition the model as the trial says, and make its optimizers."""
    for name, known, value in (
        ("optimizer", OPTIMIZERS, trial.optimizer),
        ("conditioning", CONDITIONINGS, trial.conditioning),
    ):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    reason = unable(trial, workload)
    if reason:
        raise UnableError(f"{trial.title}: {reason}")
    options = CONDITIONINGS[trial.conditioning]
    handle = None
    if trial.conditioning == "formula":
        attach_formula(model, trial.damping)
    elif options is not None:
        layers = workload.last if trial.conditioning == "last" else None
        damping = isaac.Relative(trial.damping) if trial.relative else trial.damping
        handle = isaac.attach(model, damping=damping, layers=layers, **options)
    optimizers = OPTIMIZERS[trial.optimizer].make(trial, workload, model)
    if handle is not None and trial.conditioning == "running":
        for optimizer in optimizers:
            handle.bind(optimizer)
    backward = None
    if trial.optimizer == "kfac" and workload.loss_fn is not None:
        backward = Kfac(model, workload.loss_fn, trial.damping, EVERY)

    def step(*batch: Tensor) -> Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        if backward is not None:
            loss = backward(*batch)
        else:
            if handle is not None:
                handle.mask = workload.mask(*batch)
            loss = workload.loss(model, *batch)
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.detach()

    return Training(step, optimizers)
