"""Linear layers: the adapters for `nn.Linear` and Hugging Face's `Conv1D`, and the drop-in layer `isaac_newton.Linear`."""

from typing import Any

import torch
from torch import Tensor, nn

from isaac_newton.core.gradient import apply
from isaac_newton.core.layer import ConditionedLayer
from isaac_newton.core.operations import LINEAR
from isaac_newton.core.options import Run
from isaac_newton.core.rows import sequence, time_first
from isaac_newton.layers.registry import REASONS, register
from isaac_newton.math.damping import Damping
from isaac_newton.torch_private import is_exported

__all__ = ["Linear"]


@register(nn.Linear, outputs=True)
def _linear(layer: nn.Linear, site: ConditionedLayer, input: Tensor) -> Tensor:
    arrange = sequence
    if site.is_time_first and input.dim() == 3 and (site.run.mask is not None or site.run.options.sharing == "reduce"):
        arrange = time_first  # where every row counts, their order does not
    return apply(LINEAR, input, layer.weight, layer.bias, site, arrange)


@register("transformers.pytorch_utils.Conv1D", outputs="empirical")
def _conv1d(layer: Any, site: ConditionedLayer, x: Tensor) -> Tensor:
    # GPT-2's linear layer: its weight is (inputs, outputs), and it always has a bias.
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output = torch.addmm(bias, x.view(-1, x.size(-1)), weight)  # type: ignore[arg-type]
        return output.view(*x.shape[:-1], layer.nf)

    return apply(forward, x, layer.weight, layer.bias, site, transposed=True)


class Linear(nn.Linear):
    r"""`nn.Linear` whose weight gradient is ζ* (Theorem 3); the bias gradient stays plain.

    Takes the place of the authors' `isaac.Linear(in_features, out_features, la)`.

    Args:
        in_features: Size of each input row.
        out_features: Size of each output row.
        damping: $λ_a > 0$: a number, `Relative`, or a function of the number of backward passes so far.
        bias: Whether to add a bias.
        la: The authors' name for `damping`.
        device: As in `nn.Linear`.
        dtype: As in `nn.Linear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        damping: Damping | None = None,
        bias: bool = True,
        *,
        la: Damping | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if damping is not None and la is not None:
            raise TypeError(f"damping and la are two names for one thing, got damping={damping!r} and la={la!r}")
        if dtype is not None and dtype.is_complex:
            raise TypeError(f"dtype must be real, got {dtype}: conditioners are made from real inputs")
        chosen = damping if damping is not None else la if la is not None else 1.0
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self._site = ConditionedLayer("", Run(damping=chosen))

    @property
    def damping(self) -> Damping:
        """λ_a; may change at any time."""
        return self._site.run.damping

    @damping.setter
    def damping(self, value: Damping) -> None:
        self._site.run.set_damping(value)

    def forward(self, input: Tensor) -> Tensor:
        """What `nn.Linear` returns."""
        if is_exported():
            return super().forward(input)
        return apply(LINEAR, input, self.weight, self.bias, self._site)

    def extra_repr(self) -> str:
        """What `nn.Linear` says, and the damping."""
        return f"{super().extra_repr()}, damping={self.damping}"


REASONS[Linear] = "ζ* by itself: an isaac_newton.Linear has a damping of its own"
