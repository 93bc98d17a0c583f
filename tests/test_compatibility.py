"""The page of what works with what: rows from marks and names, results from outcomes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from compatibility import TESTS, compatibility, page

OUTCOMES = {
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "tests": {
        "tests/test_step.py::test_forgetting_to_bind_is_noticed": {"outcome": "passed", "reason": "", "promises": []},
        "tests/test_distributed.py::test_as_one[2 ranks-DDP, step]": {"outcome": "passed", "reason": "", "promises": []},
        "tests/test_distributed.py::test_as_one[4 ranks-DDP, step]": {"outcome": "failed", "reason": "", "promises": []},
        "tests/test_conformance.py::test_a[x]": {"outcome": "passed", "reason": "", "promises": [["Area", "a | b", "but"]]},
        "tests/test_conformance.py::test_b": {
            "outcome": "skipped",
            "reason": "Skipped: no onnx",
            "promises": [["Area", "c", ""]],
        },
    },
}


def test_a_promise_holds_when_all_of_its_tests_pass() -> None:
    lines = page(OUTCOMES).splitlines()
    assert lines[2].startswith("4 promises; fails: 1, holds: 2, skipped: 1. A promise holds when every test")
    assert "python 3.11.7, torch 2.13.0." in lines
    assert r"| a \| b | holds | but | `test_conformance.py::test_a[x]` |" in lines
    assert "| c | skipped: no onnx |  | `test_conformance.py::test_b` |" in lines
    assert "| Forgetting to bind is noticed | holds |  | `test_step.py::test_forgetting_to_bind_is_noticed` |" in lines
    assert "| As one: DDP, step | **fails** (1 of 2) |  | `test_distributed.py::test_as_one`, 2 cases |" in lines
    assert lines.index("## Area") < lines.index('## when="step": accumulation, averages, binding to an optimizer')


def test_the_command_says_what_failed_and_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes, out = tmp_path / "outcomes.json", tmp_path / "docs" / "page.md"
    outcomes.write_text(json.dumps(OUTCOMES))
    with pytest.raises(typer.Exit) as stop:
        compatibility(out=out, outcomes=outcomes)
    assert stop.value.exit_code == 1
    assert "5 tests, 1 failed" in capsys.readouterr().out
    assert out.read_text() == page(OUTCOMES)
    with pytest.raises(typer.BadParameter, match="there is no file"):
        compatibility(out=out, outcomes=tmp_path / "nowhere.json")
    with pytest.raises(typer.BadParameter, match="run this in a checkout"):
        compatibility(out=out, tests=tmp_path)


def test_outcomes_carry_marks_reasons_and_versions(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = conformance(area, promise, notes): a row\n")
    (tmp_path / "test_step.py").write_text(
        "import pytest\n\n"
        "@pytest.mark.conformance('Area', 'promise', 'note')\ndef test_good(): pass\n\n"
        "@pytest.mark.conformance('Area', 'other')\ndef test_bad(): assert False\n\n"
        "@pytest.mark.skip(reason='not today')\ndef test_skipped(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "outcomes", "--outcomes=out.json", "test_step.py"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=False, env=os.environ | {"PYTHONPATH": str(TESTS)})
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["versions"].keys() >= {"python", "torch"}
    tests = {name.partition("::")[2]: test for name, test in found["tests"].items()}
    assert tests["test_good"] == {"outcome": "passed", "reason": "", "promises": [["Area", "promise", "note"]]}
    assert tests["test_bad"] == {"outcome": "failed", "reason": "", "promises": [["Area", "other", ""]]}
    assert tests["test_skipped"] == {"outcome": "skipped", "reason": "Skipped: not today", "promises": []}
