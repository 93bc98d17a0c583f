"""The training loop does the steps that it says, alone and in an ensemble, and goes on after a kill as if nothing had been."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import isaac_newton as isaac
from isaac_lab import engine, noise
from isaac_lab.config import Config, ConfigError
from isaac_lab.data.sets import Dataset
from isaac_lab.engine import Training
from isaac_lab.models import relu_layers
from isaac_lab.store import Epoch, Store
from reference import assert_close, relative_error

FEATURES, CLASSES, EXAMPLES = 20, 5, 500
#: 50 steps.
CONFIG = Config(data="synthetic", hidden=(16, 24), batch=10, epochs=1, learning_rate=0.1)
METHODS = {
    "gradient": {},
    "zeta_star": {"damping": 0.1},
    "zeta": {"damping": 0.1, "output_damping": 0.01},
    "outputs only": {"output_damping": 0.01},
    "empirical": {"damping": 0.1, "output_damping": 0.01, "curvature": "empirical"},
}


@pytest.fixture(scope="module")
def data() -> Dataset:
    random = torch.Generator().manual_seed(0)
    centres = torch.rand(CLASSES, FEATURES, generator=random)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(CLASSES, (count,), generator=random)
        return (centres[labels] + 0.3 * torch.randn(count, FEATURES, generator=random)).clamp(0, 1), labels

    return Dataset("synthetic", *draw(EXAMPLES), *draw(100), classes=CLASSES, checksum="")


def train(configs: list[Config], data: Dataset, *, stacked: bool) -> tuple[Training, list[Epoch]]:
    training = Training(configs, data, stacked=stacked)
    return training, list(training.epochs())


def changes(training: Training, number: int = 0) -> Tensor:
    """What training changed in the weights."""
    config = training.configs[number]
    start = Training([config], _DATA[0], stacked=False).weights()
    pairs = zip(training.weights(number), start, strict=True)
    return torch.cat([(after - before).double().flatten() for after, before in pairs])


_DATA: list[Dataset] = []


@pytest.fixture(autouse=True)
def _known(data: Dataset) -> None:
    _DATA[:] = [data]


def by_hand(config: Config, data: Dataset, epochs: int) -> nn.Module:
    """The loop that the engine stands for, written out for SGD without or with ISAAC."""
    torch.manual_seed(config.seed)
    model = relu_layers([FEATURES, *config.hidden, CLASSES])
    if config.damping != math.inf:
        isaac.attach(model, config.damping)
    momentum = 0.9 if config.optimizer == "momentum" else 0.0
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=config.learning_rate, momentum=momentum)
    if config.optimizer == "adam":
        optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate)
    for epoch in range(1, epochs + 1):
        order = torch.randperm(EXAMPLES, generator=noise.generator("order", config.seed, epoch))
        for batch in order[: EXAMPLES // config.batch * config.batch].split(config.batch):
            optimizer.zero_grad()
            F.cross_entropy(model(data.train_images[batch]), data.train_labels[batch]).backward()
            optimizer.step()
    return model


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("damping", [math.inf, 0.1])
def test_a_run_is_the_loop_that_one_would_write_bit_for_bit(optimizer: str, damping: float, data: Dataset) -> None:
    """With as many steps, on the same batches; an incomplete last batch is dropped."""
    config = replace(CONFIG, epochs=3, batch=60, optimizer=optimizer, learning_rate=0.01, damping=damping, seed=3)
    training, epochs = train([config], data, stacked=False)
    model = by_hand(config, data, epochs=3)
    for ours, theirs in zip(training.weights(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert [(epoch.number, epoch.step) for epoch in epochs] == [(0, 0), (1, 8), (2, 16), (3, 24)]
    loss = F.cross_entropy(model(data.train_images), data.train_labels).item()
    (point,) = epochs[-1].points
    assert point is not None
    assert point.train_loss == pytest.approx(loss, rel=1e-5)
    assert point.test_loss == pytest.approx(F.cross_entropy(model(data.test_images), data.test_labels).item(), rel=1e-5)
    assert point.test_accuracy == pytest.approx((model(data.test_images).argmax(1) == data.test_labels).float().mean().item())


@pytest.mark.parametrize("task", ["classification", "autoencoder"])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_an_ensemble_trains_each_network_as_it_would_be_trained_alone(task: str, optimizer: str, data: Dataset) -> None:
    """All methods in one ensemble, the labels drawn included, over 50 steps."""
    rate = {"sgd": 0.1, "momentum": 0.02, "adam": 0.003}[optimizer]
    alike = replace(CONFIG, task=task, optimizer=optimizer, learning_rate=rate)
    configs = [replace(alike, **method) for name, method in METHODS.items() if name != "empirical"]
    training, epochs = train(configs, data, stacked=True)
    for number, config in enumerate(configs):
        alone, own = train([config], data, stacked=False)
        assert relative_error(changes(training, number), changes(alone)) < (2e-3 if optimizer == "adam" else 1e-4)
        point, expected = epochs[-1].points[number], own[-1].points[0]
        assert point is not None
        assert expected is not None
        assert point.train_loss == pytest.approx(expected.train_loss, rel=1e-4)
        assert point.test_loss == pytest.approx(expected.test_loss, rel=1e-4)
        assert (point.test_accuracy is None) == (task == "autoencoder")


def test_an_ensemble_of_seeds_trains_each_network_as_it_would_be_trained_alone(data: Dataset) -> None:
    """Each with its own weights, batches and labels drawn."""
    configs = [
        replace(CONFIG, **METHODS["zeta"], seed=seed, learning_rate=rate) for seed, rate in ((7, 0.1), (3, 0.2), (7, 0.3))
    ]
    training, _ = train(configs, data, stacked=True)
    for number, config in enumerate(configs):
        alone, _ = train([config], data, stacked=False)
        assert relative_error(changes(training, number), changes(alone)) < 1e-4


def test_an_ensemble_with_the_empirical_fisher_is_as_many_runs_with_it(data: Dataset) -> None:
    configs = [replace(CONFIG, **METHODS[name]) for name in ("empirical", "zeta_star", "gradient")]
    training, _ = train(configs, data, stacked=True)
    for number, config in enumerate(configs):
        alone, _ = train([config], data, stacked=False)
        assert relative_error(changes(training, number), changes(alone)) < 1e-4


@pytest.mark.parametrize("task", ["classification", "autoencoder"])
@pytest.mark.parametrize("curvature", ["sampled", "empirical"])
def test_explicit_kfac_is_zeta_with_both_dampings_alike(task: str, curvature: str, data: Dataset) -> None:
    zeta = replace(CONFIG, task=task, damping=0.1, output_damping=0.1, curvature=curvature)
    for layers in ((), (1, 3)):
        (ours, _), (theirs, _) = (
            train([replace(config, layers=layers)], data, stacked=False) for config in (replace(zeta, kfac=True), zeta)
        )
        assert relative_error(changes(ours), changes(theirs)) < 1e-4


def test_only_the_layers_that_were_chosen_are_conditioned(data: Dataset) -> None:
    one_step = replace(CONFIG, examples=10)
    plain, every, some = (
        train([config], data, stacked=False)[0].weights()
        for config in (one_step, replace(one_step, damping=0.1), replace(one_step, damping=0.1, layers=(2,)))
    )
    for position in range(3):
        assert torch.equal(some[2 * position], every[2 * position] if position == 1 else plain[2 * position])
        assert not torch.equal(every[2 * position], plain[2 * position])


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_a_run_that_goes_on_from_its_state_ends_as_it_would_have(stacked: bool, optimizer: str, data: Dataset) -> None:
    configs = [replace(CONFIG, **METHODS["zeta"], optimizer=optimizer, learning_rate=0.01, epochs=3, examples=150)]
    whole = Training(configs, data, stacked=stacked)
    states: list[dict[str, Any]] = []
    epochs = []
    for epoch in whole.epochs():
        states.append(whole.state())
        epochs.append(epoch)
    for number, state in enumerate(states):
        again = Training(configs, data, stacked=stacked)
        again.load_state(state)
        rest = list(again.epochs())
        assert [epoch.points[0].train_loss for epoch in rest] == [e.points[0].train_loss for e in epochs[number + 1 :]]
        assert again.digests() == whole.digests()


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_a_network_that_diverges_is_frozen_and_disturbs_nobody(optimizer: str, data: Dataset) -> None:
    alike = replace(CONFIG, optimizer=optimizer, learning_rate=0.01, epochs=4)
    rates = {"sgd": 1e8, "momentum": 1e8, "adam": 1e12}
    good, bad = replace(alike, **METHODS["zeta"]), replace(alike, damping=1.0, learning_rate=rates[optimizer])
    undisturbed, _ = train([good, replace(good, damping=1.0)], data, stacked=True)
    training, epochs = train([good, bad], data, stacked=True)
    assert training.diverged == [False, True]
    assert relative_error(changes(training), changes(undisturbed)) < (2e-3 if optimizer == "adam" else 1e-4)
    when = next(epoch.number for epoch in epochs if epoch.diverged == (1,))
    assert [epoch.points[1] is None for epoch in epochs] == [epoch.number > when for epoch in epochs]
    assert training.digests()[1] is None
    assert all(tensor.isfinite().all() for tensor in training.state()["tensors"].values())
    alone, own = train([bad], data, stacked=False)
    assert alone.diverged == [True]
    assert own[-1].number == when
    assert training.ended
    assert alone.ended


def test_when_all_have_diverged_training_ends(data: Dataset) -> None:
    training, epochs = train([replace(CONFIG, learning_rate=rate, epochs=50) for rate in (1e8, 1e9)], data, stacked=True)
    assert training.ended
    assert len(epochs) < 10


def test_examples_are_the_same_for_every_seed(data: Dataset) -> None:
    few = [Training([replace(CONFIG, examples=30, seed=seed)], data, stacked=False)._examples for seed in (1, 2)]
    assert len(few[0].inputs) == 30
    assert torch.equal(few[0].inputs, few[1].inputs)
    assert (few[0].inputs[:, None] == data.train_images[None]).all(2).any(1).all()


def test_the_training_loss_is_measured_on_a_part_that_is_always_the_same(
    data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "MOST_MEASURED", 100)
    measured = [Training([replace(CONFIG, seed=seed)], data, stacked=False)._examples.measured_inputs for seed in (1, 2)]
    assert measured[0].shape == (100, FEATURES)
    assert torch.equal(*measured)


def test_an_evaluation_in_parts_gives_the_same_numbers(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    for task in ("classification", "autoencoder"):
        configs = [replace(CONFIG, task=task), replace(CONFIG, task=task, damping=1.0)]
        whole = next(Training(configs, data, stacked=True).epochs())
        monkeypatch.setitem(engine.EVALUATED_AT_ONCE, "cpu", 2 * 24 * 7)
        parts = next(Training(configs, data, stacked=True).epochs())
        for one, other in zip(whole.points, parts.points, strict=True):
            assert one is not None
            assert other is not None
            assert one.train_loss == pytest.approx(other.train_loss, rel=1e-5)
            assert one.test_accuracy == other.test_accuracy


def test_nobody_elses_random_numbers_are_used(data: Dataset) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train([replace(CONFIG, **METHODS["zeta"])], data, stacked=False)
    assert torch.equal(torch.rand(3), expected)


def test_without_zeta_no_labels_are_drawn(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[object] = []
    draw = noise.GivenUniform.draw
    monkeypatch.setattr(noise.GivenUniform, "draw", lambda *args: drawn.append(args) or draw(*args))
    train([replace(CONFIG, **METHODS[name]) for name in ("gradient", "zeta_star")], data, stacked=True)
    train([replace(CONFIG, **METHODS["empirical"])], data, stacked=False)
    assert not drawn
    train([replace(CONFIG, **METHODS["zeta"])], data, stacked=False)
    assert drawn


def test_labels_follow_the_softmax() -> None:
    output = torch.randn(3, 4).repeat(20000, 1)
    likelihood = noise.GivenUniform(noise.GivenUniform.draw(60000, 4, noise.generator("test")))
    sample = likelihood.sample(output)
    p = output.softmax(1)
    labels = (p - sample).round()
    assert torch.equal(labels.sum(1), torch.ones(60000))
    assert_close(labels.view(-1, 3, 4).mean(0), p[:3], 0.02)
    # The mean of the samples' outer products is the Hessian of the loss.
    hessian = torch.diag(p[0]) - torch.outer(p[0], p[0])
    own = sample.view(-1, 3, 4)[:, 0]
    assert_close(own.T @ own / len(own), hessian, 0.05)
    assert isinstance(likelihood, isaac.Likelihood)


def test_normal_noise_has_the_scale_of_the_hessian() -> None:
    likelihood = noise.GivenNormal(noise.GivenNormal.draw(20000, 4, noise.generator("test")))
    sample = likelihood.sample(torch.zeros(20000, 4))
    assert_close(sample.T @ sample / 20000, torch.eye(4) * 2 / 4, 0.05)
    assert isinstance(likelihood, isaac.Likelihood)


def test_numbers_without_copies_are_shared_by_all_copies() -> None:
    for kind in (noise.GivenUniform, noise.GivenNormal):
        numbers, output = kind.draw(6, 4, noise.generator("test")), torch.randn(6, 4)
        once = kind(numbers).sample(output)
        assert torch.equal(kind(numbers).sample(output.repeat(3, 1)), once.repeat(3, 1))
        each = kind(torch.stack([numbers, numbers.flip(0)])).sample(torch.cat([output, output.flip(0)]))
        assert torch.equal(each, torch.cat([once, once.flip(0)]))


def test_what_does_not_fit_the_data_is_refused(data: Dataset) -> None:
    with pytest.raises(ConfigError, match=r"examples must be at most 500, all that synthetic has, got 501"):
        Training([replace(CONFIG, examples=501)], data, stacked=False)
    with pytest.raises(ConfigError, match=r"batch must be at most 500, the number of training examples, got 501"):
        Training([replace(CONFIG, batch=501)], data, stacked=False)
    with pytest.raises(ConfigError, match=r"an ensemble conditions all layers"):
        Training([replace(CONFIG, layers=(1,))], data, stacked=True)
    with pytest.raises(ConfigError, match=r"the networks of an ensemble must have one curvature"):
        Training([replace(CONFIG, **METHODS[name]) for name in ("zeta", "empirical")], data, stacked=True)
    with pytest.raises(ConfigError, match=r"the checkpoint is of other networks"):
        Training([CONFIG], data, stacked=False).load_state(
            Training([replace(CONFIG, optimizer="adam")], data, stacked=False).state()
        )


#: Trains in a child that is killed at random moments, until one comes to the end; and once more without any kill. The process
#: itself never trains, so that it can be forked.
KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from isaac_lab import executors
from isaac_lab.config import Config
from isaac_lab.data.sets import load
from isaac_lab.store import Store

torch.set_num_threads(1)
# What takes a moment the first time, once for all children.
load("digits")
executors._process(1, "cpu")
torch.optim.SGD([torch.zeros(1, requires_grad=True)])
common = dict(data="digits", hidden=(32, 32), epochs=3, learning_rate=0.01)
dampings = [dict(damping=0.1, output_damping=0.1), dict(damping=1.0)]
configs = [Config(**common, optimizer=optimizer, **own) for optimizer in ("momentum", "adam") for own in dampings]

def train(folder, executor):
    executors.run(configs, Store(Path(folder)), executor=executor, scale="smoke")

def child(folder, executor):
    pid = os.fork()
    if not pid:
        train(folder, executor)
        os._exit(0)
    return pid

kills = 0
random.seed(int(sys.argv[2]))
for executor in ("local", "ensemble"):
    started = time.perf_counter()
    assert os.waitpid(child(f"{sys.argv[1]}/whole-{executor}", executor), 0)[1] == 0
    whole = time.perf_counter() - started
    for attempt in range(7):
        pid = child(f"{sys.argv[1]}/killed-{executor}", executor)
        # Later attempts are given longer, so that the end comes.
        time.sleep(random.uniform(0, whole * (attempt + 2) / 6))
        os.kill(pid, signal.SIGKILL)
        kills += os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert os.waitpid(child(f"{sys.argv[1]}/killed-{executor}", executor), 0)[1] == 0
print(kills)
"""


def test_runs_killed_at_any_moment_end_with_the_same_weights_and_records(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(os.getpid())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 4
    for executor in ("local", "ensemble"):
        whole, killed = (Store(tmp_path / f"{kind}-{executor}").records() for kind in ("whole", "killed"))
        assert len(whole) == 4
        for expected, record in zip(whole, killed, strict=True):
            assert record.status == "finished"
            assert record.config == expected.config
            assert record.weights == expected.weights
            assert [replace(p, seconds=0.0) for p in record.points] == [replace(p, seconds=0.0) for p in expected.points]
            assert len(record.points) == 4
        # Every line is whole, no epoch stands twice, and no checkpoint stays.
        for path in (tmp_path / f"killed-{executor}").iterdir():
            assert path.suffix == ".jsonl" or path.name.startswith("store.json")
            if path.suffix == ".jsonl":
                lines = [json.loads(line) for line in path.read_text().splitlines()]
                assert [line["epoch"] for line in lines if "epoch" in line] == [0, 1, 2, 3]
