"""A callback for the `Trainer` of Lightning, under both of its names: `lightning.pytorch` and `pytorch_lightning`."""

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from isaac_newton.integrations import Attaching
from isaac_newton.math.damping import Damping

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer

__all__ = ["IsaacCallback"]


def _name() -> str:
    """The name that is in use, else the one that is installed; importing both would take twice as long."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        if name in sys.modules:
            return name
    return "lightning.pytorch" if importlib.util.find_spec("lightning") else "pytorch_lightning"


if not TYPE_CHECKING:
    Callback = importlib.import_module(_name()).Callback


class IsaacCallback(Attaching, Callback):
    """Condition the gradients of a `LightningModule`: `Trainer(…, callbacks=[IsaacCallback(damping=0.1)])`.

    The module is attached when training begins and plain when it ends, also by an exception or a keyboard interrupt. Every
    batch logs `isaac_damping`, `isaac_rows` (mean per layer), `isaac_fallbacks` and `isaac_extra_multiplications` (a share of
    the layers' own) through the module, so `log_every_n_steps` holds. Checkpoints carry the handle's state.

    The trainer clips before the optimizer steps: with `when="step"` that is the plain gradient.

    Args:
        damping: As in `isaac_newton.attach`.
        options: Those of `isaac_newton.attach`.
    """

    def __init__(self, damping: Damping | Literal["auto"] = "auto", **options: Any) -> None:
        super().__init__(damping, **options)
        self._loaded: dict[str, Any] | None = None
        self._last: dict[str, Any] = {}

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Attach: the module is on its device and wrapped, its optimizers are there, and a checkpoint is loaded."""
        state, self._loaded = self._loaded, None
        if state is None and trainer.ckpt_path is not None:
            warnings.warn(
                f"training resumes from {trainer.ckpt_path}, which has no state of an IsaacCallback: running averages, "
                "counters and the damping start anew",
                RuntimeWarning,
                stacklevel=2,
            )
        self._attach(pl_module, trainer.optimizers, state)

    def on_train_batch_end(
        self, trainer: "Trainer", pl_module: "LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log; the trainer decides which batches it writes down."""
        pl_module.log_dict(self._values())

    def on_train_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Make the module plain again."""
        self.detach()

    def on_exception(self, trainer: "Trainer", pl_module: "LightningModule", exception: BaseException) -> None:
        """Make the module plain again."""
        self.detach()

    def detach(self) -> None:
        """Make the module plain again, if it is not; checkpoints saved after that still have the handle's state."""
        self._last = self.state_dict()
        super().detach()

    def state_dict(self) -> dict[str, Any]:
        """The handle's, for a checkpoint."""
        return self._last if self.handle is None else self.handle.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep it: Lightning loads callbacks before there is a handle."""
        self._loaded = dict(state_dict)
