"""Records survive a kill at any moment, read back as they were written, and never overwrite what is not theirs."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from isaac_lab import executors, store
from isaac_lab.config import Config
from isaac_lab.store import Epoch, Log, Point, Record, Store, StoreError

CONFIG = Config(data="digits", hidden=(8,), epochs=3, examples=120, learning_rate=0.01, optimizer="momentum")
CONFIGS = [CONFIG, replace(CONFIG, damping=0.1), replace(CONFIG, damping=0.1, output_damping=1.0)]
ORIGIN = {"commit": "abc"}


def epoch(number: int, losses: list[float | None], diverged: tuple[int, ...] = ()) -> Epoch:
    points = tuple(None if loss is None else Point(number, 2 * number, loss, loss, 0.5, 1.5 * number) for loss in losses)
    return Epoch(number, 2 * number, 1.5 * number, 2.0 * number, points, diverged)


def begin(folder: Path, configs: list[Config] = CONFIGS) -> Log:
    return Store(folder).open(configs, stacked=True, scale="smoke", executor="ensemble", origin=ORIGIN)


def without_times(records: list[Record]) -> list[Any]:
    return sorted(
        (r.config.key, r.status, r.weights, str([replace(p, seconds=0.0) for p in r.points]), r.scale, r.copies)
        for r in records
    )


def test_what_was_written_is_read(tmp_path: Path) -> None:
    with begin(tmp_path / "new" / "store") as log:
        log.append(epoch(0, [2.0, 2.0, 2.0]))
        log.append(epoch(1, [1.0, math.nan, 0.5], diverged=(1,)))
        log.append(epoch(2, [0.5, None, 0.25]))
        kept = Store(tmp_path / "new" / "store")
        assert {record.status for record in kept.records()} == {"unfinished", "diverged"}
        assert not kept.finished(CONFIGS[0])
        log.end(["a", None, "b"])
    first, second, third = (kept.record(config) for config in CONFIGS)
    assert first == Record(
        CONFIGS[0],
        "finished",
        (Point(0, 0, 2.0, 2.0, 0.5, 0.0), Point(1, 2, 1.0, 1.0, 0.5, 1.5), Point(2, 4, 0.5, 0.5, 0.5, 3.0)),
        ORIGIN,
        "ensemble",
        "smoke",
        copies=3,
        wall=4.0,
        weights="a",
    )
    assert second is not None
    assert second.status == "diverged"
    assert len(second.points) == 2
    assert math.isnan(second.points[1].train_loss)
    assert third is not None
    assert kept.finished(CONFIGS[0])
    assert not kept.finished(CONFIGS[1])
    assert not kept.finished(replace(CONFIG, seed=9))
    assert kept.record(replace(CONFIG, seed=9)) is None


def test_a_panel_at_paper_scale_stays_small_and_readable(tmp_path: Path) -> None:
    """183 networks, 40 epochs."""
    decades = [10.0**power for power in range(-6, 7)]
    configs = [Config(damping=a, output_damping=g) for a in decades for g in [*decades, math.inf]] + [Config()]
    losses: list[float | None] = [store.rounded(math.pi / (1 + number)) for number in range(183)]
    with begin(tmp_path, configs) as log:
        for number in range(41):
            log.append(epoch(number, losses))
        log.end(["0123456789abcdef"] * 183)
    (path,) = tmp_path.glob("*.jsonl")
    assert path.stat().st_size < 500_000
    assert all(isinstance(json.loads(line), dict) for line in path.read_text().splitlines())
    assert {record.config for record in Store(tmp_path).records()} == set(configs)


@pytest.mark.parametrize("executor", ["local", "ensemble"])
def test_after_a_kill_between_any_two_writes_or_in_the_middle_of_one_training_ends_the_same(
    executor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = CONFIGS[2:] if executor == "local" else CONFIGS
    places: list[Path] = []

    def keep(torn: int = 0) -> None:
        places.append(tmp_path / str(len(places)))
        shutil.copytree(tmp_path / "whole", places[-1])
        for path in places[-1].glob("*.jsonl") if torn else []:
            path.write_bytes(path.read_bytes()[:-torn])

    write, save = Log._write, Log.save

    def watched_write(log: Log, line: dict[str, Any]) -> None:
        write(log, line)
        keep()
        keep(torn=1)
        keep(torn=len(json.dumps(line)) // 2)

    def watched_save(log: Log, *args: Any) -> None:
        save(log, *args)
        keep()

    with monkeypatch.context() as patch:
        patch.setattr(Log, "_write", watched_write)
        patch.setattr(Log, "save", watched_save)
        whole = executors.run(configs, Store(tmp_path / "whole"), executor=executor, scale="smoke")
    assert len(places) == 3 * 7 + 2
    for place in places:
        records = executors.run(configs, Store(place), executor=executor, scale="smoke")
        assert without_times(records) == without_times(whole)
        lines = [json.loads(line) for path in place.glob("*.jsonl") for line in path.read_text().splitlines()]
        assert [line["epoch"] for line in lines if "epoch" in line] == [0, 1, 2, 3]
        assert not list(place.glob("*.checkpoint"))


def test_with_fewer_checkpoints_lines_that_are_newer_are_cut_and_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"executor": "ensemble", "scale": "smoke", "checkpoint_every": 2}
    whole = executors.run(CONFIGS, Store(tmp_path / "whole"), **options)
    append = Log.append

    def append_and_die(log: Log, epoch: Epoch) -> None:
        append(log, epoch)
        if epoch.number == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Log, "append", append_and_die)
        with pytest.raises(KeyboardInterrupt):
            executors.run(CONFIGS, Store(tmp_path / "cut"), **options)
    assert torch.load(next((tmp_path / "cut").glob("*.checkpoint")))["line"]["epoch"] == 2
    assert without_times(executors.run(CONFIGS, Store(tmp_path / "cut"), **options)) == without_times(whole)


def test_a_run_that_was_resumed_names_both_processes(tmp_path: Path) -> None:
    with begin(tmp_path) as log:
        log.append(epoch(0, [1.0, 1.0, 1.0]))
        log.save({"tensors": {}}, epoch(1, [1.0, 1.0, 1.0]))
        log.append(epoch(1, [1.0, 1.0, 1.0]))
    with Store(tmp_path).open(CONFIGS, stacked=True, scale="smoke", executor="ensemble", origin={"commit": "def"}) as log:
        assert log.checkpoint is not None
        assert log.checkpoint["state"] == {"tensors": {}}
    record = Store(tmp_path).record(CONFIG)
    assert record is not None
    assert record.origin == {"commit": "abc", "resumed": [{"commit": "def"}]}


def test_records_without_their_checkpoint_are_started_again(tmp_path: Path) -> None:
    """As they are after a clone: checkpoints are not committed."""
    with begin(tmp_path) as log:
        log.append(epoch(0, [1.0, 1.0, 1.0]))
        log.append(epoch(1, [1.0, 1.0, 1.0]))
    with begin(tmp_path) as log:
        assert log.checkpoint is None
        assert [record.points for record in Store(tmp_path).records()] == [()] * 3


def test_of_two_records_of_a_run_the_one_that_came_further_counts(tmp_path: Path) -> None:
    with begin(tmp_path, CONFIGS) as log:
        log.append(epoch(0, [1.0, 1.0, 1.0]))
    with begin(tmp_path, CONFIGS[:1]) as log:
        log.append(epoch(0, [3.0]))
        log.end(["x"])
    assert len(Store(tmp_path).records()) == 3
    assert Store(tmp_path).finished(CONFIG)


def test_two_processes_cannot_train_the_same_runs_at_once(tmp_path: Path) -> None:
    with begin(tmp_path), pytest.raises(StoreError, match="another process is training the runs of"):
        begin(tmp_path)
    with begin(tmp_path) as log:
        log.end(["", "", ""])
    with pytest.raises(StoreError, match="have ended"):
        begin(tmp_path)


def test_a_directory_that_holds_something_else_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreError, match="holds something else, and no records; choose a new directory"):
        Store(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(StoreError, match=r"thesis.tex is a file; records need a directory"):
        Store(tmp_path / "thesis.tex")


@pytest.mark.parametrize("name", ["store.json", "log.jsonl"])
def test_records_of_another_version_stay_as_they_are(name: str, tmp_path: Path) -> None:
    with begin(tmp_path) as log:
        log.append(epoch(0, [1.0, 1.0, 1.0]))
    (path,) = tmp_path.glob("*.jsonl") if name == "log.jsonl" else [tmp_path / name]
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    before = path.read_text()
    with pytest.raises(StoreError, match=r"has format version 2, and this version of isaac-newton reads 1; choose another"):
        executors.run(CONFIGS, Store(tmp_path), executor="ensemble", scale="smoke")
    with pytest.raises(StoreError, match=r"has format version 2"):
        Store(tmp_path).records()
    assert path.read_text() == before


@pytest.mark.parametrize("text", ["[]", "{}", "no json", '{"format": "another"}'])
def test_files_that_are_no_records_stay_as_they_are(text: str, tmp_path: Path) -> None:
    (tmp_path / "store.json").write_text(text)
    with pytest.raises(StoreError, match=r"is no record of this laboratory|cannot read"):
        Store(tmp_path)
    assert (tmp_path / "store.json").read_text() == text


def test_a_record_with_a_field_that_is_not_known_is_refused(tmp_path: Path) -> None:
    with begin(tmp_path):
        pass
    (path,) = tmp_path.glob("*.jsonl")
    path.write_text(path.read_text().replace('"batch"', '"bunch"'))
    with pytest.raises(StoreError, match=r"is not a record that this version writes: there is no field 'bunch'"):
        Store(tmp_path).records()


def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with begin(tmp_path) as log:
        log.append(epoch(0, [1.0, 1.0, 1.0]))
    (path,) = tmp_path.glob("*.jsonl")
    before = path.read_text()
    path.with_suffix(".checkpoint").write_bytes(b"broken")
    with pytest.raises(StoreError, match=r"cannot read .*checkpoint: .*; remove it to train from the start"):
        begin(tmp_path)
    assert path.read_text() == before


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot write to .*: Not a directory"):
        begin(tmp_path / "file" / "store")

    def full(path: Path, write: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "_replace", full)
    with pytest.raises(StoreError, match=r"cannot write to .*: No space left on device"):
        begin(tmp_path / "store")


def test_looking_at_a_store_writes_nothing(tmp_path: Path) -> None:
    assert Store(tmp_path / "none").records() == []
    assert not (tmp_path / "none").exists()
