"""A short soak on each run; the record of the long one holds what it promises."""

import json
from pathlib import Path

import dense
import pytest
import torch
from soak import soak

RECORD = Path(__file__).parents[2] / "results" / "robustness" / "soak.json"


@pytest.mark.filterwarnings("default")
def test_three_hundred_steps_of_everything_that_goes_wrong() -> None:
    report = soak(300, seed=1)
    assert report.steps == 300
    assert set(report.events) >= {"none", "zeros", "poison", "failure", "skip"}
    assert sum(report.checked.values()) > 50
    assert max(report.worst.values()) <= 1
    assert report.fallbacks > 0
    assert report.memory[-1][2] < report.memory[1][2] + 100


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = dense.conditioner

    def wrong(moment: torch.Tensor, damping: float, power: float = 1.0) -> torch.Tensor:
        return right(moment, 1.01 * damping, power)

    monkeypatch.setattr(dense, "conditioner", wrong)
    with pytest.raises(RuntimeError, match=r"step .* of seed") as raised:
        soak(300, seed=1)
    assert isinstance(raised.value.__cause__, AssertionError)


def test_the_long_soak_took_twenty_thousand_steps_in_flat_memory() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert record["steps"] >= 20_000
    assert max(record["worst"].values()) <= 1
    assert {name.partition(",")[0] for name in record["models"]} >= {"mlp", "conv2", "attention", "embedding", "bag"}
    assert record["growth"]["tensors"] <= 20
    # Torch keeps something for every new shape; the library adds nothing to that.
    assert record["growth"]["MiB"] < record["growth"]["MiB without the library"] + 16
