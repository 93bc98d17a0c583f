"""Nothing changed but the shape: choices, results, verdicts and tables of the old laboratory are found again."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

from isaac_lab.record import Record, Store, rounded
from isaac_lab.report import paper
from isaac_lab.report import race as report
from isaac_lab.studies.paper import EXPERIMENTS, fig6, tab1
from isaac_lab.studies.paper.folder import view
from isaac_lab.studies.paper.recipe import SCALES, final_loss
from isaac_lab.studies.race import standings
from isaac_lab.study import resolve

ROOT = Path(__file__).parent.parent
REPRODUCED, RACED = ROOT / "results" / "reproduce", ROOT / "results" / "race"
GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "lab_golden.json").read_text(encoding="utf-8"))


def number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def cell(record: Record) -> list[Any]:
    trial = record.trial
    dampings = [value if math.isfinite(value) else "inf" for value in (trial.damping, trial.output_damping)]
    # K-FAC had its one damping on both sides.
    return [dampings[0], dampings[0] if trial.method == "kfac" else dampings[1], trial.seed]


def figures() -> dict[str, Any]:
    """Grids and curves."""
    found = {}
    for identity, experiment in EXPERIMENTS.items():
        for scale in ("paper", "quick"):
            for own in view(experiment, REPRODUCED, SCALES[scale]).outcomes:
                for group in own.panel.groups:
                    runs = own.records[group.name]
                    ends = [[r.status, *_numbers(r.points[-1]), len(r.points)] for r in runs]
                    found[f"{identity}/{scale}/{own.panel.name}/{group.name}"] = {
                        "learning_rate": own.rates[group.name],
                        "tried": {f"{rate:g}": number(loss) for rate, loss in own.tried.get(group.name, {}).items()},
                        "n": len(runs),
                        "diverged": sum(not record.finished for record in runs),
                        "lowest": number(min((final_loss(record) for record in runs), default=math.inf)),
                        "ends": digest([[*cell(record), *end] for record, end in zip(runs, ends, strict=True)]),
                        "curves": digest([[[p["step"], *_numbers(p)] for p in record.points] for record in runs]),
                    }
    return found


def _numbers(point: Any) -> list[Any]:
    return [point.get(name) for name in ("train_loss", "test_loss", "test_accuracy")]


def figure_6() -> dict[str, Any]:
    found = {}
    for (setting, method), own in fig6.cells(view(EXPERIMENTS["fig6"], REPRODUCED, SCALES["quick"])).items():
        chosen, rows = own.best, fig6.accuracies(own.runs)
        tried, compared = [*own.tried, {}][:2]
        found[f"fig6/quick/{setting}/{method}"] = {
            **{
                name: [[t.learning_rate, t.get("damping", 0.0), number(value)] for t, value in tried.items()]
                for name, tried in (("tried", tried), ("compared", compared))
            },
            "learning_rate": chosen and chosen.learning_rate,
            "damping": chosen and chosen.get("damping", 0.0),
            "n": len(own.runs),
            "diverged": sum(not record.finished for record in own.runs),
            "ends": [row[-1] for row in rows],
            "curves": digest(rows),
        }
    return found


def table_1() -> dict[str, Any]:
    found = {}
    own = view(EXPERIMENTS["tab1"], REPRODUCED, SCALES["quick"])
    run, _ = tab1._found(own)
    for (title, method), arm in tab1.arms(run).items():
        result = resolve(arm, own.store)
        metrics = next(task.metrics for task in tab1.TASKS if task.title == title)
        found[f"tab1/quick/{title}/{method}"] = {
            "tried": [[t.learning_rate, t.get("damping", 0.0), number(-value)] for t, value in result.tried[0].items()],
            "learning_rate": result.best and result.best.learning_rate,
            "damping": result.best and result.best.get("damping", 0.0),
            "n": len(result.runs),
            "ends": [{name: record.points[-1][name] for name in metrics} for record in result.runs],
        }
    return found


#: Who is no longer raced, and where: their records are in the archive.
LEFT = {"sgd", "isaac-sgd", "shampoo", "singd", "formula"}
GONE = "fashion-autoencoder"


def races() -> dict[str, Any]:
    found = {}
    for folder in sorted(RACED.glob("*/*")):
        store = Store(folder)
        summary = standings.summarize(store)
        for method in summary["methods"]:
            values = {key: method[key] and method[key]["values"] for key in ("steps_to_target", "seconds_to_target", "final")}
            found[f"race/{folder.parent.name}/{folder.name}/{method['name']}"] = {
                **{key: method[key] for key in ("settings", "n", "diverged", "reason", "edge")},
                **values,
                "tried": sorted((tried["value"] for tried in method["tuning"]), key=lambda value: (value is None, value)),
                "seconds_per_step": method["seconds_per_step"],
            }
    return found


def has_left(name: str) -> bool:
    return name.startswith("race/") and (f"/{GONE}/" in name or name.rpartition("/")[2] in LEFT)


def as_now(name: str, own: Any) -> Any:
    """What was derived from these, how often the rival's steps fit in, is no longer; of two clocks the faster one is shown."""
    if not name.startswith("race/"):
        return own
    eager, captured = own["seconds_per_step"]
    kept = {key: value for key, value in own.items() if key not in ("speed_up", "chosen")}
    kept["tried"] = sorted(kept["tried"], key=lambda value: (value is None, value))
    return kept | {"seconds_per_step": eager if captured is None else captured}


@pytest.mark.parametrize("kind", [figures, figure_6, table_1, races])
def test_resolve_finds_every_choice_and_result_again(kind: Any) -> None:
    found = kind()
    prefixes = {name.split("/")[0] for name in found}
    known = {name: own for name, own in GOLDEN["choices"].items() if not has_left(name)}
    expected = {name: as_now(name, own) for name, own in known.items() if name.split("/")[0] in prefixes}
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []


def test_all_choices_were_asked_for() -> None:
    counted = sum(len(kind()) for kind in (figures, figure_6, table_1, races))
    left = sum(map(has_left, GOLDEN["choices"]))
    assert counted + left == len(GOLDEN["choices"]) == 193


def test_who_left_the_races_is_in_the_archive_with_every_end() -> None:
    """Every run that the old tables had of these methods and data is found again by its end."""
    ends: dict[str, set[float | None]] = {}
    for record in Store(ROOT / "results" / "archive").records():
        for quantity in ("train_loss", "test_loss"):
            ends.setdefault(record.trial.workload, set()).add(rounded(record.final(quantity)))
    for name in filter(has_left, GOLDEN["choices"]):
        own, workload = GOLDEN["choices"][name], name.split("/")[1]
        assert set((own["final"] or []) if own["n"] else []) <= ends[workload], name
    there = {record.trial.method for path in RACED.glob("*/*") for record in Store(path).records()}
    assert not there & {"sgd", "sgd+isaac", "sgd+formula", "shampoo", "singd"}


def test_the_tables_of_the_races_have_the_same_rows() -> None:
    left = {"SGD", "SGD + ISAAC", "Shampoo", "SINGD", "Authors' formula"}
    for folder in RACED.glob("*/*"):
        summary, name = standings.summarize(Store(folder)), f"{folder.parent.name}/{folder.name}"
        expected = [cells for cells in GOLDEN["race_rows"][name] if cells[0] not in left]
        assert [list(row.cells) for row in report.table(summary).rows] == expected
        assert {key: summary[key] for key in ("target", "target_by")} == GOLDEN["races"][name]


@pytest.mark.parametrize("identity", ["fig6", "tab1"])
def test_the_tables_of_figure_6_and_table_1_have_the_same_rows(identity: str) -> None:
    table = paper.table(view(EXPERIMENTS[identity], REPRODUCED, SCALES["quick"]))
    assert table is not None
    assert [list(table.columns), [list(row.cells) for row in table.rows]] == GOLDEN[f"{identity}_table"]


def test_the_records_are_few_files_and_small() -> None:
    files = [path for path in (ROOT / "results").rglob("*") if path.is_file() and path.name != ".lock"]
    assert len(files) <= 150
    assert sum(path.stat().st_size for path in files) < 8e6
