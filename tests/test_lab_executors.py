"""The same runs give the same records wherever they are trained."""

import contextlib
import importlib.util
import math
import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from isaac_lab import executors, progress
from isaac_lab.config import Config, ConfigError
from isaac_lab.data.sets import DataError, load
from isaac_lab.executors import ExecutorError, plan, run
from isaac_lab.progress import Update
from isaac_lab.store import Log, Record, Store, StoreError

CONFIG = Config(data="digits", hidden=(16, 12), epochs=2, learning_rate=0.1)
#: A small grid with all sectors, a run that diverges, and two that no ensemble can train.
GRID = [
    *(replace(CONFIG, damping=a, output_damping=g) for a in (0.1, 1.0) for g in (0.1, math.inf)),
    CONFIG,
    replace(CONFIG, learning_rate=1e8),
    replace(CONFIG, damping=0.1, layers=(1, 3)),
    replace(CONFIG, damping=0.1, output_damping=0.1, kfac=True),
]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    return run(GRID, Store(tmp_path_factory.mktemp("local")), scale="smoke")


def without_times(record: Record) -> Record:
    """What must be the same everywhere; NaN is written as text, because it does not equal itself."""
    points = tuple(replace(point, seconds=0.0, train_loss=str(point.train_loss)) for point in record.points)  # type: ignore[arg-type]
    points = tuple(replace(point, test_loss=str(point.test_loss)) for point in points)  # type: ignore[arg-type]
    return replace(record, points=points, origin={}, executor="", copies=1, wall=0.0)


def assert_same(records: list[Record], expected: list[Record]) -> None:
    assert [without_times(record) for record in records] == [without_times(record) for record in expected]


def test_a_run_in_this_process_is_recorded(local: list[Record]) -> None:
    assert [record.config for record in local] == GRID
    assert [record.status for record in local] == ["finished"] * 5 + ["diverged"] + ["finished"] * 2
    for record in local:
        assert record.executor == "local"
        assert record.scale == "smoke"
        assert record.origin["data"] == {"name": "digits", "checksum": load("digits").checksum}
        assert record.origin["versions"]["torch"] == importlib.metadata.version("torch")
        assert record.origin["machine"]["threads"] == 1
    steps = len(load("digits").train_labels) // 60
    assert [point.step for point in local[0].points] == [0, steps, 2 * steps]
    assert 0 == local[0].points[0].seconds < local[0].points[1].seconds < local[0].points[2].seconds < local[0].wall


def test_an_ensemble_gives_the_same_records_to_float32_accuracy(local: list[Record], tmp_path: Path) -> None:
    records = run(GRID, Store(tmp_path), executor="ensemble", scale="smoke")
    for record, expected in zip(records, local, strict=True):
        assert record.config == expected.config
        assert record.status == expected.status
        assert record.executor == ("ensemble" if executors.can_stack(record.config) else "local")
        assert record.copies == (6 if record.executor == "ensemble" else 1)
        for point, other in zip(record.points, expected.points, strict=True):
            if not math.isnan(other.train_loss):
                assert point.train_loss == pytest.approx(other.train_loss, rel=2e-4)
                assert point.test_loss == pytest.approx(other.test_loss, rel=2e-4)
                assert point.test_accuracy == pytest.approx(other.test_accuracy, abs=0.01)


class _Killer:
    """Kills a worker at each of the first updates."""

    def __init__(self, kills: float) -> None:
        self.kills, self.updates = kills, 0

    def __call__(self, update: Update) -> None:
        self.updates += 1
        if self.kills > 0:
            self.kills -= 1
            os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)


def test_several_processes_give_the_same_records_also_where_one_is_killed(local: list[Record], tmp_path: Path) -> None:
    killer = _Killer(1)
    records = run(GRID, Store(tmp_path), executor="processes", scale="smoke", progress=killer)
    assert_same(records, local)
    assert killer.kills == 0
    assert {record.executor for record in records} == {"processes"}
    assert not multiprocessing.active_children()


def test_a_run_whose_worker_dies_again_is_an_error_that_keeps_what_is_finished(tmp_path: Path) -> None:
    with pytest.raises(ExecutorError, match=r"died twice, with exit code -9 \(-9 is a kill"):
        run(GRID[:1], Store(tmp_path), executor="processes", scale="smoke", progress=_Killer(math.inf), workers=1)
    assert not multiprocessing.active_children()


def test_an_error_in_a_worker_is_raised_here(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="examples must be at most"):
        run([replace(CONFIG, examples=10**6)], Store(tmp_path), executor="processes", scale="smoke")
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
        records = run(GRID, Store(tmp_path), executor="ray", scale="smoke", progress=kill)
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert killed
    assert_same(records, local)
    assert {record.executor for record in records} == {"ray"}


def test_without_ray_one_is_told_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "installed", lambda module: False)
    with pytest.raises(ExecutorError, match=r"the executor ray needs Ray; install it with: pip install 'isaac-newton\[ray\]'"):
        run([CONFIG], Store(tmp_path), executor="ray", scale="smoke")


@pytest.mark.parametrize("executor", ["local", "ensemble"])
def test_what_has_ended_is_not_trained_again(executor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(GRID[4:7], Store(tmp_path), executor=executor, scale="smoke")
    assert {record.status for record in first} == {"finished", "diverged"}
    trained: list[Config] = []
    open_ = Store.open

    def watched(store: Store, configs: Any, **options: Any) -> Log:
        trained.extend(configs)
        return open_(store, configs, **options)

    monkeypatch.setattr(Store, "open", watched)
    again = run([*GRID[4:7], GRID[0], GRID[4]], Store(tmp_path), executor=executor, scale="smoke")
    assert trained == [GRID[0]]
    assert again[:3] == first or [str(record) for record in again[:3]] == [str(record) for record in first]
    assert [record.config for record in again] == [*GRID[4:7], GRID[0], GRID[4]]
    with pytest.raises(StoreError, match=r"has records of 1 of these runs already; resume them, or choose another directory"):
        run([GRID[0], replace(CONFIG, seed=5)], Store(tmp_path), executor=executor, scale="smoke", resume=False)


def test_without_zeta_the_record_of_one_curvature_is_that_of_the_other(tmp_path: Path) -> None:
    (first,) = run([CONFIG], Store(tmp_path), scale="smoke")
    empirical = replace(CONFIG, curvature="empirical")
    (second,) = run([empirical], Store(tmp_path), scale="smoke")
    assert second == replace(first, config=empirical)


def test_an_ensemble_takes_together_what_differs_in_rates_dampings_and_seeds_only(tmp_path: Path) -> None:
    empirical = replace(CONFIG, damping=1.0, output_damping=1.0, curvature="empirical")
    configs = [
        replace(CONFIG, learning_rate=0.3),
        replace(CONFIG, damping=1.0, seed=2),
        empirical,
        replace(CONFIG, hidden=(16,)),
        replace(CONFIG, optimizer="adam", damping=1.0),
        replace(CONFIG, layers=(1,), damping=1.0),
    ]
    groups = plan(configs, Store(tmp_path), executor="ensemble")
    # Without ζ a run has no curvature of its own and joins those that have one. The rates are in order.
    assert [set(group.configs) for group in groups] == [{*configs[:3]}, {configs[3]}, {configs[4]}, {configs[5]}]
    assert [config.learning_rate for config in groups[0].configs] == [0.1, 0.1, 0.3]
    assert [group.stacked for group in groups] == [True, True, True, False]
    assert [len(group.configs) for group in plan(configs, Store(tmp_path), executor="local")] == [1] * 6


def test_an_ensemble_is_split_where_memory_or_its_user_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = [replace(CONFIG, seed=seed) for seed in range(10)]

    def sizes(**options: Any) -> list[int]:
        return [len(group.configs) for group in plan(configs, Store(tmp_path), executor="ensemble", **options)]

    assert sizes() == [10]
    assert sizes(copies=4) == [3, 3, 4]
    monkeypatch.setattr(executors, "SHARE_OF_MEMORY", 1e-12)
    assert sizes() == [1] * 10


def test_groups_that_were_begun_go_on_as_they_were_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, later = GRID[:6], replace(CONFIG, seed=9)

    def stop(log: Log, weights: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Log, "end", stop)
        with pytest.raises(KeyboardInterrupt):
            run(first, Store(tmp_path), executor="ensemble", scale="smoke")
    store = Store(tmp_path)
    assert {record.status for record in store.records()} == {"unfinished", "diverged"}
    waiting = [config for config in first if config.learning_rate < 1]
    groups = plan([later, *waiting], store, executor="ensemble")
    assert [set(group.configs) for group in groups] == [set(first), {later}]
    # Not all that the group would train was asked for.
    assert [set(group.configs) for group in plan(waiting[1:], store, executor="ensemble")] == [set(waiting[1:])]
    records = run([later, *first], store, executor="ensemble", scale="smoke")
    assert {record.copies for record in records} == {6, 1}


def test_updates_tell_loss_accuracy_speed_and_time_left(tmp_path: Path) -> None:
    seen: list[Update] = []
    (record,) = run([CONFIG], Store(tmp_path), scale="smoke", progress=seen.append)
    assert [(update.epoch, update.epochs, update.ended) for update in seen] == [(0, 2, False), (1, 2, False), (2, 2, True)]
    assert [update.train_loss for update in seen] == [point.train_loss for point in record.points]
    assert [update.test_accuracy for update in seen] == [point.test_accuracy for point in record.points]
    assert seen[0].steps_per_second is None
    assert seen[1].steps_per_second is not None
    assert seen[1].steps_per_second > 0
    assert seen[1].remaining is not None
    assert seen[2].remaining == 0
    assert seen[0].title == "digits 16-12: sgd 0.1"


def test_bars_show_what_updates_tell(tmp_path: Path) -> None:
    console = Console(record=True, force_terminal=True, width=120, file=(tmp_path / "screen").open("w"))
    with console.file, progress.bars(console, total=2) as show:
        update = Update("a", "digits 16-12: 3 networks", 1, 2, 0.125, 0.5, 1234.0, 61.0, False)
        show(update)
        show._display.refresh()
        show(replace(update, epoch=2, train_loss=math.nan, ended=True))
    text = console.export_text()
    assert "digits 16-12: 3 networks" in text
    assert "loss 0.125  accuracy 50.0%  1,234 steps/s  1:01 left" in text


def test_bad_input_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    with pytest.raises(ExecutorError, match="there is no executor 'slurm'; there are local, processes, ensemble, ray"):
        run([CONFIG], store, executor="slurm", scale="smoke")
    with pytest.raises(ExecutorError, match="device must be cpu or cuda, got 'tpu'"):
        run([CONFIG], store, device="tpu", scale="smoke")
    with pytest.raises(ExecutorError, match="workers must be >= 1, got 0"):
        run([CONFIG], store, workers=0, scale="smoke")
    if not torch.cuda.is_available():
        with pytest.raises(ExecutorError, match="this machine has no CUDA device"):
            run([CONFIG], store, device="cuda", scale="smoke")
    with pytest.raises(DataError, match="there is no data set 'cifar'"):
        run([replace(CONFIG, data="cifar")], store, scale="smoke")
    with pytest.raises(ConfigError, match="batch must be at most"):
        run([replace(CONFIG, batch=10**6)], store, executor="ensemble", scale="smoke")
    assert not (tmp_path / "store").exists()
