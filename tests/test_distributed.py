"""Real processes over gloo: a distributed step equals the step of one process on the whole batch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from distributed.checks import CHECKS, ROUNDED
from reference import TOLERANCE


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def errors(request, tmp_path_factory) -> dict[str, float]:
    """The largest relative error of each check; one launch for all of them."""
    path = tmp_path_factory.mktemp("ranks") / "errors.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(request.param)]
    checks = Path(__file__).parent / "distributed" / "checks.py"
    done = subprocess.run([*launch, str(checks), str(path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(path.read_text())


@pytest.mark.parametrize("check", CHECKS)
def test_ranks_together_step_as_one_process(errors, check) -> None:
    assert errors[check] <= 1e-9


@pytest.mark.parametrize("check", ROUNDED)
def test_ranks_together_step_as_one_process_in_half_precision(errors, check) -> None:
    assert errors[check] <= TOLERANCE[torch.float32]
