"""Table 2: time and memory of a training step, from the records of `isaac-newton bench`."""

from typing import Any

from isaac_lab.bench import runs
from isaac_lab.records import read, write
from isaac_lab.studies.paper.folder import View
from isaac_lab.studies.paper.recipe import Experiment

#: What is measured where there are no records: one small model for a smoke test, those of `make bench` for a look.
MODELS = {"smoke": ("100",), "quick": ("100", "400", "autoencoder"), "paper": runs.Plan.models}


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
    for record in runs.measure("table2", plan):
        write(folder / f"{runs.file_stem(record)}.json", record)


TAB2 = Experiment(
    "tab2",
    "Table 2",
    "time and peak memory of a training step, from the records of isaac-newton bench",
    measure=measure,
)
