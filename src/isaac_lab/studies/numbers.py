"""numbers.csv: every measurement of every run of a study, for spreadsheets."""

import csv
import io
from collections.abc import Iterable
from pathlib import Path

from isaac_lab.record import Record
from isaac_lab.records import write_whole


def write(path: Path, records: Iterable[Record]) -> None:
    """A line for each measurement, with all that says which run it is; seconds are steps times that run's seconds per step."""
    known = list(records)
    own = sorted({name for record in known for name, _ in (*record.trial.variant, *record.trial.settings)})
    columns = list(dict.fromkeys(name for record in known for name in record.curve if name != "step"))
    file = io.StringIO()
    table = csv.writer(file, lineterminator="\n")
    table.writerow(["workload", "method", *own, "seed", "steps", "status", "step", "seconds", *columns])
    for record in known:
        trial, each = record.trial, record.seconds_per_step
        run = [trial.workload, trial.method, *(trial.get(name, "") for name in own), trial.seed, trial.steps, record.status]
        for point in record.points:
            seconds = "" if each is None else f"{point['step'] * each:.6g}"
            table.writerow([*run, point["step"], seconds, *(point.get(name) for name in columns)])
    write_whole(path, file.getvalue())
