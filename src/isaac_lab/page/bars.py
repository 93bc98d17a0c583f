"""The bars that this project set itself, and what the newest records have of them."""

from collections.abc import Mapping
from typing import Any

from isaac_lab.bench.published import BARS, DAMPING, Bar
from isaac_lab.bench.steps import BASELINE

__all__ = ["bars"]

Record = dict[str, Any]


def bars(records: Mapping[str, Record]) -> list[tuple[Bar, str, float, float | None, str]]:
    """Every bar with its case, its limit, what the newest record has, and the name of that record."""
    return [(bar, case, limit, *_measured(bar, case, records)) for bar in BARS for case, limit in bar.limits.items()]


def _measured(bar: Bar, case_name: str, records: Mapping[str, Record]) -> tuple[float | None, str]:
    for name, record in reversed(list(records.items())):
        fits = (record.get("kind"), record.get("mode")) == (bar.kind, bar.mode) and bar.gpu in record["machine"].get("gpu", "")
        if not fits or record["settings"]["damping"] != DAMPING:
            continue
        for case in record["cases"]:
            entries = {method["name"]: method for method in case["methods"]}
            entry, plain = entries.get(bar.method, {}), entries.get(BASELINE, {})
            if case["name"] != case_name:
                continue
            if bar.quantity == "memory" and "peak_bytes" in entry and "peak_bytes" in plain:
                return 100 * (entry["peak_bytes"] / plain["peak_bytes"] - 1), name
            if bar.quantity == "ratio" and "ratio" in entry:
                return float(entry["ratio"]["median"]), name
            if bar.quantity == "ms" and "seconds_per_step" in entry:
                return 1e3 * float(entry["seconds_per_step"]["median"]), name
    return None, ""
