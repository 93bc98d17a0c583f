"""Figure 6: what a batch of images is, how its runs are planned, trained and drawn, and what its claims say."""

import csv
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from typer.testing import CliRunner, Result

from isaac_lab import cli, executors, method, methods, noise, times
from isaac_lab.claims import CLAIMS
from isaac_lab.claims import larger as checks
from isaac_lab.claims.evidence import Evidence, Verdict
from isaac_lab.commands.reproduce import reproduce
from isaac_lab.data import images
from isaac_lab.executors import Call
from isaac_lab.record import Record, Store
from isaac_lab.report import larger, paper
from isaac_lab.studies.calls import Means
from isaac_lab.studies.paper import EXPERIMENTS, fig6
from isaac_lab.studies.paper.fig6 import BUDGETS, METHODS, SETTINGS
from isaac_lab.studies.paper.folder import view
from isaac_lab.studies.paper.recipe import SCALES
from isaac_lab.study import Result as Found
from isaac_lab.study import resolve
from isaac_lab.training import Options, train
from isaac_lab.trial import Trial
from isaac_lab.workload import Form, _load, load
from isaac_lab.workloads import resnet
from isaac_lab.workloads.resnet import PAD, ResNet, ResNet18, crops

app = typer.Typer()
app.command()(reproduce)


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def words(result: Result) -> str:
    return " ".join(result.output.replace("│", " ").split())


@pytest.fixture(scope="module")
def shrunk() -> Iterator[pytest.MonkeyPatch]:
    """A network of two channels, two batches of twenty, and two methods: seconds for all of the experiment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"SMALL_BATCH": 20, "SMALL_TRAIN": 40, "SMALL_TEST": 30, "SMALL_WIDTH": 2}.items():
            patch.setattr(resnet, name, value)
        smoke = replace(BUDGETS["smoke"], methods=("none", "last"), rounds=1)
        patch.setattr(fig6, "BUDGETS", {**BUDGETS, "smoke": smoke})
        patch.setattr(times, "TURN", 0.001)
        _load.cache_clear()
        executors._checked.cache_clear()
        yield patch
    _load.cache_clear()
    executors._checked.cache_clear()


def trial_of(conditioning: str, base: str = "sgd", **settings: Any) -> Trial:
    """A run of the small network."""
    own = {"learning_rate": 0.1, **dict(METHODS[conditioning].settings), **settings}
    own |= {} if conditioning == "none" else {"damping": 1.0}
    name = base if conditioning == "none" else f"{base}+isaac"
    return Trial(resnet.NAME, name, tuple(own.items()), steps=2, points=2, small=True)


@pytest.fixture(scope="module")
def workload(shrunk: pytest.MonkeyPatch) -> ResNet:
    made = load(trial_of("none"), device="cpu")
    assert isinstance(made, ResNet)
    return made


@pytest.fixture(scope="module")
def reproduced(shrunk: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    out = tmp_path_factory.mktemp("fig6")
    result = invoke("fig6", "--device", "cpu", "--workers", 1, "--out", out)
    assert result.exit_code == 0, result.output
    return out, result


# Images


def test_crops_are_squares_of_the_padded_image_mirrored_where_asked() -> None:
    padded = F.pad(torch.randint(256, (5, 32, 32, 3), dtype=torch.uint8), (0, 0, PAD, PAD, PAD, PAD))
    corners = torch.cartesian_prod(torch.arange(2 * PAD + 1), torch.arange(2 * PAD + 1), torch.arange(2))
    which = torch.randint(5, (len(corners),))
    found = crops(padded, which, corners[:, 0], corners[:, 1], corners[:, 2].bool())
    assert found.shape == (len(corners), 32, 32, 3)
    assert found.dtype == torch.uint8
    for image, own, (top, left, mirrored) in zip(found, which, corners.tolist(), strict=True):
        expected = padded[own, top : top + 32, left : left + 32]
        assert torch.equal(image, expected.flip(1) if mirrored else expected)


def test_batches_are_crops_of_the_images_in_their_order(workload: ResNet) -> None:
    order = torch.randperm(40, generator=noise.generator("order", 3, 1))
    every = torch.cartesian_prod(torch.arange(2 * PAD + 1), torch.arange(2 * PAD + 1), torch.arange(2))
    (first, labels), (second, _) = workload.batches(3, 1)
    assert first.shape == second.shape == (20, 3, 32, 32)
    assert torch.equal(labels, workload._labels[order[:20]])
    kinds = set()
    for image, index in zip(first, order[:20], strict=True):
        possible = workload._normalized(
            crops(workload._padded, index.expand(len(every)), every[:, 0], every[:, 1], every[:, 2].bool())
        )
        matches = (possible == image).flatten(1).all(1).nonzero()
        assert len(matches) == 1
        kinds.add(tuple(every[matches.item()].tolist()))
    assert len(kinds) > 10
    assert {mirrored for *_, mirrored in kinds} == {0, 1}


def test_the_same_seed_and_epoch_give_the_same_images(workload: ResNet) -> None:
    def made(seed: int, epoch: int) -> torch.Tensor:
        return torch.cat([x for x, _ in workload.batches(seed, epoch)])

    torch.manual_seed(1)
    before = made(0, 0)
    torch.manual_seed(2)
    assert torch.equal(before, made(0, 0))
    assert not torch.equal(before, made(0, 1))
    assert not torch.equal(before, made(1, 0))


def test_images_are_normalized_and_have_their_channels_innermost(workload: ResNet) -> None:
    x, _ = next(iter(workload.batches(0, 0)))
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert x.dtype == torch.float32
    whole = workload._normalized(workload._measured[0])
    assert whole.mean((0, 2, 3)).abs().max() < 0.3  # of 40 images; the means are those of 2,000
    assert (whole.std((0, 2, 3)) - 1).abs().max() < 0.3
    known = images.load("toy-images")
    white = workload._normalized(torch.full((1, 1, 1, 3), 255, dtype=torch.uint8)).flatten()
    assert white.tolist() == pytest.approx([(1 - mean) / std for mean, std in zip(known.mean, known.std, strict=True)])


def test_neither_augmentation_nor_loss_looks_at_a_value(workload: ResNet) -> None:
    # Fake tensors have none: whatever asks for one raises, as it would wait for the device, or break a CUDA graph.
    with FakeTensorMode():
        padded = torch.empty(50, 40, 40, 3, dtype=torch.uint8)
        index = torch.empty(20, dtype=torch.int64)
        assert crops(padded, index, index, index, index.bool()).shape == (20, 32, 32, 3)
        model = ResNet18(width=2)
        loss = workload.loss(model, torch.empty(20, 3, 32, 32), index)
        loss.backward()
        assert loss.shape == ()
        with pytest.raises(RuntimeError):
            loss.item()


# The network


def test_gradient_and_last_layer_start_from_the_same_weights_and_see_the_same_images(workload: ResNet) -> None:
    def record(conditioning: str) -> Record:
        return train([trial_of(conditioning)], workload, Options())[0]

    plain, ours = record("none"), record("last")
    assert plain.points[0] == ours.points[0]
    assert plain.points[1]["train_loss"] != ours.points[1]["train_loss"]
    assert plain.about["arithmetic"] == "float32"
    assert plain.about["data"] == "toy-images (generated)"
    assert ours.points == record("last").points


@pytest.mark.parametrize("conditioning", ["none", "last", "reduce", "max_rows"])
def test_gradients_have_the_layout_of_the_weights(workload: ResNet, conditioning: str) -> None:
    model = workload.model(0)
    training = methods.prepare(trial_of(conditioning, "momentum", learning_rate=0.01), workload, model)
    assert math.isfinite(training.step(*next(iter(workload.batches(0, 0)))).item())
    for weight in model.parameters():
        assert weight.grad is not None
        assert weight.grad.dtype == torch.float32
        assert weight.dim() != 4 or weight.grad.is_contiguous(memory_format=torch.channels_last)


def test_the_last_layer_alone_is_conditioned(workload: ResNet) -> None:
    gradients = {}
    for conditioning in ("none", "last"):
        model = workload.model(0)
        methods.prepare(trial_of(conditioning), workload, model).step(*next(iter(workload.batches(0, 0))))
        gradients[conditioning] = {name: weight.grad for name, weight in model.named_parameters()}
    changed = {name for name, plain in gradients["none"].items() if not torch.equal(plain, gradients["last"][name])}
    assert changed == {f"{methods.last_layer(workload.model(0))}.weight"}


def test_bfloat16_is_a_switch_and_said_in_the_record(shrunk: pytest.MonkeyPatch, workload: ResNet) -> None:
    half = ResNet(Form(small=True), half=True)
    assert half.arithmetic == "bfloat16 autocast, float32 weights"
    batch = next(iter(half.batches(0, 0)))
    seen = []
    model = half.model(0)
    model.fc.register_forward_hook(lambda layer, inputs, output: seen.append(output.dtype))
    loss = half.loss(model, *batch)
    assert seen == [torch.bfloat16]
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(workload.loss(workload.model(0), *batch).item(), rel=0.02)


def test_evaluation_uses_running_statistics_and_changes_nothing(workload: ResNet) -> None:
    model = workload.model(0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = workload.evaluate(model)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.eval()
    inputs, labels = workload._test
    output = model(workload._normalized(inputs))
    assert found["test_accuracy"] == pytest.approx((output.argmax(1) == labels).double().mean().item())
    assert found["test_loss"] == pytest.approx(F.cross_entropy(output, labels).item(), rel=1e-5)


def test_a_step_that_draws_rows_on_the_host_is_no_cuda_graph() -> None:
    def captured(name: str) -> bool:
        return method.capturable(replace(trial_of(name, "momentum"), schedule="cosine"))

    assert {name: captured(name) for name in METHODS} == {"none": True, "last": True, "reduce": True, "max_rows": False}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("conditioning", METHODS)
def test_steps_on_a_gpu_are_captured_but_for_drawn_rows(shrunk: pytest.MonkeyPatch, conditioning: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cudnn, "benchmark", False)  # what the workload sets is taken back
        workload = ResNet(Form(small=True, device="cuda"))
        trial = replace(trial_of(conditioning, "momentum", learning_rate=0.01), schedule="cosine", steps=12)
        (record,) = train([trial], workload, Options("cuda"))
    assert record.about["mode"] == ("eager" if conditioning == "max_rows" else "captured")
    assert record.about["arithmetic"].startswith("bfloat16")
    assert record.finished
    first, *_, last = record.points
    assert last["train_loss"] != first["train_loss"]
    assert math.isfinite(last["train_loss"])


# The plan


@pytest.mark.parametrize("scale", BUDGETS)
def test_all_methods_have_as_many_trials_and_the_gradient_has_all_rates(scale: str) -> None:
    budget = BUDGETS[scale]
    for setting in SETTINGS:
        found = {name: budget.candidates(setting, name) for name in METHODS}
        assert len({len(trials) for trials in found.values()}) == 1
        rates = {name: {trial.learning_rate for trial in trials} for name, trials in found.items()}
        assert all(own <= rates["none"] for own in rates.values())
        assert {trial.get("damping") for trial in found["none"]} == {None}
        assert {trial.damping for trial in found["last"]} == set(budget.dampings)
        assert {trial.seed for trials in found.values() for trial in trials} == {0}
        assert 0 not in {run.seed for run in budget.runs(setting, found["last"][0], budget.seeds)}


def test_quick_is_thirty_epochs_of_cifar_on_three_seeds_and_says_its_steps() -> None:
    budget = BUDGETS["quick"]
    run = budget.runs("a", budget.candidates("a", "last")[0], 3)[-1]
    assert (run.steps, run.points, run.schedule, run.get("weight_decay"), run.seed) == (15_000, 30, "cosine", 5e-4, 3)
    assert (run.method, run.get("layers"), run.small) == ("momentum+isaac", "last", False)
    assert fig6._plan(budget, 3).startswith("fig6: trials, 36 of 1,000 steps; runs, 45 of 15,000 steps; 711,000 steps in all")


def test_the_lowest_training_loss_is_chosen() -> None:
    first, second = BUDGETS["smoke"].candidates("c", "last")
    arm = fig6.arms(BUDGETS["smoke"], 2)["c", "last"]

    def best(losses: Sequence[float | None]) -> Trial | None:
        kept = {
            trial: Record(trial, "finished", {"step": [1], "train_loss": [loss]})
            for trial, loss in zip((first, second), losses, strict=True)
        }
        return resolve(arm, kept).best

    assert best([0.5, 0.4]) == second
    assert best([0.5, 0.5]) == first
    assert best([None, None]) is None


def test_the_first_seed_compares_larger_rates_by_accuracy(tmp_path: Path) -> None:
    folder = fabricated(tmp_path, {("a", "none"): [0.9, 0.9], ("a", "last"): [0.9, 0.9]})
    shown = view(EXPERIMENTS["fig6"], tmp_path, SCALES["quick"], means=Means(Call(command="isaac-newton"), seeds=2))
    first = fig6.cells(shown)["a", "none"].best
    assert first is not None
    assert "larger η of 2 of the curves" in " ".join(fig6.summary(shown)["notes"])
    store, larger = Store(folder), BUDGETS["quick"].compared("a", first)
    assert larger[0] == BUDGETS["quick"].runs("a", first, 2)[0], "what is compared is run once"
    assert [(trial.steps, trial.get("weight_decay"), trial.seed) for trial in larger] == [(15_000, 5e-4, 1)] * 3
    assert [trial.learning_rate for trial in larger] == pytest.approx([first.learning_rate * by for by in (1, 3, 10)])
    for trial, accuracy in zip(larger, (0.9, 0.95, 0.7), strict=True):
        assert fig6.cells(shown)["a", "none"].best == first, "some of them decide nothing"
        with store.writing():
            store.add(Record(trial, "finished", _columns([_point(trial.steps, 1, accuracy)])))
    assert fig6.cells(shown)["a", "none"].best == larger[1]
    # Weight decay is not the same without.
    assert fig6.cells(shown)["b", "none"].tried[1] == {}


def test_a_run_that_diverged_counts_as_chance_from_there_on() -> None:
    trial = BUDGETS["smoke"].runs("c", BUDGETS["smoke"].candidates("c", "none")[0], 1)[0]
    points = [{"step": step, "test_accuracy": 0.5} for step in trial.measured()]
    gone = Record(trial, "diverged", _columns(points[:2]))
    whole = Record(trial, "finished", _columns(points))
    assert fig6.accuracies([gone, whole]) == [[0.1, 0.1], [0.5, 0.5]]
    cell = fig6.shown_cell(Found(trial, (), (gone, whole), ()))
    assert cell is not None
    assert (cell["values"], cell["diverged"]) == ([0.1, 0.5], 1)


# The experiment


def test_a_smoke_run_leaves_records_a_figure_numbers_and_a_summary(reproduced: tuple[Path, Result]) -> None:
    out, result = reproduced
    folder = out / "fig6" / "smoke"
    assert "trials, 8 of 2 steps; runs, 24 of 4 steps; 112 steps in all" in words(result)
    assert "(c) ζ*, last layer" in words(result)
    records = 8 + 24
    assert len(Store(folder).records()) == records
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "plain SGD" in (folder / "figure.svg").read_text(encoding="utf-8")
    with (folder / "numbers.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(len(record.points) for record in Store(folder).records())
    assert {(row["method"], row["layers"], row["seed"]) for row in rows} == {
        (name, layers, seed)
        for optimizer in ("momentum", "sgd")
        for name, layers in ((optimizer, ""), (f"{optimizer}+isaac", "last"))
        for seed in "012"
    }
    about = Store(folder).about
    assert about["seeds"] == 2
    assert about["calls"][0]["runs"] == records
    timed = Store(folder).times()
    assert [entry["name"] for entry in timed["eager"]["methods"]] == list(METHODS)
    assert list(timed) == ["eager"]


def summary_of(out: Path, scale: str, **options: Any) -> dict[str, Any]:
    return fig6.summary(view(EXPERIMENTS["fig6"], out, SCALES[scale], **options))


def test_the_summary_says_what_the_records_say(reproduced: tuple[Path, Result]) -> None:
    folder = reproduced[0] / "fig6" / "smoke"
    summary = summary_of(reproduced[0], "smoke")
    assert summary["command"] == "isaac-newton reproduce fig6 --scale smoke --device cpu"
    assert summary["data"] == "toy-images (generated)"
    assert [panel["name"] for panel in summary["panels"]] == ["a", "b", "c"]
    assert [row["label"] for row in summary["rows"]] == ["∇", "ζ*, last layer"]
    assert len(summary["columns"]) == len(summary["rows"][0]["cells"]) == 3
    cells = fig6.cells(view(EXPERIMENTS["fig6"], reproduced[0], SCALES["smoke"]))
    tried = {trial for cell in cells.values() for round_ in cell.tried for trial in round_}
    assert len(tried) == 8 + 18
    for place, panel in enumerate(summary["panels"]):
        for curve, row in zip(panel["curves"], summary["rows"], strict=True):
            assert curve["epochs"] == [1, 2]
            cell = row["cells"][place]
            assert curve["mean"][-1] == pytest.approx(sum(cell["values"]) / 2) == cell["mean"]
            assert curve["std"][-1] == pytest.approx(abs(cell["values"][0] - cell["values"][1]) / math.sqrt(2))
            assert curve["n"] == cell["n"] == 2
    records = Store(folder).records()
    tried, compared = cells["c", "last"].tried
    first = min(tried, key=lambda trial: tried[trial])
    assert [trial.learning_rate for trial in compared] == [pytest.approx(by * first.learning_rate) for by in (1, 3, 10)]
    assert {trial.damping for trial in compared} == {first.damping}
    chosen = min(compared, key=lambda trial: compared[trial])
    assert summary["rows"][1]["cells"][2]["settings"] == f"η {chosen.learning_rate:g}, λ {chosen.damping:g}"
    finals = [
        record.final("test_accuracy")
        for record in sorted(records, key=lambda record: record.trial.seed)
        if (record.trial.steps, record.trial.method, record.trial.get("layers")) == (4, "sgd+isaac", "last")
        and record.trial.learning_rate == chosen.learning_rate
    ]
    assert summary["rows"][1]["cells"][2]["values"] == finals
    assert summary["times"]["eager"]["methods"]["none"]["ratio"]["median"] == 1


def test_what_is_there_is_used_and_what_is_missing_is_trained(reproduced: tuple[Path, Result], tmp_path: Path) -> None:
    shutil.copytree(reproduced[0], tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "fig6" / "smoke"
    whole = {record.trial: (dict(record.curve), record.digest) for record in Store(folder).records()}
    kept = (folder / "trials.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "trials.jsonl").write_bytes(b"".join(kept[:-1]))
    result = invoke("fig6", "--device", "cpu", "--workers", 1, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "1 run to go" in words(result)
    assert "1 of 1:" in words(result)
    assert (folder / "trials.jsonl").read_bytes().startswith(b"".join(kept[:-1]))
    assert {record.trial: (dict(record.curve), record.digest) for record in Store(folder).records()} == whole


def test_more_seeds_add_runs_and_drawing_alone_keeps_them(reproduced: tuple[Path, Result], tmp_path: Path) -> None:
    shutil.copytree(reproduced[0], tmp_path, dirs_exist_ok=True)
    result = invoke("fig6", "--device", "cpu", "--workers", 1, "--out", tmp_path, "--seeds", 3)
    assert result.exit_code == 0, result.output
    assert words(result).count("2 runs to go") == 3
    first = summary_of(tmp_path, "smoke")
    assert first["rows"][0]["cells"][0]["n"] == 3
    result = invoke("fig6", "--draw-only", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert summary_of(tmp_path, "smoke") == first


def test_there_is_nothing_to_draw_without_a_run(tmp_path: Path) -> None:
    result = invoke("fig6", "--draw-only", "--scale", "quick", "--out", tmp_path)
    assert result.exit_code == 2
    assert "isaac-newton reproduce fig6 --scale quick trains it" in words(result)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("command", ["reproduce fig6", "reproduce tab1", "reproduce fig1", "race mnist-mlp"])
def test_a_device_that_is_not_there_is_said(command: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, [*command.split(), "--scale", "smoke", "--device", "cuda", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "no CUDA device" in words(result)


def test_missing_images_are_said_and_nothing_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ISAAC_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    result = invoke("fig6", "--scale", "quick", "--device", "cpu", "--data", tmp_path, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "--data" in result.output
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


# Records that nobody trained

Accuracies = Mapping[tuple[str, str], Sequence[float]]


def fabricated(out: Path, accuracies: Accuracies, *, scale: str = "quick", ratio: float = 1.004, gpu: str = "a GPU") -> Path:
    """Trials and runs that end with these accuracies by setting and method, and times of steps."""
    budget, folder = fig6.BUDGETS[scale], out / "fig6" / scale
    shutil.rmtree(folder, ignore_errors=True)
    store = Store(folder)
    machine = {"cpu": "a processor", **({"gpu": gpu} if gpu else {})}
    about = {"data": "CIFAR-10", "checksum": "c", "arithmetic": "float32", "mode": "captured"}
    about |= {"commit": "abc", "versions": {"torch": "2"}, "machine": machine}

    def add(trial: Trial, points: list[dict[str, float]]) -> None:
        store.add(Record(trial, "finished", _columns(points), 0.002, about, "2026-01-01"))

    with store.writing():
        for (setting, name), finals in accuracies.items():
            trials = budget.candidates(setting, name)
            for place, trial in enumerate(trials):
                add(trial, [_point(trial.steps, 1 + place, 0.3)])
            for trial, final in zip(budget.runs(setting, trials[0], len(finals)), finals, strict=True):
                add(trial, [_point(step, 1, _climb(step / trial.steps, final, trial)) for step in trial.measured()])
        for mode in times.MODES:
            entries = [
                {
                    "name": name,
                    "seconds_per_step": {"median": 0.002 * own},
                    "ratio": {"median": own, "low": own - 0.001, "high": own + 0.001},
                }
                for name, own in {"none": 1.0, "last": ratio, "reduce": 1.2}.items()
            ]
            record = {"methods": entries, "left_out": {"max_rows": "cannot be one CUDA graph"}, "machine": machine}
            store.add_times(mode, {**record, "time": "2026", "commit": "abc", "arithmetic": "float32"})
        seeds = max((len(finals) for finals in accuracies.values()), default=0)
        store.note({"id": "fig6", "seeds": seeds, "calls": [{"command": "isaac-newton"}]})
    return folder


def _columns(points: Sequence[Mapping[str, float]]) -> dict[str, list[float | None]]:
    return {name: [point[name] for point in points] for name in points[0]}


def _point(step: int, loss: float, accuracy: float) -> dict[str, float]:
    return {"step": step, "train_loss": loss, "test_loss": 2 * loss, "test_accuracy": accuracy}


def _climb(share: float, final: float, trial: Trial) -> float:
    wave = 0.03 * math.sin(40 * share + trial.seed) * (1 - share)
    return 0.1 + (final - 0.1) * (1 - math.exp(-6 * share) * (1 - share)) + wave


#: Ahead everywhere: by little with momentum and weight decay, by much without.
AS_PRINTED: Accuracies = {
    ("a", "none"): (0.940, 0.941, 0.942),
    ("a", "last"): (0.943, 0.944, 0.945),
    ("b", "none"): (0.920, 0.921, 0.922),
    ("b", "last"): (0.930, 0.931, 0.932),
    ("c", "none"): (0.850, 0.851, 0.852),
    ("c", "last"): (0.880, 0.881, 0.882),
}


RESNET = [claim for claim in CLAIMS if claim.about == "fig6"]


def verdicts(out: Path) -> dict[str, Verdict]:
    evidence = Evidence(out, out / "none")
    return {claim.number: claim.check(evidence).verdict for claim in RESNET}


def test_the_paper_s_sentences_have_numbers_and_are_about_figure_6() -> None:
    assert [claim.number for claim in RESNET] == ["E4.5", "E4.5e", "E4.6", "E4.7", "E4.8"]
    assert all("p < 0.05" in claim.test for claim in RESNET[2:])


def test_what_was_printed_holds_where_the_records_say_it(tmp_path: Path) -> None:
    fabricated(tmp_path, AS_PRINTED)
    assert set(verdicts(tmp_path).values()) == {Verdict.HOLDS}
    evidence = Evidence(tmp_path, tmp_path)
    finding = checks.accuracies_better(evidence)
    assert "plain SGD: ζ* 88.10% ± 0.10% (n 3), ∇ 85.10% ± 0.10% (n 3), difference +3.00 points" in finding.figures
    assert finding.scale == "quick"


def test_a_difference_that_the_seeds_do_not_show_is_none(tmp_path: Path) -> None:
    fabricated(tmp_path, {**AS_PRINTED, ("a", "last"): (0.9405, 0.9412, 0.9419)})
    found = verdicts(tmp_path)
    assert found["E4.6"] == found["E4.7"] == Verdict.UNDECIDED
    assert found["E4.8"] == Verdict.HOLDS


def test_a_large_difference_in_the_default_training_is_not_small(tmp_path: Path) -> None:
    fabricated(tmp_path, {**AS_PRINTED, ("a", "last"): (0.973, 0.974, 0.975)})
    found = verdicts(tmp_path)
    assert found["E4.6"] == Verdict.HOLDS
    assert found["E4.7"] == found["E4.8"] == Verdict.FAILS


def test_plain_sgd_that_is_ahead_of_ours_decides_two_of_them(tmp_path: Path) -> None:
    fabricated(tmp_path, {("c", "none"): (0.9, 0.901), ("c", "last"): (0.85, 0.851)})
    found = verdicts(tmp_path)
    assert found["E4.6"] == found["E4.8"] == Verdict.FAILS
    assert found["E4.7"] == Verdict.UNKNOWN


@pytest.mark.parametrize(
    "accuracies",
    [
        {key: values for key, values in AS_PRINTED.items() if key[0] == "c"},
        {key: v[:1] for key, v in AS_PRINTED.items()},
        {key: v[: 2 if key[1] == "last" else 3] for key, v in AS_PRINTED.items()},
    ],
    ids=["one setting", "one seed", "seeds still to come"],
)
def test_part_of_the_runs_decides_nothing(tmp_path: Path, accuracies: Accuracies) -> None:
    fabricated(tmp_path, accuracies, gpu="")
    assert set(verdicts(tmp_path).values()) == {Verdict.UNKNOWN}


def test_without_records_or_with_smoke_records_nothing_is_decided(tmp_path: Path) -> None:
    assert set(verdicts(tmp_path).values()) == {Verdict.UNKNOWN}
    fabricated(tmp_path, AS_PRINTED, scale="smoke")
    assert set(verdicts(tmp_path).values()) == {Verdict.UNKNOWN}


@pytest.mark.parametrize(("ratio", "verdict"), [(1.02, Verdict.FAILS), (0.98, Verdict.FAILS), (1.009, Verdict.HOLDS)])
def test_times_lie_within_one_percent_or_do_not(tmp_path: Path, ratio: float, verdict: Verdict) -> None:
    fabricated(tmp_path, AS_PRINTED, ratio=ratio)
    found = verdicts(tmp_path)
    assert found["E4.5"] == found["E4.5e"] == verdict


def test_the_largest_scale_with_all_settings_counts(tmp_path: Path) -> None:
    fabricated(tmp_path, AS_PRINTED)
    fabricated(tmp_path, {("c", "none"): (0.9, 0.901), ("c", "last"): (0.85, 0.851)}, scale="paper")
    assert verdicts(tmp_path)["E4.6"] == Verdict.HOLDS
    fabricated(tmp_path, {**AS_PRINTED, ("c", "last"): (0.1, 0.1, 0.1)}, scale="paper")
    assert verdicts(tmp_path)["E4.6"] == Verdict.FAILS


def test_part_of_the_runs_is_drawn_and_what_was_left_out_is_said(tmp_path: Path) -> None:
    folder = fabricated(tmp_path, {("c", "none"): (0.9, 0.901), ("c", "last"): (0.85, 0.851), ("b", "none"): (0.9,)})
    known = view(EXPERIMENTS["fig6"], tmp_path, SCALES["quick"])
    paper.write(known)
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    summary = summary_of(tmp_path, "quick")
    assert [panel["name"] for panel in summary["panels"]] == ["b", "c"]
    assert summary["rows"][1]["cells"][:2] == [None, None]
    assert summary["panels"][0]["curves"][0]["std"] is None
    assert any("not trained at this scale" in note for note in summary["notes"])
    assert any("1.004 (1.003–1.005), ζ*, all layers, reduce 1.200" in note for note in summary["notes"])
    table = larger.accuracies(view(EXPERIMENTS["fig6"], tmp_path, SCALES["quick"]))
    assert len(table.columns) == len(table.rows[0].cells) == 6
    assert [row.cells[0] for row in table.rows] == ["(b) ∇", "(c) ∇", "(c) ζ*, last layer"]
    assert table.rows[2].cells[3:] == ("85.05% ± 0.07% (2)", "1.004", "1.004")
