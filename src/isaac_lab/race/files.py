"""The standings as files for machines: the summary as JSON, and every measurement of the final runs as CSV."""

import csv
import io
import json
import math
from collections.abc import Mapping
from typing import Any

from isaac_lab.race.standings import SETTINGS, finals
from isaac_lab.records import plain
from isaac_lab.trials.store import Store
from isaac_lab.trials.trial import Trial

__all__ = ["as_csv", "as_json"]

Record = Mapping[str, Any]


def as_json(summary: Record) -> str:
    """A line for each field and for each method: readable, and small beside one line for each number."""

    def compact(value: Any) -> str:
        return json.dumps(plain(value), ensure_ascii=False, allow_nan=False)

    lines = [f"{compact(key)}: {compact(value)}" for key, value in summary.items() if key != "methods"]
    methods = ",\n  ".join(compact(method) for method in summary["methods"])
    return "{\n " + ",\n ".join([*lines, f'"methods": [\n  {methods}\n ]']) + "\n}\n"


def as_csv(about: Record, store: Store, summary: Record) -> str:
    """A row for each measurement, with the seconds of the headline's clock."""
    quantities = ("train_loss", "test_loss", *about["metrics"])
    file = io.StringIO()
    table = csv.writer(file, lineterminator="\n")
    table.writerow(["method", *SETTINGS, "seed", "status", "step", "seconds", *quantities])
    for method in summary["methods"]:
        settings, each = method["settings"] or {}, method["seconds_per_step"] or math.nan
        for record in _runs(about, store, method):
            run = [*(settings.get(name) for name in SETTINGS), record["trial"]["seed"], record["status"]]
            for point in record["points"]:
                values = [point["step"] * each, *(point[name] for name in quantities)]
                table.writerow([method["name"], *run, point["step"], *map(_digits, values)])
    return file.getvalue()


def _runs(about: Record, store: Store, method: Record) -> list[dict[str, Any]]:
    if not method["n"]:
        return []
    trials = [Trial.from_mapping(trial) for trial in about["methods"][method["name"]]["tuning"]]
    found = [store.get(trial) for trial in finals(store, trials, about["quantity"], about["seeds"])]
    return [record for record in found if record is not None]


def _digits(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:.6g}"
