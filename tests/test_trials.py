"""The trial engine: one frozen trial, its record, its store, the pool, the clock, and every method that there is."""

import importlib.metadata
import json
import math
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.linalg import LinAlgError

import isaac_newton as isaac
from isaac_lab.data import shakespeare
from isaac_lab.data.files import DataError
from isaac_lab.trials import graphs, loop, methods, pool, times
from isaac_lab.trials.kfac import Kfac
from isaac_lab.trials.muon import Muon
from isaac_lab.trials.store import Store, TrialStoreError
from isaac_lab.trials.trial import Trial
from isaac_lab.trials.workload import Workload, make
from isaac_lab.trials.workloads.gpt import Characters

MLP = Trial("mnist-mlp", "sgd", learning_rate=0.3, steps=8, points=2, small=True)


@pytest.fixture(scope="module")
def mlp() -> Workload:
    return make("mnist-mlp", small=True, device="cpu")


@pytest.fixture(scope="module")
def gpt() -> Workload:
    return make("char-gpt", small=True, device="cpu")


# What a trial is


def test_a_key_stays_the_same_from_version_to_version() -> None:
    assert Trial("mnist-mlp", "sgd").key == "9991dc4ec852"
    assert Trial("char-gpt", "muon", "running", 0.02, 0.1, relative=True, schedule="cosine", seed=3).key == "bceeb69064c3"


def test_every_field_changes_the_key() -> None:
    other = {
        "workload": "x",
        "optimizer": "adamw",
        "conditioning": "running",
        "schedule": "cosine",
        "relative": True,
        "small": True,
    }
    for field in fields(Trial):
        value: Any = other.get(field.name, 7)
        assert replace(Trial("mnist-mlp", "sgd"), **{field.name: value}).key != Trial("mnist-mlp", "sgd").key, field.name


def test_a_trial_comes_back_from_its_record() -> None:
    assert Trial.from_mapping(json.loads(json.dumps(asdict(MLP)))) == MLP
    with pytest.raises(ValueError, match="no field momentum"):
        Trial.from_mapping({**asdict(MLP), "momentum": 0.9})


@pytest.mark.parametrize(
    ("field", "value"),
    [("learning_rate", 0.0), ("learning_rate", math.inf), ("damping", -1.0), ("schedule", "step"), ("steps", 0), ("seed", -1)],
)
def test_a_trial_refuses_what_cannot_be(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        replace(MLP, **{field: value})


def test_schedules() -> None:
    trial = replace(MLP, steps=100)
    assert {trial.rate(step) for step in range(100)} == {1.0}
    cosine = replace(trial, schedule="cosine")
    assert cosine.rate(0) == 1
    assert cosine.rate(50) == pytest.approx(0.5)
    assert cosine.rate(25) == pytest.approx((1 + math.sqrt(0.5)) / 2)
    assert 0 < cosine.rate(99) < 1e-3
    linear = replace(trial, schedule="linear")
    assert [linear.rate(step) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert linear.rate(55) == pytest.approx(0.5)
    assert linear.rate(99) == pytest.approx(1 / 90)


def test_measured_steps_are_even_and_include_both_ends() -> None:
    assert replace(MLP, steps=100, points=4).measured() == [0, 25, 50, 75, 100]
    assert replace(MLP, steps=10, points=3).measured() == [0, 3, 7, 10]
    assert replace(MLP, steps=3, points=40).measured() == [0, 1, 2, 3]


# Where records are


def test_a_record_comes_back_with_none_for_what_is_no_number(tmp_path: Path, mlp: Workload) -> None:
    store, record = Store(tmp_path / "records"), loop.run(MLP, mlp)
    store.add({**record, "seconds_per_step": math.nan})
    found = store.get(MLP)
    assert found is not None
    assert found["seconds_per_step"] is None
    assert found["points"] == record["points"]
    assert store.get(replace(MLP, seed=1)) is None
    assert store.missing([MLP, replace(MLP, seed=1), replace(MLP, seed=1)]) == [replace(MLP, seed=1)]


def test_a_record_is_there_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(record: Any, file: Any, **options: Any) -> None:
        file.write('{"kind": "tri')
        raise KeyboardInterrupt

    monkeypatch.setattr(json, "dump", killed)
    store = Store(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        store.add({"trial": asdict(MLP)})
    assert list(tmp_path.glob("*.json")) == []
    assert store.missing([MLP]) == [MLP]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no record of a trial"),
        ("[]", "is no record of a trial"),
        ('{"format": 99}', "has format 99, this version reads 1"),
        ('{"format": 1, "trial": {}}', "another trial than its name says"),
    ],
)
def test_a_record_that_cannot_be_used_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / f"{MLP.key}.json"
    path.write_text(content)
    with pytest.raises(TrialStoreError, match=message) as caught:
        Store(tmp_path).get(MLP)
    assert str(path) in str(caught.value)
    assert path.read_text() == content


# Running many


def test_a_pool_runs_what_is_missing_and_nothing_else(tmp_path: Path) -> None:
    trials = [replace(MLP, seed=seed) for seed in range(3)]
    told: list[tuple[int, int]] = []

    def die(record: dict[str, Any], total: int) -> None:
        told.append((record["trial"]["seed"], total))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pool.run(trials, Store(tmp_path), tick=die)
    assert told == [(0, 3)]
    records = pool.run(trials, Store(tmp_path), tick=lambda record, total: told.append((record["trial"]["seed"], total)))
    assert told == [(0, 3), (1, 2), (2, 2)]
    assert [record["trial"]["seed"] for record in records] == [0, 1, 2]
    assert pool.run(trials, Store(tmp_path), tick=die) == records


def test_two_processes_find_what_one_finds(tmp_path: Path) -> None:
    trials = [replace(MLP, optimizer=name, learning_rate=0.01) for name in ("sgd", "adamw")]
    alone = pool.run(trials, Store(tmp_path / "one"))
    together = pool.run(trials, Store(tmp_path / "two"), workers=2)
    for one, two in zip(alone, together, strict=True):
        assert [_without_seconds(point) for point in one["points"]] == [_without_seconds(point) for point in two["points"]]


def test_a_process_ends_with_the_one_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    class Parent:
        def join(self) -> None:
            happened.append("the parent has ended")

    monkeypatch.setattr(pool.multiprocessing, "parent_process", Parent)
    monkeypatch.setattr(pool.os, "_exit", lambda code: happened.append("exit"))
    pool._end_with_parent()
    assert happened == ["the parent has ended", "exit"]


def _without_seconds(point: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in point.items() if name != "seconds"}


# How a trial trains


@pytest.mark.parametrize(
    ("optimizer", "conditioning", "constant", "scheduled"),
    [
        ("sgd", "none", True, True),
        ("adamw", "zeta_star", True, True),
        ("muon", "none", True, True),
        ("muon", "zeta_star", True, True),
        ("adamw", "running", False, False),
        ("sgd", "formula", False, False),
        ("soap", "none", False, False),
        ("kfac", "none", False, False),
    ],
)
def test_what_can_be_a_cuda_graph(optimizer: str, conditioning: str, constant: bool, scheduled: bool) -> None:
    trial = replace(MLP, optimizer=optimizer, conditioning=conditioning, damping=0.1)
    assert methods.capturable(trial) is constant
    assert methods.capturable(replace(trial, schedule="cosine")) is scheduled


def test_every_shape_of_batch_has_a_graph_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[tuple[int, ...]] = []

    def capture(step: Callable[..., Tensor], *inputs: Tensor, warmup: int) -> Callable[..., Tensor]:
        captured.append(tuple(inputs[0].shape))
        return lambda *batch: step(*batch) + warmup

    monkeypatch.setattr(graphs.isaac, "capture", capture)
    step = graphs.Graphs(lambda x, y: x.sum() + y.sum(), warmup=100)
    for shape in ((2, 3), (2, 4), (2, 3), (1, 3), (2, 4)):
        assert step(torch.ones(shape), torch.ones(shape[0])).item() == shape[0] * shape[1] + shape[0] + 100
    assert captured == [(2, 3), (2, 4), (1, 3)]


def test_reasons_why_a_method_cannot_run(monkeypatch: pytest.MonkeyPatch, mlp: Workload, gpt: Workload) -> None:
    text = replace(MLP, workload="char-gpt", damping=0.1)
    assert methods.unable(MLP, mlp) == ""
    assert methods.unable(text, gpt) == ""
    assert "one row per example" in methods.unable(replace(text, conditioning="formula"), gpt)
    monkeypatch.setattr(methods, "installed", lambda module: True)
    assert "one row per example" in methods.unable(replace(text, optimizer="kfac"), gpt)
    monkeypatch.setattr(methods, "installed", lambda module: False)
    assert methods.unable(replace(MLP, optimizer="singd", damping=0.1), mlp) == "singd is not installed"
    with pytest.raises(methods.UnableError, match="singd is not installed"):
        methods.prepare(replace(MLP, optimizer="singd", damping=0.1), mlp, mlp.model(0))
    assert methods.unable(MLP, mlp) == ""


def test_unknown_names_are_told_with_those_that_there_are(mlp: Workload) -> None:
    with pytest.raises(ValueError, match=r"optimizer must be one of sgd, momentum.*got 'lion'"):
        methods.prepare(replace(MLP, optimizer="lion"), mlp, mlp.model(0))
    with pytest.raises(ValueError, match=r"conditioning must be one of none, zeta_star.*got 'zeta'"):
        methods.prepare(replace(MLP, conditioning="zeta"), mlp, mlp.model(0))
    with pytest.raises(ValueError, match="there is no workload 'imagenet'"):
        make("imagenet", small=True, device="cpu")


def test_muon_says_that_it_needs_a_hidden_matrix(monkeypatch: pytest.MonkeyPatch, mlp: Workload) -> None:
    monkeypatch.setattr(mlp, "hidden", lambda model: [])
    with pytest.raises(methods.UnableError, match="matrices only"):
        methods.prepare(replace(MLP, optimizer="muon"), mlp, mlp.model(0))


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["a number", "on the device"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["as torch has it", "channels last"])
def test_muon_is_torchs_and_takes_a_kernel_as_the_matrix_that_it_is(layout: torch.memory_format, rate: float | Tensor) -> None:
    torch.manual_seed(0)
    layer, x = nn.Conv2d(3, 4, 3, bias=False), torch.randn(5, 3, 6, 6)
    layer.to(memory_format=layout)  # type: ignore[call-overload]
    matrix = nn.Parameter(layer.weight.detach().flatten(1).clone())
    ours, torchs = Muon([layer.weight], lr=0.5, weight_decay=0.2), torch.optim.Muon([matrix], lr=0.1, weight_decay=0.2)
    ours.param_groups[0]["lr"] = rate
    for _ in range(3):
        for optimizer, weight in ((ours, layer.weight), (torchs, matrix.view_as(layer.weight))):
            optimizer.zero_grad()
            nn.functional.conv2d(x, weight).square().sum().backward()
            optimizer.step()
        torch.testing.assert_close(layer.weight.flatten(1), matrix)
    assert layer.weight.is_contiguous(memory_format=layout)
    ours.zero_grad()
    with pytest.raises(ValueError, match="Muon needs gradients"):
        ours.step()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("workload", ["char-gpt", "cifar-resnet18"])
def test_a_captured_muon_follows_the_schedule(workload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(workload, small=True, device="cuda")
    trial = Trial(workload, "muon", learning_rate=0.02, weight_decay=0.1, schedule="cosine", steps=16, points=2, small=True)
    trial = replace(trial, model=made.network)
    captured = loop.run(trial, made, device="cuda")
    monkeypatch.setattr(methods, "capturable", lambda trial: False)
    eager = loop.run(trial, made, device="cuda")
    kept = loop.run(replace(trial, schedule="constant"), made, device="cuda")
    assert (captured["mode"], eager["mode"]) == ("captured", "eager")
    for found, wanted in zip(captured["points"], eager["points"], strict=True):
        assert found["train_loss"] == pytest.approx(wanted["train_loss"], rel=0.01)
    # With one rate all the time it ends elsewhere.
    assert captured["points"][-1]["train_loss"] != pytest.approx(kept["points"][-1]["train_loss"], rel=0.02)


RATES = {
    "sgd": 1.0,
    "momentum": 0.1,
    "adam": 0.01,
    "adamw": 0.01,
    "muon": 0.05,
    "soap": 0.01,
    "shampoo": 0.1,
    "singd": 0.1,
    "kfac": 3,
}


@pytest.mark.parametrize("name", list(methods.OPTIMIZERS))
def test_every_optimizer_lowers_the_loss(mlp: Workload, name: str) -> None:
    trial = replace(MLP, optimizer=name, learning_rate=RATES[name], damping=0.1, steps=30, points=1)
    if reason := methods.unable(trial, mlp):
        pytest.skip(reason)
    record = loop.run(trial, mlp)
    assert record["status"] == "finished"
    assert record["points"][-1]["train_loss"] < record["points"][0]["train_loss"] - 0.002


@pytest.mark.parametrize("conditioning", [name for name in methods.CONDITIONINGS if name != "none"])
def test_every_conditioning_lowers_the_loss_and_is_not_the_plain_gradient(mlp: Workload, conditioning: str) -> None:
    trial = replace(MLP, optimizer="adamw", learning_rate=0.01, damping=0.1, steps=30, points=1)
    conditioned = replace(trial, conditioning=conditioning, relative=conditioning == "running")
    plain, other = (loop.run(one, mlp)["points"] for one in (trial, conditioned))
    assert other[0] == plain[0] | {"seconds": 0.0}
    assert other[-1]["train_loss"] < other[0]["train_loss"] - 0.1
    assert other[-1]["train_loss"] != plain[-1]["train_loss"]


def test_the_printed_formula_trains_as_the_library_does(mlp: Workload) -> None:
    trial = replace(MLP, learning_rate=1.0, damping=0.1, steps=20, points=4)
    found = [loop.run(replace(trial, conditioning=name), mlp)["points"] for name in ("formula", "zeta_star")]
    printed, ours = ([point["train_loss"] for point in points] for points in found)
    assert ours == pytest.approx(printed, rel=1e-4)
    assert ours[-1] < ours[0]


def test_kfac_averages_its_factors_and_renews_them_every_few_steps(mlp: Workload) -> None:
    pytest.importorskip("backpack")
    batches, every, damping = list(mlp.batches(0, 0))[:5], 2, 0.1
    model = mlp.model(0)
    assert mlp.loss_fn is not None
    backward, single = Kfac(model, mlp.loss_fn, damping, every), mlp.model(0)
    weights = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
    factors: list[Any] = []
    for step, (x, y) in enumerate(batches):
        model.zero_grad()
        torch.manual_seed(step)
        loss = backward(x, y)
        plain = torch.autograd.grad(mlp.loss(single, x, y), list(single.parameters()))
        assert loss.item() == pytest.approx(mlp.loss(single, x, y).item())
        if step % every == 0:
            # Its own batch alone, with the same sampled labels.
            torch.manual_seed(step)
            alone = Kfac(mlp.model(0), mlp.loss_fn, damping, 1)
            alone(x, y)
            factors.append(alone._averages)
        for number, weight in enumerate(weights):
            left, right = (
                torch.linalg.inv(sum(own[number][side] for own in factors) / len(factors) + damping * torch.eye(size))
                for side, size in enumerate(weight.shape)
            )
            expected = damping**2 * left @ plain[2 * number] @ right
            assert weight.grad is not None
            torch.testing.assert_close(weight.grad, expected, rtol=1e-3, atol=1e-6)
    assert len(factors) == 3


def test_methods_share_weights_and_batches_and_seeds_do_not(mlp: Workload) -> None:
    start = [
        loop.run(replace(MLP, optimizer=name, steps=1, points=1, seed=seed), mlp)["points"][0]["train_loss"]
        for name in ("sgd", "muon")
        for seed in (0, 1)
    ]
    assert start[:2] == start[2:]
    assert start[0] != start[1]
    batches = [torch.stack([x for x, _ in mlp.batches(seed, epoch)]) for seed, epoch in ((0, 0), (0, 0), (1, 0), (0, 1))]
    assert torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])
    assert not torch.equal(batches[0], batches[3])


def test_building_a_network_leaves_random_numbers_alone(mlp: Workload) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    mlp.model(1)
    assert torch.equal(torch.rand(3), expected)


# What goes wrong


@pytest.mark.parametrize("name", ["sgd", "kfac"])
def test_a_trial_that_diverges_says_so_and_ends(mlp: Workload, name: str) -> None:
    trial = replace(MLP, optimizer=name, learning_rate=1e4, damping=0.1, steps=40, points=4)
    if reason := methods.unable(trial, mlp):
        pytest.skip(reason)
    record = loop.run(trial, mlp)
    assert record["status"] == "diverged"
    assert record["points"][-1]["step"] < 40


def _failing(
    monkeypatch: pytest.MonkeyPatch, error: Exception, harm: Callable[[nn.Module], object] = lambda model: None
) -> None:
    def prepare(trial: Trial, workload: Workload, model: nn.Module) -> methods.Training:
        def step(*batch: Tensor) -> Tensor:
            harm(model)
            raise error

        return methods.Training(step, [])

    monkeypatch.setattr(methods, "prepare", prepare)


def test_a_factorization_that_fails_is_a_divergence(monkeypatch: pytest.MonkeyPatch, mlp: Workload) -> None:
    _failing(monkeypatch, LinAlgError("not positive definite"))
    record = loop.run(MLP, mlp)
    assert record["status"] == "diverged"
    assert [point["step"] for point in record["points"]] == [0]


def test_an_error_is_a_divergence_only_where_the_numbers_are_lost(monkeypatch: pytest.MonkeyPatch, mlp: Workload) -> None:
    _failing(monkeypatch, RuntimeError("cusolver error"))
    with pytest.raises(RuntimeError, match="cusolver"):
        loop.run(MLP, mlp)

    def lose(model: nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(math.nan)

    _failing(monkeypatch, RuntimeError("cusolver error"), lose)
    assert loop.run(MLP, mlp)["status"] == "diverged"


# The schedule, the clock


def test_set_rate_scales_every_group_of_every_optimizer() -> None:
    one, two = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizers = [
        torch.optim.SGD([{"params": [one], "lr": 1.0}, {"params": [two], "lr": 0.1}]),
        torch.optim.Adam([one], lr=0.5),
    ]
    training = methods.Training(lambda: torch.zeros(()), optimizers)
    training.set_rate(0.5)
    assert [group["lr"] for optimizer in optimizers for group in optimizer.param_groups] == pytest.approx([0.5, 0.05, 0.25])
    training.set_rate(1.0)
    assert [group["lr"] for optimizer in optimizers for group in optimizer.param_groups] == pytest.approx([1.0, 0.1, 0.5])


def test_training_follows_the_schedule(monkeypatch: pytest.MonkeyPatch, mlp: Workload) -> None:
    shares: list[float] = []
    monkeypatch.setattr(methods.Training, "set_rate", lambda self, share: shares.append(share))
    trial = replace(MLP, schedule="cosine", steps=8)
    loop.run(trial, mlp)
    assert shares == [trial.rate(step) for step in range(8)]


@pytest.mark.parametrize("tensor_cores", [False, True])
def test_a_workload_decides_how_float32_is_multiplied(
    monkeypatch: pytest.MonkeyPatch, mlp: Workload, tensor_cores: bool
) -> None:
    seen = set()
    loss = mlp.loss
    monkeypatch.setattr(mlp, "tensor_cores", tensor_cores)
    monkeypatch.setattr(mlp, "loss", lambda *args: seen.add(torch.get_float32_matmul_precision()) or loss(*args))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        loop.run(replace(MLP, steps=2, points=1), mlp)
        times.measure({"plain": MLP}, mlp, rounds=1)
        assert seen == {"high" if tensor_cores else "highest"}
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_record_says_what_ran_and_where(mlp: Workload) -> None:
    ticks: list[int] = []
    record = loop.run(MLP, mlp, tick=lambda step, loss: ticks.append(step))
    assert ticks == [0, 4, 8] == [point["step"] for point in record["points"]]
    assert record["trial"] == asdict(MLP)
    assert (record["kind"], record["format"], record["mode"], record["data"]) == ("trial", loop.FORMAT, "eager", "digits")
    assert set(record["points"][0]) == {"step", "seconds", "train_loss", "test_loss", "test_accuracy"}
    assert record["versions"]["torch"] == importlib.metadata.version("torch")


def test_times_of_methods_that_take_turns(monkeypatch: pytest.MonkeyPatch, mlp: Workload) -> None:
    monkeypatch.setattr(times, "TURN", 0.001)
    monkeypatch.setattr(methods, "installed", lambda module: False)
    trials = {"plain": MLP, "adamw": replace(MLP, optimizer="adamw"), "soap": replace(MLP, optimizer="soap")}
    rounds: list[None] = []
    record = times.measure(trials, mlp, rounds=2, tick=lambda: rounds.append(None))
    assert len(rounds) == 2
    assert record["left_out"] == {"soap": "pytorch_optimizer is not installed"}
    assert list(times.seconds(record)) == ["plain", "adamw"]
    assert all(value > 0 for value in times.seconds(record).values())
    assert record["methods"][0]["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}


def test_captured_steps_are_captured_several_times(monkeypatch: pytest.MonkeyPatch, mlp: Workload) -> None:
    captured: list[object] = []

    def graphs_of(step: Callable[..., Tensor], warmup: int) -> Callable[..., Tensor]:
        captured.append(step)
        return step

    monkeypatch.setattr(times, "TURN", 0.001)
    monkeypatch.setattr(times, "Graphs", graphs_of)
    ticks: list[None] = []
    trials = {"plain": MLP, "adamw": replace(MLP, optimizer="adamw"), "kfac": replace(MLP, optimizer="kfac", damping=0.1)}
    record = times.measure(trials, mlp, captured=True, rounds=7, tick=lambda: ticks.append(None))
    assert len(captured) == 2 * times.CAPTURES == 6
    assert len(ticks) == 7
    assert record["settings"]["captures"] == 3
    assert list(record["left_out"]) == ["kfac"]


# The text, and the network that reads it


def test_the_text_is_the_one_that_was_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shakespeare.load()
    assert len(text) == shakespeare.FILE.size
    assert text.startswith("First Citizen:\n")
    assert len(set(text)) == 65
    monkeypatch.setattr(shakespeare, "FILE", replace(shakespeare.FILE, md5="0" * 32))
    with pytest.raises(DataError, match="wrong checksum"):
        shakespeare.load.__wrapped__()


def test_batches_of_text_are_windows_and_what_follows(gpt: Workload) -> None:
    assert isinstance(gpt, Characters)
    batches = list(gpt.batches(0, 0))
    assert len(batches) == gpt.steps == (90_000 - 32) // 32 // 8
    x, y = batches[0]
    assert x.shape == y.shape == (8, 32)
    assert torch.equal(x[:, 1:], y[:, :-1])
    text = "".join(gpt.alphabet[number] for number in x[0])
    assert text in shakespeare.load()[:90_000]
    starts = {tuple(row.tolist()) for batch, _ in batches for row in batch}
    assert len(starts) > 0.99 * 8 * gpt.steps  # hardly any window twice: a few lines of the plays repeat


def test_the_network_does_not_look_ahead(gpt: Workload) -> None:
    model = gpt.model(0)
    text = next(gpt.batches(0, 0))[0]
    changed = text.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 60
    before, after = model(text), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20:], after[:, 20:])


def test_isaac_conditions_every_matrix_of_the_network(gpt: Workload) -> None:
    model = gpt.model(0)
    skipped = set(isaac.attach(model, damping=isaac.Relative(0.1)).skipped)
    assert skipped == {name for name, layer in model.named_modules() if isinstance(layer, nn.LayerNorm)}


def test_muon_trains_the_matrices_of_the_blocks(gpt: Workload) -> None:
    model = gpt.model(0)
    hidden = {id(weight) for weight in gpt.hidden(model)}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in hidden}
    parts = ("attend", "project", "up", "down")
    assert names == {f"blocks.{block}.{part}.weight" for block in range(2) for part in parts}


def test_an_untrained_network_knows_nothing_and_learns(gpt: Workload) -> None:
    trial = Trial("char-gpt", "adamw", learning_rate=3e-3, schedule="cosine", steps=12, points=1, small=True)
    first, last = loop.run(trial, gpt)["points"]
    assert first["test_loss"] == pytest.approx(math.log(61), abs=0.1)
    assert last["test_loss"] < first["test_loss"] - 0.5
    assert last["test_accuracy"] > 0.1
