"""Old records to new ones, once: `python results/convert.py OLD_RESULTS NEW_RESULTS`. No number changes, and that is checked.

Until commit 10da2fc a run was a file: `records/KEY.json` for trials, `records/KEY.jsonl` for groups of runs, an epoch a
line. Now a study has one `trials.jsonl` for each scale, a checksum in each line, `times.jsonl` and `about.json`. This script
holds all that still reads the old form. It writes the new one, reads that back through the laboratory's own `Store`, makes the
old form from it again, and compares every value with the old files. What was derived from records (summary.json, numbers.csv,
table.md) is not converted: commands make it again.
"""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from isaac_lab.record import Record, Store
from isaac_lab.records import plain
from isaac_lab.trial import Trial

#: Training examples of the data sets that groups of runs were made with.
EXAMPLES = 60_000
#: What a trial had where its optimizer has no second rate.
SECOND_RATE = 0.001
#: Old conditionings as settings of "+isaac".
CONDITIONINGS: dict[str, dict[str, Any]] = {
    "zeta_star": {},
    "reduce": {"sharing": "reduce"},
    "max_rows": {"max_rows": 256},
    "last": {"layers": "last"},
    "running": {"running": True},
}
ORIGIN = ("commit", "versions", "machine")
SHARED = ("data", "checksum", "weights", "arithmetic", "mode")


def trial_of_config(config: Mapping[str, Any]) -> Trial:
    """A run of a group."""
    autoencoder = config["task"] == "autoencoder"
    data = {"mnist": "mnist", "fashion-mnist": "fashion"}[config["data"]]
    variant: dict[str, Any] = {"batch": config["batch"]} if config["batch"] != 60 else {}
    if autoencoder:
        _expect(config["hidden"] == [1000, 500, 30, 500, 1000], "the paper's auto-encoder")
    else:
        _expect(len(set(config["hidden"])) == 1 and len(config["hidden"]) == 4 and data == "mnist", "the paper's classifier")
        variant |= {"width": config["hidden"][0]} if config["hidden"][0] != 400 else {}
    _expect(not config["examples"], "all examples")
    dampings = {name: value for name in ("damping", "output_damping") if (value := config[name]) != "inf"}
    settings: dict[str, Any] = {"learning_rate": config["learning_rate"], **dampings}
    method = config["optimizer"] + ("+isaac" if dampings else "")
    if config["kfac"]:
        method = "kfac"
        _expect(settings.pop("output_damping") == settings["damping"] and config["optimizer"] == "sgd", "one damping")
    if config["curvature"] == "empirical" and "output_damping" in settings:
        settings["curvature"] = "empirical"
    if config["layers"]:
        settings["layers"] = tuple(config["layers"])
    return Trial(
        f"{data}-{'autoencoder' if autoencoder else 'mlp'}",
        method,
        tuple(settings.items()),
        tuple(variant.items()),
        steps=config["epochs"] * (EXAMPLES // config["batch"]),
        points=config["epochs"],
        seed=config["seed"],
    )


def config_of_trial(trial: Trial, curvature: str) -> dict[str, Any]:
    """The way back; runs without ζ had a curvature too, which made no difference."""
    data, _, kind = trial.workload.partition("-")
    kfac = trial.method == "kfac"
    batch = trial.get("batch", 60)
    damping = "inf" if math.isinf(trial.damping) else trial.damping
    zeta = kfac or "output_damping" in dict(trial.settings)
    return {
        "data": {"mnist": "mnist", "fashion": "fashion-mnist"}[data],
        "task": "autoencoder" if kind == "autoencoder" else "classification",
        "hidden": [1000, 500, 30, 500, 1000] if kind == "autoencoder" else [trial.get("width", 400)] * 4,
        "batch": batch,
        "epochs": trial.points,
        "optimizer": "sgd" if kfac else trial.method.partition("+")[0],
        "learning_rate": trial.learning_rate,
        "damping": damping,
        "output_damping": damping if kfac else "inf" if math.isinf(trial.output_damping) else trial.output_damping,
        "curvature": trial.get("curvature", "sampled") if zeta else curvature,
        "kfac": kfac,
        "layers": list(trial.get("layers", ())),
        "seed": trial.seed,
        "examples": 0,
    }


def trial_of_old(old: Mapping[str, Any]) -> Trial:
    """A trial."""
    settings = {"learning_rate": old["learning_rate"]}
    settings |= {"damping": old["damping"]} if old["damping"] else {}
    settings |= {"relative": True} if old["relative"] else {}
    settings |= {"weight_decay": old["weight_decay"]} if old["weight_decay"] else {}
    method = old["optimizer"]
    if method == "muon":
        settings["second_rate"] = old["second_rate"]
    else:
        _expect(old["second_rate"] == SECOND_RATE, "no second rate")
    if method == "kfac":
        settings["every"] = 10
    if old["conditioning"] == "formula":
        method += "+formula"
    elif old["conditioning"] != "none":
        method += "+isaac"
        settings |= CONDITIONINGS[old["conditioning"]]
    return Trial(
        old["workload"],
        method,
        tuple(settings.items()),
        (("model", old["model"]),) if old["model"] else (),
        old["schedule"],
        old["steps"],
        old["points"],
        old["seed"],
        old["small"],
    )


def old_of_trial(trial: Trial) -> dict[str, Any]:
    """The way back."""
    optimizer, _, how = trial.method.partition("+")
    own = {name: trial.get(name) for name in ("sharing", "max_rows", "layers", "running") if trial.get(name) is not None}
    conditioning = next(name for name, options in CONDITIONINGS.items() if options == own) if how == "isaac" else how or "none"
    return {
        "workload": trial.workload,
        "optimizer": optimizer,
        "conditioning": conditioning,
        "learning_rate": trial.learning_rate,
        "damping": trial.get("damping", 0.0),
        "relative": trial.get("relative", False),
        "second_rate": trial.get("second_rate", SECOND_RATE),
        "weight_decay": trial.get("weight_decay", 0.0),
        "schedule": trial.schedule,
        "steps": trial.steps,
        "points": trial.points,
        "seed": trial.seed,
        "small": trial.small,
        "model": trial.get("model", ""),
    }


def group_records(path: Path) -> Iterator[Record]:
    """The runs of a group."""
    header, *rest = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    processes, epochs = [line for line in rest if "origin" in line], [line for line in rest if "epoch" in line]
    (end,) = [line for line in rest if "end" in line]
    origin = dict(processes[0]["origin"])
    time = origin.pop("time")
    if len(processes) > 1:
        origin["resumed"] = [process["origin"] for process in processes[1:]]
    about = {**origin, "executor": processes[-1]["executor"], "copies": len(header["runs"]), "scale": header["scale"]}
    about["group"] = {name: [line[name] for line in epochs] for name in ("seconds", "wall")} | {"stacked": header["stacked"]}
    about["group"]["executors"] = [process["executor"] for process in processes]
    diverged = {number for line in epochs for number in line.get("diverged", ())}
    for number, own in enumerate(header["runs"]):
        config = header["common"] | own
        known = [(line["step"], *line["points"][number]) for line in epochs if line["points"][number] is not None]
        columns = dict(
            zip(("step", "train_loss", "test_loss", "test_accuracy"), map(list, zip(*known, strict=True)), strict=True)
        )
        if config["task"] == "autoencoder":
            _expect(set(columns.pop("test_accuracy")) == {None}, "no accuracy")
        zeta = config["output_damping"] != "inf"
        yield Record(
            trial_of_config(config),
            "diverged" if number in diverged else "finished",
            columns,
            epochs[-1]["seconds"] / epochs[-1]["step"] if epochs[-1]["step"] else None,
            about | ({} if zeta or config["curvature"] == "sampled" else {"curvature": config["curvature"]}),
            time,
            end["weights"][number] or "",
        )


def trial_record(path: Path) -> Record:
    """A trial's record."""
    old = json.loads(path.read_text(encoding="utf-8"))
    _expect(old["kind"] == "trial" and old["format"] == 1, "a trial")
    names = [name for name in (old["points"][0] if old["points"] else {"step": 0}) if name != "seconds"]
    columns = {name: [point[name] for point in old["points"]] for name in names}
    about = {name: old[name] for name in (*ORIGIN, *SHARED)}
    return Record(trial_of_old(old["trial"]), old["status"], columns, old["seconds_per_step"], about, old["time"])


def old_record(record: Record) -> dict[str, Any]:
    """The way back."""
    per_step = record.seconds_per_step
    points = [{**point, "seconds": None if per_step is None else point["step"] * per_step} for point in record.points]
    found = {"kind": "trial", "format": 1, "trial": old_of_trial(record.trial), "status": record.status}
    found |= {"seconds_per_step": per_step, "points": points, "time": record.time}
    return found | {name: record.about[name] for name in (*ORIGIN, *SHARED)}


def check_group(path: Path, store: Store) -> int:
    """Compare a group's file with what the store has of its runs; returns how many numbers were compared."""
    header, *rest = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    epochs, compared = [line for line in rest if "epoch" in line], 0
    (end,) = [line for line in rest if "end" in line]
    processes = [line for line in rest if "origin" in line]
    for number, own in enumerate(header["runs"]):
        config = header["common"] | own
        record = store.get(trial_of_config(config))
        _expect(record is not None, f"{path} run {number} is there")
        assert record is not None
        if record.digest != (end["weights"][number] or "") or record.about["group"]["wall"] != [e["wall"] for e in epochs]:
            _expect(duplicate(path, config), f"{path} run {number}: another group has it")
            continue
        known = config_of_trial(record.trial, record.about.get("curvature", "sampled"))
        _expect(known == config, f"{path} run {number}: {known} is {config}")
        mine = [[p["step"], p["train_loss"], p["test_loss"], p.get("test_accuracy")] for p in record.points]
        theirs = [[line["step"], *line["points"][number]] for line in epochs if line["points"][number] is not None]
        _expect(mine == theirs, f"{path} run {number}: the curve")
        _expect([line["epoch"] for line in epochs] == list(range(len(epochs))), "epochs count from 0")
        _expect(record.about["group"]["seconds"] == [line["seconds"] for line in epochs], f"{path}: seconds")
        _expect(record.about["group"]["stacked"] == header["stacked"] and record.about["scale"] == header["scale"], "how")
        _expect(record.about["group"]["executors"] == [process["executor"] for process in processes], "executors")
        origins = [{"time": record.time, **_origin_of(record.about)}, *record.about.get("resumed", [])]
        _expect(origins == [process["origin"] for process in processes], f"{path}: origin")
        gone = any(number in line.get("diverged", ()) for line in epochs)
        _expect((record.status == "diverged") == gone, f"{path} run {number}: status")
        compared += 4 * len(mine) + 2 * len(epochs)
    return compared


def _origin_of(about: Mapping[str, Any]) -> dict[str, Any]:
    return {name: about[name] for name in ("commit", "versions", "machine", "data", "tensor_cores")}


def duplicate(path: Path, config: Mapping[str, Any]) -> bool:
    """Whether another group of the folder has the same run, with the same curve."""
    curves = [
        record.curve
        for other in sorted(path.parent.glob("*.jsonl"))
        for record in group_records(other)
        if record.trial == trial_of_config(config)
    ]
    return len(curves) > 1 and all(curve == curves[0] for curve in curves)


def times_of(path: Path) -> dict[str, Any]:
    """Times of steps, with trials in their new form."""
    old = json.loads(path.read_text(encoding="utf-8"))
    methods = [m | ({"trial": trial_of_old(m["trial"]).as_json()} if "trial" in m else {}) for m in old["methods"]]
    return old | {"methods": methods}


def old_times(record: Mapping[str, Any]) -> dict[str, Any]:
    """The way back."""
    methods = record["methods"]
    back = [m | ({"trial": old_of_trial(Trial.from_json(m["trial"]))} if "trial" in m else {}) for m in methods]
    return {**record, "methods": back}


def about_of(folder: Path) -> dict[str, Any]:
    """about.json: what run.json or race.json said and the records do not."""
    if (folder / "race.json").exists():
        race = json.loads((folder / "race.json").read_text(encoding="utf-8"))
        reasons = {name: entry["reason"] for name, entry in race["methods"].items() if entry["reason"]}
        (network,) = {trial["model"] for entry in race.pop("methods").values() for trial in entry["tuning"]}
        return {"id": f"race/{race['workload']}", **race, "network": network, "reasons": reasons}
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    calls = [{"panel": name, **call} for name, panel in run.pop("panels", {}).items() for call in panel["calls"]]
    known = {name: value for name, value in run.items() if name not in ("format", "version", "calls", "kind")}
    return {"id": folder.parent.name, "scale": folder.name, **known, "calls": calls + run.get("calls", [])}


def check_about(folder: Path, about: Mapping[str, Any]) -> None:
    """Compare about.json with what it was made from."""
    if (folder / "race.json").exists():
        race = json.loads((folder / "race.json").read_text(encoding="utf-8"))
        for name, entry in race.pop("methods").items():
            _expect(about["reasons"].get(name, "") == entry["reason"], f"{folder}: {name}")
            _expect({trial["model"] for trial in entry["tuning"]} == {about["network"]}, f"{folder}: {name}")
        kept = {name: about[name] for name in ("id", "network", "reasons")}
        _expect({**race, **kept} == about, f"{folder}/race.json")
        return
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    calls = [{"panel": name, **call} for name, panel in run.pop("panels", {}).items() for call in panel["calls"]]
    _expect(about["calls"] == calls + run.pop("calls", []), f"{folder}: calls")
    for name, value in run.items():
        _expect(name in ("format", "version", "kind") or about[name] == value, f"{folder}/run.json: {name}")


def convert(source: Path, target: Path) -> tuple[int, int]:
    """One folder of a study at a scale; returns runs and numbers compared."""
    store = Store(target)
    groups, trials = (sorted((source / "records").glob(f"*.{kind}")) for kind in ("jsonl", "json"))
    trials = [path for path in trials if path.name != "store.json"]
    found: dict[str, Record] = {}
    for record in [one for path in groups for one in group_records(path)] + [trial_record(path) for path in trials]:
        found.setdefault(record.trial.key, record)
    with store.writing():
        store.add(*found.values())
        for path in sorted([*source.glob("times-*.json"), *source.glob("steps-*.json")]):
            store.add_times(path.stem.removeprefix("times-"), times_of(path))
        store.note(about_of(source))
    (target / ".lock").unlink()
    again = Store(target)
    compared = sum(check_group(path, again) for path in groups)
    for path in trials:
        old = json.loads(path.read_text(encoding="utf-8"))
        record = again.get(trial_of_old(old["trial"]))
        _expect(record is not None and plain(old_record(record)) == old, f"{path}")
        compared += sum(len(point) for point in old["points"])
    for name, record in again.times().items():
        path = source / (f"{name}.json" if name.startswith("steps-") else f"times-{name}.json")
        _expect(old_times(record) == json.loads(path.read_text(encoding="utf-8")), f"{path}")
    check_about(source, again.about)
    # The other way: nothing is in the new form that was not in the old one.
    old_keys = {record.trial.key for path in groups for record in group_records(path)}
    old_keys |= {trial_record(path).trial.key for path in trials}
    _expect({record.trial.key for record in again.records()} == old_keys, f"{target}: the same runs")
    return len(found), compared


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise SystemExit(f"this is not so: {what}")


def main(source: Path, target: Path) -> None:
    """All studies."""
    for folder in sorted(path.parent for name in ("run.json", "race.json") for path in source.glob(f"*/*/*/{name}")):
        runs, compared = convert(folder, target / folder.relative_to(source))
        print(f"{folder.relative_to(source)}: {runs} runs, {compared:,} numbers of curves compared, all equal")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
