"""The demo on a photograph: its rates are those of the committed search, and what it shows is what its records say."""

import shutil
from pathlib import Path
from statistics import fmean

import pytest
from typer.testing import CliRunner

from isaac_lab import executors
from isaac_lab.cli import app
from isaac_lab.record import Store
from isaac_lab.report import demo as report
from isaac_lab.report import docs
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


def test_only_the_digits_take_epochs() -> None:
    result = CliRunner().invoke(app, ["demo", "--epochs", "3"])
    assert result.exit_code == 2
    assert "isaac-newton demo digits" in result.output
