"""Any arguments for the public functions: a right answer or an error that names the argument. The long run is recorded."""

import json
import random
import subprocess
import sys
from pathlib import Path

import fuzz
import pytest
import targets
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

RECORD = Path(__file__).parents[2] / "results" / "robustness" / "fuzz.json"


#: In the tests shapes are checked against signatures, and errors are those of the checker.
CHECKED = {"equations"}


@pytest.mark.parametrize("target", sorted(set(targets.TARGETS) - CHECKED))
@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32))
def test_every_call_is_answered_or_refused(target: str, seed: int) -> None:
    assert fuzz.case(target, random.Random(seed)) in ("answered", "refused")


def test_the_command_runs_all_targets_and_writes_its_record(tmp_path: Path) -> None:
    out = tmp_path / "fuzz.json"
    command = [sys.executable, fuzz.__file__, "--cases", "1500", "--seed", "7", "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    record = json.loads(out.read_text(encoding="utf-8"))
    assert sum(record["outcomes"].values()) == record["cases"] == 1500
    assert record["outcomes"]["equations, answered"] > 100


def test_the_long_run_had_a_hundred_thousand_cases_of_every_target() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert record["cases"] >= 100_000
    assert record["crashes"] == 0
    assert sum(record["outcomes"].values()) == record["cases"]
    assert {name.partition(",")[0] for name in record["outcomes"]} == set(targets.TARGETS)


def test_a_wrong_answer_and_an_unclear_error_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fuzzer itself: a library that is wrong by a thousandth, or fails without a word, does not pass."""
    right = targets.dense.zeta_star
    monkeypatch.setattr(targets.dense, "zeta_star", lambda *args: 1.001 * right(*args))
    with pytest.raises(AssertionError, match=r"error .*, allowed"):
        _run("Relative")

    def fail(*args: object) -> None:
        raise ValueError("something went wrong")

    monkeypatch.setattr(targets.isaac, "detach", fail)
    with pytest.raises(AssertionError, match="names none of"):
        _run("detach")


def _run(target: str) -> None:
    for seed in range(200):
        fuzz.case(target, random.Random(seed))
