"""The paper's claims: what the checks say of records that were made up, and what the ledger and its page show."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

import fabricate
from isaac_lab.claims import CLAIMS, costs, ledger
from isaac_lab.claims import curves as of_curves
from isaac_lab.claims.curves import unstable
from isaac_lab.claims.evidence import Evidence, Finding, Verdict
from isaac_lab.claims.grids import CHECKS, behind
from isaac_lab.cli import app as whole
from isaac_lab.commands.records import claims
from isaac_lab.record import Record, Store
from isaac_lab.studies.paper import EXPERIMENTS, recipe
from isaac_lab.studies.paper.recipe import SCALES, Group, Outcome
from isaac_lab.study import settle
from isaac_lab.trial import Trial

app = typer.Typer()
app.command()(claims)

FIG1 = [("fig1", name) for name in "abcd"]
GRIDS = [*FIG1, ("fig3", "a"), ("fig3", "b"), ("fig4", "a")]
#: Final training losses by sector.
Sectors = Mapping[str, float]
BOTH_GOOD = {"zeta": 0.01, "zeta_star": 0.0105, "gradient": 0.1}
STAR_BEHIND = {"zeta": 0.001, "zeta_star": 0.05, "gradient": 0.1}
STAR_LOST = {"zeta": 0.01, "zeta_star": 0.2, "gradient": 0.1}


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def words(result: Result) -> str:
    return " ".join(result.output.replace("│", " ").split())


class Made(Evidence):
    """Evidence that was made up."""

    def __init__(self, outcomes: Mapping[tuple[str, str], Outcome], times: Mapping[str, float] | None = None) -> None:
        self._made, self._times = outcomes, times or {}
        self.benchmarks: dict[str, dict[str, Any]] = {}
        self.outcome = lambda experiment, panel: self._made.get((experiment, panel))  # type: ignore[assignment]

    def seconds(self, experiment: str, panel: str, group: str) -> float | None:
        return self._times.get(group)


def grid(sectors: Sectors, identity: str = "fig1", panel: str = "b", scale: str = "quick") -> Outcome:
    """A grid in which every cell of a sector ends with the same loss; infinite where it diverged."""
    own = next(own for own in EXPERIMENTS[identity].panels(SCALES[scale]) if own.name == panel)
    records = {group.name: tuple(_run(cell, [2.3, sectors[group.name]]) for cell in group.cells) for group in own.groups}
    return Outcome(
        own, scale, dict.fromkeys(records, 0.1), {name: {1.0: 0.5, 0.1: 0.2, 0.01: 0.3} for name in records}, records
    )


def _run(config: Trial, losses: list[float]) -> Record:
    diverged = any(math.isinf(loss) for loss in losses)
    finite = [loss for loss in losses if math.isfinite(loss)]
    return fabricate.record(config, finite, status="diverged" if diverged else "finished")


def curves(losses: Mapping[str, list[float]], identity: str = "fig2", panel: str = "a") -> Outcome:
    """Curves with these losses after each epoch; a curve that ends in infinity diverged."""
    own = next(own for own in EXPERIMENTS[identity].panels(SCALES["quick"]) if own.name == panel)
    records = {}
    for group in own.groups:
        if group.name in losses:
            records[group.name] = tuple(_run(cell, [2.3, *losses[group.name]]) for cell in group.cells)
    return Outcome(own, "quick", dict.fromkeys(records, 0.1), {}, records)


FIGURE2 = {
    "gradient": [1.0, 0.5],
    "kfac 0.1": [0.5, 0.101],
    "zeta 0.1": [0.5, 0.1],
    "zeta_star 0.1": [0.51, 0.103],
    "kfac 0.01": [0.4, 0.05],
    "zeta 0.01": [0.4, 0.05],
    "zeta_star 0.01": [0.4, math.inf],
}


def check(number: str, evidence: Evidence) -> Finding:
    return next(claim for claim in CLAIMS if claim.number == number).check(evidence)


# The list


def test_claims_have_numbers_of_their_own_words_a_test_and_an_experiment() -> None:
    assert len({claim.number for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        assert claim.about in EXPERIMENTS
        assert len(claim.text) > 20
        assert len(claim.test) > 20
    assert {claim.number.partition(".")[0] for claim in CLAIMS} >= {"A", "E1", "E2", "E3", "E4", "E5", "F1", "FA3"}


def test_without_records_nothing_is_decided(tmp_path: Path) -> None:
    found = ledger(Evidence(tmp_path / "none", tmp_path / "none"))
    assert {finding.verdict for _, finding in found} == {Verdict.UNKNOWN}


# Measures


def test_log_loss_is_compared_as_a_share_of_the_best() -> None:
    assert behind(0.1, 0.01) == pytest.approx(0.5)
    assert behind(0.01, 0.01) == 0
    assert behind(0.001, 0.01) < 0
    assert behind(math.inf, 0.01) == math.inf
    assert behind(0.01, math.inf) == -math.inf
    assert math.isfinite(behind(0.0, 0.01))


def test_a_run_is_unstable_if_it_diverged_or_jumped() -> None:
    config = Trial("mnist-mlp", "sgd")
    assert not unstable([fabricate.record(config, [2.3, 1.0, 0.5, 0.9, 0.4])])
    assert unstable([fabricate.record(config, [2.3, 1.0, 0.5, 1.1, 0.4])])
    assert unstable([fabricate.record(config, [2.3, 1.0], status="diverged")])
    assert unstable([fabricate.record(config, [2.3, None])])
    assert unstable([])


# Grids


@pytest.mark.parametrize(
    ("sectors", "verdicts"),
    [
        (BOTH_GOOD, {"E1.1": Verdict.HOLDS, "E1.2": Verdict.HOLDS, "A.3": Verdict.HOLDS, "M.1": Verdict.HOLDS}),
        (STAR_BEHIND, {"E1.1": Verdict.HOLDS, "E1.2": Verdict.FAILS, "A.3": Verdict.FAILS, "M.1": Verdict.FAILS}),
        (STAR_LOST, {"E1.1": Verdict.FAILS, "E1.2": Verdict.FAILS, "E2.1": Verdict.FAILS, "C.4": Verdict.FAILS}),
        (
            {"zeta": 0.01, "zeta_star": math.inf, "gradient": 0.1},
            {"E1.1": Verdict.FAILS, "E1.2": Verdict.FAILS, "F1.1": Verdict.FAILS},
        ),
        (
            {"zeta": math.inf, "zeta_star": 0.01, "gradient": 0.1},
            {"E1.1": Verdict.FAILS, "E1.2": Verdict.HOLDS, "E2.1": Verdict.HOLDS},
        ),
    ],
)
def test_claims_about_grids_follow_the_best_cells(sectors: Sectors, verdicts: dict[str, Verdict]) -> None:
    evidence = Made({name: grid(sectors, *name) for name in GRIDS})
    assert {number: check(number, evidence).verdict for number in verdicts} == verdicts


def test_one_counterexample_decides_but_a_missing_panel_leaves_open() -> None:
    good, bad = grid(BOTH_GOOD), grid(STAR_LOST)
    test = partial(CHECKS["star_keeps_up"], panels="fig1 abcd")
    three = dict.fromkeys(FIG1[:3], good)
    assert test(Made(three)).verdict is Verdict.UNKNOWN
    assert "missing: fig1 d" in test(Made(three)).figures
    assert test(Made(three | {FIG1[3]: good})).verdict is Verdict.HOLDS
    assert test(Made({FIG1[0]: bad})).verdict is Verdict.FAILS


def test_most_means_more_than_half_of_all_panels() -> None:
    good, bad = grid(BOTH_GOOD), grid(STAR_LOST)
    test = partial(CHECKS["star_keeps_up"], panels="fig1 abcd", need="most")
    assert test(Made(dict.fromkeys(FIG1[:3], good))).verdict is Verdict.HOLDS
    assert test(Made(dict.fromkeys(FIG1[:2], good))).verdict is Verdict.UNKNOWN
    assert test(Made(dict.fromkeys(FIG1[:2], bad))).verdict is Verdict.FAILS


def test_every_finding_names_its_scale() -> None:
    same = Made({name: grid(BOTH_GOOD, *name) for name in FIG1})
    assert CHECKS["star_keeps_up"](same, panels="fig1 abcd").scale == "quick"
    mixed = Made({FIG1[0]: grid(BOTH_GOOD), FIG1[1]: replace(grid(BOTH_GOOD), scale="paper")})
    assert CHECKS["star_keeps_up"](mixed, panels="fig1 ab").scale == "quick (fig1 a), paper (fig1 b)"


def test_the_row_of_the_fisher_grid_is_compared_with_the_column() -> None:
    def varied(identity: str, row: float, column: float) -> Outcome:
        own = grid({"zeta": 0.05, "zeta_star": column, "gradient": 0.1}, identity)
        largest = max(SCALES["quick"].dampings)
        # Along the last row one cell is good; along the column all are.
        records = dict(own.records) | {
            "zeta": tuple(
                _run(r.trial, [2.3, row if (r.trial.damping, r.trial.output_damping) == (largest, 1.0) else 0.05])
                for r in own.records["zeta"]
            )
        }
        return replace(own, records=records)

    fisher = {("figA3", name): varied("figA3", 0.001, 0.01) for name in "abcd"}
    newton = {("fig1", name): varied("fig1", 0.005, 0.01) for name in "abcd"}
    evidence = Made(fisher | newton)
    verdicts = {number: check(number, evidence).verdict for number in ("FA3.2", "FA3.3", "FA3.4", "FA3.5")}
    assert set(verdicts.values()) == {Verdict.HOLDS}
    turned = Made({("figA3", name): varied("figA3", 0.02, 0.01) for name in "abcd"} | newton)
    verdicts = {number: check(number, turned).verdict for number in ("FA3.2", "FA3.3", "FA3.5")}
    assert verdicts == {"FA3.2": Verdict.HOLDS, "FA3.3": Verdict.FAILS, "FA3.5": Verdict.FAILS}


def test_rates_at_the_ends_of_the_list_leave_open_whether_it_is_long_enough() -> None:
    inside = grid(BOTH_GOOD)
    assert check("B.1", Made({FIG1[0]: inside})).verdict is Verdict.HOLDS
    outside = replace(inside, rates={**inside.rates, "zeta": 1.0})
    finding = check("B.1", Made({FIG1[0]: outside}))
    assert finding.verdict is Verdict.UNKNOWN
    assert "fig1 a zeta 1" in finding.figures


def test_a_better_rate_outside_of_the_papers_list_refutes_that_there_is_none() -> None:
    inside = grid(BOTH_GOOD)
    outside = replace(inside, rates={**inside.rates, "zeta": 10.0})
    finding = check("B.1", Made({FIG1[0]: outside}))
    assert finding.verdict is Verdict.FAILS
    assert "better outside: fig1 a zeta 10" in finding.figures


# Curves


def test_figure_2_as_the_paper_describes_it() -> None:
    times = {"gradient": 1.0, "kfac 0.1": 15.0, "zeta 0.1": 2.5, "zeta_star 0.1": 1.1}
    times |= {"kfac 0.01": 15.0, "zeta 0.01": 2.5, "zeta_star 0.01": 1.1, "output side only": 2.0}
    evidence = Made({("fig2", "a"): curves(FIGURE2)}, times)
    numbers = ("E1.4", "E1.5", "E1.6", "E1.7", "E1.8", "E1.11", "FA3.6")
    assert {number: check(number, evidence).verdict for number in numbers} == dict.fromkeys(numbers, Verdict.HOLDS)


@pytest.mark.parametrize(
    ("number", "changed"),
    [
        ("E1.4", {"zeta_star 0.1": [0.5, 0.15]}),
        ("E1.4", {"zeta_star 0.1": [0.5, math.inf]}),
        ("E1.6", {"kfac 0.01": [0.4, 0.2], "zeta 0.01": [0.4, 0.2]}),
        ("E1.7", {"zeta_star 0.01": [0.4, 0.05]}),
        ("E1.7", {"kfac 0.01": [0.4, math.inf]}),
        ("E1.8", {"zeta_star 0.1": [0.2, 0.45]}),
    ],
)
def test_figure_2_otherwise(number: str, changed: dict[str, list[float]]) -> None:
    evidence = Made({("fig2", "a"): curves(FIGURE2 | changed)})
    assert check(number, evidence).verdict is Verdict.FAILS


def test_without_times_nothing_is_said_of_time() -> None:
    evidence = Made({("fig2", "a"): curves(FIGURE2)})
    assert check("E1.11", evidence).verdict is Verdict.UNKNOWN
    assert check("E1.5", evidence).verdict is Verdict.UNKNOWN


def test_a_fast_gradient_can_be_best_per_time() -> None:
    times = dict.fromkeys(FIGURE2, 100.0) | {"gradient": 1.0}
    evidence = Made({("fig2", "a"): curves(FIGURE2)}, times)
    assert check("E1.11", evidence).verdict is Verdict.FAILS


def test_the_smallest_valid_damping_is_found() -> None:
    def smaller(first: float, second: float) -> Made:
        small = {
            f"{group} {damping}": [0.4, last]
            for group in ("kfac", "zeta", "zeta_star")
            for damping, last in (("0.001", first), ("0.0001", second))
        }
        return Made({("fig2", "a"): curves(FIGURE2), ("fig2", "b"): curves(small, panel="b")})

    assert check("E1.10", smaller(0.1, math.inf)).verdict is Verdict.HOLDS
    assert check("E1.10", smaller(math.inf, math.inf)).verdict is Verdict.HOLDS
    assert check("E1.10", smaller(0.1, 0.1)).verdict is Verdict.FAILS
    assert check("E1.9", smaller(math.inf, math.inf)).verdict is Verdict.HOLDS
    assert check("E1.9", smaller(0.1, math.inf)).verdict is Verdict.FAILS
    assert check("E1.9", Made({})).verdict is Verdict.UNKNOWN


def test_a_curve_that_is_not_there_leaves_open() -> None:
    some = {name: losses for name, losses in FIGURE2.items() if name != "kfac 0.1"}
    finding = of_curves.almost_identical(Made({("fig2", "a"): curves(some)}))
    assert finding.verdict is Verdict.UNKNOWN


SELECTED = {name: [1.0, 0.05] for name in ("all", "1", "5", "1-3", "odd", "even")} | {"none": [1.0, 0.1], "3-5": [1.0, 0.105]}


def test_selected_layers_beat_the_gradient_but_for_the_last_three() -> None:
    evidence = Made({("fig5", "a"): curves(SELECTED, "fig5")})
    assert {n: check(n, evidence).verdict for n in ("E3.0", "E3.1", "E3.2")} == dict.fromkeys(
        ("E3.0", "E3.1", "E3.2"), Verdict.HOLDS
    )
    assert "mean of 3 seeds" in check("E3.1", evidence).figures
    worse = Made({("fig5", "a"): curves(SELECTED | {"5": [1.0, 0.2], "3-5": [1.0, 0.01]}, "fig5")})
    assert check("E3.1", worse).verdict is Verdict.FAILS
    assert check("E3.2", worse).verdict is Verdict.FAILS


# Benchmarks


def bench(
    ratios: Mapping[str, float], *, mode: str = "cpu-1thread", memory: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """A record of Table 2 in which every model has these ratios; a plain step takes a millisecond."""

    def method(name: str, ratio: float) -> dict[str, Any]:
        spread = dict.fromkeys(("median", "low", "high"), ratio)
        seconds = {key: value / 1e3 for key, value in spread.items()}
        peak = {"peak_bytes": 1e6 * memory[name]} if memory else {}
        return {"name": name, "ratio": spread, "seconds_per_step": seconds, **peak}

    methods = [method("gradient", 1.0), *(method(name, ratio) for name, ratio in ratios.items())]
    cases = [{"name": model, "title": model, "methods": methods} for model in costs.MODELS]
    settings, machine = {"damping": 1.0, "rounds": 1}, {"cpu": "a processor", "cores": 1, "threads": 1}
    return {"kind": "table2", "mode": mode, "time": "2026", "settings": settings, "machine": machine, "cases": cases}


def measured(*records: dict[str, Any]) -> Made:
    evidence = Made({})
    evidence.benchmarks = {str(number): record for number, record in enumerate(records)}
    return evidence


def test_costs_as_the_paper_describes_them() -> None:
    ratios = {"paper": 1.005, "zeta_star": 1.005, "zeta": 4.0, "kfac": 30.0}
    memory = {"gradient": 1.0, "paper": 1.02, "zeta_star": 1.02, "zeta": 1.7, "kfac": 4.0}
    evidence = measured(bench(ratios, memory=memory), bench(ratios | {"zeta_star": 3.5, "paper": 3.5}, mode="cuda-eager"))
    numbers = [f"E5.{n}{p}" for n in (2, 3, 4, 7) for p in ("", "p")] + ["E1.12", "E1.12p", "E5.0", "E5.1", "E5.5", "E5.6"]
    assert {number: check(number, evidence).verdict for number in numbers} == dict.fromkeys(numbers, Verdict.HOLDS)


def test_costs_otherwise() -> None:
    ratios = {"paper": 3.0, "zeta_star": 3.0, "zeta": 1.5, "kfac": 1.6}
    memory = {"gradient": 1.0, "paper": 1.3, "zeta_star": 1.3, "zeta": 1.2, "kfac": 4.0}
    evidence = measured(bench(ratios, memory=memory), bench(ratios | {"zeta_star": 1.1, "paper": 1.1}, mode="cuda-eager"))
    numbers = [f"E5.{n}{p}" for n in (2, 3, 4, 7) for p in ("", "p")] + ["E1.12", "E1.12p", "E5.0", "E5.5", "E5.6"]
    assert {number: check(number, evidence).verdict for number in numbers} == dict.fromkeys(numbers, Verdict.FAILS)


def test_a_method_that_was_not_measured_leaves_open() -> None:
    evidence = measured(bench({"zeta_star": 1.0}))
    for number in ("E1.12p", "E5.1", "E5.6", "E5.7"):
        assert check(number, evidence).verdict is Verdict.UNKNOWN, number


def test_the_newest_benchmark_counts() -> None:
    old, new = bench({"zeta_star": 1.5}), bench({"zeta_star": 1.1})
    assert measured(old, new).ratio("cpu-1thread", "400", "zeta_star") == 1.1


# From directories


def selected_layers(config: Trial) -> float:
    if config.method == "sgd" or config.get("layers") == (3, 4, 5):
        return 0.1
    return 0.01


def test_smoke_records_are_never_enough(tmp_path: Path) -> None:
    fabricate.experiment(tmp_path, "fig5", "smoke", selected_layers)
    assert check("E3.1", Evidence(tmp_path, tmp_path / "none")).verdict is Verdict.UNKNOWN


def test_the_largest_scale_decides(tmp_path: Path) -> None:
    fabricate.experiment(tmp_path, "fig5", "quick", lambda config: 0.1)
    finding = check("E3.1", Evidence(tmp_path, tmp_path / "none"))
    assert (finding.verdict, finding.scale) == (Verdict.FAILS, "quick")
    fabricate.experiment(tmp_path, "fig5", "paper", selected_layers)
    finding = check("E3.1", Evidence(tmp_path, tmp_path / "none"))
    assert (finding.verdict, finding.scale) == (Verdict.HOLDS, "paper")


def test_a_panel_that_is_not_whole_does_not_count(tmp_path: Path) -> None:
    own = EXPERIMENTS["fig5"].panels(SCALES["quick"])[0]
    part = replace(own, groups=tuple(group for group in own.groups if group.name != "odd"))
    assert isinstance(part.groups[0], Group)
    memory, store = fabricate.Memory(selected_layers), Store(tmp_path / "fig5" / "quick")
    settle(list(recipe.arms(part, SCALES["quick"]).values()), memory, memory.train)
    with store.writing():
        store.add(*memory.records.values())
    assert check("E3.1", Evidence(tmp_path, tmp_path / "none")).verdict is Verdict.UNKNOWN


# The command


def test_the_ledger_and_its_page_show_every_claim(tmp_path: Path) -> None:
    fabricate.experiment(tmp_path / "records", "fig5", "quick", selected_layers)
    (tmp_path / "bench").mkdir()
    record = bench({"zeta_star": 1.1, "paper": 1.2, "zeta": 2.0, "kfac": 20.0})
    (tmp_path / "bench" / "table2-cpu-1thread.json").write_text(json.dumps(record), encoding="utf-8")
    page = tmp_path / "docs" / "reproduction.md"
    result = invoke("--records", tmp_path / "records", "--bench", tmp_path / "bench", "--page", page)
    assert result.exit_code == 0, result.output
    assert all(claim.number in result.output for claim in CLAIMS)
    text = page.read_text(encoding="utf-8")
    assert all(f"**{claim.number}: " in text for claim in CLAIMS)
    assert "**E3.1: holds.**" in text
    assert "**E5.4: holds.**" in text
    assert "**E1.7: not enough data.**" in text
    assert "![Figure 5: ζ* in selected layers, training loss](figures/fig5-quick.svg)" in text
    assert "Figure 5: ζ* in selected layers" in (tmp_path / "docs" / "figures" / "fig5-quick.svg").read_text(encoding="utf-8")
    # Nothing is drawn beside the records.
    assert {path.name for path in (tmp_path / "records" / "fig5" / "quick").iterdir()} == {
        "about.json",
        "trials.jsonl",
        ".lock",
    }
    assert "3 runs trained in 61.0 s (local)" in text
    assert "digits of 8 × 8" in text
    assert str(tmp_path) not in text.replace((tmp_path / "records").as_posix(), "").replace((tmp_path / "bench").as_posix(), "")


def test_without_any_directory_the_command_says_how_to_make_records(tmp_path: Path) -> None:
    result = invoke("--records", tmp_path / "a", "--bench", tmp_path / "b")
    assert result.exit_code == 2
    assert "isaac-newton reproduce makes records" in words(result)
    (tmp_path / "b").mkdir()
    # The benchmarks alone are no answer to "what do these records say".
    result = invoke("--records", tmp_path / "a", "--bench", tmp_path / "b")
    assert result.exit_code == 2
    assert "there is no folder" in words(result)


def test_own_runs_are_named_and_what_does_not_count_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fabricate.experiment(tmp_path / "out" / "reproduce", "fig5", "smoke", selected_layers)
    for name in ("records", "bench"):
        (tmp_path / name).mkdir()
    result = invoke("--records", "records", "--bench", "bench")
    assert result.exit_code == 0, result.output
    assert "Your own runs in out/reproduce: fig5 (smoke). They are not counted here: smoke runs prove nothing" in words(result)
    assert "count with --records out/reproduce" in words(result)


def test_a_newcomer_needs_no_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no checkout: `claims` and `report` find what `reproduce` and `race` wrote, and say what counts."""
    monkeypatch.chdir(tmp_path)
    nothing = CliRunner().invoke(whole, ["claims"])
    assert nothing.exit_code == 2
    assert "there is no folder 'out/reproduce'; isaac-newton reproduce makes records" in words(nothing)
    made = CliRunner().invoke(whole, ["reproduce", "fig1", "--scale", "smoke", "--panels", "a", "--set", "epochs=1"])
    assert made.exit_code == 0, made.output
    found = CliRunner().invoke(whole, ["claims"])
    assert found.exit_code == 0, found.output
    assert "59 claims: 0 holds, 0 does not hold" in words(found)
    assert "Your own runs in out/reproduce: fig1 (smoke). They were read; smoke runs prove nothing" in words(found)
    page = CliRunner().invoke(whole, ["report"])
    assert page.exit_code == 0, page.output
    assert "fig1 (smoke). They were read" in words(page)
    assert (tmp_path / "out" / "report.html").is_file()


def test_a_full_disk_leaves_the_old_page_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fabricate.experiment(tmp_path / "records", "fig5", "quick", selected_layers)
    (tmp_path / "bench").mkdir()
    page = tmp_path / "page.md"
    old = (Path(__file__).parent.parent / "docs" / "reproduction.md").read_text(encoding="utf-8")
    page.write_text(old, encoding="utf-8")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    result = invoke("--records", tmp_path / "records", "--bench", tmp_path / "bench", "--page", page)
    assert result.exit_code == 2
    assert "No space left on device" in words(result)
    assert "None" not in words(result).split("Error")[-1]
    assert page.read_text(encoding="utf-8") == old
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("damage", ["store", "bench", "about.json"])
def test_corrupt_records_end_the_command_and_the_page_stays(tmp_path: Path, damage: str) -> None:
    fabricate.experiment(tmp_path / "records", "fig5", "quick", selected_layers)
    (tmp_path / "bench").mkdir()
    folder = tmp_path / "records" / "fig5" / "quick"
    files = {
        "store": folder / "trials.jsonl",
        "bench": tmp_path / "bench" / "x.json",
        "about.json": folder / "about.json",
    }
    files[damage].write_text("{", encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text("old", encoding="utf-8")
    result = invoke("--records", tmp_path / "records", "--bench", tmp_path / "bench", "--page", page)
    assert result.exit_code == 2
    assert page.read_text(encoding="utf-8") == "old"


def test_a_page_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    (tmp_path / "records").mkdir()
    (tmp_path / "none").mkdir()
    result = invoke("--records", tmp_path / "records", "--bench", tmp_path / "none", "--page", tmp_path / "file" / "page.md")
    assert result.exit_code == 2
    assert "cannot write to" in words(result)
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"
