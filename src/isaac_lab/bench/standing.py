"""The bars that this project set itself, and what the newest records have of them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from isaac_lab.bench.published import BARS, DAMPING, Bar
from isaac_lab.bench.steps import BASELINE

Record = dict[str, Any]


class Standing(NamedTuple):
    """A bar in one of its cases: its limit, what the newest record has (None for nothing), and the name of that record."""

    bar: Bar
    case: str
    limit: float
    value: float | None
    record: str


def standings(records: Mapping[str, Record]) -> list[Standing]:
    """Of all bars, from records by name, oldest first."""
    return [Standing(bar, case, limit, *_measured(bar, case, records)) for bar in BARS for case, limit in bar.limits.items()]


def _measured(bar: Bar, case_name: str, records: Mapping[str, Record]) -> tuple[float | None, str]:
    for name, record in reversed(list(records.items())):
        fits = (record.get("kind"), record.get("mode")) == (bar.kind, bar.mode) and bar.gpu in record["machine"].get("gpu", "")
        # The damping decides in which precision an inverse is computed; the bars are set for one.
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
