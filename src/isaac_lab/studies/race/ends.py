"""Where a race ended: an optimizer beside the same one with ISAAC, whether the seeds show a difference, and who was lowest."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isaac_lab.significance import Difference, contrast

__all__ = ["PAIRS", "Pair", "lowest", "pairs"]

Record = Mapping[str, Any]

#: The optimizers people pick that take any gradient, and the same with ISAAC.
PAIRS = {"adamw": "isaac-adamw", "muon": "isaac-muon"}


@dataclass(frozen=True)
class Pair:
    """An optimizer and the same with ISAAC, at the end of the budget; no difference where a run is missing or diverged."""

    label: str
    alone: Record
    ours: Record
    difference: Difference | None


def pairs(summary: Record) -> list[Pair]:
    """Of the optimizers that ran with and without ISAAC."""
    known = {method["name"]: method for method in summary["methods"] if method["n"]}
    found = []
    for plain, conditioned in PAIRS.items():
        if plain in known and conditioned in known:
            alone, ours = (known[name]["final"] for name in (plain, conditioned))
            values = [[value for value in end["values"] if value is not None] for end in (ours, alone)]
            complete = values == [ours["values"], alone["values"]] and min(map(len, values)) > 1
            found.append(Pair(known[plain]["label"], alone, ours, contrast(*values) if complete else None))
    return found


def lowest(summary: Record) -> str | None:
    """Label of the method with the lowest mean loss at the end."""
    ends = [(m["final"]["mean"], m["label"]) for m in summary["methods"] if m["n"] and m["final"]["mean"] is not None]
    return min(ends)[1] if ends else None
