"""Table 2: time and memory of a training step, from the records of `isaac-newton bench`."""

import csv
import io
from typing import Any

from isaac_lab.bench import runs
from isaac_lab.bench.published import PAPER, paper_ratio
from isaac_lab.charts.figure import Figure
from isaac_lab.records import read, write, write_whole
from isaac_lab.report import costs
from isaac_lab.studies.paper.folder import View
from isaac_lab.studies.paper.recipe import Experiment

__all__ = ["EXPERIMENT", "records"]

#: What is measured where there are no records: one small model for a smoke test, those of `make bench` for a look.
MODELS = {"smoke": ("100",), "quick": ("100", "400", "autoencoder"), "paper": runs.Plan.models}

#: Of numbers.csv.
COLUMNS = (
    "record",
    "mode",
    "model",
    "method",
    "ms_per_step",
    "ratio",
    "ratio_low",
    "ratio_high",
    "paper_ratio",
    "peak_mb",
    "paper_mb",
)


def records(view: View) -> dict[str, dict[str, Any]]:
    """The benchmark's records of Table 2 by file name, oldest first; at smoke scale those of this experiment alone."""
    own = read(view.directory / "bench")
    committed = {} if view.scale.small or not view.bench.is_dir() else read(view.bench)
    return {name: record for name, record in (committed or own).items() if record.get("kind") == "table2"}


def measure(view: View) -> None:
    """Run the benchmark, where there is no record of it."""
    if records(view):
        return
    small = view.scale.small
    device = "cpu" if small else view.means.call.device
    plan = runs.Plan(device=device, models=MODELS[view.scale.name], rounds=view.scale.rounds, memory=not small)
    folder = view.directory / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    for record in runs.table2(plan):
        write(folder / f"{runs.file_stem(record)}.json", record)


def figure(view: View) -> Figure:
    """Time and memory beside the paper's."""
    return costs.both(records(view), heading="Table 2: time and memory of a step, relative to the plain gradient step")


def numbers(view: View) -> None:
    """One line for each record, model and method."""
    found = records(view)
    file = io.StringIO()
    table = csv.writer(file, lineterminator="\n")
    table.writerow(COLUMNS)
    for name, record in found.items():
        for case in record["cases"]:
            for method in case["methods"]:
                table.writerow([name, record["mode"], *_row(record, case, method)])
    write_whole(view.directory / "numbers.csv", file.getvalue())


def _row(record: dict[str, Any], case: dict[str, Any], method: dict[str, Any]) -> list[Any]:
    published = PAPER.get("zeta_star" if method["name"] == "paper" else method["name"], {}).get(case["name"])
    ratio = method.get("ratio", {})
    seconds = method.get("seconds_per_step", {}).get("median")
    return [
        case["name"],
        method["name"],
        None if seconds is None else f"{1e3 * seconds:.6g}",
        *(f"{ratio[key]:.4f}" if ratio else None for key in ("median", "low", "high")),
        paper_ratio(case["name"], method["name"], record["mode"].split("-")[0]),
        method["peak_bytes"] / 1e6 if "peak_bytes" in method else None,
        published.megabytes if published else None,
    ]


EXPERIMENT = Experiment(
    "tab2",
    "Table 2",
    "time and peak memory of a training step, from the records of isaac-newton bench",
    lambda scale: (),
    numbers,
    figure,
    executor="local",
    measure=measure,
)
