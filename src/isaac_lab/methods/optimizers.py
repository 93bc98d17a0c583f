"""The optimizers that people pick, with the settings of a run; and those of an ensemble, with a rate for each network."""

import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import isaac_newton as isaac
from isaac_lab.method import UnableError
from isaac_lab.methods.muon import Muon
from isaac_lab.methods.schedule_free import ScheduleFree
from isaac_lab.methods.soap import Soap
from isaac_lab.trial import Trial
from isaac_lab.workload import Workload

MOMENTUM = 0.9
#: Of Adam for an ensemble.
BETAS, SMALLEST = (0.9, 0.999), 1e-8


def optimizers(trial: Trial, workload: Workload, model: nn.Module) -> tuple[torch.optim.Optimizer, ...]:
    """Of a run."""
    name, rate, decay = trial.method.partition("+")[0], trial.learning_rate, float(trial.get("weight_decay", 0.0))
    own = {"beta2": float(trial.get("beta2"))} if trial.get("beta2") is not None else {}
    if name == "muon":
        hidden = workload.hidden(model)
        if not hidden:
            raise UnableError("Muon trains matrices only, and this network has none but its first and last")
        ours = set(hidden)
        rest = _grouped(trial, [parameter for parameter in model.parameters() if parameter not in ours], decay)
        second = float(trial.get("second_rate", 0.001))
        return Muon(hidden, lr=rate, weight_decay=decay), _adamw(rest, second, **own)
    groups = _grouped(trial, [parameter for parameter in model.parameters() if parameter.requires_grad], decay)
    betas, share = (0.9, own.get("beta2", 0.999)), float(trial.get("momentum", MOMENTUM))
    made: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "adadelta": lambda: torch.optim.Adadelta(groups, rate),
        "adam": lambda: torch.optim.Adam(groups, rate),
        "adamw": lambda: _adamw(groups, rate, **own),
        "nadamw": lambda: torch.optim.NAdam(groups, rate, betas, decoupled_weight_decay=True, capturable=_on_device(groups)),
        "schedule-free": lambda: ScheduleFree(groups, lr=rate, **own),
        "soap": lambda: Soap(groups, lr=rate, **own),
        "kron": lambda: kron(groups, rate, share),
        "nesterov": lambda: torch.optim.SGD(groups, rate, momentum=share, nesterov=True),
        "momentum": lambda: torch.optim.SGD(groups, rate, momentum=share),
    }
    plain = float(trial.get("momentum", 0.0))
    return (made[name]() if name in made else torch.optim.SGD(groups, rate, momentum=plain),)


def _grouped(trial: Trial, parameters: Sequence[nn.Parameter], decay: float) -> list[dict[str, Any]]:
    """All in one group with this weight decay, or vectors without one where the run says so."""
    if trial.get("decays") != "matrices":
        return [{"params": list(parameters), "weight_decay": decay}]
    matrices, vectors = ([p for p in parameters if (p.dim() > 1) is matrix] for matrix in (True, False))
    groups = ({"params": own, "weight_decay": share} for own, share in ((matrices, decay), (vectors, 0.0)))
    return [group for group in groups if group["params"]]


def _on_device(groups: Sequence[dict[str, Any]]) -> bool:
    return all(parameter.is_cuda for group in groups for parameter in group["params"])


def _adamw(groups: list[dict[str, Any]], rate: float, beta2: float = 0.999) -> torch.optim.AdamW:
    """On a GPU in one kernel, as SGD is in a captured step: torch's default there takes twice as long."""
    return torch.optim.AdamW(groups, rate, (0.9, beta2), fused=_on_device(groups))


def kron(groups: list[dict[str, Any]], rate: float, momentum: float) -> torch.optim.Optimizer:
    """Kron-PSGD of its package, whose state torch cannot load whole."""
    library = importlib.import_module("pytorch_optimizer")

    class Kron(library.Kron):  # type: ignore[misc,name-defined]
        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            for number, parameter in enumerate(parameters):
                if number in state["state"]:
                    # Torch takes the letters of its formulas apart.
                    self.state[parameter]["expressions"] = state["state"][number]["expressions"]

    # Balanced now and then by numpy's random numbers, which a run that is cut does not keep: never, here.
    made: torch.optim.Optimizer = Kron(groups, lr=rate, momentum=momentum, balance_prob=0.0)
    return made


class PerCopy(torch.optim.Optimizer):
    """An optimizer for an ensemble with a learning rate for each copy, fixed once made.

    A parameter moves against what `direction` makes of its gradient and of what is kept for it.
    """

    def __init__(
        self, ensemble: isaac.Ensemble, lr: float | Sequence[float], direction: Callable[[Tensor, dict[str, Any]], Tensor]
    ) -> None:
        rates = [lr] * ensemble.copies if isinstance(lr, int | float) else list(lr)
        if len(rates) != ensemble.copies or not all(rate > 0 for rate in rates):
            raise ValueError(f"lr must be > 0, one number or one for each of the {ensemble.copies} copies, got {lr}")
        parameters = [p for p in ensemble.parameters() if p.requires_grad]
        super().__init__(parameters, {})
        self.lr = torch.tensor(rates, dtype=parameters[0].dtype, device=parameters[0].device)
        self._direction = direction
        #: Neighbours with one learning rate are updated by one plain kernel, which is faster than one that reads a rate per
        #: copy.
        self._runs: list[tuple[slice, float]] = []
        for rate, group in itertools.groupby(enumerate(rates), lambda pair: pair[1]):
            first, *rest = [number for number, _ in group]
            self._runs.append((slice(first, first + len(rest) + 1), rate))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all copies, each as far as its learning rate says."""
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        directions = [self._direction(p.grad, self.state[p]) for p in parameters]
        if len(self._runs) > 8:
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.addcmul_(direction, self.lr.view(-1, *[1] * (parameter.dim() - 1)), value=-1)
            return
        for part, rate in self._runs:
            torch._foreach_add_([p[part] for p in parameters], [d[part] for d in directions], alpha=-rate)


def per_copy(name: str, ensemble: isaac.Ensemble, lr: float | Sequence[float]) -> PerCopy:
    """`torch.optim.SGD`, alone or with momentum, or `torch.optim.Adam`, with a learning rate for each copy."""
    return PerCopy(ensemble, lr, {"sgd": lambda gradient, _: gradient, "momentum": _momentum, "adam": _adam}[name])


def _momentum(gradient: Tensor, state: dict[str, Any]) -> Tensor:
    if not state:
        state["momentum"] = torch.zeros_like(gradient)
    moved: Tensor = state["momentum"].mul_(MOMENTUM).add_(gradient)
    return moved


def _adam(gradient: Tensor, state: dict[str, Any]) -> Tensor:
    if not state:
        # float64, because 1 − β² loses five digits in float32 at the first steps
        state["step"] = torch.zeros((), dtype=torch.float64, device=gradient.device)
        state["mean"], state["square"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
    first, second = BETAS
    step = state["step"].add_(1)
    state["mean"].lerp_(gradient, 1 - first)
    state["square"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
    root = (state["square"] / (1 - second**step)).sqrt_().add_(SMALLEST)
    direction: Tensor = state["mean"] / (root * (1 - first**step))
    return direction
