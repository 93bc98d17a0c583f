"""The recipe suite: one line is all that differs, searches never see tests, verdicts are what the seeds say."""

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from typer.testing import CliRunner, Result

from isaac_lab import method, methods
from isaac_lab.cli import app
from isaac_lab.data import tables
from isaac_lab.data.files import SETS, DataError
from isaac_lab.executors import Call
from isaac_lab.record import Checkpoint, Record, Store
from isaac_lab.report import docs
from isaac_lab.report import recipes as report
from isaac_lab.stats import contrast, exceeds, holm, interval
from isaac_lab.studies import StudyError, recipes
from isaac_lab.studies.calls import Means
from isaac_lab.studies.recipes import ARMS, LINE, RECIPES, RULES, SCALES, Recipe, arms, chosen
from isaac_lab.studies.verdicts import standings, summed_up
from isaac_lab.training import Options, train
from isaac_lab.trial import Trial, TrialError
from isaac_lab.workload import Form, load
from isaac_lab.workloads import generated, ppo, resnet
from isaac_lab.workloads.characters import Characters
from isaac_lab.workloads.examples import Examples, cut
from isaac_lab.workloads.glue import Glue
from isaac_lab.workloads.mlp import Network
from isaac_lab.workloads.ppo import CartPole, Player
from isaac_lab.workloads.resnet import ResNet

EVERY = pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
SMALL = "antiderivative"


def first(recipe: Recipe, arm: str, scale: str = "smoke") -> Trial:
    return arms(recipe, scale)[arm].finals(None)[0]


def searched(recipe: Recipe, scale: str = "smoke") -> list[Trial]:
    (search,) = arms(recipe, scale)["tuned"].search
    return list(search.candidates(None))


# The rules


@EVERY
@pytest.mark.parametrize("scale", SCALES)
def test_one_line_is_all_that_differs(recipe: Recipe, scale: str) -> None:
    plain, line = (arms(recipe, scale)[arm].finals(None) for arm in ARMS[:2])
    assert [replace(own, method=own.method.removesuffix(LINE)) for own in line] == list(plain)
    assert all(own.method.endswith(LINE) for own in line)
    for own in (plain[0], line[0]):
        method.check(own)
        assert own.learning_rate == recipe.settings["learning_rate"]


@EVERY
def test_the_line_has_no_options(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    whole = methods.isaac.attach

    def attach(*arguments: Any, **options: Any) -> Any:
        seen.append((arguments, options))
        return whole(*arguments, **options)

    monkeypatch.setattr(methods.isaac, "attach", attach)
    trial = first(recipe, "line")
    workload = load(trial, device="cpu")
    model = workload.model(0)
    prepared = methods.prepare(trial, workload, model)
    assert seen == [((model,), {})]
    assert prepared.step(*next(iter(workload.batches(0, 1)))).isfinite()


@EVERY
@pytest.mark.parametrize("scale", SCALES)
def test_searches_are_on_a_split_of_the_training_set_and_seeds_are_fresh(recipe: Recipe, scale: str) -> None:
    candidates = searched(recipe, scale)
    assert {trial.split for trial in candidates} == {"validation"}
    assert {trial.seed for trial in candidates} == {RULES.search_seed}
    rates = [trial.learning_rate for trial in candidates]
    assert len(set(rates)) == (2 if scale == "smoke" else 5)
    assert recipe.settings["learning_rate"] in rates
    finals = arms(recipe, scale)["tuned"].finals(candidates[-1])
    assert {trial.split for trial in finals} == {"test"}
    assert {trial.learning_rate for trial in finals} == {rates[-1]}
    seeds = {trial.seed for own in (finals, *(arms(recipe, scale)[arm].finals(None) for arm in ARMS[:2])) for trial in own}
    assert len(seeds) == (2 if scale == "smoke" else 5)
    # 1 and 2 chose the rule of the line, 0 the rates.
    assert not seeds & {0, 1, 2, RULES.search_seed}


def test_records_carry_the_rules_and_other_rules_make_other_runs() -> None:
    hashes = {first(recipe, "line", scale).rules for recipe in RECIPES.values() for scale in SCALES}
    assert len(hashes) == len(RECIPES) * len(SCALES)
    trial = first(RECIPES[SMALL], "plain")
    assert replace(trial, rules="another").key != trial.key
    assert Trial.from_json(trial.as_json()) == trial


@EVERY
def test_margins_are_positive_and_standard_runs_are_long(recipe: Recipe) -> None:
    assert all(recipe.budget(scale).margin > 0 for scale in SCALES)
    assert recipe.smoke.steps < recipe.quick.steps <= recipe.standard.steps


@pytest.mark.parametrize(
    ("name", "data", "batch", "epochs"),
    [
        ("mnist-cnn", "mnist", 64, 14),
        ("mnist-vae", "mnist", 128, 10),
        ("deep-autoencoder", "mnist", 100, 20),
        ("mrpc", "mrpc", 32, 3),
        ("cola", "cola", 32, 3),
        ("diamonds", "diamonds", 512, 80),
    ],
)
def test_the_published_epochs_are_these_steps(name: str, data: str, batch: int, epochs: int) -> None:
    assert RECIPES[name].standard.steps == epochs * -(-SETS[data].examples[0] // batch)


def test_nobody_asks_for_a_recipe_that_is_not_there() -> None:
    with pytest.raises(StudyError, match="there is no recipe 'x'; there are mnist-cnn"):
        recipes.chosen(["x"])


# What is trained


@EVERY
@pytest.mark.parametrize("arm", ARMS[:2])
def test_a_run_that_is_cut_ends_with_the_same_bits(recipe: Recipe, arm: str, tmp_path: Path) -> None:
    trial = replace(first(recipe, arm), steps=6 if recipe.name != "cartpole" else 20)
    workload = load(trial, device="cpu")
    (whole,) = train([trial], workload, Options())
    assert whole.finished
    assert all(math.isfinite(whole.final(name)) for name in (recipe.metric, "train_loss", "test_loss"))

    class Stopping(Checkpoint):
        left = trial.steps - 2

        def save(self, state: Any) -> None:
            super().save(state)
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train([trial], workload, Options(seconds=0), checkpoint=Stopping(tmp_path / "x.checkpoint", [trial]))
    torch.manual_seed(99)
    (again,) = train([trial], workload, Options(), checkpoint=Checkpoint(tmp_path / "x.checkpoint", [trial]))
    assert (again.digest, dict(again.curve)) == (whole.digest, dict(whole.curve))


def rows(tensor: Tensor) -> set[bytes]:
    return {row.contiguous().numpy().tobytes() for row in tensor}


def parts(trial: Trial) -> tuple[set[Any], set[Any]]:
    """What a workload trains on, and what it calls its tests."""
    workload = load(trial, device="cpu")
    if isinstance(workload, Examples):
        return rows(workload._train[0]), rows(workload._test[0])
    if isinstance(workload, Network):
        return rows(workload.inputs), rows(workload.test[0])
    if isinstance(workload, ResNet):
        return rows(workload._padded[:, 4:-4, 4:-4]), rows(workload._test[0])
    if isinstance(workload, Glue):
        splits = workload.task.train, workload.task.dev
        train, dev = (set(zip(own.first, own.second or own.first, strict=True)) for own in splits)
        return train, dev
    assert isinstance(workload, Characters)
    size = 24
    texts = workload.text[: workload.trained], workload.text[workload.trained :]
    train, tests = ({bytes(x[at : at + size].tolist()) for at in range(len(x) - size)} for x in texts)
    return train, tests


# The pole has no examples: see `test_rounds_of_a_search_are_others`.
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "cartpole"])
def test_tests_are_not_trained_on_and_searches_do_not_see_them(name: str) -> None:
    recipe = RECIPES[name]
    (train_set, tests), (fitted, held) = parts(first(recipe, "plain")), parts(searched(recipe)[0])
    # Digits, generated sentences and lines of a play come twice now and then.
    few = 0.02 * len(tests) if recipe.workload not in ("mrpc", "cola") else len(tests)
    assert len(train_set & tests) <= few
    assert held
    assert len(held & fitted) <= max(1, 0.05 * len(held)) or recipe.workload in ("mrpc", "cola")
    if recipe.name != "antiderivative":
        assert held | fitted <= train_set
    else:
        assert not held & (train_set | tests)


def test_a_cut_is_the_same_for_all_and_leaves_nothing_out() -> None:
    fitted, held = cut(50, "validation")
    assert (len(fitted), len(held)) == (45, 5)
    assert sorted([*fitted.tolist(), *held.tolist()]) == list(range(50))
    assert cut(50, "validation", 10)[0].tolist() == fitted[:10].tolist()
    assert len(cut(50, "test")[1]) == 0
    with pytest.raises(TrialError, match="examples must be at most 45"):
        cut(50, "validation", 46)


def test_a_workload_without_a_split_says_so() -> None:
    with pytest.raises(TrialError, match="stsb has no examples for searches"):
        load(Trial("stsb", "sgd", small=True, split="validation"), device="cpu")
    with pytest.raises(TrialError, match="split must be one of test, validation"):
        Trial("stsb", "sgd", split="dev")


def test_rounds_of_a_search_are_others() -> None:
    model = CartPole(Form()).model(0)
    played = [CartPole(Form(split=split)).evaluate(model)["test_return"] for split in ("test", "validation", "test")]
    assert played[0] == played[2] != played[1]


def test_a_pole_falls_as_the_textbook_says() -> None:
    def by_hand(x: float, v: float, angle: float, w: float, right: bool) -> list[float]:
        force = 10.0 if right else -10.0
        swing = (force + 0.05 * w**2 * math.sin(angle)) / 1.1
        turned = (9.8 * math.sin(angle) - math.cos(angle) * swing) / (0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2 / 1.1))
        moved = swing - 0.05 * turned * math.cos(angle) / 1.1
        return [x + 0.02 * v, v + 0.02 * moved, angle + 0.02 * w, w + 0.02 * turned]

    states = torch.randn(7, 4, dtype=torch.float64)
    right = torch.tensor([True, False, True, True, False, False, True])
    found = ppo.pushed(states, right)
    for before, push, after in zip(states.tolist(), right.tolist(), found.tolist(), strict=True):
        assert after == pytest.approx(by_hand(*before, push), rel=1e-12)
    fallen = ppo.fallen(torch.tensor([[0.0, 9, 0, 9], [2.5, 0, 0, 0], [0, 0, -0.3, 0]]))
    assert fallen.tolist() == [False, True, True]


def test_advantages_are_those_of_a_slow_sum() -> None:
    model = CartPole(Form(), length=40, carts=3).model(3)
    assert isinstance(model, Player)
    model.play(torch.rand(40, 3, 5, generator=torch.Generator().manual_seed(0)))
    # Where a round ended the next state begins near zero, which a push from there never reaches.
    following = torch.cat([model.seen[1:], model.state[None]])
    states = zip(model.seen, model.right, following, strict=True)
    on = torch.stack([(ppo.pushed(state, right) - after).abs().amax(1) < 1e-6 for state, right, after in states])
    assert (~on).any()
    after = torch.cat([model.value[1:], model.critic(model.state).detach().T])
    for cart in range(3):
        for start in range(40):
            total, weight = 0.0, 1.0
            for step in range(start, 40):
                goes_on = float(on[step, cart])
                total += weight * (1 + 0.99 * goes_on * after[step, cart] - model.value[step, cart]).item()
                weight *= 0.99 * 0.95 * goes_on
            assert model.advantage[start, cart].item() == pytest.approx(total, rel=1e-4, abs=1e-4)


def test_antiderivatives_are_those_of_the_functions() -> None:
    values, area = generated.functions(20, "some")
    assert not area[:, 0].any()
    slopes = (area[:, 2:] - area[:, :-2]) * (generated.POINTS - 1) / 2
    assert (slopes - values[:, 1:-1]).abs().max() < 0.02
    assert values.std() == pytest.approx(1, abs=0.3)


def test_a_flow_is_a_density() -> None:
    torch.manual_seed(0)
    model = generated.RealNVP(width=8).double()
    for parameter in model.parameters():
        parameter.data.mul_(2)
    side = torch.linspace(-40, 40, 1001, dtype=torch.float64)
    with torch.no_grad():
        density = torch.stack([(-model(torch.cartesian_prod(x[None], side))).exp() for x in side])
    assert torch.trapezoid(torch.trapezoid(density, side), side).item() == pytest.approx(1, abs=1e-4)


def test_moons_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import make_moons

    theirs = torch.from_numpy(make_moons(4000, noise=generated.NOISE, random_state=0)[0]).float()
    far = torch.cdist(generated.moons(4000, "some"), theirs).min(1).values
    assert far.quantile(0.99) < generated.NOISE
    assert generated.moons(4000, "some").mean(0).tolist() == pytest.approx(theirs.mean(0).tolist(), abs=0.05)


def test_sums_are_those_of_two_different_numbers_that_are_marked() -> None:
    sequences, sums = generated.additions(300, 5, "some")
    numbers, marks = sequences.unbind(1)
    assert set(marks.flatten().tolist()) == {0.0, 1.0}
    assert (marks.sum(1) == 2).all()
    for own, marked, total in zip(numbers.tolist(), marks.tolist(), sums.flatten().tolist(), strict=True):
        assert total == pytest.approx(sum(x for x, mark in zip(own, marked, strict=True) if mark))


def test_a_temporal_network_sees_the_past_only() -> None:
    blocks = generated.TCN(levels=3, width=4).blocks
    sequences = torch.randn(2, 2, 40)
    changed = torch.cat([sequences[..., :25], torch.randn(2, 2, 15)], -1)
    torch.testing.assert_close(blocks(sequences)[..., :25], blocks(changed)[..., :25])
    assert not torch.allclose(blocks(sequences)[..., 25:], blocks(changed)[..., 25:])


def test_small_images_are_large_ones_seen_from_far() -> None:
    ramp = torch.arange(32, dtype=torch.uint8).expand(2, 3, 32, 32)
    small, large = resnet.pairs(ramp)
    assert (small.shape, large.shape) == ((2, 1, 10, 10), (2, 1, 30, 30))
    torch.testing.assert_close(255 * large[0, 0, 0], torch.arange(1.0, 31.0))
    # Away from the edges the mean of three pixels in a ramp is the middle one, however its neighbours are weighted.
    torch.testing.assert_close(small[..., 1:-1, 1:-1], large[..., 4:-4:3, 4:-4:3])
    assert resnet.SubPixel(8)(small).shape == large.shape


def test_diamonds_are_read_and_checked(tmp_path: Path) -> None:
    (tmp_path / "diamonds").mkdir()
    (tmp_path / "diamonds" / "diamonds.csv").write_text('"carat","cut"\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"diamonds.csv has a wrong checksum"):
        tables.load("diamonds", tmp_path)
    assert tables.load("diabetes").numbers.shape == (442, 10)


@pytest.mark.parametrize(
    ("trial", "shares"),
    [
        (Trial("x", "adam", (("warm_up", 4), ("floor", 0.1)), schedule="cosine", steps=8), {0: 0.2, 3: 0.8, 4: 1.0, 6: 0.55}),
        (Trial("x", "adam", schedule="straight", steps=8), {0: 1.0, 6: 0.25}),
        (Trial("x", "adam", (("drop", 0.5), ("drops", 4)), schedule="stepped", steps=8), {0: 1.0, 1: 1.0, 2: 0.5, 7: 0.125}),
    ],
)
def test_schedules(trial: Trial, shares: dict[int, float]) -> None:
    assert {step: trial.share(step) for step in shares} == pytest.approx(shares)


# What the seeds say


def test_tests_are_those_of_scipy() -> None:
    one, other = [1.0, 1.2, 0.9, 1.1, 1.4], [0.8, 1.0, 0.7, 0.9]
    assert exceeds(one, other, 0.1) == pytest.approx(
        stats.ttest_ind([x - 0.1 for x in one], other, equal_var=False, alternative="greater").pvalue
    )
    known = stats.ttest_ind(one, other, equal_var=False).confidence_interval(0.95)
    assert interval(one, other) == pytest.approx((known.low, known.high))
    assert exceeds([1.0, 1.0], [1.0, 1.0], -0.1) == 0
    assert exceeds([1.0, 1.0], [1.0, 1.0], 0) == 1


def test_holm_as_in_his_paper() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}) == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
    assert holm({"a": 0.9, "b": 0.8}) == {"b": 1.0, "a": 1.0}
    assert holm({}) == {}


ABOUT = {"data": "made up", "executor": "local", "commit": None, "versions": {}}


def told(store: Store, recipe: Recipe, value: Callable[[str, Trial], float]) -> None:
    """Records of all runs of a recipe; a value that is infinite diverged."""
    own = arms(recipe, "quick")
    trials = {arm: own[arm].finals(None) for arm in ARMS[:2]}
    trials["search"] = searched(recipe, "quick")
    trials["tuned"] = own["tuned"].finals(trials["search"][-1])
    with store.writing():
        for arm, runs in trials.items():
            for trial in runs:
                end = value(arm, trial)
                lost = math.isinf(end)
                curve = {"step": [0.0, 1.0], **{name: [1.0, None if lost else end] for name in ("train_loss", "test_loss")}}
                curve[recipe.metric] = [1.0, None if lost else end]
                store.add(Record(trial, "diverged" if lost else "finished", curve, 0.01, ABOUT, "2026"))


NOISE = {101: 0.1, 102: -0.1, 103: 0.05, 104: -0.05, 105: 0.0}


@pytest.mark.parametrize(
    ("gain", "noise", "verdict"),
    [
        (3.0, 1.0, "better"),
        (0.0, 1.0, "not worse"),
        (-0.5, 1.0, "not worse"),
        (0.0, 40.0, "undecided"),
        (-3.0, 1.0, "worse"),
        (math.nan, 1.0, "diverged"),
    ],
)
@pytest.mark.parametrize("name", ["mnist-vae", "siren"])
def test_verdicts(name: str, gain: float, noise: float, verdict: str, tmp_path: Path) -> None:
    recipe, store = RECIPES[name], Store(tmp_path / "quick")
    margin, sign = recipe.quick.margin, 1 if recipe.higher else -1

    def value(arm: str, trial: Trial) -> float:
        base = 50 + margin * noise * NOISE.get(trial.seed, 0)
        if arm == "search":
            return base + sign * trial.learning_rate
        if arm == "line" and math.isnan(gain):
            return math.inf if trial.seed == 103 else base
        return base + sign * margin * gain * (arm == "line")

    told(store, recipe, value)
    (found,) = standings(store, "quick")
    assert found.verdict == verdict
    assert summed_up([found]) == f"1 recipes: 1 {verdict}."
    if not math.isnan(gain):
        assert found.gain[0] == pytest.approx(margin * gain, abs=1e-9)
        assert found.p_better == pytest.approx(contrast(*(found.samples[arm].values for arm in ("line", "plain"))).p)
        assert found.gain[1] <= found.gain[0] <= found.gain[2]
    # The last of five is the best here, and it lies at the edge.
    assert found.edge
    assert found.rate == pytest.approx(10 * recipe.settings["learning_rate"])
    shown = report.table([found]).markdown()
    assert recipe.title in shown
    assert verdict in shown
    assert "Mean of 5 seeds" in report.table([found]).note


def test_more_recipes_make_it_harder_to_be_shown_as_harmless(tmp_path: Path) -> None:
    names = ("mnist-vae", "siren", "mnist-cnn", "diamonds")
    alone = []
    for count in (1, 4):
        store = Store(tmp_path / str(count))
        for name in names[:count]:
            margin = RECIPES[name].quick.margin
            told(store, RECIPES[name], lambda arm, trial, m=margin: 50 + 6 * m * NOISE.get(trial.seed, 0))  # type: ignore[misc]
        alone.append(next(own.p_not_worse for own in standings(store, "quick") if own.recipe.name == "mnist-vae"))
    assert alone[1] == pytest.approx(4 * alone[0])


def test_runs_of_other_rules_are_not_in_the_table(tmp_path: Path) -> None:
    store = Store(tmp_path)
    trial = replace(first(RECIPES["siren"], "plain", "quick"), rules="another")
    with store.writing():
        store.add(Record(trial, "finished", {"step": [0.0], "psnr": [1.0], "train_loss": [1.0]}, 0.01, ABOUT, "2026"))
    assert standings(store, "quick") == []


# The command


def called(*words: str) -> Result:
    return CliRunner().invoke(app, ["recipes", "--device", "cpu", *words])


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """All recipes, small."""
    out = tmp_path_factory.mktemp("recipes")
    result = called("--scale", "smoke", "--out", str(out))
    assert result.exit_code == 0, result.output
    return out, result.output


def test_the_smoke_test_runs_every_recipe(smoke: tuple[Path, str]) -> None:
    out, said = smoke
    assert f"{len(RECIPES)} recipes:" in said
    text = (out / "smoke" / "table.md").read_text(encoding="utf-8")
    assert all(text.count(f"| {recipe.title} |") == 2 for recipe in RECIPES.values())
    assert (out / "smoke" / "figure.svg").is_file()
    store = Store(out / "smoke")
    # Two seeds plain, two with the line, two rates; where the own rate is the best, its runs are those of plain.
    assert len(store.records()) >= 6 * len(RECIPES)
    assert set(store.times()) == set(RECIPES)
    assert store.about["networks"] == dict.fromkeys(("mrpc", "cola"), "tiny random BERT")


def test_the_same_command_again_trains_nothing(smoke: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(smoke[0], tmp_path / "out")
    before = (tmp_path / "out" / "smoke" / "trials.jsonl").read_bytes()
    result = called("--out", str(tmp_path / "out"), "--recipes", f"{SMALL},siren")
    assert result.exit_code == 0, result.output
    assert "to go" not in result.output
    assert (tmp_path / "out" / "smoke" / "trials.jsonl").read_bytes() == before


def test_when_time_is_up_the_same_command_goes_on(smoke: tuple[Path, str], tmp_path: Path) -> None:
    words = ("--out", str(tmp_path), "--recipes", SMALL)
    result = called(*words, "--minutes", "0.0001")
    assert result.exit_code == 3, result.output
    assert called(*words).exit_code == 0
    known = Store(smoke[0] / "smoke")
    for record in (records := Store(tmp_path / "smoke").records()):
        other = known.get(record.trial)
        assert other is not None
        assert other.digest == record.digest
    assert len(records) >= 6


def test_several_workers_train_all_recipes_together(smoke: tuple[Path, str], tmp_path: Path) -> None:
    result = called("--out", str(tmp_path), "--recipes", f"{SMALL},siren", "--workers", "2")
    assert result.exit_code == 0, result.output
    store, known = Store(tmp_path / "smoke"), Store(smoke[0] / "smoke")
    assert {call["panel"] for call in store.about["calls"]} in ({f"{SMALL},siren"}, {f"siren,{SMALL}"})
    assert set(store.times()) == {SMALL, "siren"}
    for record in (records := store.records()):
        other = known.get(record.trial)
        assert other is not None
        assert other.digest == record.digest
    assert len(records) >= 12


def test_a_page_is_filled(smoke: tuple[Path, str], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    shutil.copytree(smoke[0] / "smoke", tmp_path / "out" / "smoke")
    told(Store(tmp_path / "out" / "quick"), RECIPES["siren"], lambda arm, trial: 20 + NOISE.get(trial.seed, 0))
    page = tmp_path / "page.md"
    blocks = ("recipes-quick", "recipes-standard", "recipes-rules")
    page.write_text("".join(f"<!-- {name} -->\n<!-- /{name} -->\n" for name in blocks), encoding="utf-8")
    words = ("--out", str(tmp_path / "out"), "--draw-only", "--fill", str(page))
    assert called(*words).exit_code == 0
    text = page.read_text(encoding="utf-8")
    assert "No record has been made by the rules as they are." in text
    assert "figures/recipes-quick.svg" in text
    assert (tmp_path / "figures" / "recipes-quick.svg").is_file()
    assert text.count("| SIREN |") == 3
    page.write_text("no marks\n", encoding="utf-8")
    assert "has no <!-- recipes-quick -->" in " ".join(called(*words).output.replace("│", "").split())
    page.unlink()
    assert "'--fill': there is no page" in " ".join(called(*words).output.replace("│", "").split())


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    result = called("--out", str(tmp_path), "--draw-only")
    assert result.exit_code == 2
    assert "there is no run of the recipes" in " ".join(result.output.replace("│", "").split())
    assert "there is no recipe 'x'" in called("--recipes", "x").output


def test_recipes_whose_data_are_missing_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = recipes.load

    def without(trial: Trial, **options: Any) -> Any:
        if trial.workload == "siren":
            raise DataError("no picture")
        return whole(trial, **options)

    monkeypatch.setattr(recipes, "load", without)
    store, means = Store(tmp_path), Means(Call())
    assert [own.recipe.name for own in standings(recipes.run(chosen((SMALL, "siren")), store, "smoke", means), "smoke")] == [
        SMALL
    ]
    with pytest.raises(DataError, match="no picture"):
        recipes.run(chosen(("siren",)), store, "smoke", means)


def test_the_page_says_what_the_records_say(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    page = tmp_path / "recipes-suite.md"
    shutil.copy(root / "docs" / page.name, page)
    docs.fill(page, report.blocks(root / "results" / "recipes", tmp_path / "figures"))
    assert page.read_text(encoding="utf-8") == (root / "docs" / page.name).read_text(encoding="utf-8")
    for drawn in (tmp_path / "figures").iterdir():
        assert drawn.read_bytes() == (root / "docs" / "figures" / drawn.name).read_bytes()
