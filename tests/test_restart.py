"""A process that is killed costs a step: torchrun starts all of them again, and they end where they would have ended."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "distributed" / "restart.py"


def launch(folder: Path, *args: str) -> dict[str, torch.Tensor]:
    folder.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    # Attempts would share a store, and in it a new process may find the address of a dead one (pytorch/pytorch#135712).
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [*torchrun, str(SCRIPT), str(folder), *args]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(folder / "weights.pt")


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_a_killed_rank_resumes_and_ends_with_the_same_weights(tmp_path) -> None:
    expected = launch(tmp_path / "undisturbed")
    resumed = launch(tmp_path / "killed", "5")
    assert (tmp_path / "undisturbed" / "attempts.txt").read_text() == "0 0\n"
    # Rank 0 may or may not have written the checkpoint of the last step that both made.
    assert (tmp_path / "killed" / "attempts.txt").read_text() in ("0 0\n1 5\n", "0 0\n1 4\n")
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
