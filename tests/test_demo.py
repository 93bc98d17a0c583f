"""The demo: what it prints and writes, and that its comparison is fair."""

import importlib.metadata
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner, Result

import isaac_newton
from isaac_lab import demo
from isaac_lab.charts.draw import draw
from isaac_lab.cli import app
from isaac_lab.data import digits
from isaac_lab.demo import Method
from isaac_lab.models import relu_network
from isaac_lab.report import curves

NAMES = ["SGD", "SGD + ISAAC", "Adam", "Adam + ISAAC"]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["demo", *arguments])


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a demo of one epoch and one seed left its files."""
    directory = tmp_path_factory.mktemp("demo") / "new" / "directory"
    result = invoke("--epochs", "1", "--seeds", "1", "--out", str(directory))
    assert result.exit_code == 0, result.output
    (directory / "printed.txt").write_text(result.output)
    return directory


@pytest.fixture(scope="module")
def data() -> digits.Digits:
    return digits.load()


def runs_ending_at(losses: dict[str, float]) -> list[demo.Run]:
    """Two seeds and two epochs of each method; the loss halves the way from 2 to its end."""

    def measurements(loss: float) -> tuple[demo.Measurement, ...]:
        path = [2.0, (2.0 + loss) / 2, loss]
        return tuple(demo.Measurement(epoch, value, 0.9, 0.5 * (epoch > 0)) for epoch, value in enumerate(path))

    return [demo.Run(method, seed, measurements(losses[method.name])) for seed, method in demo.schedule(2)]


def test_the_table_has_a_row_for_each_method_and_says_what_its_columns_mean(out: Path) -> None:
    printed = (out / "printed.txt").read_text()
    first_cells = [line.strip().split("   ")[0] for line in printed.splitlines()]
    assert [cell for cell in first_cells if cell in NAMES] == NAMES
    assert "Epochs to best plain:" in " ".join(printed.split())


def test_the_picture_is_a_png(out: Path) -> None:
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_records_hold_config_versions_and_finite_curves(out: Path) -> None:
    records = json.loads((out / "records.json").read_text())
    assert records["config"]["epochs"] == 1
    assert [method["name"] for method in records["config"]["methods"]] == NAMES
    assert records["versions"]["torch"] == importlib.metadata.version("torch")
    assert records["seconds"] > 0
    assert [run["method"] for run in records["runs"]] == NAMES
    for run in records["runs"]:
        assert [m["epoch"] for m in run["measurements"]] == [0, 1]
        assert all(math.isfinite(value) for m in run["measurements"] for value in m.values())
        assert run["measurements"][1]["seconds"] > 0


def test_piped_output_has_no_control_codes(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "TTY_COMPATIBLE")}
    command = [sys.executable, "-m", "isaac_lab", "demo", "--epochs", "1", "--seeds", "1", "--out", str(tmp_path)]
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
    monkeypatch.setattr(demo, "train", lambda *_, **__: pytest.fail("trained before looking at --out"))
    (tmp_path / "file").touch()
    result = invoke("--out", str(tmp_path / "file" / "demo"))
    assert result.exit_code == 2
    assert "--out" in result.output
    assert "cannot write to" in result.output


@pytest.mark.parametrize("method", demo.METHODS, ids=NAMES)
def test_the_same_seed_gives_the_same_losses_and_another_seed_others(method: Method, data: digits.Digits) -> None:
    def losses(seed: int) -> list[float]:
        torch.rand(1)  # whatever state the global generator is in
        with demo.one_thread():
            return [m.train_loss for m in demo.train(method, data, seed=seed, epochs=1)]

    assert losses(7) == losses(7)
    assert losses(7) != losses(8)


def test_all_methods_start_from_the_same_weights_and_see_the_same_batches(
    data: digits.Digits, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights: list[Tensor] = []
    batches: list[list[Tensor]] = []
    prepare = Method.prepare

    def spy(method: Method, model: nn.Module) -> torch.optim.Optimizer:
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        seen: list[Tensor] = []
        batches.append(seen)
        model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]) if module.training else None)
        return prepare(method, model)

    monkeypatch.setattr(Method, "prepare", spy)
    with demo.one_thread():
        for method in demo.METHODS:
            list(demo.train(method, data, seed=3, epochs=1))
    assert len(weights) == len(batches) == 4
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0], rtol=0, atol=0)
    assert [len(seen) for seen in batches] == [24] * 4
    for seen in batches[1:]:
        torch.testing.assert_close(torch.cat(seen), torch.cat(batches[0]), rtol=0, atol=0)


def test_training_leaves_random_numbers_and_threads_of_the_caller_alone(data: digits.Digits) -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    with demo.one_thread():
        list(demo.train(demo.METHODS[0], data, seed=0, epochs=1))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_every_image_is_seen_once_an_epoch_in_a_new_order() -> None:
    first, second = (torch.cat(batches) for batches in demo.batch_orders(1440, seed=0, epochs=2))
    assert first.sort().values.tolist() == list(range(1440))
    assert second.sort().values.tolist() == list(range(1440))
    assert not torch.equal(first, second)


def test_methods_take_turns_within_a_seed() -> None:
    assert [(seed, method.name) for seed, method in demo.schedule(2)] == [(seed, name) for seed in (0, 1) for name in NAMES]


def test_digits_are_scaled_split_in_proportion_and_always_the_same(data: digits.Digits) -> None:
    assert data.train_images.shape == (1440, 64)
    assert data.test_images.shape == (357, 64)
    assert data.train_images.min() == 0
    assert data.train_images.max() == 1
    shares = data.train_labels.bincount() / 1440 - data.test_labels.bincount() / 357
    assert shares.abs().max() < 0.01
    assert torch.equal(data.train_images, digits.load().train_images)


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
    runs = runs_ending_at({"SGD": 1.0, "SGD + ISAAC": 0.0, "Adam": 0.5, "Adam + ISAAC": 0.6})
    sgd, adam = demo.what_one_sees(runs)
    assert "ISAAC lowers the training loss from 1.0 to 0.0 (lower at 2 of 2 seeds)" in sgd
    assert "after 1 epoch (0.5 s) instead of 2 epochs (1.0 s)" in sgd
    assert "ISAAC does not lower the training loss: 0.60 with it, 0.50 without (lower at 0 of 2 seeds)" in adam
    assert "never" in adam
    assert curves.headline(demo.summarize(runs)) == "In this run ISAAC lowers the mean training loss of SGD, not of Adam"


def test_epochs_to_plain_counts_to_the_lowest_plain_loss_not_to_the_last() -> None:
    runs = runs_ending_at({"SGD": 1.0, "SGD + ISAAC": 0.0, "Adam": 5.0, "Adam + ISAAC": 1.9})
    assert [summary.epochs_to_plain for summary in demo.summarize(runs)] == [2, 1, 0, 0]
    runs = runs_ending_at({"SGD": 1.0, "SGD + ISAAC": 1.0, "Adam": 0.5, "Adam + ISAAC": 0.6})
    assert [summary.epochs_to_plain for summary in demo.summarize(runs)] == [2, 2, 2, None]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_diverged_run_is_not_called_an_improvement(loss: float, tmp_path: Path) -> None:
    runs = runs_ending_at({"SGD": 1.0, "SGD + ISAAC": loss, "Adam": 1.0, "Adam + ISAAC": 0.5})
    assert "does not lower" in demo.what_one_sees(runs)[0]
    draw(curves.figure(runs), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": "Newton"}, "SGD, Adam.*'Newton'"),
        ({"learning_rate": 0.0}, "learning_rate must be > 0"),
        ({"learning_rate": math.nan}, "nan"),
        ({"damping": -1.0}, "damping must be > 0, got -1.0"),
    ],
)
def test_a_method_that_cannot_train_is_refused_when_it_is_made(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(demo.METHODS[1], **change)


def test_the_version_is_that_of_the_library() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"isaac-newton {isaac_newton.__version__}\n"
