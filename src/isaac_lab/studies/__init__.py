"""The studies there are: the paper's figures and tables, the race, the recipes, and others, each a list of arms."""

import hashlib
import json
import tomllib
from collections.abc import Iterable
from dataclasses import replace
from importlib.resources import files
from typing import Any

from isaac_lab.trial import Trial


class StudyError(Exception):
    """What is not there, or cannot be run or drawn; the message says why and what to do."""


def refuse_unknown(names: Iterable[str], there: Iterable[str], what: str) -> None:
    """Refuse names that are not there."""
    if unknown := [name for name in names if name not in there]:
        raise StudyError(f"there is no {what} {unknown[0]!r}; there are {', '.join(there)}")


def rules(name: str) -> dict[str, Any]:
    """What a file of rules beside the studies says."""
    return tomllib.loads(files(__package__).joinpath(name).read_text(encoding="utf-8"))


def hashed(*made_by: Any) -> str:
    """The hash of the rules that runs are made by; every record carries it, and other rules make other runs."""
    return hashlib.sha256(json.dumps(made_by, sort_keys=True).encode()).hexdigest()[:12]


def finals(best: Trial | None, seeds: Iterable[int]) -> list[Trial]:
    """Runs that are shown, with what was chosen, from these seeds; they see the test set."""
    return [] if best is None else [replace(best, split="test", seed=seed) for seed in seeds]
