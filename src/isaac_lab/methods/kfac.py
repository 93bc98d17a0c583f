"""K-FAC from its definition: of each linear layer the inputs and output gradients, both factors, and a solve with each."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import isaac_newton as isaac
from isaac_lab.trial import Trial

#: Of the averages, each time that they are renewed.
DECAY = 0.95


class Kfac:
    """Leaves λ² (B + λI)⁻¹ ∇ (A + λI)⁻¹ in `.grad` of the weights of linear layers; with λ² it is ζ, at ζ's learning rates.

    With the setting `natural` it is without λ², at the learning rates of natural gradients.

    With the setting `every` 1 the factors are those of the batch, as in the paper. Above, they are averages over the steps that
    are renewed now and then with their inverses, as users of K-FAC have it; the first ones are plain means, so that the start
    does not weigh more than what follows.

    Linear layers see one row per example. Of them those in `layers` are conditioned; None for all.
    """

    def __init__(self, model: nn.Module, layers: Sequence[str] | str | None, trial: Trial) -> None:
        self._damping, self._every = trial.damping, int(trial.get("every", 1))
        self._scale = 1.0 if trial.get("natural") else self._damping**2
        self._empirical = trial.get("curvature", "sampled") == "empirical"
        self._layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        self._conditioned = set(self._layers if layers is None else [layers] if isinstance(layers, str) else layers)
        self._seen: dict[str, tuple[Tensor, Tensor]] = {}
        self._steps = 0
        self._averages: dict[str, list[Tensor]] = {}
        self._inverses: dict[str, list[Tensor]] = {}
        for name, layer in self._layers.items():
            layer.register_forward_hook(partial(self._record, name))

    def backward(self, loss: Tensor, output: Tensor, likelihood: isaac.Likelihood) -> None:
        """In place of `loss.backward()`."""
        outputs = [out for _, out in self._seen.values()]
        renewed = self._steps % self._every == 0
        gradients = torch.autograd.grad(loss, outputs, retain_graph=renewed and not self._empirical)
        sampled: Sequence[Tensor] = ()
        if renewed and self._empirical:
            sampled = tuple(g * len(g) for g in gradients)
        elif renewed:
            sampled = torch.autograd.grad(output, outputs, likelihood.sample(output.detach()))
        for place, ((name, (a, _)), g) in enumerate(zip(self._seen.items(), gradients, strict=True)):
            layer = self._layers[name]
            if name not in self._conditioned:
                layer.weight.grad = g.mT @ a
            elif self._every == 1:
                layer.weight.grad = self._scale * isaac.equations.kfac(g, sampled[place], a, self._damping)
            else:
                if renewed:
                    self._renew(name, sampled[place], a)
                left, right = self._inverses[name]
                layer.weight.grad = self._scale * left @ (g.mT @ a) @ right
            layer.bias.grad = g.sum(0)
        self._seen = {}
        self._steps += 1

    def _renew(self, name: str, gbar: Tensor, a: Tensor) -> None:
        factors = [rows.mT @ rows / len(rows) for rows in (gbar, a)]
        renewals = self._steps // self._every
        kept = min(DECAY, renewals / (renewals + 1))
        before = self._averages.get(name, factors)
        self._averages[name] = [kept * old + (1 - kept) * new for old, new in zip(before, factors, strict=True)]
        damped = (own + self._damping * torch.eye(len(own), device=own.device, dtype=own.dtype) for own in self._averages[name])
        self._inverses[name] = [torch.inverse(own) for own in damped]

    def state_dict(self) -> dict[str, Any]:
        """All that changes."""
        return {"steps": self._steps, "averages": self._averages, "inverses": self._inverses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was made."""
        device = next(iter(self._layers.values())).weight.device
        self._steps = state["steps"]
        for name in ("averages", "inverses"):
            setattr(self, f"_{name}", {key: [one.to(device) for one in own] for key, own in state[name].items()})

    def _record(self, name: str, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if torch.is_grad_enabled():
            self._seen[name] = (inputs[0].detach(), output)
