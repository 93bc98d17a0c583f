"""The demo on a photograph: its rates are those of the committed search, and what it shows is what its records say."""

import importlib.metadata
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
from typer.testing import CliRunner

from isaac_lab import executors
from isaac_lab.cli import app
from isaac_lab.record import Store
from isaac_lab.report import demo as report
from isaac_lab.report import docs
from isaac_lab.studies import demo
from isaac_lab.studies.demo import METHODS, arms, chosen, searched
from isaac_lab.study import outstanding, resolve

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "results" / "demo" / "photograph"
SEEDS = 8


@pytest.fixture(scope="module")
def store() -> Store:
    return Store(RECORDS)


def test_every_rate_is_what_the_committed_search_chose(store: Store) -> None:
    assert chosen(store, SEEDS) == METHODS
    assert not outstanding(searched(SEEDS), store)
    assert not outstanding(arms(SEEDS), store)


def test_every_method_had_the_same_number_of_trials_on_another_picture_and_none_chose_an_end(store: Store) -> None:
    for method in METHODS:
        first, second = resolve(method.searched(SEEDS), store).tried
        assert (len(first), len(second)) == (8, 5)
        rates = sorted(trial.learning_rate for trial in first)
        assert rates[0] < method.chosen["learning_rate"] < rates[-1]
        assert {(trial.get("picture"), trial.seed) for trial in (*first, *second)}.isdisjoint(
            {(trial.get("picture"), trial.seed) for arm in arms(SEEDS) for trial in arm.finals(None)}
        )


def test_the_table_has_the_means_of_the_records(store: Store) -> None:
    shown = report.read(store, METHODS, SEEDS, "cpu")
    ends = {row.cells[0]: row.cells[3] for row in report.table(shown).rows}
    for method in METHODS:
        runs = [store.get(method.trial(seed)) for seed in range(SEEDS)]
        mean = fmean(record.final("psnr") for record in runs if record is not None)
        assert ends[method.name].startswith(f"{mean:.2f} ± ")


def test_a_demo_that_was_trained_is_shown_again_with_its_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "train", lambda *given, **options: pytest.fail("it is trained already"))
    (tmp_path / "trials.jsonl").write_bytes((RECORDS / "trials.jsonl").read_bytes())
    (tmp_path / "times.jsonl").write_bytes((RECORDS / "times.jsonl").read_bytes())
    for subject in ("photograph", "search"):
        result = CliRunner().invoke(app, ["demo", subject, "--seeds", str(SEEDS), "--out", str(tmp_path)])
        assert result.exit_code == 0, result.output
        assert "Muon ends at 35.0 dB, Adam at 27.9 (8 seeds" in " ".join(result.output.split())
        for name in ("pictures", "curves"):
            assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_shows_what_the_records_say(tmp_path: Path) -> None:
    committed = ROOT / "docs" / "start.md"
    page = tmp_path / "start.md"
    shutil.copyfile(committed, page)
    shown = report.read(Store(RECORDS), METHODS, SEEDS, "cpu")
    docs.fill(page, report.blocks(lambda: shown, tmp_path / "figures"))
    assert page.read_text(encoding="utf-8") == committed.read_text(encoding="utf-8")
    for name in ("photograph", "psnr"):
        drawn = tmp_path / "figures" / f"{name}.svg"
        assert drawn.read_bytes() == (ROOT / "docs" / "figures" / drawn.name).read_bytes()


def test_methods_take_turns_within_a_seed() -> None:
    due = outstanding(arms(2), Store(Path("nothing is here")))
    assert due == [method.trial(seed) for seed in (0, 1) for method in METHODS]


def test_piped_output_has_no_control_codes(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "TTY_COMPATIBLE")}
    for name in ("trials.jsonl", "times.jsonl"):
        shutil.copyfile(RECORDS / name, tmp_path / name)
    command = [sys.executable, "-m", "isaac_lab", "demo", "--seeds", str(SEEDS), "--out", str(tmp_path)]
    # ASCII is the poorest terminal there is: the table must survive it too.
    environment["PYTHONIOENCODING"] = "ascii"
    finished = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert re.search(rb"[^\x20-\x7e\n\r]", finished.stdout) is None
    assert b"Adam + ISAAC" in finished.stdout
    assert finished.stderr == b""


@pytest.mark.parametrize("value", ["0", "-3"])
def test_a_count_below_one_is_refused_by_name_and_value(value: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--seeds", value, "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert f"'--seeds': must be at least 1, got {value}" in result.output
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_written_is_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "train", lambda *_, **__: pytest.fail("trained before looking at --out"))
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "file" / "demo")])
    assert result.exit_code == 2
    assert "--out" in result.output
    assert "cannot write to" in result.output


def test_the_demo_of_one_seed_leaves_runs_versions_and_finite_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "STEPS", 4)
    monkeypatch.setattr(demo, "POINTS", 2)
    monkeypatch.setattr(demo, "FRAMES", (2, 4))
    out = tmp_path / "new" / "directory"
    result = CliRunner().invoke(app, ["demo", "--seeds", "1", "--out", str(out)])
    assert result.exit_code == 0, result.output
    for record in Store(out).records():
        assert record.about["versions"]["torch"] == importlib.metadata.version("torch")
        assert record.curve["step"] == [0, 2, 4]
        assert all(math.isfinite(record.final(name)) for name in ("train_loss", "psnr"))
        assert (record.seconds_per_step or 0) > 0
    (call,) = Store(out).about["calls"]
    assert (call["runs"], call["command"]) == (4, "isaac-newton demo --seeds 1")
