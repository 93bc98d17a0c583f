"""Pages claim only what stands: withdrawn sentences stay out, the README's numbers are those of records, prose is plain."""

import importlib.util
import json
import re
from collections import Counter
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import pytest

import isaac_newton
from isaac_lab.record import Store
from isaac_lab.report.page import build
from isaac_lab.report.race import summaries
from isaac_lab.stats import LEVEL, contrast
from isaac_lab.studies import recipes
from isaac_lab.studies.paper import EXPERIMENTS
from isaac_lab.studies.paper.folder import view
from isaac_lab.studies.paper.recipe import SCALES
from isaac_lab.studies.race import standings
from isaac_lab.studies.verdicts import standings as standings_of

ROOT = Path(__file__).parent.parent
INTEGRITY, WHICH = ROOT / "docs" / "integrity.md", ROOT / "docs" / "which.md"
#: All but the one that tells what was withdrawn.
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").glob("*.md")) if page != INTEGRITY)]

#: What docs/integrity.md withdraws, each with a way in which it was said.
WITHDRAWN = {
    r"\b(7|seven) to (10|ten) times": "7 to 10 times faster",
    r"tenth to a seventh|seventh to a tenth": "a tenth to a seventh of the time",
    r"\b(9\.68|10\.15)\b": "9.68 (6.58 to 14.25)",
    r"six of the seven|6 of (the )?7 races": "One of ours is first in seconds in six of the seven races",
    r"best of ours": "Best of ours",
    r"pays in every race": "**With AdamW** it pays in every race",
    r"two thirds on (MiniLM|CoLA)": "two thirds on MiniLM, fine-tuned on CoLA",
    r"(ζ\\?\*|conditioning|it|graph:?) (is )?free\b": "there ζ\\* is free",
    r"each method tried \d+ settings": "Each method tried 6 settings at seed 0",
    r"grids? of equal size": "the best setting of a grid of equal size",
    r"exceeds? (the|its) (combined )?(standard )?error": "if it exceeds the combined standard error",
    r"fine-tuning[^.]{0,40}\bgain(s|ed)\b": "Fine-tuning an encoder gained too",
    r"gains? [\d.]+ points": "gains 2.3 points of Matthews correlation",
    r"ended? a point higher": "There it ended a point higher in test accuracy",
    r"SIREN\W+(is worse|loses|lost)\b": "The SIREN is worse. No other recipe is shown to be",
    r"48 MB": "48 MB for all of ResNet-18 with batches of 100",
    r"and only there": "That saves more than conditioning adds in the paper's networks at batch 60, and only there",
    r"GPT[^.]{0,40}\bgains \(": "A small GPT trained with AdamW gains (test loss 1.86 against 2.08",
}


def words(text: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", text).split())


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def html() -> str:
    """The HTML page, without its scripts."""
    made = build(ROOT / "results")
    return words(re.sub(r"<script.*?</script>", " ", made, flags=re.DOTALL))


@pytest.mark.parametrize(("pattern", "said"), WITHDRAWN.items(), ids=WITHDRAWN.values())
def test_what_was_withdrawn_stays_out(pattern: str, said: str, html: str) -> None:
    assert re.search(pattern, said, re.IGNORECASE), "the pattern would not find what was said"
    for name, text in {**{page.name: words(page.read_text(encoding="utf-8")) for page in PAGES}, "the HTML page": html}.items():
        found = re.search(pattern, text, re.IGNORECASE)
        assert found is None, f"{name} says {found[0]!r}, which docs/integrity.md withdraws"


def test_every_correction_has_what_stands_and_a_record_that_is_there() -> None:
    text = INTEGRITY.read_text(encoding="utf-8")
    sections = re.split(r"^### ", text.partition("## Corrections of")[2], flags=re.MULTILINE)[1:]
    assert len(sections) >= 7
    for section in sections:
        for row in ("Was said", "What stands", "Record and command"):
            assert f"| {row} |" in section, f"{section.splitlines()[0]} has no row {row!r}"
        record, command = re.findall(r"`([^`]+)`", section[section.index("| Record and command |") :])[:2]
        assert (ROOT / record).exists(), record
        assert command.startswith(("isaac-newton ", "python tools/", "pytest ")), command


# The README's numbers


def ratio(record: str, case: str, method: str) -> float:
    cases = json.loads((ROOT / "results" / "bench" / f"{record}.json").read_text(encoding="utf-8"))["cases"]
    methods = next(own["methods"] for own in cases if own["name"] == case)
    return float(next(own["ratio"]["median"] for own in methods if own["name"] == method))


def cells(page: Path, first: str) -> list[str]:
    """Of the row of a table that begins so."""
    row = next(line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {first}"))
    return [cell.strip() for cell in row.strip("|").split("|")][1:]


def test_the_costs_of_the_papers_networks_are_those_of_the_records() -> None:
    readme = words((ROOT / "README.md").read_text(encoding="utf-8"))
    for mode, said in (("cuda-eager", "{} to {} in eager code"), ("cuda-captured", "{} to {} as one CUDA graph")):
        found = [ratio(f"table2-{mode}", case, "zeta_star") for case in ("100", "400", "1600", "6400", "autoencoder")]
        assert said.format(f"{min(found):.2f}", f"{max(found):.2f}") in readme


def suite(scale: str) -> dict[str, list[str]]:
    """By recipe, its row on the page of the suite, which a test of the recipes holds to the records."""
    page = (ROOT / "docs" / "recipes-suite.md").read_text(encoding="utf-8").replace("**", "")
    block = page[page.index(f"<!-- recipes-{scale} -->") : page.index(f"<!-- /recipes-{scale} -->")]
    rows = [row.strip("| ").split(" | ") for row in block.splitlines() if row.startswith("|") and ("↑" in row or "↓" in row)]
    return {
        name.partition(",")[0]: [cell.split()[0] for cell in rest[1:8]] for name, *rest in rows if rest[-1] != "not run whole"
    }


SHORT, FULL = suite("quick"), suite("standard")


def is_rounded(said: str, value: str) -> bool:
    digits = said.removesuffix(" %").partition(".")[2]
    return abs(float(value) - float(said.removesuffix(" %"))) <= 0.5 * 10.0 ** -len(digits) + 1e-9


def is_p(said: str, value: str) -> bool:
    return said in {form.replace("e-0", "e-") for form in (f"{float(value):.1g}", f"{float(value):.2g}")}


@pytest.mark.parametrize("recipe", SHORT)
def test_the_gains_of_every_recipe_are_those_of_its_page(recipe: str) -> None:
    plain, line, p, *full = cells(ROOT / "README.md", f"{recipe},")
    short = SHORT[recipe]
    assert is_rounded(plain, short[0])
    assert is_rounded(line, short[1])
    assert is_p(p, short[5])
    if recipe not in FULL:
        assert full == ["–"] * 4
        return
    there = FULL[recipe]
    assert all(map(is_rounded, (full[0], full[1], full[3]), there[:3]))
    assert is_p(full[2], there[5])


def test_what_the_readme_says_of_all_recipes_is_what_their_page_says() -> None:
    readme = words((ROOT / "README.md").read_text(encoding="utf-8"))
    found = standings_of(Store(ROOT / "results" / "recipes" / "standard"), "standard")
    count = Counter(own.verdict for own in found)
    whole = sum(count.values()) - count["not run whole"]
    lower = [own.recipe.name for own in found if own.p_better < LEVEL and own.gain[0] < 0]
    assert lower == ["deep-autoencoder", "siren"]
    # Of those that are better: what plain does at the best of its five rates.
    tuned = {own.recipe.name: own.p_tuned < LEVEL and own.gain[0] - own.tuned[0] for own in found if own.verdict == "better"}
    assert [name for name, ahead in tuned.items() if ahead > 0] == ["mnist-vae", "diamonds"]
    assert [name for name, ahead in tuned.items() if ahead < 0] == ["fourier-field"]
    assert "antiderivative" in tuned
    said = (
        f"at full length {count['better']} of {whole} are better, {count['worse']} is worse, {count['undecided']} are undecided"
    )
    assert said in readme
    assert f"of {whole} public recipes, trained whole, {count['better']} end better, {len(lower)} worse" in readme
    ahead = [own.gain[0] < own.tuned[0] for own in found if own.p_tuned < LEVEL]
    assert f"Plain at the best of five rates is ahead in {sum(ahead)}, behind in {len(ahead) - sum(ahead)}" in readme
    assert f"and {whole - count['better'] - len(lower)} show no difference" in readme
    assert "VAE and Diamonds are better than plain at its best rate too" in readme
    assert "The DeepONet is level with it, and the Fourier features are behind it" in readme


def on_the_way(recipe: str, quantity: str) -> dict[int, tuple[float, float, float]]:
    """By step: the means of plain and of the line at full length, and Welch's p of their difference."""
    own = recipes.arms(recipes.RECIPES[recipe], "standard")
    store = Store(ROOT / "results" / "recipes" / "standard")
    sides = [[store.get(trial) for trial in own[arm].finals(None)] for arm in ("plain", "line")]
    curves = [[{point["step"]: point[quantity] for point in run.points} for run in side if run] for side in sides]
    found = {}
    for step in list(curves[0][0])[1:]:
        plain, line = ([curve[step] for curve in side] for side in curves)
        found[int(step)] = fmean(plain), fmean(line), contrast(plain, line).p
    return found


def test_what_pages_say_of_the_way_to_the_end_is_what_the_records_say() -> None:
    error, loss = (on_the_way("deep-autoencoder", name) for name in ("test_error", "train_loss"))
    assert [f"{value:.3g}" for value in error[1200]] == ["8.94", "7.6", "0.000524"]
    assert error[2400][2] > LEVEL
    assert all(line > plain and p < LEVEL for step, (plain, line, p) in error.items() if step >= 3600)
    assert loss[3600][2] > LEVEL
    assert all(line > plain and p < LEVEL for step, (plain, line, p) in loss.items() if step >= 4800)
    plain, line, p = on_the_way("mnist-mlp", "test_loss")[10000]
    assert [f"{plain:.4f}", f"{line:.4f}", f"{p:.2g}"] == ["0.0745", "0.0856", "0.04"]
    squared = on_the_way("diamonds", "test_rmse")
    assert f"{squared[6120][2]:.2g}" == "0.16"
    assert squared[1360][1] > squared[1360][0]
    assert f"{squared[1360][2]:.2g}" == "0.0011"


@pytest.mark.parametrize(
    ("title", "kind", "case", "method"),
    [
        ("5 layers × 100", "table2", "100", "zeta_star"),
        ("5 layers × 400", "table2", "400", "zeta_star"),
        ("5 layers × 1600", "table2", "1600", "zeta_star"),
        ("5 layers × 6400", "table2", "6400", "zeta_star"),
        ("auto-encoder", "table2", "autoencoder", "zeta_star"),
        ("BERT-shaped, 2 layers", "shapes", "encoder", "zeta_star expand"),
        ('BERT-shaped, "reduce"', "shapes", "encoder", "zeta_star reduce"),
        ('ResNet-18, "reduce"', "shapes", "resnet18", "zeta_star reduce"),
        ("ResNet-18, last layer", "shapes", "resnet18", "zeta_star last layer"),
    ],
)
def test_eager_and_captured_stand_side_by_side_as_recorded(title: str, kind: str, case: str, method: str) -> None:
    modes = ("cuda-eager", "cuda-captured", "cpu-1thread")
    found = [f"{ratio(f'{kind}-{mode}', case, method):.3f}" for mode in modes]
    assert cells(ROOT / "docs" / "performance.md", title)[:3] == found


def test_the_gain_of_figure_5_is_that_of_its_record() -> None:
    (found_runs,) = view(EXPERIMENTS["fig5"], ROOT / "results" / "reproduce", SCALES["quick"]).outcomes
    plain, ours = ([run.final("train_loss") for run in found_runs.records[name]] for name in ("none", "all"))
    means = [f"{sum(own) / len(own):.4f}" for own in (plain, ours)]
    found = contrast(plain, ours)
    assert found.ahead
    assert cells(WHICH, "MNIST, 5 × 400") == ["SGD", *means, f"{found.p:.2g}", str(len(plain))]


def ends(method: str, quantity: str) -> list[float]:
    runs: list[Any] = json.loads((ROOT / "results" / "demo" / "records.json").read_text(encoding="utf-8"))["runs"]
    return [float(run["measurements"][-1][quantity]) for run in runs if run["method"] == method]


@pytest.mark.parametrize(("optimizer", "row"), [("SGD", "Digits"), ("Adam", "The same")])
def test_the_gains_of_the_demo_are_those_of_its_record(optimizer: str, row: str) -> None:
    plain, ours = (ends(name, "test_accuracy") for name in (optimizer, f"{optimizer} + ISAAC"))
    found = contrast(ours, plain)
    assert found.ahead
    shown = [f"{100 * sum(own) / len(own):.1f} %" for own in (plain, ours)]
    assert cells(WHICH, row) == [optimizer, *shown, f"{found.p:.1g}", str(len(plain))]


def test_the_table_on_the_auto_encoder_is_that_of_its_record(capsys: pytest.CaptureFixture[str]) -> None:
    code = tool("code_layer")
    runs = [json.loads(line) for line in code.RECORD.read_text(encoding="utf-8").splitlines()]
    code.report({code.key(run): run for run in runs if "curve" in run})
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()[2:]]
    assert len(rows) == 4
    for case, schedule, *figures in rows:
        name = {"relu": "ReLU", "linear": "linear"}[case]
        shown = cells(INTEGRITY, f"{name} | {schedule}")
        assert shown[1:5] == figures[:4]
        assert shown[-1] == figures[-1]
    plain, ours, p = rows[-1][2:5]
    assert cells(WHICH, "MNIST auto-encoder") == ["AdamW", plain, ours, f"{float(p):.1g}", "3"]


def test_the_table_on_taking_the_line_out_is_that_of_its_record(capsys: pytest.CaptureFixture[str]) -> None:
    back = tool("hand_back")
    runs = [json.loads(line) for line in back.RECORD.read_text(encoding="utf-8").splitlines()]
    assert sorted((run["arm"], run["seed"]) for run in runs) == sorted((arm, seed) for arm in back.ARMS for seed in back.SEEDS)
    back.report(runs)
    assert capsys.readouterr().out in (ROOT / "docs" / "when-not.md").read_text(encoding="utf-8")


def test_what_pages_say_of_all_races_is_what_their_records_say() -> None:
    races = summaries(ROOT / "results" / "race")
    lowest = Counter(standings.lowest(race) for race in races)
    assert f"SOAP is lowest in {lowest['SOAP']} of {len(races)} races" in words(INTEGRITY.read_text(encoding="utf-8"))
    assert lowest["AdamW + ISAAC"] == 0
    below = 0
    for race in races:
        found = {method["name"]: method["final"]["values"] for method in race["methods"] if method["n"]}
        below += contrast(found["soap"], found["isaac-adamw"]).behind
    said = f"SOAP reached a lower loss than AdamW + ISAAC in {below} of our {len(races)}"
    assert said in words((ROOT / "README.md").read_text(encoding="utf-8"))


# Prose


def test_all_pages_are_plain(capsys: pytest.CaptureFixture[str]) -> None:
    prose = tool("prose")
    assert prose.main([]) == 0, capsys.readouterr().out
    everything = {*(page.name for page in ROOT.glob("*.md")), *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))}
    assert everything - {"CHANGELOG.md"} == set(prose.PAGES)


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        (f"{'word ' * 31}end.\n", "a sentence of 32 words"),
        ("a line\n" * 7, "a paragraph of 7 lines"),
        (f"{'x' * 121}\n", "121 columns"),
        ("- " + "a line\n" * 7, "a paragraph of 7 lines"),
    ],
)
def test_hard_prose_is_found(text: str, finding: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    assert any(finding in line for line in tool("prose").check(page))


def test_code_tables_quotations_and_short_points_are_not_prose(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    long = "word " * 40
    page.write_text(f"```sh\n{long}\n```\n\n| {long} |\n|---|\n\n“{long[:100]}”\n\n" + "- a point\n" * 9, encoding="utf-8")
    assert tool("prose").check(page) == []


def test_the_first_screen_has_the_line_the_formula_the_cost_and_the_install_command() -> None:
    screen = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:45])
    for part in (
        "+ handle = isaac.attach(",
        "ζ* = gᵀ",
        "pip install .",
        "**Cost:**",
        "**Gain:**",
        "torch ≥ 2.9",
        "has to be tuned again",
    ):
        assert part in screen


# Habits


def test_the_version_is_the_same_everywhere() -> None:
    version = isaac_newton.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest
    assert newest[1] == version


def test_workflows_call_make_and_nothing_else() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    calls = [
        command
        for path in (ROOT / ".github" / "workflows").glob("*.yml")
        for command in re.findall(r"^\s*- run: (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert {"make lint", "make test", "make dist", "make demo"} <= set(calls)
    assert all(re.fullmatch(r"make (\w+)", call) and call[5:] in targets for call in calls)
