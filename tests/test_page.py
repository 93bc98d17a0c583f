"""The page: what stands on it, from committed records and from ones that were made up, and how it behaves in Chromium."""

import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from isaac_lab import lines as stored
from isaac_lab import words
from isaac_lab.charts import figure as drawn
from isaac_lab.charts import heat, lines
from isaac_lab.charts.draw import svg
from isaac_lab.charts.figure import Chart
from isaac_lab.claims.evidence import Evidence
from isaac_lab.commands.records import report
from isaac_lab.record import FORMAT, Store
from isaac_lab.report import page as building
from isaac_lab.report import paper
from isaac_lab.report import race as race_page
from isaac_lab.report.page import render
from isaac_lab.report.parts import Figure, Heading, Source
from isaac_lab.report.tables import Table
from isaac_lab.report.views import rate
from isaac_lab.studies.paper import EXPERIMENTS
from isaac_lab.studies.paper.folder import view
from isaac_lab.studies.paper.recipe import SCALES
from isaac_lab.studies.race.standings import summarize

pytest.importorskip("vl_convert", reason="the extra [report] is not installed")

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
SECTIONS = ("summary", "race", "grids", "curves", "costs", "larger", "claims", "again")
EVIL = "<script>alert('x')</script>"
METHOD = drawn.Method("m", drawn.Look("red"))

app = typer.Typer()
app.command()(report)


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def said(result: Result) -> str:
    return " ".join((result.output + result.stderr).replace("│", " ").split())


class Elements(HTMLParser):
    """All elements with their attributes, and the text of the page outside of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self._inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attrs}))
        if tag in ("script", "style"):
            self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._inside and self._inside[-1] == tag:
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        if not self._inside:
            self.words.append(data)

    def named(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.found if name == tag]

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


def charts(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', page, re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


# What is made up


def spread(values: list[float | None]) -> dict[str, Any]:
    found = [value for value in values if value is not None]
    mean = sum(found) / len(found) if found else None
    return {"mean": mean, "std": 0.05 if found else None, "values": values}


def method(name: str, label: str, seconds: list[float | None], *, ours: bool = False, **more: Any) -> dict[str, Any]:
    steps = list(range(0, 401, 4))
    slower = 1 + len(name) / 10
    curves = [
        {
            "seed": seed,
            "steps": steps,
            "seconds": [0.001 * step * slower for step in steps],
            "loss": [2.3 / (1 + 0.05 * step / slower) * (1 + 0.02 * seed) for step in steps],
        }
        for seed in range(len(seconds))
    ]
    return {
        "name": name,
        "label": label,
        "ours": ours,
        "settings": {"learning_rate": 0.001} | ({"damping": 0.1} if ours else {}),
        "mode": "captured",
        "n": len(seconds),
        "diverged": 0,
        "reason": None,
        "steps_to_target": spread([None if value is None else 1000 * value for value in seconds]),
        "seconds_to_target": spread(seconds),
        "final": spread([0.0123] * len(seconds)),
        "metrics": {"test_accuracy": spread([0.98] * len(seconds))},
        "seconds_per_step": 0.00021,
        "edge": False,
        "curves": curves,
    } | more


def race(scale: str = "quick", **more: Any) -> dict[str, Any]:
    left_out = {"n": 0, "reason": "does not take inputs of three dimensions", "settings": None, "final": None, "metrics": None}
    return {
        "workload": "mnist-mlp",
        "title": "MNIST classifier, 5 × 400",
        "scale": scale,
        "mode": "captured",
        "data": "MNIST",
        "quantity": "train_loss",
        "quantity_title": "Training loss",
        "target": 0.2,
        "target_by": "AdamW, learning rate 0.001",
        "steps": 400,
        "batch": 60,
        "trials": 8,
        "seeds": 3,
        "points": 40,
        "metric_titles": {"test_accuracy": "Test accuracy"},
        "higher": False,
        "rules": "",
        "published": {},
        "compared": [],
        "command": f"isaac-newton race mnist-mlp --scale {scale}",
        "time": "2026-11-15T10:00:00+00:00",
        "commit": "0123456789ab",
        "versions": {"torch": "2.11"},
        "machine": {"gpu": "NVIDIA H200"},
        "methods": [
            method("adamw", "AdamW", [2.0, 2.0, 2.0]),
            method("isaac-adamw", "AdamW + ISAAC", [1.0, 1.0, 1.0], ours=True),
            method("soap", "SOAP", [0.5, 0.5, None]),
            method("momentum", EVIL, [None, None, None], diverged=2),
            method("kfac", "K-FAC", [], steps_to_target=None, seconds_to_target=None, **left_out),
        ],
    } | more


def cell(mean: float) -> dict[str, Any]:
    return {"mean": mean, "std": 0.0123, "n": 5, "values": [mean], "settings": "lr 2e-5"}


TAB1 = {
    "kind": "tab1",
    "title": "Table 1: fine-tuning",
    "scale": "quick",
    "command": "isaac-newton reproduce tab1 --scale quick",
    "time": "2026-11-15T10:00:00+00:00",
    "commit": "0123456789ab",
    "versions": {},
    "machine": {},
    "model": "a small BERT",
    "tried": [],
    "times": {},
    "columns": ["CoLA (Matthews)", "MRPC (F1)"],
    "rows": [
        {"label": "∇", "model": "a small BERT", "method": "plain", "ours": False, "cells": [cell(0.412), None]},
        {
            "label": "ζ* everywhere",
            "model": "a small BERT",
            "method": "made up",
            "ours": True,
            "cells": [cell(0.437), cell(0.871)],
        },
    ],
    "notes": [f"A note {EVIL}."],
}
CURVE = {"label": "∇", "name": "none", "epochs": [1, 2, 3], "mean": [0.5, 0.6, 0.678], "std": [0.01, 0.01, 0.0123], "n": 3}
FIG6 = TAB1 | {
    "kind": "fig6",
    "title": "Figure 6: images",
    "data": "made-up images",
    "quantity_title": "Test accuracy",
    "columns": ["momentum and weight decay", "momentum only", "plain SGD"],
    "rows": [{"label": "∇", "name": "none", "ours": False, "cells": [cell(0.941), None, cell(0.873)]}],
    "panels": [
        {
            "name": "a",
            "title": "momentum",
            "curves": [CURVE, CURVE | {"label": "ζ*", "name": "expand", "mean": [0.6, 0.7, 0.789]}],
        }
    ],
}


def write(path: Path, data: Mapping[str, Any]) -> Path:
    """What the records of a folder would say, beside a file without records."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data), encoding="utf-8")
    (path.parent / "trials.jsonl").write_bytes(stored.encode({"format": FORMAT}))
    return path


@pytest.fixture(scope="module", autouse=True)
def _made_up_summaries() -> Iterator[None]:
    """Where a folder has a summary.json that a test made up, that is what its records say."""
    real = Evidence._read_summary

    def race_of(store: Store) -> dict[str, Any]:
        path = store.folder / "summary.json"
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else summarize(store)

    def other(self: Evidence, experiment: str, scale: str) -> dict[str, Any]:
        path = self.records / experiment / scale / "summary.json"
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else real(self, experiment, scale)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(race_page, "summarize", race_of)
        patch.setattr(Evidence, "_read_summary", other)
        yield


@pytest.fixture(scope="module")
def committed() -> str:
    return building.build(RESULTS)


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with everything on it: races, Table 1 and Figure 6 made up, a grid, curves and benchmarks that are committed."""
    results = tmp_path_factory.mktemp("made up") / "results"
    for name in ("reproduce/fig4", "reproduce/fig5", "bench"):
        shutil.copytree(RESULTS / name, results / name)
    write(results / "race/mnist-mlp/quick/summary.json", race())
    write(results / "race/gpt/smoke/summary.json", race("smoke", workload="gpt", title="A small GPT"))
    write(results / "reproduce/tab1/quick/summary.json", TAB1)
    write(results / "reproduce/fig6/quick/summary.json", FIG6)
    out = results.parent / "page" / "report.html"
    result = invoke("--out", out, "--results", results)
    assert result.exit_code == 0, said(result)
    assert "MB" in said(result)
    return out


@pytest.fixture(scope="module")
def made_up_text(made_up: Path) -> str:
    return made_up.read_text(encoding="utf-8")


# The page of the committed records


def test_the_page_of_the_committed_records_is_small_and_whole(committed: str) -> None:
    elements = Elements(committed)
    assert len(committed.encode()) < 5_000_000
    assert [section["aria-labelledby"] for section in elements.named("section")] == list(SECTIONS)
    assert [link["href"] for link in elements.named("a") if link["href"].removeprefix("#") in SECTIONS][: len(SECTIONS)] == [
        f"#{name}" for name in SECTIONS
    ]


def test_nothing_is_loaded_from_elsewhere(committed: str) -> None:
    elements = Elements(committed)
    loads = [
        attributes[name]
        for _, attributes in elements.found
        for name in ("src", "srcset", "data", "poster")
        if name in attributes
    ]
    loads += [link["href"] for link in elements.named("link")]
    assert all(load.startswith("data:") for load in loads)
    style = re.search(r"<style>(.*?)</style>", committed, re.DOTALL)
    assert style
    assert "url(" not in style[1]
    assert "@import" not in style[1]


def test_every_committed_panel_has_its_map(committed: str) -> None:
    expected: Counter[str] = Counter()
    for name in ("fig1", "fig3", "fig4", "figA3"):
        for scale in ("paper", "quick"):
            for own in view(EXPERIMENTS[name], RESULTS / "reproduce", SCALES[scale]).outcomes:
                expected[f"map-{name.lower()}-{scale}-{own.panel.name}"] += len(own.all())
    maps = {name: len(chart["values"]) for name, chart in charts(committed).items() if name.startswith("map-")}
    assert maps == expected
    assert maps["map-fig1-paper-b"] == 13 * 13 + 13 + 1


def test_a_rate_at_the_end_of_its_list_is_marked(committed: str) -> None:
    elements = Elements(committed).text
    for outcome in view(EXPERIMENTS["fig1"], RESULTS / "reproduce", SCALES["quick"]).outcomes:
        for group, chosen in outcome.rates.items():
            tried = outcome.tried[group]
            assert rate(outcome, group) == f"{chosen:g}{' (edge)' if chosen in (min(tried), max(tried)) else ''}"
        rates = [f"{heat.NAMES[group]} {rate(outcome, group)}" for group in outcome.rates]
        assert f"learning rates: {', '.join(rates)}" in elements
    assert "ζ* 1 (edge), ∇ 0.3" in elements


def test_numbers_of_the_page_are_those_of_the_records(committed: str) -> None:
    record = json.loads((RESULTS / "bench" / "table2-cpu-1thread.json").read_text(encoding="utf-8"))
    entry = next(m for case in record["cases"] if case["name"] == "100" for m in case["methods"] if m["name"] == "zeta_star")
    points = charts(committed)["cost-time-table2-cpu-1thread"]["values"]
    own = next(point for point in points if point["model"] == "5 × 100" and point["method"] == "ζ*")
    assert own["value"] == entry["ratio"]["median"]
    ends = f"({entry['ratio']['low']:.3f}–{entry['ratio']['high']:.3f})"
    assert f"{entry['ratio']['median']:.3f} {ends} 1.63" in Elements(committed).text.replace("\u00a0", " ")


def test_the_page_can_be_read_aloud(committed: str) -> None:
    elements = Elements(committed)
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    levels = [int(tag[1]) for tag, _ in elements.found if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert all(heading.get("scope") for heading in elements.named("th"))
    pictures = [attributes for _, attributes in elements.found if attributes.get("class") == "chart"]
    assert {picture["id"] for picture in pictures} == set(charts(committed))
    assert all(picture["role"] == "img" and len(picture["aria-label"]) > 40 for picture in pictures)
    assert {"main", "nav", "header"} <= {tag for tag, _ in elements.found}
    assert next(link["href"] for link in elements.named("a")) == "#main"


def test_every_claim_is_on_the_page(committed: str) -> None:
    from isaac_lab.claims import CLAIMS

    text = committed.replace("&#39;", "'")
    assert sum("data-about" in attributes for attributes in Elements(committed).named("li")) == len(CLAIMS)
    assert all(claim.test.split("λ_")[0].split("<")[0] in text for claim in CLAIMS)


# What is missing, wrong or dangerous


def test_without_records_the_page_names_the_commands_that_make_them(tmp_path: Path) -> None:
    text = Elements(building.build(tmp_path)).text
    commands = (
        "race --scale standard",
        "reproduce fig1",
        "reproduce fig2",
        "bench table2",
        "reproduce tab1",
        "reproduce fig6",
    )
    for command in commands:
        assert f"no record yet. This makes one: isaac-newton {command}" in text


def test_without_the_extra_the_command_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "installed", lambda module: module != "vl_convert")
    result = invoke("--out", tmp_path / "report.html", "--results", RESULTS)
    assert result.exit_code == 2
    assert "pip install 'isaac-newton[report]'" in said(result)
    assert not (tmp_path / "report.html").exists()


def test_wrong_folders_are_named(tmp_path: Path) -> None:
    missing = invoke("--results", tmp_path / "nowhere")
    assert missing.exit_code == 2
    assert "--results" in said(missing)
    folder = invoke("--results", RESULTS, "--out", tmp_path)
    assert folder.exit_code == 2
    assert "is a folder" in said(folder)


@pytest.mark.parametrize("wrong", ["{", '{"kind": "tab1"}', ""], ids=["torn", "foreign", "empty"])
def test_damaged_records_are_named_and_the_old_page_stays(tmp_path: Path, wrong: str) -> None:
    folder = tmp_path / "results/race/mnist-mlp/quick"
    shutil.copytree(RESULTS / "race/mnist-mlp/quick", folder)
    (folder / "trials.jsonl").write_text(wrong, encoding="utf-8")
    out = tmp_path / "report.html"
    out.write_text("old", encoding="utf-8")
    result = invoke("--out", out, "--results", tmp_path / "results")
    assert result.exit_code == 2
    assert "race/mnist-mlp/quick/trials.jsonl,line1:" in said(result).replace(" ", "")
    assert out.read_text(encoding="utf-8") == "old"
    assert [own.name for own in tmp_path.iterdir() if own.suffix == ".part"] == []


def test_all_text_is_escaped(made_up_text: str) -> None:
    assert "alert(" in made_up_text
    assert EVIL not in made_up_text
    assert made_up_text.count("</script>") == len(Elements(made_up_text).named("script")) == 4
    assert EVIL in Elements(made_up_text).text


def test_words_are_escaped_before_they_are_marked() -> None:
    lead = "**bold** `a < b` λ_a <b>x</b>"
    chart = Chart("chart", "", "", {}, ({"a": "</script><!--"},))
    titled = {"a": {"title": "<i>", "lead": lead}}
    text = render({"a": [Figure(drawn.Figure("f", (chart,)))]}, titled, "var x = '</script>';")
    assert "<strong>bold</strong> <code>a &lt; b</code> λ<sub>a</sub> &lt;b&gt;x&lt;/b&gt;" in text
    assert "<i>" not in text
    assert r'{"chart":{"spec":{},"values":[{"a":"\u003c/script>\u003c!--"}]}}' in text
    assert text.count("</script>") == text.count("<script")


# Races, Table 1, Figure 6


def test_a_race_is_shown_whole(made_up_text: str) -> None:
    text = Elements(made_up_text).text
    assert "AdamW + ISAAC η 0.001 λ 0.1 0.0123 ± 0.05 98.0% ± 5.0% 1,000 ± 0 1 ± 0.05 0.21 (captured) 3" in text
    assert "SOAP η 0.001 0.0123 ± 0.05 98.0% ± 5.0% 500 (2 of 3) 0.5 (2 of 3) 0.21 (captured) 3" in text
    assert f"{EVIL} η 0.001 0.0123 ± 0.05 98.0% ± 5.0% never never 0.21 (captured) 3, 2 diverged" in text
    assert "K-FAC not run: does not take inputs of three dimensions" in text
    assert "Target: training loss 0.2000 (AdamW, learning rate 0.001)" in text
    chart = charts(made_up_text)["curve-mnist-mlp"]
    assert [(line["method"], line["run"]) for line in chart["values"]][:4] == [
        ("AdamW + ISAAC", "mean of 3 seeds"),
        ("AdamW + ISAAC", "seed 0"),
        ("AdamW + ISAAC", "seed 1"),
        ("AdamW + ISAAC", "seed 2"),
    ]
    assert {layer["encoding"]["y"].get("datum") for layer in chart["spec"]["layer"]} == {None, 0.2}


def test_the_answer_has_the_loss_at_the_end_and_whether_seeds_show_a_difference(made_up_text: str) -> None:
    text = Elements(made_up_text).text
    assert "MNIST classifier, 5 × 400 (quick, n = 3) AdamW 0.0123 0.0123 1, no difference shown" in text
    assert "short and unevenly tuned" in text


@pytest.mark.parametrize(
    ("ours", "mark", "lowest"),
    [
        ([0.1, 0.11, 0.12], {4: "good"}, "AdamW + ISAAC"),
        ([0.4, 0.41, 0.42], {4: "bad"}, "AdamW"),
        ([0.1, 0.2, 0.5], {}, "AdamW"),
    ],
)
def test_a_race_is_won_or_lost_by_what_the_seeds_show(
    tmp_path: Path, ours: list[float | None], mark: dict[int, str], lowest: str
) -> None:
    ends: dict[str, list[float | None]] = {"adamw": [0.2, 0.21, 0.22], "isaac-adamw": ours}
    labels = {"adamw": "AdamW", "isaac-adamw": "AdamW + ISAAC"}
    methods = [method(name, labels[name], [1.0] * 3, ours=name != "adamw", final=spread(end)) for name, end in ends.items()]
    write(tmp_path / "race/a/quick/summary.json", race(methods=methods))
    races = race_page.summaries(tmp_path / "race", "results/race")
    (row,) = next(block for block in race_page.section(races) if isinstance(block, Table)).rows
    assert row.marks == mark
    assert row.cells[-1] == lowest


def test_all_scales_are_shown_and_smoke_tests_are_marked(tmp_path: Path, made_up_text: str) -> None:
    for scale in ("smoke", "quick", "full"):
        write(tmp_path / f"race/mnist-mlp/{scale}/summary.json", race(scale))
    found = race_page.summaries(tmp_path / "race", "results/race")
    assert [summary["scale"] for summary in found] == ["full", "quick"]
    blocks = race_page.section(found)
    assert [block.id for block in blocks if isinstance(block, Heading)] == ["race-mnist-mlp", "race-mnist-mlp-quick"]
    assert [block.shown.charts[0].id for block in blocks if isinstance(block, Figure)] == [
        "curve-mnist-mlp",
        "curve-mnist-mlp-quick",
    ]
    text = Elements(made_up_text).text
    assert text.count("Smoke test: it shows that the code runs") == 1
    assert "A small GPT (smoke test, n = 3)" in text


def test_table_1_and_figure_6_are_shown_whole(made_up_text: str) -> None:
    text = Elements(made_up_text).text
    assert "∇ 0.412 ± 0.012 (n 5, lr 2e-5) –" in text
    assert "ζ* everywhere 0.437 ± 0.012 (n 5, lr 2e-5) 0.871 ± 0.012 (n 5, lr 2e-5)" in text
    assert f"A note {EVIL}." in text
    assert [line["value"] for line in charts(made_up_text)["fig6-a"]["values"]] == [[0.5, 0.6, 0.678], [0.6, 0.7, 0.789]]
    assert "isaac-newton reproduce tab1 --scale quick commit 0123456789ab · 2026-11-15" in text


# Parts


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, "0"),
        (2e-16, "0"),
        (5.351e-6, "5.35e-06"),
        (0.0123, "0.0123"),
        (1.0, "1.00"),
        (31.4, "31.4"),
        (1234.5, "1,234"),
        (None, "–"),
    ],
)
def test_numbers_are_short(value: float | None, expected: str) -> None:
    assert words.number(value) == expected
    assert words.number(math.nan) == "–"


def test_the_mean_ends_where_the_first_seed_does() -> None:
    whole: dict[str, list[float | None]] = {"step": [0, 1, 2], "loss": [4.0, 2.0, 1.0]}
    line = lines.mean(METHOD, [whole, {"step": [0, 1], "loss": [2.0, 1.0]}], "step", ("loss",))
    assert line.columns == {"step": [0, 1], "loss": [3.0, 1.5], "loss_low": [2.0, 1.0], "loss_high": [4.0, 2.0]}
    nowhere = lines.mean(METHOD, [whole, {"step": [], "loss": []}], "step", ("loss",))
    assert not any(nowhere.columns.values())


def test_seeds_without_a_common_step_are_shown_one_by_one(tmp_path: Path) -> None:
    plain = method("adamw", "AdamW", [1.0, 1.0])
    plain["curves"][1]["steps"] = [step + 1 for step in plain["curves"][1]["steps"]]
    write(tmp_path / "race/a/quick/summary.json", race(methods=[plain]))
    section = race_page.section(race_page.summaries(tmp_path / "race", "results/race"))
    (figure,) = (block for block in section if isinstance(block, Figure))
    shown = [row["run"] for row in figure.shown.charts[0].values if row["over_seeds"]]
    assert shown == ["seed 0", "seed 1"]


def test_a_method_that_diverged_at_every_rate_has_its_place_in_the_legend() -> None:
    found = view(EXPERIMENTS["fig5"], RESULTS / "reproduce", SCALES["quick"])
    (outcome,) = found.outcomes
    left = replace(outcome, records={**outcome.records, "all": []}, rates={**outcome.rates, "all": None})
    whole, without = (paper.figure(replace(found, outcomes=(own,))) for own in (outcome, left))
    assert without.methods == whole.methods
    assert len(without.charts[0].values) < len(whole.charts[0].values)
    assert f">{whole.methods[0].label}<" in svg(without)


def test_long_curves_keep_their_ends() -> None:
    steps: list[float | None] = list(range(1000))
    line = lines.Line(METHOD, "seed 0", {"step": steps, "loss": [1.0] * 1000})
    axes = [lines.Axis("loss", "Loss")], [lines.Axis("step", "Steps")]
    (row,) = lines.figure("f", [lines.Panel("id", "", "", [line])], *axes).charts[0].values
    assert len(row["step"]) == lines.POINTS
    assert (row["step"][0], row["step"][-1]) == (0, 999)


def test_a_source_names_each_thing_once() -> None:
    call = {
        "command": "c",
        "commit": "d",
        "time": "2026-01-02T03:04:05",
        "machine": {"cpu": "x", "threads": 1},
        "versions": {"torch": "2"},
    }
    source = Source.of(["r"], [call, call | {"time": "2026-01-03T00:00:00"}])
    assert source.commands == ("c",)
    assert source.about == "commit d · 2026-01-02 to 2026-01-03 · x, 1 thread · torch 2"
    assert Source.of(["r"], [{}]).about == ""


# In a browser

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # Scrolling is done when it is asked for.
    "--force-prefers-reduced-motion",
    "--window-size=1300,900",
)
WAIT = 20


class Browser:
    """The page in Chromium."""

    def __init__(self, driver: Any, address: str) -> None:
        self.driver, self._address = driver, address

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def until(self, condition: Callable[[], Any]) -> Any:
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, WAIT, 0.05).until(lambda _: condition())

    def open(self) -> None:
        self.driver.get(self._address)
        self.until(lambda: self.run("return document.documentElement.dataset.drawn === 'all'"))

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def count(self, selector: str) -> int:
        return int(self.run("return document.querySelectorAll(arguments[0]).length", selector))

    def text(self, chart: str) -> str:
        return str(self.run("return document.querySelector(arguments[0] + ' svg').textContent", f"#{chart}"))

    def lines(self, chart: str) -> int:
        return self.count(f"#{chart} .mark-line path")

    def choose(self, figure: str, label: str, chart: str) -> None:
        """Press a button or box of a figure, and wait for the chart to be drawn anew."""
        before = self.run("return document.getElementById(arguments[0]).dataset.drawn", chart)
        script = """
            const labels = [...document.querySelectorAll(`#${arguments[0]} label`)];
            labels.find((label) => label.textContent.trim() === arguments[1]).querySelector("input").click();
        """
        self.run(script, figure, label)
        self.until(lambda: self.run("return document.getElementById(arguments[0]).dataset.drawn", chart) != before)

    def hover(self, selector: str, right: int = 0, down: int = 0) -> str:
        """Move the pointer to the middle of an element, or so far from it; what the tooltip says."""
        from selenium.webdriver import ActionChains

        element = self.find(selector)
        self.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element)
        chain = ActionChains(self.driver, duration=0)
        chain.move_to_element_with_offset(element, right, down).move_by_offset(3, 3).perform()
        self.until(lambda: self.count("#vg-tooltip-element.visible"))
        return str(self.run("return document.querySelector('#vg-tooltip-element').textContent"))

    def style(self, selector: str, name: str) -> str:
        script = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
        return str(self.run(script, selector, name))


@pytest.fixture(scope="module")
def session(made_up: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all tests of this file."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("there is no chromium with its driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    try:
        yield Browser(driver, made_up.as_uri())
    finally:
        driver.quit()


@pytest.fixture
def browser(session: Browser) -> Iterator[Browser]:
    """The page as it is at first; at the end, whatever was done, nothing was written to the console."""
    session.open()
    yield session
    assert [entry["message"] for entry in session.driver.get_log("browser")] == []
    session.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    session.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    session.run("localStorage.clear()")


def test_every_chart_is_drawn(browser: Browser, made_up_text: str) -> None:
    assert browser.count(".chart svg") == len(charts(made_up_text)) > 8
    assert browser.lines("curve-mnist-mlp") == 4
    assert "target 0.200" in browser.text("curve-mnist-mlp")


def test_hovering_names_the_nearest_point(browser: Browser) -> None:
    said = browser.hover("#curve-mnist-mlp svg")
    for word in ("Method", "mean of 3 seeds", "Steps", "Seconds", "Training loss"):
        assert word in said
    assert "undefined" not in said
    assert browser.count("#curve-mnist-mlp .mark-symbol path[opacity='1']") == 1


def test_hovering_reads_a_cell(browser: Browser) -> None:
    said = browser.hover("#map-fig4-quick-a svg", -40, -60)
    for word in ("λ_a", "λ_g", "Training loss", "Test accuracy", "Learning rate", "finished"):
        assert word in said


def test_axes_scales_and_lines_can_be_chosen(browser: Browser) -> None:
    chart, figure = "curve-mnist-mlp", "figure-curve-mnist-mlp"
    first = browser.text(chart)
    assert "Steps" in first
    browser.choose(figure, "Linear", chart)
    linear = browser.text(chart)
    assert linear != first
    browser.choose(figure, "Seconds", chart)
    assert "Seconds" in browser.text(chart)
    assert "Steps" not in browser.text(chart)
    browser.choose(figure, "Seconds (log)", chart)
    browser.choose(figure, "Every seed", chart)
    assert browser.lines(chart) == 12


def test_methods_can_be_chosen(browser: Browser) -> None:
    chart, figure = "curve-mnist-mlp", "figure-curve-mnist-mlp"
    browser.choose(figure, "SOAP", chart)
    assert browser.lines(chart) == 3
    for label in ("AdamW", "AdamW + ISAAC", EVIL):
        browser.choose(figure, label, chart)
    assert browser.lines(chart) == 0
    browser.choose(figure, "AdamW", chart)
    assert browser.lines(chart) == 1


def test_all_methods_come_back_at_once(browser: Browser) -> None:
    chart = "curve-fig5-quick"
    for everything, expected in (("", 0), ("1", 8)):
        browser.run(f"document.querySelector('#figure-{chart} button[data-all=\"{everything}\"]').click()")
        browser.until(lambda expected=expected: browser.lines(chart) == expected)
        assert browser.lines(chart) == expected


def test_a_map_shows_loss_or_accuracy(browser: Browser) -> None:
    before = browser.text("map-fig4-quick-a")
    browser.choose("map-fig4-quick", "Test accuracy", "map-fig4-quick-a")
    after = browser.text("map-fig4-quick-a")
    assert "Training loss" in before
    assert "Test accuracy" in after


def test_the_ledger_is_filtered(browser: Browser) -> None:
    shown = "#ledger > li:not([hidden])"
    everything = browser.count(shown)
    browser.find("input[name=verdict][value=holds]").click()
    fewer = browser.count(shown)
    assert 0 < fewer < everything
    browser.find("form[data-filter=ledger] input[type=search]").send_keys("zeta gamma delta")
    assert browser.count(shown) == 0
    assert browser.find("form[data-filter=ledger] output").text == f"0 of {everything} claims"
    browser.find("form[data-filter=ledger] input[type=search]").send_keys("\b" * len("zeta gamma delta"))
    assert browser.count(shown) == fewer
    browser.find("select[name=about]").send_keys("Figure 5")
    assert 0 < browser.count(shown) < fewer
    assert browser.count(f"{shown}:not([data-about='Figure 5'])") == 0


def test_dark_mode_changes_page_and_charts_and_is_remembered(browser: Browser) -> None:
    colours = [
        ("body", "backgroundColor"),
        ("body", "color"),
        ("#curve-mnist-mlp .role-axis-label text", "fill"),
        ("#curve-mnist-mlp .mark-line path", "stroke"),
    ]
    light = [browser.style(*where) for where in colours]
    assert browser.find("#theme").get_attribute("aria-pressed") == "false"
    browser.find("#theme").click()
    dark = [browser.style(*where) for where in colours]
    assert all(before != after for before, after in zip(light, dark, strict=True))
    browser.open()
    assert [browser.style(*where) for where in colours] == dark
    assert browser.find("#theme").get_attribute("aria-pressed") == "true"


def test_the_system_decides_on_dark_mode_unless_told_otherwise(browser: Browser) -> None:
    light = browser.style("body", "backgroundColor")
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    assert browser.style("body", "backgroundColor") != light


def test_a_phone_does_not_scroll_sideways(browser: Browser) -> None:
    size = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.open()
    assert browser.run("return document.documentElement.scrollWidth") == 360
    widths = browser.run("return [...document.querySelectorAll('.chart svg')].map((svg) => svg.getBoundingClientRect().right)")
    assert max(widths) <= 360
    assert browser.run("return Math.max(...[...document.querySelectorAll('table')].map((table) => table.offsetWidth))") > 360


WIDE = "return [...document.querySelectorAll('.scroll')].filter((box) => box.scrollWidth > box.clientWidth + 1)"


def unfolded(browser: Browser, width: int) -> None:
    """The page on a screen of this width, everything open."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.open()
    browser.run("for (const details of document.querySelectorAll('details')) details.open = true")


def test_every_column_is_seen_on_a_screen(browser: Browser) -> None:
    unfolded(browser, 1280)
    assert browser.count(".scroll table") > 5
    assert browser.run(f"{WIDE}.length") == 0


def test_no_column_is_cut_on_a_phone_without_a_hint(browser: Browser) -> None:
    unfolded(browser, 400)
    browser.until(lambda: browser.run(f"{WIDE}.every((box) => 'more' in box.dataset)"))
    assert browser.run(f"{WIDE}.length") > 0
    hint = "return getComputedStyle(document.querySelector('.scroll[data-more]'), '::before').content"
    assert "scroll to the right" in browser.run(hint)
    hinted = browser.count(".scroll[data-more]")
    browser.run("const box = document.querySelector('.scroll[data-more]'); box.scrollLeft = box.scrollWidth")
    browser.until(lambda: browser.count(".scroll[data-more]") == hinted - 1)
    # The name of a row stays in sight.
    assert browser.style(".scroll tbody th[scope=row]", "position") == "sticky"


def test_the_keyboard_is_enough(browser: Browser) -> None:
    from selenium.webdriver import ActionChains, Keys

    def press(*keys: str) -> None:
        ActionChains(browser.driver, duration=0).send_keys(*keys).perform()

    press(Keys.TAB)
    assert browser.run("return document.activeElement.className") == "skip"
    assert browser.style(".skip", "outlineStyle") == "solid"
    press(Keys.ENTER)
    assert browser.run("return document.activeElement.id") == "main"
    browser.run("document.querySelector('#figure-curve-mnist-mlp input[name$=Horizontal]').focus()")
    before = browser.text("curve-mnist-mlp")
    press(Keys.ARROW_RIGHT)
    browser.until(lambda: browser.text("curve-mnist-mlp") != before)
    assert "Seconds" in browser.text("curve-mnist-mlp")


def test_paper_is_white_and_without_controls(browser: Browser) -> None:
    browser.find("#theme").click()
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert browser.style("body", "color") == "rgb(0, 0, 0)"
    assert browser.style("body", "backgroundColor") == "rgb(255, 255, 255)"
    for hidden in ("nav", ".controls", ".filters", "#theme", "details.numbers"):
        assert browser.run("return document.querySelector(arguments[0]).getClientRects().length", hidden) == 0
    # What a browser says before and after it prints; to print all of it would take as long as all other tests.
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert browser.count(".ledger details:not([open])") == 0
    browser.run("dispatchEvent(new Event('afterprint'))")
    assert browser.count(".ledger details[open]") == 0
