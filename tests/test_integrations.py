"""Each trainer with its real library: gradients are conditioned, the log says so, checkpoints resume, the model ends plain."""

import csv
import itertools
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import isaac_newton as isaac

# Lightning's own: what it thinks of our loader and folder, and what torch thinks of its code.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
]

BATCH, ACCUMULATE, RATE, CLIP = 4, 2, 0.1, 0.5
Batch = dict[str, Tensor]
VALUES = {"isaac_damping", "isaac_rows", "isaac_fallbacks", "isaac_extra_multiplications"}


class Net(nn.Module):
    """Breaks down in its n-th forward pass, if told so."""

    def __init__(self, seed: int = 1, dropout: float = 0.0, breaks_at: float = math.inf) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(9, 7), nn.ReLU(), nn.Dropout(dropout), nn.Linear(7, 6), nn.ReLU())
        self.head = nn.Linear(6, 3)
        self.passes, self.breaks_at = 0, breaks_at

    def forward(self, x: Tensor, labels: Tensor) -> Batch:
        self.passes += 1
        if self.passes > self.breaks_at:
            raise RuntimeError("power cut")
        logits = self.head(self.body(x))
        return {"loss": F.cross_entropy(logits.float(), labels), "logits": logits}


class Examples(Dataset[Batch]):
    def __init__(self, count: int) -> None:
        random = torch.Generator().manual_seed(3)
        self.x = torch.randn(count, 9, generator=random)
        self.labels = torch.randint(3, (count,), generator=random)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Batch:
        return {"x": self.x[i], "labels": self.labels[i]}


class Recorder:
    """Collates, and keeps the batches in their order."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def __call__(self, samples: list[Batch]) -> Batch:
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
        self.batches.append(batch)
        return batch


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), RATE, momentum=0.9)


# One function per trainer, all alike: train `net` for `steps` steps and return the batches it saw and what was logged. With
# `save` a checkpoint is made after so many steps; with `resume` training goes on from that one.


def with_transformers(
    net: Net, folder: Path, options: dict[str, Any], steps: int, *, save: int = 0, resume: int = 0, bf16: bool = False
) -> tuple[list[Batch], list[dict[str, float]]]:
    transformers = pytest.importorskip("transformers")
    from isaac_newton.integrations.transformers import IsaacCallback

    args = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATE,
        max_steps=steps,
        max_grad_norm=CLIP,
        bf16=bf16,
        logging_steps=1,
        save_strategy="steps" if save else "no",
        save_steps=save or 500,
        seed=5,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    recorder, optimizer = Recorder(), sgd(net)
    trainer = transformers.Trainer(
        net,
        args,
        data_collator=recorder,
        train_dataset=Examples(32),
        callbacks=[IsaacCallback(**options)],
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)),
    )
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{resume}") if resume else None)
    return recorder.batches, [entry for entry in trainer.state.log_history if "loss" in entry]


def with_lightning(
    net: Net,
    folder: Path,
    options: dict[str, Any],
    steps: int,
    *,
    save: int = 0,
    resume: int = 0,
    bf16: bool = False,
    name: str = "lightning",
) -> tuple[list[Batch], list[dict[str, float]]]:
    pytest.importorskip(name)
    lightning: Any = __import__(name if name == "pytorch_lightning" else "lightning.pytorch", fromlist=["Trainer"])
    callbacks: Any = __import__(lightning.__name__ + ".callbacks", fromlist=["ModelCheckpoint"])
    loggers: Any = __import__(lightning.__name__ + ".loggers", fromlist=["CSVLogger"])
    from isaac_newton.integrations.lightning import IsaacCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Batch, index: int) -> Tensor:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self.net)

    checkpoints = callbacks.ModelCheckpoint(folder, "checkpoint-{step}", every_n_train_steps=save, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        precision="bf16-mixed" if bf16 else "32-true",
        max_steps=steps,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=CLIP,
        callbacks=[IsaacCallback(**options), *([checkpoints] if save else [])],
        logger=loggers.CSVLogger(folder, version=0 if resume == 0 else 1),
        log_every_n_steps=1,
        enable_checkpointing=bool(save),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    recorder = Recorder()
    torch.manual_seed(5)  # what max_rows draws its rows with
    # Lightning fast-forwards no data: 40 examples make an epoch of five steps.
    loader = DataLoader(Examples(40), BATCH, collate_fn=recorder)
    trainer.fit(Module(), loader, ckpt_path=str(folder / f"checkpoint-step={resume}.ckpt") if resume else None)
    rows = csv.DictReader((Path(trainer.logger.log_dir) / "metrics.csv").read_text().splitlines())
    return recorder.batches, [{key: float(value) for key, value in row.items() if value} for row in rows]


def with_accelerate(
    net: Net, folder: Path, options: dict[str, Any], steps: int, *, save: int = 0, resume: int = 0, bf16: bool = False
) -> tuple[list[Batch], list[dict[str, float]]]:
    accelerate = pytest.importorskip("accelerate")
    from accelerate.utils import DataLoaderConfiguration, set_seed

    reset_accelerate()
    set_seed(5)
    accelerator = accelerate.Accelerator(
        cpu=True,
        gradient_accumulation_steps=ACCUMULATE,
        mixed_precision="bf16" if bf16 else "no",
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    recorder = Recorder()
    loader = DataLoader(Examples(32), BATCH, shuffle=True, collate_fn=recorder)
    model, optimizer, loader = accelerator.prepare(net, sgd(net), loader)
    handle = isaac.attach(accelerator.unwrap_model(model), **options)
    if options.get("when") == "step":
        handle.bind(optimizer)
    accelerator.register_for_checkpointing(handle)
    done, batches = 0, epochs(loader)
    if resume:
        accelerator.load_state(str(folder / f"checkpoint-{resume}"))
        epoch, seen = divmod(resume * ACCUMULATE, len(loader))
        loader.set_epoch(epoch)
        batches, done = itertools.chain(accelerator.skip_first_batches(loader, seen), epochs(loader, epoch + 1)), resume
    while done < steps:
        batch = next(batches)
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            done += 1
            if save and done % save == 0:
                accelerator.save_state(str(folder / f"checkpoint-{done}"))
    handle.detach()
    return recorder.batches, []


def epochs(loader: Any, first: int = 0) -> Iterator[Batch]:
    for epoch in itertools.count(first):
        loader.set_epoch(epoch)
        yield from loader


def reset_accelerate() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def by_hand(net: Net, batches: list[Batch], options: dict[str, Any], steps: int, bf16: bool = False) -> None:
    """The loop that all of them stand for."""
    handle, optimizer = isaac.attach(net, **options), sgd(net)
    for step in range(steps):
        optimizer.zero_grad()
        for batch in batches[step * ACCUMULATE : (step + 1) * ACCUMULATE]:
            with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
                loss = net(**batch)["loss"]
            (loss / ACCUMULATE).backward()
        nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        if options.get("when") == "step":
            handle.step()
        optimizer.step()
    handle.detach()


def attached(net: nn.Module) -> bool:
    return any("forward" in vars(module) for module in net.body)


TRAINERS: dict[str, Callable[..., tuple[list[Batch], list[dict[str, float]]]]] = {
    "transformers": with_transformers,
    "lightning": with_lightning,
    "accelerate": with_accelerate,
}
every_trainer = pytest.mark.parametrize("trainer", TRAINERS)


@every_trainer
@pytest.mark.parametrize("options", [{}, {"when": "step"}], ids=["backward", "step"])
def test_three_steps_equal_those_of_a_loop_with_accumulation_and_clipping(trainer, options, tmp_path) -> None:
    options = {"damping": 0.1, **options}
    net, expected, plain = Net(), Net(), Net()
    batches, logs = TRAINERS[trainer](net, tmp_path, options, 3)
    by_hand(expected, batches, options, 3)
    by_hand(plain, batches, {"damping": math.inf}, 3)
    for (name, ours), theirs, other in zip(net.named_parameters(), expected.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
        assert name.endswith("bias") or (ours - other).abs().max() > 1e-3
    assert not attached(net)
    if logs:
        assert [entry["isaac_damping"] for entry in logs if "isaac_damping" in entry][:3] == [pytest.approx(0.1)] * 3
        last = [entry for entry in logs if "isaac_damping" in entry][-1]
        assert last.keys() >= VALUES
        assert last["isaac_rows"] == BATCH
        assert last["isaac_fallbacks"] == 0
        assert 0 < last["isaac_extra_multiplications"] < 2


@every_trainer
def test_bf16_autocast(trainer, tmp_path) -> None:
    options = {"damping": 0.1, "when": "step", "decay": 0.5}
    net, expected, full = Net(), Net(), Net()
    batches, _ = TRAINERS[trainer](net, tmp_path, options, 3, bf16=True)
    by_hand(expected, batches, options, 3, bf16=True)
    by_hand(full, batches, options, 3)
    for ours, theirs in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert any((ours - other).abs().max() > 1e-5 for ours, other in zip(net.parameters(), full.parameters(), strict=True))


@every_trainer
@pytest.mark.parametrize(
    "options",
    [
        {"damping": lambda step: 1 / (1 + step), "max_rows": 3},
        {"damping": isaac.Relative(0.3), "when": "step", "decay": 0.9, "refresh": 3, "power": 0.5},
    ],
    ids=["backward", "step"],
)
def test_a_run_that_broke_down_and_resumed_equals_one_that_did_not(trainer, options, tmp_path) -> None:
    fit = TRAINERS[trainer]
    # Lightning does not save the state of the random generators, and with Accelerate a new loader draws from them.
    dropout = 0.2 if trainer == "transformers" else 0.0
    uninterrupted = Net(dropout=dropout)
    fit(uninterrupted, tmp_path / "one", options, 10)
    broken = Net(dropout=dropout, breaks_at=7 * ACCUMULATE)
    with pytest.raises(RuntimeError, match="power cut"):
        fit(broken, tmp_path / "two", options, 10, save=5)
    assert attached(broken) == (trainer != "lightning")  # the only one that tells its callbacks
    resumed = Net(seed=2, dropout=dropout)
    fit(resumed, tmp_path / "two", options, 10, save=5, resume=5)
    assert all(torch.equal(a, b) for a, b in zip(uninterrupted.parameters(), resumed.parameters(), strict=True))
    assert not attached(resumed)


def test_transformers_says_that_a_checkpoint_has_no_state(tmp_path) -> None:
    options = {"damping": 0.1, "when": "step", "decay": 0.9}
    with_transformers(Net(), tmp_path / "one", options, 4, save=2)
    file = tmp_path / "one" / "checkpoint-2" / "isaac.pt"
    other = tmp_path / "two" / "checkpoint-2"
    shutil.copytree(file.parent, other)
    file.unlink()
    with pytest.warns(RuntimeWarning, match=r"resumes at step 2, but there is no isaac.pt of this run"):
        with_transformers(Net(), tmp_path / "one", options, 4, resume=2)
    with_transformers(Net(), tmp_path / "two", options, 4, resume=2)
    # The file of another run at the same step is not taken for this one's.
    with_transformers(Net(seed=4), tmp_path / "three", options, 4, save=2)
    shutil.copy(tmp_path / "three" / "checkpoint-2" / "isaac.pt", other)
    with pytest.warns(RuntimeWarning, match="no isaac.pt of this run"):
        with_transformers(Net(), tmp_path / "two", options, 4, resume=2)


def test_lightning_says_that_a_checkpoint_has_no_state(tmp_path) -> None:
    options = {"damping": 0.1, "when": "step", "decay": 0.9}
    with_lightning(Net(), tmp_path, options, 10, save=5)
    path = tmp_path / "checkpoint-step=5.ckpt"
    checkpoint = torch.load(path)
    assert checkpoint["callbacks"].pop("IsaacCallback")["steps"] == 5
    torch.save(checkpoint, path)
    with pytest.warns(RuntimeWarning, match="no state of an IsaacCallback"):
        with_lightning(Net(), tmp_path, options, 10, save=5, resume=5)


def test_transformers_passes_the_values_on_to_callbacks_that_follow(tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    from isaac_newton.integrations.transformers import IsaacCallback

    seen: list[dict[str, float]] = []

    class Reporter(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs) -> None:
            seen.append(dict(logs))

    args = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        save_strategy="no",
    )
    callback = IsaacCallback(damping=lambda step: 10.0**-step)
    trainer = transformers.Trainer(
        Net(), args, train_dataset=Examples(8), eval_dataset=Examples(8), callbacks=[callback, Reporter()]
    )
    for _ in range(2):  # a second run attaches anew
        seen.clear()
        trainer.train()
        assert [entry["isaac_damping"] for entry in seen if "loss" in entry] == [1.0, 0.1]
        assert not any(VALUES & entry.keys() for entry in seen if "loss" not in entry)
        assert callback.handle is None


@pytest.mark.parametrize("trainer", ["transformers", "lightning"])
def test_mistakes_are_refused(trainer, tmp_path) -> None:
    pytest.importorskip(trainer)
    callback = __import__(f"isaac_newton.integrations.{trainer}", fromlist=["IsaacCallback"]).IsaacCallback
    for options, error, message in [
        ({"damping": -1.0}, ValueError, "damping must be > 0"),
        ({"dampin": 1.0}, TypeError, "unexpected keyword argument 'dampin'"),
        ({"decay": 0.9}, ValueError, "for when='step'"),
        ({"output_damping": 0.1}, ValueError, "which a trainer calls itself"),
    ]:
        with pytest.raises(error, match=message):
            callback(**options)
    callback(output_damping=0.1, output_curvature="empirical")
    net = Net()
    isaac.attach(net)
    with pytest.raises(ValueError, match=r"already attached; .*detach"):
        TRAINERS[trainer](net, tmp_path, {"damping": 0.1}, 1)
    assert attached(net)


def test_lightning_goes_by_either_name(tmp_path, monkeypatch) -> None:
    pytest.importorskip("pytorch_lightning")
    from isaac_newton.integrations import lightning

    net, expected = Net(), Net()
    options = {"damping": 0.1, "when": "step"}
    batches, _ = with_lightning(net, tmp_path, options, 3, name="pytorch_lightning")
    by_hand(expected, batches, options, 3)
    assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(net.parameters(), expected.parameters(), strict=True))
    monkeypatch.setitem(sys.modules, "lightning.pytorch", sys)
    assert lightning._name() == "lightning.pytorch"
    monkeypatch.delitem(sys.modules, "lightning.pytorch")
    assert lightning._name() == "pytorch_lightning"


def test_a_step_that_accelerates_scaler_skips_conditions_nothing() -> None:
    pytest.importorskip("accelerate")
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    reset_accelerate()
    Accelerator(cpu=True)
    examples = Examples(12)
    batches = [{"x": examples.x[i : i + 4], "labels": examples.labels[i : i + 4]} for i in (0, 4, 8)]
    net, expected, options = Net(), Net(), {"damping": 0.1, "when": "step", "decay": 0.5}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = AcceleratedOptimizer(sgd(net), scaler=scaler)
    handle = isaac.attach(net, **options).bind(optimizer)
    reference, other = isaac.attach(expected, **options), sgd(expected)
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        scaler.scale(net(**batch)["loss"]).backward()
        if number == 1:
            net.head.weight.grad[0, 0] = math.inf
        optimizer.step()
        assert optimizer.step_was_skipped == (number == 1)
        if number != 1:
            other.zero_grad()
            expected(**batch)["loss"].backward()
            reference.step()
            other.step()
        assert handle.steps == reference.steps
    for ours, theirs in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
