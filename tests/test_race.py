"""The race: rules before runs, alike for all; searches never see tests; other rules are refused; a kill loses nothing."""

import io
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from scipy import stats
from torch import nn
from typer.testing import CliRunner, Result

import isaac_newton as isaac
from isaac_lab import executors, method, methods
from isaac_lab.commands.studies import race as command_of_the_race
from isaac_lab.data import sets
from isaac_lab.data.files import DataError
from isaac_lab.lines import encode
from isaac_lab.methods.muon import Muon
from isaac_lab.methods.optimizers import kron
from isaac_lab.methods.schedule_free import ScheduleFree
from isaac_lab.methods.soap import Soap
from isaac_lab.networks import Alone
from isaac_lab.progress import Display
from isaac_lab.record import Record, Store
from isaac_lab.records import StoreError
from isaac_lab.report import docs
from isaac_lab.report import race as report
from isaac_lab.stats import holm, paired, sample
from isaac_lab.studies import StudyError
from isaac_lab.studies.calls import Means
from isaac_lab.studies.race import race, runner, standings
from isaac_lab.studies.race.race import COURSES, ENTRANTS, RULES, SCALES, Course, Range, arms, due, entrants
from isaac_lab.study import decides, resolve
from isaac_lab.training import Options, StoppedError, train
from isaac_lab.trial import Trial
from isaac_lab.workload import _load, load

ROOT = Path(__file__).parent.parent
SMOKE, STANDARD = SCALES["smoke"], SCALES["standard"]
MLP = COURSES["mnist-mlp"]
#: In this process: another takes longer to start than a tiny run to train.
HERE = Means(executors.Call(workers=1))
FEW = ("adamw", "isaac-adamw", "nesterov")
EVERY = pytest.mark.parametrize("course", COURSES.values(), ids=list(COURSES))


def request(out: Path, **options: Any) -> runner.Request:
    return runner.Request(out, SMOKE, **{"methods": FEW, "means": HERE, **options})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small race that has been run."""
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


class Made:
    """Records made up: the higher `value` of a run, the worse."""

    def __init__(self, course: Course, value: Callable[[Trial], float]) -> None:
        self.course, self.value, self.known = course, value, dict[Trial, Record]()

    def get(self, trial: Trial) -> Record | None:
        return self.known.get(trial)

    def train(self, trials: Sequence[Trial]) -> None:
        sign = -1 if self.course.higher else 1
        for trial in trials:
            self.known[trial] = Record(trial, "finished", {"step": [1], self.course.metric: [sign * self.value(trial)]})


def first_round(course: Course, name: str) -> list[Trial]:
    return list(arms(course, STANDARD, Made(course, lambda _: 0))[name].search[0].candidates(None))


# The rules


def test_numbers_are_searched_evenly_in_the_logarithm_beyond_their_ends_too() -> None:
    assert [Range(0.01, 1).at(place) for place in (0, 0.5, 1, 1.5)] == [0.01, 0.1, 1, 10]
    assert [Range(0.9, 0.999, below_one=True).at(place) for place in (0, 0.5, 1, -0.25)] == [0.9, 0.99, 0.999, 0.684]
    for own in (Range(0.01, 1), Range(0.9, 0.999, below_one=True)):
        assert own.place(own.at(0.3)) == pytest.approx(0.3, abs=1e-2)


@EVERY
def test_with_isaac_a_method_has_the_same_numbers_as_without_and_no_more_trials(course: Course) -> None:
    names = [entrant.name for entrant in entrants(course)]
    assert {"adamw", "nesterov", "muon", "soap", "foof", "isaac-adamw", "isaac-muon"} <= set(names)
    for name in names:
        trials = first_round(course, name)
        assert len(set(trials)) == STANDARD.first
        if name.startswith("isaac-"):
            without = {*ENTRANTS[name].search} - {"damping"}
            assert list(ENTRANTS[name].search) == [*ENTRANTS[name.removeprefix("isaac-")].search, "damping"]
            alone = first_round(course, name.removeprefix("isaac-"))
            numbers = [[[trial.get(key) for key in sorted(without)] for trial in own] for own in (trials, alone)]
            assert numbers[0] == numbers[1]


@EVERY
def test_one_recipe_is_for_all(course: Course) -> None:
    recipes = set()
    for entrant in entrants(course):
        for trial in first_round(course, entrant.name):
            method.check(trial)
            shared = [trial.workload, trial.variant, trial.steps, trial.points, trial.small, trial.rules]
            recipes.add((*shared, *(trial.get(name) for name in ("warm_up", "clip", "floor", "decays"))))
            # What has a constant rate by its definition.
            assert trial.schedule == ("constant" if "schedule-free" in entrant.name else "cosine")
            kind = "decoupled" if entrant.method.partition("+")[0] in RULES["decoupled"] else "added"
            assert trial.get("weight_decay", 0.0) == course.decay.get(kind, 0.0)
    assert len(recipes) == 1


@EVERY
@pytest.mark.parametrize("scale", [SMOKE, STANDARD], ids=lambda scale: scale.name)
def test_searches_are_on_a_split_of_the_training_set_and_seeds_are_fresh(course: Course, scale: race.Scale) -> None:
    for arm in arms(course, scale, Made(course, lambda _: 0)).values():
        candidates = arm.search[0].candidates(None)
        assert {(trial.split, trial.seed) for trial in candidates} == {("validation", RULES["search_seed"])}
        finals = arm.finals(candidates[0])
        assert {trial.split for trial in finals} == {"test"}
        assert [trial.seed for trial in finals] == list(range(101, 101 + scale.seeds))
        assert RULES["search_seed"] not in {trial.seed for trial in finals}
        assert [trial.having(seed=None) for trial in finals] == [
            replace(candidates[0], split="test", seed=t.seed) for t in finals
        ]
    assert STANDARD.seeds >= 8


def test_a_search_is_the_same_whatever_the_test_set_is(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = first_trial("mnist-mlp", "adamw")
    shown = replace(searched, split="test")
    ends = [train([trial], load(trial, device="cpu"), Options())[0] for trial in (searched, shown)]
    whole = sets.load

    def poisoned(name: str, folder: Path | None = None) -> sets.Dataset:
        data = whole(name, folder)
        return replace(data, test_images=torch.full_like(data.test_images, math.nan))

    monkeypatch.setattr(sets, "load", poisoned)
    _load.cache_clear()
    again = [train([trial], load(trial, device="cpu"), Options())[0] for trial in (searched, shown)]
    _load.cache_clear()
    assert (again[0].digest, dict(again[0].curve)) == (ends[0].digest, dict(ends[0].curve))
    assert math.isfinite(ends[1].final("test_loss"))
    assert not math.isfinite(again[1].final("test_loss"))


def first_trial(course: str, name: str) -> Trial:
    return arms(COURSES[course], SMOKE, Made(COURSES[course], lambda _: 0))[name].search[0].candidates(None)[0]


def distance(course: Course, place: float) -> Callable[[Trial], float]:
    """How far a run's numbers are from this place of their ranges."""

    def value(trial: Trial) -> float:
        name = ("isaac-" if trial.method.endswith("+isaac") else "") + trial.method.partition("+")[0]
        name = "foof" if trial.method.endswith("foof") else name
        return 100 + sum((own.place(trial.get(key)) - place) ** 2 for key, own in ENTRANTS[name].space(course).items())

    return value


def raced(course: Course, value: Callable[[Trial], float]) -> tuple[Made, dict[str, Any]]:
    """The end of a race whose runs have these values."""
    kept = Made(course, value)
    for _ in range(10):
        made = arms(course, STANDARD, kept)
        todo = due(list(made.values()), kept)
        assert len({trial.split for trial in todo}) <= 1, "no final run before all searches have ended"
        kept.train(todo)
    return kept, {name: resolve(arm, kept) for name, arm in made.items()}


def at_edges(found: Mapping[str, Any]) -> list[str]:
    return [name for name, own in found.items() if race.edges(ENTRANTS[name], own)]


@pytest.mark.parametrize("place", [-0.3, 0.3, 0.5, 1.2])
def test_edges_are_moved_for_all_alike_until_nobodys_best_is_at_one(place: float) -> None:
    _, found = raced(MLP, distance(MLP, place))
    (trials,) = {len({trial for own in result.tried for trial in own}) for result in found.values()}
    least, most = (STANDARD.first + (rounds - 1) * STANDARD.more for rounds in (STANDARD.least, STANDARD.rounds))
    assert trials in (least, most)
    assert trials == most or not at_edges(found)
    begun, ended = ({name: min(own.tried[at].values()) for name, own in found.items()} for at in (0, -1))
    assert all(ended[name] <= begun[name] for name in found)
    # What lies outside of the ranges is come nearer to.
    assert 0 < place < 1 or sum(ended.values()) < sum(begun.values())
    assert all(len(result.runs) == STANDARD.seeds and result.whole for result in found.values())


def test_where_every_best_is_inside_there_are_no_more_rounds() -> None:
    inside = {name: first_round(MLP, name)[0] for name in ENTRANTS}
    _, found = raced(MLP, lambda trial: 0.0 if replace(trial, split="validation", seed=0) in inside.values() else 1.0)
    assert not at_edges(found)
    assert {len(result.tried) for result in found.values()} == {STANDARD.least}


def test_a_method_that_is_best_at_an_edge_brings_all_others_a_round() -> None:
    inside = {name: first_round(MLP, name)[0] for name in ENTRANTS}

    def value(trial: Trial) -> float:
        """AdamW alone is the better the higher its rate."""
        own = replace(trial, split="validation", seed=0)
        return -trial.learning_rate if trial.method == "adamw" else 0.0 if own in inside.values() else 1.0

    _, found = raced(MLP, value)
    assert race.edges(ENTRANTS["adamw"], found["adamw"])["learning_rate"] == 1
    assert {len(result.tried) for result in found.values()} == {STANDARD.rounds}
    tried = [max(trial.learning_rate for trial in own) for own in found["adamw"].tried]
    assert tried == sorted(set(tried))
    assert tried[-1] > ENTRANTS["adamw"].search["learning_rate"].high


def test_records_carry_the_rules_and_other_rules_make_other_runs() -> None:
    hashes = {course.rules(scale) for course in COURSES.values() for scale in SCALES.values()}
    assert len(hashes) == len(COURSES) * len(SCALES)
    trial = first_trial("mnist-mlp", "muon")
    assert trial.rules == MLP.rules(SMOKE)
    assert replace(trial, rules="another").key != trial.key
    for changed in (replace(MLP, warm_up=0.1), replace(MLP, target=0.99), replace(MLP, plain=2.0)):
        assert changed.rules(SMOKE) != MLP.rules(SMOKE)
    assert replace(MLP, standard={"steps": 1}).rules(SMOKE) == MLP.rules(SMOKE)
    assert MLP.rules(replace(SMOKE, seeds=3)) != MLP.rules(SMOKE)


def rewritten(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """The records of a folder, each changed."""
    path = folder / "trials.jsonl"
    values = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for value in values:
        value.pop("check")
        if "trial" in value:
            change(value["trial"])
    path.write_bytes(b"".join(map(encode, values)))


@pytest.mark.parametrize("rules", ["0123456789ab", ""])
def test_a_record_made_under_other_rules_is_refused(finished: Path, tmp_path: Path, rules: str) -> None:
    folder = tmp_path / "mnist-mlp" / "smoke"
    shutil.copytree(finished, folder)
    rewritten(
        folder, lambda trial: trial.update(rules=rules) if trial.get("seed") == 101 and trial["method"] == "adamw" else None
    )
    said = rf"other rules made \({rules or 'none'}\); the rules of mnist-mlp are {MLP.rules(SMOKE)} now"
    with pytest.raises(StoreError, match=said):
        summary_of(folder)
    with pytest.raises(StoreError, match=said):
        report.section(report.summaries(tmp_path))
    with pytest.raises(StoreError, match=said):
        runner.run([MLP], request(tmp_path))
    found = command("mnist-mlp", "--draw-only", "--out", str(tmp_path))
    assert found.exit_code == 2
    assert "other rules made" in words_of(found)


def test_rules_that_changed_refuse_what_was_raced(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dict(COURSES), "mnist-mlp", MLP)
    monkeypatch.setattr(standings, "COURSES", {**COURSES, "mnist-mlp": replace(MLP, target=0.99)})
    with pytest.raises(StoreError, match="other rules made"):
        summary_of(finished)


def test_the_rules_are_printed_with_a_table_for_each_workload_for_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = command("rules", "--scale", "standard")
    assert found.exit_code == 0, found.output
    assert max(map(len, found.output.splitlines())) <= 80
    for course in COURSES.values():
        assert course.rules(STANDARD) in found.output
    assert len(report.rules("standard")) == 2 + len(COURSES)
    for words in ("paired t-tests by seed, Holm", "8 to 10 trials each", "seeds 101 to 108", "mean of AdamW", "1.4697"):
        assert words in words_of(found)


# The workloads


@EVERY
def test_every_workload_trains_and_measures_what_decides(course: Course) -> None:
    searched = [first_trial(course.name, name) for name in ("adamw", "isaac-muon", "foof")]
    for trial in (*searched, replace(searched[0], split="test", seed=101)):
        (record,) = train([replace(trial, steps=2, points=1)], load(trial, device="cpu"), Options())
        assert record.finished
        assert math.isfinite(decides(course.metric, higher=course.higher)(record))
        assert math.isfinite(record.final("test_loss"))


@pytest.mark.parametrize("name", ["deep-autoencoder", "mnist-mlp", "fourier-field", "muon-inrs"])
def test_where_everyone_races_everyone_can(name: str) -> None:
    assert COURSES[name].all
    for entrant in entrants(COURSES[name]):
        trial = first_trial(name, entrant.name)
        (record,) = train([replace(trial, steps=3, points=1)], load(trial, device="cpu"), Options())
        assert record.finished, entrant.name
        assert math.isfinite(decides(COURSES[name].metric, higher=COURSES[name].higher)(record))


def test_standardized_inputs_have_mean_0_and_deviation_1_of_the_images_for_training() -> None:
    own, plain = (load(Trial("mnist-mlp", "sgd", variant=v, small=True), device="cpu") for v in ((("standardized", True),), ()))
    mean, deviation = plain.inputs.mean(), plain.inputs.std()  # type: ignore[attr-defined]
    assert abs(own.inputs.mean()) < 1e-5  # type: ignore[attr-defined]
    torch.testing.assert_close(own.test[0], (plain.test[0] - mean) / deviation)  # type: ignore[attr-defined]


# The methods


def compare(
    ours: Callable[..., Any],
    theirs: Callable[..., Any],
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    off: float = 1e-6,
) -> None:
    """Two optimizers get the same gradients."""
    torch.manual_seed(0)
    first = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
    second = [nn.Parameter(parameter.detach().clone()) for parameter in first]
    optimizers = ours(first), theirs(second)
    for _ in range(25):
        for own, other in zip(first, second, strict=True):
            gradient = torch.randn_like(own)
            own.grad, other.grad = gradient.clone(), gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    for own, other in zip(first, second, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=off)


def test_soap_for_all_weights_of_a_shape_at_once_is_that_of_the_package() -> None:
    library = pytest.importorskip("pytorch_optimizer")
    shapes = [(6, 6), (6, 6), (4, 3, 3, 3), (5,), (6, 6)]
    compare(
        lambda p: Soap(p, lr=0.01, beta2=0.9, weight_decay=0.1),
        lambda p: library.SOAP(p, lr=0.01, betas=(0.95, 0.9), weight_decay=0.1),
        shapes,
        torch.float64,
    )


def test_schedule_free_is_that_of_the_package_and_is_measured_at_its_average() -> None:
    library = pytest.importorskip("pytorch_optimizer")
    shapes = [(4, 6), (5,)]
    compare(
        lambda p: ScheduleFree(p, lr=0.01, beta2=0.99, weight_decay=0.1),
        lambda p: library.ScheduleFreeAdamW(p, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1),
        shapes,
        torch.float64,
    )
    weight, other = (nn.Parameter(torch.ones(3)) for _ in range(2))
    ours, theirs = ScheduleFree([weight], lr=0.1), library.ScheduleFreeAdamW([other], lr=0.1)
    for number in range(5):
        weight.grad = other.grad = torch.tensor([1.0, -1.0, 0.5 * number])
        ours.step()
        other.grad = other.grad.clone()
        theirs.step()
    before = weight.detach().clone()
    theirs.eval()
    with ours.averaged():
        torch.testing.assert_close(weight, other, rtol=1e-5, atol=1e-6)
        assert not torch.equal(weight, before)
    assert torch.equal(weight, before)


def test_muon_for_all_matrices_of_a_shape_at_once_is_torchs() -> None:
    compare(
        lambda p: Muon(p, lr=0.01, weight_decay=0.1),
        lambda p: torch.optim.Muon(p, lr=0.01, weight_decay=0.1),
        [(8, 8), (8, 8), (4, 8), (8, 4), (8, 8)],
        torch.float32,
        # Each of 25 steps moves by the rate times what was rounded to bfloat16.
        off=25 * 0.01 * 2**-8,
    )


def test_foof_descends_along_the_inverse_of_a_running_second_moment() -> None:
    """FOOF's (λ_F I + Σ)⁻¹ with the average Σ of inputs, in our words: λ = λ_F / b, and the rate over λ_F."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 3, bias=False).double()
    handle = isaac.attach(layer, 0.5, **{**methods.FOOF, "refresh": 1})
    optimizer = torch.optim.SGD(layer.parameters(), 1.0)
    handle.bind(optimizer)
    moment = torch.zeros(4, 4, dtype=torch.float64)
    for number in range(1, 4):
        x, start = torch.randn(6, 4, dtype=torch.float64), layer.weight.detach().clone()
        optimizer.zero_grad()
        layer(x).square().sum(1).mean().backward()
        gradient = (2 * (x @ start.T) / 6).T @ x
        optimizer.step()
        moment = 0.95 * moment + 0.05 * x.T @ x / 6
        average = moment / (1 - 0.95**number)
        expected = gradient @ torch.linalg.inv(torch.eye(4, dtype=torch.float64) + average / 0.5)
        torch.testing.assert_close(start - layer.weight, expected)


@pytest.mark.parametrize("every", [1, 10])
def test_natural_gradients_are_those_of_zeta_over_the_square_of_its_damping(every: int) -> None:
    trial = Trial("deep-autoencoder", "kfac", (("damping", 0.1), ("every", every)), small=True)
    workload = load(trial, device="cpu")
    batch = next(iter(workload.batches(0, 1)))
    found = []
    for own in (trial, trial.having(natural=True)):
        model = workload.model(0)
        torch.manual_seed(0)
        methods.prepare(own, workload, model).step(*batch)
        found.append([module.weight.grad for module in model.modules() if isinstance(module, nn.Linear)])
    for zeta, natural in zip(*found, strict=True):
        torch.testing.assert_close(zeta, 0.1**2 * natural)


METHODS = ("nesterov", "nadamw", "schedule-free", "muon", "soap", "kron", "kfac", "momentum+foof", "soap+isaac")


@pytest.mark.parametrize("name", METHODS)
def test_a_run_that_is_cut_goes_on_with_the_same_bits(name: str) -> None:
    # K-FAC draws labels here.
    trial = Trial("deep-autoencoder" if name == "kfac" else "mnist-mlp", name, (("learning_rate", 0.01),), steps=30, small=True)
    trial = trial.having(damping=0.1) if "+" in name or name == "kfac" else trial
    workload = load(trial, device="cpu")
    whole = Alone([trial], workload, "cpu")
    batches = [batch for _, batch in zip(range(14), whole.batches(1), strict=False)]
    for batch in batches:
        whole.step(*batch)
    cut = Alone([trial], workload, "cpu")
    for batch in batches[:7]:
        cut.step(*batch)
    state = torch.load(io.BytesIO(saved(cut.state())), weights_only=False)
    again = Alone([trial], workload, "cpu")
    again.load(state)
    for batch in batches[7:]:
        again.step(*batch)
    assert again.measure() == whole.measure()
    assert all(map(torch.equal, again.weights(0), whole.weights(0)))


def saved(state: Mapping[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(dict(state), file)
    return file.getvalue()


def test_who_decays_only_matrices_does_so_under_every_method() -> None:
    workload = load(Trial("mnist-mlp", "sgd", small=True), device="cpu")
    for name in ("adamw", "nadamw", "schedule-free", "nesterov", "soap", "kron", "muon"):
        trial = Trial("mnist-mlp", name, (("decays", "matrices"), ("weight_decay", 0.1)), small=True)
        prepared = methods.prepare(trial, workload, workload.model(0))
        for optimizer in prepared.optimizers:
            for group in optimizer.param_groups:
                dimensions = {parameter.dim() > 1 for parameter in group["params"]}
                assert len(dimensions) <= 1
                assert group["weight_decay"] == (0.1 if dimensions != {False} else 0.0)
    assert kron([{"params": [nn.Parameter(torch.ones(2, 2))]}], 0.1, 0.8).param_groups[0]["momentum"] == 0.8


def test_a_constant_rate_warms_up_where_it_is_asked_to() -> None:
    trial = Trial("mnist-mlp", "schedule-free", (("warm_up", 3),), steps=10)
    assert [trial.share(step) for step in range(5)] == [0.25, 0.5, 0.75, 1, 1]
    assert replace(trial, settings=()).share(0) == 1


# Standings


def record(values: Sequence[float | None], quantity: str = "train_loss") -> Record:
    return Record(
        Trial("mnist-mlp", "sgd"), "finished", {"step": [10.0 * number for number in range(len(values))], quantity: values}
    )


def test_the_target_is_reached_on_the_line_between_two_measurements() -> None:
    assert standings.crossing(record([4, 2, 1, 3]), "train_loss", 1.5) == 15
    assert standings.crossing(record([4, 2, 1, 3]), "train_loss", 2) == 10
    assert standings.crossing(record([4, 2, 1, 3]), "train_loss", 5) == 0
    assert standings.crossing(record([4, 2, 1, 3]), "train_loss", 0.5) is None
    assert standings.crossing(record([4, None, 1]), "train_loss", 2) == 20
    assert standings.crossing(record([0.1, 0.5, 0.9]), "train_loss", 0.7, higher=True) == 15
    assert standings.crossing(record([0.1, 0.5, 0.6]), "train_loss", 0.7, higher=True) is None


def test_a_sample_keeps_what_was_not_reached() -> None:
    found = sample([1.0, None, 3.0])
    assert found == {"mean": 2.0, "std": pytest.approx(math.sqrt(2)), "n": 2, "values": [1, None, 3]}
    assert sample([None]) == {"mean": None, "std": None, "n": 0, "values": [None]}
    assert sample([4.0, math.inf]) == {"mean": 4.0, "std": None, "n": 1, "values": [4.0, math.inf]}


@pytest.mark.parametrize(
    ("values", "shown"), [([1.0, 2.0, 9.0], "2"), ([1.0, None, 9.0], "9 (2 of 3)"), ([1.0, None, None], "∞ (1 of 3)")]
)
def test_a_seed_that_misses_the_target_takes_for_ever(values: list[float | None], shown: str) -> None:
    assert report._reached(standings._sample(values), ".3g", ruled=True) == shown


def made_up(name: str, ends: Sequence[float | None]) -> dict[str, Any]:
    return {"name": name, "label": name, "n": len(ends), "final": sample(list(ends))}


def test_who_is_better_is_tested_in_pairs_and_adjusted_by_holm() -> None:
    ends = {
        "adamw": [1.0, 2.0, 3.1, 4.0],
        "isaac-adamw": [0.8, 1.9, 2.7, 3.8],
        "soap": [0.9, 2.0, 2.9, 3.7],
        "muon": [1.0, None, 1, 1],
    }
    found = standings._compared([made_up(name, own) for name, own in ends.items()])
    assert [own["names"] for own in found] == [["isaac-adamw", "adamw"], ["isaac-adamw", "soap"]]
    expected = [float(stats.ttest_rel(ends["isaac-adamw"], ends[other]).pvalue) for other in ("adamw", "soap")]
    assert [own["p"] for own in found] == pytest.approx(expected, rel=1e-5)
    adjusted = holm(dict(enumerate(expected)))  # type: ignore[arg-type]
    assert [own["holm"] for own in found] == pytest.approx(list(adjusted.values()), rel=1e-5)
    assert found[0]["value"] == pytest.approx(-0.225)
    assert paired([1.0, 2.0], [0.0, 1.0]).p == 0
    assert paired([1.0, 2.0], [1.0, 2.0]).p == 1


def test_a_pair_has_the_difference_that_the_rules_test() -> None:
    methods = [made_up("adamw", [0.5, 0.6, 0.7]), made_up("isaac-adamw", [0.7, 0.8, 0.91])]
    summary = {"methods": methods, "rules": "x", "higher": True, "compared": standings._compared(methods)}
    (pair,) = standings.pairs(summary)
    assert pair.difference is not None
    # Lower is better there, and more is better here.
    assert pair.difference.behind
    assert standings.lowest(summary) == "isaac-adamw"


# A race


def test_a_race_leaves_everything_behind(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()} | {"checkpoints"}
    files = {"about.json", "trials.jsonl", "times.jsonl", ".lock", "checkpoints", "numbers.csv", "figure.png", "figure.svg"}
    assert names == files
    summary = summary_of(finished)
    assert (summary["workload"], summary["scale"], summary["mode"]) == ("mnist-mlp", "smoke", "eager")
    assert (summary["seeds"], summary["steps"], summary["rules"]) == (2, 8, MLP.rules(SMOKE))
    found = {one["name"]: one for one in summary["methods"]}
    assert set(found) == {entrant.name for entrant in entrants(MLP)}
    for name, one in found.items():
        assert one["n"] == (2 if name in FEW else 0)
        assert (one["reason"] is None) == (name in FEW)
    assert len({found[name]["trials"] for name in FEW}) == 1
    ours = found["isaac-adamw"]
    assert ours["ours"]
    assert set(ours["settings"]) == {"learning_rate", "beta2", "damping"}
    assert [curve["seed"] for curve in ours["curves"]] == [101, 102]
    assert [len(curve["loss"]) for curve in ours["curves"]] == [5, 5]
    assert ours["seconds_per_step"] == ours["clocks"]["eager"] > 0
    # With an infinite λ, and what it takes until a step is ready.
    assert ours["control"]["eager"] > 0
    assert ours["ready"]["eager"] > 0
    assert found["adamw"]["control"] == {"eager": None}


def test_the_target_is_the_mean_of_who_sets_it_or_a_public_figure(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = summary_of(finished)
    adamw = next(one for one in summary["methods"] if one["name"] == "adamw")
    assert summary["target"] == pytest.approx(fmean(adamw["final"]["values"]), rel=1e-5)
    assert summary["target_by"] == "mean of AdamW, 2 seeds"
    public = replace(MLP, target=0.94)
    monkeypatch.setattr(standings, "COURSES", {"mnist-mlp": public})
    monkeypatch.setattr(standings, "check", lambda store: None)
    assert standings._target(Store(finished).about, {}) == (0.94, MLP.source)


def test_a_published_figure_stands_beside_what_is_reached_here(finished: Path) -> None:
    summary = summary_of(finished)
    assert summary["published"] == {}
    assert COURSES["nano-gpt"].published == {"adamw": COURSES["nano-gpt"].target} == {"adamw": 1.4697}
    mean = next(one["final"]["mean"] for one in summary["methods"] if one["name"] == "nesterov")
    assert f"SGD + Nesterov reaches {mean:.1%} here; published: 93.0%." in report.said(
        {**summary, "published": {"nesterov": 0.93}}
    )


def test_tables_show_everyone_with_seeds_tests_and_both_clocks(finished: Path) -> None:
    summary = summary_of(finished)
    text = report.table(summary).markdown() + "\n".join(report.said(summary))
    for one in summary["methods"]:
        assert one["label"] in text
    assert "**AdamW + ISAAC**" in text
    assert "not run: left out by --methods" in text
    assert f"Rules {MLP.rules(SMOKE)}" in text
    assert [row.cells[:2] for row in report.compared(summary).rows] == [
        ("AdamW + ISAAC", "AdamW"),
        ("AdamW + ISAAC", "SGD + Nesterov"),
    ]
    clocks = {row.cells[0]: row.cells for row in report.clocks(summary).rows}
    assert clocks["AdamW"][2:4] == ("–", "")
    assert float(clocks["AdamW + ISAAC"][3]) > 0
    rows = (finished / "numbers.csv").read_text(encoding="utf-8").splitlines()
    assert len(rows) == 1 + 5 * len(Store(finished).records())


def test_a_race_that_has_been_run_trains_nothing(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "train", lambda *given, **options: pytest.fail("trained"))
    monkeypatch.setattr(runner.times, "measure", lambda *given, **options: pytest.fail("timed"))
    before, records = summary_of(finished), (finished / "trials.jsonl").read_bytes()
    for names in (FEW, ("nesterov",)):
        # A call for fewer methods does not forget the others.
        runner.run([MLP], request(finished.parent.parent, methods=names))
        assert summary_of(finished) == before
    assert (finished / "trials.jsonl").read_bytes() == records


def test_a_race_is_run_in_pieces(tmp_path: Path, finished: Path) -> None:
    class Slow(Told):
        def say(self, what: str) -> None:
            super().say(what)
            if what.startswith("  2 of"):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.run([MLP], request(tmp_path, means=told_to(Slow())))
    folder = tmp_path / "mnist-mlp/smoke"
    assert len(Store(folder).records()) == 2
    half = summary_of(folder)
    assert half["target"] is None
    assert report.said(half)[0] == "Target: test accuracy none (AdamW, which has no finished runs)."
    # What a killed call trained is written down.
    assert [call["runs"] for call in Store(folder).about["calls"]] == [2]
    with pytest.raises(StoppedError):
        runner.run([MLP], request(tmp_path, means=Means(replace(HERE.call, until=time.time() - 1))))
    runner.run([MLP], request(tmp_path, timed=False))
    assert Store(folder).times() == {}
    whole = {one.trial: one.digest for one in Store(finished).records()}
    assert {one.trial: one.digest for one in Store(folder).records()} == whole
    runner.run([MLP], request(tmp_path))
    assert list(Store(folder).times()) == ["eager"]


def test_records_of_another_device_are_not_mixed_in(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mnist-mlp/smoke"
    shutil.copytree(finished, folder)
    about = (folder / "about.json").read_text(encoding="utf-8")
    (folder / "about.json").write_text(about.replace('"device": "cpu"', '"device": "cuda"'), encoding="utf-8")
    with pytest.raises(StudyError, match="has a race on cuda"):
        runner.run([MLP], request(tmp_path))
    (folder / "about.json").write_text("{", encoding="utf-8")
    with pytest.raises(StoreError, match=r"cannot read .*about\.json"):
        summary_of(folder)


def test_who_cannot_start_is_listed_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Any:
        raise NotImplementedError("inputs of three dimensions\nand more")

    prepare = methods.prepare
    monkeypatch.setattr(methods, "prepare", lambda t, *rest: refuse() if t.method == "kron" else prepare(t, *rest))
    monkeypatch.setattr(method, "missing", lambda t: "it is not installed" if t.method == "muon" else "")
    (folder,) = runner.run([MLP], request(tmp_path, methods=("kron", "muon")))
    found = {one["name"]: one["reason"] for one in summary_of(folder)["methods"]}
    assert found["kron"] == "NotImplementedError: inputs of three dimensions"
    assert found["muon"] == "it is not installed"
    assert found["adamw"] is None


def test_an_error_of_ours_is_not_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(methods.isaac, "attach", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        runner.run([MLP], request(tmp_path))


def test_missing_data_leaves_out_one_workload_of_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_data(trial: Trial, **options: Any) -> Any:
        raise DataError(f"{trial.workload} is not there")

    monkeypatch.setattr(runner, "load", no_data)
    with pytest.raises(DataError):
        runner.run([MLP], request(tmp_path))
    shown = Told()
    with pytest.raises(StudyError, match="none of the workloads"):
        runner.run([MLP, COURSES["nano-gpt"]], request(tmp_path, means=told_to(shown)))
    assert shown.lines == ["mnist-mlp is left out: mnist-mlp is not there", "nano-gpt is left out: nano-gpt is not there"]


# The command


def command(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(command_of_the_race)
    return CliRunner().invoke(app, arguments)


def words_of(result: Result) -> str:
    return " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["imagenet"], ["imagenet", "mnist-mlp"]),
        (["mnist-mlp", "--methods", "lion"], ["lion", "isaac-adamw"]),
        (["mnist-mlp", "--draw-only", "--out", "nowhere-at-all"], ["--out", "about.json"]),
        (["mnist-mlp", "--scale", "quick"], ["quick", "standard"]),
    ],
)
def test_a_bad_request_is_refused_with_a_way_out(arguments: list[str], words: list[str]) -> None:
    found = command(*arguments)
    assert found.exit_code == 2
    for word in words:
        assert word in found.output


def test_drawing_by_command_shows_the_tables_and_draws_the_same(finished: Path) -> None:
    names = ("numbers.csv", "figure.png", "figure.svg")
    before = [(finished / name).read_bytes() for name in names]
    found = command("mnist-mlp", "--draw-only", "--out", str(finished.parent.parent))
    assert found.exit_code == 0, found.output
    for words in (
        "AdamW + ISAAC",
        "did not run: left out by --methods",
        "Target: test accuracy",
        "numbers.csv",
        "Compared at the end",
    ):
        assert words in words_of(found)
    assert [(finished / name).read_bytes() for name in names] == before


# Pages


def test_a_page_is_not_filled_without_races(finished: Path, tmp_path: Path) -> None:
    for races in (tmp_path, finished.parent.parent):
        with pytest.raises(docs.DocsError, match="no race but smoke tests"):
            report.blocks(races, races)["race"]()


def test_a_race_by_the_rules_is_on_the_page_beside_the_first_ones(finished: Path, tmp_path: Path) -> None:
    for name in ("quick", "smoke"):
        kind = ROOT / "results/race/mnist-mlp/quick" if name == "quick" else finished
        shutil.copytree(kind, tmp_path / "race/mnist-mlp" / name)
    about = tmp_path / "race/mnist-mlp/quick"
    assert summary_of(about)["rules"] == ""
    section = report.section(report.summaries(tmp_path / "race", "results/race"))
    assert len(section) > 3
    text = report.blocks(tmp_path / "race", tmp_path / "figures")["race"]()
    assert "Classifier of 5 layers × 400, mnist (quick, n = 3)" in text


def test_a_page_is_filled_where_it_has_marks(tmp_path: Path) -> None:
    races = tmp_path / "results"
    shutil.copytree(ROOT / "results/race/mnist-mlp/quick", races / "mnist-mlp/quick")
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- race -->\nold\n<!-- /race -->\nb\n<!-- races -->\n<!-- /races -->\nc\n", encoding="utf-8")
    for _ in range(2):
        docs.fill(page, report.blocks(races, tmp_path / "figures"))
        text = page.read_text(encoding="utf-8")
        assert text.startswith("a\n<!-- race -->\n| Workload | Optimizer |")
        assert text.endswith("\n<!-- /races -->\nc\n")
        assert text.count("](figures/race-mnist-mlp-quick.svg)") == 1
    whole = page.read_text(encoding="utf-8")
    page.write_text("<!-- race -->\n<!-- /race -->\nb\n<!-- races -->\n<!-- /races -->\n", encoding="utf-8")
    assert command("--draw-only", "--out", str(races), "--fill", str(page)).exit_code == 0
    assert docs.blocks(page.read_text(encoding="utf-8")) == docs.blocks(whole)
    page.write_text("no marks\n", encoding="utf-8")
    found = command("mnist-mlp", "--draw-only", "--out", str(races), "--fill", str(page))
    assert found.exit_code == 2
    assert "has no <!-- race -->" in words_of(found)


@pytest.mark.parametrize("name", ["docs/race.md"])
def test_pages_show_the_committed_races(name: str, tmp_path: Path) -> None:
    copy = tmp_path / Path(name).name
    shutil.copyfile(ROOT / name, copy)
    docs.fill(copy, report.blocks(ROOT / "results" / "race", tmp_path / "figures"))
    assert copy.read_text(encoding="utf-8") == (ROOT / name).read_text(encoding="utf-8")
    for picture in (tmp_path / "figures").glob("*.svg"):
        assert picture.read_bytes() == (ROOT / "docs" / "figures" / picture.name).read_bytes()
