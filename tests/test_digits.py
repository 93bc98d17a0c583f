"""The demo on digits: what it prints and writes, and that its comparison is fair."""

import importlib.metadata
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner, Result

import isaac_newton
from isaac_lab import executors, methods
from isaac_lab.charts.draw import draw
from isaac_lab.cli import app
from isaac_lab.data.sets import Dataset
from isaac_lab.data.sets import load as loaded
from isaac_lab.models import relu_network
from isaac_lab.record import Record, Store
from isaac_lab.report import digits as report
from isaac_lab.studies import digits
from isaac_lab.studies.digits import Method
from isaac_lab.study import outstanding
from isaac_lab.training import Options, train
from isaac_lab.trial import Trial
from isaac_lab.workload import load

NAMES = ["SGD", "SGD + ISAAC", "Adam", "Adam + ISAAC"]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["demo", "digits", *arguments])


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a demo of one epoch and one seed left its files."""
    directory = tmp_path_factory.mktemp("demo") / "new" / "directory"
    result = invoke("--epochs", "1", "--seeds", "1", "--out", str(directory))
    assert result.exit_code == 0, result.output
    (directory / "printed.txt").write_text(result.output)
    return directory


@pytest.fixture(scope="module")
def data() -> Dataset:
    return loaded("digits")


class Fabricated(Store):
    """Two seeds and two epochs of each method; the loss halves the way from 2 to its end."""

    def __init__(self, losses: dict[str, float]) -> None:
        self._runs = {}
        for method in digits.METHODS:
            end = losses[method.name]
            for seed in range(2):
                trial = method.trial(seed, 2)
                curve = {"step": [0, 24, 48], "train_loss": [2.0, (2.0 + end) / 2, end], "test_accuracy": [0.1, 0.9, 0.9]}
                self._runs[trial] = Record(trial, "finished" if math.isfinite(end) else "diverged", curve, 0.5 / 24)

    def get(self, trial: Trial) -> Record | None:
        return self._runs[trial]


def ending_at(losses: dict[str, float]) -> list[digits.Summary]:
    return digits.summarize(Fabricated(losses), seeds=2, epochs=2)


def trained(method: Method, seed: int, *, epochs: int = 1) -> Record:
    trial = method.trial(seed, epochs)
    (record,) = train([trial], load(trial, device="cpu"), Options())
    return record


def test_the_table_has_a_row_for_each_method_and_says_what_its_columns_mean(out: Path) -> None:
    printed = (out / "printed.txt").read_text()
    first_cells = [line.strip().split("   ")[0] for line in printed.splitlines()]
    assert [cell for cell in first_cells if cell in NAMES] == NAMES
    assert "Epochs to best plain:" in " ".join(printed.split())


def test_the_picture_is_a_png(out: Path) -> None:
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_records_hold_runs_versions_and_finite_curves(out: Path) -> None:
    store = Store(out)
    assert [record.trial for record in store.records()] == [method.trial(0, 1) for method in digits.METHODS]
    for record in store.records():
        assert record.about["versions"]["torch"] == importlib.metadata.version("torch")
        assert record.curve["step"] == [0, 24]
        assert all(math.isfinite(value) for point in record.points for value in point.values())
        assert (record.seconds_per_step or 0) > 0
    (call,) = store.about["calls"]
    assert (call["runs"], call["command"]) == (4, "isaac-newton demo digits --seeds 1 --epochs 1")


def test_what_was_trained_is_shown_again_without_training(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "train", lambda *given, **options: pytest.fail("it is trained already"))
    result = invoke("--epochs", "1", "--seeds", "1", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "Adam + ISAAC" in result.output


def test_piped_output_has_no_control_codes(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "TTY_COMPATIBLE")}
    command = [sys.executable, "-m", "isaac_lab", "demo", "digits", "--epochs", "1", "--seeds", "1", "--out", str(tmp_path)]
    # ASCII is the poorest terminal there is: the table must survive it too.
    environment["PYTHONIOENCODING"] = "ascii"
    finished = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert re.search(rb"[^\x20-\x7e\n\r]", finished.stdout) is None
    assert b"Adam + ISAAC" in finished.stdout
    assert finished.stderr == b""


def test_help_does_not_wait_for_torch() -> None:
    program = "import sys, isaac_lab.cli; print({'torch', 'vl_convert'} & set(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert loaded.strip() == "set()"


@pytest.mark.parametrize("option", ["--epochs", "--seeds"])
@pytest.mark.parametrize("value", ["0", "-3"])
def test_a_count_below_one_is_refused_by_name_and_value(option: str, value: str, tmp_path: Path) -> None:
    result = invoke(option, value, "--out", str(tmp_path))
    assert result.exit_code == 2
    assert f"'{option}': must be at least 1, got {value}" in result.output
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_written_is_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "train", lambda *_, **__: pytest.fail("trained before looking at --out"))
    (tmp_path / "file").touch()
    result = invoke("--out", str(tmp_path / "file" / "demo"))
    assert result.exit_code == 2
    assert "--out" in result.output
    assert "cannot write to" in result.output


@pytest.mark.parametrize("method", digits.METHODS, ids=NAMES)
def test_the_same_seed_gives_the_same_losses_and_another_seed_others(method: Method) -> None:
    def losses(seed: int) -> list[float]:
        torch.rand(1)  # whatever state the global generator is in
        return trained(method, seed).column("train_loss")

    first = losses(7)
    assert first == losses(7)
    assert first != losses(8)


def test_all_methods_start_from_the_same_weights_and_see_the_same_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    weights: list[Tensor] = []
    batches: list[list[Tensor]] = []
    prepare = methods.Prepared.__init__

    def spy(self: methods.Prepared, trial: Trial, workload: Any, model: nn.Module) -> None:
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        seen: list[Tensor] = []
        batches.append(seen)
        model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]) if module.training else None)
        prepare(self, trial, workload, model)

    monkeypatch.setattr(methods.Prepared, "__init__", spy)
    for method in digits.METHODS:
        trained(method, 3)
    assert len(weights) == len(batches) == 4
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0], rtol=0, atol=0)
    assert [len(seen) for seen in batches] == [24] * 4
    for seen in batches[1:]:
        torch.testing.assert_close(torch.cat(seen), torch.cat(batches[0]), rtol=0, atol=0)


def test_every_image_is_seen_once_an_epoch_in_a_new_order() -> None:
    workload = load(digits.METHODS[0].trial(0, 1), device="cpu")
    every, _ = (torch.cat(part) for part in zip(*workload.batches(0, 1), strict=True))
    other, _ = (torch.cat(part) for part in zip(*workload.batches(0, 2), strict=True))
    assert len(every) == 1440
    assert not torch.equal(every, other)
    assert sorted(map(tuple, every.tolist())) == sorted(map(tuple, other.tolist()))


def test_methods_take_turns_within_a_seed() -> None:
    class Empty:
        def get(self, trial: Trial) -> Record | None:
            return None

    due = outstanding(digits.arms(2, 1), Empty())
    assert due == [method.trial(seed, 1) for seed in (0, 1) for method in digits.METHODS]


def test_the_first_epochs_are_those_of_the_committed_records() -> None:
    """The order of the data and the weights are those that the pages' numbers were made with."""
    path = Path(__file__).parent.parent / "results" / "demo" / "records.json"
    old = json.loads(path.read_text(encoding="utf-8"))["runs"]
    for method in digits.METHODS:
        own = next(run for run in old if (run["method"], run["seed"]) == (method.name, 0))
        expected = [measurement["train_loss"] for measurement in own["measurements"][:2]]
        assert trained(method, 0).column("train_loss") == pytest.approx(expected, rel=0.01)


def test_digits_are_scaled_split_in_proportion_and_always_the_same(data: Dataset) -> None:
    assert data.train_images.shape == (1440, 64)
    assert data.test_images.shape == (357, 64)
    assert data.train_images.min() == 0
    assert data.train_images.max() == 1
    shares = data.train_labels.bincount() / 1440 - data.test_labels.bincount() / 357
    assert shares.abs().max() < 0.01
    assert torch.equal(data.train_images, loaded("digits").train_images)


def test_the_network_has_five_linear_layers_named_fc() -> None:
    linear = {name: module for name, module in relu_network(64, 10).named_modules() if isinstance(module, nn.Linear)}
    assert list(linear) == ["fc1", "fc2", "fc3", "fc4", "fc5"]
    assert [(layer.in_features, layer.out_features) for layer in linear.values()] == [
        (64, 400),
        (400, 400),
        (400, 400),
        (400, 400),
        (400, 10),
    ]


def test_what_one_sees_and_the_headline_follow_the_numbers() -> None:
    found = ending_at({"SGD": 1.0, "SGD + ISAAC": 0.0, "Adam": 0.5, "Adam + ISAAC": 0.6})
    sgd, adam = report.what_one_sees(found)
    assert "ISAAC lowers the training loss from 1.0 to 0.0 (lower at 2 of 2 seeds)" in sgd
    assert "after 1 epoch (0.5 s) instead of 2 epochs (1.0 s)" in sgd
    assert "ISAAC does not lower the training loss: 0.60 with it, 0.50 without (lower at 0 of 2 seeds)" in adam
    assert "never" in adam
    assert report.headline(found) == "In this run ISAAC lowers the mean training loss of SGD, not of Adam"


def test_epochs_to_plain_counts_to_the_lowest_plain_loss_not_to_the_last() -> None:
    found = ending_at({"SGD": 1.0, "SGD + ISAAC": 0.0, "Adam": 5.0, "Adam + ISAAC": 1.9})
    assert [summary.epochs_to_plain for summary in found] == [2, 1, 0, 0]
    found = ending_at({"SGD": 1.0, "SGD + ISAAC": 1.0, "Adam": 0.5, "Adam + ISAAC": 0.6})
    assert [summary.epochs_to_plain for summary in found] == [2, 2, 2, None]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_diverged_run_is_not_called_an_improvement(loss: float, tmp_path: Path) -> None:
    found = ending_at({"SGD": 1.0, "SGD + ISAAC": loss, "Adam": 1.0, "Adam + ISAAC": 0.5})
    assert "does not lower" in report.what_one_sees(found)[0]
    draw(report.figure(found), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_version_is_that_of_the_library() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"isaac-newton {isaac_newton.__version__}\n"
