"""The race: everyone is tuned alike, the target is AdamW's, nothing is left out, and a kill loses nothing."""

import io
import json
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from isaac_lab import executors, methods
from isaac_lab import method as known_methods
from isaac_lab.commands.race import race as command_of_the_race
from isaac_lab.data.files import DataError
from isaac_lab.lines import encode
from isaac_lab.progress import Display
from isaac_lab.record import Record, Store, StoreError
from isaac_lab.report import docs
from isaac_lab.report import race as report
from isaac_lab.report.summaries import Summary
from isaac_lab.stats import sample
from isaac_lab.studies.calls import Means
from isaac_lab.studies.race import race, runner, standings
from isaac_lab.studies.race.race import COURSES, SCALES, Course, Entrant, Range, Scale, arm, entrants
from isaac_lab.study import resolve
from isaac_lab.trial import Trial

TINY = Scale("smoke", small=True, trials=2, seeds=2, points=4, rounds=1, longest=60)
MLP = replace(COURSES["mnist-mlp"], lengths={"smoke": 8})
#: In this process: another takes longer to start than a tiny run to train.
HERE = Means(executors.Call(workers=1))
FEW = ("momentum", "adamw", "isaac-adamw")


def request(out: Path, **options: Any) -> runner.Request:
    return runner.Request(out, TINY, **{"methods": FEW, "means": HERE, **options})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny race that has been run."""
    (folder,) = runner.run([MLP], request(tmp_path_factory.mktemp("race")))
    report.write(Store(folder))
    return folder


def summary_of(folder: Path) -> dict[str, Any]:
    return standings.summarize(Store(folder))


class Told(Display):
    """What people would read."""

    def __init__(self) -> None:
        super().__init__(Console(file=io.StringIO()), None)
        self.lines: list[str] = []

    def say(self, what: str) -> None:
        self.lines.append(what)


def told_to(shown: Told) -> Means:
    return Means(replace(HERE.call, progress=shown), display=shown)


# The rules


def test_one_number_is_searched_evenly_from_end_to_end() -> None:
    assert [Range(0.01, 1).at(place) for (place,) in race.places(1, 5)] == [0.01, 0.0316, 0.1, 0.316, 1]
    assert race.places(1, 1) == [(0.5,)]


def test_two_numbers_are_searched_at_the_points_of_halton() -> None:
    expected = [(1 / 2, 1 / 3), (1 / 4, 2 / 3), (3 / 4, 1 / 9), (1 / 8, 4 / 9), (5 / 8, 7 / 9), (3 / 8, 2 / 9)]
    for found, point in zip(race.places(2, 6), expected, strict=True):
        assert found == pytest.approx(point)


@pytest.mark.parametrize("course", COURSES.values(), ids=str)
def test_everyone_has_as_many_trials_in_ranges_as_wide(course: Course) -> None:
    found = entrants(course)
    assert len({entrant.name for entrant in found}) == len(found)
    for entrant in found:
        space = entrant.space(course)
        assert space["learning_rate"].high / space["learning_rate"].low == pytest.approx(100)
        assert len(space) <= 2
        for scale in SCALES.values():
            points = race.places(len(space), scale.trials)
            trials = [entrant.trial(course, scale, point, steps=10) for point in points]
            assert len(set(trials)) == scale.trials
            assert all(space["learning_rate"].low <= trial.learning_rate <= space["learning_rate"].high for trial in trials)


def test_who_races() -> None:
    names = {entrant.name for entrant in entrants(COURSES["mnist-mlp"])}
    rivals = {"momentum", "adamw", "muon", "soap", "kfac"}
    assert names == rivals | {"isaac-momentum", "isaac-adamw", "isaac-muon"}
    text = {entrant.name for entrant in entrants(COURSES["char-gpt"])}
    assert text - names == {"isaac-adamw-running", "isaac-muon-running"}
    assert {entrant.name for entrant in entrants(COURSES["char-gpt"]) if entrant.ours} == {n for n in text if "isaac" in n}


def test_settings_become_a_trial() -> None:
    gpt = COURSES["char-gpt"]
    muon = Entrant("isaac-muon", "", "muon+isaac").trial(gpt, SCALES["quick"], (0.5, 1 / 3), steps=1000)
    assert (muon.learning_rate, muon.damping, muon.get("second_rate")) == (0.02, 0.1, 0.003)
    assert (muon.get("relative"), muon.get("weight_decay"), muon.schedule, muon.small) == (True, 0.1, "cosine", False)
    plain = Entrant("momentum", "", "momentum").trial(COURSES["cifar-resnet18"], SCALES["smoke"], (0.0,), steps=5)
    assert (plain.get("weight_decay"), plain.get("relative"), plain.damping) == (5e-4, None, math.inf)
    assert (plain.small, plain.points) == (True, 15)
    assert COURSES["cifar-resnet18"].length(SCALES["full"], epoch=500) == 7500
    assert MLP.length(TINY, epoch=500) == 8


def record(values: Sequence[float | None], *, status: str = "finished", trial: Trial | None = None) -> Record:
    curve = {"step": [10.0 * number for number in range(len(values))], "train_loss": values}
    return Record(trial or Trial("mnist-mlp", "sgd"), status, curve)


def chosen(values: Sequence[Sequence[float | None]]) -> int | None:
    """Which of the tuning runs with these curves a race would go on with."""
    entrant = next(one for one in entrants(MLP) if one.name == "momentum")
    own = arm(entrant, MLP, replace(TINY, trials=len(values)), steps=8, quantity="train_loss")
    tuning = list(own.search[0].candidates(None))
    kept = {trial: record(curve, trial=trial) for trial, curve in zip(tuning, values, strict=True)}
    best = resolve(own, kept).best
    return None if best is None else tuning.index(best)


def test_a_tuning_run_is_judged_by_its_last_three_measurements() -> None:
    assert race.ending(record([9, 3, 2, 1]), "train_loss") == 2
    assert race.ending(record([9, 1, None], status="diverged"), "train_loss") == math.inf
    assert race.ending(record([9, 1, None]), "train_loss") == math.inf
    assert chosen([[5, 5, 5], [3, 3, 3], [3, None]]) == 1
    assert chosen([[None]]) is None


def test_the_target_is_reached_on_the_line_between_two_measurements() -> None:
    assert standings.crossing(record([4, 2, 1, 3]), "train_loss", 1.5) == 15
    assert standings.crossing(record([4, 2, 1, 3]), "train_loss", 2) == 10
    assert standings.crossing(record([4, 2, 1, 3]), "train_loss", 5) == 0
    assert standings.crossing(record([4, 2, 1, 3]), "train_loss", 0.5) is None
    assert standings.crossing(record([4, None, 1]), "train_loss", 2) == 20


def test_a_sample_keeps_what_was_not_reached() -> None:
    found = sample([1.0, None, 3.0])
    assert found == {"mean": 2.0, "std": pytest.approx(math.sqrt(2)), "n": 2, "values": [1, None, 3]}
    assert sample([None]) == {"mean": None, "std": None, "n": 0, "values": [None]}
    assert sample([4.0, math.inf]) == {"mean": 4.0, "std": None, "n": 1, "values": [4.0, math.inf]}


# A race


def test_a_race_leaves_everything_behind(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()} | {"checkpoints"}
    assert names == {
        "about.json",
        "trials.jsonl",
        "times.jsonl",
        ".lock",
        "checkpoints",
        "numbers.csv",
        "figure.png",
        "figure.svg",
    }
    summary = summary_of(finished)
    assert (summary["workload"], summary["scale"], summary["mode"]) == ("mnist-mlp", "smoke", "eager")
    assert (summary["trials"], summary["seeds"], summary["steps"], summary["batch"]) == (2, 2, 8, 60)
    found = {one["name"]: one for one in summary["methods"]}
    assert set(found) == {entrant.name for entrant in entrants(MLP)}
    for name, one in found.items():
        assert one["n"] == (2 if name in FEW else 0)
        assert (one["reason"] is None) == (name in FEW)
    ours = found["isaac-adamw"]
    assert ours["ours"]
    assert set(ours["settings"]) == {"learning_rate", "damping"}
    assert [len(curve["loss"]) for curve in ours["curves"]] == [5, 5]
    assert [curve["seed"] for curve in ours["curves"]] == [1, 2]
    assert len(ours["tuning"]) == 2
    assert ours["seconds_per_step"] > 0
    assert ours["mode"] == "eager"


def test_the_target_is_where_adamw_ends(finished: Path) -> None:
    summary = summary_of(finished)
    adamw = next(one for one in summary["methods"] if one["name"] == "adamw")
    assert summary["target"] == pytest.approx(max(adamw["final"]["values"]), rel=1e-5)
    assert summary["target_by"].startswith(f"AdamW, learning rate {adamw['settings']['learning_rate']:g}, at ")


def test_the_target_does_not_depend_on_the_others(finished: Path) -> None:
    class Worse(Store):
        def get(self, trial: Trial) -> Record | None:
            found = super().get(trial)
            if found and trial.method == "momentum":
                found = replace(
                    found, curve={**found.curve, "train_loss": [1e-6 * value for value in found.column("train_loss")]}
                )
            return found

        def times(self) -> dict[str, dict[str, Any]]:
            return {}

    summary = standings.summarize(Worse(finished))
    assert summary["target"] == summary_of(finished)["target"]
    other = next(one for one in summary["methods"] if one["name"] == "momentum")
    assert other["steps_to_target"]["values"] == [0, 0]
    assert other["seconds_to_target"]["values"] == [None, None]  # nobody has timed it


def test_who_would_take_too_long_does_not_race_but_is_named(tmp_path: Path) -> None:
    (folder,) = runner.run([MLP], replace(request(tmp_path), scale=replace(TINY, longest=1e-9)))
    found = {one["name"]: one for one in summary_of(folder)["methods"]}
    assert [name for name, one in found.items() if one["n"]] == ["adamw"], "who sets the target always races"
    assert found["momentum"]["reason"].startswith("a step takes ")
    assert "a run of 8 steps" in report.table(summary_of(folder)).markdown()


def test_the_page_can_show_it(finished: Path) -> None:
    results = finished.parent.parent / "results"
    shutil.copytree(finished, results / "race" / "mnist-mlp" / "smoke")
    assert len(report.section(report.summaries(results / "race", "results/race")).blocks) > 3


def test_the_table_has_everyone_and_every_range(finished: Path) -> None:
    summary = summary_of(finished)
    text = report.table(summary).markdown() + "\n".join(report.rules(summary))
    for one in summary["methods"]:
        assert one["label"] in text
    assert "**AdamW + ISAAC**" in text
    assert "not run: left out by --methods" in text
    assert "AdamW + ISAAC: η 0.0001 to 0.01, λ 0.01 to 10" in text
    rows = (finished / "numbers.csv").read_text(encoding="utf-8").splitlines()
    assert len(rows) == 1 + 3 * 4 * 5
    # Two tuning runs and two seeds of each.
    assert rows[0].startswith("workload,method,damping,learning_rate,seed,steps,status,step,seconds,train_loss")


def test_the_edge_of_a_range_is_marked(finished: Path) -> None:
    # Of two learning rates each is at an edge.
    for one in summary_of(finished)["methods"]:
        assert one["edge"] == bool(one["n"])
    assert "(edge)" in report.table(summary_of(finished)).markdown()


def test_a_race_that_has_been_run_trains_nothing(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no(*args: Any, **options: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(executors, "train", no)
    monkeypatch.setattr(runner.times, "measure", no)
    before, records = summary_of(finished), (finished / "trials.jsonl").read_bytes()
    runner.run([MLP], request(finished.parent.parent))
    assert summary_of(finished) == before
    # A call for fewer methods does not forget the others.
    runner.run([MLP], request(finished.parent.parent, methods=("momentum",)))
    assert summary_of(finished) == before
    # Nor does one on a machine that lacks a method's package.
    with monkeypatch.context() as patch:
        patch.setattr(methods, "unable", lambda trial, workload: "not here" if "+" in trial.method else "")
        runner.run([MLP], request(finished.parent.parent))
    assert summary_of(finished) == before
    assert (finished / "trials.jsonl").read_bytes() == records


def test_times_can_be_left_to_a_later_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder,) = runner.run([MLP], request(tmp_path, timed=False))
    assert Store(folder).times() == {}
    untimed = summary_of(folder)
    assert untimed["methods"][0]["seconds_per_step"] is None
    shown = report.table(untimed)
    place = shown.columns.index("Seconds to target")
    assert {row.cells[place] for row in shown.rows if not row.cells[1].startswith("not run")} == {"–"}
    monkeypatch.setattr(runner.times, "start", lambda *given: pytest.fail("everyone has run"))
    runner.run([MLP], request(tmp_path))
    assert list(Store(folder).times()) == ["eager"]
    assert summary_of(folder)["methods"][0]["seconds_per_step"] > 0


def test_drawing_again_gives_the_same_files(finished: Path) -> None:
    names = ("numbers.csv", "figure.png", "figure.svg")
    before = [(finished / name).read_bytes() for name in names]
    assert runner.folder_of(MLP, request(finished.parent.parent)) == finished
    report.write(Store(finished))
    assert [(finished / name).read_bytes() for name in names] == before


def test_a_killed_race_goes_on(tmp_path: Path) -> None:
    class Dying(Told):
        def say(self, what: str) -> None:
            super().say(what)
            if what.startswith("  2 of 4"):
                raise KeyboardInterrupt

    shown = Dying()
    with pytest.raises(KeyboardInterrupt):
        runner.run([MLP], request(tmp_path, methods=("momentum",), means=told_to(shown)))
    folder = tmp_path / "mnist-mlp/smoke"
    assert len(Store(folder).records()) == 2
    assert any("4 runs are due now" in line for line in shown.lines)
    half = summary_of(folder)
    assert half["target"] is None
    assert report.rules(half)[0].startswith("Target: training loss none (AdamW, which has no finished runs).")
    # What a killed call trained is written down.
    assert [call["runs"] for call in Store(folder).about["calls"]] == [2]
    again = Told()
    runner.run([MLP], request(tmp_path, methods=("momentum",), means=told_to(again)))
    # Two of four trials, and two seeds of each method, in rounds of what is due.
    assert sum(int(line.split(": ")[1].split()[0]) for line in again.lines if "to go" in line) == 2 + 4
    assert summary_of(folder)["target"] is not None


def test_records_that_are_there_are_not_mixed_with_others(finished: Path) -> None:
    out = finished.parent.parent
    with pytest.raises(runner.RaceError, match="has records already"):
        runner.run([MLP], request(out, resume=False))
    about = finished / "about.json"
    before = about.read_text(encoding="utf-8")
    about.write_text(before.replace('"device": "cpu"', '"device": "cuda"'), encoding="utf-8")
    try:
        with pytest.raises(runner.RaceError, match="has a race on cuda"):
            runner.run([MLP], request(out))
        about.write_text("{", encoding="utf-8")
        with pytest.raises(StoreError, match=r"cannot read .*about\.json"):
            summary_of(finished)
    finally:
        about.write_text(before, encoding="utf-8")


def test_who_cannot_start_is_listed_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Any:
        raise NotImplementedError("inputs of three dimensions\nand more")

    prepare = methods.prepare
    monkeypatch.setattr(methods, "prepare", lambda t, *rest: refuse() if t.method == "soap" else prepare(t, *rest))
    monkeypatch.setattr(known_methods, "missing", lambda t: "it is not installed" if t.method == "muon" else "")
    (folder,) = runner.run([MLP], request(tmp_path, methods=("soap", "muon")))
    found = {one["name"]: one["reason"] for one in summary_of(folder)["methods"]}
    assert found["soap"] == "NotImplementedError: inputs of three dimensions"
    assert found["muon"] == "it is not installed"
    assert found["adamw"] is None


def test_an_error_of_ours_is_not_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(methods.isaac, "attach", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        runner.run([MLP], request(tmp_path))


def test_who_always_diverges_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hot = replace(MLP, rates={**MLP.rates, "momentum": Range(1e5, 1e7)})
    monkeypatch.setattr(standings, "COURSES", {"mnist-mlp": hot})
    (folder,) = runner.run([hot], request(tmp_path, methods=("momentum",)))
    hottest = next(one for one in summary_of(folder)["methods"] if one["name"] == "momentum")
    assert (hottest["n"], hottest["reason"], hottest["settings"]) == (0, "diverged in every tuning trial", None)
    assert [one["diverged"] for one in hottest["tuning"]] == [True] * 2
    assert [one["value"] for one in hottest["tuning"]] == [None] * 2


def test_missing_data_leaves_out_one_workload_of_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_data(trial: Trial, **options: Any) -> Any:
        raise DataError(f"{trial.workload} is not there")

    monkeypatch.setattr(runner, "load", no_data)
    with pytest.raises(DataError):
        runner.run([MLP], request(tmp_path))
    shown = Told()
    with pytest.raises(runner.RaceError, match="none of the workloads"):
        runner.run([MLP, COURSES["char-gpt"]], request(tmp_path, means=told_to(shown)))
    assert shown.lines == ["mnist-mlp is left out: mnist-mlp is not there", "char-gpt is left out: char-gpt is not there"]


def test_several_workloads_do_not_share_their_folders(tmp_path: Path) -> None:
    other = replace(COURSES["mnist-autoencoder"], lengths={"smoke": 8})
    folders = runner.run([MLP, other], request(tmp_path, methods=("momentum",)))
    assert folders == [tmp_path / "mnist-mlp/smoke", tmp_path / "mnist-autoencoder/smoke"]
    for folder in folders:
        records = Store(folder).records()
        assert len(records) == 8
        assert {record.trial.workload for record in records} == {folder.parent.name}
    assert summary_of(folders[1])["metric_titles"] == {}


# The command


def command(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(command_of_the_race)
    return CliRunner().invoke(app, arguments)


def test_the_list_has_every_workload() -> None:
    found = command("list")
    assert found.exit_code == 0
    for name in COURSES:
        assert name in found.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["imagenet"], ["imagenet", "mnist-mlp"]),
        (["mnist-mlp", "--methods", "lion"], ["lion", "isaac-adamw"]),
        (["mnist-mlp", "--draw-only", "--out", "nowhere-at-all"], ["--out", "about.json"]),
        (["mnist-mlp", "--scale", "huge"], ["huge"]),
    ],
)
def test_a_bad_request_is_refused_with_a_way_out(arguments: list[str], words: list[str]) -> None:
    found = command(*arguments)
    assert found.exit_code == 2
    for word in words:
        assert word in found.output


def test_drawing_by_command_shows_the_table(finished: Path) -> None:
    found = command("mnist-mlp", "--draw-only", "--out", str(finished.parent.parent))
    assert found.exit_code == 0, found.output
    for words in ("AdamW + ISAAC", "did not run: left out by --methods", "Target: training loss", "numbers.csv"):
        assert words in found.output


# Pages


def headline(races: Path) -> str:
    return report.blocks(races, races)["race"]().rstrip()


def test_a_page_is_not_filled_without_races(tmp_path: Path) -> None:
    with pytest.raises(docs.DocsError, match="no race of scale full or quick"):
        headline(tmp_path)


def at_scale(finished: Path, races: Path, scale: str) -> Path:
    """The race, as if it had been run at another scale."""
    folder = races / "mnist-mlp" / scale
    shutil.copytree(finished, folder)
    about = (folder / "about.json").read_text(encoding="utf-8").replace('"scale": "smoke"', f'"scale": "{scale}"')
    (folder / "about.json").write_text(about, encoding="utf-8")
    path = folder / "trials.jsonl"
    small = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for line in small:
        line.pop("check")
        if "trial" in line:
            line["trial"].pop("small")
    path.write_bytes(b"".join(map(encode, small)))
    return folder


def test_the_headline_has_every_scale_but_smoke_the_largest_first(finished: Path, tmp_path: Path) -> None:
    for scale in ("smoke", "quick", "full"):
        shutil.copytree(finished, tmp_path / "mnist-mlp" / scale) if scale == "smoke" else at_scale(finished, tmp_path, scale)
        expected = {"smoke": [], "quick": ["quick"], "full": ["full", "quick"]}[scale]
        if expected:
            assert re.findall(r"\((\w+), n = 2\)", headline(tmp_path)) == expected
        else:
            with pytest.raises(docs.DocsError, match="no race of scale"):
                headline(tmp_path)


def test_the_headline_says_what_is_good_and_what_is_bad(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = summary_of(finished)
    ends: dict[str, list[float | None]] = {"adamw": [8.0, 8.1], "isaac-adamw": [2.0, 2.1], "momentum": [1.0, 1.0]}
    for one in summary["methods"]:
        if one["n"]:
            one["final"] = sample(ends[one["name"]])
    monkeypatch.setattr(report, "summaries", lambda races: [Summary("a", "quick", summary)])
    table = headline(tmp_path)
    assert "| AdamW | 8.05 | 2.05 | 0.00014 | SGD + momentum |" in table
    ends["isaac-adamw"] = [2.0, 14.0]
    for one in summary["methods"]:
        if one["n"]:
            one["final"] = sample(ends[one["name"]])
    assert "| AdamW | 8.05 | 8 | 0.99, no difference shown | SGD + momentum |" in headline(tmp_path)
    ends["isaac-adamw"] = [2.0, None]
    for one in summary["methods"]:
        if one["n"]:
            one["final"] = sample(ends[one["name"]])
    assert "| AdamW | 8.05 | 2 | – | SGD + momentum |" in headline(tmp_path)


def test_a_page_is_filled_where_it_has_marks(finished: Path, tmp_path: Path) -> None:
    races = tmp_path / "results"
    at_scale(finished, races, "quick")
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- race -->\nold\n<!-- /race -->\nb\n<!-- races -->\n<!-- /races -->\nc\n", encoding="utf-8")
    for _ in range(2):
        found = command("mnist-mlp", "--draw-only", "--scale", "quick", "--out", str(races), "--fill", str(page))
        assert found.exit_code == 0, found.output
        text = page.read_text(encoding="utf-8")
        assert text.startswith(f"a\n<!-- race -->\n{headline(races)}\n<!-- /race -->\nb\n<!-- races -->\n## ")
        assert text.endswith("\n<!-- /races -->\nc\n")
        assert text.count("](figures/race-mnist-mlp-quick.svg)") == 1
    drawn = tmp_path / "figures" / "race-mnist-mlp-quick.svg"
    assert drawn.read_bytes() == (races / "mnist-mlp/quick/figure.svg").read_bytes()
    page.write_text("no marks\n", encoding="utf-8")
    found = command("mnist-mlp", "--draw-only", "--scale", "quick", "--out", str(races), "--fill", str(page))
    assert found.exit_code == 2
    assert "has no <!-- race -->" in " ".join(found.output.replace("│", " ").split())
    page.write_text("<!-- race -->\nold\n<!-- /race -->\n", encoding="utf-8")
    found = command("mnist-mlp", "--draw-only", "--out", str(finished.parent.parent), "--fill", str(page))
    assert found.exit_code == 2
    assert "has no race of scale full or quick" in " ".join(found.output.replace("│", " ").split())
    assert "old" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["docs/race.md"])
def test_pages_show_the_committed_races(name: str, tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    copy = tmp_path / Path(name).name
    shutil.copyfile(root / name, copy)
    docs.fill(copy, report.blocks(root / "results" / "race", tmp_path / "figures"))
    assert copy.read_text(encoding="utf-8") == (root / name).read_text(encoding="utf-8")
    pictures = list((tmp_path / "figures").glob("*.svg"))
    assert bool(pictures) == ("<!-- races -->" in copy.read_text(encoding="utf-8"))
    for picture in pictures:
        assert picture.read_bytes() == (root / "docs" / "figures" / picture.name).read_bytes()
