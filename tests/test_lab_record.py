"""Records survive a kill at any moment; whatever is damaged is named with its file and line, and nothing else is lost."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isaac_lab import lines, record, records
from isaac_lab.record import Record, Store, StoreError
from isaac_lab.trial import Trial

TRIAL = Trial("mnist-mlp", "sgd", (("learning_rate", 0.1),), steps=10, points=2)
ABOUT = {"commit": "abc", "machine": {"cpu": "a processor"}}


def run(seed: int, losses: list[float | None] | None = None, *, status: str = "finished") -> Record:
    curve = {"step": [0.0, 5.0, 10.0], "train_loss": losses or [2.0, 1.0, 0.5]}
    return Record(replace(TRIAL, seed=seed), status, curve, 0.25, ABOUT, "2026", "digest")


def filled(folder: Path, count: int = 3) -> Store:
    store = Store(folder)
    with store.writing():
        store.add(*(run(seed) for seed in range(count)))
    return store


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_what_was_written_is_read(tmp_path: Path) -> None:
    filled(tmp_path / "new")
    with Store(tmp_path / "new").writing() as mended:
        assert mended == []
    again = Store(tmp_path / "new")
    assert again.records() == [run(0), run(1), run(2)]
    assert again.get(run(1).trial) == run(1)
    assert again.get(replace(TRIAL, seed=9)) is None
    assert again.missing([replace(TRIAL, seed=seed) for seed in (9, 0, 9)]) == [replace(TRIAL, seed=9)]
    # Where they come from is said once.
    assert (tmp_path / "new" / "trials.jsonl").read_text(encoding="utf-8").count("a processor") == 1


def test_what_is_no_number_comes_back_as_none_and_a_diverged_run_as_infinite(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.writing():
        store.add(run(0, [2.0, math.nan, math.inf], status="diverged"))
    found = Store(tmp_path).get(run(0).trial)
    assert found is not None
    assert found.curve["train_loss"] == [2.0, None, None]
    assert found.final("train_loss") == math.inf
    assert math.isnan(found.column("train_loss")[1])
    assert run(0).final("train_loss") == 0.5
    assert run(0, [2.0, 1.0, None]).final("train_loss") == math.inf


def test_looking_at_a_store_writes_nothing(tmp_path: Path) -> None:
    assert Store(tmp_path / "none").records() == []
    assert Store(tmp_path / "none").times() == {}
    assert not (tmp_path / "none").exists()
    with pytest.raises(RuntimeError, match="within `writing` only"):
        Store(tmp_path / "none").add(run(0))


def test_another_process_that_has_written_is_seen(tmp_path: Path) -> None:
    reader = Store(tmp_path)
    assert reader.records() == []
    filled(tmp_path)
    assert len(reader.records()) == 3


def damage(path: Path, kind: str) -> int:
    """Damage the third run's line, or the file; returns the number of the line that is named."""
    raw = path.read_bytes().splitlines(keepends=True)
    if kind == "empty":
        path.write_bytes(b"")
        return 1
    if kind == "cut":
        raw[-1] = raw[-1][: len(raw[-1]) // 2]
    elif kind == "flipped":
        raw[-1] = raw[-1].replace(b"0.5]", b"0.4]")
    elif kind == "foreign":
        raw[-1] = b'{"hello": "world"}\n'
    elif kind == "no JSON":
        raw[-1] = b"\x00\xff garbage\n"
    else:
        value = {key: own for key, own in json.loads(raw[-1]).items() if key != "check"}
        if kind == "NaN":
            text = json.dumps(value).replace("0.5", "NaN").encode()
            raw[-1] = text[:-1] + b', "check": "' + lines._checksum(text) + b'"}\n'
        else:
            value |= {"no curve": {"curve": 1}, "no trial": {"trial": None}, "status": {"status": "odd"}}[kind]
            raw[-1] = lines.encode(value)
    path.write_bytes(b"".join(raw))
    return len(raw)


@pytest.mark.parametrize("kind", ["empty", "cut", "flipped", "foreign", "no JSON", "NaN", "no curve", "no trial", "status"])
def test_a_damaged_line_is_named_with_its_file_and_nothing_is_changed(tmp_path: Path, kind: str) -> None:
    filled(tmp_path)
    path = tmp_path / "trials.jsonl"
    number = damage(path, kind)
    before = path.read_bytes()
    with pytest.raises(StoreError, match=rf"trials\.jsonl, line {number}: "):
        Store(tmp_path).records()
    assert path.read_bytes() == before


def test_a_line_that_a_kill_tore_is_cut_off_by_the_next_writer_who_says_so(tmp_path: Path) -> None:
    filled(tmp_path)
    path = tmp_path / "trials.jsonl"
    whole = path.read_bytes()
    for kept in (1, 20, len(whole.splitlines()[-1]) - 1):
        path.write_bytes(whole[: len(whole) - len(whole.splitlines(keepends=True)[-1]) + kept])
        store = Store(tmp_path)
        with store.writing() as mended:
            assert len(mended) == 1
            assert "line 5 was cut off by a kill" in mended[0]
            assert len(store.records()) == 2
            store.add(run(2))
        assert Store(tmp_path).records() == [run(0), run(1), run(2)]


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    filled(tmp_path)
    path = tmp_path / "trials.jsonl"
    _, rest = path.read_bytes().split(b"\n", 1)
    path.write_bytes(lines.encode({"format": "isaac-newton trials 9"}) + rest)
    with pytest.raises(StoreError, match=r"the format is 'isaac-newton trials 9', this version reads 'isaac-newton trials 1'"):
        Store(tmp_path).records()
    path.write_bytes(rest)
    with pytest.raises(StoreError, match="line 1: it does not say the format"):
        Store(tmp_path).records()


def test_two_results_of_one_run_are_named_and_the_same_twice_is_one(tmp_path: Path) -> None:
    filled(tmp_path / "a")
    path = tmp_path / "a" / "trials.jsonl"
    # As `merge=union` joins two branches.
    path.write_bytes(path.read_bytes() * 2)
    assert Store(tmp_path / "a").records() == [run(0), run(1), run(2)]
    other = Store(tmp_path / "b")
    with other.writing():
        other.add(run(1, [2.0, 1.0, 0.25]))
    path.write_bytes(path.read_bytes() + (tmp_path / "b" / "trials.jsonl").read_bytes())
    with pytest.raises(StoreError, match=r"line 13: .*another result of the run of line 4; remove one of them"):
        Store(tmp_path / "a").records()


def test_a_full_disk_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path)
    before = (tmp_path / "trials.jsonl").read_bytes()
    with monkeypatch.context() as patch, store.writing():
        patch.setattr(os, "fsync", full)
        with pytest.raises(StoreError, match=r"cannot write to .*trials\.jsonl: No space left on device\. What was there"):
            store.add(run(7))
    assert (tmp_path / "trials.jsonl").read_bytes() == before
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            records.write_whole(tmp_path / "page.md", "x" * 10_000)
    assert not list(tmp_path.glob("page.md*"))
    with store.writing():
        store.add(run(7))
    assert len(Store(tmp_path).records()) == 4


def test_a_checkpoint_on_a_full_disk_says_so_and_one_that_is_damaged_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Store(tmp_path).checkpoint([TRIAL])
    assert kept.load() is None
    state: dict[str, Any] = {"done": 3, "state": {}, "columns": []}
    kept.save(state)
    assert kept.load() == state
    assert Store(tmp_path).begun() == [[TRIAL]]
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StoreError, match=r"cannot write a checkpoint to .*: No space left on"):
            kept.save(state | {"done": 4})
    assert kept.load() == state
    (path,) = (tmp_path / "checkpoints").glob("*.checkpoint")
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(StoreError, match=r"cannot read .*checkpoint: .*; remove it to train that run from the start"):
        kept.load()
    kept.remove()
    assert not list((tmp_path / "checkpoints").iterdir())


def test_the_second_process_in_a_folder_is_told_who_holds_it(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from isaac_lab.record import Store\n"
        "with Store(Path(sys.argv[1])).writing('isaac-newton race mnist-mlp'): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(StoreError, match=rf"in use by process {holder.pid}, isaac-newton race mnist-mlp, since"),
            Store(tmp_path).writing(),
        ):
            pass
        holder.kill()
    with Store(tmp_path).writing() as mended:
        assert mended == []


def test_about_and_times_are_kept_beside_the_runs(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.about == {}
    with store.writing():
        store.note({"id": "fig1"})
        store.add_times("eager", {"methods": []})
        store.add_times("eager", {"methods": [1]})
    assert Store(tmp_path).about == {"id": "fig1"}
    assert Store(tmp_path).times() == {"eager": {"methods": [1]}}
    (tmp_path / "about.json").write_text("{", encoding="utf-8")
    with pytest.raises(StoreError, match=r"cannot read .*about\.json"):
        _ = Store(tmp_path).about
    (tmp_path / "about.json").write_text("[]", encoding="utf-8")
    with pytest.raises(StoreError, match=r"about\.json is not a record"):
        _ = Store(tmp_path).about


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    with pytest.raises(StoreError, match=r"cannot write to .*: Not a directory"), Store(tmp_path / "file" / "x").writing():
        pass


def test_six_digits_are_kept() -> None:
    assert record.rounded(math.pi) == 3.14159
    assert record.rounded(math.nan) is None
    assert record.rounded(None) is None
