"""A callback for the `Trainer` of Hugging Face transformers."""

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from isaac_newton.integrations import Attaching

__all__ = ["IsaacCallback"]

FILE = "isaac.pt"


class IsaacCallback(Attaching, TrainerCallback):
    """Condition the gradients of a `Trainer`'s model: `Trainer(…, callbacks=[IsaacCallback(damping=0.1)])`.

    The model is attached when training begins and plain when it ends. The trainer's log has `isaac_damping`, `isaac_rows` (mean
    per layer), `isaac_fallbacks` and `isaac_extra_multiplications` (a share of the layers' own); so do the log history and
    callbacks that come later in the list. Each checkpoint gets a file `isaac.pt`, from which a resumed run goes on.

    The trainer clips before the optimizer steps: with `when="step"` that is the plain gradient. It tells nobody of exceptions:
    after one, call `detach` or train again.

    Args:
        damping: As in `isaac_newton.attach`.
        options: Those of `isaac_newton.attach`.
    """

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Attach: model and optimizer are on their device and wrapped, and a checkpoint is loaded."""
        self._attach(kwargs["model"], [kwargs["optimizer"]], _saved(args, state) if state.global_step > 0 else None)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add to what the trainer logs about training."""
        logs = kwargs["logs"]
        if self.handle is not None and "loss" in logs:
            values = self._values()
            logs.update(values)
            # The trainer has put a copy there just before.
            state.log_history[-1].update(values)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Put the handle's state beside that of the optimizer."""
        folder = _folder(args, state)
        if self.handle is not None and args.should_save and not args.save_only_model and folder.is_dir():
            part = folder / f"{FILE}.part"
            torch.save({"run": _run(state), "handle": self.handle.state_dict()}, part)
            part.replace(folder / FILE)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Make the model plain again."""
        self.detach()


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"


def _run(state: TrainerState) -> str:
    """Tells one run from another: the trainer does not say which checkpoint it resumes from, but what it has logged."""
    return hashlib.sha256(json.dumps(state.log_history, sort_keys=True).encode()).hexdigest()


def _saved(args: TrainingArguments, state: TrainerState) -> dict[str, Any] | None:
    """The state of the handle in the checkpoint that training resumes from; warns if there is none."""
    folders = [_folder(args, state)]
    if isinstance(args.resume_from_checkpoint, str):
        folders.insert(0, Path(args.resume_from_checkpoint))
    for folder in folders:
        if (folder / FILE).is_file():
            saved: dict[str, Any] = torch.load(folder / FILE, map_location="cpu", weights_only=True)
            if saved["run"] == _run(state):
                handle: dict[str, Any] = saved["handle"]
                return handle
    warnings.warn(
        f"training resumes at step {state.global_step}, but there is no {FILE} of this run in {' or '.join(map(str, folders))}"
        ": running averages, counters and the damping start anew. If the checkpoint is elsewhere, name it in "
        "TrainingArguments(resume_from_checkpoint=…)",
        RuntimeWarning,
        stacklevel=2,
    )
    return None
