"""The standings as a file for machines: every measurement of the final runs as CSV."""

import csv
import io
import math
from collections.abc import Mapping
from typing import Any

from isaac_lab.record import Store
from isaac_lab.studies.race.standings import SETTINGS, results

__all__ = ["as_csv"]

Record = Mapping[str, Any]


def as_csv(store: Store, summary: Record) -> str:
    """A row for each measurement, with the seconds of the headline's clock."""
    about = store.about
    quantities = ("train_loss", "test_loss", *about["metrics"])
    file = io.StringIO()
    table = csv.writer(file, lineterminator="\n")
    table.writerow(["method", *SETTINGS, "seed", "status", "step", "seconds", *quantities])
    runs = results(about, store)
    for method in summary["methods"]:
        settings, each = method["settings"] or {}, method["seconds_per_step"] or math.nan
        for record in runs[method["name"]][1].runs:
            run = [*(settings.get(name) for name in SETTINGS), record.trial.seed, record.status]
            for point in record.points:
                values = [point["step"] * each, *(point[name] for name in quantities)]
                table.writerow([method["name"], *run, point["step"], *map(_digits, values)])
    return file.getvalue()


def _digits(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:.6g}"
