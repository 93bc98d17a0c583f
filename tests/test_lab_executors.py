"""The same runs give the same records wherever they are trained, and whenever they are killed."""

import contextlib
import importlib.util
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from isaac_lab import executors, progress
from isaac_lab.data.files import DataError
from isaac_lab.data.sets import load
from isaac_lab.executors import Call, ExecutorError, plan, run
from isaac_lab.networks import can_stack
from isaac_lab.progress import Update
from isaac_lab.record import Record, Store
from isaac_lab.training import StoppedError
from isaac_lab.trial import Trial, TrialError

TRIAL = Trial("mnist-mlp", "sgd", (("learning_rate", 0.1),), (("width", 16),), steps=48, points=2, small=True)
STAR = replace(TRIAL, method="sgd+isaac").having(damping=0.1)
#: A small grid with all sectors, a run that diverges, and three that no ensemble can train.
GRID = [
    *(STAR.having(damping=a, output_damping=g) for a in (0.1, 1.0) for g in (0.1, None)),
    TRIAL,
    TRIAL.having(learning_rate=1e8),
    STAR.having(layers=(1, 3)),
    replace(TRIAL, method="kfac").having(damping=0.1),
    replace(TRIAL, method="adamw", schedule="cosine", workload="cifar-resnet18", variant=(), steps=6).having(
        learning_rate=0.001
    ),
]


def trained(trials: list[Trial], folder: Path, **options: Any) -> list[Record]:
    store = Store(folder)
    with store.writing():
        run(trials, store, Call(**options))
    return [record for trial in trials if (record := store.get(trial)) is not None]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    return trained(GRID, tmp_path_factory.mktemp("local"))


def told(records: list[Record]) -> list[Any]:
    """What must be the same everywhere."""
    return [(record.trial, record.status, dict(record.curve), record.digest) for record in records]


def test_a_run_in_this_process_is_recorded(local: list[Record], tmp_path: Path) -> None:
    assert [record.trial for record in local] == GRID
    assert [record.status for record in local] == ["finished"] * 5 + ["diverged"] + ["finished"] * 3
    for record in local[:8]:
        assert record.about["executor"] == "local"
        assert (record.about["data"], record.about["checksum"]) == ("digits", load("digits").checksum)
        assert record.about["versions"]["torch"] == importlib.metadata.version("torch")
        assert record.about["machine"]["threads"] == 1
    assert local[0].curve["step"] == [0, 24, 48]


def test_an_ensemble_gives_the_same_records_to_float32_accuracy(local: list[Record], tmp_path: Path) -> None:
    for record, expected in zip(trained(GRID, tmp_path, executor="ensemble"), local, strict=True):
        assert (record.trial, record.status) == (expected.trial, expected.status)
        stacks = can_stack(record.trial)
        assert (record.about["executor"], record.about["copies"]) == (("ensemble", 6) if stacks else ("local", 1))
        for name in record.curve:
            assert record.column(name) == pytest.approx(expected.column(name), rel=2e-4, abs=0.01, nan_ok=True)


class _Killer:
    """Kills workers, so many times."""

    def __init__(self, kills: float) -> None:
        self.kills = kills

    def __call__(self, update: Update) -> None:
        if self.kills > 0:
            self.kills -= 1
            for child in multiprocessing.active_children()[:1]:
                os.kill(child.pid or 0, signal.SIGKILL)


def test_several_processes_give_the_same_records_also_where_one_is_killed(local: list[Record], tmp_path: Path) -> None:
    killer = _Killer(1)
    records = trained(GRID, tmp_path, executor="processes", progress=killer)
    assert told(records) == told(local)
    assert killer.kills == 0
    assert {record.about["executor"] for record in records} == {"processes"}
    assert not multiprocessing.active_children()


def test_workers_have_the_environment_of_now(warm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = warm.Process(target=os.getpid)
    first.start()
    first.join()
    monkeypatch.setenv("ISAAC_ENCODER", "another than when the first began")
    with ProcessPoolExecutor(1, warm, executors._begin, (1, dict(os.environ))) as pool:
        assert pool.submit(os.getenv, "ISAAC_ENCODER").result() == "another than when the first began"


def test_an_error_in_a_worker_is_raised_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "_checked", lambda trial, call: None)
    with pytest.raises(TrialError, match="sgd takes no damping"):
        trained([TRIAL.having(damping=0.1)], tmp_path, executor="processes")
    assert not multiprocessing.active_children()


def _tasks_of_ray() -> Iterator[int]:
    """Workers that are at work, of the cluster that this process started."""
    import psutil

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[:1] == ["ray::train_remotely"]:
                yield process.pid


# Ray leaves processes and sockets to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="needs Ray")
def test_a_ray_cluster_of_two_nodes_gives_the_same_records_also_where_a_worker_is_killed(
    local: list[Record], tmp_path: Path
) -> None:
    import ray
    from ray.cluster_utils import Cluster

    killed: list[int] = []

    def kill(update: Update) -> None:
        for pid in _tasks_of_ray() if not killed else ():
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)
            break

    node = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
        ray.init(address=cluster.address, log_to_driver=False)
        assert len([node for node in ray.nodes() if node["Alive"]]) == 2
        records = trained(GRID, tmp_path, executor="ray", progress=kill)
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert killed
    assert told(records) == told(local)
    assert {record.about["executor"] for record in records} == {"ray"}


def test_without_ray_one_is_told_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "installed", lambda module: False)
    with pytest.raises(ExecutorError, match=r"the executor ray needs Ray; install it with: pip install 'isaac-newton\[ray\]'"):
        trained([TRIAL], tmp_path, executor="ray")


@pytest.mark.parametrize("executor", ["local", "ensemble"])
def test_what_has_ended_is_not_trained_again(executor: str, tmp_path: Path) -> None:
    first = trained(GRID[4:7], tmp_path, executor=executor)
    seen: list[Trial] = []
    again = trained(
        [*GRID[4:7], GRID[0], GRID[4]], tmp_path, executor=executor, progress=lambda update: seen.extend(update.trials)
    )
    assert set(seen) == {GRID[0]}
    assert again[:3] == first


# Plans


def test_an_ensemble_takes_together_what_differs_in_rates_dampings_and_seeds_only(tmp_path: Path) -> None:
    trials = [
        TRIAL.having(learning_rate=0.3),
        replace(STAR, seed=2),
        STAR.having(output_damping=1.0, curvature="empirical"),
        TRIAL.varied(width=8),
        replace(STAR, method="adam+isaac"),
        STAR.having(layers=(1,)),
    ]
    groups = plan(trials, Store(tmp_path), Call("ensemble"))
    # Without ζ a run has no curvature of its own and joins those that have one. The rates are in order.
    assert [set(group) for group in groups] == [{*trials[:3]}, {trials[3]}, {trials[4]}, {trials[5]}]
    assert [trial.learning_rate for trial in groups[0]] == [0.1, 0.1, 0.3]
    assert [len(group) for group in plan(trials, Store(tmp_path), Call())] == [1] * 6


def test_an_ensemble_is_split_where_memory_or_its_user_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = [replace(TRIAL, seed=seed) for seed in range(10)]

    def sizes(**options: Any) -> list[int]:
        return [len(group) for group in plan(trials, Store(tmp_path), Call("ensemble", **options))]

    assert sizes() == [10]
    assert sizes(copies=4) == [3, 3, 4]
    monkeypatch.setattr(executors, "SHARE_OF_MEMORY", 1e-12)
    assert sizes() == [1] * 10


def test_groups_that_were_begun_go_on_as_they_were_begun(tmp_path: Path) -> None:
    first, later = GRID[:6], replace(TRIAL, seed=9)
    store = Store(tmp_path)
    with store.writing(), pytest.raises(KeyboardInterrupt):
        run(first, store, Call("ensemble", seconds=0, progress=_Stop(2)))
    assert [set(group) for group in plan([later, *first], store, Call("ensemble"))] == [set(first), {later}]
    # Not all that the group would train was asked for.
    assert [set(group) for group in plan(first[1:], store, Call("ensemble"))] == [set(first[1:])]
    assert {record.about["copies"] for record in trained([later, *first], tmp_path, executor="ensemble")} == {6, 1}


class _Stop:
    def __init__(self, left: int) -> None:
        self.left = left

    def __call__(self, update: Update) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


# Ends


def test_when_time_is_up_what_ended_is_kept_and_the_rest_goes_on(local: list[Record], tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        trained(GRID, tmp_path, until=time.time() - 1)
    store = Store(tmp_path)
    with store.writing(), pytest.raises(StoppedError):
        run(GRID, store, Call(until=time.time() + 0.3, seconds=0))
    assert store.missing(GRID)
    assert told(trained(GRID, tmp_path)) == told(local)
    assert not list((tmp_path / "checkpoints").glob("*"))


@pytest.fixture(scope="module")
def warm() -> Any:
    """Processes that have torch and the laboratory imported when they begin, and have computed nothing yet."""
    return executors._workers("cpu")


def _train_all(executor: str, folder: Path, begun: Any) -> None:
    torch.set_num_threads(1)
    store = Store(folder)
    with store.writing():
        begun.set()
        run(GRID, store, Call(executor, seconds=0))


@pytest.mark.parametrize("executor", ["local", "ensemble", "processes"])
def test_runs_killed_at_any_moment_end_with_the_same_bits(
    executor: str, local: list[Record], warm: Any, tmp_path: Path
) -> None:
    """ISAAC_KILLS says how often; with more than there is time for, the process ends by itself at last."""
    whole = told(local if executor != "ensemble" else trained(GRID, tmp_path / "whole", executor="ensemble"))
    folder, draw = tmp_path / "killed", random.Random(7)
    kills = 0
    for _ in range(int(os.environ.get("ISAAC_KILLS", "10"))):
        begun = warm.Event()
        process = warm.Process(target=_train_all, args=(executor, folder, begun))
        process.start()
        assert begun.wait(60)
        time.sleep(draw.uniform(0.0, 0.6))
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        kills += process.exitcode != 0
    assert kills
    assert told(trained(GRID, folder, executor=executor)) == whole


def test_updates_tell_loss_accuracy_and_speed(tmp_path: Path) -> None:
    seen: list[Update] = []
    (record,) = trained([TRIAL], tmp_path, progress=seen.append)
    assert [(update.step, len(update.ended)) for update in seen] == [(0, 0), (24, 0), (48, 0), (48, 1)]
    assert seen[2].found.startswith("loss 2.3")
    assert not seen[0].per_second
    assert seen[1].per_second is not None
    assert seen[3].ended == (record,)


def test_bars_and_lines_show_what_updates_tell(tmp_path: Path) -> None:
    for terminal in (True, False):
        console = Console(record=True, force_terminal=terminal, width=120, file=(tmp_path / f"{terminal}").open("w"))
        with console.file, progress.display(console) as show:
            show.begin("fig1", 2)
            show(Update((TRIAL,), 24, "loss 0.125, accuracy 50.0%", 1234.0))
            if show._bars is not None:
                show._bars.refresh()
            ended = Record(TRIAL, "finished", {"step": [48], "train_loss": [0.5]})
            show(Update((TRIAL,), 48, ended=(ended,)))
            show(Update((STAR, TRIAL), 48, ended=(ended, replace(ended, status="diverged"))))
        text = console.export_text()
        assert "fig1: 2 runs to go" in text
        assert "1 of 2: mnist-mlp width 16 sgd η 0.1 seed 0: train loss 0.5" in text
        assert "1 of 2 diverged" in text
        assert ("1,234 steps/s" in text) is terminal


def test_bad_input_is_named_and_nothing_is_trained(tmp_path: Path) -> None:
    most = 8 * (os.cpu_count() or 1)
    for options, message in (
        ({"executor": "slurm"}, "there is no executor 'slurm'; there are local, processes, ensemble, ray"),
        ({"device": "tpu"}, "device must be cpu or cuda, got 'tpu'"),
        ({"workers": 0}, f"workers must be 1 to {most} on this machine, got 0"),
        ({"workers": 1000}, f"workers must be 1 to {most} on this machine, got 1000"),
        ({"copies": 0}, "copies must be >= 1, got 0"),
    ):
        with pytest.raises(ExecutorError, match=message):
            trained([TRIAL], tmp_path, **options)
    if not torch.cuda.is_available():
        with pytest.raises(ExecutorError, match="this machine has no CUDA device"):
            trained([TRIAL], tmp_path, device="cuda")
    with pytest.raises(DataError, match="there is no data set 'cifar'"):
        trained([TRIAL, TRIAL.varied(data="cifar")], tmp_path)
    with pytest.raises(TrialError, match="batch must be at most"):
        trained([TRIAL.varied(batch=10**6)], tmp_path, executor="ensemble")
    assert Store(tmp_path).records() == []


def test_a_process_ends_with_the_one_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Parent:
        def join(self) -> None:
            pass

    ended: list[int] = []
    monkeypatch.setattr(multiprocessing, "parent_process", Parent)
    monkeypatch.setattr(os, "_exit", ended.append)
    executors._end_with_parent()
    assert ended == [1]
