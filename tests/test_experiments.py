"""The paper's experiments: which runs they are, how learning rates are chosen, what is drawn, and what bad input does."""

import csv
import json
import math
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

import fabricate
from isaac_lab.cli import app as whole
from isaac_lab.commands import reproduce as command
from isaac_lab.commands.reproduce import reproduce
from isaac_lab.networks import alike
from isaac_lab.record import Store
from isaac_lab.report import curves, paper
from isaac_lab.report.views import setting
from isaac_lab.studies.paper import EXPERIMENTS, recipe
from isaac_lab.studies.paper.folder import view
from isaac_lab.studies.paper.grids import losses
from isaac_lab.studies.paper.recipe import DECADES, RATES, SCALES, Experiment, Panel
from isaac_lab.study import resolve, settle
from isaac_lab.trial import Trial, TrialError
from isaac_lab.workload import load

IDS = ["fig1", "fig2", "fig3", "fig4", "fig5", "tab1", "fig6", "tab2", "figA1", "figA2", "figA3"]
PNG = b"\x89PNG"

app = typer.Typer()
app.command()(reproduce)


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def panel(identity: str, name: str, scale: str = "paper") -> Panel:
    return next(panel for panel in EXPERIMENTS[identity].panels(SCALES[scale]) if panel.name == name)


def sector(cell: Trial) -> str:
    """Which of the paper's three methods."""
    if math.isfinite(cell.output_damping):
        return "zeta"
    return "gradient" if math.isinf(cell.damping) else "zeta_star"


# Recipes


def test_there_is_one_experiment_for_each_figure_and_table() -> None:
    assert list(EXPERIMENTS) == IDS


def test_a_grid_is_13_by_14_cells_and_the_gradient() -> None:
    cells = panel("fig1", "b").cells
    assert [sum(sector(cell) == name for cell in cells) for name in ("zeta", "zeta_star", "gradient")] == [169, 13, 1]
    assert {cell.damping for cell in cells} == {*DECADES, math.inf}
    assert {cell.output_damping for cell in cells} == {*DECADES, math.inf}
    assert DECADES[0] == 1e-6
    assert DECADES[-1] == 1e6


def test_the_panels_of_figure_1_are_the_papers() -> None:
    found = [(p.cells[0].get("width", 400), p.cells[-1].method) for p in EXPERIMENTS["fig1"].panels(SCALES["paper"])]
    assert found == [(100, "sgd"), (400, "sgd"), (400, "momentum"), (1600, "sgd")]
    cell = panel("fig1", "b").cells[0]
    assert (cell.workload, cell.variant, cell.steps, cell.points) == ("mnist-mlp", (), 40_000, 40)


def test_figure_3_and_4_change_the_task_and_the_optimizer() -> None:
    assert [panel("fig3", name).cells[0].workload for name in "ab"] == ["mnist-autoencoder", "fashion-autoencoder"]
    assert {cell.method.partition("+")[0] for cell in panel("fig4", "a").cells} == {"adam"}


def test_figure_a3_is_figure_1_with_the_empirical_fisher() -> None:
    changed = [cell.having(curvature=None) for cell in panel("figA3", "c").cells]
    assert changed == list(panel("fig1", "c").cells)
    # Without ζ the curvature makes no difference.
    assert {cell.get("curvature") for cell in panel("figA3", "c").cells if sector(cell) == "zeta"} == {"empirical"}
    assert {cell.get("curvature") for cell in panel("figA3", "c").cells if sector(cell) != "zeta"} == {None}


def test_figure_5_selects_the_layers_that_the_paper_names() -> None:
    groups = {group.name: group for group in panel("fig5", "a").groups}
    assert {name: group.cells[0].get("layers", ()) for name, group in groups.items()} == {
        "none": (),
        "all": (),
        "1": (1,),
        "5": (5,),
        "1-3": (1, 2, 3),
        "3-5": (3, 4, 5),
        "odd": (1, 3, 5),
        "even": (2, 4),
    }
    assert sector(groups["none"].cells[0]) == "gradient"
    assert sector(groups["all"].cells[0]) == "zeta_star"
    assert [cell.seed for cell in groups["odd"].cells] == [0, 1, 2]


def test_figure_a2_uses_the_records_of_figure_5_and_figure_a1_those_of_figure_2() -> None:
    assert panel("figA2", "a") == panel("fig5", "a")
    assert panel("figA1", "a") == panel("fig2", "a")
    assert {cell.get("batch", 60) for cell in panel("figA1", "c").cells} == {60, 600}


def test_kfac_takes_the_learning_rate_of_zeta() -> None:
    arms = recipe.arms(panel("fig2", "a"), SCALES["paper"])
    assert arms["kfac 0.1"].search[0].candidates(None) == arms["zeta 0.1"].search[0].candidates(None)
    best = arms["zeta 0.1"].search[0].candidates(None)[3]
    (own,) = arms["kfac 0.1"].finals(best)
    assert (own.method, own.damping, own.learning_rate) == ("kfac", 0.1, best.learning_rate)


@pytest.mark.parametrize("identity", IDS)
def test_a_smoke_run_needs_no_data_and_small_networks(identity: str) -> None:
    for own in EXPERIMENTS[identity].panels(SCALES["smoke"]):
        assert all(cell.small for cell in own.cells)
        assert max(cell.get("width", 50) for cell in own.cells) <= 200


@pytest.mark.parametrize("scale", ["smoke", "quick"])
@pytest.mark.parametrize("identity", IDS)
def test_trials_are_short_runs_of_the_groups_own_cells(identity: str, scale: str) -> None:
    for own in EXPERIMENTS[identity].panels(SCALES[scale]):
        for group in own.groups:
            if group.like:
                continue
            found = recipe.trials(group, SCALES[scale])
            assert {trial.points for trial in found} == {SCALES[scale].tune_epochs}
            autoencoder = {trial.workload.endswith("autoencoder") for trial in found} == {True}
            larger = autoencoder and not any(trial.method.startswith("adam") for trial in found)
            expected = {*SCALES[scale].rates, *(SCALES[scale].larger_rates if larger else ())}
            assert {trial.learning_rate for trial in found} == expected
            cells = {recipe.lasting(cell.having(learning_rate=1.0), 1) for cell in group.cells}
            assert {recipe.lasting(trial.having(learning_rate=1.0), 1) for trial in found} <= cells


def test_the_learning_rates_are_the_papers() -> None:
    assert RATES == (1, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
    assert SCALES["quick"].rates == SCALES["paper"].rates == RATES


# Tuning


def chosen(losses: dict[float, float | None], *, gone: tuple[float, ...] = ()) -> float | None:
    """The learning rate that the gradient of Figure 4 would have after trials that end so."""
    arm = recipe.arms(panel("fig4", "a", "quick"), SCALES["quick"])["gradient"]
    memory = fabricate.Memory(lambda trial: 0.1)
    for trial in arm.search[0].candidates(None):
        status = "diverged" if trial.learning_rate in gone else "finished"
        memory.records[trial] = fabricate.record(trial, [2.3, losses.get(trial.learning_rate, 9.0)], status=status)
    best = resolve(arm, memory).best
    return None if best is None else best.learning_rate


def test_the_rate_with_the_lowest_final_training_loss_is_chosen() -> None:
    assert chosen({1.0: 0.5, 0.1: 0.2, 0.01: 0.3}) == 0.1


def test_of_equal_rates_the_larger_one_is_chosen() -> None:
    assert chosen({0.01: 0.2, 0.1: 0.2}) == 0.1


def test_a_diverged_run_is_never_chosen() -> None:
    # It went lowest before it diverged.
    assert chosen({1.0: 0.001, 0.1: 1.0}, gone=(1.0,)) == 0.1
    assert chosen({1.0: None, 0.1: 1.0}) == 0.1
    assert chosen({}, gone=RATES) is None
    assert chosen(dict.fromkeys(RATES, None)) is None


def outcome(own: Panel, scale: str, loss: fabricate.Losses) -> recipe.Outcome:
    found = recipe.outcome(own, SCALES[scale], fabricate.settled(own, scale, loss))
    assert found is not None
    return found


# Tuning at paper scale


def misleading(trial: Trial) -> float:
    """Short runs like the rate 1 best; whole ones diverge with it, and are the better the nearer they are to 0.03."""
    if trial.steps < 36_000:
        return 0.1 + abs(math.log10(trial.learning_rate))
    return math.inf if trial.learning_rate >= 1 else 0.1 + abs(math.log10(trial.learning_rate / 0.03))


def rounds_of(own: Panel, loss: fabricate.Losses) -> dict[str, list[list[Trial]]]:
    memory = fabricate.settled(own, "paper", loss)
    arms = recipe.arms(own, SCALES["paper"])
    return {group.name: [list(tried) for tried in resolve(arms[group.name], memory).tried] for group in own.groups}


@pytest.mark.parametrize("identity", ["fig1", "fig2", "fig3", "fig4", "fig5", "figA1", "figA3"])
def test_every_group_of_a_panel_has_as_many_runs_to_choose_from_and_shows_none_of_them(identity: str) -> None:
    for own in EXPERIMENTS[identity].panels(SCALES["paper"]):
        found = rounds_of(own, misleading)
        assert len({tuple(len(set(tried)) for tried in rounds) for rounds in found.values()}) == 1
        tried = {trial for rounds in found.values() for round_ in rounds for trial in round_}
        assert {trial.split for trial in tried} == {"validation"}
        assert {cell.split for cell in own.cells} == {"test"}
        assert not {trial.seed for trial in tried} & {cell.seed for cell in own.cells}


def test_short_runs_do_not_decide() -> None:
    own = outcome(panel("fig1", "b"), "paper", misleading)
    assert own.rates == dict.fromkeys(("zeta", "zeta_star", "gradient"), 0.03)
    for tried in own.tried.values():
        # It lies between rates that were run whole.
        assert {0.1, 0.03, 0.01} <= tried.keys()


def test_rounds_of_a_sector_keep_the_best_rates_in_their_best_places() -> None:
    def loss(trial: Trial) -> float:
        # Nine places: the larger the damping, the better.
        return 0.1 + abs(math.log10(trial.learning_rate / 0.1)) + 0.01 / (1 + min(trial.damping, 1e9))

    rounds = rounds_of(panel("fig1", "b"), loss)["zeta_star"]
    # The last two have the best again, and two rates in two places.
    assert [len(tried) for tried in rounds] == [63, 12, 4, 5, 5]
    assert [{trial.steps for trial in tried} for tried in rounds] == [{1800}, {9000}, {36_000}, {36_000}, {36_000}]
    assert {trial.learning_rate for trial in rounds[0]} == set(RATES)
    assert {trial.damping for trial in rounds[1]} == {1e2, 1e3, 1e4}
    assert {(trial.learning_rate, trial.damping) for trial in rounds[2]} == {(r, d) for r in (0.1, 0.3) for d in (1e3, 1e4)}
    assert {trial.learning_rate for trial in rounds[3]} == {0.1, 0.03, 0.01}


def test_a_best_rate_at_the_end_of_the_list_makes_it_longer() -> None:
    own = outcome(panel("fig4", "a"), "paper", lambda trial: 0.1 + abs(math.log10(trial.learning_rate / 30)))
    assert set(own.rates.values()) == {30.0}
    assert all(max(tried) == 100.0 for tried in own.tried.values())
    own = outcome(panel("fig4", "a"), "paper", lambda trial: 0.1 + abs(math.log10(trial.learning_rate / 0.0001)))
    assert set(own.rates.values()) == {0.0001}
    assert all(min(tried) < 0.0001 for tried in own.tried.values())


def test_a_group_that_always_diverges_has_no_runs_at_paper_scale() -> None:
    own = outcome(panel("fig1", "a"), "paper", lambda trial: math.inf if sector(trial) == "zeta_star" else 0.1)
    assert own.rates["zeta_star"] is None
    assert own.records["zeta_star"] == ()


def test_a_cell_that_diverges_is_run_with_a_smaller_rate_and_that_is_said(tmp_path: Path) -> None:
    def loss(trial: Trial) -> float:
        # Cells of ζ with little damping need a tenth of the rate that suits the others; one never ends.
        if (trial.damping, trial.output_damping) == (1e-6, 1e-6):
            return math.inf
        if sector(trial) == "zeta" and trial.damping < 1e-4 and trial.learning_rate > 0.01:
            return math.inf
        return 0.1 + abs(math.log10(trial.learning_rate / 0.1))

    memory = fabricate.settled(panel("fig4", "a"), "paper", loss)
    store = Store(tmp_path / "fig4" / "paper")
    with store.writing():
        store.add(*memory.records.values())
    known = view(EXPERIMENTS["fig4"], tmp_path, SCALES["paper"])
    (own,) = known.outcomes
    assert own.rates["zeta"] == 0.1
    rates = {(r.trial.damping, r.trial.output_damping): r.trial.learning_rate for r in own.records["zeta"]}
    assert (rates[1.0, 1.0], rates[1e-5, 1e-6], rates[1e-6, 1e-6]) == (0.1, 0.01, 0.001)
    assert own.smaller == 2 * 13
    assert [record.trial.damping for record in own.all() if not record.finished] == [1e-6]
    assert "26 with a smaller rate, where the chosen one diverges" in setting(known)
    assert len([cell for cell in losses(own).values() if math.isnan(cell)]) == 1


def test_a_rate_that_is_set_is_not_searched_beside() -> None:
    (own,) = recipe.selected([panel("fig4", "a")], ["learning_rate=0.2"])
    arms = recipe.arms(own, SCALES["paper"])
    assert all({t.learning_rate for t in arm.search[0].candidates(None)} == {0.2} for arm in arms.values())
    assert {len(arm.search) for arm in arms.values()} == {1}


def test_a_panel_that_was_run_with_short_trials_counts_until_it_is_run_again(tmp_path: Path) -> None:
    then, store = replace(SCALES["paper"], halving=False), Store(tmp_path / "fig4" / "paper")
    (own,) = EXPERIMENTS["fig4"].panels(then)
    memory = fabricate.Memory(lambda trial: 0.1 + abs(math.log10(trial.learning_rate / 0.3)))
    settle(list(recipe.arms(own, then).values()), memory, memory.train)
    with store.writing():
        store.add(*memory.records.values())
    (before,) = view(EXPERIMENTS["fig4"], tmp_path, SCALES["paper"]).outcomes
    assert set(before.rates.values()) == {0.3}
    again = fabricate.settled(panel("fig4", "a"), "paper", lambda trial: 0.1 + abs(math.log10(trial.learning_rate / 0.01)))
    with store.writing():
        store.add(*again.records.values())
    (after,) = view(EXPERIMENTS["fig4"], tmp_path, SCALES["paper"]).outcomes
    assert set(after.rates.values()) == {0.01}


def test_validation_runs_of_the_auto_encoder_see_nine_tenths() -> None:
    whole = Trial("mnist-autoencoder", "sgd", small=True)
    cut = replace(whole, split="validation")
    assert recipe.lasting(cut, 2).steps == 2 * load(cut, device="cpu").steps < recipe.lasting(whole, 2).steps
    assert alike(cut) != alike(whole)


def test_one_good_cell_is_enough_for_a_sectors_rate() -> None:
    def loss(trial: Trial) -> float:
        if trial.learning_rate == 1.0:
            return 0.01 if trial.damping == 1e-6 else math.inf
        return 0.1

    own = outcome(panel("fig4", "a", "quick"), "quick", loss)
    assert own.rates == {"zeta": 1.0, "zeta_star": 1.0, "gradient": 0.3}
    assert sum(math.isnan(value) for value in losses(own).values()) == 7 * 8 - 8


def test_a_sector_in_which_every_rate_diverges_has_no_runs() -> None:
    own = outcome(panel("fig4", "a", "quick"), "quick", lambda trial: math.inf if sector(trial) == "zeta" else 0.1)
    assert own.rates["zeta"] is None
    assert own.records["zeta"] == ()
    assert math.isnan(losses(own)[1.0, 1.0])
    assert losses(own)[1.0, math.inf] == pytest.approx(0.1)


def test_a_panel_with_a_missing_run_has_no_outcome() -> None:
    own = panel("fig4", "a", "quick")
    memory = fabricate.settled(own, "quick", lambda trial: 0.1)
    del memory.records[list(memory.records)[-1]]
    assert recipe.outcome(own, SCALES["quick"], memory) is None


def test_settings_change_every_run_but_not_what_is_compared() -> None:
    (changed,) = recipe.selected([panel("fig1", "b")], ["epochs=3", "batch=30"])
    assert {(cell.points, cell.get("batch"), cell.steps) for cell in changed.cells} == {(3, 30, 6000)}
    with pytest.raises(TrialError, match=r"damping=1: panel b of fig1 compares runs that differ in this"):
        recipe.selected([panel("fig1", "b")], ["damping=1"])
    with pytest.raises(TrialError, match="no setting 'lambda'; there are epochs, batch"):
        recipe.selected([panel("fig1", "b")], ["lambda=1"])
    for wrong in ("epochs=0", "epochs=x", "batch=1.5", "epochs"):
        with pytest.raises(TrialError, match=r"must be|a setting is"):
            recipe.selected([panel("fig1", "b")], [wrong])


# Pictures


@pytest.mark.parametrize("identity", ["fig1", "fig2", "fig3", "fig4", "fig5", "figA1", "figA2", "figA3"])
def test_every_figure_is_drawn_from_records_alone(tmp_path: Path, identity: str) -> None:
    def loss(trial: Trial) -> float:
        whole = trial.points == SCALES["smoke"].epochs
        return math.inf if whole and (trial.damping == 1e-2 or trial.seed == 1) else 0.1 / (1 + trial.learning_rate)

    for home in {own.home for own in EXPERIMENTS[identity].panels(SCALES["smoke"])}:
        fabricate.experiment(tmp_path, home, "smoke", loss)
    result = invoke(identity, "--draw-only", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    folder = tmp_path / identity / "smoke"
    assert (folder / "figure.png").read_bytes().startswith(PNG)
    picture = (folder / "figure.svg").read_text(encoding="utf-8")
    rows = table(folder / "numbers.csv")
    assert {"finished", "diverged"} <= {row["status"] for row in rows}
    invoke(identity, "--draw-only", "--out", tmp_path)
    assert (folder / "figure.svg").read_text(encoding="utf-8") == picture


# The command


def test_figure_5_runs_from_nothing_and_again_without_training(tmp_path: Path) -> None:
    arguments = ("fig5", "--out", tmp_path, "--device", "cpu", "--set", "epochs=1", "--seeds", "1")
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    folder = tmp_path / "fig5" / "smoke"
    assert all((folder / name).exists() for name in ("figure.png", "figure.svg", "numbers.csv", "about.json", "times.jsonl"))
    assert "digits" in (folder / "figure.svg").read_text(encoding="utf-8") or "digits" in result.output
    about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    assert (about["settings"], about["seeds"]) == (["epochs=1"], 1)
    (call,) = about["calls"]
    assert call["runs"] == 24
    assert str(tmp_path) not in (folder / "about.json").read_text(encoding="utf-8")
    numbers = (folder / "numbers.csv").read_bytes()
    again = invoke(*arguments)
    assert again.exit_code == 0, again.output
    assert (folder / "numbers.csv").read_bytes() == numbers
    assert json.loads((folder / "about.json").read_text(encoding="utf-8")) == about
    beside = invoke("figA2", *arguments[1:])
    assert beside.exit_code == 0, beside.output
    assert (tmp_path / "figA2" / "smoke" / "figure.png").exists()
    assert not (tmp_path / "figA2" / "smoke" / "trials.jsonl").exists()


def test_a_panel_of_figure_1_runs_as_an_ensemble(tmp_path: Path) -> None:
    result = invoke("fig1", "--out", tmp_path, "--device", "cpu", "--panels", "a", "--set", "epochs=1")
    assert result.exit_code == 0, result.output
    own = view(EXPERIMENTS["fig1"], tmp_path, SCALES["smoke"])
    (found,) = own.outcomes
    assert {record.about["executor"] for record in found.all()} == {"ensemble"}
    assert len(found.all()) == 3 * 4 + 1
    rows = table(own.directory / "numbers.csv")
    cells = {(row["damping"], row["output_damping"]) for row in rows}
    assert [sum(bool(a) + bool(g) == count for a, g in cells) for count in (2, 1, 0)] == [9, 3, 1]
    assert len(rows) == sum(len(record.points) for record in own.store.records())


def test_table_2_is_drawn_from_the_benchmarks_records(tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "table2-cpu-1thread.json").write_text(json.dumps(benchmark()), encoding="utf-8")
    result = invoke("tab2", "--scale", "quick", "--out", tmp_path / "out", "--bench", tmp_path / "bench", "--device", "cpu")
    assert result.exit_code == 0, result.output
    own = view(EXPERIMENTS["tab2"], tmp_path / "out", SCALES["quick"], bench=tmp_path / "bench")
    points = [point for chart in paper.figure(own).charts for point in chart.values]
    # Time, then memory; the plain gradient is 1 by definition.
    assert [(point["method"], point["value"]) for point in points if point["value"]] == [("ζ*", 1.5), ("ζ*", 1.5)]
    assert {point["method"]: point["paper"] is None for point in points if not point["value"]}["K-FAC"] is False
    assert (own.directory / "figure.png").read_bytes().startswith(PNG)


def benchmark() -> dict[str, Any]:
    def method(name: str, ratio: float) -> dict[str, Any]:
        spread = dict.fromkeys(("median", "low", "high"), ratio)
        seconds = {key: value / 1e3 for key, value in spread.items()}
        return {"name": name, "ratio": spread, "seconds_per_step": seconds, "peak_bytes": 1e6 * ratio}

    methods = [method("gradient", 1.0), method("zeta_star", 1.5), {"name": "kfac", "skipped": "not installed"}]
    return {
        "kind": "table2",
        "mode": "cpu-1thread",
        "time": "2026",
        "machine": {"cpu": "a processor", "threads": 1},
        "settings": {"damping": 1.0},
        "cases": [{"name": "100", "title": "5 layers × 100", "methods": methods}],
    }


def test_list_names_every_experiment() -> None:
    result = invoke("list")
    assert result.exit_code == 0
    assert all(identity in result.output for identity in IDS)


# Bad input


def words(result: Result) -> str:
    return " ".join(result.output.replace("│", " ").split())


def test_an_unknown_id_lists_the_ids(tmp_path: Path) -> None:
    result = invoke("fig9", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert all(identity in result.output for identity in IDS)
    assert not (tmp_path / "out").exists()


def test_an_unknown_panel_or_setting_is_named(tmp_path: Path) -> None:
    result = invoke("fig1", "--panels", "x", "--out", tmp_path)
    assert result.exit_code == 2
    assert "fig1 has no panel 'x'; it has a, b, c, d" in words(result)
    result = invoke("fig1", "--set", "lambda=1", "--out", tmp_path)
    assert result.exit_code == 2
    assert "there is no setting 'lambda'" in words(result)


def test_output_that_cannot_be_written_is_said_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    result = invoke("fig5", "--out", tmp_path / "file")
    assert result.exit_code == 2
    assert "cannot write to" in words(result)
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"


def test_missing_data_are_said_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISAAC_DATA", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    result = invoke("fig4", "--scale", "quick", "--out", tmp_path / "out", "--device", "cpu")
    assert result.exit_code == 2
    assert "ISAAC_DATA" in words(result)
    assert not list((tmp_path / "out").rglob("*.jsonl"))


def test_drawing_without_records_says_how_to_make_them(tmp_path: Path) -> None:
    result = invoke("fig4", "--draw-only", "--out", tmp_path)
    assert result.exit_code == 2
    assert "isaac-newton reproduce fig4 --scale smoke trains it" in words(result)


def test_records_made_with_other_settings_are_not_mixed(tmp_path: Path) -> None:
    fabricate.experiment(tmp_path, "fig4", "smoke", lambda config: 0.1)
    before = (tmp_path / "fig4" / "smoke" / "about.json").read_bytes()
    result = invoke("fig4", "--out", tmp_path, "--set", "epochs=1", "--device", "cpu")
    assert result.exit_code == 2
    assert "was made without --set; name another --out" in words(result)
    assert (tmp_path / "fig4" / "smoke" / "about.json").read_bytes() == before


def test_no_resume_refuses_a_directory_with_records(tmp_path: Path) -> None:
    fabricate.experiment(tmp_path, "fig4", "smoke", lambda config: 0.1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    result = invoke("fig4", "--out", tmp_path, "--no-resume", "--device", "cpu")
    assert result.exit_code == 2
    assert "records already; use --resume" in words(result)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("damage", ["about.json", "flipped", "cut", "empty", "times.jsonl"])
def test_corrupt_records_are_named_and_left_alone(tmp_path: Path, damage: str) -> None:
    fabricate.experiment(tmp_path, "fig5", "smoke", lambda config: 0.1)
    folder = tmp_path / "fig5" / "smoke"
    path = folder / (damage if "." in damage else "trials.jsonl")
    raw = path.read_bytes() if path.exists() else b""
    path.write_bytes({"flipped": raw.replace(b"2.3", b"2.4", 1), "cut": raw[:-9] + b"\n", "empty": b""}.get(damage, b"{\n"))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json*")}
    for more in ((), ("--draw-only",)):
        result = invoke("fig5", "--out", tmp_path, "--device", "cpu", *more)
        assert result.exit_code == 2, result.output
        assert path.name in words(result).replace(" ", "")
        assert damage == "about.json" or ", line " in words(result)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*.json*")} == before


def test_a_second_call_in_the_same_folder_names_the_first(tmp_path: Path) -> None:
    with Store(tmp_path / "fig4" / "smoke").writing("isaac-newton reproduce fig4"):
        result = invoke("fig4", "--out", tmp_path, "--device", "cpu")
    assert result.exit_code == 2
    assert "is in use by process" in words(result)
    assert "isaac-newton reproduce fig4, since" in words(result)


def test_minutes_stop_at_a_checkpoint_and_the_same_command_goes_on(tmp_path: Path) -> None:
    arguments = ("fig4", "--out", tmp_path, "--device", "cpu", "--set", "epochs=1", "--seeds", "1")
    result = invoke(*arguments, "--minutes", "0.001")
    assert result.exit_code == 3, result.output
    assert "Time is up. Runs that have ended are kept, others go on from their last checkpoint" in words(result)
    assert not (tmp_path / "fig4" / "smoke" / "figure.png").exists()
    assert invoke(*arguments, "--minutes", "60").exit_code == 0
    about = json.loads((tmp_path / "fig4" / "smoke" / "about.json").read_text(encoding="utf-8"))
    # What the first call had trained is not forgotten.
    assert sum(call["runs"] for call in about["calls"]) == 39
    assert invoke(*arguments, "--minutes", "0").exit_code == 2


@pytest.mark.parametrize(("number", "code", "word"), [(signal.SIGINT, 130, "Stopped."), (signal.SIGTERM, 143, "Terminated.")])
def test_a_signal_says_how_to_go_on(tmp_path: Path, number: int, code: int, word: str) -> None:
    command = [sys.executable, "-m", "isaac_lab", "reproduce", "fig5", "--out", str(tmp_path), "--device", "cpu"]
    # A shell that runs the tests in the background has told them to ignore Ctrl-C.
    options = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("fig5 a"), said
        process.send_signal(number)
        rest = process.stdout.read()
    # Python ends itself with SIGINT where that struck in the middle of an import; shells call both 130.
    assert process.returncode in (code, -number), rest
    assert f"{word} Runs that have ended are kept" in rest
    assert "give the same command again" in " ".join(rest.split())
    assert "Traceback" not in rest


def test_help_is_readable_at_80_columns() -> None:
    result = CliRunner().invoke(whole, ["reproduce", "--help"], env={"COLUMNS": "80"})
    assert max(map(len, result.output.splitlines())) <= 80
    for option in ("--checkpoint-seconds", "--tensor-cores", "--minutes", "--no-resume"):
        assert option in result.output


def test_a_smoke_run_says_the_widths_that_it_trained(tmp_path: Path) -> None:
    fabricate.experiment(tmp_path, "fig1", "smoke", lambda config: 0.1)
    result = invoke("fig1", "--draw-only", "--out", tmp_path)
    assert "1600" not in result.output
    assert [own.title for own in EXPERIMENTS["fig1"].panels(SCALES["smoke"])] == [
        "12 neurons",
        "50 neurons",
        "50 neurons, momentum",
        "200 neurons",
    ]


def test_the_styles_name_every_curve() -> None:
    assert set(curves.STYLES["fig5"]) == {group.name for group in panel("fig5", "a").groups}


def test_all_goes_on_where_one_experiment_lacks_its_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    performed = []

    def perform(experiment: Experiment, *rest: object, **more: object) -> None:
        if experiment.id == "tab1":
            raise typer.BadParameter("there is no encoder", param_hint="'--model'")
        performed.append(experiment.id)

    monkeypatch.setattr(command, "_perform", perform)
    result = invoke("all", "--out", tmp_path)
    assert performed == [identity for identity in IDS if identity != "tab1"]
    assert result.exit_code == 2
    assert "there is no encoder" in result.output
    assert "Left out: tab1" in result.output
    assert "there is no encoder" in invoke("tab1", "--out", tmp_path).output
