"""A comparison is fair: every method has the same weights, batches and seeds; shown on the digits."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isaac_lab import methods
from isaac_lab.data.sets import Dataset
from isaac_lab.data.sets import load as loaded
from isaac_lab.record import Record
from isaac_lab.training import Options, train
from isaac_lab.trial import Trial
from isaac_lab.workload import load
from isaac_lab.workloads.mlp import relu_layers

#: As `results/demo/records.json` names them.
TRIALS = {
    "SGD": Trial("digits-mlp", "sgd", (("learning_rate", 0.3875),), steps=24, points=1),
    "SGD + ISAAC": Trial("digits-mlp", "sgd+isaac", (("learning_rate", 3.0), ("damping", 0.3)), steps=24, points=1),
    "Adam": Trial("digits-mlp", "adam", (("learning_rate", 0.001719),), steps=24, points=1),
    "Adam + ISAAC": Trial("digits-mlp", "adam+isaac", (("learning_rate", 0.001), ("damping", 1.0)), steps=24, points=1),
}


@pytest.fixture(scope="module")
def data() -> Dataset:
    return loaded("digits")


def trained(trial: Trial, seed: int) -> Record:
    (record,) = train([replace(trial, seed=seed)], load(trial, device="cpu"), Options())
    return record


@pytest.mark.parametrize("trial", TRIALS.values(), ids=TRIALS)
def test_the_same_seed_gives_the_same_losses_and_another_seed_others(trial: Trial) -> None:
    def losses(seed: int) -> list[float]:
        torch.rand(1)  # whatever state the global generator is in
        return trained(trial, seed).column("train_loss")

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
    for trial in TRIALS.values():
        trained(trial, 3)
    assert len(weights) == len(batches) == 4
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0], rtol=0, atol=0)
    assert [len(seen) for seen in batches] == [24] * 4
    for seen in batches[1:]:
        torch.testing.assert_close(torch.cat(seen), torch.cat(batches[0]), rtol=0, atol=0)


def test_every_image_is_seen_once_an_epoch_in_a_new_order() -> None:
    workload = load(TRIALS["SGD"], device="cpu")
    every, _ = (torch.cat(part) for part in zip(*workload.batches(0, 1), strict=True))
    other, _ = (torch.cat(part) for part in zip(*workload.batches(0, 2), strict=True))
    assert len(every) == 1440
    assert not torch.equal(every, other)
    assert sorted(map(tuple, every.tolist())) == sorted(map(tuple, other.tolist()))


def test_the_first_epochs_are_those_of_the_committed_records() -> None:
    """The order of the data and the weights are those that the pages' numbers were made with."""
    path = Path(__file__).parent.parent / "results" / "demo" / "records.json"
    old = json.loads(path.read_text(encoding="utf-8"))["runs"]
    for method, trial in TRIALS.items():
        own = next(run for run in old if (run["method"], run["seed"]) == (method, 0))
        expected = [measurement["train_loss"] for measurement in own["measurements"][:2]]
        assert trained(trial, 0).column("train_loss") == pytest.approx(expected, rel=0.01)


def test_digits_are_scaled_split_in_proportion_and_always_the_same(data: Dataset) -> None:
    assert data.train_images.shape == (1440, 64)
    assert data.test_images.shape == (357, 64)
    assert data.train_images.min() == 0
    assert data.train_images.max() == 1
    shares = data.train_labels.bincount() / 1440 - data.test_labels.bincount() / 357
    assert shares.abs().max() < 0.01
    assert torch.equal(data.train_images, loaded("digits").train_images)


def test_the_network_has_five_linear_layers_named_fc() -> None:
    linear = {
        name: module
        for name, module in relu_layers([64, 400, 400, 400, 400, 10]).named_modules()
        if isinstance(module, nn.Linear)
    }
    assert list(linear) == ["fc1", "fc2", "fc3", "fc4", "fc5"]
    assert [(layer.in_features, layer.out_features) for layer in linear.values()] == [
        (64, 400),
        (400, 400),
        (400, 400),
        (400, 400),
        (400, 10),
    ]
